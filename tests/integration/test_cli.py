"""The `tandem` command in its own process: a real fleet on a real Ray, with a model without weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from cli.credentials import client_of, find_credentials
from tandem_client import AsyncClient
from tests.support.command import PATIENCE_S, Served, said, serving, start, tandem
from tests.support.faults import prompt_of
from tests.support.served_answers import Answer, fleet_with

HTTP_PORT = 18_480  # of the gateway beside the fleet
# Of many machines in companies. Nothing answers there, so a fleet and a command that used it would not work.
PROXY = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
CONFIG = """
[engine]
dtype = "float32"
kv_memory_mb = 128
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One fleet for all tests; the last one ends it."""
    path = tmp_path_factory.mktemp("fleet") / "tandem.toml"
    path.write_text(CONFIG)
    for name in ("core", "fleet", "gateway", "router", "text"):
        (path.parent / f"{name}.py").write_text("raise ImportError('a file of the user in the current directory')")
    options = ("--local-prefill", "never", "--http", str(HTTP_PORT), "--config", str(path))
    async with serving(*options, environment=PROXY, cwd=path.parent) as fleet:
        assert len(fleet.family) > 6, "processes of Ray, the supervisor, a router, two workers and the gateway"
        fleet.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # as of `serve | head -1`
        yield fleet


def client(served: Served) -> AsyncClient:
    return client_of(served.address, find_credentials(None, served.address))


async def test_generate_as_json_ends_with_the_path_and_the_timings(served: Served) -> None:
    code, out, err = await tandem(
        "generate", "--router", served.address, "--max-tokens", "4", "--ignore-eos", "--json", stdin="from a pipe " * 9
    )
    assert code == 0, err
    messages = [json.loads(line) for line in out.splitlines()]
    finished = messages[-1]["finished"]
    assert finished["path"] == "REQUEST_PATH_DISAGGREGATED"
    assert finished["usage"]["completion_tokens"] == 4
    assert int(finished["transferred_bytes"]) > 0
    assert finished["timings"]["total_ms"] >= finished["timings"]["first_token_ms"] > 0


async def test_the_gateway_beside_the_fleet_and_generate_give_one_answer_to_one_seed(served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{HTTP_PORT}", timeout=PATIENCE_S) as client:
        assert (await client.get("/ready")).json()["ready"]
        ask = {"model": "fake:slow", "prompt": "Hello there", "max_tokens": 8, "seed": 7}
        answer = (await client.post("/v1/completions", json=ask)).json()
    command = ("generate", "Hello there", "--raw", "--router", served.address, "--max-tokens", "8", "--seed", "7")
    code, out, err = await tandem(*command, environment=PROXY)
    assert (code, out.strip()) == (0, answer["choices"][0]["text"].strip()), err


async def test_the_log_of_each_service_has_its_name_and_the_time(served: Served) -> None:
    (raylet,) = [child for child in served.family if "raylet" in child.name()]
    folder = next(word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--log_dir="))
    log = await asyncio.to_thread(worker_logs, Path(folder))
    for name in ("prefill-0", "decode-0", "router-"):
        assert re.search(rf"^20\d\d-\S+ \S+ INFO \S+: {name}\S+ serves ", log, re.MULTILINE), name


async def test_chat_answers_each_line_and_exits_at_the_end_of_its_input(served: Served) -> None:
    code, out, err = await tandem(
        "chat", "--router", served.address, "--max-tokens", "3", "--ignore-eos", stdin="one\n/new\ntwo\n"
    )
    assert (code, err) == (0, "")
    assert out.count("first token") == 2


async def test_scale_grows_a_pool_and_status_shows_it(served: Served) -> None:
    assert "1 prefill, 2 decode" in await said("scale", "--decode", "2", "--router", served.address)
    code, out, err = await tandem("status", "--once", "--ledger", "--router", served.address)
    assert code == (0 if "decode 2/2" in out else 1), err
    assert "decode 1/2" in out or "decode 2/2" in out
    assert "prefill-0" in out
    code, out, err = await tandem("status", "--json", "--router", served.address)
    told = json.loads(out)
    assert code == {"healthy": 0, "degraded": 1}[told["health"]]
    assert told["pools"]["decode"]["wanted"] == 2
    assert [slot["name"] for slot in told["slots"]] == ["router-0", "prefill-0", "decode-0", "decode-1"]
    assert "  fleet is scaled: 1 -> 2 decode\n" in await said("events", "--router", served.address)
    code, _, err = await tandem("scale", "--decode", "100000", "--router", served.address)
    assert code == 1
    assert "decode: must be in [0, 256]" in err


async def test_an_idle_worker_changes_its_pool_at_once_and_the_pools_still_scale(served: Served) -> None:
    async with client(served) as connection:
        await fleet_with(connection, 3)
    out = await said("role", "decode-1", "prefill", "--router", served.address)
    assert out == "decode-1 serves as prefill worker; wanted: 2 prefill, 1 decode\n"
    out = await said("scale", "--prefill", "1", "--router", served.address)
    assert out == "wanted: 1 prefill, 1 decode; `tandem status` shows the progress\n"
    async with client(served) as connection:
        await asyncio.gather(*(Answer(connection, prompt_of(200 + seed), 5).right() for seed in range(NUM_STREAMS)))


async def test_without_a_router_the_error_names_the_command_that_starts_one() -> None:
    for expected, command in ((1, ("generate", "hi")), (2, ("status", "--once")), (2, ("status", "--json"))):
        code, _, err = await tandem(*command, "--router", "127.0.0.1:9")
        assert (code, err) == (expected, "error: no router at 127.0.0.1:9; start one with `tandem serve`\n"), command


async def test_a_fault_that_prevents_serving_is_an_error_of_one_line_before_ray_starts(tmp_path: Path) -> None:
    code, out, err = await tandem("serve", "--model", str(tmp_path / "nothing.gguf"), "--port", "0")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "no model" in err
    assert "starting Ray" not in out


async def test_doctor_measures_the_transport_and_finds_no_fault() -> None:
    code, out, err = await tandem("doctor")
    assert code == 0, out + err
    assert "nixl between two processes fine: shared memory, " in " ".join(out.split())


@pytest.mark.timeout(240)
async def test_demo_answers_paris_sends_every_question_through_both_pools_and_leaves_no_process() -> None:
    process = await start("demo")
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while b"router at" not in output:
                line = await process.stdout.readline()
                assert line, f"no router started: {output.decode()}"
                output += line
            fleet = Served(process, "", psutil.Process(process.pid).children(recursive=True))
            assert len(fleet.family) > 6, "processes of Ray, a router and two workers"
            rest, err_bytes = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    out, err = (output + rest).decode(), err_bytes.decode()
    assert process.returncode == 0, out + err
    assert await fleet.left() == []
    assert "Paris" in out
    assert out.count("disaggregated: prefill-0") == 3
    for phase in ("tokenize", "queue", "prefill", "first token", "transfer", "decode"):
        assert out.count(f"  {phase} ") == 3, phase
    assert "everything has stopped" in out


async def test_no_command_line_and_no_environment_contains_the_token(served: Served) -> None:
    token = find_credentials(None, served.address).token.encode()
    assert len(token) > 32
    family = [served.process.pid, *(child.pid for child in psutil.Process(served.process.pid).children(recursive=True))]
    visible = [content for pid in family for content in await asyncio.to_thread(command_line_and_environment, pid)]
    assert any(b"serve" in content for content in visible)
    assert not any(token in content for content in visible)


def worker_logs(folder: Path) -> str:
    """The standard error of every worker process of a Ray."""
    return "".join(path.read_text() for path in folder.glob("worker-*.err"))


def command_line_and_environment(pid: int) -> list[bytes]:
    """Of a running process; empty if the process has ended."""
    try:
        return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    except (FileNotFoundError, ProcessLookupError):
        return []


async def test_ray_listens_at_no_address_that_the_machine_may_lose(served: Served) -> None:
    """After a change of the network, `tandem status` had no answer, and Ctrl-C took two minutes."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    rays = [child for child in children if child.name() in ("gcs_server", "raylet")]
    listening = [found for ray in rays for found in ray.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    assert {found.laddr.ip.removeprefix("::ffff:") for found in listening} == {"127.0.0.1"}


async def test_a_driver_without_the_token_of_ray_cannot_join_it(served: Served) -> None:
    """A driver that joins could run code in the workers."""
    servers = [child for child in psutil.Process(served.process.pid).children(recursive=True) if "gcs" in child.name()]
    (port,) = {
        found.laddr.port for found in servers[0].net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.ip in ("::", "0.0.0.0", "::ffff:127.0.0.1")
    }  # fmt: skip
    join = f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='ERROR'); print('joined')"
    no_token = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    no_token["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray replaces 127.0.0.1 by an address of the machine
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", join, stdout=PIPE, stderr=PIPE, env=no_token)
    assert process.stderr is not None
    errors = ""
    async with asyncio.timeout(PATIENCE_S):
        while "nauthenticated" not in errors and (line := await process.stderr.readline()):
            errors += line.decode()
    process.kill()  # Ray retries without end
    out, _ = await process.communicate()
    assert "nauthenticated" in errors
    assert "joined" not in out.decode()


async def test_no_process_below_serve_hears_a_sigterm_that_all_processes_get(served: Served) -> None:
    for child in psutil.Process(served.process.pid).children(recursive=True):
        child.terminate()
    async with client(served) as connection:
        await Answer(connection, prompt_of(2), 500).right()
    assert "wanted" in await said("scale", "--decode", "1", "--router", served.address)  # the supervisor answers


async def test_a_second_ctrl_c_ends_every_process_at_once(served: Served) -> None:
    """Stands last: it ends the fleet of this file."""
    fleet = replace(served, family=psutil.Process(served.process.pid).children(recursive=True))
    async with client(served) as connection:
        answer = await Answer(connection, prompt_of(1)).begun()  # the drain must outlast both signals
        fleet.process.send_signal(signal.SIGINT)
        fleet.process.send_signal(signal.SIGTERM)
        assert await fleet.ended() == (130, [])
        answer.reading.cancel()
