"""`vllm.grpc.engine.VllmEngine` on the port of a worker: routers of other projects drive the worker through it.

    Generate --> Choice, one for each of n --> PrefillArrived | DecodeArrived --> machine
                   `<-- tokens, end ---------- PrefillDone | EmitTokens, DecodeDone <--'

On a prefill worker, Generate computes a prompt and one token. With {"do_remote_decode": true} the worker offers the
blocks of the prompt, and its answer has the parameters for a decode worker. A decode worker with these parameters pulls
the blocks; without them, or if the hand-off fails before the first token, the decode worker computes the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from core.errors import DeadlineExceeded, InvalidRequest, TandemError, TransferFailed, WorkerUnavailable
from core.handoff import TransferId
from core.request import Request
from core.scheduling.block_pool import BlockEvent
from runtime.driver import Driver
from runtime.rpc.grpc_server import WRITE_GRACE_S, abort, remaining_s
from text.text_stream import TextStream
from text.tokenizer import ModelTokenizer
from vllm_engine import hand_off, info
from vllm_engine.choice import Choice
from vllm_engine.hand_off import HandOff
from vllm_engine.kv_events import KvEvents
from vllm_engine.roles import Progress, Role
from vllm_engine.sampling import Sampling, decode_sampling, refuse_unknown_fields
from worker.service import WorkerParts

Context = grpc.aio.ServicerContext[Any, Any]
MAX_REQUEST_ID_CHARS = 256
_UNSUPPORTED = ("mm_inputs", "media_refs", "kv_transfer_params")


@dataclass(slots=True, eq=False)
class _Call:
    request_id: str
    deadline: float
    streams: bool
    choices: list[Choice]
    changed: asyncio.Event
    ticket: TransferId | None  # of the offer that a prefill worker makes, or of the offer to bind
    source: HandOff | None
    started: dict[str, Choice] = field(default_factory=dict)  # by sequence id


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the stubs have no types
    full_name = "vllm.grpc.engine.VllmEngine"
    register = staticmethod(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server)

    def __init__(
        self,
        role: Role,
        load_tokenizer: Callable[[], ModelTokenizer],
        default_timeout_s: float,
        model_path: str,
        guarded: bool,
    ) -> None:
        self.guarded = guarded
        self._role = role
        self._load_tokenizer = load_tokenizer
        self._default_timeout_s = default_timeout_s
        self._model_path = model_path
        self._calls: dict[str, _Call] = {}  # by request id
        self._by_sequence: dict[str, Choice] = {}  # sequences that the machine has, or soon ends
        self._num_sequences = 0
        self._failure: TandemError | None = None

    async def start(self, driver: Driver[Any, Any], parts: WorkerParts, publish_changes: Callable[[], object]) -> None:
        self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
        self._driver, self._parts = driver, parts
        self._started_at = driver.now()
        core = parts.machine.core
        self._events = KvEvents(core.pool, core.scheduler.block_size, publish_changes)

    # ---- calls of routers

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Context) -> None:
        try:
            await self._generate(request, context)
        except TandemError as error:
            await abort(context, error)

    async def _generate(self, wire: vllm_engine_pb2.GenerateRequest, context: Context) -> None:
        deadline = self._driver.now() + remaining_s(context, self._default_timeout_s)
        try:
            async with asyncio.timeout_at(deadline + WRITE_GRACE_S):
                call = await self._prepare(wire, deadline)
                try:
                    await self._serve(call, context)
                finally:
                    self._close(call)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the answer was read") from None

    async def _prepare(self, wire: vllm_engine_pb2.GenerateRequest, deadline: float) -> _Call:
        """Check every field, and note the call. Nothing has started."""
        self._refuse_unsupported(wire)
        token_ids = await self._prompt(wire)
        room = max(1, self._most_tokens() - len(token_ids))
        sampling = decode_sampling(wire.sampling_params, room, secrets.randbelow(1 << 62))
        request = Request(wire.request_id, token_ids, len(token_ids), sampling.params)
        model = self._tokenizer.info
        request.validate_for(model.vocab_size, model.context_length)
        self._role.check(request, sampling.num_choices)
        ticket, source = self._transfer(wire.kv_transfer_params_json, request)
        if wire.request_id in self._calls:
            raise InvalidRequest("request_id", f"{wire.request_id[:64]!r} is being served already")
        changed = asyncio.Event()
        choices = [self._choice(index, request, sampling, changed) for index in range(sampling.num_choices)]
        call = _Call(wire.request_id, deadline, wire.stream, choices, changed, ticket, source)
        self._calls[wire.request_id] = call
        return call

    def _refuse_unsupported(self, wire: vllm_engine_pb2.GenerateRequest) -> None:
        if self._failure is not None:
            raise self._failure
        refuse_unknown_fields("request", wire)
        if not 1 <= len(wire.request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                "request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters, has {len(wire.request_id)}"
            )
        for name in _UNSUPPORTED:
            if wire.HasField(name):
                raise InvalidRequest(name, "is not supported")
        if wire.extra_mm_inputs:
            raise InvalidRequest("extra_mm_inputs", "is not supported")
        if wire.data_parallel_rank != 0:
            raise InvalidRequest("data_parallel_rank", f"must be 0, is {wire.data_parallel_rank}")

    async def _prompt(self, wire: vllm_engine_pb2.GenerateRequest) -> tuple[int, ...]:
        kind = wire.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input", "one of tokenized and text must be set")
        if kind == "tokenized":
            field, token_ids = "tokenized.input_ids", wire.tokenized.input_ids
        else:
            field, token_ids = "text", await asyncio.to_thread(self._tokenizer.encode, wire.text)
        most = self._tokenizer.info.context_length - 1
        if len(token_ids) > most:
            raise InvalidRequest(field, f"must have at most {most} tokens, has {len(token_ids)}")
        return tuple(token_ids)

    def _most_tokens(self) -> int:
        """Prompt and output of one request."""
        core = self._parts.machine.core
        return min(self._tokenizer.info.context_length, core.pool.num_blocks * core.scheduler.block_size)

    def _transfer(self, params: str, request: Request) -> tuple[TransferId | None, HandOff | None]:
        if self._role.kv_role == "kv_producer":
            return (secrets.randbits(128) if hand_off.wants_decode_elsewhere(params) else None), None
        source = hand_off.decode_hand_off(params)
        if source is None or not self._is_usable(source, request):
            return None, None
        return source.transfer_id, source

    def _is_usable(self, source: HandOff, request: Request) -> bool:
        """Whether the first token of the prefill worker is one that this request could have drawn, with all that the
        router asks for. Raises `InvalidRequest` if the blocks are those of another prompt."""
        if source.prompt_hash != hand_off.prompt_hash(request):
            raise InvalidRequest(hand_off.FIELD, "the prompt is not the one that the prefill worker has computed")
        sampling, first = request.sampling, source.first_token
        if sampling.min_tokens and first.token_id in sampling.stop_tokens(self._tokenizer.eos_token_ids):
            return False
        if sampling.num_logprobs is None:
            return True
        return first.logprob is not None and len(first.top_logprobs) >= sampling.num_logprobs

    def _choice(self, index: int, request: Request, sampling: Sampling, changed: asyncio.Event) -> Choice:
        text = None
        if sampling.stop_strings:
            text = TextStream(self._tokenizer.detokenizer(), sampling.stop_strings, sampling.params.min_tokens)
        return Choice(index, request, text, changed)

    # ---- one call

    async def _serve(self, call: _Call, context: Context) -> None:
        """Write the messages of all choices. The others start when the first one has a token: then their prompt is
        cached."""
        first = call.choices[0]
        self._start(call, first, call.source)
        waiting, left = call.choices[1:], list(call.choices)
        while left:
            await call.changed.wait()
            call.changed.clear()
            if isinstance(first.error, TransferFailed) and call.source is not None:
                first.error, first.first_token, call.source = None, None, None
                self._start(call, first, None)
            if waiting and (first.tokens or first.ended):
                for choice in waiting:
                    if not choice.ended:
                        self._start(call, choice, None)
                waiting = []
            for choice in left:
                if choice.error is not None:
                    raise choice.error
                if call.streams and choice.has_chunk:
                    await context.write(choice.chunk())
            for choice in [choice for choice in left if choice.ended and not (call.streams and choice.has_chunk)]:
                left.remove(choice)
                await context.write(choice.complete(self._answer(call, choice)))
            if any(choice.ended for choice in left):
                call.changed.set()  # it ended during a write

    def _start(self, call: _Call, choice: Choice, source: HandOff | None) -> None:
        self._num_sequences += 1
        sequence_id = f"vllm-{self._num_sequences}.{choice.index}"
        request = choice.request.for_choice(choice.index, sequence_id)
        if source is not None:
            choice.first_token, choice.prefill_cached_tokens = source.first_token, source.cached_tokens
        ticket, owner = (call.ticket, None) if source is None else (source.transfer_id, source.owner)
        event = self._role.arrival(request, call.deadline, ticket, owner)
        self._by_sequence[sequence_id] = call.started[sequence_id] = choice
        choice.ended_by_machine = False
        try:
            self._driver.ask(event)
        except TransferFailed as error:  # the ticket was used before
            choice.take(Progress(sequence_id, error=error))

    def _answer(self, call: _Call, choice: Choice) -> str:
        """The parameters for a decode worker, if this is a prefill worker that offers the blocks."""
        if call.ticket is None or call.source is not None or self._role.kv_role != "kv_producer" or not choice.tokens:
            return ""
        owner = self._parts.machine.transfers.address
        prompt = hand_off.prompt_hash(choice.request)
        return hand_off.encode_hand_off(HandOff(call.ticket, owner, prompt, choice.tokens[0], choice.cached_tokens))

    def _close(self, call: _Call) -> None:
        """The call has ended: cancel what still runs. The answers of the machine find no choice any more."""
        del self._calls[call.request_id]
        for sequence_id, choice in call.started.items():
            if self._by_sequence.pop(sequence_id, None) is not None and not choice.ended_by_machine:
                self._driver.post_threadsafe(self._role.cancellation(sequence_id))

    # ---- from the worker

    def perform(self, action: object) -> bool:
        mine = False
        for progress in self._role.progress(action):
            choice = self._by_sequence.get(progress.sequence_id)
            if choice is None:
                continue
            mine = True
            if choice.take(progress):
                self._driver.post_threadsafe(self._role.cancellation(progress.sequence_id))
        return mine

    def on_block_events(self, events: Sequence[BlockEvent]) -> None:
        self._events.on_block_events(events)

    def fail_all(self, error: TandemError) -> None:
        self._failure = error
        self._events.close()
        for call in self._calls.values():
            for choice in call.choices:
                if not choice.ended:
                    choice.error = error
            call.changed.set()

    # ---- the other calls

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, _: Context) -> vllm_engine_pb2.AbortResponse:
        """An unknown id is no error: the request may have ended on its own."""
        for request_id in request.request_ids:
            call = self._calls.get(request_id)
            if call is not None:
                for choice in call.choices:
                    choice.abort()  # the end of the call cancels its sequences
        return vllm_engine_pb2.AbortResponse()

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        async with contextlib.aclosing(self._events.subscribe(request.start_sequence_number)) as batches:
            async for batch in batches:
                await context.write(batch)
        await abort(context, WorkerUnavailable("the subscriber read too slowly, or this worker is stopping"))

    async def HealthCheck(
        self, _: vllm_engine_pb2.HealthCheckRequest, __: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        return info.health(self._parts, self._failure, self._driver.stopped)

    async def GetModelInfo(
        self, _: vllm_engine_pb2.GetModelInfoRequest, __: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        return info.model_info(self._tokenizer.info, self._model_path, self._most_tokens())

    async def GetServerInfo(
        self, _: vllm_engine_pb2.GetServerInfoRequest, __: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        uptime_s = self._driver.now() - self._started_at
        return info.server_info(self._parts, self._role.kv_role, len(self._calls), uptime_s)

    async def GetLoads(self, _: vllm_engine_pb2.GetLoadsRequest, __: Context) -> vllm_engine_pb2.GetLoadsResponse:
        return info.loads(self._parts)

    async def _unsupported(self, _: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker does not support the call")

    Embed = FlushCache = StartProfile = StopProfile = GetTokenizer = _unsupported
