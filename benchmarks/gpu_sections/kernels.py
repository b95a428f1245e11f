"""Every operator against its reference, and what a runner does with them.

The references of `engine/gpu/reference.py` compute in float32 on the CPU, on float32 copies of the same inputs. Results
begin as NaN, and so does every slot of the pool outside the contexts: an operator must write all of its result, nothing
else, and use no other slot. Several processes share the cases, because most of the time is compilation.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.gpu_sections import copy_checks, fp8_checks, kv_checks, runner_checks
from benchmarks.gpu_sections.paged import (
    LAYOUTS,
    Shape,
    chunks_of,
    empty_pool,
    fill_contexts,
    poison,
    random_heads,
    scratch,
)
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from engine.fp8 import Fp8Matrix, dequantized
from engine.gpu import reference
from engine.gpu.ops import ops

# Largest relative error of a result, as a whole: norm(found - expected) / norm(expected).
MOST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
MAX_PROCESSES = 6
THREADS_OF_A_PROCESS = 2  # for the references
SHARE_OF_TIME = 0.6  # of the section; the other checks follow
SHAPES = [
    Shape(num_kv_heads=8, group=4, head_dim=128),
    Shape(num_kv_heads=3, group=3, head_dim=64),
    Shape(num_kv_heads=2, group=8, head_dim=128, block_size=32),
    Shape(num_kv_heads=4, group=1, head_dim=80),
    Shape(num_kv_heads=2, group=5, head_dim=96, block_size=64),
    Shape(num_kv_heads=2, group=2, head_dim=256),
]
DTYPES = ("bfloat16", "float32")
TINY_SHAPES = [Shape(num_kv_heads=2, group=3, head_dim=16)]
HIDDEN_SIZES = [(576, 1536), (4096, 14336)]  # (hidden size, intermediate size)
TINY_HIDDEN_SIZES = [(48, 112)]
DECODE_STARTS = [0, 14, 15, 16, 100, 1023, 4095, 2500]
PREFILLS = [(0, 700), (0, 2), (37, 64), (16, 65), (1000, 130), (2047, 3)]  # (start, tokens)


class Found(NamedTuple):
    operator: str
    dtype: str
    error: float  # infinite: not written, or written where nothing belongs


@dataclass(frozen=True, slots=True)
class Case:
    operator: str
    dtype: str
    layout: str
    shape: Shape
    hidden: tuple[int, int] = (0, 0)


def cases(tiny: bool) -> Iterator[Case]:
    shapes = TINY_SHAPES if tiny else SHAPES
    for shape, dtype in itertools.product(shapes, DTYPES if not tiny else ("float32",)):
        for layout in LAYOUTS:
            yield Case("attention", dtype, layout, shape)
    if not tiny:
        yield Case("attention", "float16", LAYOUTS[0], shapes[0])
    for hidden, dtype in itertools.product(TINY_HIDDEN_SIZES if tiny else HIDDEN_SIZES, DTYPES):
        yield Case("elementwise", dtype, "", shapes[0], hidden)
    for hidden in TINY_HIDDEN_SIZES if tiny else HIDDEN_SIZES:
        yield Case("fp8", "bfloat16", "", shapes[0], hidden)


def run(section: Section) -> None:
    found = list(check_all(section))
    for operator, dtype in sorted({(result.operator, result.dtype) for result in found}):
        errors = [result.error for result in found if (result.operator, result.dtype) == (operator, dtype)]
        measure = f"{operator}, {dtype}: largest error of {len(errors)} cases"
        section.add(Line(measure, max(errors), "", most=MOST_ERROR[dtype]))
    copy_checks.run(section)
    runner_checks.run(section)
    fp8_checks.run(section)
    kv_checks.run(section)


def check_all(section: Section) -> Iterator[Found]:
    wanted = list(cases(section.rehearse))
    until = time.monotonic() + SHARE_OF_TIME * section.time_left()
    num_processes = 1 if section.rehearse else min(MAX_PROCESSES, os.cpu_count() or 1)
    # A forked process could not use the device.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as processes:
        futures = {case: processes.submit(check_in_process, case, str(section.device)) for case in wanted}
        for case, future in futures.items():
            try:
                yield from future.result(max(until - time.monotonic(), 0.0))
            except TimeoutError:
                section.note(f"{case}: not measured, for lack of time")
                future.cancel()
            except Exception as error:  # noqa: BLE001 (the other cases go on)
                section.note(f"{case}: {type(error).__name__}: {error}")
                yield Found(case.operator, case.dtype, float("inf"))


def check_in_process(case: Case, device_name: str) -> list[Found]:
    torch.set_num_threads(THREADS_OF_A_PROCESS)
    return list(check(case, torch.device(device_name)))


def check(case: Case, device: torch.device) -> Iterator[Found]:
    torch.manual_seed(zlib.crc32(repr(case).encode()))
    dtype = getattr(torch, case.dtype)
    checks: list[tuple[str, Callable[..., float]]] = [
        ("add_rms_norm", check_add_rms_norm),
        ("silu_and_multiply", check_silu_and_multiply),
    ]
    if case.operator == "fp8":
        checks = [("fp8_linear", check_fp8_linear)]
    if case.operator == "attention":
        checks = [
            ("rope_and_cache", check_rope_and_cache),
            ("decode_attention", check_decode_attention),
            ("prefill_attention", check_prefill_attention),
        ]
    for operator, function in checks:
        yield Found(operator, case.dtype, function(case, dtype, device))


def check_add_rms_norm(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    errors = []
    for num_rows, updated in ((1, False), (33, True)):
        hidden, update = (torch.randn(num_rows, case.hidden[0], device=device).to(dtype) for _ in range(2))
        weight, normed = torch.randn(case.hidden[0], device=device).to(dtype), nan_like(hidden)
        # The kernel rounds the sum to the type of hidden and norms the sum; so does the reference.
        summed, expected = on_cpu(hidden), nan_like(on_cpu(hidden))
        reference.add_rms_norm(summed, on_cpu(update) if updated else None, on_cpu(weight), 1e-5, expected)
        ops.add_rms_norm(hidden, update if updated else None, weight, 1e-5, normed)
        errors += [error_of(normed, expected), error_of(hidden, summed)]
    return max(errors)


def check_silu_and_multiply(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    gate_up = torch.randn(33, 2 * case.hidden[1], device=device).to(dtype)
    activated = torch.full((33, case.hidden[1]), float("nan"), dtype=dtype, device=device)
    expected = nan_like(on_cpu(activated))
    reference.silu_and_multiply(on_cpu(gate_up), expected)
    ops.silu_and_multiply(gate_up, activated)
    return error_of(activated, expected)


def check_fp8_linear(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    errors = []
    matrix = Fp8Matrix(case.hidden[1], case.hidden[0], dtype, device)
    matrix.put(0, torch.randn(case.hidden[1], case.hidden[0], device=device) * case.hidden[0] ** -0.5)
    for num_rows, biased in ((1, False), (17, True), (200, False)):
        inputs = torch.randn(num_rows, case.hidden[0], device=device).to(dtype)
        bias = torch.randn(case.hidden[1], device=device).to(dtype) if biased else None
        outputs = torch.full((num_rows, case.hidden[1]), float("nan"), dtype=dtype, device=device)
        weight = dequantized(matrix.codes.cpu(), matrix.scales.cpu(), torch.float32)
        expected = torch.nn.functional.linear(on_cpu(inputs), weight, None if bias is None else on_cpu(bias))
        ops.fp8_linear(inputs, matrix.codes, matrix.scales, bias, outputs)
        errors.append(error_of(outputs, expected))
    return max(errors)


def check_rope_and_cache(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Tokens at random positions go to random slots. Every other slot keeps its NaN."""
    shape, num_tokens, num_blocks = case.shape, 70, 24
    pool = empty_pool(shape, num_blocks, case.layout, dtype, device)
    poison(pool)
    heads = random_heads(shape, num_tokens, dtype, device)
    angles = torch.rand(512, shape.head_dim // 2) * 6.3
    positions = torch.randint(0, 512, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(num_blocks * shape.block_size)[:num_tokens].to(torch.int32)
    expected_heads, expected_pool = on_cpu(heads), on_cpu(pool)
    reference.rope_and_cache(expected_heads, angles.cos(), angles.sin(), positions, slots, expected_pool, 0)
    cosine, sine = angles.cos().to(device), angles.sin().to(device)
    ops.rope_and_cache(heads, cosine, sine, positions.to(device), slots.to(device), pool, 0)
    queries = slice(0, shape.num_heads)
    return max(error_of(heads[:, queries], expected_heads[:, queries]), error_of(pool, expected_pool))


def check_decode_attention(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    shape, starts = case.shape, DECODE_STARTS if device.type == "cuda" else [0, 15, 16, 40]
    num_blocks = sum(-(-(start + 1) // shape.block_size) for start in starts) + 5
    pool = empty_pool(shape, num_blocks, case.layout, dtype, device)
    poison(pool)
    chunks = chunks_of(starts, [1] * len(starts), shape.block_size, num_blocks, device)
    fill_contexts(pool, chunks)
    heads = random_heads(shape, len(starts) + 1, dtype, device)  # the last row belongs to no chunk
    attended = heads.new_full((len(starts) + 1, shape.num_heads, shape.head_dim), float("nan"))
    expected = nan_like(on_cpu(attended))
    arguments = (chunks.block_ids, chunks.first_row, chunks.first_block, chunks.num_positions)
    partial = scratch(shape, len(starts), max(starts) + 1, device)
    cpu_arguments = [tensor.cpu() for tensor in arguments]
    attend = reference.REFERENCES["decode_attention"]
    attend(on_cpu(heads), on_cpu(pool), 0, *cpu_arguments, partial.cpu(), expected)
    ops.decode_attention(heads, pool, 0, *arguments, partial, attended)
    return error_of(attended, expected)


def check_prefill_attention(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    shape, prefills = case.shape, PREFILLS if device.type == "cuda" else [(0, 20), (17, 3)]
    starts, counts = [start for start, _ in prefills], [count for _, count in prefills]
    num_blocks = sum(-(-sum(prefill) // shape.block_size) for prefill in prefills) + 5
    pool = empty_pool(shape, num_blocks, case.layout, dtype, device)
    poison(pool)
    chunks = chunks_of(starts, counts, shape.block_size, num_blocks, device)
    fill_contexts(pool, chunks)
    heads = random_heads(shape, chunks.num_rows + 1, dtype, device)
    attended = heads.new_full((chunks.num_rows + 1, shape.num_heads, shape.head_dim), float("nan"))
    expected = nan_like(on_cpu(attended))
    arguments = (
        *(chunks.block_ids, chunks.first_row, chunks.first_block, chunks.start, chunks.num_tokens),
        *chunks.tiles(),
    )
    cpu_arguments = [tensor.cpu() for tensor in arguments]
    attend = reference.REFERENCES["prefill_attention"]
    attend(on_cpu(heads), on_cpu(pool), 0, *cpu_arguments, expected)
    ops.prefill_attention(heads, pool, 0, *arguments, attended)
    return error_of(attended, expected)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of the result as a whole; infinite if the two are not written at the same places."""
    found = on_cpu(found)
    written = ~expected.isnan()
    if not torch.equal(written, ~found.isnan()):
        return float("inf")
    difference = (found[written] - expected[written]).double().norm()
    return float(difference / expected[written].double().norm())
