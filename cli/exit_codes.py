"""The exit codes of the `tandem` command. Imports nothing: `cli/entry.py` needs it before anything slow."""

FAILED = 1  # an error, told in one line
INTERRUPTED = 130  # what a shell expects after Ctrl-C
