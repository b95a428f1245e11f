"""The file of a disk tier: slots of equal size, each with the KV of one block.

    slot = header, in a page of 4,096 bytes | KV of the block | padding to a whole page

The header names its block and has the digest of the KV. Each write of a slot is one write of header and KV. A write
that was cut off anywhere leaves a slot whose header, or whose KV, does not match its digest: such a slot is free. So
the file needs no journal, and no order of writes. `scan` reads every header once, at the start.

Only the user of the process may read the file, and only one process has it open: a lock that ends with the process
keeps others out. The file has the name of its worker, so other weights write into the same file. A worker without a
file takes over one of its model that another has left: a roll gives the services of a machine other names. A fleet that
shrinks leaves files, which `remove_unused` removes. A file in host memory (tmpfs) takes memory as long as it exists, so
it also ends with the regular end of its worker. It outlives a `kill -9`, but no restart of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import xxhash

from core.errors import ConfigError

PAGE_BYTES = 4096
DIRECTORY = "tandem-kv"  # in `[cache] disk_dir`
MAX_UNUSED_S = 7 * 86_400.0  # of a file that no process has open; beyond: the next worker that starts removes it
MAX_UNUSED_IN_MEMORY_S = 3600.0  # likewise of one in host memory, whose worker has been killed
LOCK_PAUSE_S = 0.05
MAX_OPENS = 3  # of a file that other processes remove meanwhile; beyond: the worker serves without a tier
MAX_LOCKED_S = 2.0  # of a file at the start, which others lock to look at it; beyond: the worker serves without a tier
MAX_CANDIDATES = 64  # files of others that a start looks at; beyond: older ones are not taken over
MAX_LOOKED_AT = 64  # slots of such a file; beyond: it counts as a file of another model
MAGIC = b"TandemKV"
# magic, identity, name, name of the parent, sequence hash, position in the chain, value, number of the write, digest of
# the KV
_FIELDS = struct.Struct("<8s32s32s32sQIQQQ")
_DIGEST = struct.Struct("<Q")  # of the fields above
MAX_NUMBER = 1 << 63  # above every value and number that a table counts up to; beyond: the slot is free

Buffer = bytes | bytearray | memoryview


class Disk(Protocol):
    """The operations of a file, so that a test can make them fail. The first three raise `OSError`."""

    def read(self, buffers: list[memoryview], offset: int) -> int:
        """Fill the buffers in order. Returns the number of bytes; less at the end of the file."""
        ...

    def write(self, buffers: list[Buffer], offset: int) -> int:
        """Returns the number of bytes written."""
        ...

    def touch(self) -> None:
        """Mark the file as in use."""
        ...

    def close(self) -> None: ...

    def remove(self) -> None:
        """Before `close`: no later process is to find the blocks."""
        ...


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The header of a slot."""

    name: bytes
    parent: bytes  # the name of the preceding block, or that of the root
    sequence_hash: int  # for routers
    position: int  # in the sequence
    value: int  # to the table of slots when it was written
    number: int  # of the write; a later write has a higher number


def newest_of_each_name(found: Mapping[int, StoredBlock]) -> dict[int, StoredBlock]:
    """A block that is written again leaves its older header in a slot that is free."""
    slots = {found[slot].name: slot for slot in sorted(found, key=lambda slot: found[slot].number)}
    return {slot: found[slot] for slot in slots.values()}


