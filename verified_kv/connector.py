"""`VerifiedConnector`: a KV connector of vLLM around another one, which moves the blocks.

One law is added: no block is used that is not the block that was computed.

    producer    a finished request gets a ticket in its `kv_transfer_params`; its ranks digest its blocks in the next
                step, and answer whoever shows the ticket
    reader      a request stays in WAITING_FOR_REMOTE_KVS, uncached, until its blocks have the digests of its ticket;
                blocks that have not are reported as failed, and vLLM recomputes them

vLLM creates one instance in its scheduler and one in each rank. Every public hook is the inner connector's, including
hooks that later versions add; `HOOKS` are those in which this class takes part.
"""

from __future__ import annotations

import copy
import logging
import secrets
import socket
from abc import ABCMeta
from collections import Counter
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from verified_kv.digests import BlockDigests, UnsupportedCache
from verified_kv.exchange import DigestFetcher, DigestServer, LoopThread
from verified_kv.ticket import KEY, SKIP, Options, Ticket, prompt_digest
from verified_kv.verifier import Claim, Offer, Owner, Reader, Settled, Verdict

HOOKS = frozenset({
    # in the scheduler
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "set_xfer_handshake_metadata_pp_aware",
    # in a rank
    "register_kv_caches", "get_handshake_metadata", "handle_preemptions", "bind_connector_metadata",
    "get_transfer_results", "get_finished", "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    # in both
    "shutdown",
})  # fmt: skip
CLASS_HOOKS = frozenset({
    "get_required_kvcache_layout", "requires_piecewise_for_cudagraph", "build_kv_connector_stats", "build_prom_metrics",
})  # fmt: skip
UNSHARED = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
START_S = 60.0  # seconds until the digest server has its port; beyond: the engine does not start

logger = logging.getLogger("vllm." + __name__)  # with vLLM's handlers


def unmet(interface: ModuleType) -> str:
    """Why this class cannot wrap the connectors of `interface`, vLLM's module `base`; empty if it can."""
    connector = interface.KVConnectorBase_V1
    if missing := sorted(name for name in HOOKS | CLASS_HOOKS if not hasattr(connector, name)):
        return f"this vLLM lacks the hook {missing[0]} of KV connectors"
    unknown = {name for name, kind in vars(connector).items() if isinstance(kind, classmethod)} - CLASS_HOOKS
    if unknown:
        return f"this vLLM has the class hook {min(unknown)} of KV connectors, which verified_kv does not pass on"
    if not hasattr(interface, "SupportsHMA"):
        return "this vLLM lacks the hook request_finished_all_groups of KV connectors"
    return ""


def _passed_on(name: str, member: object) -> object:
    if isinstance(member, property):
        return property(lambda self: getattr(self.inner, name))
    return lambda self, *arguments, **options: getattr(self.inner, name)(*arguments, **options)


if reason := unmet(base):
    raise ImportError(f"verified_kv: {reason}")

# A class made from vLLM's: each public method and property is the inner connector's.
_PassingConnector: Any = ABCMeta(
    "_PassingConnector",
    (base.KVConnectorBase_V1, base.SupportsHMA),
    {
        name: _passed_on(name, member)
        for name, member in (vars(base.KVConnectorBase_V1) | vars(base.SupportsHMA)).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    },
)


@dataclass
class VerifiedMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the ranks, in each step."""

    inner: Any
    verifies: bool
    offers: dict[str, Offer]
    claims: dict[str, Claim]


@dataclass
class VerifiedHandshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a rank to the scheduler, at start."""

    inner: Any
    address: tuple[str, int]  # of its `DigestServer`; port 0: it is no producer
    layout: str  # empty: it cannot digest its caches


