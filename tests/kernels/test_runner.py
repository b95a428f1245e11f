"""A whole runner on the kernels, with rehearsed graphs and a poisoned pool: the tokens of the references."""

from __future__ import annotations

from dataclasses import replace

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu.runner import GpuRunner
from engine.runner import Runner, StepLimits, run_step
from engine.torch_runner import TorchRunner

CONFIG = EngineConfig(model="random:qwen3-tiny", dtype="float32", kv_memory_mb=1, num_threads=1, device="cpu")
PROMPTS = {"a": [5, 17, 200, 3, 9, 41] * 3, "b": [7, 7, 1]}
SAMPLING = {
    "a": SamplingParams(max_tokens=4, temperature=0.0),
    "b": SamplingParams(max_tokens=4, temperature=0.9, top_p=0.9, seed=3),
}


def generate(runner: Runner) -> dict[str, list[int]]:
    """A mixed step with the end of a prompt, a chunked prompt and two decodes."""
    views = {
        name: SequenceView(name, list(prompt), len(prompt), blocks, SAMPLING[name])
        for (name, prompt), blocks in zip(PROMPTS.items(), ([3, 1], [4]), strict=True)
    }
    tokens: dict[str, list[int]] = {name: [] for name in views}
    parts = [{"a": (0, 7, False), "b": (0, 3, True)}, {"a": (7, 11, True), "b": (3, 1, True)}]
    parts += [{"a": (18 + step, 1, True), "b": (4 + step, 1, True)} for step in range(2)]
    for step_id, part in enumerate(parts):
        chunks = [
            ScheduledChunk(views[name], start, count, samples, False) for name, (start, count, samples) in part.items()
        ]
        for name, token in run_step(runner, StepPlan(step_id, tuple(chunks))).sampled.items():
            tokens[name].append(token.token_id)
            views[name].token_ids.append(token.token_id)  # type: ignore[attr-defined]
    return tokens


def test_a_pool_of_8_bits_keeps_the_logits_near_those_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    runner = GpuRunner(replace(CONFIG, kv_dtype="fp8"), limits=StepLimits(2, 16), with_graphs=False)
    runner._pool._bytes.fill_(0xFF)
    view = SequenceView("a", PROMPTS["a"], 18, [3, 1], SAMPLING["a"])
    for start, count in ((0, 17), (17, 1)):
        chunks = [ScheduledChunk(view, start, count, True, False)]
        found, expected = runner.logits(chunks), plain.logits(chunks)
        assert 0 < (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


def test_the_kernels_give_the_tokens_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    expected = generate(plain)
    runner = GpuRunner(CONFIG, limits=StepLimits(2, 16))
    runner._pool.tensor.fill_(float("nan"))
    assert generate(runner) == expected
