"""A client's request after validation. These objects never change.

The tokens are a pure function of the request: the random draw at position p depends on (seed, p) alone. So another
worker can resume a request at any token, and samples the same tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from core.block_hash import pack_token_ids
from core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 16
MAX_CACHE_SALT_CHARS = 256
MAX_USER_CHARS = 256
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_JSON_CHARS = 64 * 1024  # characters of one JSON text in a chat or a schema; beyond: status 400
MAX_SEED = 2**63 - 1
# Smaller numbers overflow float32: a logit divided by 1e-38 is infinite, and no token can be drawn.
MIN_SAMPLING_TEMPERATURE = 1e-5
MIN_REPETITION_PENALTY = struct.unpack("<f", struct.pack("<f", 0.01))[0]  # 0.01 as the wire carries it

# field -> (low, high, low is allowed). NaN fails every comparison, so every field refuses NaN.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 100.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


def _require_range(name: str, value: float) -> None:
    low, high, low_allowed = _RANGES[name]
    inside = (low <= value if low_allowed else low < value) and value <= high
    if not inside:
        raise InvalidRequest(name, f"must be in {'[' if low_allowed else '('}{low:g}, {high:g}], is {value}")


def check_num_stop_token_ids(count: int) -> None:
    if count > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, are {count}")


def check_num_logit_biases(count: int) -> None:
    if count > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, are {count}")


def check_stop_strings(field: str, stop_strings: Collection[str]) -> None:
    """Raises `InvalidRequest` with the name `field`."""
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(field, f"must have at most {MAX_STOP_STRINGS} items, has {len(stop_strings)}")
    for stop in stop_strings:
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(field, f"each must have 1 to {MAX_STOP_STRING_CHARS} characters, one has {len(stop)}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. A value out of range raises `InvalidRequest` with the name of the field."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None = no logprobs; n = of the sampled token and the n most likely tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # the least output before a stop token or a stop string
    grammar: str = ""  # that the output follows, as text/grammars.py reads it; "" = any output
    speculation: bool = True  # whether steps may compute guessed tokens; changes no token

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, is {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"must be in [0, max_tokens], here [0, {self.max_tokens}], is {self.min_tokens}"
            )
        for name in _RANGES:
            _require_range(name, getattr(self, name))
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"must be 0 (all) or more, is {self.top_k}")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed", f"must be in [0, {MAX_SEED}], is {self.seed}")
        if len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                "output_format", f"must have at most {MAX_GRAMMAR_CHARS} characters, has {len(self.grammar)}"
            )
        if self.grammar and self.ignore_eos:
            raise InvalidRequest("ignore_eos", "must be false beside output_format: only its end completes a format")
        check_num_stop_token_ids(len(self.stop_token_ids))
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("logprobs", f"must be in [0, {MAX_LOGPROBS}], is {self.num_logprobs}")
        check_num_logit_biases(len(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest("logit_bias", f"token {token_id}: must be in [-100, 100], is {bias}")

    @property
    def greedy(self) -> bool:
        """The temperature is 0, or so small that the scaled logits would overflow float32."""
        return self.temperature < MIN_SAMPLING_TEMPERATURE

    def stop_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the output, for a model with these end-of-sequence tokens."""
        if self.ignore_eos:
            return self.stop_token_ids
        return self.stop_token_ids | eos_token_ids if self.stop_token_ids else eos_token_ids


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to compute: token ids in, tokens out.

    `token_ids` is the prompt, `num_prompt_tokens` long. A resumed request has its delivered tokens behind the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0  # lower goes first
    cache_salt: str = field(default="", repr=False)  # a secret: who knows it can probe for prompts of its owner
    adapter: str = ""  # name of a LoRA adapter; empty = the model alone
    tenant: str = field(default="", repr=False)  # prompts of different tenants get equal shares of a prefill worker
    age_s: float = 0.0  # of a call: time since the request arrived at its router, which other clocks cannot tell
    _packed: bytes | None = field(init=False, default=None, repr=False, compare=False)  # token_ids, once packed

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise InvalidRequest("prompt", "must hold at least 1 token")
        if not self.num_prompt_tokens <= len(self.token_ids):
            raise InvalidRequest(
                "num_prompt_tokens", f"is {self.num_prompt_tokens}, over len(token_ids) {len(self.token_ids)}"
            )
        if len(self.token_ids) >= self.max_total_tokens:
            raise InvalidRequest("max_tokens", f"all {self.sampling.max_tokens} tokens are in token_ids already")

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def tenant_name(self) -> str:
        """The tenant for operators. A request without a user has its cache salt as tenant: the salt is a secret."""
        return "" if self.tenant == self.cache_salt else self.tenant

    def packed_token_ids(self) -> bytes:
        """`token_ids` as little-endian u32. Computed at the first call: a long prompt takes a while."""
        if self._packed is None:
            object.__setattr__(self, "_packed", pack_token_ids(self.token_ids))
        assert self._packed is not None
        return self._packed

    def derive(self, **changes: Any) -> Request:
        """A copy with other fields, but the same tokens, which stay packed."""
        assert "token_ids" not in changes
        copy = replace(self, **changes)
        object.__setattr__(copy, "_packed", self._packed)
        return copy

    def for_choice(self, choice: int, request_id: str) -> Request:
        """The request of choice `choice`: the same prompt, with a seed of its own."""
        seed = (self.sampling.seed + choice) % (MAX_SEED + 1)
        return self.derive(request_id=request_id, sampling=replace(self.sampling, seed=seed))

    def validate_for(self, vocab_size: int, context_length: int) -> None:
        """Raise `InvalidRequest` if a model of these sizes cannot run this request."""
        if self.max_total_tokens > context_length:
            raise InvalidRequest(
                "max_tokens",
                f"prompt ({self.num_prompt_tokens}) + max_tokens ({self.sampling.max_tokens}) "
                f"is {self.max_total_tokens}, over the context of {context_length} tokens",
            )
        for name, ids in (
            ("token_ids", self.token_ids),
            ("stop_token_ids", self.sampling.stop_token_ids),
            ("logit_bias", self.sampling.logit_bias),
        ):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                token_id = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
                raise InvalidRequest(name, f"token id {token_id} is outside the vocabulary [0, {vocab_size})")


def draw_key(seed: int, position: int) -> int:
    """64 bits that decide the token at `position`, counted from the start of the prompt (engine/sampling.py)."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position))
