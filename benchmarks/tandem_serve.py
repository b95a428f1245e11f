"""`tandem serve` as a measured program."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 300.0


@contextlib.contextmanager
def serving(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> Iterator[int]:
    """Run the command from its ready line to its end; its process id. `environment` is added to that of this process.

    Raises `RuntimeError` if the fleet does not start.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=directory, env=os.environ | dict(environment or {}),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        last_line = ""
        for line in process.stdout:
            last_line = line.strip()
            if last_line.startswith("serving "):
                break
        else:
            raise RuntimeError(f"tandem serve ended: {last_line}")
        yield process.pid
    finally:
        process.terminate()
        process.communicate(timeout=STOP_TIMEOUT_S)
