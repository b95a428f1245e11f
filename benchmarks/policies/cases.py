"""The cases in which policies are compared: workloads, workers, loads and limits.

A load is the share of the time in which the prefill workers would be busy if nothing were cached and decode workers
computed no prompt. Above 1, the queues of a policy that uses no cache grow until the end of the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from benchmarks.policies.rivals import OURS, Named
from benchmarks.replays import ReplayRun
from core.config import RouterConfig, SchedulerConfig
from simulator import workloads
from simulator.cost_model import layout_8b
from simulator.replay_config import ReplayConfig
from simulator.workloads import Workload

CONVERSATION = Path("mooncake") / "conversation_trace.jsonl"
BLOCK_TOKENS = 512  # as in the conversation trace and in Dynamo's replay of it
SLO_TPOT_S = 0.05
NUM_AGENT_COPIES = 10  # the trace has 20 sessions


@cache
def conversation(traces: Path, limit: int | None) -> Workload:
    return workloads.mooncake(traces / CONVERSATION, limit)


@cache
def azure(traces: Path, limit: int | None) -> Workload:
    return workloads.azure(traces / "azure" / "AzureLLMInferenceTrace_conv.csv", limit)


@cache
def agents(traces: Path, limit: int | None) -> Workload:
    """The sessions several times, each copy at other times. Copies share only what different sessions share."""
    copies = [workloads.agent_sessions(traces / "agent_sessions.jsonl", 1.0, seed) for seed in range(NUM_AGENT_COPIES)]
    sessions: dict[int, set[int]] = {}  # session -> its blocks
    for request in copies[0].requests:
        sessions.setdefault(request.conversation, set()).update(request.hash_ids)
    num_sessions = Counter(hash_id for hash_ids in sessions.values() for hash_id in hash_ids)
    step = max(num_sessions) + 1
    requests = [
        replace(
            request,
            hash_ids=tuple(h + number * step if num_sessions[h] == 1 else h for h in request.hash_ids),
            session=request.conversation + number * len(sessions),
        )
        for number, copied in enumerate(copies)
        for request in copied.requests
    ]
    requests.sort(key=lambda request: request.arrives_at)
    return Workload("agent_sessions", requests[:limit])


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Callable[[Path, int | None], Workload]
    num_workers: int  # of each role
    pool_tokens: int  # of a prefill worker
    load: float
    slo_ttft_s: float

    @property
    def title(self) -> str:
        return f"{self.name}, load {self.load:g}"

    def run(self, policy: Named, seed: int, traces: Path, limit: int | None) -> ReplayRun:
        """Of the first `limit` requests."""
        config = replay_config(self.num_workers, self.pool_tokens, policy, self.slo_ttft_s, load=self.load, seed=seed)
        return ReplayRun(partial(self.workload, traces, limit), config)


def replay_config(
    num_workers: int, pool_tokens: int, policy: Named, slo_ttft_s: float, *, load: float | None, seed: int
) -> ReplayConfig:
    router = RouterConfig(max_in_flight_per_worker=1024, slo_ttft_ms=slo_ttft_s * 1e3)
    scheduler = SchedulerConfig(max_batched_tokens=8192, max_running=256, max_waiting=4096, slo_itl_ms=SLO_TPOT_S * 1e3)
    return ReplayConfig(
        num_prefill=num_workers,
        num_decode=num_workers,
        prefill_pool_tokens=pool_tokens,
        layout=layout_8b(BLOCK_TOKENS),
        load=load,
        seed=seed,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=SLO_TPOT_S,
        new_policy=partial(policy.build, router),
        router=router,
        scheduler=scheduler,
    )


CASES = {
    f"{key}-{load:g}": Case(name, workload, num_workers, pool_tokens, load, slo_ttft_s)
    for key, name, workload, num_workers, pool_tokens, loads, slo_ttft_s in (
        ("8x1", "conversation, 8 + 8 workers of 1 M tokens", conversation, 8, 1_000_000, (0.8, 1.1), 2.0),
        ("8x3", "conversation, 8 + 8 workers of 3 M tokens", conversation, 8, 3_000_000, (0.8, 1.1), 2.0),
        ("16x1", "conversation, 16 + 16 workers of 1 M tokens", conversation, 16, 1_000_000, (0.8, 1.1), 2.0),
        ("16x3", "conversation, 16 + 16 workers of 3 M tokens", conversation, 16, 3_000_000, (0.8, 1.1), 2.0),
        ("azure", "Azure conversations, 4 + 4 workers", azure, 4, 1_000_000, (0.8, 1.1), 0.5),
        ("agents", "agent sessions, 4 + 4 workers", agents, 4, 1_000_000, (2.0, 4.0), 1.0),
    )
    for load in loads
}


def dynamo_run(num_workers: int, pool_tokens: int, is_split: bool, workload: Callable[[], Workload]) -> ReplayRun:
    """The conversation trace at its own times, with as many workers and tokens of cache as a replay of Dynamo has.

    `is_split`: prefill workers with this cache, and as many decode workers; else decode workers alone.
    """
    config = replay_config(num_workers, pool_tokens, OURS, 2.0, load=None, seed=0)
    if not is_split:
        config = replace(config, num_prefill=0, decode_pool_tokens=pool_tokens)
    return ReplayRun(workload, config)
