"""Odd messages for the servers of a deployment in this process: bytes over HTTP, and every gRPC method.

An answer is right if it is a success, or an error with a type. Whatever a server or a machine logs as an error, and the
failure of a service, is a fault of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from core.block_hash import pack_token_ids
from core.config import GatewayConfig
from core.service import Service
from gateway.fleets import Fleets
from model_files.builtin_configs import BYTE_VOCAB_SIZE
from protos import codec, kserve_pb2
from runtime.rpc.grpc_server import open_channel
from runtime.rpc.security import Credentials
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from tests.support.deployment import Deployment, deploy, machine_of, tiny_config, transfers
from tests.support.gateway import serving_gateway
from tests.unit.router.driving_router import agent, request
from tools.fuzz.mutations import changed_bytes, changed_json, changed_message, drawn_message

Outcomes = Counter[str]
MODEL = "random:smollm2-tiny"  # computed by our engine: the fake one takes any token id
AT_ONCE = 16
STREAM_ID = 7
CALL_TIMEOUT_S = 0.4  # of a gRPC call: an odd hand-off waits in vain
ENDED_EARLY = "ended before the client had sent"
LATE_WRITE = "Internal error from Core"  # of gRPC's client in this process, which writes into a call that has ended
FIRST_BYTE_S = 0.6  # an incomplete request has no answer
ANSWER_S = 20.0
MAX_ANSWER_BYTES = 2**24  # a response repeats the bounded fields of its request


class ErrorLog(logging.Handler):
    """What is logged as an error, by anybody, and what the loop calls unhandled."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record)[-3000:])

    def on_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"unhandled: {context['message']}: {context.get('exception')!r}")


@dataclass
class Servers:
    deployment: Deployment
    http_port: int
    channels: dict[str, grpc.aio.Channel]  # by service
    good: dict[str, Message]  # requests that succeed, by type
    peers: list[worker_pb2.AgentAddress]  # of the workers
    errors: ErrorLog
    failures: list[asyncio.Task[BaseException]]

    async def batch(self, sends: Sequence[Callable[[], Awaitable[str]]]) -> Outcomes:
        """Send these, some at a time. Raises `AssertionError` for a fault of any of them."""
        outcomes, waiting = Outcomes(), list(sends)

        async def work() -> None:
            while waiting:
                outcomes[await waiting.pop()()] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        failed = [repr(task.result()) for task in self.failures if task.done()]
        errors, self.errors.found = self.errors.found, []
        assert not errors, "logged: " + "\n".join(errors)
        assert not failed, f"a service has failed: {failed}"
        for worker in self.deployment.workers:
            machine_of(worker).core.pool.check()
        return outcomes


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    errors, loop, root = ErrorLog(), asyncio.get_running_loop(), logging.getLogger()
    loop.set_exception_handler(errors.on_unhandled)
    root.addHandler(errors)
    config = tiny_config(MODEL, local_prefill="auto", max_queued=64)
    async with deploy(config) as deployment, contextlib.AsyncExitStack() as stack:
        gateway = GatewayConfig(default_timeout_s=2.0)
        url = await stack.enter_async_context(serving_gateway(Fleets([deployment.router.calls]), gateway))
        public = [inference_pb2, cluster_pb2, kserve_pb2]
        channels = {s.full_name: deployment.channel for file in public for s in _services(file)}
        for worker, own in ((deployment.prefill[0], "PrefillWorker"), (deployment.decode[0], "DecodeWorker")):
            address = deployment.endpoints[id(worker)].address
            channel = await stack.enter_async_context(open_channel(address, 4 << 20, Credentials()))
            channels |= {f"tandem.v1.{own}": channel, f"tandem.v1.Worker@{own}": channel}
        # Without an open stream and a real reader, workers refuse every sequence at the door.
        stub = worker_pb2_grpc.DecodeWorkerStub(channels["tandem.v1.DecodeWorker"])  # type: ignore[no-untyped-call]
        tokens = stub.StreamTokens(worker_pb2.StreamTokensRequest(router_id="other", stream_id=STREAM_ID))
        reading = asyncio.create_task(_read(tokens))
        good = GOOD | {
            "tandem.v1.PrefillRequest": worker_pb2.PrefillRequest(
                sequence=codec.encode_sequence(TOKENS), transfer_id=bytes(16),
                reader=codec.encode_agent(transfers(deployment.decode[0]).address),
            )
        }  # fmt: skip
        peers = [codec.encode_agent(transfers(worker).address) for worker in deployment.workers]
        services: list[Service] = [deployment.router, *deployment.workers]
        failures = [asyncio.create_task(service.failed()) for service in services]
        try:
            yield Servers(deployment, int(url.rpartition(":")[2]), channels, good, peers, errors, failures)
            await deployment.settle()
        finally:
            for task in (reading, *failures):
                task.cancel()
            root.removeHandler(errors)
            loop.set_exception_handler(None)


