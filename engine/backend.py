"""Chooses the backend of a model once, by the device, the config and the CPU's instructions.

Only this module names kernels. The rest of the engine uses the interfaces that kernels implement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from engine.attention import AttentionBackend, TorchAttention
from engine.cpu.attention import NativeAttention
from engine.cpu.dequantize import dequantize_into
from engine.cpu.features import cpu_flags as cpu_flags
from engine.cpu.features import cpu_multiplies_bf16
from engine.cpu.kernels import Kernels, load_kernels
from engine.cpu.kernels import describe_kernels as describe_kernels
from engine.cpu.linear import NativeLinear
from engine.cpu.ops import NativeOps
from engine.cpu.quantized_linear import NativeQuantizedLinear
from engine.cpu.sampling import NativeDraw
from engine.fp8 import FP8
from engine.gpu.errors import sorted_error as sorted_error
from engine.kv_pool import KVPool
from engine.linear import LinearMethod, PlainLinear
from engine.ops import Ops, TorchOps
from engine.quantized_linear import DequantizedLinear, Fp8Products
from engine.quick_draw import QuickDraw
from engine.sampling import Draw
from engine.weights import Dequantize
from model_files.catalogue import default_cache_dir
from model_files.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Backend:
    attention: AttentionBackend
    ops: Ops
    linear_method: LinearMethod
    draw: Draw
    dequantize: Dequantize | None = None  # None: the gguf package


def choose_backend(
    config: EngineConfig, model: ModelConfig, pool: KVPool, num_threads: int, cache_dir: Path | None
) -> Backend:
    """The C kernels if the config allows them and they are available, else plain torch."""
    device = pool.tensor.device
    kernels = find_kernels(config, model, device, cache_dir)
    linear_method = choose_linear_method(config, kernels, num_threads)
    if kernels is None:
        return Backend(TorchAttention(pool), TorchOps(), linear_method, QuickDraw())
    return Backend(
        attention=NativeAttention(kernels, pool, model.num_heads, num_threads),
        ops=NativeOps(kernels, num_threads),
        linear_method=linear_method,
        draw=NativeDraw(kernels),
        dequantize=partial(dequantize_into, kernels),
    )


def find_kernels(
    config: EngineConfig, model: ModelConfig, device: torch.device, cache_dir: Path | None
) -> Kernels | None:
    """The C kernels if the config allows them and they are available, else None."""
    if config.kernels == "torch" or device.type != "cpu":
        return None
    return load_kernels(model.head_dim, cache_dir or default_cache_dir())


def choose_linear_method(config: EngineConfig, kernels: Kernels | None, num_threads: int) -> LinearMethod:
    """The method for the model's matrix products. Without a kernel: torch's product."""
    if config.quantization == FP8:
        return Fp8Products()
    if config.quantization != "none":
        return DequantizedLinear() if kernels is None else NativeQuantizedLinear(kernels, num_threads)
    if kernels is None:
        return PlainLinear()
    if kernels.bf16_linear is None:
        return PlainLinear(NativeOps(kernels, num_threads))
    return NativeLinear(kernels, num_threads)


def choose_device(wanted: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`. A CUDA device has an index, `cuda` means 0.

    Raises `ConfigError` for a CUDA device that torch does not see.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda:0" if wanted in ("auto", "cuda") else wanted)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.index >= num_devices:
        seen = f"{num_devices} CUDA devices" if num_devices else "no CUDA device"
        raise ConfigError(
            f"device = {wanted}, but torch sees {seen}: set device to cpu or auto"
            + (f", or to at most cuda:{num_devices - 1}" if num_devices else "")
            + ", or run `tandem doctor`"
        )
    return device


def choose_dtype(wanted: str, device: torch.device) -> str:
    """The dtype for `auto`, `float32` or `bfloat16`: a key of `DTYPE_BYTES`."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" or cpu_multiplies_bf16() else "float32"
