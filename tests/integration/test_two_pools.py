"""Two pools say exactly what one engine says, token for token, and leave no block behind: in float32, up to the end of
the context, with quantized weights, with 8-bit KV, and with blocks of two sizes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from core.scheduling.block_pool import Column
from core.step import StepOutput
from tandem_client.stubs import inference_pb2
from tests.support.deployment import Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.faults import Stream, fault_config, prompt_of
from tests.support.reference import CoLocatedEngine, random_prompt
from tests.support.steps import runner_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
PROMPT_LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 3]
NUM_OUTPUT = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: str) -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(model, transport="nixl")) as deployment:
        yield deployment


@pytest.mark.parametrize("shared_blocks", [1, 4])
@pytest.mark.parametrize("warm", ["prefill", "decode", "both"])
async def test_prefix_hits_change_no_token(
    deployment: Deployment, engine: CoLocatedEngine, shared_blocks: int, warm: str
) -> None:
    """4 of 4 blocks shared is a full hit, 1 of 4 a partial one; the warm side has them, the other one does not."""
    first = random_prompt(4 * BLOCK, seed=1)
    second = first[: shared_blocks * BLOCK] + random_prompt((4 - shared_blocks) * BLOCK, seed=2)
    await deployment.generate(token_ids=first, max_tokens=2)
    await deployment.settle()
    if warm == "prefill":
        deployment.drop_caches(deployment.decode)
    if warm == "decode":
        deployment.drop_caches(deployment.prefill)

    answer = await deployment.generate(token_ids=second, max_tokens=NUM_OUTPUT)

    assert answer.token_ids == engine.tokens(second, NUM_OUTPUT)
    block_bytes = engine.runner.layout.block_bytes
    num_moved = 4 if warm == "prefill" else 4 - shared_blocks
    assert answer.finished.transferred_bytes == num_moved * block_bytes
    # The last token of a full hit is computed all the same, with its block.
    num_cached = 0 if warm == "decode" else min(shared_blocks, 3) * BLOCK
    assert answer.finished.usage.cached_tokens == num_cached


async def test_concurrent_mixed_requests_do_not_disturb_each_other(
    deployment: Deployment, engine: CoLocatedEngine
) -> None:
    shared = random_prompt(3 * BLOCK, seed=3)
    prompts = [shared[: 16 * (i % 4)] + random_prompt(1 + 7 * i % 90, seed=100 + i) for i in range(32)]
    prompts += [random_prompt(length, seed=200 + length) for length in PROMPT_LENGTHS]
    lengths = [1 + i % 13 for i in range(len(prompts))]
    answers = await asyncio.gather(
        *(deployment.generate(token_ids=p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True))
    )
    for answer, prompt, length in zip(answers, prompts, lengths, strict=True):
        assert answer.token_ids == engine.tokens(prompt, length)
        assert answer.indices == list(range(length))
    for answer, num_tokens in zip(answers[32:], PROMPT_LENGTHS, strict=True):
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
        assert answer.finished.transferred_bytes == -(-num_tokens // BLOCK) * engine.runner.layout.block_bytes


async def test_the_prompt_of_several_choices_moves_once_and_is_held_once(
    deployment: Deployment, engine: CoLocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_prompt, num_output = 1000, 24
    prompt = random_prompt(num_prompt, seed=8)
    request = make_request(token_ids=prompt, max_tokens=num_output, temperature=0.75, seed=7, n=4)
    token_ids: list[list[int]] = [[] for _ in range(4)]
    ends: dict[int, inference_pb2.Finished] = {}
    held = 0
    pool, runner = machine_of(deployment.decode[0]).core.pool, runner_of(deployment.decode[0])
    collect = runner.collect

    def note_held() -> StepOutput:
        nonlocal held
        held = max(held, pool.ledger()[Column.HELD])  # at each step: messages may come after the last one
        output: StepOutput = collect()
        return output

    monkeypatch.setattr(runner, "collect", note_held)
    async for response in deployment.inference.Generate(request, timeout=60):
        if response.HasField("finished"):
            ends[response.finished.choice] = response.finished
        else:
            token_ids[response.tokens.choice] += response.tokens.token_ids
    first, *others = (ends[choice] for choice in range(4))
    assert first.transferred_bytes == -(-num_prompt // BLOCK) * engine.runner.layout.block_bytes
    for end in others:
        assert (end.transferred_bytes, end.path) == (0, inference_pb2.REQUEST_PATH_LOCAL)
        assert end.usage.cached_tokens == num_prompt // BLOCK * BLOCK
    own = -(-(num_prompt % BLOCK + num_output) // BLOCK) + 1  # of each choice, behind the full blocks of the prompt
    assert num_prompt // BLOCK < held <= num_prompt // BLOCK + 4 * own
    for choice in range(4):
        assert ends[choice].seed == 7 + choice
        assert token_ids[choice] == engine.tokens(prompt, num_output, temperature=0.75, seed=7 + choice)


@pytest.mark.parametrize("length", [4 * BLOCK, 4 * BLOCK + 1])
async def test_prompt_and_output_may_fill_the_context(length: int) -> None:
    config = fault_config()
    async with deploy(replace(config, engine=replace(config.engine, max_context=length))) as deployment:
        for num_output in (1, 2, 17):
            for _ in range(2):  # the second time with a cached prompt
                stream = Stream(deployment.inference, prompt_of(1, length - num_output), num_output)
                await stream.right()
                assert stream.finished.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        await deployment.settle()


# ---- quantized weights, 8-bit KV, and blocks of two sizes


@pytest.mark.parametrize(
    ("kv_dtype", "prefill_block_size"), [("auto", BLOCK // 4), ("auto", BLOCK * 2), ("fp8", BLOCK), ("fp8", BLOCK // 4)]
)
async def test_pools_with_scales_or_blocks_of_two_sizes_say_what_one_engine_says_and_either_side_finds_prefixes(
    kv_dtype: str, prefill_block_size: int
) -> None:
    """The fake engine reads every byte of a slot, its scales too."""
    config = tiny_config(transport="nixl")
    own = replace(config.engine, kv_dtype=kv_dtype, block_size=BLOCK)
    engine = CoLocatedEngine(own)
    assert engine.runner.layout.has_scales == (kv_dtype == "fp8")
    config = replace(config, engine=replace(own, prefill_block_size=prefill_block_size))
    first = random_prompt(7 * BLOCK + 3)  # ends in the middle of a block of each size
    longer = first + random_prompt(40, seed=1)
    async with deploy(config) as deployment:
        sizes = [worker._parts.agent.address.layout.block_size for worker in deployment.workers]
        assert sizes == [prefill_block_size, BLOCK]
        for prompt, least_cached in ((first, 0), (first, 6 * BLOCK), (longer, 6 * BLOCK), (first[:BLOCK], 0)):
            answer = await deployment.generate(token_ids=prompt, max_tokens=12)
            assert answer.token_ids == engine.tokens(prompt, 12)
            assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED
            assert answer.finished.attempts == 1
            assert answer.finished.usage.cached_tokens >= least_cached
        await deployment.settle()
        deployment.drop_caches(deployment.decode)
        again = await deployment.generate(token_ids=first, max_tokens=12)
        assert again.token_ids == engine.tokens(first, 12)
        assert again.finished.transferred_bytes >= engine.runner.layout.block_bytes * 7, "the whole prompt moves again"
        await deployment.settle()
    engine.close()
