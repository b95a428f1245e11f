"""A workload from a file of any known format, which its name and its first line tell."""

from __future__ import annotations

from pathlib import Path

from simulator.replay.request_log import request_log
from simulator.replay.trace_rows import MAX_ROW_BYTES, open_regular
from simulator.replay.workloads import Workload, agent_sessions, azure, mooncake

NO_FORMAT = "must have usage (a log of calls), hash_ids (a trace of Mooncake) or session (a trace of agents)"
NO_DIVISOR = "divisors are for traces: a log of calls has the lengths of its own model"


def read_workload(
    path: Path,
    limit: int | None = None,
    divisor: int = 1,
    output_divisor: int = 1,
    sessions_per_s: float = 0.1,
    seed: int = 0,
) -> Workload:
    """The first `limit` requests. Raises `ValueError` naming file, line and field, and `OSError`."""
    if path.suffix == ".csv":
        return azure(path, limit, divisor, output_divisor)
    with open_regular(path) as file:
        first = file.readline(MAX_ROW_BYTES)
    if b'"session"' in first:
        return agent_sessions(path, sessions_per_s, seed, limit, divisor, output_divisor)
    if b'"usage"' in first or b'"error"' in first:
        if (divisor, output_divisor) != (1, 1):
            raise ValueError(f"{path}: {NO_DIVISOR}")
        return request_log(path, limit)
    if first.lstrip().startswith(b"{") and b'"hash_ids"' not in first:
        raise ValueError(f"{path}, line 1: {NO_FORMAT}")
    return mooncake(path, limit, divisor, output_divisor)
