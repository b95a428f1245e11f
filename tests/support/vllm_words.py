"""The words of transcripts (tests/support/transcripts.py) for VllmMachine.

machine              a new worker; the options are its limits
                     (`agent`: its engine has a transfer agent)
prefill, decode      calls arrive; `ticket` is the id of the hand-off that a decode call reads
output NAME TOKENS   of the engine, `ends` with a reason; `step` is its report of a step
                     `source`: the ticket of a prefix that a peer has cached; `heads`: of the pool of the peer
asks TICKET          a router tells of a peer that will read a prefix
move NAME TICKET     the router has found a worker for a running request; `resume`: it has ended the call of that worker
time                 the clock that `wait` moves, with the Ticks that are due on the way
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.config import SchedulerConfig, WorkerConfig
from core.handoff import AgentAddress, OwnerState, PrefixSource, PullerState
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason
from core.machine import Tick
from core.paths import PeerJoined, PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.ledger import BlockHolder, Claim
from core.scheduling.worker_load import CallId
from core.step import SampledToken
from decode_worker.events import DecodeArrived, DecodeCancelled, DecodeDone, HandoffArrived, MoveArrived, ResumeArrived
from prefill_worker.machine import OfferWithdrawn, PrefillArrived, PrefillCancelled, PrefillDone
from tests.support.deadlines import deadlines_until
from tests.support.transcripts import Replay, counts, numbers_of, transcripts_of
from tests.support.worker_words import seen
from vllm_worker.engine import EngineDied, EngineInfo, EngineOutput, EngineStep, HandshakeEnded
from vllm_worker.events import Abort, Fail, GivePrefix, Submit
from vllm_worker.handshakes import ShakeHands
from vllm_worker.machine import Limits, VllmMachine
from vllm_worker.moves import MoveOut, Stay
from vllm_worker.view import VllmView
from worker.core import ConfigChanged, DrainRequested
from worker.prefixes import PrefixRequested, PulledPrefix

EOS = 7
LAYOUT = KVLayout("0" * 16, "float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=2)
INFO = EngineInfo(
    num_blocks=100, layout=LAYOUT, eos_token_ids=frozenset({EOS}), vocab_size=64, context_length=64, max_step_tokens=32
)
TIMEOUT_S = 100.0

Actions = list[Any]


def transcripts(text: str, setup: str) -> Callable[[str], None]:
    return transcripts_of(VllmReplay, text, setup)


def agent_of(name: str, metadata: bytes = b"", heads: int = 1) -> AgentAddress:
    return AgentAddress(name, 1, metadata, 0, 100, replace(LAYOUT, num_kv_heads=heads), 1.0)


def prefix_of(ticket: int, heads: int = 1) -> PrefixSource | None:
    return PrefixSource(ticket, agent_of("peer", heads=heads), 4, 0.1) if ticket else None


def request(name: str, num_tokens: int = 6, delivered: int = 0, adapter: str = "", **sampling: Any) -> Request:
    """`delivered`: tokens behind the prompt."""
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    return Request(name, tuple(range(10, 10 + num_tokens + delivered)), num_tokens, params, adapter=adapter)


class VllmReplay(Replay):
    def __init__(self, max_waiting: int = 8) -> None:
        self.machine(max_waiting=max_waiting)

    def machine(self, max_waiting: int = 8, max_running: int = 0, agent: int = 0) -> Actions:
        info = replace(INFO, agent=agent_of("ours")) if agent else INFO
        self.worker, self.now = VllmMachine(info, Limits(30.0, max_waiting, max_running)), 0.0
        return []

    def check(self) -> None:
        self.worker.check()

    def post(self, event: Any) -> Actions:
        actions = self.worker.handle(event, self.now)
        self.worker.check()
        return actions

    def seen(self, action: Any) -> str:
        match action:
            case Submit(prompt):
                handoff = [f"reads {prompt.handoff.decode()}"] if prompt.handoff else []
                if (transfer := prompt.transfer) is not None:
                    handoff = [
                        f"{'to' if transfer.is_offer else 'from'} {transfer.peer.name} by {transfer.transfer_id}"
                    ]
                if prompt.prefix is not None:
                    handoff.append(f"with {prompt.prefix.num_tokens} of {prompt.prefix.agent.name}")
                return " ".join(["submit", prompt.request_id, *["offers"] * prompt.offers, *handoff])
            case GivePrefix(transfer, token_ids):
                return f"give {len(token_ids)} to {transfer.peer.name} by {transfer.transfer_id}"
            case MoveOut(request_id, transfer, num_known_tokens):
                return f"move {request_id} to {transfer.peer.name} by {transfer.transfer_id}, {num_known_tokens} known"
            case Stay(request_id, transfer_id):
                return f"stay {request_id} {transfer_id}"
            case Abort(request_id):
                return f"abort {request_id}"
            case ShakeHands(peer, address):
                return f"shake hands {peer} {address.decode()}"
            case Fail(detail):
                return f"fail the worker: {detail}"
            case PrefillDone(prefix=PulledPrefix() as read) | DecodeDone(prefix=PulledPrefix() as read):
                return f"{seen(action)}, read {read.num_tokens} of {read.owner}"
            case _:
                return seen(action)

    # ---- calls

    def prefill(self, name: str, source: int = 0, **options: Any) -> Actions:
        deadline, call, prefix = self.now + TIMEOUT_S, CallId("router", 1), prefix_of(source)
        return self.post(PrefillArrived(request(name, **options), 5, agent_of("other"), deadline, call, prefix))

    def decode(
        self,
        name: str,
        ticket: int | None = None,
        heads: int = 1,
        is_move: int = 0,
        source: int = 0,
        **options: Any,
    ) -> Actions:
        owner = None if ticket is None else (ticket, agent_of("other", heads=heads))
        deadline, call, prefix = self.now + TIMEOUT_S, CallId("router", 1), prefix_of(source, heads)
        return self.post(DecodeArrived(request(name, **options), owner, deadline, call, bool(is_move), prefix))

    def asks(self, ticket: int, heads: int = 1, num_tokens: int = 4) -> Actions:
        token_ids = tuple(range(10, 10 + num_tokens))
        return self.post(PrefixRequested(ticket, agent_of("peer", heads=heads), token_ids, "", 0.1))

    def move(self, name: str, ticket: int, known: int = 8, heads: int = 1) -> Actions:
        return self.post(MoveArrived(name, ticket, agent_of("other", heads=heads), known))

    def resume(self, name: str, ticket: int) -> Actions:
        return self.post(ResumeArrived(name, ticket))

    def withdraw(self, ticket: int) -> Actions:
        return self.post(OfferWithdrawn(ticket))

    def handoff(self, ticket: int) -> Actions:
        return self.post(HandoffArrived(ticket, b"kv"))

    def cancel_prefill(self, name: str) -> Actions:
        return self.post(PrefillCancelled(name))

    def cancel(self, name: str) -> Actions:
        return self.post(DecodeCancelled(name))

    def drain(self) -> Actions:
        return self.post(DrainRequested())

    def config(self, step_timeout_s: float, **limits: Any) -> Actions:
        return self.post(ConfigChanged(SchedulerConfig(**limits), WorkerConfig(step_timeout_s=step_timeout_s)))

    # ---- the engine

    def output(self, name: str, *tokens: int | str, ends: str = "", handoff: str = "", **fields: Any) -> Actions:
        sampled = tuple(map(SampledToken, numbers_of(*tokens)))
        reason = FinishReason(ends) if ends else None
        return self.post(EngineOutput(name, sampled, reason, handoff=handoff.encode(), **fields))

    def step(
        self,
        running: int,
        waiting: int,
        usage: float,
        decodes: int,
        prompt_tokens: int,
        lent: int = 0,
        reads: int = 0,
        lost: int | str = "",
        pulled: int | str = "",
        of: int = 0,
    ) -> Actions:
        """`lent`, `reads`: blocks of an offer and of a pull; `lost`: tickets of moves; `pulled`: tokens `of` a pull."""
        claims = [
            Claim("offer", OwnerState.OFFERED, range(lent), self.now, "other"),
            Claim("pull", PullerState.READING, range(reads), self.now, "other"),
        ]
        holders = tuple(BlockHolder(claim, len(claim.blocks), 0.0) for claim in claims if claim.blocks)
        lost_moves, tokens = tuple(numbers_of(lost)), ((of, tuple(numbers_of(pulled))),) if of else ()
        return self.post(EngineStep(running, waiting, usage, decodes, prompt_tokens, lent, holders, lost_moves, tokens))

    def died(self) -> Actions:
        return self.post(EngineDied("killed"))

    def joins(self, name: str, reader: int = 0, address: int = 1) -> Actions:
        return self.post(PeerJoined(agent_of(name, f"at-{name}".encode() if address else b""), is_owner=not reader))

    def leaves(self, name: str) -> Actions:
        return self.post(PeerLeft(name))

    def met(self, name: str, error: str = "") -> Actions:
        return self.post(HandshakeEnded(name, error))

    def wait(self, seconds: float) -> Actions:
        end, actions = self.now + seconds, []
        for deadline in deadlines_until(end, self.worker.next_deadline):
            self.now = max(self.now, deadline)
            actions += self.post(Tick())
        self.now = end
        return actions

    # ---- questions

    def idle(self) -> list[str]:
        return ["yes" if self.worker.idle else "no"]

    def deadline(self) -> list[str]:
        deadline = self.worker.next_deadline()
        return ["none"] if deadline is None else [f"in {deadline - self.now:g}"]

    def holders(self) -> list[str]:
        """Blocks, those that count, and the age."""
        return [
            f"{holder.claim.state.value} {holder.claim.name} {len(holder.claim.blocks)} {holder.num_counted} "
            f"{holder.age_s:g} s"
            for holder in VllmView(lambda: self.worker).holders(self.now)
        ]

    def load(self) -> list[str]:
        load = self.worker.worker_load()
        router_calls = sum(calls.num_open for calls in load.router_calls.values())
        numbers = [
            ("waiting", load.num_waiting), ("queued tokens", load.num_queued_tokens), ("decoding", load.num_decoding),
            ("context", load.decode_context), ("calls", load.num_calls), ("of the router", router_calls),
            ("busy", round(load.busy_seconds, 6)), ("slo", load.slo_itl_s), ("backlog", len(load.prompt_backlog)),
            *((column.value, count) for column, count in load.ledger.items()),
        ]  # fmt: skip
        return [load.state.value, *counts(numbers)]
