"""vLLM inside Tandem on one GPU: one prefill and two decode workers of an 8B model share it, under `tandem serve`.

    hand-offs      40 prompts, one after the other, each handed from the prefill worker to a decode worker by NIXL
    a kill of a decode worker, and one of the prefill worker, while streams run: every stream ends whole
    undivided      the same prompts again, once no prefill worker is left, and nothing comes from a cache

The tokens of the two passes are compared up to the first difference. In bfloat16 a batch of another shape rounds in
another way, so a difference counts as rounding if each pass has the other's token among its five most likely ones. The
model has 128,256 tokens, so wrong KV would not pass as rounding.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import psutil

from benchmarks.asking import ask, random_prompts, streams, until
from benchmarks.gpu_sections.section import TINY_MODEL, Section
from benchmarks.report import Line
from cli.credentials import client_of, find_credentials
from model_files.builtin_configs import RANDOM_CONFIGS
from tandem_client import AsyncClient, Completion
from tests.support.child_processes import tandem
from tools.hf_model import RANDOM_WEIGHTS, write_model

PORT = 50_681
ADDRESS = f"127.0.0.1:{PORT}"
TIMEOUT_S = 90.0
BLOCK = 16
KV_BYTES = 6 << 30  # of each worker; by itself, vLLM would measure what its neighbours take while they start
LENGTHS = [k * BLOCK + edge for k in (1, 2, 8, 64, 128) for edge in (-1, 0, 1)] + [1, 2, 5, 50, 100, 200, 333, 700]
NUM_PROMPTS, MAX_TOKENS, TINY_NUM_PROMPTS = 40, 16, 4
NUM_BEST = 5
NUM_STREAMS, STREAM_TOKENS, STREAM_PROMPT = 12, 600, 100
TINY_STREAM_TOKENS = 400  # at a millisecond each, the kill meets the streams
LONG_PROMPT = 2048
START_S, REST_S = 110.0, 40.0


class Likeness(Enum):
    """Of the tokens in two pools to those of an undivided worker."""

    EQUAL = "equal"
    ROUNDED = "equal up to a difference of rounding"
    WRONG = "different"


def run(section: Section) -> None:
    has_engine = section.has_fleets() and (section.rehearse or section.has_vllm())
    if not (has_engine and section.has_time_for(START_S + REST_S, "vLLM inside")):
        return
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        with tandem(PORT, config=config_of(section, Path(directory))):
            section.add(Line("start of the fleet", time.perf_counter() - start, "s"))
            asyncio.run(measure(section))


def config_of(section: Section, directory: Path) -> str:
    """The text of the config file. A rehearsal has Tandem's own engine in place of vLLM."""
    fleet = '[router]\nlocal_prefill = "never"\nworker_wait_s = 60.0\n[cluster]\nnum_decode = 2\n'
    if section.rehearse:
        return f'[engine]\nmodel = "{TINY_MODEL}"\ndevice = "cpu"\nkv_memory_mb = 64\n{fleet}'
    write_model(directory, RANDOM_CONFIGS["llama-3.1-8b"])
    args = [*RANDOM_WEIGHTS, "--kv-cache-memory-bytes", str(KV_BYTES)]
    return (
        f'[engine]\nname = "vllm"\nmodel = "{directory}"\ndtype = "bfloat16"\ndevice = "cuda"\nmax_context = 8192\n'
        f"[vllm]\nargs = {args}\n{fleet}prefill_gpus = 0.3\ndecode_gpus = 0.3\n"
    )


async def measure(section: Section) -> None:
    prompts = make_prompts(section)
    async with client_of(ADDRESS, find_credentials(None, ADDRESS)) as client:
        passes: dict[str, list[Completion]] = {}
        with section.section("hand-offs"):
            passes["divided"] = await one_by_one(client, prompts, "divided")
            report_paths(section, "hand-offs", passes["divided"])
            await measure_second_token(section, client)
        with section.section("kill of a decode worker"):
            await kill_under_streams(section, client, "decode", STREAM_PROMPT)
        with section.section("kill of the prefill worker"):
            await kill_under_streams(section, client, "prefill", LONG_PROMPT)
        with section.section("undivided"):
            await client.scale(prefill=0)
            await until(client, lambda fleet: not any(one.worker_id.startswith("prefill") for one in fleet.workers))
            passes["undivided"] = await one_by_one(client, prompts, "undivided")
            report_paths(section, "undivided", passes["undivided"])
            report_likeness(section, passes["divided"], passes["undivided"])


