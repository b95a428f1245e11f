"""Where the `tandem` command begins: before anything slow is imported, so that Ctrl-C is no traceback even then."""

from __future__ import annotations

import sys

from cli.exit_codes import INTERRUPTED


def run() -> None:
    try:
        from cli.main import run as run_command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run_command()
