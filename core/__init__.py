"""The data types and rules of Tandem. No code here waits, reads a clock, draws a random number or does I/O."""
