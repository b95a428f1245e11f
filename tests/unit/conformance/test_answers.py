"""Every form of an answer is read as one, and no answer of a hostile stack raises anything."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conformance.answers import MAX_NOTED, MAX_TOKENS_READ, Answer, Token, Usage, read_stream, read_whole
from conformance.findings import Outcome
from conformance.metrics_page import InUse, hand_offs, in_use
from conformance.token_probes import hand_off_finding

TOPS = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -2.5}]
CHAT = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": TOPS}]}
TEXT = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.5}]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
NAMES = ("id", "error", "choices", "delta", "message", "content", "text", "finish_reason", "logprobs", "tokens",
         "token_logprobs", "top_logprobs", "usage", "prompt_tokens", "type", "role")  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)


def events(*messages: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages)


def test_whole_and_streamed_chats_and_texts_are_read_alike() -> None:
    chat = {"role": "assistant", "content": "a"}
    end = {"finish_reason": "length"}
    whole_chat = {"id": "x", "choices": [{"message": chat, "logprobs": CHAT} | end], "usage": USAGE}
    whole_text = {"id": "x", "choices": [{"text": "a", "logprobs": TEXT} | end], "usage": USAGE}
    last = {"id": "x", "choices": [], "usage": USAGE}
    chats = events({"id": "x", "choices": [{"delta": chat, "logprobs": CHAT} | end]}, last) + b"data: [DONE]\r\n\r\n"
    texts = b": ping\n\n" + events({"id": "x", "choices": [{"text": "a", "logprobs": TEXT} | end]}, last)
    right = Answer("a", [Token("a", -0.5, 2.0)], ["length"], ["x"], 1, 0, [Usage(3, 1, 4, 2)])
    found = [read_whole(json.dumps(whole_chat).encode()), read_stream(chats)]
    assert found == [right, Answer(**(vars_of(right) | {"num_done": 1}))]
    found = [read_whole(json.dumps(whole_text).encode()), read_stream(texts)]
    assert found == [Answer(**(vars_of(right) | {"num_roles": 0}))] * 2


def vars_of(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answer.__slots__}


def test_faults_of_form_are_noted() -> None:
    assert read_stream(b"data: [DONE]\n\n" + events({})).faults == ["an event after [DONE]"]
    for no_json in (b"[" * 200_000, b'{"a": NaN}', b'{"id": "a", "id": "b"}', b"9" * 5000, b"\xff\xfe"):
        assert read_whole(no_json).faults == ["a message is no JSON, or has a name twice"]
    assert read_whole(b'{"error": "oops"}').faults == ["an error without type and message"]
    assert read_whole(b'{"error": {"type": "t", "message": "m"}}').error == "t: m"
    assert read_stream(b'data: {"choices"').text == ""  # cut off


def test_what_is_kept_of_an_answer_is_bounded() -> None:
    many = 10_000
    messages = [{"id": str(number), "choices": [{"finish_reason": "x", "logprobs": TEXT}], "usage": USAGE}
                for number in range(many)]  # fmt: skip
    answer = read_stream(events(*messages))
    assert (len(answer.tokens), len(answer.ids), len(answer.usages)) == (MAX_TOKENS_READ, MAX_NOTED, MAX_NOTED)
    assert len(answer.finish_reasons) == MAX_NOTED
    assert read_whole(b'{"usage": {"prompt_tokens": %d}}' % 2**63).usage == Usage(-1, -1, -1, None)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_answer_raises(body: bytes) -> None:
    assert read_whole(body).num_done == 0
    assert read_stream(b"data: " + body + b"\n\n").num_done <= 1
    assert in_use(body.decode(errors="replace")).requests is None


PAGE = """# HELP vllm:num_requests_running in use
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0 1700000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_by_source_total{source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 5.0
vllm:num_requests_waiting{} NaN
"""


def test_a_page_of_metrics_says_what_is_in_use_and_what_was_handed_over() -> None:
    assert in_use(PAGE) == InUse(3.0, 0.25)
    assert hand_offs(PAGE) == {"vllm:prompt_tokens_by_source_total": 5.0}
    assert hand_offs("") == {}
    assert not in_use("").known
    assert in_use(PAGE).beyond(InUse(1.0, 0.25)) == InUse(2.0, 0.0)
    assert not in_use(PAGE).beyond(InUse(3.0, None))


def test_any_counter_of_hand_offs_shows_one() -> None:
    """Tandem with vLLM inside has a counter of bytes, which stays 0, and one of requests by path."""
    page = (
        'tandem_worker_transferred_bytes_total{worker="w"} 0\ntandem_requests_total{end="x",path="disaggregated"} %d\n'
    )
    before = hand_offs(page % 2 + 'tandem_requests_total{end="x",path="local"} 7\n')
    assert hand_off_finding(before, before).outcome is Outcome.NOT_SHOWN
    shown = hand_off_finding(before, hand_offs(page % 5))
    assert (shown.outcome, shown.why) == (Outcome.HOLDS, "tandem_requests_total grew by 3")
    assert hand_off_finding({}, {}).outcome is Outcome.NOT_SHOWN
