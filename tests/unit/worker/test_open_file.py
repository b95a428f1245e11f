"""The disk tier on a real file system, and its threads with a file that the test controls."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from core.config import CacheConfig
from core.errors import ConfigError, TransportError
from core.kv_layout import KVLayout
from core.scheduling.block_pool import BlockPool
from kv_transfer.device.fake_device_memory import FakeDeviceMemory
from kv_transfer.transports.transport import PoolMemory
from model_files.model_source import ModelSource, SourceKind, content_digest, fingerprint
from worker.tier import opening, slot_file, threads
from worker.tier.events import (
    BlockRead,
    BlocksCopied,
    BlocksRead,
    BlocksWritten,
    BlockWrite,
    EraseSlot,
    GiveUpRead,
    ReadBlocks,
    ReadEnd,
    SlotErased,
    TierEvent,
    WriteBlocks,
)
from worker.tier.names import identity_of
from worker.tier.opening import open_tier
from worker.tier.slot_file import DIRECTORY, MAX_NUMBER, MAX_UNUSED_S, OpenFile, SlotFile, StoredBlock, slot_bytes_for
from worker.tier.threads import TierThreads

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
        OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", SIZE, max_locked_s=0.0)
    OpenFile.locked(str(tmp_path / "kv"), "decode-1.kv", SIZE).close()
    opened.close()
    path = directory / "decode-0.kv"
    path.chmod(0o644)
    opened = OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", SIZE)
    again = SlotFile(opened, 3, 100, b"i" * 32)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert again.scan() == {1: HEADER}
    target = bytearray(100)
    assert again.read(1, HEADER.name, memoryview(target))
    assert bytes(target) == CONTENT
    opened.close()
    OpenFile.locked(str(tmp_path / "kv"), "decode-0.kv", slot_bytes_for(100)).close()
    assert path.stat().st_size == slot_bytes_for(100), "a file that has become too large is cut"


def test_files_that_no_worker_has_had_open_for_long_are_removed(tmp_path: Path) -> None:
    names = ("past.kv", "open.kv", "recent.kv", "decode-0.kv")
    opened = {name: OpenFile.locked(str(tmp_path), name, SIZE) for name in names}
    for name in ("past.kv", "recent.kv", "decode-0.kv"):
        opened[name].close()
    directory = tmp_path / DIRECTORY
    (directory / "notes.txt").touch()
    now = (directory / "recent.kv").stat().st_mtime + MAX_UNUSED_S
    for path in directory.iterdir():
        if path.name != "recent.kv":
            os.utime(path, (0.0, 0.0))
    again = OpenFile.locked(str(tmp_path), "decode-0.kv", SIZE)
    assert (directory / "decode-0.kv").stat().st_mtime > 0, "a start is a use"
    os.utime(directory / "open.kv", (0.0, 0.0))
    assert again.remove_unused(now) == ["past.kv"]
    assert {path.name for path in directory.iterdir()} == {"open.kv", "recent.kv", "decode-0.kv", "notes.txt"}
    again.close()
    opened["open.kv"].close()


def test_a_worker_that_only_reads_uses_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TOUCH_S", 0.01)
    _, running = open_in_memory(tmp_path)
    path = tmp_path / DIRECTORY / "w.kv"
    os.utime(path, (0.0, 0.0))
    ends_at = time.monotonic() + WAIT_S
    while not path.stat().st_mtime and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert time.time() - path.stat().st_mtime < WAIT_S
    assert running.close(WAIT_S)


def test_a_file_with_the_name_of_one_that_was_open_is_not_removed(tmp_path: Path) -> None:
    """An operator removes a file that is in use, and another process makes it again."""
    path = tmp_path / DIRECTORY / "w.kv"
    opened = OpenFile.locked(str(tmp_path), "w.kv", SIZE)
    path.unlink()
    again = OpenFile.locked(str(tmp_path), "w.kv", SIZE)
    opened.remove()
    assert path.exists()
    again.remove()
    assert not path.exists()
    for each in (opened, again):
        each.close()


def test_an_unused_file_that_is_made_again_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / DIRECTORY / "past.kv", fcntl.flock
    opened = OpenFile.locked(str(tmp_path), "w.kv", SIZE)
    path.touch(0o600)
    os.utime(path, (0.0, 0.0))

    def made_again(descriptor: int, operation: int) -> None:
        if os.fstat(descriptor).st_ino == path.stat().st_ino and not path.stat().st_mtime:
            path.unlink()
            path.touch(0o600)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", made_again)
    assert opened.remove_unused(time.time()) == []
    assert path.exists()
    opened.close()


def test_a_directory_that_is_replaced_gives_and_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another user, whose directory has this one in it: after the check, its name leads elsewhere."""
    directory, victim = tmp_path / DIRECTORY, tmp_path / "victim"
    victim.mkdir()
    (victim / "w.kv").write_text("another file of this user")
    fstat = os.fstat

    def replaced(descriptor: int) -> os.stat_result:
        if directory.is_dir() and not directory.is_symlink():
            directory.rename(tmp_path / "moved")
            directory.symlink_to(victim)
        return fstat(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", replaced)
        opened = OpenFile.locked(str(tmp_path), "w.kv", 4)
    SlotFile(opened, 1, 100, b"i" * 32).write(0, HEADER, memoryview(CONTENT))
    (victim / "past.kv").touch()
    assert opened.remove_unused(1e12) == []
    opened.remove()
    opened.close()
    assert (victim / "w.kv").read_text() == "another file of this user"
    assert (victim / "past.kv").exists()


def test_a_worker_without_a_file_takes_over_the_one_of_its_model_that_was_used_last(tmp_path: Path) -> None:
    """A roll gives the services of a machine other names."""
    names = ("older.kv", "newer.kv", "open.kv", "other model.kv", "own.kv")
    used_at = {name: time.time() - 100 + index for index, name in enumerate(names)}
    identity = identity_of(LAYOUT, "")
    opened = {name: OpenFile.locked(str(tmp_path), name, SIZE) for name in names}
    directory = tmp_path / DIRECTORY
    for name, disk in opened.items():
        owner = b"i" * 32 if name == "other model.kv" else identity
        header = replace(HEADER, name=name.encode().ljust(32))
        SlotFile(disk, 3, LAYOUT.block_bytes, owner).write(1, header, memoryview(bytes(LAYOUT.block_bytes)))
        os.utime(directory / name, (used_at[name], used_at[name]))
        if name != "open.kv":
            disk.close()
    os.mkfifo(directory / "pipe.kv", 0o600)
    (directory / "link.kv").symlink_to(directory / "older.kv")
    workers = [open_in_memory(tmp_path, worker)[1] for worker in ("own", "new", "next", "last")]
    found = [[block.name.strip() for block in worker._file.scan().values()] for worker in workers]
    assert found == [[b"own.kv"], [b"newer.kv"], [b"older.kv"], []]
    left = {path.name for path in directory.iterdir()}
    assert left == {"own.kv", "new.kv", "next.kv", "last.kv", "open.kv", "other model.kv", "pipe.kv", "link.kv"}
    assert all(worker.close(WAIT_S) for worker in workers)
    opened["open.kv"].close()


def test_workers_that_start_at_once_each_have_a_file_of_their_own(tmp_path: Path) -> None:
    names = ["a.kv", "b.kv", *(f"new-{index}.kv" for index in range(6))]
    for attempt in range(20):
        place = tmp_path / str(attempt)
        for name in ("a.kv", "b.kv", "left.kv"):
            OpenFile.locked(str(place), name, SIZE).close()
        start = partial(OpenFile.locked, str(place), max_bytes=SIZE, is_useful=lambda _: True)
        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(lambda name, start=start: start(file_name=name), names))
        inodes = [os.fstat(disk._descriptor).st_ino for disk in opened]
        assert inodes == [(place / DIRECTORY / name).stat().st_ino for name in names]
        assert len(set(inodes)) == 8
        for disk in opened:
            disk.close()


