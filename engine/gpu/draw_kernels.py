"""The Triton kernels of `draw_tokens`: of the tokens that top_k, top_p and min_p keep, the one with the largest
logit / temperature - log(exponential(key, id)), as `draw_token` of engine/sampling.py.

    _best_of_splits (all parts of all rows at once) -> _reject_until_kept (a program for each row)

Nothing is sorted. Each filter keeps the tokens down to some place in the order of `engine/gpu/sampling_kernels.py`.
`_reject_until_kept` is rejection over that order: if a filter drops the best token, it drops every later token, too, so
the next candidate is the best token before it. Each round leaves a random share of the mass. One pass over the row
weighs the tokens before the candidate, and finds the best of them.

A mass is a weight as an integer, so sums depend on no order. The mass of the likeliest token is 2 ^ MASS_BITS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.sampling_kernels import exp_below_one, id_bits, key_of, order_of, value_of
from engine.gpu.tile_sizes import SAMPLING_SPLIT

_TILE = 4096


def mass_bits(vocab_size: int) -> int:
    """A weight in [0, 1] is a mass of at most 2 ^ mass_bits, so that the masses of a row add up within 63 bits."""
    return min(44, 62 - vocab_size.bit_length())


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    highest: torch.Tensor,
    scores: torch.Tensor,
    best_ids: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    vocab_size, num_splits = logits.shape[1], highest.shape[1]
    if len(rows) == 0:
        return
    assert num_splits == triton.cdiv(vocab_size, SAMPLING_SPLIT)
    assert highest.is_contiguous()
    assert scores.is_contiguous()
    assert best_ids.is_contiguous()
    stride = logits.stride(0)
    _best_of_splits[(len(rows), num_splits)](
        logits,
        rows,
        settings,
        keys,
        highest,
        scores,
        best_ids,
        vocab_size,
        stride,
        num_splits,
        TILE=SAMPLING_SPLIT,
        num_warps=8,
    )
    _reject_until_kept[(len(rows),)](
        logits,
        rows,
        top_k,
        settings,
        keys,
        highest,
        scores,
        best_ids,
        ids,
        vocab_size,
        stride,
        num_splits,
        ID_BITS=id_bits(vocab_size),
        MASS_BITS=mass_bits(vocab_size),
        SPLITS=triton.next_power_of_2(num_splits),
        TILE=min(_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


@triton.jit
def _scores(values, token_ids, temperature, key):
    """logit / temperature plus the noise of the token: `exponentials` of engine/sampling.py in float32."""
    bits = token_ids.to(tl.uint32) ^ key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D + (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    quantile = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log(1 - q) loses the last bits of a small q, and the smallest variates win.
    series = quantile * (1.0 + quantile * (0.5 + quantile * (0.33333334 + quantile * 0.25)))
    variate = tl.where(quantile < 0.01, series, -tl.log(1.0 - quantile))
    return values / temperature - tl.log(variate)


@triton.jit
def _best_of_splits(
    logits,
    rows,
    settings,
    keys,
    highest,
    scores,
    best_ids,
    vocab_size,
    stride,
    num_splits,
    TILE: tl.constexpr,
):
    """The highest logit of each part of a row, and the best score with its token."""
    index, split = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + index).to(tl.int64) * stride
    temperature = tl.load(settings + 3 * index).to(tl.float32)
    token_ids = split * TILE + tl.arange(0, TILE)
    values = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
    found = _scores(values, token_ids, temperature, tl.load(keys + index))
    best = tl.max(found, axis=0)
    part = index * num_splits + split
    tl.store(highest + part, tl.max(values, axis=0))
    tl.store(scores + part, best)
    # The last id stands for a part of NaN: a token, though no right one.
    tl.store(best_ids + part, tl.min(tl.where(found == best, token_ids, vocab_size - 1), axis=0))


@triton.jit
def _masses(values, top, temperature, MASS_BITS: tl.constexpr):
    weights = exp_below_one(tl.where(values == float("-inf"), -200.0, (values - top) / temperature))
    return (weights * (1 << MASS_BITS)).to(tl.int64)


@triton.jit
def _before(
    order,
    logits,
    vocab_size,
    temperature,
    top,
    key,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tokens before `order`: their number and mass, and the best of them. -> int64, int64, int32"""
    counts, masses = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    best, best_ids = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        inside = token_ids < vocab_size
        values = tl.load(logits + token_ids, mask=inside, other=float("-inf"))
        inside = inside & (order_of(values, token_ids, ID_BITS) > order)
        counts += inside.to(tl.int64)
        masses += tl.where(inside, _masses(values, top, temperature, MASS_BITS), 0)
        found = tl.where(inside, _scores(values, token_ids, temperature, key), float("-inf"))
        better = found > best
        best, best_ids = tl.where(better, found, best), tl.where(better, token_ids, best_ids)
    highest = tl.max(best, axis=0)
    best_id = tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), best_id