def make_prompts(section: Section) -> list[list[int]]:
    """Around the edges of blocks, and of random lengths up to 3,000 tokens."""
    draws = random.Random(0)
    count, longest, ids = (TINY_NUM_PROMPTS, 60, (3, 250)) if section.rehearse else (NUM_PROMPTS, 3000, (300, 128_000))
    lengths = [min(length, longest) for length in LENGTHS]
    lengths += [draws.randint(1, longest) for _ in range(count)]
    return [random_prompts(1, length, number, ids)[0] for number, length in enumerate(lengths[:count])]


# ---- tokens


async def one_by_one(client: AsyncClient, prompts: Sequence[Sequence[int]], salt: str) -> list[Completion]:
    """Alone, each prompt is computed in the same shape in both passes."""
    return [
        await client.complete(
            list(prompt), TIMEOUT_S, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=NUM_BEST,
            cache_salt=salt,
        )
        for prompt in prompts
    ]  # fmt: skip


def report_paths(section: Section, what: str, answers: Sequence[Completion]) -> None:
    paths = Counter(answer.path for answer in answers)
    section.note(
        f"{what}: paths of {len(answers)} prompts: {dict(paths)}, attempts {sum(a.num_attempts for a in answers)}"
    )
    if what == "hand-offs":
        section.add(Line("prompts handed off", paths["disaggregated"], "", least=len(answers)))


def report_likeness(section: Section, divided: Sequence[Completion], undivided: Sequence[Completion]) -> None:
    found = Counter(likeness(one, other) for one, other in zip(divided, undivided, strict=True))
    section.note(", ".join(f"{found[kind]} prompts {kind.value}" for kind in Likeness))
    good = len(divided) - found[Likeness.WRONG]
    section.add(Line("prompts with the tokens of an undivided worker, but for rounding", good, "", least=len(divided)))


def likeness(divided: Completion, undivided: Completion) -> Likeness:
    for one, other in zip(divided.logprobs, undivided.logprobs, strict=True):
        if one.token_id != other.token_id:
            best = [{entry.token_id for entry in place.top[:NUM_BEST]} for place in (one, other)]
            is_near = other.token_id in best[0] and one.token_id in best[1]
            return Likeness.ROUNDED if is_near else Likeness.WRONG
    return Likeness.EQUAL


async def measure_second_token(section: Section, client: AsyncClient) -> None:
    """The hand-off lies between the first and the second token. The first repeat also connects the workers."""
    length, ids = (40, (3, 250)) if section.rehearse else (LONG_PROMPT, (300, 128_000))
    prompts = random_prompts(6, length, 1, ids)
    gaps = [(await ask(client, prompt, 8, TIMEOUT_S)).gaps for prompt in prompts]
    for name, values in (("second token after the first", [gap[0] for gap in gaps]),
                         ("later gaps", [value for gap in gaps for value in gap[1:]])):  # fmt: skip
        section.add(Line(f"{length:,} tokens handed off: {name}", statistics.median(values) * 1e3, "ms"))


# ---- kills


async def kill_under_streams(section: Section, client: AsyncClient, role: str, prompt_tokens: int) -> None:
    """Kill the busiest decode worker in the midst of the streams, or the prefill worker in the midst of the prompts."""
    num_tokens, ids = (TINY_STREAM_TOKENS, (3, 250)) if section.rehearse else (STREAM_TOKENS, (300, 128_000))
    prompt_tokens = min(prompt_tokens, 60) if section.rehearse else prompt_tokens
    prompts = random_prompts(NUM_STREAMS, prompt_tokens, role, ids)
    until = asyncio.FIRST_COMPLETED if role == "prefill" else asyncio.ALL_COMPLETED
    async with streams(client, prompts, num_tokens, until) as answers:
        workers = [worker for worker in (await client.fleet()).workers if worker.worker_id.startswith(role)]
        victim = max(workers, key=lambda worker: worker.load.num_running)
        num_begun = sum(bool(answer.times) for answer in answers)
        os.kill(listener(victim.address), signal.SIGKILL)
        killed_at = time.perf_counter()
    failed = [answer.error or "too few tokens" for answer in answers if len(answer.times) != num_tokens]
    what = f"kill -9 of {victim.worker_id} under {len(answers)} streams"
    attempts = sum(answer.finished.attempts for answer in answers)
    section.note(f"{what}: {num_begun} had begun, {attempts} attempts in all")
    section.add(Line(f"{what}: whole", len(answers) - len(failed), "", least=len(answers)))
    paused = [max((t for t in answer.times if t > killed_at), default=killed_at) for answer in answers]
    longest = max(gap for answer in answers for gap in [*answer.gaps, 0.0])
    section.add(Line(f"{what}: the longest gap", longest, "s"))
    section.add(Line(f"{what}: from the kill to the last token of all", max(paused) - killed_at, "s"))
    if failed:
        raise RuntimeError(f"{what}: {failed[0]}")


def listener(address: str) -> int:
    """The process that listens at `host:port`."""
    port = int(address.rpartition(":")[2])
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    )
