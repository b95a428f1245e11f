"""Tandem's engine, measured from inside: what benchmarks/engine_peers.py starts beside the peers.

    python -m benchmarks.engine_worker '{"model": ..., "dtype": ..., ...}'     options of EngineConfig

A decode step is what a decode worker does for it: schedule, build the batch, compute, sample, complete the step. Then
each token is detokenized and encoded for the wire, which is measured on its own (`emit_ms`): the peers make no text.
Sequences in decode arrive as they do from a prefill worker, with their KV in the pool: here it is noise.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import floors
from core.block_pool import BlockPool
from core.config import EngineConfig, SchedulerConfig
from core.request import Request, SamplingParams
from core.scheduler import Scheduler
from core.step import ScheduledChunk, TokenEvent
from engine.torch_runner import TorchRunner
from protos import codec, worker_pb2
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import load_tokenizer
from worker.core import WorkerCore

FIRST_WORD_ID, LAST_WORD_ID = 1000, 40_000
NEVER = float("inf")
MAX_OUTPUT = 1024


class Probe:
    """Tells the model proper from what is built around it, from inside one step.

    The model is everything from the end of `begin_step`, which turns a step into a batch, to the logits; attention is
    the kernel's part of it, with rope and the write into the cache, and without the 2 us of Python around each call.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.model_s = self.attention_s = 0.0
        self.steps: list[tuple[int, float, float]] = []  # (sequences, begin, end) of the model in each step
        self.length = 0.0  # of the last step's sequences on average, in tokens: sequences grow while they are measured
        self._begun = 0.0
        model: Any = runner._model
        self._forward, self._begin_step = model.forward, model.attention.begin_step
        model.forward, model.attention.begin_step = self.forward, self.begin_step
        kernels = getattr(model.attention, "kernels", None)
        if kernels is not None:  # else attention is torch's, and takes no time here
            kernels.attend = _TimedKernel(kernels.attend, self)

    def forward(self, chunks: Sequence[ScheduledChunk]) -> Any:
        logits = self._forward(chunks)
        end = time.perf_counter()
        self.model_s += end - self._begun
        self.steps.append((len(chunks), self._begun, end))
        self.length = sum(chunk.start + chunk.num_tokens for chunk in chunks) / len(chunks)
        return logits

    def begin_step(self, *arguments: Any) -> Any:
        step = self._begin_step(*arguments)
        self._begun = time.perf_counter()
        return step


class _TimedKernel:
    def __init__(self, kernel: Callable[..., int], probe: Probe) -> None:
        self._kernel, self._probe = kernel, probe

    def __call__(self, step: int, heads: int, out: int, layer: int) -> int:
        begun = time.perf_counter()
        failed = self._kernel(step, heads, out, layer)
        self._probe.attention_s += time.perf_counter() - begun
        return failed


class Worker:
    def __init__(self, config: EngineConfig) -> None:
        begun = time.perf_counter()
        self.runner = TorchRunner(config)
        self.load_s = time.perf_counter() - begun
        self.probe = Probe(self.runner)
        self.tokenizer = load_tokenizer(config.model)
        self.random = random.Random(0)
        self.num_added = 0
        self.core = self._empty_core()
        self.detokenizers: dict[str, IncrementalDetokenizer] = {}

    def _empty_core(self) -> WorkerCore:
        pool = BlockPool(self.runner.num_blocks)
        scheduler = Scheduler(SchedulerConfig(), pool, self.runner.layout.block_size, frozenset())
        return WorkerCore(scheduler, pool)

    # ---- commands

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        self.core, self.detokenizers = self._empty_core(), {}
        self._fill_pool_with_noise()
        block_size = self.runner.layout.block_size
        for _ in range(batch):
            request = self._request(context + 1, MAX_OUTPUT)
            sequence = self.core.admit(request, NEVER, 0.0)
            blocks = self.core.pool.allocate(-(-context // block_size))
            assert blocks is not None, "kv_memory_mb is too small for this batch"
            sequence.block_table, sequence.num_computed_tokens = blocks, context
            self.core.scheduler.add(sequence)
            self.detokenizers[request.request_id] = self.tokenizer.detokenizer()
        self.steps(1)  # hashes the prompts' blocks, which a worker does while it pulls them
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        for sequence in list(self.core.scheduler.running)[batch:]:
            self.core.scheduler.abort(sequence.sequence_id)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Milliseconds of each step, of the model in it, of attention in that, and of what emits its tokens; and how
        many tokens long its sequences are."""
        names = ("ms", "model_ms", "attention_ms", "emit_ms", "length")
        answer: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(count):
            before = self.probe.model_s, self.probe.attention_s
            begun = time.perf_counter()
            events = self._step()
            done = time.perf_counter()
            self._emit(events)
            emitted = time.perf_counter()
            model_s, attention_s = self.probe.model_s - before[0], self.probe.attention_s - before[1]
            parts = [1e3 * seconds for seconds in (done - begun, model_s, attention_s, emitted - done)]
            for name, value in zip(names, [*parts, self.probe.length], strict=True):
                answer[name].append(value)
        return answer

    def prefill(self, tokens: int) -> dict[str, Any]:
        self.keep(0)
        sequence = self.core.admit(self._request(tokens, 1), NEVER, 0.0)
        begun = time.perf_counter()
        self.core.scheduler.add(sequence)
        while not self._step():
            pass
        return {"ms": (time.perf_counter() - begun) * 1e3}

    def floors(self) -> dict[str, Any]:
        """Measured with the whole pool touched: a fresh page costs a prompt more than its KV does, and only once."""
        if (touching := self.runner._pool.touch_rest()) is not None:
            touching.join()
        return {"read_bytes_per_s": floors.read_bytes_per_s(), "flop_per_s": floors.flop_per_s()}

    def about(self) -> dict[str, Any]:
        layout = self.runner.layout
        return {
            "dtype": layout.dtype,
            "kv_bytes_per_token": layout.block_bytes // layout.block_size,
            "pool_bytes": layout.block_bytes * self.runner.num_blocks,
            "load_s": self.load_s,
            "resident_bytes": floors.resident_bytes(),
        }

    # ---- inside

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        self.num_added += 1
        prompt = tuple(self.random.randint(FIRST_WORD_ID, LAST_WORD_ID) for _ in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(self.num_added), prompt, num_tokens, sampling)

    def _step(self) -> list[TokenEvent]:
        (action,) = self.core.next_step(0.0)
        return self.core.complete_step(self.runner.run(action.plan), 0.0)

    def _emit(self, events: list[TokenEvent]) -> None:
        for event in events:
            token = codec.encode_token(event.index, event.token)
            worker_pb2.DecodeResponse(tokens=worker_pb2.SampledTokens(tokens=[token])).SerializeToString()
            if (detokenizer := self.detokenizers.get(event.sequence_id)) is not None:
                detokenizer.push(event.token.token_id)

    def _fill_pool_with_noise(self) -> None:
        memory = self.runner.pool_memory()
        assert memory is not None
        noise = np.random.default_rng(0).normal(size=1 << 22).astype(np.float32)
        if self.runner.layout.dtype == "bfloat16":
            raw = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            raw = noise.tobytes()
        for start in range(0, len(memory), len(raw)):
            end = min(start + len(raw), len(memory))
            memory[start:end] = raw[: end - start]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    worker = Worker(EngineConfig(**json.loads(sys.argv[1])))
    print(json.dumps({}), file=answers)  # ready
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(worker, command.pop("do"))(**command)), file=answers)


if __name__ == "__main__":
    main()
