"""The gRPC service `tandem.v1.Inference`: the calls of clients."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc.aio

from core.config import RouterConfig
from core.errors import DeadlineExceeded, InvalidRequest, TandemError
from core.request import MAX_SEED
from protos import inference_pb2, inference_pb2_grpc
from router import validation
from router.bounded_pool import BoundedPool
from router.choice_stream import ChoiceStream, Results, call_attributes
from router.events import Deliver, Fail, Finish, StopMatched
from router.shell import RouterShell
from runtime.grpc_server import abort, remaining_s
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer

Context = grpc.aio.ServicerContext[Any, Any]
MAX_DETOKENIZE_TOKENS = 1_000_000
WRITE_GRACE_S = 0.1


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self, config: RouterConfig, tokenizer: ModelTokenizer, shell: RouterShell, validation_pool: BoundedPool
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._shell = shell
        self._validation_pool = validation_pool

    def _remaining_s(self, context: Context) -> float:
        return remaining_s(context, self._config.default_timeout_s)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        try:
            await self._generate(request, context)
        except TandemError as error:
            await abort(context, error)

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
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
            attributes = call_attributes(operation, self._tokenizer.info.name, request_id)
            self._shell.refuse(error, headers, arrived_at, attributes)
            raise
        results: Results = asyncio.Queue()
        streams = [
            ChoiceStream(
                choice=choice,
                model=self._tokenizer.info.name,
                operation=operation,
                request=choice_request,
                client_request_id=generation.request_id,
                arrived_at=arrived_at,
                text=TextStream(self._tokenizer.detokenizer(), generation.stop_strings),
                root=self._shell.telemetry.start_root(headers, arrived_at),
                results=results,
            )
            for choice, choice_request in enumerate(generation.choices)
        ]
        try:
            await self._run(streams, results, deadline, context)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the client did not read the stream") from None
        finally:
            for stream in streams:
                self._shell.close(stream)

    async def _run(self, streams: list[ChoiceStream], results: Results, deadline: float, context: Context) -> None:
        self._shell.open(streams, deadline)
        num_open = len(streams)
        while num_open:
            stream, result = await results.get()
            match result:
                case Deliver():
                    await self._write_tokens(stream, result, deadline, context)
                case Finish():
                    num_open -= 1
                    await self._write_end(stream, result, deadline, context)
                case Fail(error=error):
                    raise error

    async def _write_tokens(self, stream: ChoiceStream, delivered: Deliver, deadline: float, context: Context) -> None:
        chunk = stream.chunk(delivered)
        if stream.text.stop_match and stream.result is None:
            self._shell.post(StopMatched(stream.request.request_id))
        if chunk is not None:
            await self._write(inference_pb2.GenerateResponse(tokens=chunk), deadline, context)

    async def _write_end(self, stream: ChoiceStream, result: Finish, deadline: float, context: Context) -> None:
        rest = stream.last_chunk()
        if rest is not None:
            await self._write(inference_pb2.GenerateResponse(tokens=rest), deadline, context)
        finished = stream.finished(result.outcome, self._shell.now())
        if stream.text.stop_match:
            finished.finish_reason = inference_pb2.FINISH_REASON_STOP
        await self._write(inference_pb2.GenerateResponse(finished=finished), deadline, context)

    async def _write(self, response: inference_pb2.GenerateResponse, deadline: float, context: Context) -> None:
        """Write one message. Waits while the client does not read; raises `TimeoutError` after the deadline.

        WRITE_GRACE_S lets the machine end the request at the deadline first.
        """
        async with asyncio.timeout(deadline + WRITE_GRACE_S - self._shell.now()):
            await context.write(response)

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
        )


def _random_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)
