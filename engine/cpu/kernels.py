"""The C kernels as Python callables: structs, argument types, and the choice of a library for this machine.

Every call releases the GIL. Tensors are passed by address: the caller must keep them alive and contiguous.
"""

from __future__ import annotations

import ctypes
import enum
import logging
from pathlib import Path

from engine.cpu.build import AMX, CompilerFailed, NativeUnavailable, build, find_compiler, fitting_targets
from engine.cpu.features import cpu_flags, has_many_l1_miss_buffers, request_tiles, widens_bf16

_log = logging.getLogger(__name__)

_POINTER, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_F32, _F64 = ctypes.c_float, ctypes.c_double


class KVCacheStruct(ctypes.Structure):
    """`struct kv_cache` of kv_cache.h: the pool and the model's heads. Strides in bytes."""

    _fields_ = (
        ("base", _POINTER),
        *((name, _I64) for name in ("block_stride", "layer_stride", "value_stride", "head_stride", "row_stride")),
        *((name, _I32) for name in ("block_size", "head_dim", "num_heads", "num_kv_heads", "is_bf16", "num_threads")),
        ("scale", _F32),
    )


class PagedBatchStruct(ctypes.Structure):
    """`struct paged_batch` of kv_cache.h: pointers to arrays, int64 for `first_block`, int32 for the others."""

    _fields_ = (
        ("num_sequences", _I64),
        *((name, _POINTER) for name in ("tables", "first_block", "first_row", "num_tokens", "start")),
    )


class StepAttentionStruct(ctypes.Structure):
    """`struct step_attention` of step_attention.h: pointers to the cache's struct and to arrays, and two batches."""

    _fields_ = (
        *((name, _POINTER) for name in ("cache", "cosine", "sine", "slots")),
        ("num_rows", _I64),
        *((name, PagedBatchStruct) for name in ("decodes", "prefills")),
    )


class QuantizedMatrixStruct(ctypes.Structure):
    """`struct quantized_matrix` of quantized.h: pointers to codes, scales, minimums and bias."""

    _fields_ = (
        *((name, _POINTER) for name in ("codes", "scales", "minimums", "bias")),
        *((name, _I64) for name in ("num_rows", "num_columns", "num_groups")),
    )


_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "tandem_attend": ((_POINTER, _POINTER, _POINTER, _I64), ctypes.c_int),
    "tandem_add_rms_norm": (
        (_POINTER, _POINTER, _POINTER, _POINTER, _I64, _I64, _F32, ctypes.c_int, ctypes.c_int),
        None,
    ),
    "tandem_quantized_linear": (
        (_POINTER, _POINTER, _POINTER, _I64, _POINTER, ctypes.c_int, ctypes.c_int),
        None,
    ),
    "tandem_quantized_rows": ((_POINTER, _POINTER, _I64, _POINTER, ctypes.c_int), ctypes.c_int),
    "tandem_dequantize": ((_POINTER, _I64, ctypes.c_int, _POINTER, ctypes.c_int), None),
    "tandem_draw_token": ((_POINTER, _POINTER, _I64, _F32, _I64, _F64, _F64, ctypes.c_uint64, _POINTER), _I64),
    "tandem_silu_and_multiply": ((_POINTER, _POINTER, _I64, _I64, ctypes.c_int, ctypes.c_int), None),
}
# Present only in a library for AVX-512 or AMX.
_BF16_LINEAR = (_POINTER, _POINTER, _POINTER, _POINTER, _I64, _I64, _I64, ctypes.c_int, ctypes.c_int)


class Ending(enum.IntEnum):
    """`enum ending` of product.h: how a product with a packed matrix turns its sums into results."""

    TO_BF16 = 0
    TO_FLOAT = 1
    TO_GATED = 2


class Kernels:
    """One loaded library. `attend` returns 0, or 1 if memory ran out."""

    def __init__(self, library: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(library))
            for name, (arguments, result) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.argtypes, function.restype = arguments, result
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{library} does not load: {error}") from error
        self.library = library
        self.attend = loaded.tandem_attend
        self.add_rms_norm = loaded.tandem_add_rms_norm
        self.quantized_linear = loaded.tandem_quantized_linear
        self.quantized_rows = loaded.tandem_quantized_rows
        self.dequantize = loaded.tandem_dequantize
        self.draw_token = loaded.tandem_draw_token
        self.silu_and_multiply = loaded.tandem_silu_and_multiply
        self.bf16_linear = getattr(loaded, "tandem_bf16_linear", None)
        if self.bf16_linear is not None:
            self.bf16_linear.argtypes, self.bf16_linear.restype = _BF16_LINEAR, None


_AMX_REFUSED = "this system refuses AMX's tile registers (arch_prctl), so AVX-512 computes bfloat16"


def load_kernels(head_dim: int, cache_dir: Path) -> Kernels | None:
    """The best kernels that the compiler builds for this CPU and `head_dim`, or None; the log gives the reason."""
    reason: NativeUnavailable | None = None
    flags = usable_flags()
    if flags != cpu_flags():
        _log.warning(_AMX_REFUSED)
    try:
        for target in fitting_targets(flags, head_dim):
            try:
                return Kernels(build(target, cache_dir, compiler_flags_of_cpu()))
            except CompilerFailed as error:
                reason = error
                _log.warning("the C kernels do not compile for %s: %s", target.name, error)
    except NativeUnavailable as error:
        reason = error
    _log.warning("no C kernels: %s. The engine uses plain torch, which is slower.", reason)
    return None


def usable_flags() -> frozenset[str]:
    """The CPU's features that this process may use: without those of AMX if the system refuses its registers."""
    flags = cpu_flags()
    return flags - AMX if flags >= AMX and not request_tiles() else flags


def compiler_flags_of_cpu() -> tuple[str, ...]:
    """What differs between CPUs with the same instructions."""
    fetching = ("-DFETCH_LOCALITY=0",) if has_many_l1_miss_buffers() else ()
    return (*fetching, *(("-DWIDEN_BF16",) if widens_bf16() else ()))


def describe_kernels(head_dim: int) -> tuple[str, str]:
    """The kernels that this CPU gets, without compiling them, and what keeps it from better ones, or ""."""
    flags = usable_flags()
    try:
        find_compiler()
        name = fitting_targets(flags, head_dim)[0].name
    except NativeUnavailable as error:
        return "plain torch", str(error)
    return f"C kernels for {name}", "" if flags == cpu_flags() else _AMX_REFUSED
