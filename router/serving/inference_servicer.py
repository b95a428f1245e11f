"""The gRPC service `tandem.v1.Inference`: the calls of clients."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from core.errors import DeadlineExceeded, InvalidRequest, KeyLimitReached, TandemError, Unauthenticated
from core.plain_text import escaped
from router.serving import validation
from router.serving.call_writer import CallWriter, Context, StreamWriter
from router.serving.choice_stream import ChoiceStream
from router.serving.output_formats import RequestGrammars
from router.serving.tenant_admission import TenantAdmission, num_following_calls
from router.shell import RouterShell
from runtime.owner_ledger import Owner
from runtime.rpc.grpc_server import WRITE_GRACE_S, CallContext, aborts, remaining_s
from runtime.validation_threads import ValidationThreads
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from text.tokenizer import ModelTokenizer

MAX_DETOKENIZE_TOKENS = 1_000_000
FLOAT_BITS = 53
# gRPC closes the connection of a draining server right behind the last call. If the client sends anything after that,
# even a word of flow control, the connection is reset, and what the client has not read by then is lost.
LAST_READ_S = 0.3


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        tokenizer: ModelTokenizer,
        shell: RouterShell,
        validation_pool: ValidationThreads,
        tenants: TenantAdmission,
        grammars: RequestGrammars,
    ) -> None:
        self._tokenizer = tokenizer
        self._shell = shell
        self._validation_pool = validation_pool
        self._tenants = tenants
        self._grammars = grammars
        self.draining = False

    def _remaining_s(self, context: Any) -> float:
        return remaining_s(context, self._shell.config.default_timeout_s)

    @aborts
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        await self.serve(request, StreamWriter(context))
        if self.draining:
            await asyncio.sleep(min(LAST_READ_S, self._remaining_s(context) / 2))

    async def serve(self, request: inference_pb2.GenerateRequest, writer: CallWriter) -> None:
        """Serve a request of any protocol. Raises `TandemError`."""
        try:
            with self._tenants.admit(request, writer.context, self._shell.now()) as owner:
                await self._generate(request, writer, owner)
        except (KeyLimitReached, Unauthenticated) as error:
            self._shell.count_refusal(error)
            raise

    async def _generate(self, request: inference_pb2.GenerateRequest, writer: CallWriter, owner: Owner) -> None:
        arrived_at = self._shell.now()
        timeout_s = self._remaining_s(writer.context)
        deadline = arrived_at + timeout_s
        headers = {key: str(value) for key, value in writer.context.invocation_metadata() or ()}
        operation = "chat" if request.HasField("chat") else "text_completion"
        new_id, limits = self._shell.new_request_id(), self._shell.view.decode_limits
        try:
            generation = await self._validation_pool.run(
                owner, timeout_s, validation.work_of(request, self._grammars), validation.prepare,
                request, self._tokenizer, self._shell.config, new_id, _random_seed, limits, self._grammars,
                lambda: self._shell.now() >= deadline,
            )  # fmt: skip
        except TandemError as error:
            request_id = escaped(request.request_id[: validation.MAX_REQUEST_ID_CHARS]) or new_id
            self._shell.refuse(error, headers, arrived_at, operation, (self._tokenizer.info.name, request_id))
            raise
        streams = [
            ChoiceStream(
                choice=choice,
                model=request.model or self._tokenizer.info.name,
                operation=operation,
                request=choice_request,
                client_request_id=generation.request_id,
                arrived_at=arrived_at,
                text=text,
                trace=self._shell.telemetry.start_trace(headers),
                changed=writer.changed,
                token_name=self._tokenizer.token_name,
                calls=calls,
                returns_prompt=request.return_prompt_token_ids,
            )
            for choice, (choice_request, (text, calls)) in enumerate(
                zip(generation.choices, generation.outputs, strict=True)
            )
        ]
        writer.begin(streams, request.min_interval_ms / 1e3, self._shell.now)
        if request.resume:
            streams[0].resume(request.resume, generation.end)
            if generation.end is not None:  # no worker has anything left to do
                await _write(writer, deadline)
                return
        try:
            self._shell.open(streams, deadline, num_following_calls(writer.context) * len(streams))
            await _write(writer, deadline)
        finally:
            for stream in streams:
                self._shell.close(stream)

    @aborts
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: CallContext
    ) -> inference_pb2.TokenizeResponse:
        token_ids = await self._validation_pool.run(
            self._tenants.owner_of(context), self._remaining_s(context),
            validation.prompt_work_of(request), validation.tokenize_prompt,
            request, self._tokenizer, self._shell.config,
        )  # fmt: skip
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    @aborts
    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        if len(request.token_ids) > MAX_DETOKENIZE_TOKENS:
            raise InvalidRequest(
                "token_ids", f"must have at most {MAX_DETOKENIZE_TOKENS} items, has {len(request.token_ids)}"
            )
        text = await self._validation_pool.run(
            self._tenants.owner_of(context), self._remaining_s(context), request.ByteSize(),
            self._tokenizer.decode, request.token_ids, True,
        )  # fmt: skip
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(self, _: inference_pb2.GetModelRequest, __: CallContext) -> inference_pb2.GetModelResponse:
        info = self._tokenizer.info
        return inference_pb2.GetModelResponse(
            name=info.name,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            eos_token_ids=sorted(info.eos_token_ids),
            has_chat_template=self._tokenizer.has_chat_template,
            tool_format=self._tokenizer.tool_format,
            can_decode=self._shell.view.can_serve,
            adapters=info.adapters,
            awaits_prefill=self._shell.view.awaits_prefill,
        )


async def _write(writer: CallWriter, deadline: float) -> None:
    """WRITE_GRACE_S lets the machine end the request at the deadline first."""
    try:
        async with asyncio.timeout_at(deadline + WRITE_GRACE_S):
            await writer.write_all()
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the client did not read the stream") from None


def _random_seed() -> int:
    """Exact also as a float64: numbers of JSON and JavaScript bring it back unchanged when they resume or repeat."""
    return secrets.randbelow(1 << FLOAT_BITS)
