"""A whole runner on the kernels, with rehearsed graphs and a poisoned pool: the tokens of the references."""

from __future__ import annotations

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView, StepPlan
from engine.gpu.runner import GpuRunner
from engine.runner import Runner, StepLimits, run_step
from engine.torch_runner import TorchRunner

CONFIG = EngineConfig(model="random:qwen3-tiny", dtype="float32", kv_memory_mb=1, num_threads=1, device="cpu")
PROMPTS = {"a": [5, 17, 200, 3, 9, 41] * 3, "b": [7, 7]}
SAMPLING = {
    "a": SamplingParams(max_tokens=4, temperature=0.0),
    "b": SamplingParams(max_tokens=4, temperature=0.9, top_p=0.9, seed=3),
}


def generate(runner: Runner) -> dict[str, list[int]]:
    """A prompt, its end beside a single token, and a graph of two decodes."""
    views = {
        name: SequenceView(name, list(prompt), len(prompt), blocks, SAMPLING[name])
        for (name, prompt), blocks in zip(PROMPTS.items(), ([3, 1], [4]), strict=True)
    }
    tokens: dict[str, list[int]] = {name: [] for name in views}
    parts = [{"a": (0, 15, False)}, {"a": (15, 3, True), "b": (0, 1, False)}]
    parts += [{"a": (18, 1, True), "b": (1, 1, True)}]
    for step_id, part in enumerate(parts):
        chunks = [
            ScheduledChunk(views[name], start, count, samples, False) for name, (start, count, samples) in part.items()
        ]
        for name, token in run_step(runner, StepPlan(step_id, tuple(chunks))).sampled.items():
            tokens[name].append(token.token_id)
            views[name].token_ids.append(token.token_id)  # type: ignore[attr-defined]
    return tokens


def test_the_kernels_give_the_tokens_of_the_torch_runner() -> None:
    plain = TorchRunner(CONFIG)
    expected = generate(plain)
    runner = GpuRunner(CONFIG, limits=StepLimits(2, 16))
    runner._pool.tensor.fill_(float("nan"))
    assert generate(runner) == expected
