"""What is said of answers, of streams under a fault, and in the reports. Rounding is never a fault."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import replace
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import fault_probes, laws
from conformance.answers import Answer, Token, Usage
from conformance.behaviour_probes import _good_before, wrong_error
from conformance.fault_probes import DRAIN, EVENTS_BEFORE, KILL, FaultProbe, Sight, judge, sight_of
from conformance.findings import MAX_WHY, Outcome, Question, Severity, curl_of, exit_code
from conformance.http_exchange import Call, End, Endpoint, Observe, Reply
from conformance.oracle import Match, bound_of, compare, noise
from conformance.prompts import PromptSource
from conformance.report import as_json, as_junit
from conformance.stack import Ask, Record
from conformance.token_judge import Bound, bound_from, judge_canaries, judge_tokens

HERE = Endpoint("stack", 80, tls=False, key="secret")
QUESTION = Question("a question", Severity.OUTPUT)
BOUND = Bound(0.1, "measured")


def record(
    text: str = "abc", stream: bool = True, status: int = 200, end: End = End.COMPLETE, **fields: object
) -> Record:
    """A stream of one token for each character, right unless `fields` of the answer say otherwise."""
    tokens = [Token(character, -0.1, 2.0) for character in text]
    answer = Answer(text, tokens, ["length"], ["id"], 0, 1, [Usage(5, len(text), 5 + len(text), None)])
    for name, value in fields.items():
        setattr(answer, name, value)
    ask = Ask("the prompt", 3, stream)
    return Record(HERE, ask, Call("/v1/completions", b"{}"), Reply(status, end=end), answer)


@pytest.mark.parametrize(
    ("text", "outcome"), [("ab", Outcome.FAILS), ("abc", Outcome.NOT_SHOWN), ("", Outcome.NOT_SHOWN)]
)
def test_a_good_end_before_the_last_token_hides_a_deadline(text: str, outcome: Outcome) -> None:
    """Each record asks for 3 tokens."""
    assert _good_before(record(text)).outcome is outcome


async def test_the_command_of_a_fault_begins_when_every_stream_has_events(monkeypatch: pytest.MonkeyPatch) -> None:
    running, ended = [], asyncio.Event()

    async def try_to_ask(ask: Ask, observe: Observe) -> Record:
        reply = Reply()
        for _ in range(EVENTS_BEFORE):
            await asyncio.sleep(0)
            reply.num_events += 1
            observe(reply)
        running.append(ask)
        await ended.wait()
        return record()

    async def run_command(*_: object) -> int:
        assert len(running) == 2
        ended.set()
        return 0

    monkeypatch.setattr(fault_probes, "run_command", run_command)
    asked: Any = Mock(limit_s=10.0, try_to_ask=try_to_ask)
    probe = FaultProbe(asked, PromptSource(0), BOUND)
    _, num_open, status = await probe._under_command([record().ask] * 2, "true")
    assert (num_open, status) == (2, 0)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (record(finish_reasons=["length", "length"]), "2 times finish_reason"),
        (record(finish_reasons=[]), "0 times finish_reason"),
        (record(num_done=0), r"0 times \[DONE\]"),
        (record(num_done=2), r"2 times \[DONE\]"),
        (record(ids=["a", "b"]), "2 ids"),
        (record(faults=["a message is no JSON"]), "^a message is no JSON$"),
        (record(usages=[Usage(5, 3, 8, None)] * 2), "2 times usage"),
    ],
)
def test_a_stream_has_each_event_once(wrong: Record, what: str) -> None:
    assert not laws.wrong_events(record(), {"id": 1})
    assert re.search(what, laws.wrong_events(wrong, {"id": 1, "a": 1, "b": 1}))
    assert laws.wrong_events(record(), {"id": 2}) == "2 answers have the id id"


@pytest.mark.parametrize(
    "usage",
    [Usage(5, 2, 7, None), Usage(5, 4, 9, None), Usage(5, 3, 9, None), Usage(0, 3, 3, None), Usage(5, 3, 8, 6),
     Usage(-1, -1, -1, None)],
)  # fmt: skip
def test_a_usage_that_is_not_that_of_the_answer_is_wrong(usage: Usage) -> None:
    assert not laws.wrong_usage(record(), 5)
    assert laws.wrong_usage(record(usages=[usage]))
    assert laws.wrong_usage(record(), 6) == "5 tokens of the prompt in place of 6"
    assert laws.wrong_usage(record(usages=[])) == "no usage"


def test_an_empty_answer_is_found_and_judged_by_no_other_law() -> None:
    empty = record("", finish_reasons=["stop"], usages=[], num_done=0)
    findings = {one.question: one for one in laws.findings_of([record(), empty], [])}
    assert [one.question for one in findings.values() if one.outcome is Outcome.FAILS] == [laws.NOT_EMPTY.name]
    assert exit_code(list(findings.values())) == Severity.OUTPUT
    late = record(end=End.LATE)
    assert next(iter(laws.findings_of([late], []))).why.endswith("status 200, not complete in time")


SIGHTS = {
    Sight.RIGHT: record(),
    Sight.ERROR: record("a", error="unavailable: gone", num_done=0),
    Sight.CUT: record("a", num_done=0),
    Sight.REFUSED: record("", status=0, end=End.UNREACHABLE),
    Sight.UNTYPED: record("", status=502),
    Sight.LATE: record("a", end=End.LATE),
    Sight.EMPTY: record("", usages=[]),
    Sight.SHORT: record("ab"),
    Sight.WRONG: record("abd"),
}


@pytest.mark.parametrize("sight", Sight)
def test_what_a_client_sees_of_a_fault_is_named_and_judged(sight: Sight) -> None:
    assert sight_of(record(), SIGHTS[sight], 0.1) is sight
    sights, streams = [Sight.RIGHT, sight], [record(), SIGHTS[sight]]
    killed, drained = (judge(question, sights, streams, 0.5) for question in (KILL, DRAIN))
    hidden = sight in (Sight.EMPTY, Sight.SHORT, Sight.WRONG)
    assert (killed.outcome is Outcome.FAILS) == (hidden or sight is Sight.LATE)
    assert (drained.outcome is Outcome.FAILS) == (sight is not Sight.RIGHT)
    assert (killed.severity is Severity.OUTPUT) == hidden
    assert judge(KILL, [Sight.RIGHT], [record()], None).outcome is Outcome.FAILS


def test_tokens_are_not_shown_where_nothing_could_be_judged() -> None:
    pair = (record(), record())
    assert judge_tokens(QUESTION, [pair], BOUND).outcome is Outcome.HOLDS
    assert judge_tokens(QUESTION, [pair], Bound(3.0, "measured")).outcome is Outcome.NOT_SHOWN
    assert judge_tokens(QUESTION, [pair], Bound(None, "wild")).outcome is Outcome.NOT_SHOWN
    assert judge_tokens(QUESTION, [(record(), record("", status=500))], BOUND).outcome is Outcome.NOT_SHOWN
    assert judge_tokens(QUESTION, [(record(tokens=[]), record("abd", tokens=[]))], BOUND).outcome is Outcome.NOT_SHOWN
    counted_alone = record("", tokens=[])  # its usage says that it has tokens
    assert judge_tokens(QUESTION, [(counted_alone, counted_alone)], BOUND).outcome is Outcome.NOT_SHOWN
    texts = judge_tokens(QUESTION, [(record(tokens=[]), record(tokens=[]))], BOUND)
    assert (texts.outcome, "compared by their texts alone" in texts.why) == (Outcome.HOLDS, True)
    failed = judge_tokens(QUESTION, [(record("abc"), record("xyz")), (record("xyz"), record("xyz"))], BOUND)
    assert failed.outcome is Outcome.FAILS
    assert failed.why.startswith("1 of 2 answers; the first: token 0 is ")


def test_a_bound_is_measured_assumed_or_refused() -> None:
    assert bound_from([]).source == "assumed: no reference"
    assert bound_from([(record(), record("", status=500))]).value is None
    assert bound_from([(record(), record("xbc"))]).value is None  # of a margin of 2.0
    assert bound_from([(record(), record())]).value is not None


def test_the_code_of_another_prompt_in_an_answer_is_found() -> None:
    source = PromptSource(0)
    first, second = source.next(10), source.next(10)
    assert first.text.count(first.code) == 1
    right = [(one, record(f" {one.code}.")) for one in (first, second)]
    assert judge_canaries(right).outcome is Outcome.HOLDS
    assert judge_canaries([(one, record(" amber.")) for one in (first, second)]).outcome is Outcome.NOT_SHOWN
    failed = judge_canaries([right[0], (second, record(f" {first.code}."))])
    assert failed.outcome is Outcome.FAILS
    assert first.code in failed.why


@pytest.mark.parametrize(
    ("status", "body", "right"),
    [
        (400, b'{"error": {"message": "m", "type": "t"}}', True),
        (400, b'{"error": "m"}', False),
        (400, b"<html>", False),
        (500, b'{"error": {"message": "m", "type": "t"}}', False),
        (200, b"{}", False),
    ],
)
def test_an_error_has_a_status_of_the_client_a_type_and_a_message(status: int, body: bytes, right: bool) -> None:
    assert (wrong_error(Reply(status, body=bytearray(body), end=End.COMPLETE)) == "") is right


def test_a_curl_line_is_one_command_without_the_key() -> None:
    line = curl_of(HERE, Call("/v1/completions", b'{"prompt": "it\'s; rm -rf $HOME"}', (("x-a", "b c"),)))
    words = shlex.split(line)
    assert words[:3] == ["curl", "-sN", "http://stack:80/v1/completions"]
    assert '{"prompt": "it\'s; rm -rf $HOME"}' in words
    assert "authorization: Bearer $KEY" in words
    assert "secret" not in line


def test_the_reports_hold_what_the_stack_said_as_plain_text() -> None:
    hostile = QUESTION.fails("\x1b[2J\x00]]>" + "x" * 1000, "curl \ud800")
    findings = [hostile, QUESTION.not_shown("no"), QUESTION.holds("yes")]
    suite = ElementTree.fromstring(as_junit("http://a", findings))
    assert (suite.get("failures"), suite.get("skipped"), suite.get("tests")) == ("1", "1", "3")
    rows = json.loads(as_json("http://a", findings))
    assert rows["exit_code"] == Severity.OUTPUT == exit_code(findings)
    assert exit_code([replace(finding, outcome=Outcome.NOT_SHOWN) for finding in findings]) == 0
    assert rows["findings"][0]["why"].startswith(r"\x1b[2J\x00")
    assert len(hostile.why) == MAX_WHY


# ---- rounding is never a fault, and what exceeds the bound always is

MARGINS = st.floats(0.0, 10.0)
ANSWERS = st.lists(st.tuples(st.text(min_size=1, max_size=3), MARGINS), min_size=1, max_size=12)


def answer_of(tokens: list[Token]) -> Answer:
    return Answer(text="".join(token.text for token in tokens), tokens=tokens)


@st.composite
def rounded_twice(draw: st.DrawFn) -> tuple[Answer, Answer, float]:
    """Two answers of an engine with noise of this size in a log-probability: margins below twice it may turn over."""
    size = draw(st.floats(0.0, 0.5))
    one, other = [], []
    for text, margin in draw(ANSWERS):
        first = Token(text, -0.1, margin)
        second = replace(first, logprob=first.logprob + draw(st.floats(-size, size)))
        one.append(first)
        if margin < 2 * size and draw(st.booleans()):
            other.append(replace(second, text=text + "!"))
            break
        other.append(second)
    else:
        return answer_of(one), answer_of(other), size
    return answer_of(one), answer_of(other), size


@given(rounded_twice())
def test_rounding_is_no_fault_under_a_bound_of_twice_its_size(case: tuple[Answer, Answer, float]) -> None:
    one, other, size = case
    assert compare(one, other, bound_of(size)).match in (Match.SAME, Match.TIE)


@given(rounded_twice())
def test_an_answer_of_the_control_is_no_fault_under_the_bound_measured_on_it(
    case: tuple[Answer, Answer, float],
) -> None:
    one, other, _ = case
    measured: Any = noise([(one, other)])
    assert compare(one, other, bound_of(measured)).match in (Match.SAME, Match.TIE)


@given(ANSWERS, st.data())
def test_a_token_that_leads_by_more_than_the_bound_must_be_there_with_its_probability(
    drawn: list[tuple[str, float]], data: st.DataObject
) -> None:
    bound = 0.5
    right = answer_of([Token(text, -0.1, margin) for text, margin in drawn])
    place = data.draw(st.integers(0, len(drawn) - 1))
    token = right.tokens[place]
    changed = data.draw(st.sampled_from([replace(token, text="other"), replace(token, logprob=-1.0)]))
    wrong = answer_of([*right.tokens[:place], changed, *right.tokens[place + 1 :]])
    margin: Any = right.tokens[place].margin
    found = compare(right, wrong, bound)
    assert (found.match is Match.OTHER) == (margin > bound)
    assert found.match is not Match.OTHER or f"token {place} " in found.what


def test_a_lost_token_and_a_changed_text_are_faults_and_texts_alone_are_not_judged() -> None:
    right = answer_of([Token(text, -0.1, 3.0) for text in "abc"])
    assert compare(right, answer_of(right.tokens[:2]), 0.5).match is Match.OTHER
    assert compare(right, replace(right, text="abd"), 0.5).match is Match.OTHER
    assert compare(Answer("abc"), Answer("abd"), 0.5).match is Match.UNJUDGED
    assert compare(Answer("abc"), Answer("abc"), 0.5).match is Match.SAME
