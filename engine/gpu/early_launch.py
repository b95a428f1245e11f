"""Early launches: a kernel begins while the kernel before still ends (CUDA's programmatic dependent launch).

    kernel k        begin | read weights | follow | inputs -> outputs |
    kernel k + 1            begin | read weights | follow ............. | inputs -> outputs |

Kernel k + 1 begins as soon as each program of kernel k has begun and there is room. `follow` waits until all kernels
before have ended. Law: a kernel that is launched early calls `follow` before it writes, and before it reads what a
kernel of the step writes. Before `follow` it may read weights and the uploaded inputs of the step, because the first
kernel of a step is not launched early.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.gpu.attention_tiles import INTERPRETED

_LEAST_CAPABILITY = 90  # Hopper


@triton.jit
def follow(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for the kernels before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch() -> dict[str, bool]:
    """The arguments of an early launch, where the device has such launches."""
    return {"EARLY": True, "launch_pdl": True} if _available() else {"EARLY": False}


@functools.cache
def _available() -> bool:
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _LEAST_CAPABILITY)
