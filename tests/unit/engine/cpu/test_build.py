"""The kernels are compiled once, concurrent builds are safe, and torch replaces the kernels without a compiler."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.config import EngineConfig
from engine.attention import TorchAttention
from engine.cpu import build as build_module
from engine.cpu import kernels as kernels_module
from engine.cpu.attention import NativeAttention
from engine.cpu.build import AMX, FLAGS, TARGETS, NativeUnavailable, Target, build, fitting_targets
from engine.cpu.features import cpu_flags, cpu_multiplies_bf16, has_many_l1_miss_buffers, widens_bf16
from engine.cpu.kernels import Kernels, describe_kernels, load_kernels, usable_flags
from engine.torch_runner import TorchRunner
from tests.support.c_kernels import need_compiler, need_kernels
from tests.support.limits import no_file_larger_than
from tests.unit.engine.driving import Engine, request

GENERIC = TARGETS[-1]
PROMPT = [(7 * index + 3) % 250 for index in range(45)]


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tiny sources that replace the kernels, so that compiling is fast."""
    need_compiler()
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "numbers.h").write_text("#define ANSWER 41\n")
    exported = '__attribute__((visibility("default")))'
    (directory / "one.c").write_text(f'#include "numbers.h"\n{exported} int one(void) {{ return ANSWER; }}\n')
    (directory / "two.c").write_text("int two(void) { return 2; }\n")
    monkeypatch.setattr(build_module, "SOURCES", directory)
    return directory


@pytest.mark.parametrize(
    ("flags", "head_dim", "expected"),
    [
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni amx_tile amx_bf16", 64, "amx"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni", 64, "avx512_bf16"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", 64, "avx512"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", 80, "avx2"),  # 80 is not a multiple of 2 * 16
        ("avx2 fma avx512f", 64, "avx2"),
        ("sse4_2", 64, "generic"),
        ("", 16, "generic"),
    ],
)
def test_the_best_target_that_fits_is_chosen(flags: str, head_dim: int, expected: str) -> None:
    assert fitting_targets(frozenset(flags.split()), head_dim)[0].name == expected


def test_heads_that_are_no_multiple_of_16_are_refused() -> None:
    with pytest.raises(NativeUnavailable, match="heads of 24"):
        fitting_targets(cpu_flags(), 24)


@pytest.mark.usefixtures("small_sources")
def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    first = build(GENERIC, tmp_path)
    written = first.stat().st_mtime_ns
    assert build(GENERIC, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert build(GENERIC, tmp_path, ["-DANOTHER"]) != first


@pytest.mark.usefixtures("small_sources")
def test_concurrent_builds_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        libraries = list(threads.map(lambda _: build(GENERIC, tmp_path), range(8)))
    assert len(set(libraries)) == 1
    assert ctypes.CDLL(str(libraries[0])).one() == 41
    assert [path.name for path in (tmp_path / "native").iterdir()] == [libraries[0].name]


def test_a_changed_header_causes_a_new_build(tmp_path: Path, small_sources: Path) -> None:
    before = build(GENERIC, tmp_path)
    (small_sources / "numbers.h").write_text("#define ANSWER 42\n")
    after = build(GENERIC, tmp_path)
    assert after != before
    assert ctypes.CDLL(str(after)).one() == 42


@pytest.mark.usefixtures("small_sources")
def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="does not load"):
        Kernels(build(GENERIC, tmp_path))  # without the kernels
    with pytest.raises(NativeUnavailable, match="no-such-flag"):
        build(GENERIC, tmp_path, ["--no-such-flag"])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NativeUnavailable, match="cannot use"):
        build(GENERIC, tmp_path / "file")


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("length", [0, 20, 5000, -1])
def test_a_truncated_library_in_the_cache_is_compiled_again(tmp_path: Path, length: int) -> None:
    """Without that, loading the library would end the process by SIGBUS."""
    library = build(GENERIC, tmp_path)
    whole = library.read_bytes()
    library.write_bytes(whole[:length])
    assert build(GENERIC, tmp_path) == library
    assert len(library.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(library)).one() == 41


@pytest.mark.usefixtures("small_sources")
def test_without_room_for_a_compiled_kernel_torch_computes_and_one_line_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with no_file_larger_than(256):
        assert load_kernels(16, tmp_path) is None
    assert "The engine uses plain torch, which is slower." in caplog.messages[-1]
    assert all("\n" not in message for message in caplog.messages)
    assert list((tmp_path / "native").iterdir()) == [], "no part of a library stays behind"


