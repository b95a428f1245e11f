"""Asks for the tokens of the same prompts in unlike ways, and of the reference.

alone     one after the other, nothing cached, each answer whole; lengths around the edges of blocks
cached    the same prompts again, streamed
crowd     other prompts of the same lengths, all at once, streamed
chat      a few as chats, whole and streamed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conformance.findings import Finding, Question, Severity
from conformance.metrics_page import hand_offs
from conformance.prompts import EDGES, LONG_TOKENS, Prompt, PromptSource, is_edge
from conformance.stack import Ask, Record, Stack
from conformance.token_judge import CANARY, Bound, bound_from, judge_canaries, judge_tokens

ALONE = Question("tokens: a prompt alone, its answer whole", Severity.OUTPUT)
CACHED = Question("tokens: the prompt again, cached and streamed", Severity.OUTPUT)
CROWD = Question("tokens: prompts in a crowd", Severity.OUTPUT)
CHATS = Question("tokens: chats, whole and streamed", Severity.OUTPUT)
HAND_OFF = Question("tokens: KV was handed over meanwhile", Severity.SERVICE)
QUESTIONS = (ALONE, CACHED, CROWD, CHATS, CANARY, HAND_OFF)
MAX_TOKENS = 16
NUM_CHATS = 3
_WORDS = 100  # of the prompt that measures how many tokens a word has
_SPARE_WORDS = 5  # letters, of one token each, fill the rest up to the wanted length
Pair = tuple[Record, Record]


@dataclass
class TokenProbes:
    stack: Stack
    reference: Stack | None
    source: PromptSource
    pairs: list[Pair] = field(default_factory=list)  # (of the reference, of the stack), to one prompt
    bound: Bound = field(default_factory=lambda: bound_from([]))

    async def run(self) -> list[Finding]:
        alone, crowd = await self._prompts(), await self._prompts()
        before = hand_offs(await self.stack.page())
        first = [await self.stack.ask(_ask(prompt)) for prompt in alone]
        again = [await self.stack.ask(_ask(prompt, stream=True)) for prompt in alone]
        together = await self.stack.ask_all([_ask(prompt, stream=True) for prompt in crowd])
        moved = hand_offs(await self.stack.page())

        expected = await self._expected([_ask(prompt) for prompt in alone + crowd], first)
        of_alone, of_crowd = expected[: len(alone)], expected[len(alone) :]
        edges = sum(is_edge(record.answer.usage.prompt) for record in first if record.answer.usage)
        note = f"; {edges} prompts end at the edge of a block or one token beside it"
        return [
            self._judge(ALONE, of_alone, first, note) if self.reference else ALONE.not_shown("there is no reference"),
            self._judge(CACHED, of_alone, again, _cached_note(again)),
            self._judge(CROWD, of_crowd, together),
            await self._chats(alone[:NUM_CHATS]),
            judge_canaries([*zip(alone, first, strict=True), *zip(crowd, together, strict=True)]),
            hand_off_finding(before, moved),
        ]

    async def _expected(self, asks: list[Ask], first: list[Record]) -> list[Record]:
        """Without a reference: the answers of the stack alone. With one, its answers, and the bound from its noise."""
        if self.reference is None:
            return first + [await self.stack.ask(ask) for ask in asks[len(first) :]]
        alone = [await self.reference.ask(ask) for ask in asks]
        crowd = await self.reference.ask_all(asks)
        self.bound = bound_from(list(zip(alone, crowd, strict=True)))
        return alone

    def _judge(self, question: Question, expected: list[Record], found: list[Record], note: str = "") -> Finding:
        pairs = list(zip(expected, found, strict=True))
        self.pairs += pairs
        return judge_tokens(question, pairs, self.bound, note)

    async def _chats(self, prompts: list[Prompt]) -> Finding:
        asks = [replace(_ask(prompt), chat=True) for prompt in prompts]
        first = await self.stack.try_to_ask(asks[0])
        if not first.is_good and 400 <= first.reply.status < 500:
            return CHATS.not_shown(f"refused: {first.what}")
        whole = [await self.stack.ask(ask) for ask in asks]
        streamed = [await self.stack.ask(replace(ask, stream=True)) for ask in asks]
        expected = [await self.reference.ask(ask) for ask in asks] if self.reference else whole
        return self._judge(CHATS, expected * 2, whole + streamed)

    async def _prompts(self) -> list[Prompt]:
        """A short prompt, one for each edge of a block that the context has room for, and a long one."""
        room = (self.stack.context or 2 * LONG_TOKENS) - 2 * MAX_TOKENS
        short, some = [await self._count(self.source.next(num_words)) for num_words in (0, _WORDS)]
        prompts = [self.source.next(0)]
        if short is None or some is None or some - short < _WORDS // 2:  # a finding about usage, or another alphabet
            return prompts + [self.source.next(num_words) for num_words in range(_WORDS, _WORDS + 8)]
        for target in (*EDGES, LONG_TOKENS):
            num_words = int((target - short) * _WORDS / (some - short)) - _SPARE_WORDS
            if num_words >= 0 and target < room:
                prompt = self.source.next(num_words)
                counted = await self._count(self.source.renumbered(prompt)) or target
                prompts.append(replace(prompt, num_letters=max(0, target - counted)))
        return prompts

    async def _count(self, prompt: Prompt) -> int | None:
        """The tokens of a prompt, by the usage of an answer."""
        record = await self.stack.ask(Ask(prompt.text, 1))
        usage = record.answer.usage if record.is_good else None
        return usage.prompt if usage and usage.prompt > 0 else None


def _ask(prompt: Prompt, stream: bool = False) -> Ask:
    return Ask(prompt.text, MAX_TOKENS, stream)


def _cached_note(records: list[Record]) -> str:
    cached = [record.answer.usage.cached for record in records if record.answer.usage]
    return f"; {sum(map(bool, cached))} report cached tokens" if any(cached) else "; none reports cached tokens"


def hand_off_finding(before: dict[str, float], after: dict[str, float]) -> Finding:
    if not before and not after:
        return HAND_OFF.not_shown("no page of metrics counts hand-offs")
    grown = {name: value - before.get(name, 0.0) for name, value in after.items() if value > before.get(name, 0.0)}
    if not grown:
        return HAND_OFF.not_shown("the metrics count hand-offs, and saw none: nothing above is about a transfer")
    return HAND_OFF.holds("; ".join(f"{name} grew by {value:,.0f}" for name, value in grown.items()))
