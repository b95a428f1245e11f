"""The gRPC service `tandem.v1.Cluster`: the calls of operators."""

from __future__ import annotations

import asyncio

from core.errors import InvalidRequest, TandemError, WorkerUnavailable
from core.fleet_control import FleetControl, FleetStatus
from core.lifecycle import ServiceRole, WorkerState
from core.service import SIZE_FIELDS, FleetRouter
from protos import codec, report_codec
from protos.fleet_codec import decode_service_role, encode_note, encode_planner, encode_slot
from protos.unknown_fields import refuse_unknown
from router.links.worker_link import WorkerLink
from router.operations.trace_messages import encode_candidate, list_requests, trace_of
from router.routing.policy import reason_for
from router.serving import validation
from router.serving.output_formats import RequestGrammars
from router.serving.tenant_admission import TenantAdmission
from router.shell import RouterShell
from runtime.prometheus.metrics_page import SharedPage
from runtime.rpc.grpc_server import CallContext, aborts, remaining_s
from runtime.validation_threads import ValidationThreads
from tandem_client.stubs import cluster_pb2, cluster_pb2_grpc, inference_pb2, worker_pb2
from text.tokenizer import ModelTokenizer

LEDGER_TIMEOUT_S = 3.0  # `GetLedger`, unless its caller has less time; beyond: the worker is listed with an error
ANSWER_SHARE = 0.9  # of the caller's time, for the worker to answer; the rest is for the way back
MAX_HOLDERS = 16_384  # holders in one `GetLedger`, over all workers; beyond: the oldest are listed, the others counted
MAX_EVENTS, DEFAULT_EVENTS = 1000, 100  # in one ListEventsResponse
MIN_HOLDERS = 16  # for each worker, even if the sum then exceeds MAX_HOLDERS


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """`control` is None for a router without a supervisor, which refuses to steer. `routers` are those of the fleet."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        shell: RouterShell,
        validation_pool: ValidationThreads,
        control: FleetControl | None,
        tenants: TenantAdmission,
        grammars: RequestGrammars,
    ) -> None:
        self._tokenizer = tokenizer
        self._shell = shell
        self._validation_pool = validation_pool
        self._control = control
        self._tenants = tenants
        self._grammars = grammars
        self._metrics_page = SharedPage(lambda: shell.metrics.text())
        self.routers: list[FleetRouter] = []

    @aborts
    async def GetFleet(self, _: cluster_pb2.GetFleetRequest, __: CallContext) -> cluster_pb2.GetFleetResponse:
        status = FleetStatus({}, ())
        if self._control is not None:
            status = await self._control.status()
        wanted = status.wanted
        links = sorted(self._shell.links.values(), key=lambda link: link.endpoint.service_id)
        return cluster_pb2.GetFleetResponse(
            workers=[self._describe(link) for link in links],
            num_queued=self._shell.view.num_queued,
            num_in_flight=self._shell.view.num_in_flight,
            wanted_prefill=wanted.get(ServiceRole.PREFILL, 0),
            wanted_decode=wanted.get(ServiceRole.DECODE, 0),
            wanted_routers=wanted.get(ServiceRole.ROUTER, 0),
            routers=[self._describe_router(router) for router in sorted(self.routers, key=lambda r: r.router_id)],
            slots=map(encode_slot, status.slots),
            config_revision=status.revision,
            rolling=status.rolling,
            planner=None if self._control is None else encode_planner(status.planner),
            num_moved=self._shell.view.num_moved,
        )

    def _describe_router(self, router: FleetRouter) -> cluster_pb2.FleetRouter:
        """A router knows the load of no other router."""
        state = WorkerState.DRAINING if router.draining else WorkerState.SERVING
        described = cluster_pb2.FleetRouter(
            router_id=router.router_id, address=router.address, state=codec.STATE_TO_WIRE[state]
        )
        if router.router_id == self._shell.router_id:
            described.num_queued = self._shell.view.num_queued
            described.num_in_flight = self._shell.view.num_in_flight
        return described

    def _describe(self, link: WorkerLink) -> cluster_pb2.FleetWorker:
        endpoint = link.endpoint
        record = self._shell.view.worker(endpoint.service_id)
        age_s = self._shell.now() - link.reported_at if link.reported_at else 0.0
        if record is not None:
            state, load = record.load.state, report_codec.encode_load(record.load, record.paths.values())
        elif link.load is not None:
            state, load = WorkerState.LOST, report_codec.encode_load(link.load)
        else:
            state, load = WorkerState.STARTING, worker_pb2.LoadReport()
        return cluster_pb2.FleetWorker(
            worker_id=endpoint.service_id,
            role=codec.ROLE_TO_WIRE[endpoint.role],
            state=codec.STATE_TO_WIRE[state],
            address=endpoint.address,
            load=load,
            report_age_ms=age_s * 1e3,
            num_dispatched=0 if record is None else len(record.dispatched),
            protocol_version=0 if record is None else record.agent.protocol_version,
        )

    @aborts
    async def Explain(
        self, request: inference_pb2.GenerateRequest, context: CallContext
    ) -> cluster_pb2.ExplainResponse:
        view = self._shell.view
        owner = self._tenants.claim(request, context)
        timeout_s = remaining_s(context, self._shell.config.default_timeout_s)
        deadline = self._shell.now() + timeout_s
        generation = await self._validation_pool.run(
            owner, timeout_s,
            validation.work_of(request, self._grammars), validation.prepare,
            request, self._tokenizer, self._shell.config, "explain", lambda: 0, view.decode_limits,
            self._grammars, lambda: self._shell.now() >= deadline,
        )  # fmt: skip
        found = view.find_candidates(generation.choices[0], self._shell.now())
        if not found:
            raise WorkerUnavailable("no worker can take the request now; it would wait in the router's queue")
        chosen = found[0]
        return cluster_pb2.ExplainResponse(
            prompt_tokens=generation.choices[0].num_prompt_tokens,
            candidates=[encode_candidate(candidate, candidate is chosen) for candidate in found],
            path=codec.PATH_TO_WIRE[chosen.path],
            reason=reason_for(chosen, view.can_prefill, self._shell.config.policy),
        )

    @aborts
    async def Scale(self, request: cluster_pb2.ScaleRequest, _: CallContext) -> cluster_pb2.ScaleResponse:
        refuse_unknown(request)
        control = self._supervisor()
        sizes = {role: getattr(request, name) for role, name in SIZE_FIELDS.items() if request.HasField(name)}
        if not sizes and not request.auto:
            raise InvalidRequest("prefill", "prefill, decode, routers or auto must be set, none is")
        wanted = await control.scale(sizes, request.auto)
        return cluster_pb2.ScaleResponse(
            wanted_prefill=wanted[ServiceRole.PREFILL],
            wanted_decode=wanted[ServiceRole.DECODE],
            wanted_routers=wanted[ServiceRole.ROUTER],
        )

    @aborts
    async def SwitchRole(
        self, request: cluster_pb2.SwitchRoleRequest, _: CallContext
    ) -> cluster_pb2.SwitchRoleResponse:
        refuse_unknown(request)
        wanted = await self._supervisor().switch_role(request.slot, decode_service_role(request.role))
        return cluster_pb2.SwitchRoleResponse(
            wanted_prefill=wanted[ServiceRole.PREFILL], wanted_decode=wanted[ServiceRole.DECODE]
        )

    @aborts
    async def GetConfig(self, _: cluster_pb2.GetConfigRequest, __: CallContext) -> cluster_pb2.GetConfigResponse:
        config = await self._supervisor().config()
        return cluster_pb2.GetConfigResponse(config=config.text, config_revision=config.revision)

    @aborts
    async def Apply(self, request: cluster_pb2.ApplyRequest, _: CallContext) -> cluster_pb2.ApplyResponse:
        refuse_unknown(request)
        if request.stop and (request.config or request.options or request.restart or request.expected_revision):
            raise InvalidRequest("stop", "no other field may be set with it")
        control = self._supervisor()
        if request.stop:
            change = await control.stop_roll()
        else:
            change = await control.apply(request.config, request.options, request.restart, request.expected_revision)
        return cluster_pb2.ApplyResponse(
            config_revision=change.revision, changes=change.changes, restarts=change.restarts
        )

    def _supervisor(self) -> FleetControl:
        if self._control is None:
            raise WorkerUnavailable("this router runs without a supervisor, which steers a fleet and keeps its events")
        return self._control

    @aborts
    async def ListEvents(
        self, request: cluster_pb2.ListEventsRequest, _: CallContext
    ) -> cluster_pb2.ListEventsResponse:
        if request.limit > MAX_EVENTS:
            raise InvalidRequest("limit", f"must be in [0, {MAX_EVENTS}], is {request.limit}")
        notes = await self._supervisor().notes(request.limit or DEFAULT_EVENTS, request.after)
        return cluster_pb2.ListEventsResponse(events=map(encode_note, notes))

    @aborts
    async def GetLedger(
        self, request: cluster_pb2.GetLedgerRequest, context: CallContext
    ) -> cluster_pb2.GetLedgerResponse:
        """Ask the workers at the same time. A worker that does not answer in time is listed with an error."""
        links = self._shell.links
        asked = [links[name] for name in sorted(set(request.worker_ids) or links) if name in links]
        unknown = sorted(set(request.worker_ids) - links.keys())
        if unknown:
            raise InvalidRequest("worker_ids", f"{unknown[0]} is not a worker of this router")
        timeout_s = min(LEDGER_TIMEOUT_S, remaining_s(context, LEDGER_TIMEOUT_S))
        max_holders = max(MIN_HOLDERS, MAX_HOLDERS // max(1, len(asked)))
        return cluster_pb2.GetLedgerResponse(
            workers=await asyncio.gather(*(_ask_for_ledger(link, max_holders, timeout_s) for link in asked))
        )

    @aborts
    async def ListRequests(
        self, request: cluster_pb2.ListRequestsRequest, _: CallContext
    ) -> cluster_pb2.ListRequestsResponse:
        return list_requests(self._shell.ring, request)

    @aborts
    async def GetTrace(self, request: cluster_pb2.GetTraceRequest, _: CallContext) -> cluster_pb2.Trace:
        return trace_of(self._shell.ring, request.id, self._shell.router_id)

    async def GetMetrics(self, _: cluster_pb2.GetMetricsRequest, __: CallContext) -> cluster_pb2.GetMetricsResponse:
        return cluster_pb2.GetMetricsResponse(text=await self._metrics_page.text())


async def _ask_for_ledger(link: WorkerLink, max_holders: int, timeout_s: float) -> cluster_pb2.WorkerLedger:
    worker_id = link.endpoint.service_id
    try:
        return cluster_pb2.WorkerLedger(
            worker_id=worker_id, ledger=await link.describe_ledger(max_holders, timeout_s * ANSWER_SHARE)
        )
    except TandemError as error:
        return cluster_pb2.WorkerLedger(worker_id=worker_id, error=str(error))
