"""XXH3_64 (seed 0, default secret) of KV blocks in device memory, equal to what xxhash gives for the same bytes.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, the part on inputs of more than 240 bytes.

    input: chunks of 1,024 bytes = 16 stripes of 64 bytes = 8 lanes of 8 bytes each
    accumulators (8 lanes) = initial
    for each full chunk but the last:  accumulators = scramble(accumulators + sum of the chunk's stripes)
    accumulators += sum of the last chunk's full stripes + the stripe that ends the input, with keys of its own
    digest = merge(accumulators, length)

The sum of a chunk does not depend on the accumulators. So `_sum_chunks` sums all chunks in parallel, as fast as memory
gives them, and `_chain` walks through the sums, 8 lanes a block: a sixteenth of the bytes.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

CHUNK_BYTES = 1024
MIN_BLOCK_BYTES = 248  # shorter inputs are hashed in another way; a multiple of 8
_TILE_CHUNKS = 32  # of one program of _sum_chunks: 32 KB, four threads a chunk
_TILE_BLOCKS = 4  # of one program of _chain: 32 lanes, a warp
_UNROLLED_CHUNKS = 16  # of _chain: this many loads are in flight

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_INITIAL = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)

# Rows of the table of keys, 8 lanes each: 16 of the stripes of a chunk, then these.
_SCRAMBLE: tl.constexpr = tl.constexpr(16)
_LAST_STRIPE: tl.constexpr = tl.constexpr(17)
_MERGE: tl.constexpr = tl.constexpr(18)
_INITIAL_ROW: tl.constexpr = tl.constexpr(19)
_SCRAMBLE_PRIME: tl.constexpr = tl.constexpr(_PRIME32_1)


def scratch_shape(num_blocks: int, block_bytes: int) -> tuple[int, int, int]:
    """Of the int64 scratch of `block_digests`."""
    return num_blocks, -(-block_bytes // CHUNK_BYTES), 8


def block_digests(memory: torch.Tensor, blocks: torch.Tensor, sums: torch.Tensor, digests: torch.Tensor) -> None:
    block_bytes, num_blocks = memory.shape[1], len(blocks)
    if num_blocks == 0:
        return
    assert block_bytes >= MIN_BLOCK_BYTES
    assert block_bytes % 8 == memory.stride(0) % 8 == 0
    assert memory.dtype == torch.uint8
    assert sums.shape == scratch_shape(num_blocks, block_bytes)
    words, keys = memory.view(torch.int64), _keys(memory.device)
    num_chunks, num_stripes = sums.shape[1], (block_bytes - 1) // 64
    _sum_chunks[(num_blocks, triton.cdiv(num_chunks, _TILE_CHUNKS))](
        words, blocks, keys, sums, words.stride(0), block_bytes // 8, num_chunks, num_stripes,
        TILE=_TILE_CHUNKS, num_warps=4,
    )  # fmt: skip
    _chain[(triton.cdiv(num_blocks, _TILE_BLOCKS),)](
        sums, keys, digests, num_blocks, num_chunks, _signed(block_bytes * _PRIME64_1),
        TILE=_TILE_BLOCKS, UNROLLED=_UNROLLED_CHUNKS, num_warps=1,
    )  # fmt: skip


def _signed(value: int) -> int:
    """The 64 lowest bits of `value` as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """# int64 [20, 8]"""

    def words(offset: int) -> list[int]:
        return [int.from_bytes(_SECRET[place : place + 8], "little") for place in range(offset, offset + 64, 8)]

    rows = [words(8 * stripe) for stripe in range(16)]
    rows += [words(192 - 64), words(192 - 64 - 7), words(11), list(_INITIAL)]
    return torch.tensor([[_signed(word) for word in row] for row in rows], device=device)


@triton.jit
def _products(data, key):
    """Of the halves of each 64-bit word."""
    mixed = data ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def _swap_neighbours(lanes, ROWS: tl.constexpr):
    """Lane 2i with lane 2i + 1. # [ROWS, 8]"""
    even, odd = tl.split(tl.reshape(lanes, (ROWS, 4, 2)))
    return tl.reshape(tl.join(odd, even), (ROWS, 8))


