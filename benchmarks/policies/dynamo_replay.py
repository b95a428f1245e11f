"""Dynamo's own offline replay of the conversation trace, with its models of its workers, beside ours.

It runs in Dynamo's environment, which `make bench-peers` installs. Its workers compute prompts and outputs (it replays
no pool of prefill workers here), so two of our fleets stand beside it: as many decode workers alone, with the same
cache each, and the split of as many prefill workers with the same cache each, and decode workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks import install_peers

BLOCK_TOKENS = 512
TIMEOUT_S = 600.0

# Arguments: trace, workers, blocks of each worker, router. Prints the hit ratio, and TTFT p50 and p90 in ms.
PROGRAM = """
import json, sys
from dynamo.replay import run_trace_replay
trace, num_workers, num_blocks, router = sys.argv[1:]
report = run_trace_replay(
    [trace], num_workers=int(num_workers), router_mode=router, trace_block_size=512,
    extra_engine_args={"engine": {"block_size": 512, "num_gpu_blocks": int(num_blocks)}},
)
summary = (report if isinstance(report, dict) else report.to_dict())["summary"]
print(json.dumps([summary[name] for name in ("prefix_cache_reused_ratio", "median_ttft_ms", "p90_ttft_ms")]))
"""


class DynamoFigures(NamedTuple):
    hit_ratio: float
    ttft_p50_ms: float  # by Dynamo's model of a GPU
    ttft_p90_ms: float


def is_installed() -> bool:
    return install_peers.is_installed(install_peers.dynamo_dir())


def replay(trace: Path, limit: int | None, num_workers: int, pool_tokens: int) -> DynamoFigures:
    """The first `limit` requests with Dynamo's KV router. Raises `RuntimeError` with the last line of the program."""
    python = install_peers.dynamo_dir() / "bin" / "python"
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as part, trace.open(encoding="utf-8") as lines:
        part.writelines(islice(lines, limit))
        part.flush()
        arguments = [part.name, str(num_workers), str(pool_tokens // BLOCK_TOKENS), "kv_router"]
        done = subprocess.run(
            [python, "-c", PROGRAM, *arguments],
            env=os.environ | {"DYN_LOG": "error"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"Dynamo's replay failed: {done.stderr.strip().splitlines()[-1:]}")
    return DynamoFigures(*json.loads(done.stdout.splitlines()[-1]))