def test_a_worker_that_takes_a_file_over_replaces_none_of_another_fleet(tmp_path: Path) -> None:
    """Both fleets have a worker of this name, and start at once."""
    OpenFile.locked(str(tmp_path), "left.kv", SIZE).close()
    path, begun = tmp_path / DIRECTORY / "w.kv", list[OpenFile]()

    def is_useful(_: Any) -> bool:
        begun.append(OpenFile.locked(str(tmp_path), "w.kv", SIZE))
        return True

    with pytest.raises(BlockingIOError):
        OpenFile.locked(str(tmp_path), "w.kv", SIZE, is_useful=is_useful, max_locked_s=0.0)
    assert os.fstat(begun[0]._descriptor).st_ino == path.stat().st_ino
    begun[0].close()
    OpenFile.locked(str(tmp_path), "left.kv", SIZE).close()


@pytest.mark.parametrize("first", ["left.kv", "w.kv"])
def test_a_file_that_a_killed_worker_left_with_two_names_keeps_that_of_who_opens_it(tmp_path: Path, first: str) -> None:
    OpenFile.locked(str(tmp_path), "left.kv", SIZE).close()
    os.link(tmp_path / DIRECTORY / "left.kv", tmp_path / DIRECTORY / "w.kv")
    (tmp_path / "outside").hardlink_to(tmp_path / DIRECTORY / "left.kv")
    opened = [OpenFile.locked(str(tmp_path), name, SIZE) for name in (first, "left.kv" if first == "w.kv" else "w.kv")]
    assert [os.fstat(file._descriptor).st_nlink for file in opened] == [2, 1]
    for file in opened:
        file.close()


