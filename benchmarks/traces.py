"""The traces of requests that benchmarks replay.

conversation_trace.jsonl is `FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from simulator.replay import workloads
from simulator.replay.workloads import Workload

TRACES = Path("../shared/traces")
CONVERSATION = Path("mooncake") / "conversation_trace.jsonl"


@cache
def conversation(traces: Path, limit: int | None) -> Workload:
    """The first `limit` requests of Mooncake's conversations. `traces`: the directory of the traces."""
    return workloads.mooncake(traces / CONVERSATION, limit)