def _services(file: Any) -> list[ServiceDescriptor]:
    return list(file.DESCRIPTOR.services_by_name.values())


# ---- gRPC

# Most are of the model, so that some sequences have no other.
TOKEN_IDS = (*range(0, BYTE_VOCAB_SIZE, 5), BYTE_VOCAB_SIZE - 1, BYTE_VOCAB_SIZE, 2**31, 2**32 - 1)
TOKENS = request("r#1", max_tokens=3)
INFER = kserve_pb2.ModelInferRequest(
    model_name=MODEL,
    inputs=[kserve_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])],
)
INFER.inputs[0].contents.bytes_contents.append(b"hello")
INFER.parameters["max_tokens"].int64_param = 3
GOOD: dict[str, Message] = {
    message.DESCRIPTOR.full_name: message
    for message in (
        INFER,
        inference_pb2.GenerateRequest(text="hello", stop=inference_pb2.StopConditions(max_tokens=3)),
        worker_pb2.DecodeRequest(sequence=codec.encode_sequence(TOKENS), stream_id=STREAM_ID),
        worker_pb2.StreamTokensRequest(router_id="fuzz", stream_id=1),
        worker_pb2.MoveRequest(request_id="r#1", transfer_id=bytes(16)),
        worker_pb2.UpdatePeersRequest(changes=[worker_pb2.PeerChange(owner=codec.encode_agent(agent("P")))]),
    )
}


def grpc_calls(world: Servers, rng: random.Random, count: int) -> list[Callable[[], Awaitable[str]]]:
    methods = [
        (channel, method)
        for name, channel in world.channels.items()
        for file in (inference_pb2, cluster_pb2, kserve_pb2, worker_pb2)
        for service in _services(file)
        if service.full_name == name.partition("@")[0]
        for method in service.methods
    ]
    sends: list[Callable[[], Awaitable[str]]] = []
    for _ in range(count):
        channel, method = rng.choice(methods)
        good = world.good.get(method.input_type.full_name) or GetMessageClass(method.input_type)()
        if isinstance(good, WITH_PEERS) and rng.random() < 0.3:
            odd: Message = _with_odd_peer(good, world.peers, rng)
        elif isinstance(good, worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) and rng.random() < 0.5:
            odd = _with_odd_tokens(good, rng)
        else:
            odd = changed_message(good, rng) if rng.random() < 0.6 else drawn_message(method.input_type, rng)
        payload = odd.SerializeToString()
        sends.append(partial(_call, channel, method, changed_bytes(payload, rng) if rng.random() < 0.1 else payload))
    return sends


WITH_PEERS = (worker_pb2.PrefillRequest, worker_pb2.DecodeRequest, worker_pb2.UpdatePeersRequest)
ODD_PEERS = (
    worker_pb2.AgentAddress(),
    worker_pb2.AgentAddress(name="ghost"),
    worker_pb2.AgentAddress(incarnation=1),
    worker_pb2.AgentAddress(metadata=b"odd"),
    worker_pb2.AgentAddress(num_blocks=1),
    worker_pb2.AgentAddress(lease_s=0.001),
    worker_pb2.AgentAddress(probe_bytes=1 << 40),
    *(worker_pb2.AgentAddress(layout=worker_pb2.KVLayout(block_size=size)) for size in (1, 8, 1024)),
)


def _with_odd_peer(good: Any, peers: Sequence[worker_pb2.AgentAddress], rng: random.Random) -> Any:
    """Of a sequence of its own, and a worker of which one field is another one's."""
    changed, peer = type(good)(), worker_pb2.AgentAddress()
    changed.CopyFrom(good)
    peer.CopyFrom(rng.choice(peers))
    peer.MergeFrom(rng.choice(ODD_PEERS))
    if isinstance(changed, worker_pb2.UpdatePeersRequest):
        changed.changes.add(**{rng.choice(("owner", "reader")): peer})
        return changed
    changed.sequence.request_id, changed.transfer_id = f"r#{rng.getrandbits(64)}", rng.randbytes(16)
    (changed.reader if isinstance(changed, worker_pb2.PrefillRequest) else changed.source).CopyFrom(peer)
    return changed


