"""GpuRunner on a GPU: the tokens of the CPU in float32, with and without graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from engine.torch_runner import TorchRunner
from tests.support.transformers_models import FAMILIES, save_reference
from tests.unit.engine.driving import Engine, request
from text.grammars import GrammarReader
from text.output_format import regex_grammar
from text.tokenizer import load_tokenizer

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(model="random:llama3-tiny", dtype="float32", kv_memory_mb=16, device="cuda", num_threads=1)
LIMITS = StepLimits(max_running=8, max_batched_tokens=64)
PROMPT = [(7 * index + 3) % 250 for index in range(90)]
REQUESTS = [
    request("greedy", PROMPT[:40], max_tokens=30),
    request("drawn", PROMPT[3:20], temperature=0.9, top_p=0.9, top_k=30, seed=4),
    request("penalized", PROMPT[5:70], repetition_penalty=1.5, frequency_penalty=0.4, num_logprobs=2),
    request("short", PROMPT[:1]),
    request("written", PROMPT[:33], temperature=0.9, seed=4, ignore_eos=False, grammar=regex_grammar("[a-z ]{60}")),
]
READER = GrammarReader(lambda: load_tokenizer(CONFIG.model))


@pytest.mark.parametrize("with_graphs", [True, False])
def test_the_tokens_are_those_of_the_cpu(with_graphs: bool) -> None:
    plain = TorchRunner(replace(CONFIG, device="cpu"), grammars=READER)
    expected = Engine(plain, budget=30).generate(*REQUESTS)
    runner = GpuRunner(CONFIG, limits=LIMITS, with_graphs=with_graphs, grammars=READER)
    runner._pool.tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    assert Engine(runner, budget=30).generate(*REQUESTS) == expected
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    """Those of the CPU are the tokens of `transformers` (tests/unit/engine/test_model_against_transformers.py)."""
    save_reference(family, tmp_path, {"hidden_size": 192, "head_dim": 64})
    config = replace(CONFIG, model=str(tmp_path))
    requests = [request(str(length), [token % 128 + 3 for token in PROMPT[:length]]) for length in (1, 16, 90)]
    expected = Engine(TorchRunner(replace(config, device="cpu")), budget=30).generate(*requests)
    runner = GpuRunner(config, limits=LIMITS)
    assert Engine(runner, budget=30).generate(*requests) == expected
    runner.close()
