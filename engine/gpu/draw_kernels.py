"""The Triton kernels of `draw_tokens`: softmax at a temperature, top_k, top_p, min_p, inverse CDF from the likeliest.

    _highest_of_splits -> _weigh_splits -> _draw

Nothing is sorted. A filter keeps the tokens down to some place in the order of `engine/gpu/sampling_kernels.py`, and a
search by halves finds the place: the lowest order from which on the tokens reach a count or a mass. A mass is a weight
as an integer, so sums depend on no order. The mass of the likeliest token is 2 ^ MASS_BITS. A token below one unit,
less than 1e-13 of the likeliest, has no mass and is not drawn.

`_weigh_splits` copies the likely tokens of a row, which decide nearly all draws. `_draw` reads the whole row if these
do not decide, or are too many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.sampling_kernels import exp_below_one, id_bits, id_in, key_of, order_of, value_of
from engine.gpu.sampling_reference import mass_bits
from engine.gpu.tile_sizes import SAMPLING_SPLIT

_TILE = 2048
_LIKELY = tl.constexpr(-10.0)  # natural logarithm of the weight from which on a token is likely
_SURELY_LIKELY = tl.constexpr(1e-4)  # a weight well above exp(_LIKELY)


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    settings: torch.Tensor,
    highest: torch.Tensor,
    masses: torch.Tensor,
    candidates: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    vocab_size, num_splits = logits.shape[1], highest.shape[1]
    if len(rows) == 0:
        return
    assert num_splits == triton.cdiv(vocab_size, SAMPLING_SPLIT)
    assert highest.is_contiguous()
    assert masses.is_contiguous()
    assert candidates.is_contiguous()
    bits, splits = id_bits(vocab_size), triton.next_power_of_2(num_splits)
    stride = logits.stride(0)
    _highest_of_splits[(len(rows), num_splits)](
        logits, rows, highest, masses, vocab_size, stride, num_splits, TILE=SAMPLING_SPLIT, num_warps=8
    )
    _weigh_splits[(len(rows), num_splits)](
        logits,
        rows,
        settings,
        highest,
        masses,
        candidates,
        vocab_size,
        stride,
        num_splits,
        candidates.shape[1],
        ID_BITS=bits,
        MASS_BITS=mass_bits(vocab_size),
        SPLITS=splits,
        TILE=SAMPLING_SPLIT,
        num_warps=8,
    )
    _draw[(len(rows),)](
        logits,
        rows,
        top_k,
        settings,
        highest,
        masses,
        candidates,
        ids,
        vocab_size,
        stride,
        num_splits,
        candidates.shape[1],
        ID_BITS=bits,
        MASS_BITS=mass_bits(vocab_size),
        SPLITS=splits,
        TILE=min(_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


@triton.jit
def _highest_of_splits(logits, rows, highest, masses, vocab_size, stride, num_splits, TILE: tl.constexpr):
    """The highest logit of each part of a row. Clears the sums of the row for the next kernel."""
    index, split = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + index).to(tl.int64) * stride
    places = split * TILE + tl.arange(0, TILE)
    values = tl.load(logits + places, mask=places < vocab_size, other=float("-inf"))
    tl.store(highest + index * num_splits + split, tl.max(values, axis=0))
    both = tl.arange(0, 2)
    tl.store(masses + 2 * index + both, tl.zeros([2], tl.int64), mask=both + 2 * split < 2)


@triton.jit
def _scaled(values, temperature):
    """Divide as numpy does: the default division is rounded in another way."""
    return tl.div_rn(values, tl.zeros_like(values) + temperature)


@triton.jit
def _highest_scaled(highest, index, num_splits, temperature, SPLITS: tl.constexpr):
    splits = tl.arange(0, SPLITS)
    tops = tl.load(highest + index * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    return tl.max(_scaled(tops, temperature), axis=0)


@triton.jit
def _weight(scaled, top):
    return exp_below_one(tl.where(scaled == float("-inf"), -200.0, scaled - top))


@triton.jit
def _weigh_splits(
    logits,
    rows,
    settings,
    highest,
    masses,
    candidates,
    vocab_size,
    stride,
    num_splits,
    max_candidates,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up the masses of a part of a row, and append its likely tokens to the candidates of the row."""
    index, split = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + index).to(tl.int64) * stride
    temperature = tl.load(settings + 4 * index).to(tl.float32)
    top = _highest_scaled(highest, index, num_splits, temperature, SPLITS)
    token_ids = split * TILE + tl.arange(0, TILE)
    inside = token_ids < vocab_size
    scaled = _scaled(tl.load(logits + token_ids, mask=inside, other=float("-inf")), temperature)
    tl.atomic_add(masses + 2 * index, tl.sum(_amounts(inside, _weight(scaled, top), False, MASS_BITS), axis=0))
    likely = inside & (scaled >= top + _LIKELY)
    count = tl.sum(likely.to(tl.int64), axis=0)
    first = tl.atomic_add(masses + 2 * index + 1, count)
    places = first + tl.cumsum(likely.to(tl.int32), axis=0) - 1
    # The order of the candidates does not matter: each is the token's place in the order of tokens.
    tl.store(
        candidates + index.to(tl.int64) * max_candidates + places,
        order_of(scaled, token_ids, ID_BITS),
        mask=likely & (places < max_candidates),
    )