class OpenFile:
    """A `Disk` of the operating system."""

    def __init__(self, descriptor: int, directory: int, name: str) -> None:
        self._descriptor, self._directory, self._name = descriptor, directory, name

    @classmethod
    def locked(
        cls,
        place: str,
        file_name: str,
        max_bytes: int,
        option: str = "disk_dir",
        is_useful: Callable[[Disk], bool] = lambda _: False,
        max_locked_s: float = MAX_LOCKED_S,
    ) -> Self:
        """Open a file that no other process has open, cut to `max_bytes`. `option`: whose value `place` is.

        If it does not exist, the useful file that was used last and that no process has open gets this name, or else
        an empty file.

        Raises `ConfigError` if the directory has a wrong name or others may read it, `BlockingIOError` if another
        process has the file, and `OSError` where the directory or the file cannot be made.
        """
        directory = _open_directory(place, option)
        try:
            descriptor = _taken_over(file_name, directory, is_useful)
            if descriptor is None:
                descriptor = _open_locked(file_name, directory, max_locked_s)
        except OSError:
            os.close(directory)
            raise
        opened = cls(descriptor, directory, file_name)
        try:
            _remove_other_names(descriptor, file_name, directory)
            os.fchmod(descriptor, 0o600)
            opened.touch()
            if os.fstat(descriptor).st_size > max_bytes:
                os.ftruncate(descriptor, max_bytes)
        except OSError:
            opened.close()
            raise
        return opened

    @property
    def capacity_bytes(self) -> float:
        """Of the file system; infinity where a tmpfs has no limit."""
        status = os.fstatvfs(self._descriptor)
        return status.f_blocks * status.f_frsize or math.inf

    def read(self, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(self._descriptor, buffers, offset)

    def write(self, buffers: list[Buffer], offset: int) -> int:
        return os.pwritev(self._descriptor, buffers, offset)

    def touch(self) -> None:
        os.utime(self._descriptor)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._directory):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if _has_name(self._descriptor, self._name, self._directory):
                os.unlink(self._name, dir_fd=self._directory)

    def remove_unused(self, now: float, max_unused_s: float = MAX_UNUSED_S) -> list[str]:
        """Remove the files beside this one that no process has open, and that nobody has used for long.

        `now`: seconds since the epoch. Returns their names. A file that cannot be looked at stays.
        """
        removed = []
        for name in sorted(os.listdir(self._directory)):
            if not name.endswith(".kv"):
                continue
            with contextlib.suppress(OSError):
                descriptor = _lock(name, self._directory, os.O_RDWR)
                try:
                    if now - os.fstat(descriptor).st_mtime > max_unused_s:
                        os.unlink(name, dir_fd=self._directory)
                        removed.append(name)
                finally:
                    os.close(descriptor)
        return removed


def _open_directory(place: str, option: str) -> int:
    """The descriptor of a directory of this user alone. Every file is opened and removed through the descriptor: who
    may rename the directory cannot put another one in its place."""
    try:
        path = Path(place).expanduser() / DIRECTORY
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (ValueError, RuntimeError) as error:  # a zero byte; a home of nobody
        raise ConfigError(f"[cache] {option}: {error}") from error
    refused = ConfigError(f"[cache] {option}: {path} must be a directory of this user alone, with mode 0700")
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP, errno.ENOTDIR):  # another user's; a link
            raise refused from error
        raise
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(directory)
        raise refused
    return directory


def _taken_over(name: str, directory: int, is_useful: Callable[[Disk], bool]) -> int | None:
    """The descriptor of another worker's file, which has got this name too; None if one has it already, or none is
    useful.

    Both workers of a race end with a file of their own: who comes later finds no file, or a locked one. Another fleet
    of this user may have a worker of this name: a rename would replace its file.
    """

    def last_used(other: str) -> float:
        try:
            return os.stat(other, dir_fd=directory, follow_symlinks=False).st_mtime
        except OSError:
            return -math.inf

    others = [other for other in os.listdir(directory) if other.endswith(".kv")]
    if name in others:
        return None
    for other in sorted(others, key=last_used, reverse=True)[:MAX_CANDIDATES]:
        with contextlib.suppress(OSError):
            descriptor = _lock(other, directory, os.O_RDWR)
            try:
                if is_useful(OpenFile(descriptor, directory, other)):
                    os.link(other, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
                    return descriptor
            except FileExistsError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)
    return None


def _remove_other_names(descriptor: int, name: str, directory: int) -> None:
    """Of a file that was taken over, now or by a process that was killed meanwhile."""
    if os.fstat(descriptor).st_nlink > 1:
        for other in os.listdir(directory):
            if other != name and _has_name(descriptor, other, directory):
                os.unlink(other, dir_fd=directory)


