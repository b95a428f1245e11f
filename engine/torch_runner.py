"""The runner that computes with torch, on a CPU or one GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.kv_layout import KVLayout
from core.step import StepOutput, StepPlan
from engine.attention import AttentionBackend, TorchAttention
from engine.cpu import cpu_has_amx_bf16, cpu_multiplies_bf16, keep_freed_memory
from engine.kv_pool import TORCH_DTYPES, KVPool, num_blocks_within
from engine.linear import LinearMethod, PlainLinear
from engine.model import Model
from engine.model_weights import allocate_weights
from engine.native_attention import NativeAttention
from engine.native_kernels import Kernels, load_kernels
from engine.native_linear import NativeLinear, OneDNNLinear
from engine.native_ops import NativeOps
from engine.native_sampling import NativeDraw
from engine.ops import Ops, TorchOps
from engine.quantized_linear import DequantizedLinear, NativeQuantizedLinear
from engine.sampling import sample
from engine.weights import Progress, fill_weights
from model_files.catalogue import default_cache_dir
from model_files.model_config import ModelConfig
from model_files.model_source import describe, load_config, resolve_model


class TorchRunner:
    """Loads the model and allocates its pool at once. Raises `ConfigError` or `ModelNotFound`: what to change."""

    def __init__(
        self, config: EngineConfig, cache_dir: Path | None = None, on_progress: Progress | None = None
    ) -> None:
        source = resolve_model(config.model, cache_dir)
        model_config = load_config(source)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        if config.quantization != "none" and device.type != "cpu":
            raise ConfigError(f"quantization = {config.quantization} is for CPUs: set it to none, or device to cpu")
        # The count is the process's: torch has one pool of compute threads.
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
        self.num_blocks = num_blocks_within(self.layout, config.kv_memory_mb)
        self._pool = KVPool(self.layout, self.num_blocks, device)
        kernels = find_kernels(config, model_config, device, cache_dir)
        weights = allocate_weights(model_config, TORCH_DTYPES[dtype], device, config.quantization)
        fill_weights(weights, source, on_progress, kernels)
        attention, ops = choose_kernels(kernels, model_config, self._pool, num_threads)
        linear_method = choose_linear_method(config, kernels, device, num_threads)
        self._draw = None if kernels is None else NativeDraw(kernels)
        self._model: Model | None = Model(weights, attention, linear_method, ops)
        if device.type == "cpu":
            keep_freed_memory()  # not before: what loading needed is given back

    def pool_address(self) -> int:
        return self._pool.address()

    def pool_memory(self) -> memoryview | None:
        return self._pool.memory()

    def pool_device(self) -> int | None:
        device = self._pool.tensor.device
        return None if device.type == "cpu" else device.index or 0

    def settle(self) -> None:
        self._pool.touch_rest()

    def run(self, step: StepPlan) -> StepOutput:
        assert self._model is not None, "the runner is closed"
        with torch.inference_mode():
            logits = self._model.forward(step.chunks)
            if logits.is_cuda:
                torch.cuda.current_stream(logits.device).synchronize()  # its KV is offered to peers from here on
            sampling = [chunk for chunk in step.chunks if chunk.samples]
            return StepOutput(step.step_id, sample(logits.cpu().numpy(), sampling, self._draw))

    def close(self) -> None:
        self._model = None


def find_kernels(
    config: EngineConfig, model: ModelConfig, device: torch.device, cache_dir: Path | None
) -> Kernels | None:
    """The C kernels, where they are wanted and can be had."""
    if config.kernels == "torch" or device.type != "cpu":
        return None
    return load_kernels(model.head_dim, cache_dir or default_cache_dir())


def choose_kernels(
    kernels: Kernels | None, model: ModelConfig, pool: KVPool, num_threads: int
) -> tuple[AttentionBackend, Ops]:
    """Attention and ops: the C kernels where there are any, else plain torch."""
    if kernels is None:
        return TorchAttention(pool), TorchOps()
    torch_prefill = pool.tensor.dtype is torch.bfloat16 and cpu_has_amx_bf16()
    attention = NativeAttention(kernels, pool, model.num_heads, num_threads, torch_prefill)
    return attention, NativeOps(kernels, num_threads)


def choose_linear_method(
    config: EngineConfig, kernels: Kernels | None, device: torch.device, num_threads: int
) -> LinearMethod:
    """What multiplies by the model's matrices. oneDNN where there is no kernel, and on CPUs with AMX."""
    if config.quantization != "none":
        return DequantizedLinear() if kernels is None else NativeQuantizedLinear(kernels, num_threads)
    if config.kernels == "torch" or device.type != "cpu":
        return PlainLinear()
    if kernels is not None and kernels.bf16_linear is not None and not cpu_has_amx_bf16():
        return NativeLinear(kernels, num_threads)
    ops = TorchOps() if kernels is None else NativeOps(kernels, num_threads)
    return OneDNNLinear(ops) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else PlainLinear(ops)


def choose_device(wanted: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises `ConfigError` where it is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device = cuda, but torch sees no CUDA device: set device to cpu or auto, or run `tandem doctor`"
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_dtype(wanted: str, device: torch.device) -> str:
    """The dtype for `auto`, `float32` or `bfloat16`: a key of `DTYPE_BYTES`."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" or cpu_multiplies_bf16() else "float32"
