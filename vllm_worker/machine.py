"""A prefill or decode worker with vLLM inside: calls of routers in, requests for the engine and answers out.

    PrefillArrived -> Submit(offers) -> first token and hand-off -> PrefillDone    the engine keeps the KV under a lease
    DecodeArrived with a source -> wait for HandoffArrived -> Submit(handoff) -> tokens -> DecodeDone
    DecodeArrived without one ---> Submit ----------------------------------------^

An engine with a transfer agent of its own needs no HandoffArrived: both engines get the transfer with the request, and
agree about it between themselves (vllm_worker/kv/).

A worker that drains moves its running requests to other workers, if its engine has a transfer agent
(vllm_worker/moves.py).

The engine schedules, owns the blocks and moves them. The machine ends each call once, at its deadline at the latest,
numbers the tokens, and keeps the figures of the report.

An engine that reports nothing for `step_timeout_s` while it has requests hangs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerDrains,
    WorkerUnavailable,
)
from core.handoff import AgentAddress, PrefixSource, TransferId
from core.lifecycle import FinishReason, Stage, Timeline
from core.machine import Tick
from core.paths import PeerJoined, PeerLeft
from core.request import Request
from core.scheduling.worker_load import WorkerLoad
from decode_worker.events import (
    DecodeArrived,
    DecodeCancelled,
    DecodeDone,
    DecodeFailed,
    EmitTokens,
    HandedOver,
    HandoffArrived,
    MoveArrived,
    ResumeArrived,
)
from decode_worker.move_asks import MIN_TOKENS_LEFT
from prefill_worker.machine import OfferWithdrawn, PrefillArrived, PrefillCancelled, PrefillFailed
from vllm_worker.awaited_handoffs import AwaitedHandoffs
from vllm_worker.call_ends import decode_done, error_of, lost_move, prefill_done
from vllm_worker.engine import (
    BlocksChanged,
    EngineDied,
    EngineInfo,
    EngineOutput,
    EngineStep,
    EngineTransfer,
    HandshakeEnded,
    Prompt,
)
from vllm_worker.engine_call import EngineCall
from vllm_worker.events import Abort, Fail, GivePrefix, Submit, VllmAction, VllmEvent
from vllm_worker.handshakes import Handshakes
from vllm_worker.load import EngineLoad
from vllm_worker.moves import EngineMoves, MoveOut
from worker.call_record import CallRecord
from worker.core import ConfigChanged, DrainRequested
from worker.open_calls import OpenCalls
from worker.prefixes import PrefixRequested


@dataclass(frozen=True, slots=True)
class Limits:
    step_timeout_s: float  # without a report of the engine
    max_waiting: int
    max_running: int  # in the engine
    slo_itl_s: float = 0.0  # wanted time between tokens, for the receipts of routers; 0 = none

    @property
    def max_calls(self) -> int:
        """Open ones; more are refused."""
        return self.max_waiting + self.max_running


@dataclass(slots=True)
class VllmMachine:
    """`handle` raises `TandemError` if it refuses a call."""

    info: EngineInfo
    limits: Limits
    load: EngineLoad = field(init=False)
    draining: bool = False
    open_calls: OpenCalls = field(default_factory=OpenCalls)
    handshakes: Handshakes = field(default_factory=Handshakes)
    moves: EngineMoves = field(default_factory=EngineMoves)
    _calls: dict[str, EngineCall] = field(default_factory=dict)  # by request id
    _handoffs: AwaitedHandoffs = field(default_factory=AwaitedHandoffs)
    _reported_at: float = 0.0  # by the engine, or the time of the first request since it was idle
    _num_submitted: int = 0  # requests in the engine
    _failed: bool = False

    def __post_init__(self) -> None:
        self.load = EngineLoad(self.info, self.limits.slo_itl_s)

    def handle(self, event: VllmEvent, now: float) -> list[VllmAction]:
        actions = self._handle(event, now)
        if self.draining and self.info.agent is not None:
            actions += self.moves.ask_to_leave(filter(self._can_move, self._calls), now)
        return actions

    def _handle(self, event: VllmEvent, now: float) -> list[VllmAction]:
        match event:
            case EngineOutput():
                return self._on_output(event, now)
            case EngineStep():
                self._reported_at = now
                self.load.record(event, now)
                self.open_calls.counts.record(event.num_decodes + bool(event.prompt_tokens))
                return [*self._send_pulled(event), *self._lose_moves(event.lost_moves, now)]
            case BlocksChanged():
                pass  # the shell reports the blocks
            case PeerJoined(peer, is_owner):
                return [*self.handshakes.join(peer)] if is_owner and not self.draining else []
            case PeerLeft(name):
                self.handshakes.leave(name)
            case HandshakeEnded():
                return [*self.handshakes.end(event)]
            case EngineDied(detail):
                return self._on_died(detail)
            case PrefillArrived(request):
                transfer = self._transfer(event.transfer_id, event.reader, event.deadline, is_offer=True)
                call = EngineCall(request, True, None, transfer, self._readable(request, event.prefix))
                return self._on_arrived(event, call, now)
            case DecodeArrived(request, source):
                transfer_id = None if source is None else source[0]
                transfer = (
                    None
                    if source is None
                    else self._transfer(*source, event.deadline, is_offer=False, is_move=event.is_move)
                )
                prefix = self._readable(request, event.prefix)
                call = EngineCall(request, False, None if transfer else transfer_id, transfer, prefix)
                return self._on_arrived(event, call, now)
            case PrefillCancelled(request_id) | DecodeCancelled(request_id):
                return self._end(request_id, RequestCancelled("the router cancelled the call"))
            case OfferWithdrawn():
                raise InvalidRequest("transfer_id", "the engine of this worker keeps an offer until its lease ends")
            case MoveArrived():
                return [self._move_out(event)]
            case ResumeArrived():
                return [*self.moves.resume(event, now)]
            case PrefixRequested():
                return [self._give_prefix(event, now)]
            case HandoffArrived(transfer_id, handoff):
                waiting = self._handoffs.arrive(transfer_id, handoff, now)
                return [] if waiting is None else self._submit(self._calls[waiting], handoff, now)
            case ConfigChanged(scheduler, worker):
                slo_itl_s = self.load.slo_itl_s = scheduler.slo_itl_ms / 1e3
                limits = self.limits
                self.limits = Limits(worker.step_timeout_s, scheduler.max_waiting, limits.max_running, slo_itl_s)
            case DrainRequested():
                self.draining = True
                self.handshakes.stop()
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)
        return []

    def next_deadline(self) -> float | None:
        known = [self.open_calls.deadlines.next(), self.moves.next_deadline(), self._handoffs.next_deadline()]
        if self._num_submitted and not self._failed:
            known.append(self._reported_at + self.limits.step_timeout_s)
        return min((when for when in known if when is not None), default=None)

    @property
    def idle(self) -> bool:
        """No call is open, and no peer reads blocks of ours."""
        return not self._calls and not self.load.num_lent

    def worker_load(self) -> WorkerLoad:
        return self.load.worker_load(self.open_calls, self.draining)

    # ---- moves

    def _can_move(self, request_id: str) -> bool:
        """True for a request in decode that has enough tokens left to be worth a move."""
        call = self._calls[request_id]
        is_decoding = self.open_calls.timelines[request_id].stage is Stage.DECODE and not call.is_prefill
        return is_decoding and call.num_tokens_left >= MIN_TOKENS_LEFT

    def _move_out(self, event: MoveArrived) -> MoveOut:
        request_id = event.request_id
        if request_id not in self._calls or not self._can_move(request_id):
            raise TransferFailed(f"{request_id} cannot move now")
        deadline = self.open_calls.deadlines.when(request_id)
        transfer = self._transfer(event.transfer_id, event.reader, deadline, is_offer=True, is_move=True)
        if transfer is None:
            raise TransferFailed("the connector of this worker moves no request")
        call = self._calls[request_id]
        if not len(call.request.token_ids) <= event.num_tokens <= len(call.request.token_ids) + call.num_tokens:
            raise TransferFailed(f"{request_id} has not sent {event.num_tokens} tokens, or was called with more")
        return self.moves.start(event, transfer)

    def _lose_moves(self, lost: tuple[TransferId, ...], now: float) -> list[VllmAction]:
        """The owners' requests go on. The engines of the readers would compute what the owners have computed."""
        for transfer_id in lost:
            self.moves.lose(transfer_id, now)
        waiting = [request_id for request_id, call in self._calls.items() if lost and call.awaited_move in lost]
        return [action for request_id in waiting for action in self._end(request_id, lost_move())]

    def _send_pulled(self, step: EngineStep) -> list[VllmAction]:
        """Their owner has sampled these tokens, and may have died before a router got them."""
        pulled = dict(step.pulled_tokens)
        calls = [call for call in self._calls.values() if pulled and call.pull_id in pulled]
        return [EmitTokens(call.pulled(pulled[call.pull_id])) for call in calls if call.pull_id is not None]

    # ---- calls

    def _on_arrived(self, event: PrefillArrived | DecodeArrived, call: EngineCall, now: float) -> list[VllmAction]:
        request = call.request
        if self.draining:
            raise WorkerDrains("this worker drains")
        if self._failed:
            raise WorkerUnavailable("the engine of this worker is dead")
        if request.request_id in self._calls:
            raise InvalidRequest("request_id", f"{request.request_id} is being served already")
        self._handoffs.refuse(call.transfer_id)
        if len(self._calls) >= self.limits.max_calls:
            raise QueueFull(f"{self.limits.max_calls} requests are open already (max_waiting + max_running)")
        record = CallRecord(self.load.num_waiting, self.load.num_queued_tokens)
        self.open_calls.open(request.request_id, event.call, event.deadline, record, now)
        self._calls[request.request_id] = call
        if call.transfer_id is None:
            return self._submit(call, b"", now)
        handoff = self._handoffs.take(call.transfer_id, request.request_id)
        return self._submit(call, handoff, now) if handoff else []

    def _transfer(
        self, transfer_id: TransferId, peer: AgentAddress, deadline: float, *, is_offer: bool, is_move: bool = False
    ) -> EngineTransfer | None:
        """None if vLLM's own connector moves the blocks. Raises `LayoutMismatch`."""
        agent = self.info.agent
        if agent is None:
            return None
        if differences := agent.layout.differences(peer.layout):
            raise LayoutMismatch(differences)
        return EngineTransfer(transfer_id, peer, is_offer, deadline, is_move)

    def _give_prefix(self, event: PrefixRequested, now: float) -> GivePrefix:
        transfer = self._transfer(event.transfer_id, event.reader, now + event.limit_s, is_offer=True)
        if transfer is None:
            raise InvalidRequest("transfer_id", "the engine of this worker gives no cached prefix to peers")
        if len(event.token_ids) > self.info.context_length:  # the engine hashes all of them between two steps
            raise InvalidRequest(
                "packed_token_ids", f"the engine holds {self.info.context_length} tokens of a sequence"
            )
        return GivePrefix(transfer, event.token_ids, event.cache_salt)

    def _readable(self, request: Request, prefix: PrefixSource | None) -> PrefixSource | None:
        """A source that this engine can read from. One knows the tokens, but not the adapter of a request."""
        agent = self.info.agent
        if prefix is None or agent is None or request.adapter or prefix.agent.layout != agent.layout:
            return None
        return prefix

    def _submit(self, call: EngineCall, handoff: bytes, now: float) -> list[VllmAction]:
        request_id = call.request.request_id
        if not self._num_submitted:
            self._reported_at = now
        self._num_submitted += 1
        call.submitted = True
        transfer = call.transfer
        if handoff or (transfer is not None and not transfer.is_offer):
            self.open_calls.enter(request_id, Stage.TRANSFER, now)
        else:
            self.load.add_prompt(request_id, len(call.request.token_ids), now)
        return [Submit(Prompt(request_id, call.request, call.is_prefill, handoff, transfer, call.prefix))]

    # ---- reports of the engine

    def _on_output(self, output: EngineOutput, now: float) -> list[VllmAction]:
        """Drops outputs of calls that have ended."""
        self._reported_at = now
        call = self._calls.get(output.request_id)
        if call is None or not call.submitted:
            return []
        if output.error:
            return self._end(output.request_id, error_of(output), in_engine=False)
        actions: list[VllmAction] = []
        call.num_cached_tokens = max(call.num_cached_tokens, output.num_cached_tokens)
        if output.tokens:
            if not call.num_tokens:
                if call.awaited_move is not None and not output.num_pulled_tokens:
                    return self._refuse_moved(output)
                call.num_tokens = call.num_pulled_tokens = output.num_pulled_tokens
            self._note_tokens(call, output, now)
            if call.is_prefill:
                return self._finish_prefill(call, output)
            actions.append(EmitTokens(call.take(output)))
        if output.finish_reason is None:
            return actions
        if call.is_prefill or not call.num_tokens:
            return self._end(
                output.request_id, TandemError("the engine ended a request without a token"), in_engine=False
            )
        if output.is_moved:
            actions.append(HandedOver(output.request_id, call.next_index))
        reason = FinishReason.HANDOFF if output.is_moved else output.finish_reason
        return [*actions, self._finish_decode(call, output, reason, now)]

    def _refuse_moved(self, output: EngineOutput) -> list[VllmAction]:
        """The KV of a request that moves here did not come, so the engine has computed all that it knew of it.

        The owner may still sample, or has sampled tokens that this engine does not know.
        """
        return self._end(output.request_id, lost_move(), in_engine=output.finish_reason is None)

    def _note_tokens(self, call: EngineCall, output: EngineOutput, now: float) -> None:
        request_id = call.request.request_id
        timeline = self.open_calls.timelines[request_id]
        if timeline.stage is Stage.QUEUE:
            self.open_calls.enter(request_id, Stage.PREFILL, min(max(timeline.entered_at, output.scheduled_at), now))
        if timeline.stage is not Stage.DECODE:
            self.open_calls.enter(request_id, Stage.DECODE, now)
        context = len(call.request.token_ids) + call.num_tokens + len(output.tokens)
        self.load.note_tokens(request_id, len(output.tokens), context)

    def _finish_prefill(self, call: EngineCall, output: EngineOutput) -> list[VllmAction]:
        request, token = call.request, output.tokens[0]
        finish_reason = call.finish_reason_after(token, self.info.eos_token_ids)
        if finish_reason is None and not output.handoff and call.transfer is None:
            return self._end(
                request.request_id, TransferFailed("the engine keeps no KV of this prompt"), in_engine=False
            )
        timeline, record = self._told_of(request.request_id)
        done = prefill_done(call, output, finish_reason, self.info.layout, timeline, record)
        self._forget(request.request_id)
        return [done]

    def _finish_decode(
        self, call: EngineCall, output: EngineOutput, finish_reason: FinishReason, now: float
    ) -> DecodeDone:
        request_id = call.request.request_id
        self.open_calls.enter(request_id, Stage.FINISHED, now)
        timeline, record = self._told_of(request_id)
        self._forget(request_id)
        return decode_done(call, output, finish_reason, self.info.layout, timeline, record)

    def _told_of(self, request_id: str) -> tuple[Timeline, CallRecord]:
        return self.open_calls.timelines[request_id], self.open_calls.records[request_id]

    def _on_died(self, detail: str) -> list[VllmAction]:
        self._failed = True
        lost = WorkerUnavailable(f"the engine of this worker died: {detail}")
        ended = [self._fail_call(request_id, lost) for request_id in list(self._calls)]
        return [*ended, Fail(detail)]

    # ---- ends

    def _on_tick(self, now: float) -> list[VllmAction]:
        actions: list[VllmAction] = []
        for request_id in self.open_calls.deadlines.expire(now):
            stage = self.open_calls.timelines[request_id].stage.value
            actions += self._end(request_id, DeadlineExceeded(f"the deadline passed on the worker in stage {stage}"))
        self._handoffs.forget_old(now)
        if self._num_submitted and not self._failed and now >= self._reported_at + self.limits.step_timeout_s:
            silent = f"no step has ended for {self.limits.step_timeout_s:g} s (step_timeout_s)"
            return [*actions, *self._on_died(silent)]
        return actions

    def _end(self, request_id: str, error: TandemError, *, in_engine: bool = True) -> list[VllmAction]:
        """End an open call early. `in_engine`: the engine does not know yet."""
        call = self._calls.get(request_id)
        if call is None:
            return []
        failed = self._fail_call(request_id, error)
        return [Abort(request_id), failed] if in_engine and call.submitted else [failed]

    def _fail_call(self, request_id: str, error: TandemError) -> VllmAction:
        is_prefill = self._calls[request_id].is_prefill
        self._forget(request_id)
        return PrefillFailed(request_id, error) if is_prefill else DecodeFailed(request_id, error)

    def _forget(self, request_id: str) -> None:
        call = self._calls.pop(request_id)
        if call.submitted:
            self._num_submitted -= 1
        elif call.transfer_id is not None:
            del self._handoffs.waiting[call.transfer_id]
        self.load.forget(request_id)
        self.moves.forget(request_id)
        self.open_calls.close(request_id)

    def check(self) -> None:
        """Each open call waits for a hand-off or is in the engine."""
        self.open_calls.check()
        assert self._calls.keys() == self.open_calls.calls.keys()
        waiting = {request_id for request_id, call in self._calls.items() if not call.submitted}
        assert waiting == set(self._handoffs.waiting.values())
        assert self._num_submitted == len(self._calls) - len(waiting)
        self._handoffs.check()
        assert self.moves.by_id.keys() <= self._calls.keys()
        self.load.check(self._calls.keys())
        self.handshakes.check()
