"""The runner of a GPU on the CPU: graphs, steps with too little memory, steps launched ahead, poisoned pools."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError, DeviceLost, OutOfDeviceMemory
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu import graphs
from engine.gpu.device_queue import HostQueue
from engine.gpu.memory import MB, FakeAllocator
from engine.gpu.pool_size import PoolSizer
from engine.gpu.runner import GpuRunner
from engine.gpu.step_arrays import GraphSize
from engine.gpu.step_attention import fixed_splits
from engine.gpu.step_computer import StepComputer
from engine.kv_pool import KVPool
from engine.loading import ModelSetup
from engine.model import Model
from engine.runner import StepLimits, run_step
from engine.torch_runner import TorchRunner
from tests.unit.engine.driving import Engine, Scarce, chunk_of, request
from tests.unit.engine.one_ahead import OneAhead

PROMPT = [(7 * index + 3) % 250 for index in range(90)]
CONFIG = EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=2, num_threads=1, device="cpu")
LIMITS = StepLimits(max_running=8, max_batched_tokens=64)
REQUESTS = [
    request("greedy", PROMPT[:40]),
    request("drawn", PROMPT[3:20], temperature=0.9, top_p=0.9, top_k=30, seed=4),
    request("penalized", PROMPT[5:70], repetition_penalty=1.5, frequency_penalty=0.4, num_logprobs=2),
    request("short", PROMPT[:1]),
    request("least", PROMPT[:17], min_tokens=4, logit_bias={5: 2.0}),
]


def gpu_runner(prompt_graphs: bool = True, **options: Any) -> GpuRunner:
    """`prompt_graphs`: steps with prompts have graphs, too."""
    with pytest.MonkeyPatch.context() as patch:
        if not prompt_graphs:
            patch.setattr(graphs, "MAX_ROWS", 0)
        return GpuRunner(CONFIG, limits=LIMITS, **options)


@pytest.fixture(scope="module")
def runner() -> Iterator[GpuRunner]:
    built = gpu_runner(prompt_graphs=False)
    yield built
    built.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The tokens of the runner without graphs and operators."""
    plain = TorchRunner(CONFIG)
    tokens = Engine(plain, budget=30).generate(*REQUESTS)
    plain.close()
    return tokens


def poison(runner: GpuRunner) -> None:
    runner._pool.tensor.fill_(float("nan"))


def test_graphs_and_eager_steps_give_the_tokens_of_the_torch_runner_and_a_poisoned_pool_changes_none(
    runner: GpuRunner, expected: dict[str, list[int]]
) -> None:
    assert Engine(runner, budget=30).generate(*REQUESTS) == expected
    all_graphs = gpu_runner()
    poison(all_graphs)
    assert Engine(all_graphs, budget=30).generate(*REQUESTS) == expected
    eager = gpu_runner(with_graphs=False)
    assert Engine(eager, budget=30).generate(*REQUESTS) == expected


def test_each_step_takes_the_smallest_graph_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[GraphSize | None] = []
    launch = StepComputer.launch

    def noted(computer: StepComputer, staged: Any, size: GraphSize | None) -> Any:
        sizes.append(size)
        return launch(computer, staged, size)

    monkeypatch.setattr(StepComputer, "launch", noted)
    Engine(gpu_runner(), budget=64).generate(*REQUESTS[:3])
    prompts = [size for size in sizes if size is not None and size.prompts]
    assert [size[:2] for size in prompts] == [(64, 0), (64, 8)], "two prompts, then the third beside their decodes"
    assert set(sizes[2:]) == {GraphSize(4, 4), GraphSize(1, 1)}, (
        "three sequences take the graph of four, the last its own"
    )


def test_padding_and_a_warm_up_write_only_the_padding_block(runner: GpuRunner) -> None:
    poison(runner)
    assert runner._computer is not None
    with torch.inference_mode():
        runner._computer.warm_up()
    assert runner._pool.tensor[:-1].isnan().all()
    assert not runner._pool.tensor[-1].isnan().all()
    poison(runner)
    run_step(runner, StepPlan(0, tuple(chunk(name, 0, 1, [block]) for name, block in (("a", 0), ("b", 1), ("c", 2)))))
    written = runner._pool.tensor.isfinite().all(dim=-1).any(dim=3).any(dim=3).any(dim=1).any(dim=1)
    assert written.nonzero().flatten().tolist() == [0, 1, 2, runner.num_blocks]