def _with_odd_tokens(good: Any, rng: random.Random) -> Any:
    """Well-formed, and of a sequence of its own, so only its tokens can be refused."""
    changed = type(good)()
    changed.CopyFrom(good)
    sequence = changed.sequence
    sequence.request_id, changed.transfer_id = f"r#{rng.getrandbits(64)}", rng.randbytes(16)
    sequence.packed_token_ids = pack_token_ids([rng.choice(TOKEN_IDS) for _ in range(sequence.num_prompt_tokens)])
    sequence.sampling.logit_bias[rng.choice(TOKEN_IDS)] = 1.0
    sequence.stop.stop_token_ids.append(rng.choice(TOKEN_IDS))
    sequence.stop.min_tokens = rng.randint(0, sequence.stop.max_tokens)
    return changed


async def _call(channel: Any, method: MethodDescriptor, payload: bytes) -> str:
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            await _read(channel.stream_stream(path)([payload], timeout=CALL_TIMEOUT_S))
        elif method.server_streaming:
            await _read(channel.unary_stream(path)(payload, timeout=CALL_TIMEOUT_S))
        else:
            await channel.unary_unary(path)(payload, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.details() == LATE_WRITE:
            return ENDED_EARLY
        if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            told = f"{path} answers {error.code().name} {error.details()} to {payload!r}"
            raise AssertionError(told) from None
        return error.code().name
    except asyncio.CancelledError:  # by grpc's client itself, if its write to an ended call fails
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return ENDED_EARLY
    return "OK"


async def _read(messages: Any) -> None:
    async for _ in messages:
        pass


# ---- HTTP

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "maxLength": 3}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stop": ["x"], "seed": 1, "logit_bias": {"5": 1}, "tools": TOOLS, "n": 1},
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 3, "echo": False, "stream": True,
                        "response_format": SCHEMA, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
                      "max_output_tokens": 3, "tools": [{"type": "function", "name": "f"}], "text": {}},
    "/tokenize": {"prompt": "a", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip
PAGES = (
    "/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/version", "/metrics", "/", "/dashboard",
    "/dashboard/api/requests?limit=3", "/dashboard/api/fleet", "/dashboard/api/requests/a",
)  # fmt: skip


def http_requests(world: Servers, rng: random.Random, count: int) -> list[Callable[[], Awaitable[str]]]:
    payloads = [_odd_request(rng) for _ in range(count)]
    return [partial(_exchange, world.http_port, payload) for payload in payloads]


def _odd_request(rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        head, body = f"GET {rng.choice(PAGES)} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode(), b""
        return changed_bytes(head, rng)
    path = rng.choice(list(BODIES))
    content = BODIES[path] if rng.random() < 0.1 else changed_json(BODIES[path], rng)
    body = json.dumps(content).encode(errors="replace")
    how = rng.random()
    if how < 0.15:
        body = changed_bytes(body, rng)
    length = f"content-length: {len(body)}"
    if how > 0.9:
        body, length = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "transfer-encoding: chunked"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"x-tandem-timeout-ms: 2000\r\nx-request-id: fuzz\r\n{length}\r\n\r\n"
    ).encode()
    return changed_bytes(head, rng) + body if 0.15 < how < 0.3 else head + body


async def _exchange(port: int, payload: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_ANSWER_BYTES)
    try:
        writer.write(payload)
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                answer = await reader.read(1)
        except TimeoutError:
            return "no answer yet"
        try:
            async with asyncio.timeout(ANSWER_S):
                answer += await reader.readuntil(b"\r\n\r\n") if answer else b""
                body = await _body_of(answer, reader)
        except TimeoutError:
            raise AssertionError(f"no end of the answer to {payload!r}: {answer!r}") from None
    except (ConnectionResetError, asyncio.IncompleteReadError, BrokenPipeError):
        return "closed"
    finally:
        writer.close()
    return _outcome(answer, body, payload) if answer else "closed"


async def _body_of(head: bytes, reader: asyncio.StreamReader) -> bytes:
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        return await reader.readuntil(b"0\r\n\r\n")
    length = lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await reader.readexactly(int(length)) if length else await reader.read()


def _outcome(head: bytes, body: bytes, payload: bytes) -> str:
    status = int(head.split(b" ", 2)[1])
    told = f"{head!r} {body[:500]!r} is the answer to {payload!r}"
    if status == 500 or b"internal_error" in body:
        raise AssertionError(told)
    if status < 400 or payload.startswith(b"HEAD"):
        return str(status)
    try:
        error = json.loads(body)["error"]
        return f"{status} {error['type']} {error['code']}"
    except (ValueError, TypeError, KeyError) as wrong:
        raise AssertionError(told) from wrong
