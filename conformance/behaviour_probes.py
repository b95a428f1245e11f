"""Asks what no single answer shows: errors, clients that leave or do not read, deadlines, and blocks at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from conformance.answers import error_of, load
from conformance.findings import Finding, Question, Severity, curl_of, json_body
from conformance.http_exchange import Call, End, Reply, connected, exchange
from conformance.metrics_page import InUse
from conformance.prompts import PromptSource
from conformance.stack import CHAT, COMPLETIONS, POLL_S, Ask, Record, Stack
from conformance.token_judge import Bound, judge_tokens

ERRORS = Question("errors: a bad request has a typed error", Severity.FORM)
CANCEL = Question("clients: one that leaves gives back its blocks", Severity.SERVICE)
READER = Question("clients: one that does not read harms nobody", Severity.SERVICE)
DEADLINE = Question("clients: a deadline is kept", Severity.SERVICE)
IDLE = Question("blocks: at the end as few in use as at the start", Severity.SERVICE)
NUM_CLIENTS = 6
LONG_OUTPUT = 2000  # tokens; a request that goes on in secret is still seen after `SETTLE_S`
SHORT_OUTPUT = 8
SETTLE_S = 15.0  # within which a stack is idle again
LEASE_S = 40.0  # ... after a death: vLLM keeps KV for a reader that has died for 30 s
DEADLINE_MS = 1000
DEADLINE_SLACK_S = 2.0
SLOWDOWN, SLOWDOWN_S = 10.0, 5.0  # beside clients that do not read: this many times the time alone, and some more


def bad_requests(stack: Stack) -> list[tuple[str, Call]]:
    good: dict[str, object] = {"model": stack.model, "prompt": "a", "max_tokens": 4}
    messages: dict[str, object] = {"model": stack.model, "max_tokens": 4}
    found = [
        ("a body that is no JSON", Call(COMPLETIONS, b'{"prompt": ')),
        ("a text for max_tokens", Call(COMPLETIONS, json_body(good | {"max_tokens": "many"}))),
        ("max_tokens of -1", Call(COMPLETIONS, json_body(good | {"max_tokens": -1}))),
        ("a temperature of -1", Call(COMPLETIONS, json_body(good | {"temperature": -1}))),
        ("a model that is not there", Call(COMPLETIONS, json_body(good | {"model": "no-such-model"}))),
        ("a chat without messages", Call(CHAT, json_body(messages))),
        ("a message without role", Call(CHAT, json_body(messages | {"messages": [{"content": "a"}]}))),
    ]
    if stack.context is not None:
        text = "one two " * stack.context
        found.append(("a prompt beyond the context", Call(COMPLETIONS, json_body(good | {"prompt": text}))))
    return found


def wrong_error(reply: Reply) -> str:
    """What is wrong with the answer to a bad request; empty if nothing is."""
    if reply.end is not End.COMPLETE:
        return str(reply.end.value)
    if not 400 <= reply.status < 500:
        return f"status {reply.status}"
    with contextlib.suppress(ValueError):
        if error_of(load(bytes(reply.body))) is not None:
            return ""
    return f"status {reply.status}, and no error with type and message"


async def errors(stack: Stack) -> Finding:
    wrong, cases = [], bad_requests(stack)
    for case, call in cases:
        found = wrong_error(await exchange(stack.endpoint, call, stack.limit_s))
        if found:
            wrong.append((f"{case}: {found}", curl_of(stack.endpoint, call)))
    if wrong:
        return ERRORS.fails("; ".join(why for why, _ in wrong), wrong[0][1])
    return ERRORS.holds(", ".join(case for case, _ in cases))


def _long_asks(stack: Stack, source: PromptSource, num: int = NUM_CLIENTS) -> list[Ask]:
    """Half of the prompts are long, so that some clients leave while theirs is computed. A third is not streamed."""
    room = min(LONG_OUTPUT, (stack.context or 2 * LONG_OUTPUT) // 2)
    words = (0, min(400, room // 8))
    return [Ask(source.next(words[number % 2]).text, room, stream=number % 3 < 2) for number in range(num)]


async def cancel(stack: Stack, source: PromptSource, idle: InUse) -> Finding:
    """Clients leave as soon as the metrics have seen them."""
    if not idle.known:
        return CANCEL.not_shown("no page of metrics says what is in use (--metrics)")
    calls = [stack.call_of(ask) for ask in _long_asks(stack, source)]
    left, taken_s = await stack.settled(idle, SETTLE_S)  # else the metrics would show requests of earlier clients
    if left:
        return CANCEL.fails(
            f"{left} still in use {taken_s:.0f} s after all clients left", curl_of(stack.endpoint, calls[0])
        )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(exchange(stack.endpoint, call, stack.limit_s)) for call in calls]
        seen = InUse(None, None)
        while not seen and not all(task.done() for task in tasks):
            seen = (await stack.in_use()).beyond(idle)
            await asyncio.sleep(POLL_S / 5)
        num_left = sum(task.cancel() for task in tasks)  # of those that have not ended
    if not seen or not num_left:
        return CANCEL.not_shown("the metrics saw no request before it had ended")
    left, taken_s = await stack.settled(idle, SETTLE_S)
    if left:
        return CANCEL.fails(
            f"{left} still in use {taken_s:.0f} s after {num_left} clients left", curl_of(stack.endpoint, calls[0])
        )
    return CANCEL.holds(f"{num_left} clients left, {seen} in use; free after {taken_s:.1f} s")


@contextlib.asynccontextmanager
async def _silent_clients(stack: Stack, asks: Sequence[Ask]) -> AsyncIterator[None]:
    """Clients that send and do not read: the stack's writes stop when the buffers of both sides are full."""
    async with contextlib.AsyncExitStack() as clients:
        async with asyncio.timeout(stack.limit_s):
            for ask in asks:
                await clients.enter_async_context(connected(stack.endpoint, stack.call_of(ask)))
        yield


