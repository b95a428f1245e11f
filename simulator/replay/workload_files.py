"""A workload from a file of any known format, which its name and its first line tell."""

from __future__ import annotations

from pathlib import Path

from simulator.replay.request_log import request_log
from simulator.replay.request_trace import SCHEMA, request_trace
from simulator.replay.trace_rows import lines
from simulator.replay.workloads import Workload, agent_sessions, azure, mooncake

NO_FORMAT = (
    "must have usage (a log of calls), hash_ids (a trace of Mooncake), session (a trace of agents) or "
    f"schema {SCHEMA} (a trace of Dynamo)"
)
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NO_DIVISOR = "divisors are for published traces: logs of calls and traces of Dynamo have the lengths of their model"


def read_workload(
    path: Path,
    limit: int | None = None,
    divisor: int = 1,
    output_divisor: int = 1,
    sessions_per_s: float = 0.1,
    seed: int = 0,
) -> Workload:
    """The first `limit` requests. Raises `ValueError` naming file, line and field, and `OSError`."""
    first = next((line for _, line in lines(path, 1)), "")
    if path.name.removesuffix(".gz").endswith(".csv"):
        if missing := [name for name in AZURE_FIELDS if name not in first]:
            raise ValueError(f"{path}, line 1: {', '.join(missing)} must be there: a .csv is read as a trace of Azure")
        return azure(path, limit, divisor, output_divisor)
    is_dynamo = f'"{SCHEMA}"' in first
    if '"session"' in first and not is_dynamo:
        return agent_sessions(path, sessions_per_s, seed, limit, divisor, output_divisor)
    if is_dynamo or '"usage"' in first or '"error"' in first:
        if (divisor, output_divisor) != (1, 1):
            raise ValueError(f"{path}: {NO_DIVISOR}")
        return request_trace(path, limit) if is_dynamo else request_log(path, limit)
    if first.lstrip().startswith("{") and '"hash_ids"' not in first:
        raise ValueError(f"{path}, line 1: {NO_FORMAT}")
    return mooncake(path, limit, divisor, output_divisor)
