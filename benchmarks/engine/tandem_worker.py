"""Tandem's engine with a probe inside; benchmarks/engine/programs.py starts it and lists its commands.

    python -m benchmarks.engine.tandem_worker '{"model": ..., ...}'          the bare engine; options of EngineConfig
    python -m benchmarks.engine.tandem_worker '{"model": ..., ...}' CORE     a decode worker that serves gRPC

A decode step of the bare engine is what a decode worker does: schedule, build the batch, compute, sample, complete the
step. Each token is then detokenized and encoded for the wire; `emit_ms` times that apart, since the peers make no text.
The KV of sequences in decode is noise, in the place of what a prefill worker would have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import json
import mmap
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import numpy as np
import torch

from benchmarks.engine.programs import FIRST_WORD_ID, LAST_WORD_ID
from benchmarks.processes import obey, take_stdout
from core.config import EngineConfig, SchedulerConfig, TandemConfig
from core.request import Request, SamplingParams
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from core.step import ScheduledChunk, TokenEvent
from engine.runner import run_step
from engine.torch_runner import TorchRunner
from model_files.model_source import load_config, resolve_model
from tandem_client.stubs import worker_pb2
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import load_tokenizer
from worker.core import WorkerCore

NEVER = float("inf")
MAX_OUTPUT = 1024
SCHEDULER = SchedulerConfig(512, 64, slo_itl_ms=60_000.0)  # a limit would keep prompts of a full batch apart
READ_BYTES = 1 << 29  # far more than any cache
MATRIX = 2048
FLOOR_TRIES = 5
MAX_FLOOR_S = 2.0  # torch multiplies bf16 very slowly on a CPU without AVX-512


class Probe:
    """Times the model, and attention in it, inside each step.

    The model runs from its prepared inputs to the logits. Attention is the C kernel, with
    rope and the write into the cache, without the Python around each call.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.model_s = self.attention_s = 0.0
        self.steps: list[tuple[int, float, float]] = []  # (sequences, start, end) of the model in each step
        self.length = 0.0  # mean tokens of the last step's sequences
        preparer: Any = runner._preparer
        model: Any = runner._model
        self._prepare, self._compute = preparer.prepare, model.compute
        preparer.prepare, model.compute = self.prepare, self.compute
        self._prepared: dict[int, tuple[int, float]] = {}  # (sequences, length) of steps, by id of their attention
        if (kernels := getattr(preparer.attention, "kernels", None)) is not None:  # torch's attention is not timed
            kernels.attend = self.timed(kernels.attend)

    def prepare(self, chunks: Sequence[ScheduledChunk]) -> Any:
        length = sum(chunk.start + chunk.num_tokens for chunk in chunks) / len(chunks)
        prepared = self._prepare(chunks)
        self._prepared[id(prepared.attention)] = len(chunks), length
        return prepared

    def compute(self, inputs: Any) -> Any:
        num_sequences, self.length = self._prepared.pop(id(inputs.attention))
        start = time.perf_counter()
        logits = self._compute(inputs)
        end = time.perf_counter()
        self.model_s += end - start
        self.steps.append((num_sequences, start, end))
        return logits

    def timed(self, kernel: Callable[..., int]) -> Callable[..., int]:
        def attend(*arguments: int) -> int:
            start = time.perf_counter()
            failed = kernel(*arguments)
            self.attention_s += time.perf_counter() - start
            return failed

        return attend


