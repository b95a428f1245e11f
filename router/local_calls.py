"""The calls of a router for an HTTP server in its process: the same servicers and checks, without gRPC between.

`generate` gives each part to a sink in the loop iteration after the router got it (`SinkWriter`).
"""

from __future__ import annotations

from core.errors import TandemError
from core.service import Metadata
from router.operations.cluster_servicer import ClusterServicer
from router.serving.call_writer import LocalSink, SinkWriter
from router.serving.inference_servicer import InferenceServicer
from router.shell import RouterShell
from runtime.rpc.api_keys import ApiKeys
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import cluster_pb2, inference_pb2

INFERENCE, CLUSTER = "/tandem.v1.Inference", "/tandem.v1.Cluster"


class LocalCalls:
    """A `gateway.router_calls.RouterCalls`. Every call raises `TandemError`."""

    def __init__(
        self, address: str, inference: InferenceServicer, cluster: ClusterServicer, shell: RouterShell, keys: ApiKeys
    ) -> None:
        self.address = address
        self._inference, self._cluster, self._shell, self._keys = inference, cluster, shell, keys

    async def open(self) -> None:
        """Nothing to open: the router serves already."""

    async def close(self) -> None:
        """The router outlives its HTTP server."""

    async def authorize(self, metadata: Metadata) -> None:
        self._admitted(f"{INFERENCE}/Generate", metadata)

    async def generate(
        self, request: inference_pb2.GenerateRequest, sink: LocalSink, timeout_s: float, metadata: Metadata
    ) -> None:
        """The servicer checks the key, and counts a refusal."""
        await self._inference.serve(request, SinkWriter(sink, LocalContext(metadata, timeout_s)))

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata
    ) -> inference_pb2.TokenizeResponse:
        return await self._inference.Tokenize(request, self._admitted(f"{INFERENCE}/Tokenize", metadata))

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata
    ) -> inference_pb2.DetokenizeResponse:
        return await self._inference.Detokenize(request, self._admitted(f"{INFERENCE}/Detokenize", metadata))

    async def model(self) -> inference_pb2.GetModelResponse:
        return await self._inference.GetModel(inference_pb2.GetModelRequest(), LocalContext(()))

    async def metrics(self, metadata: Metadata) -> str:
        context = self._admitted(f"{CLUSTER}/GetMetrics", metadata)
        return (await self._cluster.GetMetrics(cluster_pb2.GetMetricsRequest(), context)).text

    async def fleet(self, metadata: Metadata) -> cluster_pb2.GetFleetResponse:
        return await self._cluster.GetFleet(
            cluster_pb2.GetFleetRequest(), self._admitted(f"{CLUSTER}/GetFleet", metadata)
        )

    async def list_requests(self, limit: int, after: int, metadata: Metadata) -> cluster_pb2.ListRequestsResponse:
        request = cluster_pb2.ListRequestsRequest(limit=limit, after=after)
        return await self._cluster.ListRequests(request, self._admitted(f"{CLUSTER}/ListRequests", metadata))

    async def get_trace(self, id: str, metadata: Metadata) -> cluster_pb2.Trace:
        request = cluster_pb2.GetTraceRequest(id=id)
        return await self._cluster.GetTrace(request, self._admitted(f"{CLUSTER}/GetTrace", metadata))

    def _admitted(self, method: str, metadata: Metadata) -> LocalContext:
        """The context of a call. Raises `Unauthenticated` or `PermissionDenied`, as over gRPC."""
        try:
            self._keys.check(method, metadata)
        except TandemError as error:
            self._shell.count_refusal(error)
            raise
        return LocalContext(metadata)
