"""Products by tiles, which few machines have: here by emulated instructions, and taken only where they are right."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from engine import native_tiles, torch_runner
from engine.cpu import cpu_flags, cpu_has_amx_bf16, permit_tiles
from engine.native_build import TARGETS, CompilerFailed, NativeUnavailable, build, find_compiler
from engine.native_kernels import Kernels
from engine.native_linear import NativeLinear, OneDNNLinear
from engine.native_tiles import take_tiles
from engine.torch_runner import choose_linear_method
from tests.unit.engine.native_cases import TOLERANCE, linear_differences
from tests.unit.engine.test_native_runner import assert_log_probabilities_agree, top_tokens
from tests.unit.engine.test_native_runner import build as build_runner

AMX, VECTORS = TARGETS[0], TARGETS[1]
EMULATED = f'-DTILE_INTRINSICS="{Path(__file__).parent / "emulated_tiles.h"}"'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not VECTORS.cpu_flags <= cpu_flags():
        pytest.skip("the products by tiles end in AVX-512 BF16, which this CPU lacks")
    try:
        find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return build(VECTORS, tmp_path_factory.mktemp("emulated"), [EMULATED])


@pytest.fixture
def kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """What a machine with AMX would load."""
    monkeypatch.setattr(torch_runner, "cpu_has_amx_bf16", lambda: True)
    monkeypatch.setattr(native_tiles, "permit_tiles", lambda: True)
    return Kernels(library)


@pytest.fixture
def num_products(library: Path) -> Callable[[], int]:
    """How many the emulation has done."""
    count = ctypes.CDLL(str(library)).tandem_emulated_products
    count.restype = ctypes.c_int64
    return count


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_shape_agrees_with_torch(kernels: Kernels, num_products: Callable[[], int], num_threads: int) -> None:
    kernels.bf16_linear, before = kernels.bf16_tiles, num_products()
    found = [difference for seed in range(20) for difference in linear_differences(kernels, seed, num_threads)]
    assert len(found) == 60
    assert [difference for difference in found if not difference[1] <= TOLERANCE["bfloat16"]] == []
    assert num_products() > before


def test_a_row_gets_the_same_bits_among_many_others_and_among_more(kernels: Kernels) -> None:
    kernels.bf16_linear = kernels.bf16_tiles
    multiply = NativeLinear(kernels, 1).prepare(torch.randn(50, 64).bfloat16(), torch.randn(50).bfloat16())
    inputs = torch.randn(515, 64).bfloat16()
    together = multiply(inputs)
    for first, last in [(0, 9), (3, 19), (20, 40), (470, 515), (0, 515)]:
        assert torch.equal(multiply(inputs[first:last]), together[first:last])


def test_few_rows_are_left_to_vectors(kernels: Kernels, num_products: Callable[[], int]) -> None:
    kernels.bf16_linear, before = kernels.bf16_tiles, num_products()
    multiply = NativeLinear(kernels, 1).prepare(torch.randn(64, 64).bfloat16(), None)
    multiply(torch.randn(8, 64).bfloat16())
    assert num_products() == before
    multiply(torch.randn(9, 64).bfloat16())
    assert num_products() == before + 2 * 2 * 2  # panels, halves of one, steps


def test_tiles_that_multiply_right_are_taken(
    kernels: Kernels, num_products: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    before = num_products()
    assert isinstance(choose_linear_method(EngineConfig(), kernels, torch.device("cpu"), 2), NativeLinear)
    assert kernels.bf16_linear is kernels.bf16_tiles
    assert num_products() > before, "they were tried"
    assert caplog.text == ""


@pytest.mark.parametrize("model", ["mistral-tiny", "qwen3-tiny"])
def test_a_model_says_by_tiles_what_it_says_on_plain_torch(
    kernels: Kernels, num_products: Callable[[], int], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(torch_runner, "load_kernels", lambda *_: kernels)
    tiles = build_runner(model, "auto", "bfloat16")
    before = num_products()
    by_tiles, plain = top_tokens(tiles), top_tokens(build_runner(model, "torch", "bfloat16"))
    assert num_products() > before
    assert_log_probabilities_agree(by_tiles, plain)


def test_tiles_that_multiply_wrong_are_not(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    vectors, tiles = kernels.bf16_linear, kernels.bf16_tiles
    assert vectors is not None
    assert tiles is not None

    def wrong_in_one_place(*arguments: int) -> None:
        tiles(*arguments)
        if arguments[4] > 8:  # rows
            ctypes.cast(arguments[3], ctypes.POINTER(ctypes.c_float))[100] += 1.0

    kernels.bf16_tiles = wrong_in_one_place
    assert isinstance(choose_linear_method(EngineConfig(), kernels, torch.device("cpu"), 1), OneDNNLinear)
    assert kernels.bf16_linear is vectors
    assert "by tiles (AMX): their results are wrong. oneDNN multiplies instead" in caplog.text


def test_without_leave_or_instructions_onednn_multiplies(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_tiles, "permit_tiles", lambda: False)
    assert isinstance(choose_linear_method(EngineConfig(), kernels, torch.device("cpu"), 1), OneDNNLinear)
    kernels.bf16_tiles = None
    assert isinstance(choose_linear_method(EngineConfig(), kernels, torch.device("cpu"), 1), OneDNNLinear)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "the system does not permit them" in caplog.messages[0]
    assert "compiled without them" in caplog.messages[1]


def test_the_system_permits_tiles_where_there_are_any() -> None:
    assert permit_tiles() == cpu_has_amx_bf16()


def test_the_real_instructions_compile_and_where_they_run_they_agree_with_torch(tmp_path: Path) -> None:
    try:
        kernels = Kernels(build(AMX, tmp_path))
    except CompilerFailed as reason:
        pytest.skip(f"the compiler knows no tiles: {reason}")
    assert kernels.bf16_tiles is not None
    if not cpu_has_amx_bf16():
        return
    assert take_tiles(kernels, 2), "they are wrong, or not permitted"
    found = [difference for seed in range(60) for difference in linear_differences(kernels, seed, 2)]
    assert [difference for difference in found if not difference[1] <= TOLERANCE["bfloat16"]] == []
