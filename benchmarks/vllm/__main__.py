"""A worker with vLLM inside beside the bare engine, and what Tandem's connector does: `make bench-vllm`.

    worker     32 streams go through a decode worker, over gRPC, and the same streams through its AsyncLLM: one engine,
               in turns (benchmarks/vllm/bare.py)

Between one prefill and two decode workers and a router in this process:

    handoff    prompts of 1,500 tokens in chunks of 256: from the first token, of P, to the second one, of D
    cancel     the same, cancelled at eight moments from the call to the last token: until P's ledger has no used block
    prefix     second turns, whose history a decode worker has: their first tokens where P reads it, and where P may not
    drain      a decode worker drains under eight streams of 160 tokens

A step is the median gap between later tokens of the same streams. The workers share the cores of this machine, as the
fleets of tests/vllm do, with the model in float32. Prompts are new each time, so nothing comes from a cache. The
goodput of whole fleets is in benchmarks/goodput, which the same target runs for a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.asking import TIMEOUT_S, Answer, ask, random_prompts, streams, whole
from benchmarks.dataplane.load import ask_worker
from benchmarks.operations.moves import failures, gaps_of, recomputed
from benchmarks.report import Line, Report, parser_of, percentile, run_parts
from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from runtime.rpc.grpc_server import MAX_GRPC_MESSAGE_BYTES, open_channel
from tandem_client import AsyncClient
from tandem_client.stubs import worker_pb2, worker_pb2_grpc
from tests.support.service_process import Role, ServiceProcess
from tests.support.vllm_fleet import CONFIG, VllmProcess, routed, started_workers

ALONE = {"engine": {"name": "vllm", "model": str(default_model_dir()), "kv_memory_mb": 2048}}
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
LEAST_SHARE, MOST_MS = 0.95, 1.0  # the goals: of the bare engine's tokens/s, and of a token's time
Workers = Mapping[str, VllmProcess]
PLACES = (("prefill", 0), ("decode", 0), ("decode", 1))
CHUNK = 256  # tokens of a step
CHANGES = {
    "vllm": {
        "connector": "tandem",
        "lease_s": 60.0,
        "args": [*CONFIG["vllm"]["args"], "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "32"],
    }
}
NUM_TOKENS, NUM_OUTPUTS = 1500, 12
MOST_STEPS = 1.5
NUM_CANCELS, MOST_FREE_MS, POLL_S = 8, 100.0, 0.005
HISTORY = 1024
NUM_STREAMS, STREAM_TOKENS, STREAM_OUTPUTS, MOST_GAP_STEPS = 8, 96, 160, 4.0


def measure_worker(report: Report, repeats: int) -> None:
    python = python_of(VllmConfig())
    role = Role("decode", config=ALONE, cores=(min(os.sched_getaffinity(0)),), step_s=None)
    worker = ServiceProcess(role, python=python, environment=variables(python))
    sizes = STREAMS, PROMPT_TOKENS
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "worker": []}
    try:
        for repeat in range(repeats + 1):
            alone = {"prompts": random_prompts(*sizes, 2 * repeat), "max_tokens": OUTPUT_TOKENS, "repeat": repeat}
            times = worker.call("apply", function="benchmarks.vllm.bare:bare", **alone)
            prompts = random_prompts(*sizes, 2 * repeat + 1)
            through = ask_worker(worker.address, prompts, OUTPUT_TOKENS)
            if repeat:  # the first one warms up
                found["bare"].append(figures(times))
                found["worker"].append(figures(through))
    finally:
        worker.stop()
    speeds, gaps = ({name: statistics.median(pair[place] for pair in pairs) for name, pairs in found.items()}
                    for place in (0, 1))  # fmt: skip
    streams = f"{STREAMS} streams of a worker"
    report.add(Line(f"{streams}: all tokens", speeds["worker"], "tokens/s", "bare AsyncLLM", speeds["bare"],
                    least_ratio=LEAST_SHARE))  # fmt: skip
    report.add(Line(f"{streams}: a token later than bare", (gaps["worker"] - gaps["bare"]) * 1e3, "ms", most=MOST_MS))


def figures(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Tokens of all streams a second, and the mean gap of a stream in seconds."""
    gaps = [after - before for of_one in times for before, after in pairwise(of_one)]
    return sum(map(len, times)) / max(of_one[-1] for of_one in times), statistics.fmean(gaps)


async def handoff(report: Report, workers: Workers, repeats: int) -> None:
    prompts = random_prompts(2 * repeats + 1, NUM_TOKENS, seed=1)
    async with routed([workers["prefill-0"], workers["decode-0"]], local_prefill="never") as (client, _):
        answers = [await _answer(client, prompt, NUM_OUTPUTS) for prompt in prompts][1:]  # the first one warms up
    second = statistics.median(answer.gaps[0] for answer in answers)
    step = statistics.median(gap for answer in answers for gap in answer.gaps[1:])
    name = f"hand-off of {NUM_TOKENS} tokens"
    first = statistics.median(answer.times[0] for answer in answers)
    report.add(Line(f"{name}: first token", first, "s"))
    report.add(Line("... a step of the decode worker", step * 1e3, "ms"))
    report.add(Line("... second token after the first", second * 1e3, "ms"))
    report.add(Line("... the same in steps", second / step, "steps", most=MOST_STEPS))


