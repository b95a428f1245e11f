"""Every limit of a request: a value at the limit is accepted; the error for a value beyond it names the field."""

from __future__ import annotations

import math

import pytest

from core.errors import ErrorCode, InvalidRequest
from core.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    Request,
    SamplingParams,
    draw_key,
)

TINY = math.ulp(0.0)
# field -> (accepted values, refused values)
NUMBERS: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0.0, TINY, 100.0], [-TINY, 100.1]),
    "top_p": ([TINY, 1.0], [0.0, 1.0000001]),
    "min_p": ([0.0, 1.0], [-TINY, 1.0000001]),
    "repetition_penalty": ([MIN_REPETITION_PENALTY, 0.01, 100.0], [0.0, TINY, 1e-38, 0.0099, -1.0, 100.1]),
    "presence_penalty": ([-2.0, 2.0], [-2.0000001, 2.0000001]),
    "frequency_penalty": ([-2.0, 2.0], [-2.0000001, 2.0000001]),
}
COUNTS: dict[str, tuple[list[int], list[int]]] = {
    "max_tokens": ([1, 10**9], [0, -1]),
    "top_k": ([0, 10**9], [-1]),
    "seed": ([0, MAX_SEED], [-1, MAX_SEED + 1]),
    "num_logprobs": ([0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
}
RANGES = NUMBERS | COUNTS
ACCEPTED = [(field, value) for field, (accepted, _) in RANGES.items() for value in accepted]
REFUSED = [(field, value) for field, (_, refused) in RANGES.items() for value in refused]
NOT_FINITE = [(field, value) for field in NUMBERS for value in (math.nan, math.inf, -math.inf)]
PUBLIC_NAMES = {"num_logprobs": "logprobs"}


def sampling(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, **options})  # type: ignore[arg-type]


def test_a_value_at_the_limit_is_accepted() -> None:
    for field, value in ACCEPTED:
        assert getattr(sampling(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), REFUSED + NOT_FINITE)
def test_an_error_names_the_field_that_is_beyond_its_limit(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling(**{field: value})
    assert refused.value.field == PUBLIC_NAMES.get(field, field)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(refused.value).startswith(refused.value.field)


def test_too_many_stop_tokens_and_biases_are_refused() -> None:
    sampling(stop_token_ids=frozenset(range(MAX_STOP_TOKEN_IDS)), logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        sampling(stop_token_ids=frozenset(range(MAX_STOP_TOKEN_IDS + 1)))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))


@pytest.mark.parametrize("bias", [-100.1, 100.1, math.nan, math.inf, -math.inf])
def test_an_error_names_the_token_with_a_bias_out_of_range(bias: float) -> None:
    sampling(logit_bias={7: 100.0, 8: -100.0})
    with pytest.raises(InvalidRequest, match="logit_bias: token 7"):
        sampling(logit_bias={7: bias})


@pytest.mark.parametrize("temperature", [0.0, TINY, 1e-38, 0.99e-5])
def test_a_temperature_of_0_or_too_small_for_float32_is_greedy(temperature: float) -> None:
    assert sampling(temperature=temperature).greedy
    assert not sampling(temperature=1e-5).greedy


# ---- the whole request


def request(token_ids: tuple[int, ...] = (1, 2, 3), num_prompt_tokens: int = 3, **options: object) -> Request:
    return Request("r", token_ids, num_prompt_tokens, sampling(**options))


@pytest.mark.parametrize(("token_ids", "num_prompt", "named"), [((), 0, "prompt"), ((1, 2), 3, "num_prompt_tokens")])
def test_empty_and_too_long_prompts_are_refused(token_ids: tuple[int, ...], num_prompt: int, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        request(token_ids, num_prompt)


def test_a_resumed_request_must_have_a_token_left_to_sample() -> None:
    assert request((1, 2, 3, 4), 3, max_tokens=2).max_total_tokens == 5
    with pytest.raises(InvalidRequest, match="max_tokens"):
        request((1, 2, 3, 4, 5), 3, max_tokens=2)


def test_prompt_and_output_must_fit_into_the_context() -> None:
    request(max_tokens=5).validate_for(vocab_size=10, context_length=8)
    with pytest.raises(InvalidRequest, match=r"max_tokens: .* is 9, over the context of 8"):
        request(max_tokens=6).validate_for(vocab_size=10, context_length=8)


@pytest.mark.parametrize("token_id", [-1, 10])
def test_an_error_names_the_field_with_an_id_outside_the_vocabulary(token_id: int) -> None:
    named = {
        "token_ids": request((1, token_id, 3)),
        "stop_token_ids": request(stop_token_ids=frozenset({token_id})),
        "logit_bias": request(logit_bias={token_id: 1.0}),
    }
    for field, wrong in named.items():
        with pytest.raises(InvalidRequest) as refused:
            wrong.validate_for(vocab_size=10, context_length=100)
        assert refused.value.field == field


def test_the_last_id_of_the_vocabulary_is_accepted() -> None:
    right = request((0, 9, 9), stop_token_ids=frozenset({9}), logit_bias={9: 1.0})
    right.validate_for(vocab_size=10, context_length=100)
    assert right.max_total_tokens == 7


# ---- the draw


def test_a_draw_never_changes() -> None:
    """Workers of another version may resume a request, so these numbers are part of the protocol."""
    assert [draw_key(0, 0), draw_key(42, 7)] == [15034821391391295848, 12875341232477743678]
    assert len({draw_key(seed, position) for seed in (0, 1, MAX_SEED) for position in range(1000)}) == 3000
