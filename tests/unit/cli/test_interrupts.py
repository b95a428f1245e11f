"""Ctrl-C and SIGTERM of `tandem serve` before its loop runs, and while Ray closes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from cli.exit_codes import INTERRUPTED

SERVE = """
import os, sys, time
import cli.commands.serve, fleet.ray.cluster
from cli.interrupts import run_interruptible
from cli.main import run

class Cluster:
    def close(self):
        print("closing", flush=True)
        if phase != "ends":
            time.sleep(TIMEOUT_S)

class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ending\\n")
        sleep(1.0)

async def drained():
    pass

def wait_for_ray():
    print("starting", flush=True)
    time.sleep(TIMEOUT_S)

fleet.ray.cluster.begin = lambda _: Cluster()
phase, sys.argv[1:] = sys.argv[1], ["serve", "--model", "fake:tiny", "--port", "0"]
cli.commands.serve.serve = lambda *_: wait_for_ray() if phase == "starts" else run_interruptible(drained, print)
slow = Slow() if phase == "ends" else None
run()
"""
TIMEOUT_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("phase", "lines", "code"),
    [
        ("starts", ["starting", "closing"], INTERRUPTED),
        ("closes", ["closing"], INTERRUPTED),
        ("ends", ["ending"], 0),  # of Python: the exit code stays
    ],
)
def test_a_signal_outside_the_loop_closes_ray_and_another_one_ends_the_process(
    phase: str, lines: list[str], code: int, number: signal.Signals
) -> None:
    program = SERVE.replace("TIMEOUT_S", str(TIMEOUT_S))
    with subprocess.Popen([sys.executable, "-c", program, phase], stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        for line in lines:
            assert f"{line}\n" in iter(serve.stdout.readline, "")
            serve.send_signal(number)
        assert serve.wait(TIMEOUT_S / 2) == code
