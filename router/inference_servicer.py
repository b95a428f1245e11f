"""The gRPC service `tandem.v1.Inference`: the calls of clients."""

from __future__ import annotations

import asyncio
import math
import secrets
from typing import Any

import grpc.aio

from core.config import RouterConfig
from core.errors import DeadlineExceeded, InvalidRequest, KeyLimitReached, TandemError
from core.request import MAX_SEED
from protos import inference_pb2, inference_pb2_grpc
from router import validation
from router.bounded_pool import BoundedPool
from router.callers import Callers
from router.choice_stream import ChoiceStream
from router.events import Fail
from router.receipt import initial_metadata, trailing_metadata
from router.shell import RouterShell
from runtime.grpc_server import abort, remaining_s
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer

Context = grpc.aio.ServicerContext[Any, Any]
MAX_DETOKENIZE_TOKENS = 1_000_000
WRITE_GRACE_S = 0.1


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer,
        shell: RouterShell,
        validation_pool: BoundedPool,
        callers: Callers,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._shell = shell
        self._validation_pool = validation_pool
        self._callers = callers

    def _remaining_s(self, context: Any) -> float:
        return remaining_s(context, self._config.default_timeout_s)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        try:
            await self.serve(request, context)
        except TandemError as error:
            await abort(context, error)

    async def serve(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Serve a request of any protocol, and write its responses to `context`: a gRPC context, or what stands for
        one. Raises `TandemError`."""
        try:
            with self._callers.admit(request, context.invocation_metadata() or (), self._shell.now()):
                await self._generate(request, context)
        except KeyLimitReached as error:
            self._shell.count_refusal(error)
            raise

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        arrived_at = self._shell.now()
        timeout_s = self._remaining_s(context)
        deadline = arrived_at + timeout_s
        headers = {key: str(value) for key, value in context.invocation_metadata() or ()}
        operation = "chat" if request.HasField("chat") else "text_completion"
        new_id, longest = self._shell.new_request_id(), self._shell.machine.workers.longest_request()
        try:
            generation = await self._validation_pool.run(
                timeout_s, request.ByteSize(), validation.prepare,
                request, self._tokenizer, self._config, new_id, _random_seed, longest,
            )  # fmt: skip
        except TandemError as error:
            request_id = request.request_id[: validation.MAX_REQUEST_ID_CHARS] or new_id
            self._shell.refuse(error, headers, arrived_at, operation, (self._tokenizer.info.name, request_id))
            raise
        changed = asyncio.Event()
        streams = [
            ChoiceStream(
                choice=choice,
                model=self._tokenizer.info.name,
                operation=operation,
                request=choice_request,
                client_request_id=generation.request_id,
                arrived_at=arrived_at,
                text=TextStream(
                    self._tokenizer.detokenizer(), generation.stop_strings, choice_request.sampling.min_tokens
                ),
                trace=self._shell.telemetry.start_trace(headers),
                changed=changed,
                token_name=self._tokenizer.token_name,
            )
            for choice, choice_request in enumerate(generation.choices)
        ]
        try:
            self._shell.open(streams, deadline)
            # WRITE_GRACE_S lets the machine end the request at the deadline first.
            async with asyncio.timeout_at(deadline + WRITE_GRACE_S):
                await self._write_all(streams, changed, request.min_interval_ms / 1e3, context)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the client did not read the stream") from None
        finally:
            for stream in streams:
                self._shell.close(stream)

    async def _write_all(
        self, streams: list[ChoiceStream], changed: asyncio.Event, min_interval_s: float, context: Any
    ) -> None:
        """Write the messages of all choices, to the end of the last one. Raises the error of the first that fails.

        Tokens that arrive during a write go into the next message of their choice. So a message is as long as the
        client or a busy loop makes it.
        """
        first, receipts, has_promised = streams[0], list[inference_pb2.Receipt](), False
        while streams:
            await changed.wait()
            changed.clear()
            if first.promise is not None and not has_promised:
                has_promised = True
                await context.send_initial_metadata(initial_metadata(first.promise))
            for stream in streams:
                if stream.is_due:
                    if min_interval_s and stream.result is None:
                        stream.rest(min_interval_s)
                    await context.write(stream.take_chunk())
            for stream in [stream for stream in streams if stream.result is not None]:
                streams = [other for other in streams if other is not stream]
                receipts.append(await self._write_end(stream, context))
        context.set_trailing_metadata(trailing_metadata(receipts))

    async def _write_end(self, stream: ChoiceStream, context: Any) -> inference_pb2.Receipt:
        if stream.has_chunk:
            await context.write(stream.take_chunk())
        if isinstance(stream.result, Fail):
            raise stream.result.error
        assert stream.result is not None
        rest = stream.last_chunk()
        if rest is not None:
            await context.write(inference_pb2.GenerateResponse(tokens=rest))
        finished = stream.finished(stream.result.outcome, self._shell.now())
        if stream.text.stop_match:
            finished.finish_reason = inference_pb2.FINISH_REASON_STOP
        await context.write(inference_pb2.GenerateResponse(finished=finished))
        return finished.receipt

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        try:
            token_ids = await self._validation_pool.run(
                self._remaining_s(context), request.ByteSize(), validation.tokenize_prompt,
                request, self._tokenizer, self._config,
            )  # fmt: skip
        except TandemError as error:
            await abort(context, error)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        try:
            if len(request.token_ids) > MAX_DETOKENIZE_TOKENS:
                raise InvalidRequest(
                    "token_ids", f"must have at most {MAX_DETOKENIZE_TOKENS} items, has {len(request.token_ids)}"
                )
            text = await self._validation_pool.run(
                self._remaining_s(context), request.ByteSize(), self._tokenizer.decode, request.token_ids
            )
        except TandemError as error:
            await abort(context, error)
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(self, _: inference_pb2.GetModelRequest, __: Context) -> inference_pb2.GetModelResponse:
        info = self._tokenizer.info
        return inference_pb2.GetModelResponse(
            name=info.name,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            eos_token_ids=sorted(info.eos_token_ids),
            has_chat_template=self._tokenizer.has_chat_template,
            tool_format=self._tokenizer.tool_format,
            can_decode=self._shell.machine.workers.served_until == math.inf,
        )


def _random_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)
