"""Dynamo's frontend beside the router: the same number of streams, from Dynamo's own mocker, as server-sent events.

The frontend has the core of the measured process; the mocker and the load client share the other core. The mocker
imitates a model at 100 times its speed, so the frontend is the limit. The client counts the events: each has one token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.dataplane import load
from benchmarks.dataplane.counting_clients import HttpStream, receive_for
from benchmarks.dataplane.load import Measured
from tests.support.child_processes import cpu_s, serving
from tests.support.service_process import cores, pinned_to
from tools import install_peers

VERSION = install_peers.DYNAMO_VERSION
PORT = 18_200
MODEL = "smol"
NUM_WORKERS = 2
ANSWER_TOKENS = 200
START_TIMEOUT_S = 90.0
POLL_S = 0.5


def is_installed() -> bool:
    return install_peers.is_installed(install_peers.dynamo_dir()) and install_peers.is_installed(
        install_peers.vllm_weights()
    )


def event_clients(port: int, model: str, first_tokens: Sequence[int]) -> list[HttpStream]:
    """Clients that ask again and again, by the lengths of their first answers: so they do not end at the same time."""
    clients = [HttpStream(port, model, ANSWER_TOKENS) for _ in first_tokens]
    for client, num_tokens in zip(clients, first_tokens, strict=True):
        client.send(num_tokens)
    return clients


def measure(
    clients: list[HttpStream], cpu_s: Callable[[], float], warm_up_s: float, seconds: float, one_each: bool = False
) -> Measured:
    """`cpu_s`: of the server. `one_each`: an event has one token; otherwise whole answers count."""

    def counts() -> tuple[int, int, float]:
        num_events = sum(client.num_events for client in clients)
        num_ended = sum(client.num_ended for client in clients)
        return num_events if one_each else num_ended * ANSWER_TOKENS, num_events, cpu_s()

    receive_for(clients, warm_up_s)
    before = counts()
    elapsed = receive_for(clients, seconds)
    num_tokens, num_events, used_s = (now - then for now, then in zip(counts(), before, strict=True))
    load.close(clients)
    return Measured(num_tokens / elapsed, num_events / elapsed, used_s / max(1, num_tokens))


def through_frontend(num_streams: int, warm_up_s: float, seconds: float) -> Measured:
    measured, other = cores()
    with tempfile.TemporaryDirectory() as directory, _serving(Path(directory), measured, other) as frontend:
        with pinned_to(other):
            clients = event_clients(PORT, MODEL, [ANSWER_TOKENS] * num_streams)
            return measure(clients, lambda: cpu_s(frontend), warm_up_s, seconds, one_each=True)


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
        serving([python, *frontend], "", environment, frontend_core) as process_id,
        serving([python, *mocker], "", environment, mocker_core),
    ):
        _wait_for_model()
        yield process_id


def _wait_for_model() -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=POLL_S)
            connection.request("GET", "/v1/models")
            if any(model["id"] == MODEL for model in json.load(connection.getresponse()).get("data", ())):
                return
        time.sleep(POLL_S)
    raise RuntimeError(f"Dynamo does not serve within {START_TIMEOUT_S:g} s")
