"""Wrong input and interrupts end the `tandem` command with one line and an exit code, never with a traceback."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from types import ModuleType
from unittest.mock import MagicMock

import grpc
import grpc.aio
import pytest
from rich.console import Console

from cli import entry
from cli.commands import demo
from cli.commands.chat import Conversation, chat
from cli.commands.demo_config import demo_config
from tandem_client import CallFailed
from tandem_client.stubs import inference_pb2
from tests.unit.cli.conftest import Tandem


@pytest.mark.parametrize("command", [["generate", "\udcff"], ["generate", "x", "--stop", "\udcff"]])
def test_text_that_is_not_utf_8_is_an_error_of_one_line(command: list[str], tandem: Tandem) -> None:
    assert tandem(*command) == (1, "", "error: the given text is not UTF-8\n")


def test_a_call_without_the_token_is_an_error_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch, tandem: Tandem
) -> None:
    async def refuse(*_: object) -> None:
        raise CallFailed(grpc.StatusCode.UNAUTHENTICATED, "no token", retryable=False)

    monkeypatch.setattr("cli.commands.status.scale", refuse)
    code, _, shown = tandem("scale", "--decode", "1")
    assert (code, shown) == (1, "error: no token; give the config file with the token in [security] by --config\n")


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "1e7"])
def test_a_time_limit_out_of_range_is_refused(seconds: str, tandem: Tandem) -> None:
    assert tandem("generate", "x", "--timeout", seconds).code == 2


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
