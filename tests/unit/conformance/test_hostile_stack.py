"""The stack under check is an adversary: whatever it answers, the check ends with a finding for each question."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.commands.check import run_check
from cli.screens.terminal import Terminal
from conformance import behaviour_probes, fault_probes, stack
from conformance.check import WHOLE_S, CheckPlan, check
from conformance.findings import Finding, Outcome
from conformance.http_exchange import Call, End, Endpoint, Reply
from conformance.stack import StackError
from conformance.token_probes import ALONE
from core.plain_text import is_plain

HERE = Endpoint("127.0.0.1", 9, tls=False)
NUM_QUESTIONS = 17
PAGE = "vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\nvllm:nixl_bytes_transferred_sum 1\n"
SHOUT = "\x1b[2J\x9b\u2028\ufffe\uffff\ud800"
EXTREMES: tuple[Any, ...] = (
    10**400, -(10**400), 10**4000, 2**63, 10**9, -(10**9), -1, 0, 1, 1e308, -1e308, 0.5, "", SHOUT, "x" * 5000, None,
    True, [], {}, [{}], [[]], {"error": 1}, "length", "stop",
)  # fmt: skip
Send = Callable[[Call], Reply | None]  # None: not within the time of the check


def whole(reply: bytes, status: int = 200) -> Reply:
    return Reply(status, body=bytearray(reply), end=End.COMPLETE, seconds=0.1)


def right_message(fields: dict[str, Any], draws: random.Random) -> dict[str, Any]:
    """What a sound stack would send, all of it in one message."""
    num = min(int(fields["max_tokens"]), 16)
    tops = {"a": -0.1, "b": -3.0}
    listed = [{"token": token, "logprob": value} for token, value in tops.items()]
    prompt = fields.get("prompt") or fields["messages"][0]["content"]
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": num, "total_tokens": len(prompt.split()) + num}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if "messages" in fields:
        content = [{"token": "a", "logprob": -0.1, "top_logprobs": listed}] * num
        choice |= {"message": {"role": "assistant", "content": "a" * num}, "logprobs": {"content": content}}
    else:
        logprobs = {"tokens": ["a"] * num, "token_logprobs": [-0.1] * num, "top_logprobs": [tops] * num}
        choice |= {"text": "a" * num, "logprobs": logprobs}
    return {"id": f"id-{draws.random()}", "choices": [choice], "usage": usage}


def spoiled(value: Any, draws: random.Random, share: float) -> Any:
    """`value` with this share of its parts replaced."""
    if draws.random() < share:
        return draws.choice(EXTREMES)
    if isinstance(value, dict):
        return {name: spoiled(part, draws, share) for name, part in value.items()}
    return [spoiled(part, draws, share) for part in value] if isinstance(value, list) else value


def adversary(seed: int) -> Send:
    draws = random.Random(seed)
    share = draws.choice((0.0, 0.01, 0.1, 0.5))
    models = spoiled({"data": [{"id": "m", "max_model_len": 2048}]}, draws, draws.choice((0.0, 0.3)))

    def send(call: Call) -> Reply:
        if draws.random() < share / 5:
            return Reply(draws.choice((0, 200, 302, 500)), body=bytearray(b"data: {"), end=draws.choice(list(End)))
        if call.path == "/v1/models":
            return whole(json.dumps(models).encode())
        if not call.body:
            return whole(PAGE.replace("0\n", f"{draws.choice((0, 1e308, -1e308, '1e309', 'x'))}\n", 1).encode())
        try:
            message = right_message(json.loads(call.body), draws)
        except (ValueError, KeyError, TypeError):
            return whole(b'{"error": {"type": "t", "message": "m"}}', 400)
        data = json.dumps(spoiled(message, draws, share)).encode()
        return whole(b"data: " + data + b"\n\ndata: [DONE]\n\n" if b'"stream": true' in call.body else data)

    return send


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviour_probes, "SETTLE_S", 0.0)
    monkeypatch.setattr(behaviour_probes, "LEASE_S", 0.0)
    monkeypatch.setattr(stack, "POLL_S", 0.0)
    monkeypatch.setattr(behaviour_probes, "POLL_S", 0.0)


async def outcome_of(
    send: Send, plan: CheckPlan, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> tuple[list[dict[str, Any]], str]:
    """The rows of the JSON report, and what the terminal shows. Raises `StackError`."""

    async def answer(_endpoint: Endpoint, call: Call, *_options: object) -> Reply | None:
        await asyncio.sleep(0)
        assert len(call.body) < 4 << 20
        reply = send(call)
        if reply is None:
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + WHOLE_S)
            await asyncio.Event().wait()
        return reply

    for module in (stack, behaviour_probes):
        monkeypatch.setattr(module, "exchange", answer)
    output, files = io.StringIO(), (directory / "a.json", directory / "a.xml")
    await run_check(plan, Terminal(file=output, width=200), *files)
    ElementTree.fromstring(files[1].read_text(encoding="utf-8"))
    return json.loads(files[0].read_text())["findings"], output.getvalue()


@given(seed=st.integers(0, 1 << 32), has_reference=st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_an_answer_says_each_question_gets_a_finding(
    seed: int, has_reference: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = CheckPlan(HERE, HERE if has_reference else None, deadline_header="x-deadline", kill="true", seed=seed)
    try:
        rows, shown = asyncio.run(outcome_of(adversary(seed), plan, monkeypatch, tmp_path))
    except StackError:
        return
    assert len({row["question"] for row in rows}) == len(rows) == NUM_QUESTIONS
    failed = [row for row in rows if row["outcome"] == "fails" and row["question"] != behaviour_probes.IDLE.name]
    assert all(row["curl"].startswith("curl ") for row in failed)
    assert is_plain(shown.replace("\n", ""))


def test_a_check_ends_in_its_time_with_a_finding_for_each_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, calls = adversary(3), itertools.count()
    plan = CheckPlan(HERE, deadline_header="x-deadline", kill="true", drain="true")
    rows, _ = asyncio.run(
        outcome_of(lambda call: right(call) if next(calls) < 10 else None, plan, monkeypatch, tmp_path)
    )
    assert len({row["question"] for row in rows}) == len(rows) == NUM_QUESTIONS
    late = {row["question"] for row in rows if row["why"] == "the check has taken 1800 s"}
    assert len(late) == NUM_QUESTIONS - 4  # the answers that came are judged
    with pytest.raises(StackError, match="the check has taken"):
        asyncio.run(outcome_of(lambda _: None, plan, monkeypatch, tmp_path))


@pytest.mark.parametrize(
    ("command", "limit_s", "status"),
    [
        ("exit 3", 60.0, 3),
        ("no-such-command", 60.0, 127),
        ("kill -9 $$", 60.0, -9),  # as `pkill -f` of a pattern that the command itself has
        ("cat; yes | head -c 1000000", 60.0, 0),
        ("yes", 0.05, None),
        ("trap '' TERM; sleep 1000 & wait", 0.05, None),
    ],
)
async def test_a_command_ends_with_its_status_or_in_its_time(command: str, limit_s: float, status: int | None) -> None:
    assert await fault_probes.run_command(command, limit_s) == status


def test_a_stack_without_a_connection_is_named_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"/v1/models: no connection$"):
        asyncio.run(outcome_of(lambda _: Reply(end=End.UNREACHABLE), CheckPlan(HERE), monkeypatch, tmp_path))


# ---- A decode worker of the stack as the reference: what it has cached of the stack's own requests is not its answer.

CONTEXT = 2048
PROXY = Endpoint("127.0.0.1", 8, tls=False)


class Pair:
    """A proxy whose hand-offs give wrong KV, and its decode worker, which caches by prompt and by `cache_salt`."""

    def __init__(self, takes_salts: bool) -> None:
        self._wrong: set[tuple[str, str]] = set()
        self._takes_salts, self._draws = takes_salts, random.Random(0)

    async def answer(self, endpoint: Endpoint, call: Call, *_options: object) -> Reply:
        if not call.body:
            return whole(json.dumps({"data": [{"id": "m", "max_model_len": CONTEXT}]}).encode())
        fields: dict[str, Any] = json.loads(call.body)
        if "cache_salt" in fields and not self._takes_salts:
            return whole(b'{"error": {"type": "t", "message": "no such field"}}', 400)
        key = str(fields.get("cache_salt")), str(fields.get("prompt"))
        if endpoint == PROXY:
            self._wrong.add(key)
        message = right_message(fields, self._draws)
        if key in self._wrong and "prompt" in fields:
            message["choices"][0]["text"] = "b" * len(message["choices"][0]["text"])
            message["choices"][0]["logprobs"]["tokens"] = list(message["choices"][0]["text"])
        data = json.dumps(message).encode()
        return whole(b"data: " + data + b"\n\ndata: [DONE]\n\n" if fields.get("stream") else data)


@pytest.mark.parametrize(
    ("takes_salts", "outcome"),
    [(True, Outcome.FAILS), (False, Outcome.HOLDS)],  # without salts nothing tells the two caches apart
)
async def test_a_decode_worker_that_takes_salts_shows_the_wrong_kv_that_it_was_given(
    takes_salts: bool, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "exchange", Pair(takes_salts).answer)
    async for finding in check(CheckPlan(PROXY, HERE)):
        if finding.question == ALONE.name:
            assert finding.outcome is outcome, finding
            return


async def test_the_context_of_a_proxy_without_models_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, asked = Pair(takes_salts=True), list[int]()

    async def answer(endpoint: Endpoint, call: Call, *_options: object) -> Reply:
        if endpoint == PROXY and call.path == "/v1/models":
            return whole(b"not found", 404)
        asked.append(json.loads(call.body or b"{}").get("max_tokens", 0))
        return await pair.answer(endpoint, call)

    monkeypatch.setattr(stack, "exchange", answer)
    plan = CheckPlan(PROXY, HERE, model="m", deadline_header="x-deadline")
    monkeypatch.setattr(behaviour_probes, "errors", nothing)
    monkeypatch.setattr(behaviour_probes, "slow_readers", nothing)
    async for finding in check(plan):
        if finding.question == behaviour_probes.DEADLINE.name:
            break
    assert max(asked) == CONTEXT // 2, "a longer output would be refused"


async def nothing(*_arguments: object) -> Finding:
    return behaviour_probes.ERRORS.not_shown("left out")
