"""The KV caches of the installed vLLM without a model, for one rank in host memory; run in vLLM's environment."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache


def allocate_caches(config: Any, num_layers: int, num_blocks: int, block_size: int) -> tuple[KVCacheConfig, Any]:
    """`config`: that of an engine, which learns the number of blocks. Returns the caches in float32: their config, and
    by name of the layer a view [num_blocks, heads, rows, content]."""
    config.cache_config.num_gpu_blocks = num_blocks
    model, layers = config.model_config, [f"layer.{number}" for number in range(num_layers)]
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=model.get_total_num_kv_heads(), head_size=model.get_head_size(),
        dtype=torch.float32,
    )  # fmt: skip
    page = spec.page_size_bytes
    tensor = KVCacheTensor(num_layers * num_blocks * page, layers, num_blocks * page, page)
    caches = KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(layers, spec)])
    return caches, allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout.LBHNC, [block_size])
