"""What a prefix that is not computed again is worth: of a killed worker's disk, and of a peer.

disk     SmolLM2-135M on one core. 1,024 tokens of a prompt are computed, and written down; the worker is killed with
         signal 9 and starts again; then the same tokens come from disk, and others are computed as before
prefix   SmolLM2-135M on each worker. The first turn of a conversation has 1,024 tokens. For the second turn, a prefill
         worker that has joined reads them from the decode worker; a prompt of as many other tokens is computed
source   steps take a given time. 16 streams run on the decode worker while the new prefill worker takes 16 second
         turns, one each 1.25 s. It reads their histories from the decode worker, or, where it may not, computes them
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.asking import TIMEOUT_S, Answer, ask, random_prompts, streams, whole
from benchmarks.operations.moves import gaps_of
from benchmarks.report import Line, Report, percentile
from tandem_client import AsyncClient
from tests.support.service_process import BLOCK_SIZE, MOVING, Role, ServiceProcess, config_with, running

NUM_TOKENS = 1024
LEAST_RATIO = 1 / 0.35  # of the time to compute
NUM_TURNS, TURN_S = 16, 1.25
NUM_STREAMS, STREAM_TOKENS, STREAM_OUTPUT = 16, 64, 1100
STEP_S, TOKEN_S = 0.02, 0.001  # of a decode step; of a prompt token of the prefill worker, beside that
NUM_BLOCKS = 6144
REPORTED_S = 3.0  # until the router knows of the last blocks
LEAST_GAP_RATIO = 1 / 1.1
LEAST_READ = 0.75  # of the histories: on a busy machine a read may be late


async def disk(report: Report, repeats: int) -> None:
    computed, restored = [], []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
            known, other = random_prompts(2, NUM_TOKENS + 1, seed=repeat)
            config = config_with(cache={"disk_gb": 2.0, "disk_dir": directory})
            worker = Role("decode", config=config, step_s=None)
            with running(Role("router"), worker) as (router, process):
                before = await _ask(router, process, known)
                _wait_until_written(process, NUM_TOKENS // BLOCK_SIZE)
                process.kill()
            with running(Role("router"), worker) as (router, process):
                again = await _ask(router, process, known)
                fresh = await _ask(router, process, other)
            num_cached = again.finished.usage.cached_tokens
            if (num_cached, again.token_ids) != (NUM_TOKENS, before.token_ids):
                raise RuntimeError(f"{num_cached} tokens came from disk, or the answer is another one")
            computed.append(fresh.times[0] * 1e3)
            restored.append(again.times[0] * 1e3)
    _compare(report, computed, "first token after kill -9, {} tokens from disk", restored)


async def prefix(report: Report, repeats: int) -> None:
    read, computed = [], []
    for repeat in range(repeats):
        history, other = random_prompts(2, NUM_TOKENS + 1, seed=repeat)
        workers = [Role("prefill", ordinal=number, config=MOVING, step_s=None) for number in range(2)]
        with running(_router("auto"), *workers, Role("decode", config=MOVING, step_s=None)) as (front, *served):
            async with AsyncClient(front.address) as client:
                second = await _second_turn(client, front, served, [history])
                again = await _answer(client, second[0])
                fresh = await _answer(client, other)
        computed.append(fresh.times[0] * 1e3)
        if again.finished.receipt.read_tokens >= NUM_TOKENS:
            read.append(again.times[0] * 1e3)
    report.add(Line(f"second turns of {repeats} whose history was read", len(read), "turns", least=repeats))
    if not read:
        raise RuntimeError("no history was read")
    _compare(report, computed, "first token of a second turn, {} tokens from a peer", read)


def _compare(report: Report, computed: Sequence[float], measure: str, others: Sequence[float]) -> None:
    """Milliseconds of first tokens."""
    cold_ms = statistics.median(computed)
    report.add(Line(f"first token of a new prompt, {NUM_TOKENS} tokens computed", cold_ms, "ms"))
    found_ms = statistics.median(others)
    report.add(Line(measure.format(NUM_TOKENS), found_ms, "ms", "computing", cold_ms, least_ratio=LEAST_RATIO))


async def source(report: Report, repeats: int) -> None:
    gaps: dict[str, list[float]] = {"never": [], "auto": []}
    first: dict[str, list[float]] = {"never": [], "auto": []}
    for repeat in range(repeats):
        for option in gaps:
            of_streams, of_turns = await _beside_streams(option, repeat)
            gaps[option] += of_streams
            first[option] += of_turns
    for percent in (50, 99):
        without_ms, with_ms = (percentile(gaps[option], percent / 100) * 1e3 for option in gaps)
        what = f"gap of a stream of the source, p{percent}, {NUM_TURNS} histories read"
        report.add(Line(what, with_ms, "ms", "histories computed", without_ms, least_ratio=LEAST_GAP_RATIO))
    for option, times in first.items():
        what = f"... first token of these turns, peer_prefixes = {option}"
        report.add(Line(what, statistics.median(times) * 1e3, "ms"))


async def _beside_streams(option: str, seed: int) -> tuple[list[float], list[float]]:
    """The gaps of the streams while the turns came, and the times of the first tokens of these."""
    workers = [
        Role("prefill", ordinal=number, config=MOVING, step_s=STEP_S / 10, token_s=TOKEN_S, num_blocks=NUM_BLOCKS)
        for number in range(2)
    ]
    decode = Role("decode", config=MOVING, step_s=STEP_S, num_blocks=NUM_BLOCKS)
    with running(_router(option), *workers, decode) as (front, *served):
        async with AsyncClient(front.address) as client:
            histories = random_prompts(NUM_TURNS, NUM_TOKENS + 1, seed)
            turns = await _second_turn(client, front, served, histories)
            async with streams(client, random_prompts(NUM_STREAMS, STREAM_TOKENS, seed), STREAM_OUTPUT) as begun:
                since, answers = time.perf_counter(), list[Answer]()
                for number, turn in enumerate(turns):
                    await asyncio.sleep(since + number * TURN_S - time.perf_counter())
                    answers.append(await _answer(client, turn))
                until = time.perf_counter()
    num_read = sum(answer.finished.receipt.read_tokens >= NUM_TOKENS for answer in answers)
    if num_read < LEAST_READ * NUM_TURNS if option == "auto" else num_read:
        raise RuntimeError(f"with peer_prefixes = {option}, {num_read} of {NUM_TURNS} histories were read")
    found = [gap for stream in begun for gap in gaps_of(stream, since, until)]
    return found, [answer.times[0] for answer in answers]


def _router(peer_prefixes: str) -> Role:
    return Role("router", config=config_with(router={"local_prefill": "never", "peer_prefixes": peer_prefixes}))


async def _second_turn(
    client: AsyncClient, router: ServiceProcess, workers: Sequence[ServiceProcess], histories: Sequence[list[int]]
) -> list[list[int]]:
    """The prompts of the second turns. From here on, the first prefill worker takes no call."""
    first, second, decode = workers
    router.follow([first, decode])
    turns = []
    for history in histories:
        answer = await _answer(client, history)
        turns.append([*history, *answer.token_ids, 5, 6, 7])
    router.follow([second, decode])
    await asyncio.sleep(REPORTED_S)
    return turns


async def _answer(client: AsyncClient, prompt: list[int]) -> Answer:
    return whole(await ask(client, prompt, 4))


async def _ask(router: ServiceProcess, worker: ServiceProcess, prompt: list[int]) -> Answer:
    router.follow([worker])
    async with AsyncClient(router.address) as client:
        return await _answer(client, prompt)


def _wait_until_written(worker: ServiceProcess, num_blocks: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while worker.call("counters")["disk_writes"] < num_blocks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {num_blocks} blocks are on disk")
        time.sleep(0.05)
