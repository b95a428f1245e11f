"""Entry point of the `tandem` command. It catches Ctrl-C also while the slow modules are imported."""

from __future__ import annotations

import sys

from cli.exit_codes import INTERRUPTED


def run() -> None:
    try:
        from cli.main import run as run_command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run_command()
