"""The runner that computes with torch, on a CPU or one GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv_layout import KVLayout
from core.model_work import ModelSizes
from core.step import SampledToken, StepOutput, StepPlan
from engine.backend import choose_backend, choose_device, choose_dtype
from engine.host_memory import keep_freed_memory
from engine.kv_pool import TORCH_DTYPES, KVPool, num_blocks_within
from engine.model import Model
from engine.model_weights import allocate_weights
from engine.quantization import weight_bytes
from engine.rotary import RotaryTable
from engine.sampling import Sampler
from engine.step_inputs import InputPreparer, PreparedStep
from engine.step_queue import PromisedTokens, StepQueue
from engine.weights import Progress, fill_weights
from model_files.model_source import describe, load_config, resolve_model

_StepInputs = tuple[PreparedStep, Sampler]


class TorchRunner:
    """The constructor loads the model and allocates the pool. Raises `ConfigError` or `ModelNotFound`."""

    def __init__(
        self, config: EngineConfig, cache_dir: Path | None = None, on_progress: Progress | None = None
    ) -> None:
        source = resolve_model(config.model, cache_dir)
        model_config = load_config(source)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        if config.quantization != "none" and device.type != "cpu":
            raise ConfigError(f"quantization = {config.quantization} is for CPUs: set it to none, or device to cpu")
        # This sets the thread count of the whole process: torch has one pool of compute threads.
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        self.info = describe(source, config.max_context)
        self.layout = KVLayout(
            model=self.info.fingerprint,
            dtype=dtype,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=model_config.head_dim,
            quantization=config.quantization,
        )
        self.sizes: ModelSizes | None = model_config.sizes(
            weight_bytes(dtype, config.quantization), self.layout.token_bytes
        )
        self.num_blocks = num_blocks_within(self.layout, config.host_kv_memory_mb)
        self._pool = KVPool(self.layout, self.num_blocks, device)
        backend = choose_backend(config, model_config, self._pool, num_threads, cache_dir)
        weights = allocate_weights(model_config, TORCH_DTYPES[dtype], device, config.quantization)
        fill_weights(weights, source, on_progress, backend.dequantize)
        self._draw = backend.draw
        self._steps = StepQueue(self._prepare, self._compute)
        max_positions = min(model_config.context_length, self.num_blocks * config.block_size)
        frequencies = torch.tensor(model_config.inverse_frequencies(), dtype=torch.float32, device=device)
        self._preparer = InputPreparer(backend.attention, RotaryTable(frequencies, max_positions), device)
        self._model: Model | None = Model(weights, backend.linear_method, backend.ops)
        if device.type == "cpu":
            keep_freed_memory()  # after loading, so malloc returns the loader's memory to the system

    def pool_address(self) -> int:
        return self._pool.address()

    def pool_memory(self) -> memoryview | None:
        return self._pool.memory()

    def pool_device(self) -> int | None:
        device = self._pool.tensor.device
        return None if device.type == "cpu" else device.index or 0

    def start_background_work(self) -> None:
        self._pool.touch_rest()

    def submit(self, step: StepPlan) -> None:
        self._steps.submit(step)

    def collect(self) -> StepOutput:
        return self._steps.collect()

    def close(self) -> None:
        self._model = None

    def _prepare(self, step: StepPlan) -> _StepInputs:
        with torch.inference_mode():  # a setting of each thread
            return self._preparer.prepare(step.chunks), Sampler(step.chunks, self.info.eos_token_ids)

    def _compute(self, inputs: _StepInputs, promised: PromisedTokens) -> dict[str, SampledToken]:
        assert self._model is not None, "the runner is closed"
        prepared, sampler = inputs
        with torch.inference_mode():
            logits = self._model.compute(prepared.inputs(list(promised.values())))
            if logits.is_cuda:
                torch.cuda.current_stream(logits.device).synchronize()  # peers may read the step's KV after the return
            return sampler.sample(logits.cpu().numpy(), promised, self._draw)
