"""A router as a service: its tokenizer, its shell, and the two public gRPC services."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from core.config import ApiKeyConfig, LiveConfig, RouterConfig, SecurityConfig, TelemetryConfig
from core.fleet_control import FleetControl
from core.lifecycle import ServiceRole
from core.service import Endpoint, FleetRouter, HttpFront
from core.traffic import RouterTraffic
from protos import kserve_pb2_grpc
from router.kserve.kserve_servicer import KserveServicer
from router.local_calls import LocalCalls
from router.operations.cluster_servicer import ClusterServicer
from router.routing.question import Policy
from router.serving.inference_servicer import InferenceServicer
from router.serving.output_formats import RequestGrammars
from router.serving.tenant_admission import TenantAdmission
from router.shell import RouterShell
from runtime.rpc.api_keys import ApiKeys
from runtime.rpc.grpc_server import GrpcServer
from runtime.rpc.security import load_credentials, router_rules
from runtime.tracing.telemetry import Telemetry
from runtime.validation_threads import ValidationThreads
from tandem_client.stubs import cluster_pb2_grpc, inference_pb2_grpc
from text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """The place of a router among the routers of its fleet."""

    ordinal: int = 0
    shares_port: bool = False  # with other routers of this machine
    control: FleetControl | None = None  # None: no supervisor
    begins_with_prefill: bool = False  # as in `RouterView`


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the composition root chooses. `start` calls `load_tokenizer` once, in a thread."""

    load_tokenizer: Callable[[], ModelTokenizer]
    policy: Policy
    make_front: Callable[[LocalCalls], HttpFront] | None = None  # None: the router serves no HTTP


class RouterService:
    """A `core.service.RouterControl`. It serves gRPC, and HTTP on the same loop."""

    # These parts exist from `start` on.
    _shell: RouterShell
    _server: GrpcServer
    _inference: InferenceServicer
    _cluster: ClusterServicer

    def __init__(
        self,
        config: RouterConfig,
        parts: RouterParts,
        telemetry_config: TelemetryConfig,
        place: RouterPlace = RouterPlace(),
        security: SecurityConfig = SecurityConfig(),  # noqa: B008 - it is frozen
        api_keys: tuple[ApiKeyConfig, ...] = (),
    ) -> None:
        """Raises `ConfigError` if the credentials of `security` cannot be read."""
        self._config = config
        self._parts = parts
        self._place = place
        self._router_id = f"router-{place.ordinal}.{secrets.token_hex(4)}"
        self._telemetry = Telemetry(telemetry_config, "tandem-router", self._router_id)
        self._credentials, self._rules = load_credentials(security), router_rules(security, api_keys)
        self._keys = ApiKeys(api_keys, self._credentials.token)
        self._tenants = TenantAdmission(ApiKeys(api_keys))
        self._front: HttpFront | None = None
        self._is_serving = False
        self._validation = ValidationThreads(config.max_queued)

    async def start(self) -> Endpoint:
        tokenizer = await asyncio.to_thread(self._parts.load_tokenizer)
        self._shell = shell = RouterShell(
            self._config, self._parts.policy, tokenizer.eos_token_ids, self._telemetry, self._credentials,
            self._router_id,
        )  # fmt: skip
        shell.metrics.model = tokenizer.info.name
        shell.view.begins_with_prefill = self._place.begins_with_prefill
        self._server = server = GrpcServer(
            self._config.host, self._config.port, self._config.max_message_bytes, self._credentials, self._rules,
            self._place.shares_port,
        )  # fmt: skip
        server.on_refused = shell.count_refusal
        grammars = RequestGrammars(tokenizer)
        self._inference = inference = InferenceServicer(tokenizer, shell, self._validation, self._tenants, grammars)
        self._cluster = cluster = ClusterServicer(
            tokenizer, shell, self._validation, self._place.control, self._tenants, grammars
        )
        server.add(inference_pb2_grpc.add_InferenceServicer_to_server, inference, "tandem.v1.Inference")
        server.add(cluster_pb2_grpc.add_ClusterServicer_to_server, cluster, "tandem.v1.Cluster")
        kserve = KserveServicer(inference, tokenizer, shell)
        server.add(kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, kserve, KserveServicer.full_name)
        self._is_serving = True
        address = await server.start()
        cluster.routers = [FleetRouter(self._router_id, address, draining=False)]  # until the supervisor knows more
        self.calls = LocalCalls(address, inference, cluster, shell, self._keys)
        if self._parts.make_front is not None:
            self._front = self._parts.make_front(self.calls)
            await self._front.start()
        logger.info("%s serves %s on %s", self._router_id, tokenizer.info.name, address)
        if tokenizer.info.default_sampling:
            logger.info("defaults of requests, from generation_config.json: %s", tokenizer.info.default_sampling)
        return Endpoint(self._router_id, address, ServiceRole.ROUTER)

    async def failed(self) -> BaseException:
        if self._front is None:
            return await self._shell.failure
        of_front = asyncio.ensure_future(self._front.failed())
        try:
            ended, _ = await asyncio.wait((self._shell.failure, of_front), return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            of_front.cancel()

    def set_config(self, live: LiveConfig) -> None:
        self._shell.set_config(live.router)
        self._validation.max_pending = live.router.max_queued

    async def set_workers(self, workers: list[Endpoint]) -> None:
        await self._shell.set_workers(workers)

    async def set_routers(self, routers: list[FleetRouter]) -> None:
        self._cluster.routers = routers

    def traffic(self, start_s: float) -> RouterTraffic:
        return self._shell.traffic(start_s)

    async def drain(self, timeout_s: float) -> None:
        """Set health to NOT_SERVING, so that load balancers send new calls elsewhere, and let open calls finish."""
        self._inference.draining = True
        self._server.set_serving(False)
        front = self._front.drain(timeout_s) if self._front is not None else asyncio.sleep(0)
        await asyncio.gather(front, self._server.stop(timeout_s))

    async def stop(self) -> None:
        if not self._is_serving:
            return
        self._is_serving = False
        if self._front is not None:
            await self._front.stop()
        await self._server.stop(grace_s=0.0)
        await self._shell.close_links()
        self._validation.close()
        self._shell.metrics.close()
        await asyncio.to_thread(self._telemetry.close)
