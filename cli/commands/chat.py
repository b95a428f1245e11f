"""`tandem chat`: a conversation at the terminal. Ctrl-C stops the answer; Ctrl-C twice quits."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console

from cli.screens.terminal import print_answer, print_line
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import inference_pb2

HELP = "Ctrl-C stops the answer, Ctrl-C twice quits; /new starts a new conversation."


class Conversation:
    """The messages so far, and the options of every request."""

    def __init__(self, template: inference_pb2.GenerateRequest, system: str, timeout_s: float) -> None:
        """`template` carries the sampling and stop options of every turn."""
        self._template = template
        self._system = system
        self._timeout_s = timeout_s
        self.messages: list[inference_pb2.ChatMessage] = []
        self.restart()

    def restart(self) -> None:
        self.messages = []
        if self._system:
            self.messages.append(inference_pb2.ChatMessage(role="system", content=self._system))

    async def answer(self, client: AsyncClient, text: str) -> inference_pb2.Finished | None:
        """Send `text` and print the answer. A stopped answer stays in the conversation as far as it arrived."""
        self.messages.append(inference_pb2.ChatMessage(role="user", content=text))
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._template)
        request.chat.messages.extend(self.messages)
        pieces: list[str] = []
        finished = None
        try:
            async for response in client.generate(request, self._timeout_s):
                if response.HasField("finished"):
                    finished = response.finished
                elif response.HasField("tokens"):
                    pieces.append(response.tokens.text)
                    print_answer(response.tokens.text)
        finally:
            if pieces:
                self.messages.append(inference_pb2.ChatMessage(role="assistant", content="".join(pieces)))
            else:
                self.messages.pop()
            print()
        return finished


def chat(connection: AsyncClient, conversation: Conversation, console: Console) -> None:
    """Converse until the end of the input, or until two Ctrl-C with no line between them."""
    with asyncio.Runner() as runner:
        client = runner.run(connection.__aenter__())
        try:
            model = runner.run(client.model())
            console.print(f"{model.name} at {client.address}. {HELP}", style="dim")
            _converse(runner, client, conversation, console)
        finally:
            runner.run(connection.__aexit__(None, None, None))


def _converse(runner: asyncio.Runner, client: AsyncClient, conversation: Conversation, console: Console) -> None:
    interrupted = False
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
            interrupted = False
            if line == "/new":
                conversation.restart()
            elif line:
                finished = runner.run(conversation.answer(client, line))
                if finished is not None:
                    rate = finished.usage.completion_tokens / max(finished.timings.total_ms, 1e-9) * 1e3
                    first_ms = finished.timings.first_token_ms
                    console.print(f"first token {first_ms:.0f} ms, {rate:.1f} tokens/s", style="dim")
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            console.print(f"\n{HELP}", style="dim")
        except CallFailed as error:
            if not sys.stdin.isatty():  # a script needs the exit code
                raise
            # Keep the conversation: a lost worker is restarted, and /new ends a conversation that is too long.
            print_line(console, f"error: {error}", "red")
