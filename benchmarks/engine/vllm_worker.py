"""vLLM, measured from inside: runs in vLLM's own environment and knows nothing of Tandem.

    vllm_worker.py <Hugging Face directory>

One JSON object per line: commands on stdin, answers on stdout (benchmarks/engine/programs.py lists the commands). The
engine runs in this process, so that a step is one call of `LLMEngine.step`: schedule, compute, sample, take the output.
No prefix is cached and no text is made.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; read at import
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

from vllm import EngineArgs, LLMEngine, SamplingParams

MAX_BATCHED_TOKENS = 2048  # the longest prompt measured is one step
FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000


class Worker:
    def __init__(self, model: str) -> None:
        arguments = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=32,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.random = random.Random(0)
        self.running: list[str] = []
        self.count = 0

    def add(self, num_tokens: int, max_tokens: int) -> str:
        name = str(self.count)
        self.count += 1
        prompt = [self.random.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        """Sequences in decode, each with about `context` tokens: those filled first go on while the rest is filled."""
        self.keep(0)
        for index in range(batch):
            ahead = (batch - 1 - index) * context // MAX_BATCHED_TOKENS
            self.running.append(self.add(context - ahead, 4096))
        has_token: set[str] = set()
        while len(has_token) < batch:
            has_token |= {output.request_id for output in self.engine.step()}
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        """End all sequences but the first `batch`."""
        self.engine.abort_request(self.running[batch:])
        del self.running[batch:]
        if not self.running:
            while self.engine.has_unfinished_requests():
                self.engine.step()
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            outputs = self.engine.step()
            times.append((time.perf_counter() - begun) * 1e3)
            assert len(outputs) == len(self.running), "this step was no decode step of the whole batch"
        return {"ms": times}

    def prefill(self, tokens: int) -> dict[str, Any]:
        self.keep(0)
        self.add(tokens, 1)
        begun = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - begun
        assert outputs[0].finished, "the prompt took more than one step"
        return {"ms": seconds * 1e3}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    worker = Worker(sys.argv[1])
    print(json.dumps({}), file=answers)  # ready
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(worker, command.pop("do"))(**command)), file=answers)


if __name__ == "__main__":
    main()
