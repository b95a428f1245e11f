"""`inference.GRPCInferenceService`, the protocol KServe v2: the same requests as Inference.Generate, in tensors.

A call of ModelInfer, and each request of a stream, is a `GenerateRequest` for the `InferenceServicer`: the same
validation, keys, limits and deadlines. The requests of one stream are served one after the other.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Awaitable, Callable
from typing import Any

from core.errors import InvalidRequest, ModelNotFound, TandemError
from protos import kserve_pb2, kserve_pb2_grpc
from router.kserve.kserve_tensors import (
    FINAL,
    INPUTS,
    OUTPUTS,
    VERSION,
    InferRequest,
    check_model,
    decode_request,
    encode_response,
)
from router.serving.call_writer import Context, StreamWriter
from router.serving.inference_servicer import InferenceServicer
from router.shell import RouterShell
from runtime.rpc.grpc_server import aborts
from tandem_client.stubs import inference_pb2
from text.tokenizer import ModelTokenizer

Take = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class KserveServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    full_name = "inference.GRPCInferenceService"

    def __init__(self, inference: InferenceServicer, tokenizer: ModelTokenizer, shell: RouterShell) -> None:
        self._inference = inference
        self._model = tokenizer.info
        self._shell = shell

    # ---- generation

    @aborts
    async def ModelInfer(
        self, request: kserve_pb2.ModelInferRequest, context: Context
    ) -> kserve_pb2.ModelInferResponse:
        wanted = self._decode(request)
        if wanted.stream:
            raise InvalidRequest("parameters.stream", "must be false in ModelInfer; ModelStreamInfer streams")
        return await self._infer(wanted, _OneCall(context, _nothing, in_stream=False))

    async def ModelStreamInfer(self, requests: Any, context: Context) -> None:
        """The error of a request goes into its response, and the stream goes on, as clients of the protocol expect."""
        async for request in requests:
            try:
                await self._stream(request, context)
            except TandemError as error:
                failed = kserve_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
                failed.parameters[FINAL].bool_param = True
                await context.write(
                    kserve_pb2.ModelStreamInferResponse(error_message=str(error), infer_response=failed)
                )

    async def _stream(self, request: kserve_pb2.ModelInferRequest, context: Context) -> None:
        wanted = self._decode(request)
        call = _OneCall(context, _nothing, in_stream=True)
        if wanted.stream is False:
            await self._write(context, await self._infer(wanted, call), last=True)
            return
        generate = wanted.generate

        async def write(response: inference_pb2.GenerateResponse) -> None:
            chunk, end = response.tokens, response.HasField("finished")
            reason = response.finished.finish_reason if end else 0
            request_id = request.id or (response.finished.request_id if end else "")
            encoded = encode_response(generate.model, request_id, wanted.outputs, chunk.text, chunk.token_ids, reason)
            await self._write(context, encoded, last=end)

        call.take = write
        await self._inference.serve(generate, call)

    async def _infer(self, wanted: InferRequest, call: _OneCall) -> kserve_pb2.ModelInferResponse:
        """The whole output as one response."""
        text: list[str] = []
        token_ids: list[int] = []
        finished = inference_pb2.Finished()

        async def collect(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("finished"):
                finished.CopyFrom(response.finished)
            else:
                text.append(response.tokens.text)
                token_ids.extend(response.tokens.token_ids)

        call.take = collect
        await self._inference.serve(wanted.generate, call)
        return encode_response(
            wanted.generate.model, finished.request_id, wanted.outputs, "".join(text), token_ids, finished.finish_reason
        )

    @staticmethod
    async def _write(context: Context, response: kserve_pb2.ModelInferResponse, last: bool) -> None:
        response.parameters[FINAL].bool_param = last
        await context.write(kserve_pb2.ModelStreamInferResponse(infer_response=response))

    def _decode(self, request: kserve_pb2.ModelInferRequest) -> InferRequest:
        check_model(request.model_name, request.model_version, self._model)
        return decode_request(request, self._model.context_length - 1)

    # ---- descriptions

    async def ServerLive(self, _: kserve_pb2.ServerLiveRequest, __: Context) -> kserve_pb2.ServerLiveResponse:
        return kserve_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, _: kserve_pb2.ServerReadyRequest, __: Context) -> kserve_pb2.ServerReadyResponse:
        return kserve_pb2.ServerReadyResponse(ready=self._is_ready)

    @property
    def _is_ready(self) -> bool:
        return self._shell.view.can_serve and not self._shell.view.awaits_prefill

    async def ModelReady(self, request: kserve_pb2.ModelReadyRequest, _: Context) -> kserve_pb2.ModelReadyResponse:
        with contextlib.suppress(ModelNotFound):
            check_model(request.name, request.version, self._model)
            return kserve_pb2.ModelReadyResponse(ready=self._is_ready)
        return kserve_pb2.ModelReadyResponse(ready=False)

    async def ServerMetadata(
        self, _: kserve_pb2.ServerMetadataRequest, __: Context
    ) -> kserve_pb2.ServerMetadataResponse:
        return kserve_pb2.ServerMetadataResponse(name="tandem", version=_version())

    @aborts
    async def ModelMetadata(
        self, request: kserve_pb2.ModelMetadataRequest, _: Context
    ) -> kserve_pb2.ModelMetadataResponse:
        check_model(request.name, request.version, self._model)
        tensor = kserve_pb2.ModelMetadataResponse.TensorMetadata
        return kserve_pb2.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform="tandem",
            inputs=[tensor(name=name, datatype=kind, shape=shape) for name, (kind, shape) in INPUTS.items()],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, (kind, shape) in OUTPUTS.items()],
        )


async def _nothing(_: inference_pb2.GenerateResponse) -> None:
    """Takes no response."""


class _OneCall(StreamWriter):
    """Gives the tokens and the ends of one request to `take`.

    A stream has one initial and one trailing metadata for all its requests, so those of a request are left out.
    """

    def __init__(self, context: Context, take: Take, in_stream: bool) -> None:
        super().__init__(context)
        self.take = take
        self._in_stream = in_stream

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        if not response.HasField("started"):
            await self.take(response)

    async def send_initial_metadata(self, metadata: Any) -> None:
        if not self._in_stream:
            await super().send_initial_metadata(metadata)

    def set_trailing_metadata(self, metadata: Any) -> None:
        if not self._in_stream:
            super().set_trailing_metadata(metadata)


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
