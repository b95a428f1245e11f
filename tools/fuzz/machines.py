"""Odd messages for the machines: of a peer that hands over, of workers that report, and of an earlier supervisor.

A batch begins with new machines. They check themselves after each message.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cli.commands.serve import fleet_spec
from core.config import RouterConfig, TandemConfig
from core.errors import TandemError
from core.handoff import Abort, AbortReason, Heartbeat, HeartbeatEntry, OfferedBlocks, Ping, Ready, Release, Want
from core.lifecycle import ServiceRole
from core.machine import Tick
from core.service import Endpoint
from fleet.law.events import MachineId, Member, ServiceStarted, SlotId
from fleet.law.machine import FleetMachine
from fleet.supervisor.handover import Handover, KeptRoll, take_over
from kv_transfer.protocol.events import MessageReceived
from protos import codec, handoff_pb2, report_codec
from protos.handoff_codec import MalformedMessage, decode, encode
from router.links.token_stream import decode_step_tokens
from router.links.worker_link import WorkerLink, _decode_finished, _decode_prefill
from router.operations.fleet_metrics import readings
from router.requests import events
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.unit.kv_transfer.transfer_pair import CONFIG, ID, LAYOUT, Pair
from tests.unit.router.driving_router import SERVING, DrivenRouter, agent, request
from tools.fuzz.mutations import changed_bytes, changed_json, changed_message, drawn_message
from vllm_worker.handoff import EngineAddress, decode_handoff, encode_handoff

Outcomes = Counter[str]
OpenCall = events.StartPrefill | events.StartDecode


MESSAGES = [
    encode(message)
    for message in (
        Want(ID, 22, 5, LAYOUT.fingerprint(), (0, 1)),
        Ready(ID, 11, 5, 1, 0, OfferedBlocks.of([(0, 3, 7)]), False),
        Ready(ID, 11, 6, 1, 1, OfferedBlocks.of([(1, 4, 7)]), True, (42,)),
        Heartbeat(22, 6, None, (HeartbeatEntry(ID, 1, 0, 0),)),
        Heartbeat(11, 6, 3, ()),
        Release(ID, 22, 9, None),
        Abort(ID, 11, 9, AbortReason.CANCELLED, "detail"),
        Ping(22, 4, None),
    )
]


def hand_offs(rng: random.Random, count: int) -> Outcomes:
    """Notifications between the agents of a hand-off, as bytes."""
    outcomes, pair = _engine_addresses(rng, count // 10), Pair()
    pair.owner.content = dict.fromkeys(range(pair.owner.pool.num_blocks), 1)  # a forged READY may name any block
    pair.offer([0, 1, 2, 3], last=False)
    pair.pull([0, 1, 2, 3])
    known = list(MESSAGES)
    for _ in range(count - outcomes.total()):
        good = rng.choice(known)
        odd = changed_message(handoff_pb2.HandoffEnvelope.FromString(good), rng) if rng.random() < 0.7 else None
        payload = changed_bytes(good, rng) if odd is None else odd.SerializeToString()
        sender, receiver = rng.choice((("owner", pair.puller), ("puller", pair.owner), ("stranger", pair.owner)))
        try:
            message = decode(payload)
        except MalformedMessage:
            outcomes["malformed"] += 1
            continue
        outcomes[type(message).__name__] += 1
        pair.event(receiver, MessageReceived(sender, message))
        if rng.random() < 0.2:
            known[len(MESSAGES) :] = [encode(mail.message) for mail in pair.mail]
            pair.run()
            pair.wait(rng.choice((0.1, 2.0)))
    pair.lose_mail()
    for read_id in list(pair.puller.reads):
        pair.end_read(pair.puller, read_id)
    if not pair.puller.results:
        pair.cancel_pull()
    pair.wait(3 * CONFIG.lease_s, deliver=False)
    assert pair.num_leases() == 0, "a lease is left"
    return outcomes


ADDRESS = EngineAddress("engine", "10.0.0.1", 5600, tp_size=1)
HANDOFF = asdict(ADDRESS) | {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "r", "remote_block_ids": [[1, 2]]
}  # fmt: skip


def _engine_addresses(rng: random.Random, count: int) -> Outcomes:
    """What one vLLM says to another."""
    outcomes = Outcomes()
    for _ in range(count):
        good, read = rng.choice(((ADDRESS.encode(), EngineAddress.decode), (encode_handoff(HANDOFF), decode_handoff)))
        odd = (
            json.dumps(changed_json(json.loads(good), rng)).encode() if rng.random() < 0.7 else changed_bytes(good, rng)
        )
        outcomes[f"vLLM {_tried(read, odd)}"] += 1
    return outcomes


class FuzzedRouter(DrivenRouter):
    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.answered: list[OpenCall] = []


def reports(rng: random.Random, count: int) -> Outcomes:
    """What workers say to a router: snapshots, reports, tokens, and the answers of their calls."""
    outcomes, router = Outcomes(), FuzzedRouter(RouterConfig(max_queued=50))
    read_metrics = readings(router.machine.view)
    kinds: tuple[Callable[[FuzzedRouter, random.Random], object], ...] = (_report, _report, _answer, _tokens)
    for number in range(count):
        if number % 4 == 0:
            sampled = {"max_tokens": rng.choice((1, 9, 200))}
            outcomes[_tried(router.arrive, request(f"r{number}", range(1, rng.choice((3, 90))), **sampled))] += 1
        outcomes[_tried(rng.choice(kinds), router, rng)] += 1
        if number % 10 == 0:
            list(read_metrics())
        router.now += rng.choice((0.0, 0.1, 5.0))
        _tried(router.post, Tick())
    return outcomes


def _tried(call: Callable[..., object], *arguments: object) -> str:
    """Whether a machine or a decoder has taken it, or the name of the typed error."""
    try:
        call(*arguments)
    except TandemError as error:
        return type(error).__name__
    return "taken"


def _link(worker_id: str, role: ServiceRole) -> WorkerLink:
    """Only what decodes: a whole one would connect."""
    link = WorkerLink.__new__(WorkerLink)
    link.endpoint, link.load = Endpoint(worker_id, "127.0.0.1:9", role), None
    return link


def _report(router: FuzzedRouter, rng: random.Random) -> None:
    """A link ends a worker whose report it cannot read."""
    worker_id, role = rng.choice((("P", ServiceRole.PREFILL), ("D", ServiceRole.DECODE), ("E", ServiceRole.DECODE)))
    good = worker_pb2.WorkerReport(load=report_codec.encode_load(SERVING), block_changes=[1, 2], block_runs=[2])
    good.snapshot.worker_id, good.snapshot.role = worker_id, codec.ROLE_TO_WIRE[role]
    good.snapshot.agent.CopyFrom(codec.encode_agent(agent(worker_id)))
    odd: Any = changed_message(good, rng) if rng.random() < 0.9 else drawn_message(good.DESCRIPTOR, rng)
    link = _link(worker_id, role)
    try:
        is_known = router.machine.view.worker(worker_id) is not None
        event: Any = events.WorkerReported(worker_id, link._changes(odd)) if is_known else link._joined(odd)
        if is_known and rng.random() < 0.3:
            event = link._joined(odd)
        router.post(event)
    except TandemError:
        router.post(events.WorkerLost(worker_id, "it cannot be read"))
        router.enter(worker_id)
        raise


def _answer(router: FuzzedRouter, rng: random.Random) -> None:
    """Of a call that is open: a link posts one answer for each."""
    calls: list[OpenCall] = [*router.of(events.StartPrefill), *router.of(events.StartDecode)]
    open_calls = [call for call in calls if call not in router.answered]
    if not open_calls:
        return
    call = rng.choice(open_calls)
    router.answered.append(call)
    if isinstance(call, events.StartPrefill):
        prefilled = worker_pb2.PrefillResponse(first_token=worker_pb2.SampledToken(token_id=5))
        result = _decode_prefill(changed_message(prefilled, rng))
        router.post(events.PrefillReturned(call.dispatch_id, result))
        return
    finished = worker_pb2.DecodeFinished(finish_reason=inference_pb2.FINISH_REASON_STOP, num_tokens=2)
    router.post(events.DecodeReturned(call.dispatch_id, _decode_finished(changed_message(finished, rng))))


def _tokens(router: FuzzedRouter, rng: random.Random) -> None:
    calls = [start.call for start in router.of(events.StartDecode)][-4:]
    tokens = worker_pb2.StepTokens(calls=calls, indexes=[1] * len(calls), token_ids=[7] * len(calls))
    tokens.moves.add(call=calls[-1] if calls else 1)
    router.post(decode_step_tokens(changed_message(tokens, rng)))


SPEC = fleet_spec(TandemConfig())
SERVICES = [
    (MachineId("m", "m.local"), ServiceStarted(Member(SlotId(role, 0), role, start), f"{role.value}-0.{start}", "h:1"))
    for start, role in enumerate(ServiceRole)
]


def records(rng: random.Random, count: int) -> Outcomes:
    """The record that a supervisor of another version has left."""
    outcomes = Outcomes()
    text, roll = SPEC.text.as_json(), KeptRoll(2, True, (SERVICES[0][1].service_id,))
    sizes = {"decode": 2, "router": 1}
    good = json.loads(Handover(text, sizes, ("decode",), 3, {2: text, 3: text}, roll).as_json())
    for _ in range(count):
        odd = dict(good)
        if rng.random() < 0.6:
            odd["texts"] = good["texts"] | {"3": json.dumps(changed_json(json.loads(text), rng))}
        record = json.dumps(odd if rng.random() < 0.5 else changed_json(odd, rng))
        is_cut = rng.random() < 0.1
        takeover = take_over(changed_bytes(record.encode(), rng).decode(errors="replace") if is_cut else record,
                             SPEC, SERVICES)  # fmt: skip
        machine = FleetMachine(SPEC.rules)
        machine.handle(takeover.adopted, 5.0)
        machine.check()
        outcomes[takeover.notes[0].what if takeover.notes else "kept"] += 1
    return outcomes
