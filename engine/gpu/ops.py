"""The operators of the GPU engine, `torch.ops.tandem.*`: their contracts, and their implementations by device.

    T tokens of the step    C chunks of one kind    Hq query heads    Hkv KV heads    G = Hq / Hkv    D head size

Every operator writes into tensors of its caller and returns nothing: a CUDA graph finds the same addresses at each
replay. On the meta device an operator does nothing, so a step runs there without memory. On a CUDA device the Triton
kernels of this folder compute; on a CPU the references of `engine/gpu/reference.py`, or the same kernels under Triton's
interpreter if TRITON_INTERPRET is set.

The pool is [num_blocks, num_layers, 2, Hkv, block_size, D] with any strides but the last, which is 1. A slot is the
place of a token: block * block_size + place in the block. A pool of float8_e4m3fn has scales, float32 [num_blocks,
num_layers, 2, Hkv, block_size] with any strides but the last, which is 1: a key or value is code * scale.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from engine.gpu.tile_sizes import FEW_ROWS as FEW_ROWS
from engine.gpu.tile_sizes import FEW_ROWS_COLUMNS as FEW_ROWS_COLUMNS
from engine.gpu.tile_sizes import FEW_ROWS_TILE as FEW_ROWS_TILE
from engine.gpu.tile_sizes import PREFILL_TILE_TOKENS as PREFILL_TILE_TOKENS

CONTRACTS = {
    # hidden += update (if given); normed = hidden / sqrt(mean(hidden^2) + epsilon) * weight, the mean in float32.
    # hidden, update, normed: [T, hidden size]; weight: [hidden size]
    "add_rms_norm": "(Tensor(a!) hidden, Tensor? update, Tensor weight, float epsilon, Tensor(b!) normed) -> ()",
    # activated = silu(gate) * up. gate_up: [T, 2 * size], gate before up; activated: [T, size]
    "silu_and_multiply": "(Tensor gate_up, Tensor(a!) activated) -> ()",
    # outputs = inputs @ weight.T, of at most FEW_ROWS rows. inputs: [T, in]; weight: [out, in]; outputs: [T, out]
    # in is divisible by FEW_ROWS_COLUMNS, out by FEW_ROWS_TILE, the rows of a tile. programs: any number, they share
    # partial: float32 [programs + tiles, T, FEW_ROWS_TILE] scratch; counters: int32 [tiles], zeros before and after
    "multiply_few_rows": (
        "(Tensor inputs, Tensor weight, Tensor(a!) partial, Tensor(b!) counters, Tensor(c!) outputs) -> ()"
    ),
    # Rotate the query heads in place; rotate the keys and write keys and values into their slots of the pool.
    # heads: [T, Hq + 2 * Hkv, D] queries, keys, values; the keys' part of heads may be rotated or left as it is
    # cosine, sine: float32 [positions, D / 2], half-split; positions, slots: int32 [T]
    "rope_and_cache": (
        "(Tensor(a!) heads, Tensor cosine, Tensor sine, Tensor positions, Tensor slots, Tensor(b!) pool, "
        "int layer, Tensor(c!)? scales=None) -> ()"
    ),
    # Attention of chunks of one token, whose keys and values are in the pool.
    # heads: as after rope_and_cache; attended: [T, Hq, D], only the rows first_row are written
    # block_ids: int32 [any]; the blocks of chunk c begin at block_ids[first_block[c]]
    # first_row, first_block, num_positions: int32 [C] row in heads, place in block_ids, positions including its own
    # partial: float32 [C, Hq, num_splits, D + 2] scratch; num_splits is the number of programs that share a context
    "decode_attention": (
        "(Tensor heads, Tensor pool, int layer, Tensor block_ids, Tensor first_row, Tensor first_block, "
        "Tensor num_positions, Tensor(a!) partial, Tensor(b!) attended, Tensor? scales=None) -> ()"
    ),
    # expanded[i] = keys and values of one layer of the block block_ids[i]: some KV heads, code * scale.
    # block_ids: int32 [blocks]; expanded: [blocks, 1, 2, heads, block_size, D] for the KV heads from first_head on
    "expand_kv": (
        "(Tensor pool, Tensor scales, int layer, Tensor block_ids, int first_head, Tensor(a!) expanded) -> ()"
    ),
    # Causal attention of chunks of several tokens, whose keys and values are in a pool without scales.
    # start, num_tokens: int32 [C] position of a chunk's first token, tokens of the chunk; the rest as above
    # tile_chunk, tile_first: int32 [tiles]; a tile is the tokens [tile_first, tile_first + PREFILL_TILE_TOKENS) of its
    # chunk; a negative tile_chunk is no tile
    "prefill_attention": (
        "(Tensor heads, Tensor pool, int layer, Tensor block_ids, Tensor first_row, Tensor first_block, Tensor start, "
        "Tensor num_tokens, Tensor tile_chunk, Tensor tile_first, Tensor(a!) attended) -> ()"
    ),
    # XXH3_64 (seed 0) of blocks. memory: uint8 [num_blocks, block_bytes], block_bytes divisible by 8 and at least 248
    # blocks: int32 [n]; sums: int64 scratch, shape engine.gpu.digests.scratch_shape; digests: int64 [n], as unsigned
    "block_digests": "(Tensor memory, Tensor blocks, Tensor(a!) sums, Tensor(b!) digests) -> ()",
    # codes * scales = inputs, rounded: scales[t] = the largest size in inputs[t] / 448.
    # inputs: [T, in]; codes: float8_e4m3fn [T, in]; scales: float32 [T]
    "quantize_rows": "(Tensor inputs, Tensor(a!) codes, Tensor(b!) scales) -> ()",
    # outputs[t, o] = products[t, o] * token_scales[t] * row_scales[o] + bias[o].
    # products: float32 [T, out]; both scales: float32; bias: [out]; outputs: [T, out]
    "scale_products": (
        "(Tensor products, Tensor token_scales, Tensor row_scales, Tensor? bias, Tensor(a!) outputs) -> ()"
    ),
    # The highest logit of each row, ties to the lowest id. logits: float32 [S, vocab]; ids: int32 [S or more]
    "argmax": "(Tensor logits, Tensor(a!) ids) -> ()",
    # Bias and penalties of rows; `AdjustedRows` in engine/gpu/sampling_plan.py has the shapes.
    # sampled_before: int32 [any]; the token sampled_before[promised[i]] counts as one more token of row i's output
    # saved: float32 [E + A] the raw logits of the entries and of the promised tokens, for restore_logits
    "adjust_logits": (
        "(Tensor(a!) logits, Tensor rows, Tensor first_entry, Tensor token_ids, Tensor counts, Tensor first_bias, "
        "Tensor biases, Tensor penalties, Tensor promised, Tensor sampled_before, Tensor(b!) saved) -> ()"
    ),
    "restore_logits": (
        "(Tensor(a!) logits, Tensor rows, Tensor first_entry, Tensor token_ids, Tensor promised, "
        "Tensor sampled_before, Tensor saved) -> ()"
    ),
    # ids[rows[i]] = the token that keys[i] draws from row rows[i], as `draw_token` of engine/sampling.py chooses it.
    # `DrawnRows` in engine/gpu/sampling_plan.py has the shapes of rows, top_k, settings and keys, and tells which rows
    # are listed. list_size is above every top_k.
    "draw_tokens": (
        "(Tensor logits, Tensor rows, int num_listed, int list_size, Tensor top_k, Tensor settings, Tensor keys, "
        "Tensor(a!) ids) -> ()"
    ),
    # Log-probabilities of the tokens ids[rows[i]] and of the num_best most likely tokens of each of these rows.
    # rows: int32 [L]; best_ids: int32 [L, num_best or more]; logprobs: float32 [L, 1 + num_best or more], the sampled
    # token's first; any strides but the last, which is 1
    "find_logprobs": (
        "(Tensor logits, Tensor rows, Tensor ids, int num_best, Tensor(a!) best_ids, Tensor(b!) logprobs) -> ()"
    ),
}

_library = torch.library.Library("tandem", "DEF")
for _name, _schema in CONTRACTS.items():
    _library.define(_name + _schema)
    _library.impl(_name, lambda *_: None, "Meta")


def implement(device: str, implementations: dict[str, Callable[..., None]]) -> None:
    """Give operators their implementation on "CPU" or "CUDA". Each at most once."""
    for name, function in implementations.items():
        _library.impl(name, function, device)


def _implement_all() -> None:
    from engine.gpu import reference, sampling_reference

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernels: dict[str, Any] = {}
    if interpreted or torch.cuda.is_available():
        from engine.gpu.kernels import KERNELS

        kernels = KERNELS
    references = reference.REFERENCES | sampling_reference.REFERENCES
    implement("CPU", references | (kernels if interpreted else {}))
    if torch.cuda.is_available():
        implement("CUDA", kernels)


_implement_all()
ops: Any = torch.ops.tandem