@triton.jit
def _tokens_at(
    start,
    logits,
    candidates,
    num_held,
    num_read,
    temperature,
    ID_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Orders and scaled logits of a tile of the `num_held` candidates, or of the row's `num_read` logits.

    One of the two numbers is 0. -> int64, float32, inside
    """
    places = start + tl.arange(0, TILE)
    is_held = places < num_held
    held = tl.load(candidates + places, mask=is_held, other=0)
    scaled = _scaled(tl.load(logits + places, mask=places < num_read, other=0.0), temperature)
    orders = tl.where(is_held, held, order_of(scaled, places, ID_BITS))
    scaled = tl.where(is_held, value_of((held >> ID_BITS).to(tl.int32)), scaled)
    return orders, scaled, places < num_held + num_read


@triton.jit
def _amounts(counted, weights, COUNT: tl.constexpr, MASS_BITS: tl.constexpr):
    """1 for each counted token, or without COUNT its mass. -> int64"""
    amounts = counted.to(tl.int64) if COUNT else tl.where(counted, (weights * (1 << MASS_BITS)).to(tl.int64), 0)
    return amounts


@triton.jit
def _sum_from(
    order,
    logits,
    candidates,
    num_held,
    num_read,
    temperature,
    top,
    least_weight,
    COUNT: tl.constexpr,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mass, or with COUNT the number, of the tokens from the likeliest down to `order`. -> int64"""
    found = tl.zeros([TILE], tl.int64)
    for start in range(0, num_held + num_read, TILE):
        orders, scaled, inside = _tokens_at(start, logits, candidates, num_held, num_read, temperature, ID_BITS, TILE)
        weights = _weight(scaled, top)
        found += _amounts(inside & (orders >= order) & (weights >= least_weight), weights, COUNT, MASS_BITS)
    return tl.sum(found, axis=0)


@triton.jit
def _first_above(
    target,
    floor,
    logits,
    candidates,
    num_held,
    num_read,
    temperature,
    top,
    least_weight,
    COUNT: tl.constexpr,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns, as int64, the order of the first token from the likeliest down at which the sum exceeds `target`.

    `floor`: a float; tokens with a lower value add nothing to the sum.
    """
    # Bisection. Both ends move to the order of a token, so few tokens need few steps.
    low = key_of(floor).to(tl.int64) << ID_BITS
    high = (key_of(top).to(tl.int64) + 1) << ID_BITS
    while high - low > 1:
        middle = low + (high - low) // 2
        sums = tl.zeros([TILE], tl.int64)
        above = tl.full([TILE], 1 << 62, tl.int64)
        below = tl.full([TILE], -(1 << 62), tl.int64)
        for start in range(0, num_held + num_read, TILE):
            orders, scaled, inside = _tokens_at(
                start, logits, candidates, num_held, num_read, temperature, ID_BITS, TILE
            )
            weights = _weight(scaled, top)
            inside = inside & (weights >= least_weight)
            is_above = inside & (orders >= middle)
            sums += _amounts(is_above, weights, COUNT, MASS_BITS)
            above = tl.minimum(above, tl.where(is_above, orders, 1 << 62))
            below = tl.maximum(below, tl.where(inside & (orders < middle), orders, -(1 << 62)))
        found = tl.sum(sums, axis=0)
        low = tl.where(found > target, tl.min(above, axis=0), low)
        high = tl.where(found > target, high, tl.max(below, axis=0) + 1)
    return low


@triton.jit
def _draw(
    logits,
    rows,
    top_k,
    settings,
    highest,
    masses,
    candidates,
    ids,
    vocab_size,
    stride,
    num_splits,
    max_candidates,
    ID_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    logits += row.to(tl.int64) * stride
    candidates += index.to(tl.int64) * max_candidates
    temperature = tl.load(settings + 4 * index).to(tl.float32)
    top_p = tl.load(settings + 4 * index + 1)
    min_p = tl.load(settings + 4 * index + 2).to(tl.float32)
    quantile = tl.load(settings + 4 * index + 3)
    num_kept = tl.load(top_k + index)
    has_top_k = (num_kept > 0) & (num_kept < vocab_size)
    has_top_p = top_p < 1.0
    top = _highest_scaled(highest, index, num_splits, temperature, SPLITS)
    mass = tl.load(masses + 2 * index)
    num_candidates = tl.load(masses + 2 * index + 1)
    lowest = tl.full([], float("-inf"), tl.float32)
    least = tl.full([], -(1 << 62), tl.int64)

    # 1. Do the candidates decide? They are all tokens down to one place.
    num_held = tl.minimum(num_candidates, max_candidates).to(tl.int32)
    likely_mass = _sum_from(
        least, logits, candidates, num_held, 0, temperature, top, 0.0, False, ID_BITS, MASS_BITS, TILE
    )
    top_p_target = tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass)
    target = tl.minimum((quantile * mass.to(tl.float64)).to(tl.int64), mass - 1)
    decided = (top_p_target <= likely_mass) & has_top_p | (min_p >= _SURELY_LIKELY) & (has_top_p == 0)
    decided = decided | (target < likely_mass) & (has_top_p == 0) & (min_p == 0.0)
    decided = has_top_k & (num_kept <= num_candidates) | (has_top_k == 0) & decided
    held = decided & (num_candidates <= max_candidates)
    num_held = tl.where(held, num_held, 0)
    num_read = tl.where(held, 0, vocab_size)
    floor = top + tl.where(held, _LIKELY - 1.0, -40.0)  # tokens of less than exp(-40) have no mass
    if num_read > 0:
        # Compilers may round the weights of two kernels in two ways. Sums that are compared come from one kernel.
        mass = _sum_from(
            least, logits, candidates, num_held, num_read, temperature, top, 0.0, False, ID_BITS, MASS_BITS, TILE
        )

    # 2. The filters, each on what the one before has kept.
    cut = least
    if has_top_k:
        counted_from = tl.where(held, floor, lowest)
        target = num_kept.to(tl.int64) - 1
        cut = _first_above(
            target,
            counted_from,
            logits,
            candidates,
            num_held,
            num_read,
            temperature,
            top,
            0.0,
            True,
            ID_BITS,
            MASS_BITS,
            TILE,
        )
        mass = _sum_from(
            cut, logits, candidates, num_held, num_read, temperature, top, 0.0, False, ID_BITS, MASS_BITS, TILE
        )
    if has_top_p:
        target = tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass) - 1
        place = _first_above(
            target,
            floor,
            logits,
            candidates,
            num_held,
            num_read,
            temperature,
            top,
            0.0,
            False,
            ID_BITS,
            MASS_BITS,
            TILE,
        )
        cut = tl.maximum(cut, place)
    if has_top_p | (min_p > 0.0):
        mass = _sum_from(
            cut, logits, candidates, num_held, num_read, temperature, top, min_p, False, ID_BITS, MASS_BITS, TILE
        )

    # 3. The token at the quantile.
    target = tl.minimum((quantile * mass.to(tl.float64)).to(tl.int64), mass - 1)
    drawn = _first_above(
        target,
        floor,
        logits,
        candidates,
        num_held,
        num_read,
        temperature,
        top,
        min_p,
        False,
        ID_BITS,
        MASS_BITS,
        TILE,
    )
    # A row of NaN has no order: the token is clamped to a valid id, so the store stays in bounds.
    tl.store(ids + row, tl.minimum(id_in(drawn, ID_BITS), vocab_size - 1))
