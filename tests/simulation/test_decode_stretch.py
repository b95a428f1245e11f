"""Steps of decodes that a replay handles together give the result of steps that it handles one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from simulator import replay_worker
from simulator.cost_model import layout_8b
from simulator.decode_stretch import stretch_length
from simulator.replay import Replay
from simulator.replay_config import ReplayConfig
from simulator.replay_result import ReplayResult
from simulator.trace import TraceRequest
from simulator.workloads import Workload

SMALL = ReplayConfig(
    num_prefill=2,
    num_decode=2,
    prefill_pool_tokens=65_536,
    decode_pool_tokens=65_536,
    load=0.3,
    step_noise=0.05,
)


def conversations(num_requests: int, output_tokens: int, seed: int) -> Workload:
    chance = random.Random(seed)
    requests = []
    for number in range(num_requests):
        num_blocks = chance.randint(1, 12)
        first = 100 * chance.randrange(num_requests // 2)
        requests.append(
            TraceRequest(
                arrives_at=0.2 * number,
                hash_ids=tuple(range(first, first + num_blocks)),
                num_tokens=512 * num_blocks - chance.randrange(512),
                num_output_tokens=chance.randint(1, output_tokens),
            )
        )
    return Workload("conversations", requests)


def both_ways(workload: Workload, config: ReplayConfig) -> tuple[Replay, ReplayResult, Replay, ReplayResult]:
    joined, single = Replay(workload, config), Replay(workload, replace(config, join_steps=False))
    return joined, joined.run(), single, single.run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": layout_8b(16)},
        {"num_routers": 2, "step_noise": 0.0},
        {"decode_pool_tokens": 16_384, "load": 2.0},
        {"num_prefill": 0, "load": 0.6},
        {"decode_cost": replace(SMALL.decode_cost, step_s=0.02)},
    ],
    ids=["plain", "small blocks", "two routers", "full pools", "undivided", "long steps"],
)
def test_joined_steps_give_the_result_of_single_steps(seed: int, changes: dict[str, object]) -> None:
    config = replace(SMALL, seed=seed, **changes)  # type: ignore[arg-type]
    joined, result, single, expected = both_ways(conversations(24, 300, seed), config)
    assert result.requests == expected.requests
    assert (result.itl_s, result.duration_s) == (expected.itl_s, expected.duration_s)
    assert result.decode_busy == pytest.approx(expected.decode_busy)
    assert joined.world.num_events < single.world.num_events
    for worker_id, worker in joined.workers.items():
        other = single.workers[worker_id]
        load, other_load = worker.machine.load(), other.machine.load()
        assert load == other_load
        assert worker.pool.registered_hashes() == other.pool.registered_hashes()


def test_most_steps_of_a_quiet_worker_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []
    skip_steps = replay_worker.skip_steps

    def count(machine: object, token_id: int, ends: list[float]) -> None:
        skipped.append(len(ends))
        skip_steps(machine, token_id, ends)  # type: ignore[arg-type]

    monkeypatch.setattr(replay_worker, "skip_steps", count)
    result = Replay(conversations(4, 500, 0), replace(SMALL, load=0.01)).run()
    num_tokens = sum(record.num_output_tokens for record in result.requests)
    assert sum(skipped) > num_tokens / 2


def test_no_step_is_joined_before_the_machine_has_one() -> None:
    replay = Replay(conversations(2, 5, 0), SMALL)
    machine = replay.workers["decode-0"].machine
    assert stretch_length(machine) == 1  # type: ignore[arg-type]
