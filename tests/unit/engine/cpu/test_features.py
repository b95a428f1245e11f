"""CPU features are read from /proc/cpuinfo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.cpu.features import cpu_flags, has_many_l1_miss_buffers, widens_bf16

ZEN_5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\n"
ZEN_4 = ZEN_5.replace("26", "25")
INTEL = ZEN_5.replace("AuthenticAMD", "GenuineIntel")
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp bf16\n\n"


@pytest.mark.parametrize(("cpuinfo", "expected"), [(ZEN_5, True), (ZEN_4, False), (INTEL, False), (ARM, False)])
def test_only_zen_5_and_later_have_many_l1_miss_buffers(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert has_many_l1_miss_buffers(path) is expected


@pytest.mark.parametrize(("cpuinfo", "expected"), [(INTEL, True), (ZEN_4, False), (ARM, False)])
def test_only_intels_bfloat16_products_are_slower_than_widening(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert widens_bf16(path) is expected


def test_the_first_cpus_features_are_read_under_the_x86_and_the_arm_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(ZEN_5)
    assert cpu_flags(path) == {"fpu", "avx512_bf16"}
    path.write_text(ARM)
    assert cpu_flags(path) == {"fp", "bf16"}


def test_without_the_file_there_are_no_features(tmp_path: Path) -> None:
    missing = tmp_path / "cpuinfo"
    assert cpu_flags(missing) == frozenset()
    assert not has_many_l1_miss_buffers(missing)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/cpuinfo")
def test_this_cpus_features_are_found() -> None:
    """Otherwise the tests of the kernels for these features would be skipped."""
    assert cpu_flags()
