"""Thirty small worlds. A failing seed is named; `python -m simulator --seed N --verbose` replays it.

In no more, test_the_checks_can_fail.py finds each machine that is broken on purpose. `make soak` runs five thousand,
`make explore` fresh ones."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from simulator.__main__ import main
from simulator.search.orders import OrderKind
from simulator.search.scenario import make_scenario
from simulator.search.simulation import Result, run_scenario, run_seed

NUM_SEEDS = 30
STILL_SEED = 273  # without its fleet, an answer ends as its router dies, before its client resumes it
HARSH_SEEDS = (*range(11), 25)  # in the last, a hand-off gives way; replay with `python -m simulator --harsh --seed N`
DISK_SEEDS = range(25)  # replay with `python -m simulator --disk --seed N`
VLLM_SEEDS = range(15)  # replay with `python -m simulator --vllm --seed N`
BATCH = 10

# What has to have happened in some world, or the worlds prove less than they seem to.
FAULTS_THAT_MUST_HAPPEN = (
    "lost notification", "doubled notification", "slow read", "broken read", "corrupted block",
    "failed step", "dies", "vanishes", "stops", "drained to the end", "loses its report stream", "cut short",
    "loses its token stream", "router dies", "read of pieces", "step planned ahead", "dropped step",
    "sequence without memory", "drains",
    *(kind.value for kind in OrderKind), "refused order", "start fails", "killed by its fleet",
)  # fmt: skip
ANSWERS_THAT_MUST_HAPPEN = (
    "expired lease", "digest mismatch", "preemption", "retried", "READY repeated",
    "right guess", "wrong guess",
    "PeerLost", "ReadFailed", "path fine", "path slow", "path unreachable",
    "completed pull", "failed pull", "cancelled pull", "refused",
    "half-pulled together", "half-pulled while another is blocked", "hand-off gives way", "tenants share a worker",
    "finished disaggregated", "finished local", "finished recomputed", "finished migrated",
    "asks for a move: room", "move copying", "move pausing", "move handed_over", "refused MoveArrived",
    "resumed by the router",
    "failed DeadlineExceeded", "failed RequestCancelled", "failed QueueFull",
    "failed WorkerUnavailable", "failed TransferFailed", "failed TandemError",
    "failed with its router", "resumed", "finished before it was resumed",
    "switches its role", "prefix read", "prefix not read",
    "dropped: old", "dropped: late", "dropped: gap", "dropped: unknown_transfer",
)  # fmt: skip
ON_DISKS_MUST_HAPPEN = (
    "disk read complete", "disk read late", "disk read lost", "block from disk", "disk failed", "damaged slot", "dies",
)  # fmt: skip
VLLM_FAULTS_THAT_MUST_HAPPEN = (
    "engine dies", "engine hangs", "load fails", "kept KV is gone", "expired lease", "aborted in the engine", "dies",
    "vanishes", "stops", "drained to the end", "router dies", "finished disaggregated", "finished recomputed",
    "hand-off without an answer",
)  # fmt: skip


@cache
def result_of(seed: int) -> Result:
    return run_seed(seed)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_every_request_of_every_seed_ends_once_with_the_right_tokens_and_leaves_nothing_behind(first: int) -> None:
    failed = {}
    for seed in range(first, first + BATCH):
        try:
            result_of(seed)
        except AssertionError as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    assert not failed, f"replay with `python -m simulator --seed N --verbose`: {failed}"


@pytest.mark.parametrize(
    ("kind", "seeds", "must_happen"),
    [("disk", DISK_SEEDS, ON_DISKS_MUST_HAPPEN), ("vllm", VLLM_SEEDS, VLLM_FAULTS_THAT_MUST_HAPPEN)],
)
def test_nor_in_worlds_with_disks_or_with_vllm(kind: str, seeds: range, must_happen: tuple[str, ...]) -> None:
    totals: Counter[str] = Counter()
    for seed in seeds:
        totals += run_seed(seed, kind=kind).counts
    missing = [name for name in must_happen if not totals[name]]
    assert not missing, f"never happened: {missing}, but {dict(totals)}"


def test_the_faults_really_happened_and_were_answered() -> None:
    totals: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        totals += result_of(seed).counts
    for seed in HARSH_SEEDS:
        totals += run_seed(seed, kind="harsh").counts
    totals += run_scenario(make_scenario(STILL_SEED)).counts
    missing = [name for name in (*FAULTS_THAT_MUST_HAPPEN, *ANSWERS_THAT_MUST_HAPPEN) if not totals[name]]
    assert not missing, f"never happened: {missing}, but {dict(totals)}"
    assert not totals["failed InvalidRequest"], "a worker was asked for what its pool cannot hold"


@pytest.mark.slow
def test_a_service_dies_with_its_machine_in_one_of_three_hundred_worlds() -> None:
    assert any(result_of(seed).counts["dies with its machine"] for seed in range(300))


def test_most_requests_finish_in_spite_of_everything() -> None:
    totals: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        totals += result_of(seed).counts
    finished = sum(count for name, count in totals.items() if name.startswith("finished"))
    ended = finished + totals["refused"] + sum(count for name, count in totals.items() if name.startswith("failed "))
    ended -= totals["failed pull"] + totals["failed step"]
    num_choices = sum(len(client.choices) for seed in range(NUM_SEEDS) for client in make_scenario(seed).requests)
    assert ended == num_choices > 50 * NUM_SEEDS
    assert finished > 0.7 * ended  # a fifth of the clients cancel or have a short deadline


def test_a_replay_in_another_process_is_the_same_world() -> None:
    """The order of sets and hashes of strings differ between processes: nothing may depend on them."""
    program = "from simulator.search.simulation import run_seed; print(run_seed(3).log_hash)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) == result_of(3).log_hash


def test_the_command_replays_a_seed_and_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "client: r0," in out
    assert "completed pull" in out
