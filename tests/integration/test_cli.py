"""The `tandem` command as a user runs it: a real fleet on a real Ray, with a model that needs no weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cli.credentials import find_credentials
from tests.support.command import PATIENCE_S, Served, serving, start, tandem

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """One fleet for every test that only uses it; ended by one Ctrl-C."""
    async with serving("--local-prefill-tokens", "0") as fleet:
        assert len(fleet.family) > 6, "Ray's own, the supervisor, a router and two workers"
        yield fleet
        fleet.process.send_signal(signal.SIGINT)
        assert await fleet.ended() == (0, [])


async def test_generate_prints_the_answer_and_the_same_seed_prints_it_again(served: Served) -> None:
    ask = ("generate", "Hello there", "--router", served.address, "--max-tokens", "8", "--seed", "7")
    first, second = await tandem(*ask), await tandem(*ask)
    assert first[0] == 0, first[2]
    assert first[1].strip("\n")
    assert first[1] == second[1]


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


async def test_the_log_of_each_service_says_whose_it_is_and_when(served: Served) -> None:
    (raylet,) = [child for child in served.family if "raylet" in child.name()]
    folder = next(word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--log_dir="))
    log = await asyncio.to_thread(said_in, Path(folder))
    for name in ("prefill-0", "decode-0", "router-"):
        assert re.search(rf"^20\d\d-\S+ \S+ INFO \S+: {name}\S+ serves ", log, re.MULTILINE), name


async def test_several_choices_are_printed_apart(served: Served) -> None:
    _, out, _ = await tandem("generate", "Hi", "--router", served.address, "--n", "2", "--max-tokens", "3")
    assert "[0] " in out
    assert "[1] " in out


async def test_a_refusal_names_the_field_on_one_line(served: Served) -> None:
    code, _, err = await tandem("generate", "Hi", "--router", served.address, "--temperature", "-1")
    assert code == 1
    assert err.startswith("error: ")
    assert "temperature" in err
    assert len(err.splitlines()) == 1


async def test_chat_answers_each_line_and_ends_with_its_input(served: Served) -> None:
    code, out, err = await tandem(
        "chat", "--router", served.address, "--max-tokens", "3", "--ignore-eos", stdin="one\n/new\ntwo\n"
    )
    assert (code, err) == (0, "")
    assert out.count("first token") == 2


async def test_scale_grows_a_pool_and_status_shows_it(served: Served) -> None:
    code, out, err = await tandem("scale", "--decode", "2", "--router", served.address)
    assert code == 0, err
    assert "1 prefill, 2 decode" in out
    code, out, err = await tandem("status", "--once", "--ledger", "--router", served.address)
    assert code == 0, err
    assert "decode 1/2" in out or "decode 2/2" in out
    assert "prefill-0" in out
    code, _, err = await tandem("scale", "--decode", "100000", "--router", served.address)
    assert code == 1
    assert "decode: must be in [0, 256]" in err


async def test_a_second_ctrl_c_ends_everything_at_once() -> None:
    async with serving() as fleet:
        fleet.process.send_signal(signal.SIGINT)
        fleet.process.send_signal(signal.SIGTERM)
        code, left = await fleet.ended()
        assert (code, left) == (130, [])


async def test_no_router_is_one_line_that_says_what_to_do() -> None:
    for command in (("generate", "hi"), ("status", "--once"), ("scale", "--decode", "2"), ("chat",)):
        code, _, err = await tandem(*command, "--router", "127.0.0.1:9")
        assert (code, err) == (1, "error: no router at 127.0.0.1:9; start one with `tandem serve`\n"), command


async def test_what_cannot_be_served_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = await tandem("serve", "--model", "fake:tiny", "--port", port)
    assert code == 1
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert "--port" in err
    code, _, err = await tandem("serve", "--config", str(tmp_path / "none.toml"))
    assert (code, len(err.splitlines())) == (1, 1)
    code, out, err = await tandem("serve", "--model", str(tmp_path / "nothing.gguf"), "--port", "0")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "no model" in err
    assert "starting Ray" not in out


async def test_doctor_measures_the_transport_and_finds_nothing_broken() -> None:
    code, out, err = await tandem("doctor")
    assert code == 0, out + err
    assert "nixl between two processes fine: shared memory, " in " ".join(out.split())


@pytest.mark.timeout(240)
async def test_demo_says_paris_and_takes_every_question_through_both_pools_and_leaves_no_process() -> None:
    process = await start("demo")
    assert process.stdout is not None
    said = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"router at" not in said:
            line = await process.stdout.readline()
            assert line, f"no router came up: {said.decode()}"
            said += line
        fleet = Served(process, "", psutil.Process(process.pid).children(recursive=True))
        assert len(fleet.family) > 6, "Ray's own, a router and two workers"
        rest, err_bytes = await process.communicate()
    out, err = (said + rest).decode(), err_bytes.decode()
    assert process.returncode == 0, out + err
    assert await fleet.left() == []
    assert "Paris" in out
    assert out.count("disaggregated: prefill-0") == 3
    for phase in ("tokenize", "queue", "prefill", "first token", "transfer", "decode"):
        assert out.count(f"  {phase} ") == 3, phase
    assert "everything is stopped" in out


async def test_steering_needs_the_token_that_serve_left_for_its_user(served: Served, tmp_path: Path) -> None:
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path)}  # another user's
    scale = ("scale", "--decode", "1", "--router", served.address)
    process = await start(*scale, environment=elsewhere)
    async with asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert "wants its cluster's token" in err.decode()
    process = await start("generate", "Hi", "--router", served.address, "--max-tokens", "2", environment=elsewhere)
    async with asyncio.timeout(PATIENCE_S):
        await process.communicate()
    assert process.returncode == 0, "asking is for everybody"
    code, _, err_text = await tandem(*scale)
    assert code == 0, err_text


async def test_the_token_stands_in_no_command_line_and_no_environment(served: Served) -> None:
    token = find_credentials(None, served.address).token.encode()
    assert len(token) > 32
    family = [served.process.pid, *(child.pid for child in psutil.Process(served.process.pid).children(recursive=True))]
    shown = [said for pid in family for said in await asyncio.to_thread(what_others_may_see, pid)]
    assert any(b"serve" in said for said in shown)
    assert not any(token in said for said in shown)


def said_in(folder: Path) -> str:
    """By every worker process of a Ray, on standard error."""
    return "".join(path.read_text() for path in folder.glob("worker-*.err"))


def what_others_may_see(pid: int) -> list[bytes]:
    """Command line and environment of a process; nothing where it has ended."""
    try:
        return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    except (FileNotFoundError, ProcessLookupError):
        return []


async def test_who_lacks_the_token_of_ray_cannot_join_it(served: Served) -> None:
    """Whoever could would run code in the workers."""
    servers = [child for child in psutil.Process(served.process.pid).children(recursive=True) if "gcs" in child.name()]
    (port,) = {
        found.laddr.port for found in servers[0].net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.ip in ("::", "0.0.0.0")
    }  # fmt: skip
    join = f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='ERROR'); print('joined')"
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", join, stdout=PIPE, stderr=PIPE, env=stranger)
    assert process.stderr is not None
    said = ""
    async with asyncio.timeout(PATIENCE_S):
        while "nauthenticated" not in said and (line := await process.stderr.readline()):
            said += line.decode()
    process.kill()  # it would go on trying
    out, _ = await process.communicate()
    assert "nauthenticated" in said
    assert "joined" not in out.decode()
