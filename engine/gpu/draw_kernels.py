"""The Triton kernels of `draw_tokens`: of the tokens that top_k, top_p and min_p keep, the one with the largest
logit / temperature - log(exponential(key, id)), as `draw_token` of engine/sampling.py.

    rows with top_k: torch.topk, a list of the highest logits --------+
    other rows:      _best_of_splits (all parts of all rows at once) -+-> _reject_until_kept (a program for each row)

Each filter keeps the tokens down to some place in the order of `engine/gpu/sampling_kernels.py`. `_reject_until_kept`
is rejection over that order: if a filter drops the best token, it drops every later token, too, so the next candidate
is the best token before it. Each round leaves a random share of the mass. One pass over the list, or over the row of
logits if there is no list, weighs the tokens before the candidate, and finds the best of them.

A mass is a weight as an integer, so sums depend on no order. The mass of the likeliest token is 2 ^ MASS_BITS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.sampling_kernels import NO_TOKEN, SAMPLING_SPLIT, exp_below_one, id_bits, order_of

_TILE = 4096


def mass_bits(vocab_size: int) -> int:
    """A weight in [0, 1] is a mass of at most 2 ^ mass_bits, so that the masses of a row add up within 63 bits."""
    return min(44, 62 - vocab_size.bit_length())


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_listed: int,
    list_size: int,
    top_k: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    if len(rows) == 0:
        return
    vocab_size, stride = logits.shape[1], logits.stride(0)
    num_splits = triton.cdiv(vocab_size, SAMPLING_SPLIT)
    parts = torch.empty(len(rows), num_splits, 4, dtype=torch.float64, device=logits.device)
    values, token_ids = logits, keys  # not read without a list, and of the types of one
    if num_listed:
        listed = logits if num_listed == len(logits) else logits.index_select(0, rows[:num_listed])
        values, token_ids = listed.topk(list_size, sorted=True)
    if num_listed < len(rows):
        _best_of_splits[(len(rows) - num_listed, num_splits)](
            logits,
            rows,
            num_listed,
            settings,
            keys,
            parts,
            vocab_size,
            stride,
            num_splits,
            MASS_BITS=mass_bits(vocab_size),
            TILE=SAMPLING_SPLIT,
            num_warps=8,
        )
    _reject_until_kept[(len(rows),)](
        logits,
        rows,
        values,
        token_ids,
        num_listed,
        list_size,
        top_k,
        settings,
        keys,
        parts,
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
def _masses(values, top, temperature, MASS_BITS: tl.constexpr):
    weights = exp_below_one(tl.where(values == float("-inf"), -200.0, (values - top) / temperature))
    return (weights * (1 << MASS_BITS)).to(tl.int64)


@triton.jit(do_not_specialize=["num_listed"])
def _best_of_splits(
    logits,
    rows,
    num_listed,
    settings,
    keys,
    parts,
    vocab_size,
    stride,
    num_splits,
    MASS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each part of a row: the highest logit, the mass in units of that token's, the best score and its token.

    # parts: float64 [D, num_splits, 4]
    """
    index, split = num_listed + tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + index).to(tl.int64) * stride
    temperature = tl.load(settings + 3 * index).to(tl.float32)
    token_ids = split * TILE + tl.arange(0, TILE)
    values = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
    found = _scores(values, token_ids, temperature, tl.load(keys + index))
    best, top = tl.max(found, axis=0), tl.max(values, axis=0)
    mass = tl.zeros([], tl.int64)
    if tl.load(settings + 3 * index + 1) < 1.0:
        mass = tl.sum(_masses(values, top, temperature, MASS_BITS), axis=0)
    # The last id stands for a part of NaN: a token, though no right one.
    best_id = tl.min(tl.where(found == best, token_ids, vocab_size - 1), axis=0)
    parts += (index * num_splits + split) * 4
    tl.store(parts, top.to(tl.float64))
    tl.store(parts + 1, mass.to(tl.float64))
    tl.store(parts + 2, best.to(tl.float64))
    tl.store(parts + 3, best_id.to(tl.float64))


