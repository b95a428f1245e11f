"""Faults of a GPU: memory that is missing, and an illegal access, which ends all work of its process on the device."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from core.config import EngineConfig
from core.errors import DeviceLost, OutOfDeviceMemory
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits, run_step

pytestmark = pytest.mark.gpu

SPAWN = multiprocessing.get_context("spawn")
BIG_PROMPT, ROOM_BYTES = 8000, 48 << 20  # its activations need more than this
NOWHERE = 1 << 28  # a block that no pool has


def prompt_step(name: str, length: int, first_block: int) -> ScheduledChunk:
    blocks = list(range(first_block, first_block + -(-length // 16)))
    view = SequenceView(name, [7] * length, length, blocks, SamplingParams(max_tokens=2, temperature=0.0))
    return ScheduledChunk(view, 0, length, samples=True, promised=False)


def runner(model: str, max_batched_tokens: int) -> GpuRunner:
    config = EngineConfig(model=model, dtype="bfloat16", kv_memory_mb=1024, device="cuda")
    return GpuRunner(config, limits=StepLimits(max_running=8, max_batched_tokens=max_batched_tokens))


def too_little_memory(answer: Connection) -> None:
    """A step with a small and a large prompt, while there is no memory for the large one, and then others like them."""
    built = runner("random:smollm2-135m", 8192)
    plan = StepPlan(0, (prompt_step("small", 40, 0), prompt_step("big", BIG_PROMPT, 10)))
    again = StepPlan(1, (prompt_step("small again", 40, 0), prompt_step("big again", BIG_PROMPT, 10)))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + ROOM_BYTES) / total, 0)
    short = run_step(built, plan)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    later = run_step(built, again)
    failed = {name: isinstance(error, OutOfDeviceMemory) for name, error in short.failed.items()}
    answer.send((failed, set(short.sampled), set(later.sampled)))


def illegal_access(answer: Connection) -> None:
    built = runner("random:llama3-tiny", 64)
    memory = built.device_memory()
    assert memory is not None
    with contextlib.suppress(DeviceLost):  # the error appears here already
        memory.digests([NOWHERE], built.layout.block_bytes)
    raised = None
    for _ in range(20):
        try:
            run_step(built, StepPlan(0, (prompt_step("a", 20, 0),)))
        except Exception as error:  # noqa: BLE001 (reported)
            raised = error
            break
    answer.send(isinstance(raised, DeviceLost))


def in_a_process(work: Callable[[Connection], None]) -> object:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(180), "the process did not answer"
        return ours.recv()
    finally:
        process.kill()  # a lost device may hang the end of the process
        process.join()


def test_a_prompt_without_memory_fails_alone_and_a_later_one_is_computed() -> None:
    assert in_a_process(too_little_memory) == ({"big": True}, {"small"}, {"small again", "big again"})


def test_an_illegal_access_is_a_lost_device_and_another_process_keeps_its_pool() -> None:
    pool = torch.randn(1 << 20, device="cuda")
    before = pool.clone()
    assert in_a_process(illegal_access)
    assert torch.equal(pool, before)