def test_a_step_is_launched_behind_the_step_before_if_a_graph_computes_it() -> None:
    ahead = gpu_runner(prompt_graphs=False, queue=HostQueue(torch.device("cpu"), launches_ahead=True))
    first = chunk_of(PROMPT[:20], 0, 20, [0, 1])
    ahead.submit(StepPlan(0, (first,)))
    prompt = ahead._submitted[-1]
    ahead.submit(StepPlan(1, (first._replace(start=20, num_tokens=1, promised=True),)))
    decode = ahead._submitted[-1]
    assert (prompt.launched, decode.launched) == (False, False), "a prompt is launched by the thread that collects"
    ahead.collect()
    assert decode.launched
    ahead.submit(StepPlan(2, (first._replace(start=21, num_tokens=1, promised=True),)))
    assert ahead._submitted[-1].launched


def test_a_prompt_is_launched_ahead_behind_a_prompt_alone() -> None:
    """Its launch takes long, so it would delay the tokens of a short step."""
    ahead = gpu_runner(prompt_graphs=False, queue=HostQueue(torch.device("cpu"), launches_ahead=True))
    ahead.submit(StepPlan(0, (chunk("a", 0, 20, [0, 1]),)))
    ahead.submit(StepPlan(1, (chunk("b", 0, 30, [2, 3]),)))
    ahead.collect()
    assert ahead._submitted[-1].launched
    ahead.submit(StepPlan(2, (chunk("a", 20, 1, [0, 1]),)))
    ahead.collect()
    ahead.submit(StepPlan(3, (chunk("c", 0, 20, [4, 5]),)))
    ahead.collect()
    assert not ahead._submitted[-1].launched


def test_bfloat16_stays_near_float32(runner: GpuRunner) -> None:
    rounded = GpuRunner(replace(CONFIG, dtype="bfloat16"), limits=LIMITS)
    assert rounded.layout.dtype == "bfloat16"
    plans = [[chunk("a", 0, 60, [0, 1, 2, 3])], [chunk("a", 60, 1, [0, 1, 2, 3]), chunk("b", 0, 9, [5])]]
    for chunks in plans:
        torch.testing.assert_close(rounded.logits(chunks), runner.logits(chunks), atol=0.15, rtol=0.0)


# ---- out of memory


def chunk(name: str, start: int, count: int, blocks: list[int]) -> ScheduledChunk:
    return chunk_of(PROMPT, start, count, blocks, name)


def test_a_step_without_memory_is_computed_in_parts_with_the_same_tokens(
    runner: GpuRunner, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) > 20)
    assert Engine(runner, budget=20).generate(*REQUESTS) == expected
    assert scarce.num_refused == 0
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) > 24)
    assert Engine(runner, budget=30).generate(*REQUESTS[1:2], *REQUESTS[4:], *REQUESTS[3:4]) == {
        wanted.request_id: expected[wanted.request_id] for wanted in (REQUESTS[1], REQUESTS[4], REQUESTS[3])
    }
    assert scarce.num_refused > 0, "the memory was never scarce"


def test_a_chunk_that_fails_alone_fails_no_neighbour(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {
        name: run_step(runner, StepPlan(0, (chunk(name, 0, count, blocks),))).sampled[name]
        for name, count, blocks in (("b", 30, [2, 3]), ("d", 9, [5]))
    }
    run_step(runner, StepPlan(1, (chunk("c", 0, 7, [4]),)))
    alone["c"] = run_step(runner, StepPlan(1, (chunk("c", 7, 1, [4]),))).sampled["c"]
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) > 30)
    chunks = (chunk("a", 0, 31, [0, 1]), chunk("b", 0, 30, [2, 3]), chunk("c", 7, 1, [4]), chunk("d", 0, 9, [5]))
    output = run_step(runner, StepPlan(2, chunks))
    assert output.sampled == alone
    assert scarce.num_tokens == [1, 30, 9], "the decodes come first, then every prompt alone"
    assert scarce.num_refused == 2
    assert output.failed.keys() == {"a"}
    assert isinstance(output.failed["a"], OutOfDeviceMemory)
    assert output.failed["a"].__traceback__ is None, "a traceback would keep the tensors of the step"


def test_decodes_that_fail_together_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = gpu_runner(with_graphs=False)
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) > 1)
    output = run_step(eager, StepPlan(0, (chunk("a", 0, 1, [0]), chunk("b", 0, 1, [1]))))
    assert output.sampled.keys() == {"a", "b"}
    assert scarce.num_refused == 2


