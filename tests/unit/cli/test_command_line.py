"""Flags set the fields of a request. Wrong input and interrupts end with one line and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import grpc
import grpc.aio
import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from cli import entry
from cli.commands import demo
from cli.commands.chat import Conversation, chat
from cli.commands.demo_config import demo_config
from cli.config_file import FLAGS
from cli.exit_codes import INTERRUPTED
from cli.flags import CHOICE_FLAGS, REQUEST_FLAGS, fill_request, with_flags
from cli.interrupts import run_interruptible
from cli.main import app
from core.errors import ConfigError, InvalidRequest
from tandem_client import CallFailed
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import Choices, GenerateRequest, OutputFormat, SamplingParams, StopConditions
from tests.unit.cli.conftest import Tandem

# A command line, and the message that it makes.
TYPED = [
    ("--max-tokens 7", GenerateRequest(stop=StopConditions(max_tokens=7))),
    ("--temperature 0.5", GenerateRequest(sampling=SamplingParams(temperature=0.5))),
    ("--top-k 5", GenerateRequest(sampling=SamplingParams(top_k=5))),
    ("--top-p 0.5", GenerateRequest(sampling=SamplingParams(top_p=0.5))),
    ("--min-p 0.25", GenerateRequest(sampling=SamplingParams(min_p=0.25))),
    ("--repetition-penalty 1.5", GenerateRequest(sampling=SamplingParams(repetition_penalty=1.5))),
    ("--presence-penalty 0.5", GenerateRequest(sampling=SamplingParams(presence_penalty=0.5))),
    ("--frequency-penalty 0.5", GenerateRequest(sampling=SamplingParams(frequency_penalty=0.5))),
    ("--seed 3", GenerateRequest(sampling=SamplingParams(seed=3))),
    ("--stop a --stop b", GenerateRequest(stop=StopConditions(stop_strings=["a", "b"]))),
    ("--stop-token-id 4 --stop-token-id 5", GenerateRequest(stop=StopConditions(stop_token_ids=[4, 5]))),
    ("--ignore-eos", GenerateRequest(stop=StopConditions(ignore_eos=True))),
    ("--min-tokens 3", GenerateRequest(stop=StopConditions(min_tokens=3))),
    ("--json-schema {}", GenerateRequest(output_format=OutputFormat(json_schema="{}"))),
    ("--regex a+", GenerateRequest(output_format=OutputFormat(regex="a+"))),
    ("--choice a --choice b", GenerateRequest(output_format=OutputFormat(choices=Choices(texts=["a", "b"])))),
    ("--model red", GenerateRequest(model="red")),
    ("--cache-salt mine", GenerateRequest(cache_salt="mine")),
    ("--user me", GenerateRequest(user="me")),
    ("--priority -3", GenerateRequest(priority=-3)),
    ("--min-interval-ms 50", GenerateRequest(min_interval_ms=50)),
    ("--n 2", GenerateRequest(n=2)),
    ("--logprobs 4", GenerateRequest(logprobs=4)),
]


@pytest.mark.parametrize(("typed", "wanted"), TYPED, ids=[typed.split()[0] for typed, _ in TYPED])
def test_each_flag_sets_its_field_and_no_other(typed: str, wanted: GenerateRequest) -> None:
    request = GenerateRequest()
    small = typer.Typer()

    @small.command()
    @with_flags((*REQUEST_FLAGS, *CHOICE_FLAGS))
    def ask(**flags: object) -> None:
        fill_request(request, flags)

    result = CliRunner().invoke(small, typed.split())
    assert result.exit_code == 0, result.output
    assert request == wanted


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *path, name)


def test_every_command_and_each_of_its_options_has_a_help_text_and_shows_every_word_of_it() -> None:
    for path, command in commands(get_command(app)):
        result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "1000"})
        assert result.exit_code == 0, result.output
        assert command.help, path
        shown = " ".join(result.output.split())
        for parameter in command.params:
            written = " ".join((getattr(parameter, "help", "") or "").replace("\\[", "[").split())
            assert written, (path, parameter.name)
            assert written in shown, (path, parameter.name)


def test_every_flag_has_a_row() -> None:
    assert {f"--{flag.name}" for flag in (*REQUEST_FLAGS, *CHOICE_FLAGS)} == {typed.split()[0] for typed, _ in TYPED}


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("seed", -1, r"^seed: must be in \[0, 18446744073709551615\], is -1$"),
        ("max_tokens", 2**32, r"^max_tokens: must be in \[0, 4294967295\], is 4294967296$"),
        ("priority", 2**31, r"^priority: must be in \[-2147483648, 2147483647\], is 2147483648$"),
    ],
)
def test_a_number_out_of_the_range_of_its_field_names_field_and_limit(flag: str, value: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        fill_request(GenerateRequest(), {flag: value})


def test_two_forms_of_one_output_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^choice: cannot be combined with regex$"):
        fill_request(GenerateRequest(), {"regex": "a", "choice": ["b"]})


# ---- wrong input and interrupts end the `tandem` command with one line and an exit code, never with a traceback


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["generate", "\udcff"], "the given text is not UTF-8"),
        (["generate", "x", "--stop", "\udcff"], "the given text is not UTF-8"),
        (
            ["explain", "x", "--raw", "--system", "y"],
            "system: a raw prompt has no system message; omit --raw or --system",
        ),
        (["generate", " "], "prompt: is empty"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_an_error_of_one_line(command: list[str], says: str, tandem: Tandem) -> None:
    assert tandem(*command) == (1, "", f"error: {says}\n")


def test_a_call_without_the_token_is_an_error_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch, tandem: Tandem
) -> None:
    async def refuse(*_: object) -> None:
        raise CallFailed(grpc.StatusCode.UNAUTHENTICATED, "no token", retryable=False)

    monkeypatch.setattr("cli.commands.status.scale", refuse)
    code, _, shown = tandem("scale", "--decode", "1")
    assert (code, shown) == (1, "error: no token; give the config file with the token in [security] by --config\n")


def test_output_to_a_full_disk_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-c", "from cli.entry import run; run()", "pull", "--help"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_an_interrupted_demo_raises_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "pull_if_listed", lambda *_: None)
    monkeypatch.setattr(demo, "run_interruptible", lambda *_: True)  # as after a Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        demo.demo(demo_config(), MagicMock(), Console(file=io.StringIO()))


class LosingClient:
    """The first request fails because its worker is lost; the second one succeeds."""

    address = "router:1"
    num_requests = 0

    async def model(self) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(name="fake")

    async def generate(self, _: inference_pb2.GenerateRequest, __: float):  # type: ignore[no-untyped-def]
        self.num_requests += 1
        if self.num_requests == 1:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the decode worker is gone", retryable=True)
        yield inference_pb2.GenerateResponse(tokens=inference_pb2.TokenChunk(text="here"))
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(stdin: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> tuple[Conversation, str]:
    """Chat with the lines of `stdin`. Returns the conversation and the output."""
    monkeypatch.setattr(sys, "stdin", stdin)
    conversation, console = Conversation(inference_pb2.GenerateRequest(), "", 5.0), Console(file=io.StringIO())
    chat(contextlib.nullcontext(LosingClient()), conversation, console)  # type: ignore[arg-type]
    return conversation, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_failed_request_does_not_end_the_conversation_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, shown = talk(Terminal("one\ntwo\n"), monkeypatch)
    assert "error: the decode worker is gone" in shown
    assert [(message.role, message.content) for message in conversation.messages] == [
        ("user", "two"), ("assistant", "here"),
    ]  # fmt: skip


def test_a_failed_request_ends_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CallFailed):
        talk(io.StringIO("one\ntwo\n"), monkeypatch)


class InterruptedImport(ModuleType):
    def __getattr__(self, _: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_during_the_imports_exits_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cli.main", InterruptedImport("cli.main"))
    with pytest.raises(SystemExit) as ended:
        entry.run()
    assert ended.value.code == 130


def test_a_file_where_an_axis_belongs_gets_the_flag_it_needs() -> None:
    result = CliRunner().invoke(app, ["simulate", "a.jsonl"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'a.jsonl' is an axis, which needs --sweep; a file of requests is --workload FILE" in result.output


def test_a_closed_standard_stream_is_an_empty_one() -> None:
    program = [sys.executable, "-c", "from cli.entry import run; run()", "generate"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *program], stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, b"error: prompt: is empty\n")


def test_a_character_that_the_output_lacks_is_named() -> None:
    program = [sys.executable, "-c", "from cli.entry import run; run()", "key", "\N{EURO SIGN}"]
    ended = subprocess.run(program, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"latin-1, the encoding of the output, lacks '\\u20ac'" in ended.stderr


# ---- Ctrl-C, SIGTERM and SIGHUP of `tandem serve` before its loop runs, and while Ray closes.

SERVE = """
import asyncio, contextlib, os, sys, time
import cli.commands.demo, cli.commands.serve, fleet.ray.cluster
from cli.interrupts import run_interruptible
from cli.main import run
from cli.screens.terminal import print_notice