@triton.jit
def _sum_chunks(
    words, blocks, keys, sums, block_stride, num_words, num_chunks, num_stripes, TILE: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    words = (words + block * block_stride).to(tl.pointer_type(tl.uint64))
    keys = keys.to(tl.pointer_type(tl.uint64))
    lane = tl.arange(0, 8)
    chunks = tl.program_id(1) * TILE + tl.arange(0, TILE)
    products = tl.zeros((TILE, 8), tl.uint64)
    data = tl.zeros((TILE, 8), tl.uint64)
    # Four threads read the 64 bytes of a stripe and sum their own lanes: no thread needs another's sums.
    for stripe in tl.static_range(16):
        stripes = chunks * 16 + stripe
        summed = (stripes < num_stripes)[:, None] & (lane < 8)[None, :]
        key = tl.load(keys + (stripe * 8 + lane))[None, :]
        found = tl.load(words + stripes[:, None] * 8 + lane[None, :], mask=summed, other=0)
        products += tl.where(summed, _products(found, key), 0)
        data += found

    last = (chunks == num_chunks - 1)[:, None] & (lane < 8)[None, :]
    ending = tl.load(words + (num_words - 8 + lane)[None, :] + tl.zeros_like(chunks)[:, None], mask=last, other=0)
    key = tl.load(keys + (_LAST_STRIPE * 8 + lane))[None, :]
    products += tl.where(last, _products(ending, key), 0)
    data += ending

    place = (index * num_chunks + chunks)[:, None] * 8 + lane[None, :]
    total = products + _swap_neighbours(data, TILE)
    tl.store(sums + place, total.to(tl.int64, bitcast=True), mask=(chunks < num_chunks)[:, None] & (lane < 8)[None, :])


@triton.jit
def _scramble(accumulators, key):
    return (accumulators ^ (accumulators >> 47) ^ key) * _SCRAMBLE_PRIME


@triton.jit(do_not_specialize=["num_blocks"])
def _chain(sums, keys, digests, num_blocks, num_chunks, length_product, TILE: tl.constexpr, UNROLLED: tl.constexpr):
    lane = tl.arange(0, 8)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (blocks < num_blocks)[:, None] & (lane < 8)[None, :]
    keys = keys.to(tl.pointer_type(tl.uint64))
    place = sums.to(tl.pointer_type(tl.uint64)) + (blocks.to(tl.int64) * num_chunks)[:, None] * 8 + lane[None, :]
    scramble = tl.load(keys + (_SCRAMBLE * 8 + lane))[None, :]
    accumulators = tl.load(keys + (_INITIAL_ROW * 8 + lane))[None, :] + tl.zeros((TILE, 8), tl.uint64)
    num_unrolled = (num_chunks - 1) // UNROLLED * UNROLLED
    for first in range(0, num_unrolled, UNROLLED):
        for chunk in tl.static_range(UNROLLED):
            sums_of_chunk = tl.load(place + (first + chunk) * 8, mask=inside, other=0)
            accumulators = _scramble(accumulators + sums_of_chunk, scramble)
    for chunk in range(num_unrolled, num_chunks - 1):
        accumulators = _scramble(accumulators + tl.load(place + chunk * 8, mask=inside, other=0), scramble)
    accumulators += tl.load(place + (num_chunks - 1) * 8, mask=inside, other=0)

    even, odd = tl.split(tl.reshape(accumulators ^ tl.load(keys + (_MERGE * 8 + lane))[None, :], (TILE, 4, 2)))
    digest = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=1) + length_product.to(tl.uint64)
    digest ^= digest >> 37
    digest *= 0x165667919E3779F9
    digest ^= digest >> 32
    tl.store(digests + blocks, digest.to(tl.int64, bitcast=True), mask=blocks < num_blocks)
