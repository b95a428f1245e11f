"""vLLM's interface of KV connectors, as far as `verified_kv.connector` reads it, and an inner connector of it.

The real interface is in tests/vllm/test_verified_kv.py. `installed` puts modules with vLLM's names in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROOT = "vllm.distributed.kv_transfer.kv_connector"
NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 24, 4, 2


def _nothing(*_: Any) -> None:
    return None


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:  # noqa: ARG003
        return None

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> Any:  # noqa: ARG003
        return None

    # Hooks of vLLM without a part in these tests.
    _unused: Any = _nothing
    take_events = wait_for_save = handle_preemptions = set_xfer_handshake_metadata_pp_aware = _unused
    get_handshake_metadata = get_kv_connector_stats = clear_connector_metadata = shutdown = _unused
    bind_connector_metadata = start_load_kv = build_connector_meta = register_kv_caches = _unused
    get_num_new_matched_tokens = update_state_after_alloc = _unused
    get_transfer_results = get_finished = get_block_ids_with_load_errors = _unused


class SupportsHMA:
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        raise NotImplementedError


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


# ---- an inner connector

Fault = Callable[[list[torch.Tensor], list[int]], None]  # changes the reader's caches, given its blocks


class CopyingConnector(KVConnectorBase_V1, SupportsHMA):
    """Reads from the caches of its producer in `start_load_kv`, and reports the request in the same step."""

    producer: dict[str, torch.Tensor]
    fault: Fault | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._reads: dict[str, tuple[list[int], list[int]]] = {}
        self._sent: set[str] = set()

    # in the scheduler

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:  # noqa: ARG002
        return True, {"do_remote_prefill": True, "blocks": block_ids[0]}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        num_tokens = request.num_tokens - num_computed_tokens
        return num_tokens, request.in_background and num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (reader_blocks,) = blocks.get_block_ids()
            num_local = (request.num_tokens - num_external_tokens) // BLOCK_SIZE
            remote = request.kv_transfer_params["blocks"]
            self._reads[request.request_id] = (reader_blocks[num_local:], remote[num_local:])

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ARG002
        reads, self._reads = self._reads, {}
        return reads

    # in a rank

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        if self._kv_transfer_config.is_kv_producer:
            CopyingConnector.producer = kv_caches

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def start_load_kv(self, forward_context: Any) -> None:  # noqa: ARG002
        for own, remote in self._metadata.values():
            for name, cache in self._caches.items():
                cache[own] = CopyingConnector.producer[name][remote]
            if CopyingConnector.fault is not None:
                CopyingConnector.fault(list(self._caches.values()), own)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        sent, self._sent = self._sent, set()
        return KVConnectorTransferResults(sent, set(self._metadata), set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


# ---- vLLM's modules


@contextlib.contextmanager
def installed() -> Iterator[ModuleType]:
    """`verified_kv.connector`, imported with the classes above in the place of vLLM's."""
    classes: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"},
        "vllm.config": {"KVTransferConfig": SimpleNamespace},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.distributed.kv_transfer": {},
        ROOT: {},
        f"{ROOT}.factory": {"KVConnectorFactory": SimpleNamespace(get_connector_class=lambda _: CopyingConnector)},
        f"{ROOT}.v1": {},
        f"{ROOT}.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase_V1, "SupportsHMA": SupportsHMA, "KVConnectorMetadata": object,
            "KVConnectorHandshakeMetadata": object,
        },
        f"{ROOT}.v1.metrics": {"KVConnectorStats": KVConnectorStats, "KVConnectorPromMetrics": object},
    }  # fmt: skip
    ours = ("verified_kv.connector", "verified_kv.stats")
    saved = {name: sys.modules.pop(name, None) for name in (*classes, *ours)}
    try:
        for name, members in classes.items():
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(members)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield importlib.import_module("verified_kv.connector")
    finally:
        for name, saved_module in saved.items():
            sys.modules.pop(name, None)
            if saved_module is not None:
                sys.modules[name] = saved_module


def config(role: str = "kv_both", *, policy: str = "recompute", **changes: Any) -> SimpleNamespace:
    """A VllmConfig. `changes` are options of its `parallel_config`, or `extra` for the connector."""
    extra = changes.pop("extra", {})
    transfer = SimpleNamespace(
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
        is_kv_producer=role != "kv_consumer",
        is_kv_consumer=role != "kv_producer",
    )
    parallel = SimpleNamespace(**{"tensor_parallel_size": 1, "data_parallel_index": 0} | changes)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


def cache_config(num_groups: int = 1) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
    return SimpleNamespace(kv_cache_groups=[group] * num_groups, num_blocks=NUM_BLOCKS)


def random_caches(draws: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draws.randrange(1 << 30))
    shape = NUM_BLOCKS, 2, BLOCK_SIZE, 8
    return {f"layer.{layer}": torch.randn(shape, generator=generator) for layer in range(NUM_LAYERS)}
