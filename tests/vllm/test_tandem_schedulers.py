"""`TandemConnector` under vLLM's real scheduler, without its model: in each seed, the events have an order of their
own."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from benchmarks.service import ROOT
from cli.diagnosis.vllm_environment import python_of, variables
from core.config import VllmConfig
from tests.support.vllm_fleet import require_vllm

NUM_SEEDS = 20
HAPPENED = (
    "right", "received", "first tokens", "flipped", "failed", "cancelled", "preempted",
    "joined a step that writes its prefix", "prefixes read", "prefixes not read",
)  # fmt: skip
MOVED = (  # and, in some runs, "ends before the move": real threads take part
    "moves", "flipped", "reads that failed", "computed again", "lost owners", "lost readers", "readers that never came",
    "preempted", "right",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_no_wrong_block_and_no_lost_block_with_the_scheduler_of_vllm() -> None:
    """Chunks, equal prompts, preemptions, flipped bits and cancels, in an order that the seed draws."""
    done = schedule("tandem", NUM_SEEDS)
    assert done.returncode == 0, done.stderr[-4000:]
    happened = json.loads(done.stdout.splitlines()[-1])
    for name in HAPPENED:
        assert happened.get(name), f"no seed has {name}: {happened}"


@pytest.mark.timeout(600)
def test_a_block_that_is_offered_when_its_step_is_scheduled_is_found() -> None:
    done = schedule("tandem", NUM_SEEDS, "early")
    assert done.returncode
    assert "a block is offered before it is written" in done.stderr


@pytest.mark.timeout(600)
def test_streams_move_between_two_schedulers_of_vllm_without_a_wrong_token() -> None:
    done = schedule("moving", NUM_SEEDS)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    for name in MOVED:
        assert counts.get(name), f"no seed has {name}: {counts}"


@pytest.mark.timeout(600)
def test_tokens_that_a_reader_numbers_wrong_are_found() -> None:
    done = schedule("moving", NUM_SEEDS, "miscount")
    assert done.returncode
    assert "a wrong token" in done.stderr


def schedule(name: str, num_seeds: int, *planted: str) -> subprocess.CompletedProcess[str]:
    require_vllm()
    python = python_of(VllmConfig())
    command = [str(python), "-m", f"tests.support.{name}_schedulers", "0", str(num_seeds), *planted]
    environment = os.environ | variables(python) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
