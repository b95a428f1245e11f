"""The Triton kernels of the sampling operators, but for the draw: `engine/gpu/draw_kernels.py`.

The order of tokens, the highest logit first and ties to the lowest id, is one integer: the logit as an integer of the
same order, and below it the id, reversed. So the token after another is the largest smaller integer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.request import MAX_LOGPROBS

SAMPLING_SPLIT = 4096  # logits that one program of a kernel reads
_ARGMAX_TILE = 8192
_ENTRIES_TILE = 1024
NO_TOKEN = tl.constexpr(-(1 << 62))  # below the order of every token


def id_bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())


@triton.jit
def key_of(values):
    """An int32 of the same order as the float32. Both zeros have one key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(keys):
    """The float32 of a key. # int32"""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def order_of(values, token_ids, ID_BITS: tl.constexpr):
    """# -> int64"""
    reversed_ids = (1 << ID_BITS) - 1 - token_ids.to(tl.int64)
    return key_of(values).to(tl.int64) * (1 << ID_BITS) + reversed_ids


@triton.jit
def id_in(order, ID_BITS: tl.constexpr):
    return ((1 << ID_BITS) - 1 - (order & ((1 << ID_BITS) - 1))).to(tl.int32)


# ---- the highest logit


def argmax(logits: torch.Tensor, ids: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    assert logits.stride(1) == ids.stride(0) == 1
    _argmax[(num_rows,)](
        logits,
        ids,
        vocab_size,
        logits.stride(0),
        TILE=min(_ARGMAX_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


@triton.jit
def _argmax(logits, ids, vocab_size, stride, TILE: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, TILE)
    logits += row.to(tl.int64) * stride
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        values = tl.load(logits + start + places, mask=start + places < vocab_size, other=float("-inf"))
        better = values > best  # not for ties, so each lane keeps its lowest id
        best = tl.where(better, values, best)
        best_ids = tl.where(better, start + places, best_ids)
    highest = tl.max(best, axis=0)
    # A row of NaN gets the last id: a valid id, but no right token.
    tl.store(ids + row, tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0))


# ---- bias and penalties


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
    if len(rows) == 0:
        return
    _adjust_logits[(len(rows),)](
        logits,
        rows,
        first_entry,
        token_ids,
        counts,
        first_bias,
        biases,
        penalties,
        promised,
        sampled_before,
        saved,
        saved[token_ids.numel() :],
        logits.stride(0),
        TILE=_ENTRIES_TILE,
        num_warps=4,
    )


@triton.jit
def _adjusted(raw, bias, count, repetition, presence, frequency):
    """`adjust` of engine/sampling.py: sums in float64, the repetition penalty in float32."""
    biased = (raw.to(tl.float64) + bias).to(tl.float32)
    repeated = tl.where(biased > 0, tl.div_rn(biased, repetition), biased * repetition)
    seen = tl.where(count >= 0, repeated, biased)
    lowered = (seen.to(tl.float64) - (presence + frequency * count.to(tl.float64))).to(tl.float32)
    return tl.where(count > 0, lowered, seen)


@triton.jit(do_not_specialize_on_alignment=["saved_promised"])
def _adjust_logits(
    logits,
    rows,
    first_entry,
    token_ids,
    counts,
    first_bias,
    biases,
    penalties,
    promised,
    sampled_before,
    saved,
    saved_promised,
    stride,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    logits += tl.load(rows + index).to(tl.int64) * stride
    begin, end = tl.load(first_entry + index), tl.load(first_entry + index + 1)
    bias_begin, bias_end = tl.load(first_bias + index), tl.load(first_bias + index + 1)
    factor = tl.load(penalties + 3 * index).to(tl.float32)
    presence, frequency = tl.load(penalties + 3 * index + 1), tl.load(penalties + 3 * index + 2)
    # Repetition as a tile: the exact division takes tiles of one shape.
    repetition = tl.zeros([TILE], tl.float32) + factor
    place = tl.load(promised + index)
    has_promised = place >= 0
    token_before = tl.load(sampled_before + place, mask=has_promised, other=-1)
    num_found = 0
    for start in range(begin, end, TILE):
        entries = start + tl.arange(0, TILE)
        inside = entries < end
        ids = tl.load(token_ids + entries, mask=inside, other=0)
        count = tl.load(counts + entries, mask=inside, other=-1)
        is_promised = inside & (ids == token_before)
        num_found += tl.sum(is_promised.to(tl.int32), axis=0)
        count = tl.where(is_promised, tl.maximum(count, 0) + 1, count)
        bias_places = bias_begin + entries - begin
        bias = tl.load(biases + bias_places, mask=inside & (bias_places < bias_end), other=0.0)
        raw = tl.load(logits + ids, mask=inside, other=0.0)
        tl.store(saved + entries, raw, mask=inside)
        tl.store(logits + ids, _adjusted(raw, bias, count, repetition, presence, frequency), mask=inside)
    # A promised token that is no entry of the row is its first occurrence in prompt and output.
    alone = tl.arange(0, TILE) + tl.where(has_promised & (num_found == 0), 0, 1) == 0
    ids = tl.zeros([TILE], tl.int32) + token_before
    raw = tl.load(logits + ids, mask=alone, other=float("nan"))
    count = tl.full([TILE], 1, tl.int32)
    adjusted = _adjusted(tl.where(alone, raw, 0.0), 0.0, count, repetition, presence, frequency)
    tl.store(saved_promised + index + tl.arange(0, TILE), raw, mask=tl.arange(0, TILE) == 0)
    tl.store(logits + ids, adjusted, mask=alone)


def restore_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    first_entry: torch.Tensor,
    token_ids: torch.Tensor,
    promised: torch.Tensor,
    sampled_before: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    if len(rows) == 0:
        return
    _restore_logits[(len(rows),)](
        logits,
        rows,
        first_entry,
        token_ids,
        promised,
        sampled_before,
        saved,
        saved[token_ids.numel() :],
        logits.stride(0),
        TILE=_ENTRIES_TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["saved_promised"])
def _restore_logits(
    logits,
    rows,
    first_entry,
    token_ids,
    promised,
    sampled_before,
    saved,
    saved_promised,
    stride,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    logits += tl.load(rows + index).to(tl.int64) * stride
    begin, end = tl.load(first_entry + index), tl.load(first_entry + index + 1)
    for start in range(begin, end, TILE):
        entries = start + tl.arange(0, TILE)
        inside = entries < end
        ids = tl.load(token_ids + entries, mask=inside, other=0)
        tl.store(logits + ids, tl.load(saved + entries, mask=inside, other=0.0), mask=inside)
    place = tl.load(promised + index)
    raw = tl.load(saved_promised + index)
    token_before = tl.load(sampled_before + place, mask=place >= 0, other=0)
    tl.store(logits + token_before, raw, mask=(place >= 0) & (raw == raw))


# ---- log-probabilities


def find_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    num_best: int,
    best_ids: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    if len(rows) == 0:
        return
    vocab_size = logits.shape[1]
    num_best, bits = min(num_best, vocab_size), id_bits(vocab_size)
    num_splits = triton.cdiv(vocab_size, SAMPLING_SPLIT)
    best = torch.empty(len(rows), num_splits, MAX_LOGPROBS, dtype=torch.int64, device=logits.device)
    sums = torch.empty(len(rows), num_splits, 2, dtype=torch.float64, device=logits.device)
    _best_of_splits[(len(rows), num_splits)](
        logits,
        rows,
        best,
        sums,
        num_best,
        vocab_size,
        logits.stride(0),
        num_splits,
        best.shape[2],
        ID_BITS=bits,
        TILE=SAMPLING_SPLIT,
        num_warps=8,
    )
    _find_logprobs[(len(rows),)](
        logits,
        rows,
        ids,
        best,
        sums,
        best_ids,
        logprobs,
        num_best,
        logits.stride(0),
        best_ids.stride(0),
        logprobs.stride(0),
        num_splits,
        best.shape[2],
        ID_BITS=bits,
        SPLITS=triton.next_power_of_2(num_splits),
        TILE=triton.next_power_of_2(num_splits * best.shape[2]),
        num_warps=4,
    )


@triton.jit
def exp_below_one(values):
    """exp of numbers that are not above 0, to two units in the last place. -inf gives 0. # float32

    Splits the exponent in base 2, because one rounded product loses the last bits of exp where the value is large.
    """
    values = tl.maximum(values, -200.0)
    high = values * 1.4426950408889634
    low = tl.fma(values, 1.4426950216293335, -high) + values * 1.925963033500e-8
    return tl.exp2(high) * (1.0 + low * 0.6931471805599453)


@triton.jit(do_not_specialize=["num_best"])
def _best_of_splits(
    logits,
    rows,
    best,
    sums,
    num_best,
    vocab_size,
    stride,
    num_splits,
    max_best,
    ID_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    index, split = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + index).to(tl.int64) * stride
    token_ids = split * TILE + tl.arange(0, TILE)
    inside = token_ids < vocab_size
    values = tl.load(logits + token_ids, mask=inside, other=float("-inf"))
    highest = tl.max(values, axis=0)
    weights = exp_below_one(tl.where(values == float("-inf"), -200.0, values - tl.maximum(highest, -3.4e38)))
    total = tl.sum(tl.where(inside, weights, 0.0).to(tl.float64), axis=0)
    part = index.to(tl.int64) * num_splits + split
    tl.store(sums + part * 2, highest.to(tl.float64))
    tl.store(sums + part * 2 + 1, total)
    orders = tl.where(inside, order_of(values, token_ids, ID_BITS), NO_TOKEN)
    for count in range(num_best):
        order = tl.max(orders, axis=0)
        tl.store(best + part * max_best + count, order)
        orders = tl.where(orders == order, NO_TOKEN, orders)


@triton.jit(do_not_specialize=["num_best"], do_not_specialize_on_alignment=["best_ids", "logprobs"])
def _find_logprobs(
    logits,
    rows,
    ids,
    best,
    sums,
    best_ids,
    logprobs,
    num_best,
    stride,
    best_ids_stride,
    logprobs_stride,
    num_splits,
    max_best,
    ID_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    splits = index.to(tl.int64) * num_splits + tl.arange(0, SPLITS)
    is_split = tl.arange(0, SPLITS) < num_splits
    tops = tl.load(sums + splits * 2, mask=is_split, other=float("-inf"))
    totals = tl.load(sums + splits * 2 + 1, mask=is_split, other=0.0)
    highest = tl.max(tops, axis=0)
    below = tl.where(is_split & (tops > float("-inf")), tops - highest, 0.0)
    total = tl.sum(tl.where(tops > float("-inf"), totals * tl.exp(below), 0.0), axis=0)
    normalizer = (highest + tl.log(total)).to(tl.float32)
    sampled = tl.load(logits + row.to(tl.int64) * stride + tl.load(ids + row))
    logprobs += index * logprobs_stride
    best_ids += index * best_ids_stride
    tl.store(logprobs, sampled - normalizer)
    places = tl.arange(0, TILE)
    inside = (places < num_splits * max_best) & (places % max_best < num_best)
    best += index.to(tl.int64) * num_splits * max_best
    orders = tl.load(best + places, mask=inside, other=NO_TOKEN)
    for count in range(num_best):
        order = tl.max(orders, axis=0)
        orders = tl.where(orders == order, NO_TOKEN, orders)
        tl.store(best_ids + count, id_in(order, ID_BITS))
        tl.store(logprobs + 1 + count, value_of((order >> ID_BITS).to(tl.int32)) - normalizer)
