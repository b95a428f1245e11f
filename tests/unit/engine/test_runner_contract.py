"""The contract of every Runner, tested on the real runner for each family and on the fake."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.config import EngineConfig
from core.errors import ConfigError
from core.step import ScheduledChunk, StepPlan
from engine.drafting import Lookup
from engine.factory import build_runner
from engine.fake_runner import expected_tokens
from engine.gpu.runner import GpuRunner
from engine.runner import Runner, StepLimits, run_step
from model_files.model_source import load_model_info
from tests.unit.engine.driving import Engine, chunk_of, request

MODELS = ["fake:tiny", "random:llama-tiny", "random:llama3-tiny", "random:qwen2-tiny", "random:qwen3-tiny"]
# The runner of a GPU, with its references on the CPU; fp8 is its KV pool
ON_GPU = ["gpu random:llama-tiny", "gpu random:qwen3-tiny", "gpu-fp8 random:llama-tiny"]
PROMPT = [(7 * index + 3) % 250 for index in range(45)]


@pytest.fixture(params=[*MODELS, *ON_GPU], scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    kind, _, model = request.param.rpartition(" ")
    config = EngineConfig(model=model, dtype="float32", kv_memory_mb=4, num_threads=1, device="cpu")
    config = replace(config, kv_dtype="fp8" if kind == "gpu-fp8" else "auto")
    built = GpuRunner(config, limits=StepLimits(16, 512), drafter=Lookup()) if kind else build_runner(config)
    yield built
    built.close()


@pytest.fixture
def one_shot(runner: Runner) -> list[int]:
    """The greedy answer to PROMPT after a prefill in one step with a fresh pool."""
    return Engine(runner).generate(request("a", PROMPT))["a"]


@pytest.mark.parametrize("budget", [1, 5, 16, 17, 44])
def test_chunked_prefill_gives_the_same_tokens_as_one_shot(runner: Runner, one_shot: list[int], budget: int) -> None:
    assert Engine(runner, budget=budget).generate(request("a", PROMPT))["a"] == one_shot


@pytest.mark.parametrize("num_shared", [16, 31, 32, 44, 45])
def test_a_prefix_hit_gives_the_same_tokens_as_one_shot(runner: Runner, one_shot: list[int], num_shared: int) -> None:
    engine = Engine(runner)
    engine.generate(request("before", [*PROMPT[:num_shared], 1, 2, 3]))
    assert engine.generate(request("a", PROMPT))["a"] == one_shot
    assert engine.num_cached_tokens["a"] == num_shared // 16 * 16 > 0


def test_preemption_and_recompute_give_the_same_tokens_as_one_shot(runner: Runner) -> None:
    requests = [request(name, PROMPT[start:], max_tokens=24) for name, start in (("a", 0), ("b", 4), ("c", 9))]
    alone = {wanted.request_id: Engine(runner).generate(wanted)[wanted.request_id] for wanted in requests}
    cramped = Engine(runner, num_blocks=7)  # two prompts of three blocks, and one more block
    assert cramped.generate(*requests) == alone
    assert cramped.scheduler.num_preemptions > 0, "the pool was not small enough to preempt anybody"


def test_a_batch_gives_each_sequence_the_tokens_it_gets_alone(runner: Runner) -> None:
    lengths = (1, 2, 15, 16, 17, 45)
    requests = [request(str(length), PROMPT[:length], max_tokens=20) for length in lengths]
    alone = {wanted.request_id: Engine(runner).generate(wanted)[wanted.request_id] for wanted in requests}
    assert Engine(runner, budget=30).generate(*requests) == alone


def test_a_sequence_continues_from_copied_blocks_under_another_block_table(runner: Runner, one_shot: list[int]) -> None:
    """A minimal hand-off: copies the bytes of blocks and changes the block table."""
    last = len(PROMPT) + 1
    token_ids = [*PROMPT, one_shot[0]]
    run_step(runner, StepPlan(0, (_chunk(PROMPT, 0, len(PROMPT), [0, 1, 2]),)))
    pool = pool_bytes(runner).reshape(runner.num_blocks, -1)
    pool[[9, 5, 7]] = pool[[0, 1, 2]]
    pool[[0, 1, 2]] = 255
    output = run_step(runner, StepPlan(1, (_chunk(token_ids, last - 1, 1, [9, 5, 7]),)))
    assert output.sampled["a"][0].token_id == one_shot[1]


@pytest.mark.parametrize("leftover", [0, 7, 255])
def test_old_bytes_in_later_slots_change_no_token(runner: Runner, one_shot: list[int], leftover: int) -> None:
    run_step(runner, StepPlan(0, (_chunk(PROMPT, 0, 45, [0, 1, 2]), _chunk(PROMPT, 0, 5, [3], name="b"))))
    for slots in _slots(runner):
        slots[2, :, 13:] = slots[3, :, 5:] = leftover  # floats with every byte 255 are NaN
    chunks = (_chunk([*PROMPT, one_shot[0]], 45, 1, [0, 1, 2]), _chunk(PROMPT[:6], 5, 1, [3], name="b"))
    assert run_step(runner, StepPlan(1, chunks)).sampled["a"][0].token_id == one_shot[1]


@pytest.mark.parametrize("position", [0, 20, 44])
def test_wrong_bytes_in_one_slot_change_the_next_token(runner: Runner, position: int) -> None:
    chunk = _chunk([*PROMPT, 5], 45, 1, [0, 1, 2], num_logprobs=3)
    run_step(runner, StepPlan(0, (_chunk(PROMPT, 0, 45, [0, 1, 2]),)))
    (before,) = run_step(runner, StepPlan(1, (chunk,))).sampled["a"]
    assert run_step(runner, StepPlan(2, (chunk,))).sampled["a"] == (before,)
    for slots in _slots(runner):
        slots[position // 16, :, position % 16] = 60
    assert run_step(runner, StepPlan(3, (chunk,))).sampled["a"][0].top_logprobs != before.top_logprobs


def test_a_step_writes_its_own_slots_and_nothing_else(runner: Runner) -> None:
    arrays = _slots(runner)
    for slots in arrays:
        slots[:] = 7
    run_step(runner, StepPlan(0, (_chunk(PROMPT, 0, 20, [3, 1]), _chunk(PROMPT, 0, 10, [6], name="b"))))
    before = [slots.copy() for slots in arrays]
    run_step(runner, StepPlan(1, (_chunk(PROMPT, 20, 15, [3, 1, 4]), _chunk(PROMPT, 10, 1, [6], name="b"))))
    first = {(1, offset) for offset in range(4, 16)} | {(4, offset) for offset in range(3)}
    for slots, old in zip(arrays, before, strict=True):
        changed = {(block, offset) for block, _, offset, _ in np.argwhere(slots != old).tolist()}
        assert changed == first | {(6, 10)}


def test_each_sampling_chunk_and_no_other_chunk_gets_one_token(runner: Runner) -> None:
    chunks = (_chunk(PROMPT, 0, 45, [0, 1, 2]), _chunk(PROMPT, 0, 20, [3, 4], name="b"))
    output = run_step(runner, StepPlan(41, chunks))
    assert output.step_id == 41
    assert output.sampled.keys() == {"a"}
    assert run_step(runner, StepPlan(42, chunks[1:])).sampled == {}


def test_the_pool_is_page_aligned_writable_and_at_its_reported_address(runner: Runner) -> None:
    memory = runner.pool_memory()
    assert memory is not None
    assert not memory.readonly
    assert memory.nbytes == runner.num_blocks * runner.layout.block_bytes
    assert runner.pool_address() % mmap.PAGESIZE == 0
    assert np.frombuffer(memory, np.uint8).ctypes.data == runner.pool_address()


def test_a_runner_reports_its_model_info_and_layout(runner: Runner) -> None:
    assert runner.info == load_model_info(runner.info.name)
    assert runner.layout.model == runner.info.fingerprint


def test_the_fakes_tokens_equal_those_computed_without_a_pool() -> None:
    runner = build_runner(EngineConfig(model="fake:tiny"))
    wanted = request("a", PROMPT, temperature=0.8, seed=3, top_k=40, repetition_penalty=1.2, max_tokens=30)
    expected = expected_tokens(wanted, runner.layout, runner.info.vocab_size)
    assert len(expected) == 30
    assert Engine(runner, budget=11, num_blocks=6).generate(wanted)["a"] == expected


def test_the_error_for_too_small_a_pool_names_the_memory_to_set() -> None:
    with pytest.raises(ConfigError, match="set it to"):
        build_runner(EngineConfig(model="random:llama-tiny", kv_memory_mb=1, block_size=4096))


def test_a_max_context_beyond_the_models_context_is_refused() -> None:
    for model in ("random:llama-tiny", "fake:tiny"):
        with pytest.raises(ConfigError, match="max_context"):
            build_runner(EngineConfig(model=model, max_context=10**6, kv_memory_mb=1))


@pytest.mark.parametrize("num_right", [0, 1, 6, 10])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2}], ids=str)
def test_guesses_give_the_tokens_of_a_run_without_them(
    runner: Runner, num_right: int, sampling: dict[str, Any]
) -> None:
    """Right guesses give their tokens and one more; the first wrong one ends the run."""
    tokens = Engine(runner).generate(request("a", PROMPT, **sampling))["a"]
    options: dict[str, Any] = {"num_logprobs": 2, "temperature": 0.0, **sampling}
    run_step(runner, StepPlan(0, (_chunk(PROMPT, 0, 45, [0, 1, 2, 3], **options),)))
    drafts = [*tokens[1 : 1 + num_right], *(1 + token for token in tokens[1 + num_right : 12])]
    decode = _chunk([*PROMPT, tokens[0]], 45, 1, [0, 1, 2, 3], **options)
    bystander = _chunk(PROMPT[:20], 0, 20, [4, 5], name="b")
    alone = run_step(runner, StepPlan(1, (bystander, decode))).sampled
    several = run_step(runner, StepPlan(2, (decode._replace(drafts=tuple(drafts)), bystander))).sampled
    assert [token.token_id for token in several["a"]] == tokens[1 : 2 + num_right]
    assert several["a"][0].logprob == pytest.approx(alone["a"][0].logprob, abs=1e-5)
    assert several["b"] == alone["b"]
    after = _chunk([*PROMPT, *tokens[: 2 + num_right]], 46 + num_right, 1, [0, 1, 2, 3], **options)
    if 2 + num_right < len(tokens):
        assert run_step(runner, StepPlan(3, (after,))).sampled["a"][0].token_id == tokens[2 + num_right]


def test_a_bfloat16_runner_stores_kv_in_bfloat16() -> None:
    runner = build_runner(EngineConfig(model="random:qwen3-tiny", dtype="bfloat16", kv_memory_mb=1, num_threads=1))
    assert runner.layout.dtype == "bfloat16"


def test_threads_default_to_the_cores_this_process_may_use() -> None:
    import torch

    build_runner(EngineConfig(model="random:llama-tiny", kv_memory_mb=1))
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))


def pool_bytes(runner: Runner) -> np.ndarray:
    memory = runner.pool_memory()
    assert memory is not None
    return np.frombuffer(memory, np.uint8)


def _slots(runner: Runner) -> list[np.ndarray]:
    """Values, and scales if there are any, by slot. # views of [num_blocks, layers * 2 * heads, block_size, bytes]"""
    layout = runner.layout
    rows = layout.num_layers * 2 * layout.num_kv_heads
    blocks = pool_bytes(runner).reshape(runner.num_blocks, layout.block_bytes)
    return [
        blocks[:, first : first + rows * layout.block_size * size].reshape(len(blocks), rows, layout.block_size, size)
        for first, size in layout.arrays
    ]


def _chunk(
    token_ids: list[int], start: int, num_tokens: int, blocks: list[int], name: str = "a", **sampling: object
) -> ScheduledChunk:
    chunk = chunk_of(token_ids, start, num_tokens, blocks, name, **sampling)
    return chunk._replace(samples=start + num_tokens == len(token_ids))