@triton.jit
def _share_above(key, logits, vocab_size, temperature, top, MASS_BITS: tl.constexpr, TILE: tl.constexpr):
    """The number and the mass of the tokens whose logits are above the one of this `key_of`. -> int64, int64"""
    counts, masses = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        places = start + tl.arange(0, TILE)
        values = tl.load(logits + places, mask=places < vocab_size, other=float("-inf"))
        above = (places < vocab_size) & (key_of(values) > key)
        counts += above.to(tl.int64)
        masses += tl.where(above, _masses(values, top, temperature, MASS_BITS), 0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _kth_logit_bounds(upper, lower, num_kept, logits, vocab_size, TILE: tl.constexpr):
    """One step of a 4-ary search for the key of the k-th logit, k = `num_kept`: lower < key <= upper. -> upper, lower

    Fewer than k tokens are above `upper`, at least k above `lower`.
    """
    gap = upper.to(tl.int64) - lower.to(tl.int64)
    low = (lower + (gap >> 2)).to(tl.int32)
    middle = (lower + (gap >> 1)).to(tl.int32)
    high = (lower + (gap * 3 >> 2)).to(tl.int32)
    above_low = tl.zeros([TILE], tl.int32)
    above_middle = tl.zeros([TILE], tl.int32)
    above_high = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        places = start + tl.arange(0, TILE)
        inside = places < vocab_size
        keys = key_of(tl.load(logits + places, mask=inside, other=float("-inf")))
        above_low += (inside & (keys > low)).to(tl.int32)
        above_middle += (inside & (keys > middle)).to(tl.int32)
        above_high += (inside & (keys > high)).to(tl.int32)
    low_is_lower = tl.sum(above_low, axis=0) >= num_kept
    middle_is_lower = tl.sum(above_middle, axis=0) >= num_kept
    high_is_lower = tl.sum(above_high, axis=0) >= num_kept
    upper = tl.where(high_is_lower, upper, tl.where(middle_is_lower, high, tl.where(low_is_lower, middle, low)))
    lower = tl.where(high_is_lower, high, tl.where(middle_is_lower, middle, tl.where(low_is_lower, low, lower)))
    return upper, lower


@triton.jit
def _reject_until_kept(
    logits,
    rows,
    top_k,
    settings,
    keys,
    highest,
    scores,
    best_ids,
    ids,
    vocab_size,
    stride,
    num_splits,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(settings + 3 * index).to(tl.float32)
    top_p, min_p = tl.load(settings + 3 * index + 1), tl.load(settings + 3 * index + 2)
    num_kept, key = tl.load(top_k + index), tl.load(keys + index)
    parts = tl.arange(0, SPLITS)
    is_part = parts < num_splits
    top = tl.max(tl.load(highest + index * num_splits + parts, mask=is_part, other=float("-inf")), axis=0)
    found = tl.load(scores + index * num_splits + parts, mask=is_part, other=float("-inf"))
    found_ids = tl.load(best_ids + index * num_splits + parts, mask=is_part, other=0)
    drawn = tl.min(tl.where(is_part & (found == tl.max(found, axis=0)), found_ids, vocab_size - 1), axis=0)

    has_top_k = (num_kept > 0) & (num_kept < vocab_size)
    has_top_p = top_p < 1.0
    mass = tl.zeros([], tl.int64)
    if has_top_p:
        # The mass of the tokens that top_k keeps, by a 4-ary search for the k-th logit.
        upper = key_of(top)
        lower = key_of(tl.where(has_top_k, top - 50.0 * temperature, float("-inf"))) - 1
        count, mass = _share_above(lower, logits, vocab_size, temperature, top, MASS_BITS, TILE)
        if has_top_k & (count > num_kept):
            while upper.to(tl.int64) - lower.to(tl.int64) > 1:
                upper, lower = _kth_logit_bounds(upper, lower, num_kept, logits, vocab_size, TILE)
            count, above = _share_above(upper, logits, vocab_size, temperature, top, MASS_BITS, TILE)
            mass = above + (num_kept - count) * _masses(value_of(upper), top, temperature, MASS_BITS)

    undecided = has_top_k | has_top_p | (min_p > 0.0)
    while undecided:
        value = tl.load(logits + drawn)
        order = order_of(value, drawn, ID_BITS)
        count, before, next_id = _before(order, logits, vocab_size, temperature, top, key, ID_BITS, MASS_BITS, TILE)
        is_kept = (count < num_kept) | (has_top_k == 0)
        is_kept = is_kept & ((before.to(tl.float64) < top_p * mass.to(tl.float64)) | (has_top_p == 0))
        is_kept = is_kept & (_masses(value, top, temperature, MASS_BITS) >= min_p * (1 << MASS_BITS))
        undecided = (is_kept == 0) & (count > 0)
        drawn = tl.where(undecided, next_id, drawn)
    tl.store(ids + row, drawn)