async def cancel(report: Report, workers: Workers, _: int) -> None:
    owner = workers["prefill-0"]
    prompts = random_prompts(NUM_CANCELS + 1, NUM_TOKENS, seed=2)
    async with routed([owner, workers["decode-0"]], local_prefill="never") as (client, _router):
        times = (await _answer(client, prompts[0], NUM_OUTPUTS)).times
        await _until_free(owner)
        seconds = []
        for number, prompt in enumerate(prompts[1:]):
            async with client.stream(prompt, TIMEOUT_S, max_tokens=NUM_OUTPUTS, ignore_eos=True) as stream:
                try:
                    async with asyncio.timeout(times[-1] * (number + 0.5) / NUM_CANCELS):
                        async for _piece in stream:
                            pass
                except TimeoutError:
                    pass
                cancelled_at = time.perf_counter()
            await _until_free(owner)
            seconds.append(time.perf_counter() - cancelled_at)
    name = f"blocks of P free after a cancel, {NUM_CANCELS} moments"
    report.add(Line(f"{name}: median", statistics.median(seconds) * 1e3, "ms"))
    report.add(Line("... the longest", max(seconds) * 1e3, "ms", most=MOST_FREE_MS))
    step = times[0] / -(-NUM_TOKENS // CHUNK)
    report.add(Line("... a step of P, which vLLM does not interrupt", step * 1e3, "ms"))


async def prefix(report: Report, workers: Workers, repeats: int) -> None:
    """Both kinds of turns are new to the prefill worker, which has computed none of the histories."""
    holder, prompts = workers["decode-0"], random_prompts(2 * repeats, HISTORY, seed=3)
    async with routed([holder]) as (client, _):
        turns = [[*prompt, *(await _answer(client, prompt, NUM_OUTPUTS)).token_ids, 5, 6, 7] for prompt in prompts]
    found: dict[str, list[Answer]] = {}
    for place, option in enumerate(("never", "auto")):
        pools = [workers["prefill-0"], holder]
        async with routed(pools, local_prefill="never", peer_prefixes=option) as (client, _):
            found[option] = [await _answer(client, turn, 4) for turn in turns[place::2]]
    read = [answer for answer in found["auto"] if answer.finished.receipt.read_tokens >= HISTORY // 2]
    report.add(Line(f"second turns of {repeats} whose history was read", len(read), "turns", least=repeats))
    computed_s, read_s = (statistics.median(answer.times[0] for answer in found[option]) for option in found)
    name = f"first token of a second turn, {HISTORY} tokens from a peer"
    report.add(Line(name, read_s * 1e3, "ms", peer="computing", peer_value=computed_s * 1e3))


async def drain(report: Report, workers: Workers, _: int) -> None:
    """Last of all: the worker ends."""
    source, target = workers["decode-1"], workers["decode-0"]
    prompts = random_prompts(NUM_STREAMS, STREAM_TOKENS, seed=4)
    async with routed([source]) as (client, router):
        async with streams(client, prompts, STREAM_OUTPUTS) as undisturbed:
            pass
        async with streams(client, prompts, STREAM_OUTPUTS) as begun:
            await router.set_workers([source.endpoint, target.endpoint])
            since = time.perf_counter()
            await source.drain()
            seconds = time.perf_counter() - since
    gaps = [gap for answer in begun for gap in gaps_of(answer, since)]
    step = statistics.median(gaps)
    equal = sum(answer.token_ids == before.token_ids for answer, before in zip(begun, undisturbed, strict=True))
    name = f"drain of a worker with {NUM_STREAMS} streams"
    report.add(Line(f"{name}: until it is empty", seconds, "s"))
    report.add(Line("... failed", failures(begun), "streams", most=0))
    report.add(Line("... with the tokens that they have without", equal, "streams", least=NUM_STREAMS))
    report.add(Line("... tokens computed again", recomputed(begun), "tokens"))
    report.add(Line("... a step", step * 1e3, "ms"))
    report.add(Line("... gaps p99, in steps", percentile(gaps, 0.99) / step, "steps", most=MOST_GAP_STEPS))
    report.add(Line("... the longest gap, in steps", max(gaps) / step, "steps"))


Part = Callable[[Report, Workers, int], Coroutine[Any, Any, None]]
PARTS: dict[str, Part] = {"handoff": handoff, "cancel": cancel, "prefix": prefix, "drain": drain}


async def _answer(client: AsyncClient, prompt: list[int], max_tokens: int) -> Answer:
    return whole(await ask(client, prompt, max_tokens))


async def _until_free(worker: VllmProcess) -> None:
    """Ends when no request and no peer uses a block of the worker, by its own ledger. Raises `TimeoutError`."""
    channel = open_channel(worker.endpoint.address, MAX_GRPC_MESSAGE_BYTES)
    stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                response = await stub.DescribeLedger(worker_pb2.DescribeLedgerRequest(), timeout=TIMEOUT_S)
                ledger = response.ledger
                if not ledger.held + ledger.leased + ledger.incoming:
                    return
                await asyncio.sleep(POLL_S)
    finally:
        await channel.close(None)


def main() -> None:
    arguments = parser_of(__doc__, ("worker", *PARTS), repeats=3).parse_args()
    if not python_of(VllmConfig()).exists():
        sys.exit("vLLM is not installed: run `make vllm`")
    report = Report("vllm")
    parts: dict[str, Callable[[], None]] = {"worker": lambda: measure_worker(report, arguments.repeats)}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        @functools.cache
        def workers() -> Workers:
            return stack.enter_context(started_workers(logs, *PLACES, changes=CHANGES))

        def run(part: Part) -> None:
            asyncio.run(part(report, workers(), arguments.repeats))

        parts |= {name: functools.partial(run, part) for name, part in PARTS.items()}
        run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
