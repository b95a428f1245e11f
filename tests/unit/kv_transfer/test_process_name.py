"""Whether a process of this pid namespace has died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kv_transfer.transports.process_name import has_died, own_process


def test_a_process_has_died_once_it_has_ended_even_before_anybody_waits_for_it() -> None:
    code = "from kv_transfer.transports.process_name import own_process; print(own_process(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name
    assert not has_died(name)
    process.kill()
    while not has_died(name):  # a killed process needs a moment
        pass
    assert process.poll() is not None
    process.stdin.close()
    process.stdout.close()


def test_this_process_lives_and_one_with_its_number_but_another_start_has_died() -> None:
    assert not has_died(own_process())
    assert has_died(own_process()[:-1] + "x")


def test_a_process_that_cannot_be_seen_counts_as_alive(tmp_path: Path) -> None:
    assert not has_died("pid:[1] 4194303 5")
    assert not has_died("")
    assert own_process(tmp_path) == ""
