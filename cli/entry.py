"""Entry point of the `tandem` command. It catches Ctrl-C also while the slow modules are imported."""

from __future__ import annotations

import os
import sys

from cli.exit_codes import INTERRUPTED


def run() -> None:
    _open_closed_streams()
    try:
        from cli.main import run as run_command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run_command()


def _open_closed_streams() -> None:
    """Open /dev/null in place of a closed standard stream: Ray refuses a missing stderr, and a file or a socket that
    takes the free descriptor would get what a library prints there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  takes the lowest free descriptor
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
