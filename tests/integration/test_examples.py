"""Every program of examples/ runs as its first lines say, against a fleet with API keys and its gateway. So do the
policy of docs/routing.md, and the commands of docs/runbook.md that ask a router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.compose import load_policy
from cli.main import app
from core.config import ApiKeyConfig
from gateway.fleets import Fleets
from runtime.rpc.api_keys import hash_of
from tandem_client.stubs import inference_pb2, inference_pb2_grpc
from tests.support.commands_of_docs import commands_of
from tests.support.deployment import deploy, make_request, tiny_config
from tests.support.gateway import serving_gateway

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "tandem-key-of-the-examples"
TIMEOUT_S = 60.0  # of a busy machine
NODE_MODULES = EXAMPLES / "node" / "node_modules"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not NODE_MODULES.exists(), reason="node modules are not installed: make tools"
)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Addresses:
    router: str  # host:port
    gateway: str  # URL


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses() -> AsyncIterator[Addresses]:
    key = ApiKeyConfig(name="examples", sha256=hash_of(KEY))
    async with (
        deploy(replace(tiny_config(), api_keys=(key,))) as deployment,
        serving_gateway(Fleets([deployment.router.calls])) as url,
    ):
        yield Addresses(deployment.router_address, url)


async def run(program: str, address: str, key: str = KEY) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of an example."""
    path = EXAMPLES / program
    interpreter = {".py": [sys.executable], ".js": ["node"], ".sh": []}[path.suffix]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "TANDEM_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        *interpreter, str(path), address, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def answer_of(program: str, address: str) -> str:
    status, output, errors = await run(program, address)
    assert (status, errors) == (0, ""), output
    return output


USED = r"\d+ \+ \d+ tokens"
ANSWERS = [
    ("python_client.py", "router", USED + r", ended by (stop|length)\nfirst token after [\d.]+ ms, path disaggregated"),
    ("python_async.py", "router", r"(\.\.\. \d+ tokens: .*){3}"),
    ("openai_client.py", "gateway", USED + r" of \S+\n"),
    pytest.param("node/openai_client.js", "gateway", USED + r" of \S+\n", marks=needs_node),
]


@pytest.mark.parametrize(("program", "door", "answer"), ANSWERS)
async def test_an_example_streams(addresses: Addresses, program: str, door: str, answer: str) -> None:
    assert re.search(answer, await answer_of(program, getattr(addresses, door)), re.DOTALL)


async def test_a_program_without_a_valid_key_ends_with_the_reason(addresses: Addresses) -> None:
    status, _, errors = await run("python_async.py", addresses.router, key="tandem-wrong")
    assert (status, errors) == (1, "UNAUTHENTICATED: this API key is not known here\n")


@needs_curl
async def test_curl_streams_and_a_wrong_key_is_refused(addresses: Addresses) -> None:
    output = await answer_of("chat.sh", addresses.gateway)
    assert output.startswith("data: {")
    assert output.endswith("data: [DONE]\n\n")
    status, output, _ = await run("chat.sh", addresses.gateway, key="tandem-wrong")
    assert status != 0
    assert "this API key is not known here" in output


@needs_node
async def test_node_streams_over_grpc(addresses: Addresses) -> None:
    output = await answer_of("node/grpc_client.js", addresses.router)
    assert re.search(r"\d+ \+ \d+ tokens, FINISH_REASON_(STOP|LENGTH), REQUEST_PATH_DISAGGREGATED\n", output)
    status, _, errors = await run("node/grpc_client.js", addresses.router, key="tandem-wrong")
    assert (status, errors) == (1, "UNAUTHENTICATED: this API key is not known here\n")


# ---- programs and commands of the documents

DOCUMENTS = Path(__file__).parents[2] / "docs"


def program_of(page: str, words: str) -> str:
    """The Python program of a page that has these words."""
    programs = re.findall(r"```python\n(.*?)```", (DOCUMENTS / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [str(program) for program in programs if words in program]
    return found


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


async def test_the_program_of_the_document_goes_on_at_another_router() -> None:
    async with deploy(tiny_config()) as deployment:

        def resume() -> list[int]:
            with grpc.insecure_channel(deployment.router_address) as channel:
                other = inference_pb2_grpc.InferenceStub(channel)

                def generate(request: inference_pb2.GenerateRequest, timeout: float) -> Iterator[Any]:
                    for response in other.Generate(request, timeout=timeout):
                        yield response
                        if response.HasField("tokens"):
                            raise Lost

                request = make_request(text="Hello", max_tokens=40, temperature=1.0)
                names: dict[str, Any] = {"grpc": grpc, "request": request, "other_stub": other}
                names["stub"] = SimpleNamespace(Generate=generate)
                exec(program_of("usage.md", "request.resume[:]"), names)
                assert 0 < len(request.resume) < 40, "the first call broke"
                undisturbed = make_request(text="Hello", max_tokens=40, temperature=1.0, seed=names["started"].seed)
                again = [id for response in other.Generate(undisturbed, timeout=60) for id in response.tokens.token_ids]
                assert names["ids"] == again
                return again

        assert len(await asyncio.to_thread(resume)) == 40


async def test_the_policy_of_the_document_serves_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policy.py").write_text(program_of("routing.md", "class FewestRequests"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(policy="own_policy:make")
    assert type(load_policy(config.router)).__name__ == "FewestRequests"
    async with deploy(config, num_prefill=1, num_decode=1) as deployment:
        explained = await deployment.cluster.Explain(make_request(text="Hello"), timeout=10)
        answer = await deployment.generate(text="Hello", max_tokens=4)
    assert explained.reason.startswith("the choice of own_policy:make, "), "not the cheapest way"
    assert answer.finished.path == inference_pb2.REQUEST_PATH_LOCAL, "the built-in policy may not choose it here"
    assert len(answer.token_ids) == 4


RUNBOOK = Path(__file__).resolve().parents[2] / "docs/runbook.md"
ASKING = ("status", "trace", "explain")  # `scale` and `events` need a supervisor, `doctor` asks the machine


async def test_the_commands_of_the_runbook_answer() -> None:
    commands = [command for command in dict.fromkeys(commands_of(RUNBOOK)) if command.split()[1] in ASKING]
    assert len(commands) >= 5
    async with deploy(tiny_config()) as deployment:
        answer = await deployment.generate(text="Hello", max_tokens=8)
        for command in commands:
            _, *arguments = shlex.split(command.replace("REQUEST_ID", answer.finished.request_id))
            arguments += ["--router", deployment.router_address]
            result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            assert result.exit_code == 0, (command, result.output)
            assert result.output.strip(), command
