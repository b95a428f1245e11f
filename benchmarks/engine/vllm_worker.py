"""vLLM, measured from inside: runs in vLLM's own environment, and uses of Tandem the process harness alone.

    vllm_worker.py <Hugging Face directory> '{"dtype": ..., ...}'    options of EngineArgs

benchmarks/engine/programs.py lists the commands. The engine runs in this process, so that a step is one call of
`LLMEngine.step`: schedule, compute, sample, take the output. No server and no client cost it time, and no text is made.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; read at import
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

from vllm import EngineArgs, LLMEngine, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.child_processes import obey, take_stdout

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000
IDLE_S = 0.001


class Worker:
    """Each public method is a command."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        arguments = EngineArgs(
            model=model, max_model_len=8192, skip_tokenizer_init=True, disable_log_stats=True, **options
        )
        self._step_tokens = int(options.get("max_num_batched_tokens", 0))
        self._engine = LLMEngine.from_engine_args(arguments)
        self._random = random.Random(0)
        self._running: list[str] = []
        self._count = 0

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        """Sequences in decode, each with about `context` tokens: those filled first go on while the rest is filled."""
        self.keep(0)
        for index in range(batch):
            ahead = (batch - 1 - index) * context // self._step_tokens
            self._running.append(self._add_random(context - ahead, 4096))
        has_token: set[str] = set()
        while len(has_token) < batch:
            has_token |= {output.request_id for output in self._engine.step()}
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        """End all sequences but the first `batch`."""
        self._engine.abort_request(self._running[batch:])
        del self._running[batch:]
        if not self._running:
            self._finish()
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            outputs = self._engine.step()
            times.append((time.perf_counter() - begun) * 1e3)
            assert len(outputs) == len(self._running), "this step was no decode step of the whole batch"
        return {"ms": times}

    def prefill(self, tokens: int) -> dict[str, Any]:
        self.keep(0)
        self._add_random(tokens, 1)
        begun = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begun
        assert outputs[0].finished, "the prompt took more than one step"
        return {"ms": seconds * 1e3}

    def serve(self, requests: list[dict[str, Any]], timeout_s: float) -> list[list[float]]:
        """Serve {"at": s, "prompt": [ids], "max_tokens": n} in order of arrival, and then empty the prefix cache.

        Returns the times of each request's tokens, on the clock of the arrivals. Requests without an end after
        `timeout_s` keep the tokens that they have.
        """
        times: list[list[float]] = [[] for _ in requests]
        next_request, start = 0, time.perf_counter()
        while (now := time.perf_counter() - start) < timeout_s:
            while next_request < len(requests) and requests[next_request]["at"] <= now:
                request = requests[next_request]
                self._add(str(next_request), request["prompt"], request["max_tokens"])
                next_request += 1
            if self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                now = time.perf_counter() - start
                for output in outputs:
                    known = times[int(output.request_id)]
                    known += [now] * (len(output.outputs[0].token_ids) - len(known))
            elif next_request == len(requests):
                break
            else:
                time.sleep(IDLE_S)
        self._engine.abort_request([str(number) for number in range(next_request)])
        self._finish()
        self._engine.reset_prefix_cache()
        return times

    def _add_random(self, num_tokens: int, max_tokens: int) -> str:
        self._count += 1
        prompt = [self._random.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens)]
        self._add(str(self._count), prompt, max_tokens)
        return str(self._count)

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    answers = take_stdout()
    obey(Worker(sys.argv[1], json.loads(sys.argv[2])), answers)
