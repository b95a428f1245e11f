"""The sampling operators of `engine/gpu/ops.py` in plain torch and numpy. See `engine/gpu/reference.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.request import SamplingParams
from engine.sampling import draw_token


def argmax(logits: torch.Tensor, ids: torch.Tensor) -> None:
    # torch.argmax promises no order among ties, so this takes the lowest id by hand.
    top = logits.amax(-1, keepdim=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    ids[: len(logits)] = torch.where(logits == top, places, logits.shape[1] - 1).amin(-1).to(ids.dtype)


def adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    first_entry: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    first_bias: torch.Tensor,
    biases: torch.Tensor,
    penalties: torch.Tensor,
    promised: torch.Tensor,
    sampled_before: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    saved.fill_(torch.nan)
    for index, row in enumerate(rows.tolist()):
        begin, end = first_entry[index : index + 2].tolist()
        ids, count = token_ids[begin:end].long(), counts[begin:end].clone()
        bias = torch.zeros(end - begin, dtype=torch.float64, device=logits.device)
        own_biases = biases[first_bias[index] : first_bias[index + 1]]
        bias[: len(own_biases)] = own_biases
        place = int(promised[index])
        if place >= 0:
            token_id = sampled_before[place].long()
            found = ids == token_id
            count[found] = count[found].clamp(min=0) + 1
            if not found.any():
                ids = torch.cat((ids, token_id[None]))
                count = torch.cat((count, count.new_ones(1)))
                bias = torch.cat((bias, bias.new_zeros(1)))
        raw = logits[row, ids]
        saved[begin:end] = raw[: end - begin]
        if len(ids) > end - begin:
            saved[len(token_ids) + index] = raw[-1]
        logits[row, ids] = _adjusted(raw, bias, count, penalties[index])


def _adjusted(raw: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Like `adjust` of `engine/sampling.py`: sums in float64, the repetition penalty in float32. # float32 [n]"""
    repetition, presence, frequency = penalties
    biased = (raw.double() + bias).float()
    factor = repetition.float()
    repeated = torch.where(biased > 0, biased / factor, biased * factor)
    seen = torch.where(counts >= 0, repeated, biased)
    lowered = (seen.double() - (presence + frequency * counts)).float()
    return torch.where(counts > 0, lowered, seen)


def restore_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    first_entry: torch.Tensor,
    token_ids: torch.Tensor,
    promised: torch.Tensor,
    sampled_before: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    for index, row in enumerate(rows.tolist()):
        begin, end = first_entry[index : index + 2].tolist()
        logits[row, token_ids[begin:end].long()] = saved[begin:end]
        raw, place = saved[len(token_ids) + index], int(promised[index])
        if place >= 0 and not raw.isnan():
            logits[row, sampled_before[place].long()] = raw


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_listed: int,  # noqa: ARG001 - kernels list tokens
    list_size: int,  # noqa: ARG001
    top_k: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """`draw_token` of engine/sampling.py, which is the law of draws."""
    for index, row in enumerate(rows.tolist()):
        temperature, top_p, min_p = settings[index].tolist()
        sampling = SamplingParams(1, temperature=temperature, top_k=int(top_k[index]), top_p=top_p, min_p=min_p)
        ids[row] = draw_token(logits[row].cpu().numpy(), sampling, int(keys[index]) % 2**64)


def find_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    num_best: int,
    best_ids: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    asked = logits[rows.long()]
    top = asked.amax(-1, keepdim=True)
    total = (asked - top).exp().sum(-1, keepdim=True, dtype=torch.float64)
    found = asked - (top.double() + total.log()).float()
    logprobs[:, :1] = found.gather(1, ids[rows.long()].long()[:, None])
    ordered, order = found.sort(dim=-1, descending=True, stable=True)
    num_best = min(num_best, logits.shape[1])
    logprobs[:, 1 : 1 + num_best] = ordered[:, :num_best]
    best_ids[:, :num_best] = order[:, :num_best].to(best_ids.dtype)


REFERENCES: dict[str, Callable[..., None]] = {
    "argmax": argmax,
    "adjust_logits": adjust_logits,
    "restore_logits": restore_logits,
    "draw_tokens": draw_tokens,
    "find_logprobs": find_logprobs,
}
