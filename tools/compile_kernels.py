"""Compile the Triton kernels for sm_90 without a GPU: `python -m tools.compile_kernels [--all] [NAME ...]`.

Prints a JSON array: for each kernel that a variant of `tools/kernel_variants.py` launches, what the code uses. NAME
picks the variants whose name contains it. A launch compiles and stops there. Triton's cache is where
TRITON_CACHE_DIR says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HOPPER = 90
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9._]*)", re.MULTILINE)


@dataclass(frozen=True)
class CompiledKernel:
    variant: str
    kernel: str
    seconds: float  # of the variant, all its kernels together
    registers: int
    stack_bytes: int  # spilled registers, or an array that is not in registers
    local_bytes: int
    shared_bytes: int  # static and dynamic
    num_warps: int
    missing: list[str] = field(default_factory=list)  # instructions of the variant that this kernel lacks


class _Hopper:
    """In place of Triton's driver: names the target, and has no device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_variant(name: str) -> list[CompiledKernel]:
    """Compile the kernels of the variant of this name. Raises what the compiler raises."""
    import triton
    from triton.runtime.jit import JITFunction

    from tools.kernel_variants import variants

    triton.runtime.driver.set_active(_Hopper())
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    (variant,) = (each for each in variants() if each.name == name)
    started = time.monotonic()
    JITFunction.run = compile_only
    try:
        variant.launch()
    finally:
        JITFunction.run = run
    seconds = round(time.monotonic() - started, 2)
    unique = {kernel.hash: kernel for kernel in compiled}
    return [_describe(variant.name, variant.instructions, seconds, kernel) for kernel in unique.values()]


def _describe(name: str, instructions: tuple[str, ...], seconds: float, kernel: Any) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        found = _RESOURCES.search(_tool("cuobjdump", "--dump-resource-usage", cubin.name))
        assert found is not None, f"cuobjdump names no resources of {name}"
        registers, stack, shared, local = map(int, found.groups())
        used = set(_INSTRUCTION.findall(_tool("cuobjdump", "-sass", cubin.name))) if instructions else set()
    missing = [each for each in instructions if not any(one.startswith(each) for one in used)]
    shared = max(shared, kernel.metadata.shared)
    return CompiledKernel(
        name, kernel.metadata.name, seconds, registers, stack, local, shared, kernel.metadata.num_warps, missing
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every variant, not the chosen ones alone")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

    from tools.kernel_variants import variants

    chosen = [each.name for each in variants() if options.all or options.names or each.in_ci]
    if options.names:
        chosen = [name for name in chosen if any(wanted in name for wanted in options.names)]
    # A forked process has torch already: importing it takes longer than to compile most kernels.
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        found = [kernel for kernels in pool.imap(compile_variant, chosen) for kernel in kernels]
    json.dump([asdict(kernel) for kernel in found], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
