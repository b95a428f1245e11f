"""Kills or drains a part of the stack, by a command of the operator, under running streams.

streams run -> each has tokens -> the command -> more requests -> all have ended -> what each client saw -> served again
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

from conformance.findings import Finding, Question, Severity
from conformance.http_exchange import End, Reply
from conformance.oracle import Match, compare
from conformance.prompts import PromptSource
from conformance.stack import Ask, Record, Stack
from conformance.token_judge import Bound

KILL = Question("faults: a worker is killed", Severity.SERVICE)
DRAIN = Question("faults: a worker is drained", Severity.SERVICE)
NUM_STREAMS = 8
MAX_TOKENS = 300
EVENTS_BEFORE = 3  # of each stream, when the command starts
PAUSE_S = 0.2  # between two attempts after the fault


class Sight(Enum):
    """What a client sees."""

    RIGHT = "right"
    ERROR = "a typed error"
    CUT = "cut off"
    REFUSED = "no connection"
    UNTYPED = "an untyped error"
    LATE = "no end in time"
    EMPTY = "an empty answer"
    SHORT = "a short answer with a good end"
    WRONG = "other tokens"


HIDDEN = (Sight.EMPTY, Sight.SHORT, Sight.WRONG)  # the client takes these for answers


def sight_of(expected: Record, found: Record, bound: float) -> Sight:
    reply, answer = found.reply, found.answer
    if reply.end is End.LATE:
        return Sight.LATE
    if answer.error is not None:
        return Sight.ERROR
    if reply.end is End.UNREACHABLE:
        return Sight.REFUSED
    if reply.status and reply.status != 200:
        return Sight.UNTYPED
    if not found.is_good or (found.ask.stream and not answer.num_done):
        return Sight.CUT
    if answer.is_empty:
        return Sight.EMPTY
    match = compare(expected.answer, answer, bound).match
    if match in (Match.SAME, Match.TIE):
        return Sight.RIGHT
    return Sight.SHORT if len(answer.text) < len(expected.answer.text) else Sight.WRONG


@dataclass
class FaultProbe:
    stack: Stack
    source: PromptSource
    bound: Bound

    async def run(self, question: Question, command: str) -> Finding:
        if not command:
            return question.not_shown("no command was given (--kill, --drain)")
        if self.bound.value is None:
            return question.not_shown(self.bound.source)
        asks = [Ask(self.source.next(30).text, MAX_TOKENS, stream=True) for _ in range(NUM_STREAMS)]
        expected = await asyncio.gather(*map(self.stack.try_to_ask, asks))
        bad = next((record for record in expected if not record.is_good), None)
        if bad is not None:
            return question.not_shown(f"without the fault: {bad.what}")
        streams, num_open, status = await self._under_command(asks, command)
        if not num_open:
            return question.not_shown("every stream had ended before the command began: it was not run")
        if status is None:
            return question.not_shown(f"the command was killed: it did not end within {self.stack.limit_s:g} s")
        if status != 0:
            killed = " (a signal: does the command kill its own shell?)" if status < 0 else ""
            return question.not_shown(f"the command ended with {status}{killed}")
        served_s = await self._served_again(asks[0])
        sights = [sight_of(one, other, self.bound.value) for one, other in zip(expected, streams, strict=True)]
        return judge(question, sights, streams, served_s)

    async def _under_command(self, asks: list[Ask], command: str) -> tuple[list[Record], int, int | None]:
        """The streams, how many were open when the command began, and its exit status (None: it took too long).

        Without an open stream, a fault would show nothing, and is not made.
        """
        begun, all_begun = set[int](), asyncio.Event()

        def watch(number: int, reply: Reply) -> bool:
            if number not in begun and reply.num_events >= EVENTS_BEFORE:
                begun.add(number)
                if len(begun) == len(asks):
                    all_begun.set()
            return False

        async def stream(number: int) -> Record:
            return await self.stack.try_to_ask(asks[number], lambda reply: watch(number, reply))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(number)) for number in range(len(asks))]
            started = group.create_task(all_begun.wait())
            ended = group.create_task(asyncio.wait(tasks))
            await asyncio.wait([ended, started], return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            num_open = sum(not task.done() for task in tasks)
            status = await run_command(command, self.stack.limit_s) if num_open else None
        return [task.result() for task in tasks], num_open, status

    async def _served_again(self, ask: Ask) -> float | None:
        """Seconds until a new request has a good answer; None if it has none in time."""
        clock = asyncio.get_running_loop()
        start = clock.time()
        while clock.time() - start < self.stack.limit_s:
            if (await self.stack.try_to_ask(replace(ask, max_tokens=4))).is_good:
                return clock.time() - start
            await asyncio.sleep(PAUSE_S)
        return None


def judge(question: Question, sights: list[Sight], streams: list[Record], served_s: float | None) -> Finding:
    """A drain costs nobody anything. A death may cost an answer, but no client may take a wrong one for right."""
    counts = Counter(sights)
    seen = ", ".join(f"{counts[sight]} {sight.value}" for sight in Sight if counts[sight])
    gap_s = max((record.reply.longest_gap_s for record in streams), default=0.0)
    again = f"served again after {served_s:.1f} s" if served_s is not None else "not served again"
    why = f"of {len(sights)} streams {seen}; longest gap {gap_s:.1f} s; {again}"
    wrong = [place for place, sight in enumerate(sights) if sight in HIDDEN]
    if wrong:
        return replace(question, severity=Severity.OUTPUT).fails(why, streams[wrong[0]].curl)
    hung = counts[Sight.LATE] or served_s is None
    lost = question == DRAIN and counts[Sight.RIGHT] < len(sights)
    worst = next((place for place, sight in enumerate(sights) if sight is not Sight.RIGHT), 0)
    return question.fails(why, streams[worst].curl) if hung or lost else question.holds(why)


async def run_command(command: str, limit_s: float) -> int | None:
    """The exit status of a shell command; None if it took too long. It has no input, and its output goes nowhere."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_shell(
        command, stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