def _open_locked(name: str, directory: int, max_locked_s: float) -> int:
    """The descriptor of a file that no other process has open. Another process may remove or rename the file meanwhile:
    then it is made again."""
    late_at = time.monotonic() + max_locked_s
    num_gone = 0
    while True:
        try:
            return _lock(name, directory, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            num_gone += 1
            if num_gone == MAX_OPENS:
                raise FileNotFoundError(errno.ENOENT, "its file, or the directory, is removed meanwhile") from None
        except BlockingIOError:
            if time.monotonic() >= late_at:
                raise
            time.sleep(LOCK_PAUSE_S)


def _lock(name: str, directory: int, flags: int) -> int:
    """The descriptor of a regular file of this user, locked. Raises `BlockingIOError` if another process has it open,
    `FileNotFoundError` if it has lost this name, and other `OSError`s."""
    descriptor = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{name} belongs to another user")
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{name} is no regular file")
        if not _has_name(descriptor, name, directory):
            raise FileNotFoundError(errno.ENOENT, f"{name} was removed")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _has_name(descriptor: int, name: str, directory: int) -> bool:
    """Whether the file with this name is still the one that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return False


class SlotFile:
    """Threads may read and write different slots at the same time."""

    def __init__(self, disk: Disk, num_slots: int, block_bytes: int, identity: bytes) -> None:
        self.num_slots = num_slots
        self._disk, self._block_bytes, self._identity = disk, block_bytes, identity
        self._slot_bytes = slot_bytes_for(block_bytes)

    def scan(self, is_late: Callable[[], bool] = lambda: False) -> dict[int, StoredBlock]:
        """The blocks of this identity by slot; of two with one name, the newer. Raises `OSError`.

        Ends where `is_late`: the slots from there on count as free, which is safe, because a name has one content.
        """
        header = bytearray(PAGE_BYTES)
        found: dict[int, StoredBlock] = {}
        for slot in range(self.num_slots):
            num_bytes = self._disk.read([memoryview(header)], slot * self._slot_bytes)
            if not num_bytes or is_late():
                break  # nothing has been written from here on, or it is not needed
            read = self._decode(header) if num_bytes == PAGE_BYTES else None
            if read is not None:
                found[slot] = read[0]
        return newest_of_each_name(found)

    def has_blocks(self) -> bool:
        """Whether one of the first slots has a block of this identity. Raises `OSError`."""
        header = bytearray(PAGE_BYTES)
        for slot in range(min(self.num_slots, MAX_LOOKED_AT)):
            num_bytes = self._disk.read([memoryview(header)], slot * self._slot_bytes)
            if num_bytes == PAGE_BYTES and self._decode(header) is not None:
                return True
        return False

    def write(self, slot: int, block: StoredBlock, content: memoryview) -> None:
        """Raises `OSError`; the slot is then free."""
        assert content.nbytes == self._block_bytes
        fields = _FIELDS.pack(
            MAGIC, self._identity, block.name, block.parent, block.sequence_hash, block.position, block.value,
            block.number, xxhash.xxh3_64_intdigest(content),
        )  # fmt: skip
        header = (fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))).ljust(PAGE_BYTES, b"\0")
        num_bytes = self._disk.write([header, content], slot * self._slot_bytes)
        if num_bytes != PAGE_BYTES + self._block_bytes:
            raise OSError(errno.ENOSPC, f"only {num_bytes} bytes of a slot were written")

    def erase(self, slot: int) -> None:
        """Raises `OSError`."""
        self._disk.write([bytes(PAGE_BYTES)], slot * self._slot_bytes)

    def read(self, slot: int, name: bytes, target: memoryview) -> bool:
        """Read the KV of this block into `target`. False: the slot does not have it, and `target` holds anything.

        Raises `OSError`.
        """
        header = bytearray(PAGE_BYTES)
        num_bytes = self._disk.read([memoryview(header), target], slot * self._slot_bytes)
        read = self._decode(header) if num_bytes == PAGE_BYTES + self._block_bytes else None
        return read is not None and read[0].name == name and read[1] == xxhash.xxh3_64_intdigest(target)

    def touch(self) -> None:
        """Mark the file as in use. Raises `OSError`."""
        self._disk.touch()

    def close(self) -> None:
        self._disk.close()

    def remove(self) -> None:
        """See `Disk`."""
        self._disk.remove()

    def _decode(self, header: bytearray) -> tuple[StoredBlock, int] | None:
        """The block of a header and the digest of its KV; None for any other bytes."""
        fields = memoryview(header)[: _FIELDS.size]
        magic, identity, name, parent, sequence_hash, position, value, number, digest = _FIELDS.unpack(fields)
        if magic != MAGIC or identity != self._identity:
            return None
        if _DIGEST.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
            return None
        if max(value, number) >= MAX_NUMBER:
            return None
        return StoredBlock(name, parent, sequence_hash, position, value, number), digest


def slot_bytes_for(block_bytes: int) -> int:
    return PAGE_BYTES - (-block_bytes // PAGE_BYTES) * PAGE_BYTES
