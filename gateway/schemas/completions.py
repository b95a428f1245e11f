"""The body of /v1/completions, and the four forms of its prompt."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from gateway.errors import refused
from gateway.schemas.sampling import SamplingFields

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # of OpenAI's API

Prompt = str | list[int]


class CompletionBody(SamplingFields):
    prompt: Any
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> list[Prompt]:
        """Check by hand: a union would check a prompt of 100,000 ids against each alternative."""
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("must be a text, a list of token ids, or a list of either, with at least 1 item")
        if _are_token_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise ValueError(f"must have at most {MAX_PROMPTS} prompts, has {len(prompt)}")
        if not all(isinstance(item, str) or (isinstance(item, list) and _are_token_ids(item)) for item in prompt):
            raise ValueError("each item must be a text or a list of token ids in [0, 2^32 - 1]")
        return prompt


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**32 for item in items)


def check_completion(body: CompletionBody) -> None:
    """Raises `ApiError` for combinations that the engine cannot serve."""
    if body.best_of is not None and body.best_of > body.num_choices:
        message = f"must be at most n ({body.num_choices}), is {body.best_of}: the engine ranks no choices"
        raise refused("best_of", message, "unsupported_parameter")
    if body.echo and body.logprobs is not None:
        message = "is not supported together with logprobs: the engine computes no log-probabilities of the prompt"
        raise refused("echo", message, "unsupported_parameter")
    if body.max_tokens == 0:  # checked last: evaluations ask so for the log-probabilities of a prompt
        raise refused("max_tokens", "must be at least 1, is 0")
