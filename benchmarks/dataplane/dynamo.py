"""Dynamo's frontend beside the router: the same number of streams, from Dynamo's own mocker, as server-sent events.

The frontend has the core of the measured process; the mocker and the load client share the other core. The mocker
imitates a model at 100 times its speed, so the frontend is the limit. The client counts the events: each has one token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import install_peers
from benchmarks.dataplane.cpu_limits import pinned_to
from benchmarks.dataplane.load import Measured
from benchmarks.dataplane.processes import cores
from benchmarks.processes import background, cpu_s

VERSION = install_peers.DYNAMO_VERSION
PORT = 18_200
MODEL = "smol"
NUM_WORKERS = 2
ANSWER_TOKENS = 200
EVENT = b"data: {"  # begins each event but the last one, "data: [DONE]"
RECEIVE_BYTES = 1 << 18
START_TIMEOUT_S = 90.0
POLL_S = 0.5


class Refused(RuntimeError):
    """The server answered a request of the load with an error."""


def is_installed() -> bool:
    return install_peers.is_installed(install_peers.dynamo_dir()) and install_peers.is_installed(
        install_peers.vllm_weights()
    )


def through_frontend(num_streams: int, warm_up_s: float, seconds: float) -> Measured:
    measured, other = cores()
    with tempfile.TemporaryDirectory() as directory, _serving(Path(directory), measured, other) as frontend:
        with pinned_to(other):
            clients = [EventClient(PORT, MODEL) for _ in range(num_streams)]
            receive(clients, warm_up_s)
            before, start = cpu_s(frontend), time.perf_counter()
            num_tokens = receive(clients, seconds)
            elapsed = time.perf_counter() - start
            used_s = cpu_s(frontend) - before
            for client in clients:
                client.socket.close()
    return Measured(
        tokens_per_s=num_tokens / elapsed,
        messages_per_s=num_tokens / elapsed,
        cpu_s_per_token={"frontend": used_s / max(1, num_tokens)},
        share_of_core={"frontend": used_s / elapsed},
    )


@contextlib.contextmanager
def _serving(directory: Path, frontend_core: int, mocker_core: int) -> Iterator[int]:
    """The process id of the frontend, once it lists the model."""
    python = install_peers.dynamo_dir() / "bin" / "python"
    environment = {"HF_HUB_OFFLINE": "1", "DYN_FILE_KV": str(directory / "discovery"), "DYN_LOG": "error"}
    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(PORT),
                "--discovery-backend", "file", "--router-mode", "kv"]  # fmt: skip
    mocker = ["-m", "dynamo.mocker", "--model-path", str(install_peers.vllm_weights()), "--model-name", MODEL,
              "--discovery-backend", "file", "--num-workers", str(NUM_WORKERS), "--block-size", "16",
              "--speedup-ratio", "100"]  # fmt: skip
    with (
        (directory / "log").open("w") as log,
        background([python, *frontend], environment, frontend_core, log) as process_id,
        background([python, *mocker], environment, mocker_core, log),
    ):
        _wait_for_model(directory / "log")
        yield process_id


def _wait_for_model(log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=POLL_S)
            connection.request("GET", "/v1/models")
            if any(model["id"] == MODEL for model in json.load(connection.getresponse()).get("data", ())):
                return
        time.sleep(POLL_S)
    last_lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    raise RuntimeError(f"Dynamo does not serve within {START_TIMEOUT_S:g} s: " + " | ".join(last_lines))


class EventClient:
    """One connection with one request after another. Counts events and ends in the bytes of the responses.

    `first_tokens`: the length of the first answer; different lengths keep clients from ending at the same time.
    """

    def __init__(self, port: int, model: str, first_tokens: int = 0, tokens: int = 0) -> None:
        self.num_events = self.num_ended = 0
        self._tail = b""
        self._model, self._tokens = model, tokens or ANSWER_TOKENS
        self.socket = socket.create_connection(("127.0.0.1", port), START_TIMEOUT_S)
        self._send(first_tokens or self._tokens)

    def _send(self, max_tokens: int) -> None:
        body = json.dumps({
            "model": self._model, "messages": [{"role": "user", "content": "Tell me of the sea."}], "stream": True,
            "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        }).encode()  # fmt: skip
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._model}\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def receive(self) -> None:
        received = self.socket.recv(RECEIVE_BYTES)
        if not received:
            raise RuntimeError("the server closed a connection")
        data = self._tail + received
        if b"HTTP/1.1 " in data and b"HTTP/1.1 200" not in data:
            raise Refused(f"the server refuses the load: {data[:500].decode(errors='replace')}")
        self.num_events += data.count(EVENT)
        # The end of the data may hold the start of an event or of the response's end, but no whole event.
        ended = b"\r\n0\r\n\r\n" in data
        self._tail = b"" if ended else data[-(len(EVENT) - 1) :]
        if ended:
            self.num_ended += 1
            self._send(self._tokens)


def receive(clients: list[EventClient], seconds: float) -> int:
    """Receive for `seconds`. Returns the events that have arrived."""
    before = sum(client.num_events for client in clients)
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
    end = time.perf_counter() + seconds
    try:
        while (left := end - time.perf_counter()) > 0:
            for key, _ in selector.select(left):
                key.data.receive()
    finally:
        selector.close()
    return sum(client.num_events for client in clients) - before
