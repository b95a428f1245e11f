"""Requests share cached prefixes only within one salt, through the public API and both pools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.deployment import Answer, Deployment, deploy, tiny_config

PROMPT = list(range(1, 50))  # three full blocks of 16 tokens and one token
NUM_FULL_BLOCK_TOKENS = 48


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        yield deployment


async def ask(deployment: Deployment, salt: str) -> Answer:
    answer = await deployment.generate(token_ids=PROMPT, max_tokens=4, cache_salt=salt)
    await deployment.settle()
    return answer


def cached_tokens(answer: Answer) -> int:
    return answer.finished.usage.cached_tokens


async def test_a_prompt_is_found_in_the_cache_under_its_own_salt_and_no_other(deployment: Deployment) -> None:
    tokens = (await ask(deployment, "alice")).token_ids
    for salt in ("bob", "", "alice2"):
        other = await ask(deployment, salt)
        assert cached_tokens(other) == 0, f"{salt!r} found what 'alice' had cached"
        assert other.token_ids == tokens
    for salt in ("alice", "bob", "", "alice2"):
        again = await ask(deployment, salt)
        assert cached_tokens(again) == NUM_FULL_BLOCK_TOKENS, f"{salt!r} did not find its own"
        assert again.token_ids == tokens


async def test_a_hand_off_moves_no_block_that_another_salt_left_on_the_decode_worker(deployment: Deployment) -> None:
    """With another salt all blocks are transferred again; with the same salt none that is full."""
    first, other, same = [await ask(deployment, salt) for salt in ("alice", "bob", "alice")]
    moved = [answer.finished.transferred_bytes for answer in (first, other, same)]
    assert moved[0] == moved[1] > moved[2]
