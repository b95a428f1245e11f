"""The shape of a KV block, with the numbers of real models."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from core.kv_layout import FLOAT8, KVLayout

SMOLLM2 = KVLayout("smollm2", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
LLAMA_8B = KVLayout("llama-3.1-8b", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128)
OTHER_VALUES = KVLayout("other", "float16", 29, 1, 32, 32, first_layer=1, first_kv_head=1, quantization="int4")


def test_a_block_of_smollm2_is_368640_bytes() -> None:
    assert SMOLLM2.block_bytes == 368_640
    assert SMOLLM2.token_bytes == 23_040
    assert SMOLLM2.block_shape == (30, 2, 3, 16, 64)


def test_a_block_of_8_bits_ends_with_a_scale_for_each_head_of_a_token() -> None:
    layout = replace(LLAMA_8B, dtype=FLOAT8)
    assert layout.has_scales
    assert layout.values_bytes == LLAMA_8B.block_bytes // 2
    assert layout.block_bytes == LLAMA_8B.block_bytes // 2 + 32 * 2 * 8 * 16 * 4
    assert layout.block_bytes == layout.token_bytes * 16
    assert layout.arrays == ((0, 128), (layout.values_bytes, 4))
    assert LLAMA_8B.arrays == ((0, 256),)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_the_number_of_blocks_is_rounded_up(num_tokens: int, num_blocks: int) -> None:
    assert SMOLLM2.num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("field", [field.name for field in fields(KVLayout)])
def test_any_difference_is_named_and_changes_the_fingerprint(field: str) -> None:
    value = getattr(OTHER_VALUES, field)
    other = replace(SMOLLM2, **{field: value})
    assert SMOLLM2.differences(other) == {field: (getattr(SMOLLM2, field), value)}
    assert SMOLLM2.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [({field: 0}, field) for field in ("num_layers", "num_kv_heads", "block_size", "head_dim")]
    + [({"dtype": FLOAT8, "head_dim": 3}, "head_dim must be even"), ({"dtype": "int3"}, "int3")],
)
def test_empty_dimensions_odd_scales_and_unknown_dtypes_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(SMOLLM2, **values)
