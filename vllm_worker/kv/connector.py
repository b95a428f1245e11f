"""`TandemConnector`: Tandem's protocol as the KV transfer of vLLM. Loaded by `kv_connector_module_path`.

    prefill    blocks are offered as soon as their step has ended; the reader reads them during the next steps
    decode     a request waits in WAITING_FOR_REMOTE_KVS until each of its blocks is read and verified; if one cannot
               be, vLLM computes the prompt

vLLM creates one instance in its scheduler and one in its only rank, both in one process. The rank's instance comes
first, and owns the transfers; the scheduler's instance finds them there.

Importing this module raises `ImportError` with the line of the hook table that this vLLM breaks.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from core.config import TransferConfig
from kv_transfer.agent import AgentIdentity
from kv_transfer.transports.nixl_transport import NixlTransport
from verified_kv.connector import VerifiedConnector
from vllm_worker.kv.handoffs import BlockHashes, Handoffs
from vllm_worker.kv.hooks import unmet, unsupported
from vllm_worker.kv.host_pool import host_pool, layout_of
from vllm_worker.kv.parameters import encode_end
from vllm_worker.kv.transfer_thread import TransferThread

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers

OPTIONS = "tandem"  # in kv_connector_extra_config

if reason := unmet(vllm.__version__, base, BlockPool):
    raise ImportError(f"TandemConnector: {reason}")


@dataclass(frozen=True, slots=True)
class Options:
    """Of the worker, for its engine."""

    worker: str  # role and ordinal
    model: str  # fingerprint of the weights
    transfer: str  # TransferConfig as JSON

    def transfer_config(self) -> TransferConfig:
        return TransferConfig(**json.loads(self.transfer))


class _Nothing(base.KVConnectorMetadata):  # type: ignore[misc]
    """The two instances share a process, so the scheduler has nothing to send."""


class _StepStats(KVConnectorStats):  # type: ignore[misc]
    """Plain numbers and texts, which travel with the statistics of the step."""

    def is_empty(self) -> bool:
        return False


def _block_hasher(cache: Any) -> BlockHashes:
    """`cache`: vLLM's configuration of its cache. The hashes are those of a request without an adapter."""
    hasher = get_request_block_hasher(cache.block_size, get_hash_fn_by_name(cache.prefix_caching_hash_algo))
    sampling = SamplingParams(max_tokens=1)

    def hashes_of(token_ids: Sequence[int], cache_salt: str) -> Sequence[Any]:
        request = Request("prefix", list(token_ids), sampling, None, cache_salt=cache_salt or None, block_hasher=hasher)
        return list(request.block_hashes)

    return hashes_of


class TandemConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        """vLLM's own connector, verified, for what this one cannot move: only here are the groups of caches known."""
        if problem := unsupported(vllm_config, kv_cache_config):
            logger.warning("vLLM's own connector moves the KV blocks, not Tandem's: %s", problem)
            return VerifiedConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = Options(**self._kv_transfer_config.kv_connector_extra_config[OPTIONS])
        self.transfers: TransferThread | None = None  # in the rank, from `register_kv_caches` on
        self.handoffs: Handoffs
        if role is base.KVConnectorRole.SCHEDULER:
            self.handoffs = get_kv_transfer_group().handoffs

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted request is computed again like any other: what it has offered stays lent."""
        return False

    # ---- in the rank

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layout = layout_of(f"{self._options.model}/vllm-layers", self._vllm_config)
        pool = host_pool(kv_caches, self._kv_cache_config.num_blocks, layout)
        identity = AgentIdentity(self._options.worker, secrets.randbits(63) | 1)
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        self.transfers = TransferThread(self._options.transfer_config(), identity, pool, NixlTransport, vocab_size)
        self.handoffs = Handoffs(self.transfers, layout.block_size)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        loads = self.handoffs.pulls.loads()
        return base.KVConnectorTransferResults(finished_recving=loads.received, failed_recving=loads.failed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads go on in the transfer thread."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step computes with a block that is being read."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Readers read vLLM's own blocks."""

    def wait_for_save(self) -> None:
        """Blocks are offered when their step has ended."""

    def shutdown(self) -> None:
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None

    # ---- in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.handoffs.bind(gpu_block_pool, _block_hasher(self._vllm_config.cache_config))

    def on_new_request(self, request: Any) -> None:
        self.handoffs.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self.handoffs.pulls.num_to_load(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.handoffs.pulls.place(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        self.handoffs.take_back()
        tables = scheduler_output.kv_connector_block_state
        scheduled = scheduler_output.num_scheduled_tokens
        self.handoffs.begin_step(scheduled, lambda request_id: tables.get_block_ids(request_id)[0])
        return _Nothing()

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ARG002
        self.handoffs.end_step()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, encode_end(self.handoffs.finish(request, block_ids[0]))

    def has_pending_push_work(self) -> bool:
        return self.handoffs.num_lent > 0

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """With each step. The rank adds nothing."""
        return _StepStats(self.handoffs.step_stats()) if self.role is base.KVConnectorRole.SCHEDULER else None