class VerifiedConnector(_PassingConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `ValueError` for what this class cannot verify, before anything starts."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = Options.of(transfer.kv_connector_extra_config)
        inner_class = _inner_class(self._options)
        problem = _unsupported(vllm_config, kv_cache_config, inner_class)
        if problem and self._options.required:
            raise ValueError(f"verified_kv: {problem}")
        if problem:
            logger.warning("KV blocks are not verified: %s", problem)
        if len(kv_cache_config.kv_cache_groups) != 1 and not issubclass(inner_class, base.SupportsHMA):
            # vLLM asks only this class whether it takes several groups.
            raise ValueError(f"verified_kv: {inner_class.__name__} needs --disable-hybrid-kv-cache-manager")
        self._verifies = not problem
        inner_config = copy.copy(vllm_config)
        inner_config.kv_transfer_config = copy.copy(transfer)
        inner_config.kv_transfer_config.kv_connector = self._options.inner
        inner_config.kv_transfer_config.kv_connector_module_path = self._options.inner_module_path or None
        self.inner = inner_class(inner_config, role, kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._counts: Counter[str] = Counter()
        # In the scheduler:
        self._num_finished = 0  # requests that could be offered
        self._producer: tuple[tuple[tuple[str, int], ...], str] | None = None  # addresses of the ranks, and the layout
        self._offers: dict[str, Offer] = {}  # of this step
        self._claims: dict[str, Claim] = {}
        self._num_local_tokens: dict[str, int] = {}  # of requests between two hooks of one step
        # In a rank, from `register_kv_caches` on:
        self._loop: LoopThread | None = None
        self._address = ("", 0)
        self._digests: BlockDigests | None = None
        self._owner: Owner | None = None
        self._reader: Reader | None = None
        self._failed_blocks: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        """What others read of a connector beside its hooks, such as `connector_worker`."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    # ---- of the class: vLLM calls them in processes without an instance

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return _inner_class(options).get_required_kvcache_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> Any:
        return _inner_class(Options.of(extra_config)).requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from verified_kv.stats import VerifiedStats

        if data is None:
            return VerifiedStats({}, None, {})
        inner = data["inner"]
        if inner is not None:
            inner = _inner_class(Options(**data["options"])).build_kv_connector_stats(inner)
        return VerifiedStats(data["counts"], inner, data["options"])

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        from verified_kv.stats import VerifiedPromMetrics

        options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        inner = _inner_class(options).build_prom_metrics(vllm_config, *arguments)
        return VerifiedPromMetrics(inner, vllm_config, *arguments)

    # ---- in the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], VerifiedHandshake]) -> None:
        ranks = [metadata[key] for key in sorted(metadata)]
        if self._verifies and not all(rank.layout for rank in ranks):
            logger.warning("KV blocks are not verified: a rank cannot digest its caches")
            self._verifies = False
        elif ranks and all(rank.address[1] for rank in ranks):
            self._producer = tuple(rank.address for rank in ranks), ranks[0].layout
        inner = {key: one.inner for key, one in metadata.items() if one.inner is not None}
        if inner:
            self.inner.set_xfer_handshake_metadata_pp_aware(inner)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A load inside a step cannot be held back, so none is asked for: those tokens are computed."""
        num_tokens, in_background = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens and not in_background and self._verifies:
            return 0, False
        self._num_local_tokens[request.request_id] = num_computed_tokens
        return num_tokens, in_background

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        parameters = dict(request.kv_transfer_params or {})  # the inner connector changes them
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        num_local = self._num_local_tokens.pop(request.request_id, 0)
        if num_external_tokens and self._verifies:
            (block_ids,) = blocks.get_block_ids()
            first, end = num_local // self._block_size, num_local + num_external_tokens
            ticket = Ticket.decode(parameters.get(KEY))
            if ticket is not None and ticket.prompt != prompt_digest(request, ticket.num_tokens, ticket.secret):
                logger.error("The ticket of request %s is that of another prompt.", request.request_id)
                ticket = None
            self._claims[request.request_id] = Claim(
                blocks=tuple(block_ids[first : -(-end // self._block_size)]),
                first_place=first,
                num_tokens=end,
                ticket=ticket,
                skip=self._options.every > 1 and parameters.get(KEY) == SKIP,
            )

    def build_connector_meta(self, scheduler_output: Any) -> VerifiedMetadata:
        inner = self.inner.build_connector_meta(scheduler_output)
        metadata = VerifiedMetadata(inner, self._verifies, self._offers, self._claims)
        self._offers, self._claims = {}, {}
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Adds a ticket if the inner connector keeps the blocks for a reader."""
        if isinstance(self.inner, base.SupportsHMA):
            kept, parameters = self.inner.request_finished_all_groups(request, block_ids)
        else:
            kept, parameters = self.inner.request_finished(request, block_ids[0])
        self._num_local_tokens.pop(request.request_id, None)
        num_computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        num_tokens = min(num_computed, len(request.prompt_token_ids or ()))
        num_blocks = -(-num_tokens // self._block_size)
        if not kept or not parameters or self._producer is None or not 0 < num_blocks <= len(block_ids[0]):
            return kept, parameters
        self._num_finished += 1
        if self._num_finished % self._options.every:
            return kept, {**parameters, KEY: SKIP}
        (addresses, layout), secret = self._producer, secrets.token_hex(16)
        prompt = prompt_digest(request, num_tokens, secret)
        if not prompt:
            return kept, parameters
        ticket = Ticket(secret, layout, num_tokens, prompt, addresses)
        self._offers[request.request_id] = Offer(ticket.secret, tuple(block_ids[0][:num_blocks]))
        return kept, {**parameters, KEY: ticket.encode()}

    # ---- in a rank

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.inner.register_kv_caches(kv_caches)
        if not self._verifies:
            return
        transfer, options = self._kv_transfer_config, self._options
        try:
            self._digests = digests = BlockDigests(kv_caches, self._kv_cache_config.num_blocks)
        except UnsupportedCache as problem:
            if options.required:
                raise
            logger.warning("KV blocks are not verified: %s", problem)
            return
        self._loop = loop = LoopThread()
        parallel = self._vllm_config.parallel_config
        rank, num_ranks = _rank(), parallel.tensor_parallel_size
        if transfer.is_kv_producer:
            server = DigestServer(options.timeout_s)
            host = str(socket.getaddrinfo(options.host or envs.VLLM_NIXL_SIDE_CHANNEL_HOST, None)[0][4][0])
            place = parallel.data_parallel_index * num_ranks + rank
            port = loop.submit(server.start(host, options.port and options.port + place)).result(START_S)
            self._address = (host, port)
            self._owner = Owner(
                digests,
                lambda secret, pending: loop.submit(server.publish(secret, pending)),
                lambda secret: loop.post(server.retire, secret),
            )
        if transfer.is_kv_consumer:
            fetcher = DigestFetcher(options.timeout_s)

            def fetch(ticket: Ticket, num_digests: int, num_needed: int) -> Any:
                return loop.submit(fetcher.fetch(ticket.addresses[rank], ticket.secret, num_digests, num_needed))

            self._reader = Reader(
                digests, fetch, num_ranks=num_ranks, block_size=self._block_size, timeout_s=2 * options.timeout_s
            )

    def get_handshake_metadata(self) -> VerifiedHandshake | None:
        """None if there is nothing to say: vLLM may keep one rank's word under the key of another one."""
        inner = self.inner.get_handshake_metadata()
        layout = "" if self._digests is None else self._digests.layout
        if inner is None and not self._address[1] and (layout or not self._verifies):
            return None
        return VerifiedHandshake(inner, self._address, layout)

    def handle_preemptions(self, kv_connector_metadata: VerifiedMetadata) -> None:
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: VerifiedMetadata) -> None:
        """Before the step computes: a producer's digests need not wait for it."""
        self.inner.bind_connector_metadata(connector_metadata.inner)
        if not connector_metadata.verifies:
            self._owner = self._reader = None
        if self._owner is not None and connector_metadata.offers:
            self._owner.begin(connector_metadata.offers)
            self._counts["offered"] += len(connector_metadata.offers)
        if self._reader is not None:
            self._reader.begin(connector_metadata.claims)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self.inner.get_transfer_results(finished_req_ids)
        if self._owner is not None:
            results.finished_sending = self._owner.release(results.finished_sending)
        if self._reader is not None:
            settled = self._reader.settle(results.finished_recving, results.failed_recving, finished_req_ids)
            self._note(settled)
            results.finished_recving, results.failed_recving = settled.received, settled.failed
        return results

    def _note(self, settled: Settled) -> None:
        self._failed_blocks |= settled.failed_blocks
        self._counts["failed_blocks"] += len(settled.failed_blocks)
        for request_id, verdict in settled.verdicts.items():
            self._counts[verdict.value] += 1
            if verdict is Verdict.WRONG:
                logger.error("The KV blocks of request %s are not the computed ones. vLLM recomputes.", request_id)
            elif verdict is Verdict.UNVERIFIED:
                logger.warning("No digests for the KV blocks of request %s. vLLM recomputes.", request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks: set[int] = self.inner.get_block_ids_with_load_errors() | self._failed_blocks
        self._failed_blocks = set()
        return blocks

    def get_kv_connector_stats(self) -> Any:
        from verified_kv.stats import VerifiedStats

        inner = self.inner.get_kv_connector_stats()
        if inner is None and not self._counts.total():
            return None
        counts, self._counts = self._counts, Counter()
        return VerifiedStats(counts, inner, asdict(self._options))

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        self.inner.shutdown()


def _inner_class(options: Options) -> Any:
    path = options.inner_module_path or None
    config = KVTransferConfig(kv_connector=options.inner, kv_connector_module_path=path, kv_role="kv_both")
    return KVConnectorFactory.get_connector_class(config)


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _unsupported(vllm_config: Any, kv_cache_config: Any, inner_class: Any) -> str:
    """Why requests could not be verified; empty if they can."""
    transfer = vllm_config.kv_transfer_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        return (
            '--kv-transfer-config needs "kv_load_failure_policy": "recompute" here; with '
            f'"{transfer.kv_load_failure_policy}" vLLM would end a request whose blocks are wrong'
        )
    if transfer.kv_connector_extra_config.get("bidirectional_kv_xfer"):
        return "bidirectional_kv_xfer is not supported: what a reader gives back has no digests"
    for name in UNSHARED:
        if getattr(vllm_config.parallel_config, name, 1) != 1:
            return f"{name} must be 1"
    if len(kv_cache_config.kv_cache_groups) != 1:
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        return f"this model has several groups of KV caches ({', '.join(kinds)}); only one group can be verified"
    if not issubclass(inner_class, base.SupportsHMA):
        return f"{inner_class.__name__} has no hook request_finished_all_groups"
    return ""
