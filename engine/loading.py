"""The parts of a runner with a model that do not depend on the kernels: sources, shapes, weights.

ModelSetup.of(config)    reads the config of the model, and no weights
load_model(setup, ...)   loads the weights and prepares them
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig
from core.cost.model_work import ModelSizes
from core.errors import ConfigError
from core.kv_layout import FLOAT8, KVLayout
from core.model_info import ModelInfo
from engine.backend import choose_device, choose_dtype
from engine.fp8 import FP8
from engine.kv_pool import TORCH_DTYPES
from engine.linear import LinearMethod
from engine.model import Model
from engine.ops import Ops
from engine.quantization import BITS, head_weight_bytes, weight_bytes
from engine.rotary import RotaryTable
from engine.weights import Dequantize, draws_on_device, load_weights
from model_files.model_config import ModelConfig
from model_files.model_source import ModelSource, describe, load_config, resolve_model


@dataclass(frozen=True, slots=True)
class ModelSetup:
    config: EngineConfig
    source: ModelSource
    model_config: ModelConfig
    device: torch.device
    num_threads: int
    dtype_name: str  # of weights and activations: float32 or bfloat16
    info: ModelInfo
    layout: KVLayout
    sizes: ModelSizes

    @classmethod
    def of(cls, config: EngineConfig, cache_dir: Path | None) -> ModelSetup:
        """Raises `ConfigError` or `ModelNotFound`. Sets the number of torch's compute threads."""
        source = resolve_model(config.model, cache_dir)
        model_config = load_config(source)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        if config.quantization in BITS and device.type != "cpu":
            raise ConfigError(
                f"quantization = {config.quantization} is for CPUs: set it to none or {FP8}, or device to cpu"
            )
        # This sets the thread count of the whole process: torch has one pool of compute threads.
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        require_threads(num_threads)
        torch.set_num_threads(num_threads)
        info = describe(source, config.max_context)
        layout = KVLayout(
            model=info.fingerprint + _drawn_by(source, model_config, device),
            dtype=FLOAT8 if config.kv_dtype == FP8 else dtype,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=model_config.head_dim,
            quantization=config.quantization,
        )
        sizes = model_config.sizes(weight_bytes(dtype, config.quantization), layout.token_bytes)
        num_bytes = sizes.num_layer_weights * sizes.weight_bytes
        num_bytes += sizes.num_head_weights * head_weight_bytes(dtype, config.quantization)
        sizes = replace(sizes, weight_bytes=num_bytes / (sizes.num_layer_weights + sizes.num_head_weights))
        return cls(config, source, model_config, device, num_threads, dtype, info, layout, sizes)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype_name]

    def rotary_table(self, num_blocks: int) -> RotaryTable:
        """The angles of every position that the model and a pool of `num_blocks` allow."""
        num_positions = min(self.model_config.context_length, num_blocks * self.layout.block_size)
        frequencies = torch.tensor(self.model_config.inverse_frequencies(), dtype=torch.float32, device=self.device)
        return RotaryTable(frequencies, num_positions)


def require_threads(num_threads: int) -> None:
    """Raise `ConfigError` if this process cannot start so many threads: OpenMP would end the process at the first step.

    A control group (pids.max) or a user (ulimit -u) has a limit.
    """
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        while len(started) < num_threads:
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise ConfigError(
            f"num_threads = {num_threads}, but this process can start only {len(started)} threads ({error}): lower it, "
            "or raise the limit of its control group (pids.max) or of its user (ulimit -u)"
        ) from error
    finally:
        done.set()
        for thread in started:
            thread.join()


def _drawn_by(source: ModelSource, model_config: ModelConfig, device: torch.device) -> str:
    """A part of the model's name in the layout. The number of processors decides the order of a device's draws."""
    if not draws_on_device(source, model_config, device):
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f" drawn by sm_{properties.major}{properties.minor} with {properties.multi_processor_count} processors"


def load_model(setup: ModelSetup, linear_method: LinearMethod, ops: Ops, dequantize: Dequantize | None = None) -> Model:
    """Load and prepare the weights. Raises `ConfigError` naming a tensor that does not fit."""
    quantization = setup.config.quantization
    weights = load_weights(setup.source, setup.model_config, setup.dtype, setup.device, quantization, dequantize)
    return Model(weights, linear_method, ops)
