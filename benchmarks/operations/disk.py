"""A worker is killed, starts again, and answers a prompt whose prefix lies on its disk.

disk    SmolLM2-135M on one core. 1,024 tokens of a prompt are computed, and written down; the worker is killed with
        signal 9 and starts again; then the same tokens come from disk, and others are computed as before
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.asking import Answer, ask, random_prompts
from benchmarks.report import Line, Report
from benchmarks.service import BLOCK_SIZE, MeasuredProcess, Role, running
from tandem_client import AsyncClient

NUM_TOKENS, TIMEOUT_S = 1024, 300.0
LEAST_RATIO = 1 / 0.35  # of the time to compute


async def run(report: Report, repeats: int) -> None:
    computed, restored = [], []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
            known, other = random_prompts(2, NUM_TOKENS + 1, seed=repeat)
            worker = Role("decode", step_s=None, disk_dir=directory)
            with running(Role("router"), worker) as (router, process):
                before = await _ask(router, process, known)
                _wait_until_written(process, NUM_TOKENS // BLOCK_SIZE)
                process.kill()
            with running(Role("router"), worker) as (router, process):
                again = await _ask(router, process, known)
                fresh = await _ask(router, process, other)
            num_cached = 0 if again.finished is None else again.finished.usage.cached_tokens
            if (num_cached, again.token_ids) != (NUM_TOKENS, before.token_ids):
                raise RuntimeError(f"{num_cached} tokens came from disk, or the answer is another one")
            computed.append(fresh.times[0] * 1e3)
            restored.append(again.times[0] * 1e3)
    cold_ms = statistics.median(computed)
    report.add(Line(f"first token of a new prompt, {NUM_TOKENS} tokens computed", cold_ms, "ms"))
    report.add(
        Line(
            f"first token after kill -9, {NUM_TOKENS} tokens from disk", statistics.median(restored), "ms",
            peer="computing", peer_value=cold_ms, least_ratio=LEAST_RATIO,
        )
    )  # fmt: skip


async def _ask(router: MeasuredProcess, worker: MeasuredProcess, prompt: list[int]) -> Answer:
    router.follow([worker])
    async with AsyncClient(router.address) as client:
        answer = await ask(client, prompt, 4, TIMEOUT_S, time.perf_counter())
    if answer.error or answer.finished is None:
        raise RuntimeError(answer.error or "the answer has no end")
    return answer


def _wait_until_written(worker: MeasuredProcess, num_blocks: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while worker.call("counters")["disk_writes"] < num_blocks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {num_blocks} blocks are on disk")
        time.sleep(0.05)
