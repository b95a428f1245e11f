"""Ends vLLM's processes with their worker, and removes their sockets.

vLLM starts an engine process, which starts a process for each GPU. They outlive a killed worker, hold its ports and its
memory, and a new engine beside them can hang. So the worker leads a process group, and a guardian in a session of its
own waits on a pipe that only the worker holds open. The pipe ends with the worker, however it ends, and then the
guardian kills the group. Sockets have names in a directory that only their user may open, and that goes with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

# Reads until the end of the pipe. Isolated (-I -S) Python: a bare interpreter starts in 10 ms and takes 8 MB.
_GUARD = """
import os, signal, sys
group, pipe, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
while os.read(pipe, 1):
    pass
try:
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
for name in os.listdir(directory):
    os.unlink(os.path.join(directory, name))
os.rmdir(directory)
"""


def lead_process_group() -> int:
    """Make this process the leader of a new process group, unless it leads one. Children join the group."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    return os.getpgrp()


class Guardian:
    """Kills the process group of this process when this process ends. Its children inherit no end of the pipe.

    `sockets`: a new directory for their sockets, removed after that.
    """

    def __init__(self) -> None:
        self.sockets = tempfile.mkdtemp(prefix="tandem-vllm-")
        group = lead_process_group()
        read_end, self._write_end = os.pipe()  # closed in children: PEP 446
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(group), str(read_end), self.sockets],
            pass_fds=(read_end,), start_new_session=True, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        os.close(read_end)
