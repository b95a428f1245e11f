"""What `TandemConnector` uses of vLLM: its hooks, what each one promises, and what the requests and the pool must have.

vLLM calls its interface of connectors experimental. `unmet` names the first line of these tables that a vLLM breaks;
then the worker takes vLLM's own connector. tests/vllm/test_tandem_schedulers.py holds the installed vLLM to the tables.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm_worker.kv.host_pool import layout_of

TESTED_VERSIONS = ("0.32.0",)

# In the scheduler: hook -> what this connector relies on.
SCHEDULER_HOOKS = {
    "bind_gpu_block_pool": "called once, before the first request, with the pool whose blocks can be found and lent",
    "on_new_request": "called before the first step of a request, and before its blocks are allocated",
    "get_num_new_matched_tokens": "asked while a request has no computed token, perhaps several times; None: ask again",
    "update_state_after_alloc": "with the blocks of all tokens; a second time after the load, without external tokens",
    "build_connector_meta": "called in every step, also in empty ones, before the step computes",
    "update_connector_output": "called in every step that computes, when it has ended and counts as computed",
    "request_finished_all_groups": "called once for each request, also after an abort, before its blocks are freed",
    "has_pending_push_work": "keeps the engine stepping",
    "get_kv_connector_stats": "asked at the end of every step; its data comes with the statistics of the step",
}
# In the process that computes, which is the scheduler's process here.
RANK_HOOKS = {
    "register_kv_caches": "called once, before the scheduler exists, with all layers",
    "get_transfer_results": "called in every step; a received request must be one whose load was placed",
    "shutdown": "called when the engine ends",
}
CLASS_HOOKS = {"get_required_kvcache_layout": "asked before the caches are allocated"}
REQUEST_FIELDS = (
    "request_id", "kv_transfer_params", "num_prompt_tokens", "num_computed_tokens", "num_in_flight_tokens",
    "num_output_tokens", "num_tokens", "status", "is_finished",
    # A request ends at max_tokens, which may change while it runs.
    "max_tokens",
    # The tokens of a pull become a part of the prompt, as vLLM does with the tokens of a streaming session.
    "prompt_token_ids", "_all_token_ids", "sampling_params", "update_block_hashes", "prefill_stats",
    # Prompts with the same hash of a block have the same tokens up to its end, and the same salt.
    "block_hashes",
)  # fmt: skip
POOL_METHODS = ("touch", "free_blocks", "evict_blocks", "get_cached_block", "get_num_free_blocks")


def unmet(version: str, interface: ModuleType, pool: type) -> str:
    """The first line of the tables that this vLLM breaks; empty if there is none.

    `interface` is vLLM's module `base` of connectors, `pool` its class `BlockPool`.
    """
    if version.partition("+")[0] not in TESTED_VERSIONS:
        return f"vLLM {version} is not tested, {', '.join(TESTED_VERSIONS)} is"
    connector = interface.KVConnectorBase_V1
    for name, promise in (SCHEDULER_HOOKS | RANK_HOOKS | CLASS_HOOKS).items():
        if not hasattr(connector, name) and not hasattr(getattr(interface, "SupportsHMA", None), name):
            return f"this vLLM lacks the hook {name} of KV connectors ({promise})"
    for name in POOL_METHODS:
        if not hasattr(pool, name):
            return f"the block pool of this vLLM lacks {name}"
    return ""


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this connector cannot move the blocks of a model or an engine; empty if it can."""
    parallel = vllm_config.parallel_config
    for name in ("tensor", "pipeline", "data", "decode_context", "prefill_context"):
        if getattr(parallel, f"{name}_parallel_size", 1) > 1:
            return f"{name.replace('_', ' ')} parallelism: get_transfer_results must hear of all ranks"
    if vllm_config.scheduler_config.async_scheduling:
        return "asynchronous scheduling: update_connector_output must come before the next step is scheduled"
    if vllm_config.device_config.device_type != "cpu":
        return "a KV cache on a device: register_kv_caches must give host memory"
    if (num_groups := len(kv_cache_config.kv_cache_groups)) != 1:
        return f"{num_groups} groups of KV caches: update_state_after_alloc must give one list of blocks"
    return _unsupported_group(vllm_config, kv_cache_config.kv_cache_groups[0])


def _unsupported_group(vllm_config: Any, group: Any) -> str:
    """The bytes of a block must be those of its keys and values, in each layer of the model."""
    layout, spec = layout_of("", vllm_config), group.kv_cache_spec
    if (kind := type(spec).__name__) != "FullAttentionSpec":
        return f"a KV cache of {kind}: register_kv_caches must give keys and values of all tokens"
    if (num_layers := len(group.layer_names)) != layout.num_layers:
        return f"{num_layers} KV caches for {layout.num_layers} layers: register_kv_caches must give one for each"
    if (num_bytes := spec.page_size_bytes) != layout.block_bytes // layout.num_layers:
        return f"{num_bytes} bytes in a block of a layer: register_kv_caches must give {layout.dtype} and no more"
    return ""