def wait():  # in short sleeps: Python handles a signal that comes just before a sleep after it
    for _ in range(round(TIMEOUT_S / 0.01)):
        time.sleep(0.01)

class Cluster:
    def close(self):
        print_notice("closing")
        if phase not in ("ends", "serves", "answers"):
            with contextlib.suppress(KeyboardInterrupt):  # as Ray's C++ has no exceptions of Python
                wait()

class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ending\\n")
        sleep(1.0)

async def drained():
    if phase == "serves":
        print_notice("serving")
        try:
            await asyncio.sleep(TIMEOUT_S)
        finally:
            await asyncio.sleep(1.0)
            os.write(2, b"drained")

async def answers(console):
    console.print("serving")
    try:
        while True:
            console.print("an answer")
            await asyncio.sleep(0.01)
    finally:
        os.write(2, b"drained")

def wait_for_ray():
    print("starting", flush=True)
    wait()

fleet.ray.cluster.begin = lambda _: Cluster()
phase = sys.argv[1]
sys.argv[1:] = ["demo"] if phase == "answers" else ["serve", "--model", "fake:tiny", "--port", "0"]
cli.commands.demo.demo = lambda _, __, console: run_interruptible(lambda: answers(console), print_notice)
cli.commands.serve.serve = lambda *_: wait_for_ray() if phase == "starts" else run_interruptible(drained, print_notice)
slow = Slow() if phase == "ends" else None
run()
"""
TIMEOUT_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("phase", "lines", "code"),
    [
        ("starts", ["starting", "closing"], INTERRUPTED),
        ("closes", ["closing"], INTERRUPTED),
        ("ends", ["ending"], 0),  # of Python: the exit code stays
    ],
)
def test_a_signal_outside_the_loop_closes_ray_and_another_one_ends_the_process(
    phase: str, lines: list[str], code: int, number: signal.Signals
) -> None:
    program = SERVE.replace("TIMEOUT_S", str(TIMEOUT_S))
    with subprocess.Popen([sys.executable, "-c", program, phase], stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        for line in lines:
            assert f"{line}\n" in iter(serve.stdout.readline, "")
            serve.send_signal(number)
        assert serve.wait(TIMEOUT_S / 2) == code


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_command_learns_whether_its_work_was_interrupted(is_interrupted: bool) -> None:
    async def work() -> None:
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(TIMEOUT_S)

    assert run_interruptible(work, lambda _: None) is is_interrupted


def test_a_signal_that_wakes_another_thread_ends_the_work() -> None:
    """Of a process that is stopped and goes on, any thread may get it; the loop waits for its next timer."""

    async def work() -> None:
        threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        await asyncio.sleep(TIMEOUT_S)

    began = time.monotonic()
    assert run_interruptible(work, lambda _: None)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_closed_terminal_drains_a_fleet_whose_output_nobody_reads() -> None:
    program = SERVE.replace("TIMEOUT_S", str(TIMEOUT_S))
    command = [sys.executable, "-c", program, "serves"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        assert serve.stderr is not None
        assert "serving\n" in iter(serve.stdout.readline, "")
        serve.stdout.close()
        for _ in range(2):  # of the kernel and of the shell
            serve.send_signal(signal.SIGHUP)
            time.sleep(0.3)
        assert (serve.wait(TIMEOUT_S / 2), serve.stderr.read()) == (0, "drained")


@pytest.mark.parametrize("phase", ["serves", "answers"])
def test_an_output_that_takes_nothing_holds_up_no_drain(phase: str) -> None:
    """As a terminal after Ctrl-S, or a pager that is not scrolled."""
    program = SERVE.replace("TIMEOUT_S", str(TIMEOUT_S))
    reads, writes = os.pipe()
    with subprocess.Popen([sys.executable, "-c", program, phase], stdout=writes, stderr=subprocess.PIPE) as serve:
        told = b""
        while b"serving\n" not in told:
            told += os.read(reads, 100)
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writes, bytes(4096))
        os.set_blocking(writes, True)
        serve.send_signal(signal.SIGTERM)
        try:
            assert (serve.communicate(timeout=TIMEOUT_S / 2)[1], serve.returncode) == (b"drained", 0)
        finally:
            serve.kill()
    os.close(reads)
    os.close(writes)


# ---- Every number of every command line, and every file that a command writes, is refused before the work by its name.


# A flag of `tandem simulate` that its parts know by another name, and those of a URL
NAMED = [
    ("simulate --prefill -1", "--prefill must not be negative"),
    ("simulate --decode 0", "--decode must be positive"),
    ("simulate --input-tokens 0", "--input-tokens must be positive"),
    ("simulate --prefix-tokens 8", "--prefix-groups and --prefix-tokens must be set together"),
    ("simulate --burstiness 0", "--burstiness needs --arrivals gamma"),
    ("simulate --divisor 2", "--divisor needs a file as --workload"),
    ("simulate --workload a.jsonl --spread 0.1", "--spread needs synthetic requests"),
    ("simulate --admission maybe", "--admission must be queue or shed"),
    ("check ftp://a", "url: must be host:port or a URL of HTTP, is 'ftp://a'"),
    ("check http://a:99999", "url: Port out of range"),
    ("check a --metrics http://b:99999", "--metrics: Port out of range"),
    ("check a --deadline-header a:b", "--deadline-header: must be a name of HTTP"),
    ("status --router a:65536", "router: must be host:port, with a port in [1, 65535], is 'a:65536'"),
    ("role decode-0 nonsense", "'role': must be prefill or decode, is 'nonsense'"),
    ("events --limit 1001", "'--limit': must be int in [1, 1000], is '1001'"),
    ("apply router.max_queued", "'router.max_queued' is neither a file nor TABLE.OPTION=VALUE"),
    *(
        (f"generate x --timeout {s}", "'--timeout': must be float in [0.001, 1000000.0]")
        for s in ("inf", "nan", "0", "1e7")
    ),
    ("serve --prefill two", "--prefill: [cluster] num_prefill must be int, in [0, 2147483647], is 'two'"),
    ("serve --prefill 257", "--prefill: [cluster] num_prefill must be in [0, 256], is 257"),
]

COMMANDS: Any = get_command(app)


def numbers() -> Iterator[tuple[str, str]]:
    """The command and the name of each option that is a number."""
    for name, command in COMMANDS.commands.items():
        for parameter in command.params:
            kind = getattr(parameter, "metavar", None) or str(parameter.type_descriptor.annotation)
            if parameter.param_type_name == "option" and ("int" in kind or "float" in kind):
                yield name, parameter.opts[0]


def refusal(*line: str) -> str:
    with pytest.raises((typer.BadParameter, ConfigError)) as refused:
        COMMANDS.main(line, standalone_mode=False)
    error: Any = refused.value
    return str(error) if isinstance(error, ConfigError) else str(error.format_message())


def test_a_text_in_place_of_a_number_is_refused_with_the_name_of_its_option() -> None:
    found = list(numbers())
    assert len(found) > 90
    for command, option in found:
        for value in ("nonsense", "9" * 5000 + "x"):
            said = refusal(command, option, value)
            assert re.search(rf"{option}\b.*must be .{{1,300}}$", said), said


def test_a_number_of_the_config_out_of_its_range_is_refused_with_flag_and_option() -> None:
    for flag in FLAGS:
        if not isinstance(flag.default, str):
            for value in ("-99999999999", "1e30", "inf", "nan", "9" * 5000):
                said = refusal("serve", f"--{flag.name}", value)
                assert said.startswith(f"--{flag.name}: [{flag.table}] {flag.option} must be "), said


@pytest.mark.parametrize(("line", "says"), NAMED)
def test_a_wrong_value_is_refused_with_the_name_that_was_typed_and_the_limit(
    line: str, says: str, tandem: Tandem
) -> None:
    ended = tandem(*line.split())
    shown = " ".join(ended.err.replace("│", "").split())
    assert ended.code in (1, 2)
    assert says in shown.replace("Invalid value for ", "")


@pytest.mark.parametrize(
    "line", ["simulate --json FILE", "simulate --plot FILE", "check a --json FILE", "check a --junit FILE",
             "calibrate FILE"],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_the_work(line: str, tandem: Tandem, tmp_path: Path) -> None:
    folder = tmp_path / "a.png"
    folder.mkdir()
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    option = line.split()[-2] if "--" in line else "output"
    for file, reason in (
        (tmp_path / "nowhere" / "a.png", "does not exist"),
        (folder, "is a directory"),
        (loop, "Symlink loop"),
        (tmp_path / f"{'a' * 300}.png", "File name too long"),
    ):
        ended = tandem(*(str(file) if word == "FILE" else word for word in line.split()))
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"error: {option}: ")
        assert reason in ended.err


def test_a_file_without_a_span_is_no_trace_and_an_empty_one_has_no_request(tandem: Tandem, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text("")
    assert tandem("trace", "--file", str(file)).code in (0, None)
    file.write_text('{"x": 1}\n')
    ended = tandem("trace", "--file", str(file))
    assert (ended.code, ended.err.count("must have a span in each line")) == (1, 1)
