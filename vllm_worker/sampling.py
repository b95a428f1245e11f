"""From a request of Tandem to vLLM's SamplingParams, and the parameters of Tandem's draws in between.

vLLM takes the token with the highest logit (its temperature is 0). Wherever Tandem's law says more than that, the
request carries `DrawParams` to vllm_worker/draws.py, which leaves only the chosen token for vLLM. So a token depends
on the request and its position alone, and a stream that another worker resumes continues as if nothing had happened:
the penalties, the draws and `min_tokens` count from the true prompt, not from the tokens that vLLM takes for one.

vLLM gets the end-of-sequence tokens as stop tokens. Stop strings are the router's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.request import Request, SamplingParams
from engine.sampling import is_plain

EXTRA_ARG = "tandem"  # of vLLM's SamplingParams.extra_args

_DRAWN_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What the choice of a token needs, beside the logits and the tokens so far."""

    sampling: SamplingParams
    num_prompt_tokens: int  # of the true prompt
    ends: tuple[int, ...]  # the tokens that end the output; needed for `min_tokens` and a grammar

    @property
    def barred(self) -> tuple[int, ...]:
        """Tokens that must not end the output before it has `min_tokens` tokens."""
        return self.ends if self.sampling.min_tokens else ()

    @property
    def chooses(self) -> bool:
        """Whether a token can differ from the one with the highest logit."""
        sampling = self.sampling
        return not sampling.greedy or bool(self.barred or sampling.grammar) or not is_plain(sampling)


def draw_params_of(request: Request, eos_token_ids: frozenset[int]) -> DrawParams:
    sampling = request.sampling
    ends = tuple(sorted(sampling.stop_tokens(eos_token_ids))) if sampling.min_tokens or sampling.grammar else ()
    return DrawParams(sampling, request.num_prompt_tokens, ends)


def encode_draw_params(params: DrawParams) -> dict[str, Any]:
    """Plain numbers, lists and text: vLLM sends them to its workers."""
    sampling = params.sampling
    return {
        **{name: getattr(sampling, name) for name in _DRAWN_FIELDS},
        "logit_bias": [[token_id, bias] for token_id, bias in sampling.logit_bias.items()],
        "min_tokens": sampling.min_tokens,
        "grammar": sampling.grammar,
        "num_prompt_tokens": params.num_prompt_tokens,
        "ends": list(params.ends),
    }


def decode_draw_params(wire: dict[str, Any]) -> DrawParams:
    fields = {name: wire[name] for name in _DRAWN_FIELDS}
    min_tokens = wire["min_tokens"]
    bias = {int(token_id): float(value) for token_id, value in wire["logit_bias"]}
    sampling = SamplingParams(
        max_tokens=max(1, min_tokens), min_tokens=min_tokens, logit_bias=bias, grammar=wire["grammar"], **fields
    )
    return DrawParams(sampling, wire["num_prompt_tokens"], tuple(wire["ends"]))


def sampling_arguments(request: Request, eos_token_ids: frozenset[int], *, max_tokens: int = 0) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams. `max_tokens`: the most for this engine; 0 = all that are left."""
    sampling = request.sampling
    left = request.max_total_tokens - len(request.token_ids)
    params = draw_params_of(request, eos_token_ids)
    arguments: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": min(left, max_tokens or left),
        "stop_token_ids": sorted(sampling.stop_tokens(eos_token_ids)),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": sampling.num_logprobs,
    }
    if params.chooses:
        arguments["extra_args"] = {EXTRA_ARG: encode_draw_params(params)}
    return arguments
