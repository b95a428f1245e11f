"""The file of a disk tier on a real file system: who may read it, and who may have it open."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from core.errors import ConfigError
from worker.tier.slot_file import DIRECTORY, OpenFile, SlotFile, StoredBlock, slot_bytes_for

CONTENT = bytes(range(100))
HEADER = StoredBlock(b"n" * 32, b"p" * 32, 7, 0, 1, 1)
SIZE = 3 * slot_bytes_for(100)


def test_a_file_is_its_users_alone_and_has_its_blocks_after_it_is_opened_again(tmp_path: Path) -> None:
    opened = OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", SIZE)
    directory = tmp_path / "kv" / DIRECTORY
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "decode-0.kv")]
    assert modes == [0o700, 0o600]
    SlotFile(opened, 3, 100, b"i" * 32).write(1, HEADER, memoryview(CONTENT))
    with pytest.raises(BlockingIOError):
        OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", SIZE)
    OpenFile.locked(str(tmp_path / "kv"), "decode-1.kv", SIZE).close()
    opened.close()
    again = SlotFile(OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", SIZE), 3, 100, b"i" * 32)
    assert again.scan() == {1: HEADER}
    target = bytearray(100)
    assert again.read(1, HEADER.name, memoryview(target))
    assert bytes(target) == CONTENT


def test_a_file_that_has_become_too_large_is_cut(tmp_path: Path) -> None:
    opened = OpenFile.locked(str(tmp_path), "w.kv", SIZE)
    SlotFile(opened, 3, 100, b"i" * 32).write(2, HEADER, memoryview(CONTENT))
    opened.close()
    OpenFile.locked(str(tmp_path), "w.kv", slot_bytes_for(100)).close()
    assert (tmp_path / DIRECTORY / "w.kv").stat().st_size == slot_bytes_for(100)


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"\[cache\] disk_dir: .* with mode 0700"):
        OpenFile.locked(str(tmp_path), "w.kv", SIZE)


def test_a_link_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir(mode=0o700)
    (tmp_path / DIRECTORY / "w.kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        OpenFile.locked(str(tmp_path), "w.kv", SIZE)
