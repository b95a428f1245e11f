"""The status of a path, and the way of the bytes where a pool is on a device."""

from __future__ import annotations

import pytest

from core.errors import MemoryMismatch
from core.handoff import DevicePath, PoolAccess
from core.paths import Lane, PathState, PathStatus, device_path

MAPPED, DIRECT = DevicePath
HOST, DIRECT_HOST = PoolAccess(), PoolAccess(None, frozenset({DIRECT}))
ANY = PoolAccess(0, frozenset(DevicePath))
ONLY_MAPPED, ONLY_DIRECT = PoolAccess(1, frozenset({MAPPED})), PoolAccess(0, frozenset({DIRECT}))


def test_a_path_describes_itself_in_one_line() -> None:
    path = PathStatus("peer", PathState.SLOW, Lane.TCP, 0.0215e9, 1.25e9, 310e-6)
    assert str(path) == "slow: TCP, 0.0215 GB/s of 1.25, 310 us there and back"
    assert str(PathStatus("peer", PathState.REFUSED, detail="KV layouts differ")) == "refused: KV layouts differ"


@pytest.mark.parametrize(
    ("reader", "owner", "on_one_machine", "path"),
    [
        (HOST, HOST, True, None),
        (DIRECT_HOST, HOST, False, None),
        (ANY, ANY, True, MAPPED),
        (ANY, ANY, False, DIRECT),
        (ANY, ONLY_MAPPED, True, MAPPED),
        (ONLY_DIRECT, ANY, True, DIRECT),
        (ANY, HOST, False, DIRECT),  # the reader alone has a device
        (DIRECT_HOST, ANY, True, DIRECT),
    ],
)
def test_the_fastest_path_that_both_pools_have_is_taken(
    reader: PoolAccess, owner: PoolAccess, on_one_machine: bool, path: DevicePath | None
) -> None:
    assert device_path(reader, owner, on_one_machine) is path


@pytest.mark.parametrize(
    ("reader", "owner"), [(HOST, ANY), (ONLY_DIRECT, ONLY_MAPPED), (ONLY_MAPPED, HOST), (DIRECT_HOST, ONLY_MAPPED)]
)
def test_pools_without_a_common_path_are_refused_with_both_memories_and_the_option(
    reader: PoolAccess, owner: PoolAccess
) -> None:
    with pytest.raises(MemoryMismatch, match="device_path") as refused:
        device_path(reader, owner, True)
    assert str(owner) in str(refused.value)
    assert refused.value.differences == {"memory": (str(reader), str(owner))}
