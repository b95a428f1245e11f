"""The reference for tokens: one co-located engine, one request at a time, without gRPC and hand-off."""

from __future__ import annotations

import functools
import random
from typing import Any

from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.scheduling.sequence import Sequence
from engine.factory import build_runner
from engine.runner import Runner, run_step
from text.grammars import GrammarReader
from text.tokenizer import load_tokenizer


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Prompts of two lengths or seeds share no block."""
    generator = random.Random(seed * 10_007 + length)
    return tuple(generator.randrange(1, 250) for _ in range(length))


class CoLocatedEngine:
    def __init__(self, config: EngineConfig) -> None:
        grammars = GrammarReader(functools.partial(load_tokenizer, config.model))
        self.runner: Runner = build_runner(config, grammars=grammars)

    def tokens(self, prompt: tuple[int, ...], num_output: int, **sampling: Any) -> list[int]:
        """Those that follow a prompt: greedy and all of them, unless `sampling` says otherwise."""
        params = SamplingParams(max_tokens=num_output, **({"temperature": 0.0, "ignore_eos": True} | sampling))
        return self.generate(Request("reference", prompt, len(prompt), params))

    def generate(self, request: Request) -> list[int]:
        """Output token ids, computed with an empty prefix cache."""
        pool = BlockPool(self.runner.num_blocks)
        layout, info = self.runner.layout, self.runner.info
        scheduler = Scheduler(SchedulerConfig(8192, max_running=1), pool, layout.block_size, info.eos_token_ids)
        sequence = Sequence(request, arrival=0)
        scheduler.add(sequence)
        while (plan := scheduler.schedule()) is not None:
            scheduler.complete_step(run_step(self.runner, plan))
        return sequence.token_ids[request.num_prompt_tokens :]

    def close(self) -> None:
        self.runner.close()
