"""The error behind vLLM's "See root cause above": a process of its engine has written it to the log, and then ended.

vLLM begins each line with the name and the id of its process. So the lines of a traceback are found, although the
processes of an engine write at the same time:

    (EngineCore pid=71) ERROR 11-27 08:00:01 [core.py:1510] Traceback (most recent call last):
    (EngineCore pid=71) ERROR 11-27 08:00:01 [core.py:1510]   File ...
    (EngineCore pid=71) ERROR 11-27 08:00:01 [core.py:1510] KeyError: 'layers.1'
"""

from __future__ import annotations

import os
import re
import stat

from core.errors import shortened
from core.plain_text import escaped

MAX_CAUSE_CHARS = 500
TAIL_BYTES = 256 * 1024
_LINE = re.compile(r"(?P<process>\([^()]* ?pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?(?P<text>.*)")
_POINTS_ELSEWHERE = re.compile(r"root cause|SystemExit|KeyboardInterrupt")


def root_cause(error: BaseException, output: str) -> str:
    """The last error in `output` that names a cause, if `error` only points to one; else `error`. One line."""
    told = f"{type(error).__name__}: {error}"
    cause = _last_error(output) if _POINTS_ELSEWHERE.search(told) else ""
    return shortened(escaped(cause or told), MAX_CAUSE_CHARS - 3)  # and three dots


def _last_error(output: str) -> str:
    """The last line of the last traceback in `output` that points to no other one; empty without one."""
    found, inside = "", set[str]()  # processes within a traceback
    for line in output.splitlines():
        parsed = _LINE.fullmatch(line)
        assert parsed is not None
        process, text = parsed["process"] or "", parsed["text"]
        if text.startswith("Traceback (most recent call last)"):
            inside.add(process)
        elif process in inside and text.strip() and not text.startswith(" "):
            inside.discard(process)
            found = found if _POINTS_ELSEWHERE.search(text) else text
    return found


def output_tail() -> str:
    """The end of what this process and its children have written, if it goes to files, as that of Ray's workers."""
    tails = {}
    for descriptor in (2, 1):  # vLLM logs to the second one, so its errors are the last ones
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                file.seek(max(0, status.st_size - TAIL_BYTES))
                tails[status.st_ino] = file.read(TAIL_BYTES).decode(errors="replace")
    return "\n".join(tails.values())