def test_the_step_behind_one_in_parts_gets_its_promised_tokens(
    runner: GpuRunner, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    views = {
        wanted.request_id: SequenceView(
            wanted.request_id, list(wanted.token_ids), wanted.num_prompt_tokens, blocks, wanted.sampling
        )
        for wanted, blocks in ((REQUESTS[0], [0, 1, 2, 3]), (REQUESTS[1], [4, 5, 6]), (REQUESTS[4], [7, 8, 9]))
    }
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) > 39)
    prompts = [ScheduledChunk(view, 0, len(view.token_ids), True, False) for view in views.values()]
    promised = [ScheduledChunk(view, len(view.token_ids), 1, True, True) for view in reversed(views.values())]
    runner.submit(StepPlan(0, tuple(prompts)))
    runner.submit(StepPlan(1, tuple(promised)))
    first, second = runner.collect(), runner.collect()
    assert scarce.num_refused == 2
    assert first.failed.keys() == second.failed.keys() == {"greedy"}
    for name in ("drawn", "least"):
        assert [first.sampled[name][0].token_id, second.sampled[name][0].token_id] == expected[name][:2]


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_random_plans_one_step_ahead_give_the_same_tokens_by_graphs(
    launches_ahead: bool, expected: dict[str, list[int]]
) -> None:
    ahead = gpu_runner(queue=HostQueue(torch.device("cpu"), launches_ahead=launches_ahead))
    poison(ahead)
    for seed in range(3):
        driver = OneAhead(ahead, random.Random(seed))
        assert driver.generate(REQUESTS) == expected
        assert driver.num_promised > 5


@pytest.mark.parametrize(("owner", "name"), [(StepComputer, "stage"), (Model, "compute")])
def test_a_device_that_is_lost_in_a_submission_or_a_step_ends_it_with_its_own_error(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    def lose(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(owner, name, lose)
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        run_step(runner, StepPlan(0, (chunk("a", 0, 5, [0]),)))


def test_inputs_that_find_no_memory_are_staged_again_in_parts(
    runner: GpuRunner, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, refused = StepComputer.stage, list[int]()

    def scarce(computer: StepComputer, chunks: Any, rows_before: Any) -> Any:
        if len(chunks) > 1 and len(refused) < 3:
            refused.append(len(chunks))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stage(computer, chunks, rows_before)

    monkeypatch.setattr(StepComputer, "stage", scarce)
    assert Engine(runner, budget=30).generate(*REQUESTS) == expected
    assert len(refused) == 3


# ---- the size of the pool


class MeasuredAllocator(FakeAllocator):
    """A device of 64 MB of which graphs take 8 MB."""

    def __init__(self) -> None:
        super().__init__(total=64 * MB, others=4 * MB)
        self.num_measured = 0

    def peak(self) -> int:
        self.num_measured += 1
        return super().peak() + 8 * MB * (self.num_measured == 3)


def sizer(config: EngineConfig, runner: GpuRunner, share: float = 1.0) -> tuple[PoolSizer, list[Any]]:
    """A sizer for the model of a runner, and weak references to the pools that it makes."""
    setup, pools = ModelSetup.of(config, None), list[Any]()
    assert runner._computer is not None
    model, queue = runner._computer._model, runner._queue

    def make_pool(num_blocks: int) -> KVPool:
        pool = KVPool(setup.layout, num_blocks, setup.device, 1)
        pools.append(weakref.ref(pool))
        return pool

    def make_computer(pool: KVPool) -> StepComputer:
        return StepComputer(setup, model, pool, LIMITS, queue, fixed_splits(1))

    return PoolSizer(setup, LIMITS, MeasuredAllocator(), share, make_pool, make_computer), pools


def test_an_automatic_pool_takes_what_weights_steps_graphs_and_margin_leave(runner: GpuRunner) -> None:
    config = replace(CONFIG, kv_memory_mb=0, gpu_memory_margin_mb=10)
    with torch.inference_mode():
        measured, pools = sizer(config, runner)
        block_bytes = runner.layout.block_bytes
        assert measured.num_blocks() == (64 - 4 - 8 - 10) * MB // block_bytes - 1
        assert len(pools) == 1
        assert pools[0]() is None, "the pool of the measured steps is gone"
        assert sizer(config, runner, share=0.5)[0].num_blocks() == (32 - 8 - 10) * MB // block_bytes - 1
        assert sizer(replace(config, kv_memory_mb=3), runner)[0].num_blocks() == 3 * MB // block_bytes


def test_steps_that_do_not_fit_beside_the_weights_are_refused_with_the_options_to_lower(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(monkeypatch, lambda inputs: len(inputs.token_ids) == LIMITS.max_batched_tokens)
    with torch.inference_mode(), pytest.raises(ConfigError, match="max_batched_tokens = 64 or max_running = 8"):
        sizer(CONFIG, runner)[0].num_blocks()
    assert scarce.num_refused == 1


def test_a_pool_that_does_not_fit_is_refused_with_the_options_to_change(runner: GpuRunner) -> None:
    config = replace(CONFIG, kv_memory_mb=60, gpu_memory_margin_mb=1)
    with torch.inference_mode(), pytest.raises(ConfigError, match="set kv_memory_mb to 0"):
        sizer(config, runner)[0].num_blocks()
