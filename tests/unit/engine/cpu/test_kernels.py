"""Every C kernel agrees with plain torch on random shapes, dtypes, block tables and lengths, by seed."""

from __future__ import annotations

import platform
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from core.step import ScheduledChunk
from engine.batch import Batch
from engine.cpu.attention import NativeAttention
from engine.cpu.build import FLAGS, SOURCES, TARGETS, Target, build, find_compiler
from engine.cpu.kernels import Kernels, compiler_flags_of_cpu
from engine.cpu.quantized_linear import NativeQuantizedLinear
from model_files.catalogue import default_cache_dir
from tests.support.c_kernels import need_compiler, portable_tiles, targets_here
from tests.unit.engine.cpu.kernel_cases import TOLERANCE, AttentionCase, all_differences, matrix_of

HEAD_DIMS = {8: (16, 32, 48, 64, 80, 128, 256), 16: (32, 64, 96, 128, 256)}


def targets() -> list[Target]:
    """The targets that this CPU runs, with the forms of their kernels for other CPUs.

    `wide`: vectors of AVX-512's width, which the compiler splits if needed; `tiles`: AMX's tiles in plain C; `widened`:
    products for CPUs with slow bfloat16 instructions.
    """
    here = targets_here()
    narrow = next(target for target in here if target.lanes == 8)
    slow = [widened(target) for target in here if "avx512_bf16" in target.cpu_flags]
    return [*here, replace(narrow, name=f"{narrow.name}-wide", lanes=16), portable_tiles(), *slow]


def widened(target: Target) -> Target:
    flags = (*target.compiler_flags, "-DWIDEN_BF16")
    return replace(target, name=f"{target.name}-widened", compiler_flags=flags)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=targets(), ids=lambda target: target.name)
def built(request: pytest.FixtureRequest) -> tuple[Target, Kernels]:
    """Compiled once for each state of the sources, the flags and the compiler, as for a worker."""
    need_compiler()
    target: Target = request.param
    # Only the target that this CPU would get is compiled with the real flags; the others compile faster.
    flags = compiler_flags_of_cpu() if target.name == targets()[0].name else ("-O1",)
    flags = () if "-O1" in target.compiler_flags else flags
    return target, Kernels(build(target, default_cache_dir(), flags))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_kernel_agrees_with_torch(built: tuple[Target, Kernels], dtype: str) -> None:
    target, kernels = built
    found = all_differences(kernels, dtype, HEAD_DIMS[target.lanes], range(21))
    assert [difference for difference in found if not difference[1] <= TOLERANCE[dtype]] == []
    assert any(difference > 0 for _, difference in found), "equal to the last bit: torch was compared with itself"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_a_row_gets_the_same_bits_by_several_threads_alone_and_in_any_chunk(
    built: tuple[Target, Kernels], dtype: str, seed: int
) -> None:
    """Chunks of two tokens or more; a chunk of one token is a decode. Some chunks cross 256 or 512 positions."""
    case, draw, first_row = AttentionCase(seed, dtype, 64, longest=600), random.Random(seed), 0
    together, backend = attend(case, built[1]), case.native(built[1], case.pool())
    assert torch.equal(attend(case, built[1], num_threads=3), together)
    for number, chunk in enumerate(case.chunks):
        rows = range(first_row, first_row + chunk.num_tokens)
        first_row += chunk.num_tokens
        whole = attend_rows(backend, case, chunk, rows)
        assert torch.equal(whole, together[rows.start : rows.stop])
        if chunk.num_tokens >= 4:
            cut = draw.randrange(2, chunk.num_tokens - 1)
            parts = [
                attend_rows(backend, case, case.part_of(number, part), rows[part])
                for part in (slice(0, cut), slice(cut, None))
            ]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("factor", "tolerance"), [(10.0, 1e-3), (1e10, float("inf"))])
def test_large_scores_do_not_overflow(built: tuple[Target, Kernels], factor: float, tolerance: float) -> None:
    """One key takes all the weight. With 1e10, rounding may decide which of two keys does."""
    case = AttentionCase(1, "float32", 64)
    case.heads *= factor
    case.contents *= factor
    attended = attend(case, built[1])
    assert attended.isfinite().all()
    assert attended.abs().max() <= 6 * factor, "a weighted mean cannot be larger than every value"
    assert case.differences(built[1])[0][1] <= tolerance


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_quantized_product_of_a_number_that_is_not_finite_is_not_finite(
    built: tuple[Target, Kernels], value: float, bits: int
) -> None:
    multiply = NativeQuantizedLinear(built[1], 1).prepare(matrix_of(torch.randn(50, 96), bits, torch.float32), None)
    inputs = torch.randn(3, 96)
    others = multiply(inputs)[::2]
    for column in range(96):
        changed = inputs.clone()
        changed[1, column] = value
        product = multiply(changed)
        assert not product[1].isfinite().any(), column
        assert torch.equal(product[::2], others), "other rows do not change"


def attend_rows(backend: NativeAttention, case: AttentionCase, chunk: ScheduledChunk, rows: range) -> torch.Tensor:
    """A chunk's attention, from those rows of the case."""
    place = slice(rows.start, rows.stop)
    rotation = replace(case.rotation, cosine=case.rotation.cosine[place], sine=case.rotation.sine[place])
    return backend.begin_step(Batch.of([chunk]), rotation).attend(case.heads[place].clone(), 0).clone()


def attend(case: AttentionCase, kernels: Kernels, num_threads: int = 1) -> torch.Tensor:
    backend = case.native(kernels, case.pool(), num_threads)
    return backend.begin_step(case.batch, case.rotation).attend(case.heads.clone(), 0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
def test_kernels_of_instructions_that_this_cpu_lacks_are_correct_c() -> None:
    """The tests above compile this CPU's targets. On any x86 the compiler checks the instructions of all targets.

    A widened target has no line that neither itself nor `avx512` has.
    """
    need_compiler()
    for target in TARGETS:
        if target in targets_here():
            continue
        flags = [*FLAGS, *target.compiler_flags, f"-DLANES={target.lanes}", "-fsyntax-only"]
        done = subprocess.run(
            [find_compiler(), *flags, *SOURCES.glob("*.c")], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{target.name}: {done.stderr}"
