"""The computation of a step runs on the meta device, which has no values: the host waits for none."""

from __future__ import annotations

import pytest
import torch

from core.config import EngineConfig
from core.request import SamplingParams
from core.step import ScheduledChunk, SequenceView
from engine.gpu.step_arrays import StepArranger
from engine.gpu.step_attention import OperatorAttention, OperatorOps
from engine.gpu.step_buffers import places, tensors_in
from engine.linear import PlainLinear
from engine.loading import ModelSetup
from engine.model import Model, ModelInputs
from engine.model_weights import allocate_weights
from engine.rotary import RotaryTable
from model_files.builtin_configs import RANDOM_CONFIGS

META = torch.device("meta")
BLOCK_SIZE, NUM_BLOCKS = 16, 32


def chunk(name: str, start: int, count: int, samples: bool = True, promised: bool = False) -> ScheduledChunk:
    view = SequenceView(name, [1] * (start + count), start + count, list(range(16)), SamplingParams(max_tokens=1))
    return ScheduledChunk(view, start, count, samples, promised)


STEPS = {
    "prefill": [chunk("a", 0, 40), chunk("b", 0, 7)],
    "chunked prefill": [chunk("a", 24, 70, samples=False)],
    "decode": [chunk("a", 40, 1), chunk("b", 7, 1, promised=True)],
    "mixed": [chunk("a", 40, 1, promised=True), chunk("b", 16, 20), chunk("c", 3, 1, samples=False)],
}


@pytest.mark.parametrize("name", [name for name in RANDOM_CONFIGS if name.endswith("tiny")])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_reads_no_value_on_the_host(name: str, step: str) -> None:
    setup = ModelSetup.of(EngineConfig(model=f"random:{name}", device="cpu", dtype="bfloat16", num_threads=1), None)
    config, ops = setup.model_config, OperatorOps()
    model = Model(allocate_weights(config, torch.bfloat16, META), PlainLinear(ops), ops)
    table = RotaryTable(torch.empty(config.head_dim // 2, device=META), NUM_BLOCKS * BLOCK_SIZE)
    pool = torch.empty((NUM_BLOCKS + 1, *setup.layout.block_shape), dtype=torch.bfloat16, device=META)
    arrays = StepArranger(NUM_BLOCKS, BLOCK_SIZE).arrange(STEPS[step], {"a": 0, "b": 1})
    flat = torch.empty(places(arrays.sizes)[1], dtype=torch.int32, device=META)
    tensors = tensors_in(flat, arrays.sizes)
    attention = OperatorAttention(pool, table, tensors, arrays.max_context, lambda *_: 3)
    logits = model.compute(ModelInputs(tensors.token_ids, tensors.sampling_rows, attention))
    assert logits.is_meta
    assert logits.shape == (sum(chunk.samples for chunk in STEPS[step]), config.vocab_size)
