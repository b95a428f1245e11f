"""The same prompts through our engine and through continuous batching of `transformers`, each in a process of its own.

Both have random weights of the same 8B shapes, greedy decoding and no stop token. The time runs from the first prompt
to the last token, after a short batch that compiles kernels. Ours goes first, so the peer cannot cost its figures.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from benchmarks.child_process import ChildProcess
from benchmarks.gpu_sections.harness import ROOT
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line

PEER = "transformers"
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, (256, 1024), 128
TINY = (3, (8, 30), 4)
PEER_S = 30.0
LEAST_RATIO = 3.0


def run(section: Section) -> None:
    num_prompts, lengths, num_output = TINY if section.rehearse else (NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    draw = random.Random(0)
    prompts = [[draw.randint(3, 255) for _ in range(draw.randint(*lengths))] for _ in range(num_prompts)]
    measure = f"{num_prompts} prompts of {lengths[0]} to {lengths[1]:,} tokens, {num_output} tokens each"
    found: dict[str, float] = {}
    for system in ("ours", PEER):
        if system == "ours" or section.has_time_for(PEER_S if not section.rehearse else 0, PEER):
            with section.case(system):
                found[system] = tokens_per_s(section, system, prompts, num_output)
                section.add(Line(f"{measure}, {system}", found[system], "tokens/s"))
    if "ours" in found:
        line = Line(f"{measure}, beside", found["ours"], "tokens/s", PEER, found.get(PEER), least_ratio=LEAST_RATIO)
        section.add(line)


def tokens_per_s(section: Section, system: str, prompts: list[list[int]], num_output: int) -> float:
    command = [sys.executable, "-m", "benchmarks.gpu_sections.peers", system, str(int(section.rehearse))]
    child = ChildProcess(system, command, {"PYTHONPATH": str(ROOT)}, ROOT)
    try:
        child.ask({"prompts": prompts[:2], "num_output": 4})
        answer = child.ask({"prompts": prompts, "num_output": num_output})
    finally:
        child.stop()
    assert answer["tokens"] == len(prompts) * num_output, f"{system} made {answer['tokens']} tokens"
    found: float = answer["tokens"] / answer["seconds"]
    return found


# ---- the processes


class Ours:
    def __init__(self, rehearse: bool) -> None:
        from benchmarks.gpu_sections.driver import build
        from engine.runner import StepLimits

        self._limits = StepLimits(max_running=NUM_PROMPTS, max_batched_tokens=4096)
        self._runner = build(Section(0.0, rehearse, sys.stderr), self._limits)

    def generate(self, prompts: list[list[int]], num_output: int) -> int:
        from benchmarks.gpu_sections.driver import RunnerDriver, request

        driver = RunnerDriver(self._runner, self._limits)
        for index, prompt in enumerate(prompts):
            driver.add(request(str(index), prompt, max_tokens=num_output))
        return sum(map(len, driver.run().values()))


class Transformers:
    def __init__(self, rehearse: bool) -> None:
        import torch
        import transformers

        from benchmarks.gpu_sections.driver import BIG_MODEL, TINY_MODEL
        from model_files.builtin_configs import RANDOM_CONFIGS

        shape = RANDOM_CONFIGS[(TINY_MODEL if rehearse else BIG_MODEL).removeprefix("random:")]
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.context_length,
        )
        self._rehearse = rehearse
        with torch.device("cpu" if rehearse else "cuda"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if rehearse else torch.bfloat16, attn_implementation="sdpa"
            )
        self._model: Any = model.eval()

    def generate(self, prompts: list[list[int]], num_output: int) -> int:
        import transformers

        config = transformers.GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1)
        if self._rehearse:  # continuous batching needs a GPU
            import torch

            return sum(
                self._model.generate(torch.tensor([prompt]), generation_config=config).shape[1] - len(prompt)
                for prompt in prompts
            )
        outputs = self._model.generate_batch(inputs=prompts, generation_config=config)
        return sum(len(output.generated_tokens) for output in outputs.values())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = (Ours if sys.argv[1] == "ours" else Transformers)(bool(int(sys.argv[2])))
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = system.generate(**json.loads(line))
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}), file=answers)


if __name__ == "__main__":
    main()
