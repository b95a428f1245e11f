"""Pure words and laws of Tandem. Nothing in here waits, reads a clock, draws a random number or does I/O."""
