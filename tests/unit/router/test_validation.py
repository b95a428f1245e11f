"""Fields that are too long are refused by name; millions of ids are refused before any id is converted."""

from __future__ import annotations

import time

import pytest

from core.config import RouterConfig
from core.errors import InvalidRequest
from core.request import MAX_CACHE_SALT_CHARS, MAX_USER_CHARS
from router.serving.validation import prepare
from tandem_client.stubs.inference_pb2 import GenerateRequest, SamplingParams, StopConditions, TokenIds
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


@pytest.mark.parametrize(("field", "limit"), [("user", MAX_USER_CHARS), ("cache_salt", MAX_CACHE_SALT_CHARS)])
def test_a_name_that_is_too_long_is_refused_with_its_field_and_its_limit(field: str, limit: int) -> None:
    tokenizer, config = load_tokenizer("fake:tiny"), RouterConfig()
    wire = GenerateRequest(text="a")
    setattr(wire, field, "x" * limit)
    prepare(wire, tokenizer, config, "id", lambda: 0, None)
    setattr(wire, field, "x" * (limit + 1))
    with pytest.raises(InvalidRequest, match=str(limit)) as refused:
        prepare(wire, tokenizer, config, "id", lambda: 0, None)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("user", "salt", "tenant"), [("", "", ""), ("me", "", "me"), ("", "s", "s"), ("me", "s", "me")]
)
def test_the_tenant_of_a_request_is_its_user_and_else_its_salt(user: str, salt: str, tenant: str) -> None:
    wire = GenerateRequest(text="a", user=user, cache_salt=salt, n=2)
    choices = prepare(wire, load_tokenizer("fake:tiny"), RouterConfig(), "id", lambda: 0, None).choices
    assert [choice.tenant for choice in choices] == [tenant, tenant]