@pytest.mark.parametrize(("option", "is_link"), [("disk_dir", False), ("disk_dir", True), ("host_dir", False)])
def test_a_directory_that_others_may_read_and_a_link_are_refused(tmp_path: Path, option: str, is_link: bool) -> None:
    if is_link:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / DIRECTORY).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / DIRECTORY).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=rf"\[cache\] {option}: .* with mode 0700"):
        (open_on_disk if option == "disk_dir" else open_in_memory)(tmp_path)


OTHERS: dict[str, Callable[[Path], object]] = {
    "symbolic": lambda path: path.symlink_to("elsewhere"),
    "no regular file": lambda path: os.mkfifo(path, 0o600),
    "Is a directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("error", OTHERS)
def test_links_pipes_and_directories_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: str) -> None:
    (tmp_path / DIRECTORY).mkdir(mode=0o700)
    OTHERS[error](tmp_path / DIRECTORY / "w.kv")
    assert open_in_memory(tmp_path) is None
    assert f"w serves without [cache] host_dir = {tmp_path}: " in caplog.text
    assert error in caplog.text


def test_a_directory_that_is_removed_during_a_start_is_no_file_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_file, "_taken_over", lambda *_: (tmp_path / DIRECTORY).rmdir())
    assert open_in_memory(tmp_path) is None
    text = f"w serves without [cache] host_dir = {tmp_path}: [Errno 2] its file, or the directory, is removed meanwhile"
    assert text in caplog.text


@pytest.mark.parametrize("name", ["~nobody-has-this-name/kv", "kv\0"])
def test_a_directory_that_cannot_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\[cache\] disk_dir"):
        OpenFile.locked(name, "w.kv", SIZE)


def test_a_header_with_an_impossible_number_is_a_free_slot(tmp_path: Path) -> None:
    file = SlotFile(OpenFile.locked(str(tmp_path), "w.kv", SIZE), 3, 100, b"i" * 32)
    file.write(0, HEADER, memoryview(CONTENT))
    file.write(1, replace(HEADER, name=b"v" * 32, value=MAX_NUMBER), memoryview(CONTENT))
    file.write(2, replace(HEADER, name=b"w" * 32, number=MAX_NUMBER), memoryview(CONTENT))
    assert file.scan() == {0: HEADER}
    assert file.scan(lambda: True) == {}, "late"
    file.close()


def open_with(config: CacheConfig, worker: str = "w") -> Any:
    memory = PoolMemory(0, 2, LAYOUT, memoryview(bytearray(2 * LAYOUT.block_bytes)))
    return open_tier(config, worker, BlockPool(2), memory, lambda _: None)


def open_on_disk(path: Path, disk_gb: float = 0.001) -> Any:
    return open_with(CacheConfig(disk_gb=disk_gb, disk_dir=str(path)))


def open_in_memory(path: Path, worker: str = "w", host_gb: float = 0.001) -> Any:
    return open_with(CacheConfig(host_gb=host_gb, host_dir=str(path)), worker)


def test_a_file_in_memory_ends_with_its_worker_and_one_on_disk_or_of_a_worker_that_fails_stays(tmp_path: Path) -> None:
    path = tmp_path / DIRECTORY / "w.kv"
    for open_file, starts_again, stays in (
        (open_on_disk, False, True), (open_in_memory, True, True), (open_in_memory, False, False)
    ):  # fmt: skip
        _, running = open_file(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert running.close(WAIT_S, starts_again=starts_again)
        assert path.exists() == stays


def test_an_hour_after_its_last_use_a_file_in_memory_is_removed(tmp_path: Path) -> None:
    for name, age_s in (("killed", 3700.0), ("recent", 3500.0)):
        OpenFile.locked(str(tmp_path), f"{name}.kv", SIZE).close()
        used_at = time.time() - age_s
        os.utime(tmp_path / DIRECTORY / f"{name}.kv", (used_at, used_at))
    _, running = open_in_memory(tmp_path)
    assert running.close(WAIT_S)
    assert [path.name for path in (tmp_path / DIRECTORY).iterdir()] == ["recent.kv"]


@pytest.mark.parametrize(("capacity", "shown"), [(64e6, "0.064"), (253e6, "0.253")])
def test_more_than_the_memory_holds_is_refused_by_name_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: float, shown: str
) -> None:
    monkeypatch.setattr(OpenFile, "capacity_bytes", capacity)
    with pytest.raises(
        ConfigError, match=rf"host_gb = 8 is more than .* holds \({shown}\); in a container, --shm-size"
    ):
        open_in_memory(tmp_path, host_gb=8.0)
    assert not list((tmp_path / DIRECTORY).iterdir())


