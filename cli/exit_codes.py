"""The exit codes of the `tandem` command. Imports nothing, because cli/entry.py imports it first."""

FAILED = 1  # after an error of one line
INTERRUPTED = 130  # as shells expect after Ctrl-C
