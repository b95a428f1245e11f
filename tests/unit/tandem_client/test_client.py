"""Both clients answer, and make every failure one `CallFailed` that says what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from core.errors import InvalidRequest, QueueFull
from runtime.rpc.grpc_server import abort
from tandem_client import AsyncClient, CallFailed, Client
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tandem_client.stubs.inference_pb2 import GenerateRequest

ROOT = Path(__file__).parents[3]
NOBODY = "127.0.0.1:9"


class Router(inference_pb2_grpc.InferenceServicer):
    """Echoes the prompt in two messages; some prompts make it fail."""

    async def Generate(self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if request.text == "no words":
            await abort(context, InvalidRequest("text", "is empty"))
        if request.text == "too many":
            await abort(context, QueueFull("the queue is full", retry_after_s=2.5))
        await context.write(inference_pb2.GenerateResponse(tokens=inference_pb2.TokenChunk(text=request.text)))
        if request.text == "vanish":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as gRPC itself: no trailers
        await context.write(inference_pb2.GenerateResponse(finished=inference_pb2.Finished()))

    async def GetModel(self, _: Any, __: Any) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(name="echo")


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Router(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


class Asker:
    """The same questions to either client."""

    def __init__(self, kind: str, address: str) -> None:
        self._kind, self._address = kind, address

    async def ask(self, text: str) -> tuple[str, bool]:
        """(text, whether the last message came). Raises what the client raises."""
        request = GenerateRequest(text=text)
        if self._kind == "sync":
            return await asyncio.to_thread(self._ask_in_a_thread, request)
        async with AsyncClient(self._address) as client:
            responses = [response async for response in client.generate(request, timeout_s=10.0)]
        return "".join(r.tokens.text for r in responses), responses[-1].HasField("finished")

    def _ask_in_a_thread(self, request: GenerateRequest) -> tuple[str, bool]:
        with Client(self._address) as client:
            responses = list(client.generate(request, timeout_s=10.0))
        return "".join(r.tokens.text for r in responses), responses[-1].HasField("finished")

    async def model(self) -> str:
        if self._kind == "sync":
            with Client(self._address) as client:
                return (await asyncio.to_thread(client.model)).name
        async with AsyncClient(self._address) as client:
            return (await client.model()).name


@pytest.fixture(params=["sync", "async"])
def asker(request: pytest.FixtureRequest, address: str) -> Asker:
    return Asker(request.param, address)


async def test_an_answer_streams_to_its_last_message(asker: Asker) -> None:
    assert await asker.ask("hello") == ("hello", True)
    assert await asker.model() == "echo"


async def test_a_refusal_names_the_field_and_is_not_retryable(asker: Asker) -> None:
    with pytest.raises(CallFailed, match="text: is empty") as failed:
        await asker.ask("no words")
    assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.field, failed.value.retryable, failed.value.retry_after_s) == ("text", False, None)


async def test_a_full_queue_says_when_to_come_back(asker: Asker) -> None:
    with pytest.raises(CallFailed, match="the queue is full") as failed:
        await asker.ask("too many")
    assert (failed.value.retryable, failed.value.retry_after_s) == (True, 2.5)


async def test_a_router_that_goes_away_in_the_middle_is_told_from_one_that_was_never_there(asker: Asker) -> None:
    with pytest.raises(CallFailed, match="went away in the middle of the answer; send the request again") as failed:
        await asker.ask("vanish")
    assert failed.value.retryable


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_address_where_nobody_listens_says_how_to_start_a_router(kind: str) -> None:
    with pytest.raises(CallFailed, match=f"no router at {NOBODY}; start one with `tandem serve`"):
        await Asker(kind, NOBODY).ask("hello")


@pytest.mark.parametrize("target", ["ipv4:{nobody},{router}", "ipv4:{router},{nobody}", "dns:///{router}"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_address_that_lists_several_routers_reaches_the_one_that_serves(
    kind: str, target: str, address: str
) -> None:
    assert await Asker(kind, target.format(nobody=NOBODY, router=address)).ask("hello") == ("hello", True)


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["", "foo", "foo:", ":50051", "host:port"])
def test_an_address_without_host_or_port_is_refused_as_such(client: type[Client | AsyncClient], address: str) -> None:
    with pytest.raises(CallFailed, match=r"^router: must be host:port, is "):
        client(address)


def test_a_program_with_a_package_named_protos_can_import_the_client(tmp_path: Path) -> None:
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos/__init__.py").write_text("mine = True\n")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import protos, tandem_client.prompts\n"
        "assert protos.mine\n"
        "print(tandem_client.prompts.build_request('hello', {}).text)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("hello\n", "")