def test_a_file_system_in_memory_without_limit_holds_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux says 0 blocks for a tmpfs with size=0."""
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 8)))
    _, running = open_in_memory(tmp_path)
    assert running.close(WAIT_S)


def test_memory_is_that_of_dev_shm_unless_the_config_names_another() -> None:
    place = opening._place_of(CacheConfig(host_gb=1.0))
    assert place is not None
    assert (place.directory, place.in_memory) == (f"/dev/shm/tandem-{os.geteuid()}", True)


def test_a_file_that_is_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / DIRECTORY / "w.kv"
    flock, num_removed = fcntl.flock, 0

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        nonlocal num_removed
        if not num_removed:
            num_removed += 1
            path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    opened = OpenFile.locked(str(tmp_path), "w.kv", SIZE)
    assert num_removed == 1
    assert os.fstat(opened._descriptor).st_ino == path.stat().st_ino
    opened.close()


TOO_MANY = "more than 1,000,000 KV blocks of 128 bytes: set it to at most"


@pytest.mark.parametrize(("disk_gb", "complaint"), [(1e4, TOO_MANY), (1e15, TOO_MANY), (1e-6, "holds 0 KV blocks")])
def test_too_many_slots_and_no_slot_are_refused(tmp_path: Path, disk_gb: float, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"disk_gb = .* {complaint}"):
        open_on_disk(tmp_path, disk_gb)


def test_a_worker_whose_disk_does_not_answer_serves_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(opening, "MAX_OPEN_S", 0.0)
    monkeypatch.setattr(SlotFile, "scan", lambda *_: answers.wait() and {})
    assert open_on_disk(tmp_path) is None
    assert f"serves without [cache] disk_dir = {tmp_path}: the disk has not answered within 0 s" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "tandem-disk-open":
            thread.join(WAIT_S)
    OpenFile.locked(str(tmp_path), "w.kv", SIZE).close()


@pytest.mark.parametrize(("kind", "name"), [(SlotFile, "scan"), (OpenFile, "remove_unused")])
def test_a_worker_whose_disk_fails_at_its_start_keeps_no_lock_on_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(kind, name, fail)
    assert open_on_disk(tmp_path) is None
    OpenFile.locked(str(tmp_path), "w.kv", SIZE).close()


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    source = ModelSource("m", SourceKind.HUGGING_FACE, tmp_path)
    sampled, whole = fingerprint(source), content_digest(source)
    with weights.open("r+b") as file:
        file.seek(10_000_000 // 64 * 2 - 1)
        file.write(b"1")
    assert fingerprint(source) == sampled, "the samples miss the change"
    assert content_digest(source) != whole


LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)
NAME = b"n" * 32
WRITE = WriteBlocks((BlockWrite(0, 0, StoredBlock(NAME, NAME, 7, 0, 1, 1)),))
READ = ReadBlocks(-1, (BlockRead(0, NAME, 1),), 60.0)
WAIT_S = 30.0  # beyond: the test fails


class ControlledFile:
    """Every operation waits for `answers`, then raises `error` if there is one. A read brings ones."""

    def __init__(self) -> None:
        self.answers, self.begun = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.erased: list[int] = []
        self.is_removed = False

    def _wait(self) -> None:
        self.begun.set()
        assert self.answers.wait(WAIT_S)
        if self.error is not None:
            raise self.error

    def write(self, *_: object) -> None:
        self._wait()

    def read(self, _slot: int, _name: bytes, target: memoryview) -> bool:
        self._wait()
        target[:] = b"\1" * target.nbytes
        return True

    def erase(self, slot: int) -> None:
        self._wait()
        self.erased.append(slot)

    def remove(self) -> None:
        self.is_removed = True

    def close(self) -> None:
        """Nothing to close."""


class Driven:
    def __init__(self, device: FakeDeviceMemory | None = None) -> None:
        self.file, self.events = ControlledFile(), queue.SimpleQueue[TierEvent]()
        view = memoryview(bytearray(2 * LAYOUT.block_bytes)) if device is None else None
        self.memory = PoolMemory(0, 2, LAYOUT, view, None if device is None else 0, memory=device)
        self.threads = TierThreads(cast(SlotFile, self.file), self.memory, self.events.put)

    def next(self) -> Any:
        return self.events.get(timeout=WAIT_S)


def test_a_read_that_was_given_up_writes_into_no_target() -> None:
    driven = Driven()
    driven.threads.perform(READ)
    assert driven.file.begun.wait(WAIT_S)
    driven.threads.perform(GiveUpRead(-1))
    driven.file.answers.set()
    event = driven.next()
    assert (event.read_id, event.num_read, event.end) == (-1, 0, ReadEnd.LATE)
    assert not any(driven.memory.block(1))
    driven.threads.perform(READ)
    event = driven.next()
    assert (event.num_read, event.end) == (1, ReadEnd.COMPLETE)
    assert set(driven.memory.block(1)) == {1}
    assert driven.threads.close(WAIT_S)


def test_the_end_of_a_worker_drops_writes_and_runs_erasures() -> None:
    driven = Driven()
    driven.threads.perform(WRITE)
    assert driven.file.begun.wait(WAIT_S)
    driven.threads.perform(WRITE)
    driven.threads.perform(EraseSlot(5))
    assert not driven.threads.close(0.0), "the disk hangs"
    driven.file.answers.set()
    assert driven.threads.close(WAIT_S)
    assert driven.file.erased == [5]
    assert [driven.next() for _ in range(3)] == [BlocksCopied(), BlocksWritten(1), SlotErased(5)]


@pytest.mark.parametrize("error", [OSError("broken"), OSError(errno.ENOSPC, "full"), ValueError("a defect")])
def test_any_error_is_a_failure_that_the_threads_survive(error: Exception) -> None:
    driven = Driven()
    driven.file.error = error
    driven.file.answers.set()
    for _ in range(2):
        driven.threads.perform(WRITE)
        assert [driven.next(), driven.next()] == [BlocksCopied(), BlocksWritten(0, is_full="full" in str(error))]
        driven.threads.perform(EraseSlot(5))
        assert driven.next() == SlotErased(5)
        assert driven.file.is_removed, "the next process would find a corrupt block"
        driven.threads.perform(READ)
        event = driven.next()
        assert isinstance(event, BlocksRead)
        assert (event.num_read, event.end) == (0, ReadEnd.FAILED)
    assert driven.threads.close(WAIT_S)


def test_blocks_of_a_device_go_to_the_file_and_back(tmp_path: Path) -> None:
    device = FakeDeviceMemory(2 * LAYOUT.block_bytes)
    device.bytes[: LAYOUT.block_bytes] = np.arange(LAYOUT.block_bytes) % 251
    driven = Driven(device)
    file = SlotFile(OpenFile.locked(str(tmp_path), "w.kv", SIZE), 1, LAYOUT.block_bytes, b"i" * 32)
    driven.threads._file = file
    driven.threads.perform(WRITE)
    assert [driven.next(), driven.next()] == [BlocksCopied(), BlocksWritten(1)]
    driven.threads.perform(READ)
    assert driven.next().end is ReadEnd.COMPLETE
    assert np.array_equal(device.bytes[LAYOUT.block_bytes :], device.bytes[: LAYOUT.block_bytes])
    assert driven.threads.close(WAIT_S)


@pytest.mark.parametrize("copy", ["copy_out", "copy_in"])
def test_a_device_that_fails_a_copy_costs_hits_and_holds_no_block(monkeypatch: pytest.MonkeyPatch, copy: str) -> None:
    def fail(*_: object) -> None:
        raise TransportError("copy a block: invalid argument")

    monkeypatch.setattr(FakeDeviceMemory, copy, fail)
    driven = Driven(FakeDeviceMemory(2 * LAYOUT.block_bytes))
    driven.file.answers.set()
    for _ in range(2):
        driven.threads.perform(WRITE)
        assert [driven.next(), driven.next()] == [BlocksCopied(), BlocksWritten(int(copy == "copy_in"))]
        driven.threads.perform(READ)
        assert driven.next().end is (ReadEnd.FAILED if copy == "copy_in" else ReadEnd.COMPLETE)
    assert driven.threads.close(WAIT_S)


def test_a_pool_that_only_the_transport_reaches_has_no_tier(tmp_path: Path) -> None:
    memory = PoolMemory(0, 2, LAYOUT, None, 0)
    with pytest.raises(ConfigError, match=r"\[cache\] disk_gb needs KV pools that the worker can copy"):
        open_tier(CacheConfig(0.001, str(tmp_path)), "w", BlockPool(2), memory, lambda _: None)
