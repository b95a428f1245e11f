"""The Triton kernels behind the operators of `engine/gpu/ops.py`, by the operator's name."""

from __future__ import annotations

from collections.abc import Callable

from engine.gpu import digests, elementwise, fp8_kernels, sampling_kernels
from engine.gpu.decode_attention import decode_attention
from engine.gpu.draw_kernels import draw_tokens
from engine.gpu.expand_kv import expand_kv
from engine.gpu.few_rows import multiply_few_rows
from engine.gpu.prefill_attention import prefill_attention
from engine.gpu.rope_cache import rope_and_cache

KERNELS: dict[str, Callable[..., None]] = {
    "add_rms_norm": elementwise.add_rms_norm,
    "silu_and_multiply": elementwise.silu_and_multiply,
    "block_digests": digests.block_digests,
    "multiply_few_rows": multiply_few_rows,
    "rope_and_cache": rope_and_cache,
    "decode_attention": decode_attention,
    "expand_kv": expand_kv,
    "prefill_attention": prefill_attention,
    "quantize_rows": fp8_kernels.quantize_rows,
    "scale_products": fp8_kernels.scale_products,
    "argmax": sampling_kernels.argmax,
    "adjust_logits": sampling_kernels.adjust_logits,
    "restore_logits": sampling_kernels.restore_logits,
    "draw_tokens": draw_tokens,
    "find_logprobs": sampling_kernels.find_logprobs,
}