@triton.jit
def _before(
    order,
    logits,
    values,
    token_ids,
    row_length,
    list_length,
    least,
    least_mass,
    temperature,
    top,
    key,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tokens before `order` with logits of at least `least`: their number, their mass, and the best of those with a
    mass of at least `least_mass`. One of the two lengths is 0. -> int64, int64, int32
    """
    counts, masses = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    best, best_ids = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.int32)
    for start in range(0, row_length + list_length, TILE):
        places = start + tl.arange(0, TILE)
        in_row, in_list = places < row_length, places < list_length
        from_row = tl.load(logits + places, mask=in_row, other=float("-inf"))
        from_list = tl.load(values + places, mask=in_list, other=float("-inf"))
        ids = tl.where(in_list, tl.load(token_ids + places, mask=in_list, other=0).to(tl.int32), places)
        found = tl.where(in_list, from_list, from_row)
        inside = (in_row | in_list) & (found >= least) & (order_of(found, ids, ID_BITS) > order)
        mass = tl.where(inside, _masses(found, top, temperature, MASS_BITS), 0)
        counts += inside.to(tl.int64)
        masses += mass
        score = tl.where(inside & (mass >= least_mass), _scores(found, ids, temperature, key), float("-inf"))
        better = (score > best) | ((score == best) & (ids < best_ids))
        best, best_ids = tl.where(better, score, best), tl.where(better, ids, best_ids)
    highest = tl.max(best, axis=0)
    best_id = tl.min(tl.where(best == highest, best_ids, (1 << ID_BITS) - 1), axis=0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), best_id


@triton.jit(do_not_specialize=["num_listed"])
def _reject_until_kept(
    logits,
    rows,
    values,
    token_ids,
    num_listed,
    list_size,
    top_k,
    settings,
    keys,
    parts,
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
    least_mass = tl.ceil(min_p * (1 << MASS_BITS)).to(tl.int64)
    has_top_k, has_top_p = index < num_listed, top_p < 1.0

    splits = tl.arange(0, SPLITS)
    is_part = splits < tl.where(has_top_k, 0, num_splits)
    parts += (index * num_splits + splits) * 4
    tops = tl.load(parts, mask=is_part, other=float("-inf")).to(tl.float32)
    mass_of_parts = tl.load(parts + 1, mask=is_part, other=0.0)
    found = tl.load(parts + 2, mask=is_part, other=float("-inf"))
    found_ids = tl.load(parts + 3, mask=is_part, other=0.0).to(tl.int32)
    drawn = tl.min(tl.where(is_part & (found == tl.max(found, axis=0)), found_ids, vocab_size - 1), axis=0)

    values += index.to(tl.int64) * list_size
    token_ids += index.to(tl.int64) * list_size
    top = tl.load(values, mask=has_top_k, other=tl.max(tops, axis=0))
    least = tl.load(values + num_kept - 1, mask=has_top_k, other=float("-inf"))
    last = tl.load(values + list_size - 1, mask=has_top_k, other=0.0)
    # torch.topk takes any of the equals at the end of the list. If the row keeps some of them, the whole row is read.
    is_listed = has_top_k & ((last < least) | (last == float("-inf")))
    row_length, list_length = tl.where(is_listed, 0, vocab_size), tl.where(is_listed, list_size, 0)

    shares = exp_below_one((tops - top) / temperature).to(tl.float64)
    mass = tl.sum((mass_of_parts * shares).to(tl.int64), axis=0)
    if has_top_k:
        count, mass, drawn = _before(
            NO_TOKEN,
            logits,
            values,
            token_ids,
            row_length,
            list_length,
            least,
            least_mass,
            temperature,
            top,
            key,
            ID_BITS,
            MASS_BITS,
            TILE,
        )
        # The last ones are equals, and some of them may be too many.
        mass -= (count - num_kept) * _masses(least, top, temperature, MASS_BITS)

    undecided = has_top_k | has_top_p | (min_p > 0.0)
    while undecided:
        value = tl.load(logits + drawn)
        order = order_of(value, drawn, ID_BITS)
        count, before, next_id = _before(
            order,
            logits,
            values,
            token_ids,
            row_length,
            list_length,
            least,
            least_mass,
            temperature,
            top,
            key,
            ID_BITS,
            MASS_BITS,
            TILE,
        )
        is_kept = (count < num_kept) | (has_top_k == 0)
        is_kept = is_kept & ((before.to(tl.float64) < top_p * mass.to(tl.float64)) | (has_top_p == 0))
        is_kept = is_kept & (_masses(value, top, temperature, MASS_BITS) >= least_mass)
        # In a row with a NaN, no token before the last one may have the least mass.
        is_before = order_of(tl.load(logits + next_id), next_id, ID_BITS) > order
        undecided = (is_kept == 0) & (count > 0) & is_before
        drawn = tl.where(undecided, next_id, drawn)
    tl.store(ids + row, drawn)