async def slow_readers(stack: Stack, source: PromptSource, bound: Bound) -> Finding:
    asks = [Ask(source.next(20).text, SHORT_OUTPUT, stream=True) for _ in range(NUM_CLIENTS)]
    alone = [await stack.ask(ask) for ask in asks]
    try:
        async with _silent_clients(stack, _long_asks(stack, source)):
            beside = [await stack.ask(ask) for ask in asks]
    except OSError as error:
        return READER.not_shown(f"a connection failed: {error}")
    bad = next((record for record in beside if not record.is_good), None)
    if bad is not None:
        return READER.fails(f"beside {NUM_CLIENTS} of them: {bad.what}", bad.curl)
    tokens = judge_tokens(READER, list(zip(alone, beside, strict=True)), bound)
    if tokens.curl:
        return tokens
    usual, slowest = (max(record.reply.seconds for record in records) for records in (alone, beside))
    why = f"answers beside {NUM_CLIENTS} of them take at most {slowest:.1f} s, alone {usual:.1f} s"
    return READER.fails(why, beside[0].curl) if slowest > SLOWDOWN * usual + SLOWDOWN_S else READER.holds(why)


async def deadline(stack: Stack, source: PromptSource, header: str) -> Finding:
    if not header:
        return DEADLINE.not_shown("the API has no deadline (--deadline-header)")
    ask = replace(_long_asks(stack, source, 1)[0], headers=((header, str(DEADLINE_MS)),))
    record = await stack.try_to_ask(ask)
    limit_s = DEADLINE_MS / 1e3 + DEADLINE_SLACK_S
    if record.reply.seconds > limit_s or record.reply.end is End.LATE:
        return DEADLINE.fails(
            f"{record.reply.seconds:.1f} s with a deadline of {DEADLINE_MS} ms: {record.what}", record.curl
        )
    if record.is_good:
        return _good_before(record)
    if record.answer.error is None:
        return DEADLINE.fails(f"no typed error: {record.what}", record.curl)
    return DEADLINE.holds(f"{record.what}, after {record.reply.seconds:.2f} s of {DEADLINE_MS} ms")


def _good_before(record: Record) -> Finding:
    if len(record.answer.tokens) >= record.ask.max_tokens or not record.answer.tokens:
        return DEADLINE.not_shown("the answer was complete before the deadline")
    why = f"a good end with {len(record.answer.tokens)} of {record.ask.max_tokens} tokens: nobody sees that it was cut"
    return DEADLINE.fails(why, record.curl)


async def idle_again(stack: Stack, idle: InUse) -> Finding:
    if not idle.known:
        return IDLE.not_shown("no page of metrics says what is in use (--metrics)")
    left, taken_s = await stack.settled(idle, LEASE_S)
    if left:
        return IDLE.fails(f"{left} in use after {taken_s:.0f} s without a request, beyond what was at the start")
    return IDLE.holds(f"{idle} at the start, no more at the end, after {taken_s:.0f} s")