def test_if_the_compiler_does_not_support_the_best_target_the_next_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_compiler()
    unknown = Target("unknown", frozenset(), ("-mno-such-feature",), 8)
    monkeypatch.setattr(build_module, "TARGETS", (unknown, GENERIC))
    monkeypatch.setattr(build_module, "FLAGS", (*FLAGS, "-O0"))  # compiles fast; the kernels are never called
    loaded = load_kernels(16, tmp_path)
    assert loaded is not None
    assert loaded.library.name.startswith("generic-")
    assert "do not compile for unknown" in caplog.text
    monkeypatch.setattr(build_module, "TARGETS", (unknown,))
    assert load_kernels(16, tmp_path) is None
    assert "no C kernels: " in caplog.text


def test_without_amxs_registers_the_kernels_are_those_of_the_same_cpu_without_amx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_module, "cpu_flags", lambda: cpu_flags() | AMX)
    monkeypatch.setattr(kernels_module, "request_tiles", lambda: True)
    assert usable_flags() >= AMX
    assert describe_kernels(64)[1] == ""
    monkeypatch.setattr(kernels_module, "request_tiles", lambda: False)
    assert usable_flags() == cpu_flags() - AMX
    name = fitting_targets(cpu_flags() - AMX, 64)[0].name
    kernels, reason = describe_kernels(64)
    assert kernels == f"C kernels for {name}"
    assert "refuses AMX's tile registers" in reason
    assert need_kernels().library.name.startswith(name)
    assert caplog.messages == [reason]


def test_without_a_compiler_torch_computes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_compiler()
    config = EngineConfig(model="random:llama-tiny", dtype="float32", kv_memory_mb=4, num_threads=1)
    native = TorchRunner(config)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with caplog.at_level(logging.WARNING):
        fallback = TorchRunner(config, tmp_path)
    assert "no C compiler found (looked for cc, gcc, clang)" in caplog.text
    assert load_kernels(16, tmp_path) is None
    assert describe_kernels(16) == ("plain torch", "no C compiler found (looked for cc, gcc, clang)")
    assert isinstance(native._preparer.attention, NativeAttention)
    assert isinstance(fallback._preparer.attention, TorchAttention)
    assert Engine(fallback).generate(request("a", PROMPT)) == Engine(native).generate(request("a", PROMPT))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what a process has loaded")
def test_kernels_and_torch_share_one_set_of_threads() -> None:
    """A second OpenMP library would double the threads, and the two sets would compete for the cores."""
    need_kernels()
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    loaded = {file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(loaded) == 1, loaded


# ---- CPU features are read from /proc/cpuinfo.

ZEN_5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\n"
INTEL = ZEN_5.replace("AuthenticAMD", "GenuineIntel")
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp bf16\n\n"
# The flags; whether it multiplies bfloat16, does so slower than by widening, and has many miss buffers in its L1
FEATURES = [
    (ZEN_5, {"fpu", "avx512_bf16"}, True, False, True),
    (ZEN_5.replace("26", "25"), {"fpu", "avx512_bf16"}, True, False, False),
    (INTEL, {"fpu", "avx512_bf16"}, True, True, False),
    (INTEL.replace("avx512_bf16", "amx_bf16"), {"fpu", "amx_bf16"}, True, True, False),
    (INTEL.replace("avx512_bf16", "avx512f"), {"fpu", "avx512f"}, False, True, False),
    (ARM, {"fp", "bf16"}, True, False, False),
    (ARM.replace("bf16", "asimd"), {"fp", "asimd"}, False, False, False),
    ("nothing of the kind\n", set(), False, False, False),
    (None, set(), False, False, False),  # no such file
]


@pytest.mark.parametrize(("cpuinfo", "flags", "multiplies", "widens", "has_buffers"), FEATURES)
def test_the_features_of_the_first_cpu(
    tmp_path: Path, cpuinfo: str | None, flags: set[str], multiplies: bool, widens: bool, has_buffers: bool
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert cpu_flags(path) == flags
    assert (cpu_multiplies_bf16(path), widens_bf16(path)) == (multiplies, widens)
    assert has_many_l1_miss_buffers(path) is has_buffers


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/cpuinfo")
def test_this_cpus_features_are_found() -> None:
    """Otherwise the tests of the kernels for these features would be skipped."""
    assert cpu_flags()
