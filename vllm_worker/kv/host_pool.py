"""The KV caches of vLLM's layers, in host memory, as the pool of a transfer agent.

vLLM allocates one buffer for all layers. On a CPU it is laid out [num_layers, num_blocks, bytes of a block in a layer],
so a block has a part in each layer (`PoolMemory.num_parts`). vLLM alone knows what lies where in a part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from core.kv_layout import KVLayout
from kv_transfer.transports.transport import PoolMemory


def layout_of(model: str, vllm_config: Any) -> KVLayout:
    """The size of a block in tokens and the sizes of the model; vLLM alone knows the order of the bytes.

    `model`: names the weights, and the order of the bytes where blocks move as they lie.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    return KVLayout(
        model=model,
        dtype=str(config.dtype).removeprefix("torch."),
        num_layers=config.get_num_layers(parallel),
        num_kv_heads=config.get_total_num_kv_heads(),
        block_size=vllm_config.cache_config.block_size,
        head_dim=config.get_head_size(),
        quantization="none" if config.quantization is None else str(config.quantization),
    )


def host_pool(kv_caches: Mapping[str, Any], num_blocks: int, layout: KVLayout) -> PoolMemory:
    """`kv_caches`: tensors by layer. Raises `ConfigError` for caches that lie in another way."""
    layers = sorted(kv_caches.values(), key=lambda layer: layer.data_ptr())
    part_bytes, starts = layout.block_bytes // layout.num_layers, [layer.data_ptr() for layer in layers]
    layer_bytes = num_blocks * part_bytes
    is_dense = all(layer.is_contiguous() and layer.nbytes == layer_bytes for layer in layers)
    if not is_dense or starts != [starts[0] + place * layer_bytes for place in range(layout.num_layers)]:
        raise ConfigError(
            f"the KV cache of vLLM is not {layout.num_layers} arrays of {num_blocks} blocks of {part_bytes} bytes, "
            "one behind the other"
        )
    memory = (ctypes.c_char * (layout.num_layers * layer_bytes)).from_address(starts[0])
    return PoolMemory(starts[0], num_blocks, layout, memoryview(memory).cast("B"), num_parts=layout.num_layers)
