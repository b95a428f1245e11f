"""`TandemConnector` under vLLM's real scheduler, without its model: in each seed, the events have an order of their
own."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from cli.diagnosis.vllm_environment import python_of, variables
from core.config import VllmConfig
from tests.support.service_process import ROOT
from tests.support.vllm_fleet import require_vllm

NUM_SEEDS = 20
HAPPENED = (
    "right", "received", "first tokens", "flipped", "failed", "cancelled", "preempted",
    "joined a step that writes its prefix", "prefixes read", "prefixes not read",
    "waited for a read of their prefix",
)  # fmt: skip
MOVED = (  # and, in some runs, "ends before the move": real threads take part
    "moves", "flipped", "reads that failed", "computed again", "lost owners", "lost readers", "readers that never came",
    "preempted", "right", "tokens of lost owners",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scheduled", "names"), [("tandem", HAPPENED), ("moving", MOVED)], ids=["hand-offs", "moves"])
def test_no_wrong_token_and_no_lost_block_with_the_scheduler_of_vllm(scheduled: str, names: tuple[str, ...]) -> None:
    """Chunks, equal prompts, preemptions, flipped bits, cancels and lost engines, in an order that the seed draws."""
    done = schedule(scheduled, NUM_SEEDS)
    assert done.returncode == 0, done.stderr[-4000:]
    happened = json.loads(done.stdout.splitlines()[-1])
    for name in names:
        assert happened.get(name), f"no seed has {name}: {happened}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scheduled", "planted", "found"),
    [
        ("tandem", "early", "a block is offered before it is written"),  # when its step is scheduled
        ("moving", "miscount", "a wrong token"),  # a reader counts one token too few
    ],
)
def test_a_planted_fault_is_found(scheduled: str, planted: str, found: str) -> None:
    done = schedule(scheduled, NUM_SEEDS, planted)
    assert (done.returncode, found in done.stderr) == (1, True), done.stderr[-4000:]


def schedule(name: str, num_seeds: int, *planted: str) -> subprocess.CompletedProcess[str]:
    require_vllm()
    python = python_of(VllmConfig())
    command = [str(python), "-m", f"tests.support.{name}_schedulers", "0", str(num_seeds), *planted]
    environment = os.environ | variables(python) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