class Worker:
    """Each public method is a command."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = TorchRunner(config)
        self._probe = Probe(self._runner)
        self._tokenizer = load_tokenizer(config.model)
        self._last_word_id = min(LAST_WORD_ID, load_config(resolve_model(config.model)).vocab_size - 1)
        self._random = random.Random(0)
        self._num_added = 0
        self._core = self._empty_core()
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    def fill(self, batch: int, context: int) -> dict[str, Any]:
        self._core, self._detokenizers = self._empty_core(), {}
        self._fill_pool_with_noise()
        for _ in range(batch):
            request = self._request(context + 1, MAX_OUTPUT)
            sequence = self._core.admit(request, NEVER, 0.0)
            blocks = self._core.pool.allocate(-(-context // self._runner.layout.block_size))
            assert blocks is not None, "kv_memory_mb is too small for this batch"
            sequence.block_table += blocks
            sequence.num_computed_tokens = context
            self._core.scheduler.add(sequence)
            self._detokenizers[request.request_id] = self._tokenizer.detokenizer()
        self._step()  # hashes the blocks of the prompts, which a worker does while it pulls them
        return {}

    def keep(self, batch: int) -> dict[str, Any]:
        for sequence in list(self._core.scheduler.running)[batch:]:
            self._core.scheduler.abort(sequence.sequence_id)
        return {}

    def steps(self, count: int) -> dict[str, list[float]]:
        """Of each step: milliseconds of the step, the model, attention and the emitting, and the sequences' length."""
        names = ("ms", "model_ms", "attention_ms", "emit_ms", "length")
        answer: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(count):
            model_s, attention_s = self._probe.model_s, self._probe.attention_s
            start = time.perf_counter()
            events = self._step()
            done = time.perf_counter()
            self._emit(events)
            emit_s = time.perf_counter() - done
            parts_s = (done - start, self._probe.model_s - model_s, self._probe.attention_s - attention_s, emit_s)
            for name, value in zip(names, [*(1e3 * part for part in parts_s), self._probe.length], strict=True):
                answer[name].append(value)
        return answer

    def prefill(self, tokens: int) -> dict[str, float]:
        self.keep(0)
        sequence = self._core.admit(self._request(tokens, 1), NEVER, 0.0)
        start = time.perf_counter()
        self._core.scheduler.add(sequence)
        while not self._step():
            pass
        return {"ms": (time.perf_counter() - start) * 1e3}

    def floors(self) -> dict[str, float]:
        """The pool is touched first: a fresh page costs a prompt more time than its KV, and only once."""
        if (touching := self._runner._pool.touch_rest()) is not None:
            touching.join()
        layout = self._runner.layout
        return {
            "read_bytes_per_s": READ_BYTES / best_of(search_memory()),
            "flop_per_s": 2 * MATRIX**3 / best_of(multiply_matrices()),
            "kv_bytes_per_token": layout.block_bytes / layout.block_size,
        }

    # ---- inside

    def _empty_core(self) -> WorkerCore:
        pool = BlockPool(self._runner.num_blocks)
        scheduler = Scheduler(SCHEDULER, pool, self._runner.layout.block_size, frozenset())
        return WorkerCore(scheduler, pool, plans_ahead=False)

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        self._num_added += 1
        prompt = tuple(
            self._random.randint(min(FIRST_WORD_ID, self._last_word_id), self._last_word_id) for _ in range(num_tokens)
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(self._num_added), prompt, num_tokens, sampling)

    def _step(self) -> list[TokenEvent]:
        (action,) = self._core.next_step(0.0)
        return self._core.complete_step(run_step(self._runner, action.plan), 0.0)

    def _emit(self, events: list[TokenEvent]) -> None:
        worker_pb2.StepTokens(
            calls=range(len(events)),
            indexes=[event.index for event in events],
            token_ids=[event.token.token_id for event in events],
        ).SerializeToString()
        for event in events:
            if (detokenizer := self._detokenizers.get(event.sequence_id)) is not None:
                detokenizer.push((event.token.token_id,))

    def _fill_pool_with_noise(self) -> None:
        memory = self._runner.pool_memory()
        assert memory is not None
        assert self._runner.layout.dtype == "bfloat16"
        noise = np.random.default_rng(0).normal(size=1 << 22).astype(np.float32)
        raw = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        for start in range(0, len(memory), len(raw)):
            end = min(start + len(raw), len(memory))
            memory[start:end] = raw[: end - start]


def best_of(work: Callable[[], Any]) -> float:
    """Seconds of the fastest try."""
    times: list[float] = []
    while len(times) < FLOOR_TRIES and sum(times) < MAX_FLOOR_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def search_memory() -> Callable[[], Any]:
    """The C library's search for a byte that is not there only reads."""
    memory = mmap.mmap(-1, READ_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.zero_()
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    return lambda: search(tensor.data_ptr(), 1, READ_BYTES)


def multiply_matrices() -> Callable[[], Any]:
    left, right = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.matmul(left, right)


class Serving:
    """A decode worker's whole service. Each public method is a command."""

    def __init__(self, address: str, probe: Probe) -> None:
        self._address, self._probe = address, probe

    def address(self) -> str:
        return self._address

    def model_steps(self) -> list[tuple[int, float, float]]:
        return self._probe.steps


async def serve(engine: EngineConfig, core: int, answers: TextIO) -> None:
    # Imported here, so that the start of the bare engine does not pay for the services.
    from cli.compose import build_decode_worker
    from fleet.host.service_host import Placement, ServiceHost, StartFault

    placement = Placement(ordinal=0, host="", address="", num_threads=1, control=None, cores=(core,))
    host = ServiceHost()
    factory = functools.partial(build_decode_worker, TandemConfig(engine=engine, scheduler=SCHEDULER))
    endpoint = await host.start(pickle.dumps(factory), placement)
    if isinstance(endpoint, StartFault):
        sys.exit(endpoint.reason)
    service: Any = host._service
    await asyncio.to_thread(obey, Serving(endpoint.address, Probe(service._parts.executor._runner)), answers)
    await host.stop()


def main() -> None:
    answers = take_stdout()
    config = EngineConfig(**json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        asyncio.run(serve(config, int(sys.argv[2]), answers))
    else:
        obey(Worker(config), answers)


if __name__ == "__main__":
    main()
