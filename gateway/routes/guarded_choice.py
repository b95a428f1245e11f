"""The output of one choice on its way through the guardrail.

    text "I ask. " | name "weather" | arguments {"city": "Bonn"} | text "Done."

Each of these parts is an output of its own for the guardrail (`GuardedOutput`): a call of a tool ends the text before
it, so that held-back text keeps its place. A guardrail may rewrite a name or arguments as it may rewrite text.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.guardrails import GuardedOutput, Guardrail, Message
from gateway.router_calls import Chunk, parts_of
from tandem_client.stubs.inference_pb2 import TokenChunk, ToolCallDelta


class GuardedChoice:
    """All methods raise `Refused`."""

    def __init__(self, guardrail: Guardrail, prompt: Sequence[Message]) -> None:
        self._guardrail, self._prompt = guardrail, prompt
        self._texts: list[str] = []  # of the chunk that is checked now
        self._num_chars = 0  # of these
        self._call: int | None = None  # the call whose arguments are checked now; None: text is checked
        self._output = self._open()

    async def push(self, chunk: Chunk) -> TokenChunk:
        """Returns the text and the deltas that the client gets now."""
        passed = TokenChunk(choice=chunk.choice, logprobs=chunk.logprobs)
        for part in parts_of(chunk):
            if isinstance(part, str):
                await self._push_text(passed, part)
            else:
                await self._push_call(passed, part)
        return self._take(passed)

    async def finish(self, choice: int) -> TokenChunk:
        """Returns the text and the arguments that the guardrail still holds back."""
        passed = TokenChunk(choice=choice)
        await self._end_part(passed)
        return self._take(passed)

    def _take(self, passed: TokenChunk) -> TokenChunk:
        """A chunk may have thousands of parts, so their texts are joined once."""
        passed.text = "".join(self._texts)
        self._texts.clear()
        self._num_chars = 0
        return passed

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self._num_chars += len(text)

    async def _push_text(self, passed: TokenChunk, text: str) -> None:
        if self._call is not None:
            await self._end_part(passed)
            self._call, self._output = None, self._open()
        self._add_text(await self._output.push(text))

    async def _push_call(self, passed: TokenChunk, delta: ToolCallDelta) -> None:
        if delta.id:
            await self._end_part(passed)
            name = self._open()
            checked = await name.push(delta.name) + await name.finish()
            passed.tool_calls.add(index=delta.index, id=delta.id, name=checked, text_offset=self._num_chars)
            self._call, self._output = delta.index, self._open()
        self._add_arguments(passed, await self._output.push(delta.arguments_json))

    def _open(self) -> GuardedOutput:
        return GuardedOutput(self._guardrail, self._prompt)

    async def _end_part(self, passed: TokenChunk) -> None:
        held_back = await self._output.finish()
        if self._call is None:
            self._add_text(held_back)
        else:
            self._add_arguments(passed, held_back)

    def _add_arguments(self, passed: TokenChunk, arguments: str) -> None:
        if arguments:
            passed.tool_calls.add(index=self._call, arguments_json=arguments, text_offset=self._num_chars)
