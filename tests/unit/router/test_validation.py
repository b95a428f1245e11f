"""A message of millions of ids is refused for its length, before any id is converted."""

from __future__ import annotations

import time

import pytest

from core.config import RouterConfig
from core.errors import InvalidRequest
from protos.inference_pb2 import GenerateRequest, SamplingParams, StopConditions, TokenIds
from router.validation import prepare
from text.tokenizer import load_tokenizer

MANY = 2_000_000
HUGE = {
    "token_ids": GenerateRequest(token_ids=TokenIds(ids=[1] * MANY)),
    "stop_token_ids": GenerateRequest(text="a", stop=StopConditions(stop_token_ids=range(MANY))),
    "logit_bias": GenerateRequest(text="a", sampling=SamplingParams(logit_bias=dict.fromkeys(range(MANY // 4), 1.0))),
}


@pytest.mark.parametrize("field", HUGE)
def test_a_field_of_millions_of_items_is_refused_by_its_length_within_milliseconds(field: str) -> None:
    tokenizer, config = load_tokenizer("fake:tiny"), RouterConfig()
    started_at = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"at most \d+|context of 8192 tokens") as refused:
        prepare(HUGE[field], tokenizer, config, "id", lambda: 0, None)
    assert refused.value.field == field
    assert time.thread_time() - started_at < 0.005
