"""What errors and paths say in one line, and which errors are retryable."""

from __future__ import annotations

import pytest

from core import errors
from core.errors import ConfigError, ErrorCode, InvalidRequest, LayoutMismatch, TandemError
from core.paths import Lane, PathState, PathStatus

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)]


def test_only_errors_in_requests_and_options_are_value_errors() -> None:
    assert {kind for kind in ALL if issubclass(kind, ValueError)} == {InvalidRequest, ConfigError}


@pytest.mark.parametrize("kind", ALL)
def test_only_errors_of_unavailable_or_full_services_are_retryable(kind: type[TandemError]) -> None:
    temporary = kind.code in (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)
    assert kind.retryable == temporary


def test_a_layout_mismatch_names_each_field_with_both_values() -> None:
    error = LayoutMismatch({"block_size": (16, 32), "dtype": ("bfloat16", "float32")})
    assert str(error) == "KV layouts differ in block_size: 16 here, 32 there, dtype: 'bfloat16' here, 'float32' there"


def test_a_message_and_a_field_are_cut() -> None:
    error = InvalidRequest("f" * 10_000, "m" * 1_000_000)
    assert len(str(error)) == errors.MAX_ERROR_CHARS + len("...")
    assert str(error).startswith(f"{error.field}: m")


def test_a_path_describes_itself_in_one_line() -> None:
    path = PathStatus("peer", PathState.SLOW, Lane.TCP, 0.0215e9, 1.25e9, 310e-6)
    assert str(path) == "slow: TCP, 0.0215 GB/s of 1.25, 310 us there and back"
    assert str(PathStatus("peer", PathState.REFUSED, detail="KV layouts differ")) == "refused: KV layouts differ"
