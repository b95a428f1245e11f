"""Opens the disk tier of a worker, or says why the worker serves without one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial

from core.config import CacheConfig
from core.errors import ConfigError
from core.scheduling.block_pool import BlockPool
from kv_transfer.transports.transport import PoolMemory
from worker.tier.disk_tier import FAST_PRIOR_BYTES_PER_S, MAX_WRITES, PRIOR_BYTES_PER_S, DiskTier
from worker.tier.events import TierEvent
from worker.tier.names import identity_of
from worker.tier.slot_file import (
    MAX_UNUSED_IN_MEMORY_S,
    MAX_UNUSED_S,
    Disk,
    OpenFile,
    SlotFile,
    StoredBlock,
    slot_bytes_for,
)
from worker.tier.slot_table import MAX_SLOTS, SlotTable
from worker.tier.threads import TierThreads

MAX_SCAN_S = 30.0  # of the file at the start; beyond: the blocks of the slots behind are lost
MAX_OPEN_S = 60.0  # until a disk has answered at the start; beyond: the worker serves without it

Opened = tuple[SlotFile, dict[int, StoredBlock]]

logger = logging.getLogger(__name__)


def open_tier(
    config: CacheConfig,
    worker: str,
    pool: BlockPool,
    memory: PoolMemory,
    post: Callable[[TierEvent], None],
    model: Callable[[], str] = lambda: "",
) -> tuple[DiskTier, TierThreads] | None:
    """The tier of `worker`, with the blocks that an earlier process has left (see `slot_file`).

    Blocks: call it in a thread. `model`: see `identity_of`; it may take as long as reading the weights. None if the
    config has no tier, or if the disk cannot be used. Raises `ConfigError` if the config cannot be right.
    """
    place = _place_of(config)
    if place is None:
        return None
    if not memory.has_digests:
        raise ConfigError(f"[cache] {place.option} needs KV pools that the worker can copy")
    block_bytes = memory.layout.block_bytes
    slot_bytes = slot_bytes_for(block_bytes)
    num_slots = int(min(place.gigabytes * 1e9, 1e18)) // slot_bytes
    size = f"[cache] {place.option} = {place.gigabytes:g}"
    if num_slots < MAX_WRITES:
        raise ConfigError(f"{size} holds {num_slots} KV blocks, fewer than {MAX_WRITES}")
    if num_slots > MAX_SLOTS:
        raise ConfigError(
            f"{size} holds more than {MAX_SLOTS:,} KV blocks of {block_bytes:,} bytes: "
            f"set it to at most {MAX_SLOTS * slot_bytes / 1e9:g}, or [engine] block_size higher"
        )
    began_at = time.monotonic()
    try:
        identity = identity_of(memory.layout, model())
        file, stored = _within(MAX_OPEN_S, partial(_open_file, place, worker, num_slots, block_bytes, identity))
    except BlockingIOError:
        logger.warning("%s serves without [cache] %s: another process has its file", worker, place.setting)
        return None
    except OSError as error:
        logger.warning("%s serves without [cache] %s: %s", worker, place.setting, error)
        return None
    is_fast = place.in_memory or memory.device is not None
    prior = FAST_PRIOR_BYTES_PER_S if is_fast else PRIOR_BYTES_PER_S
    tier = DiskTier(pool, block_bytes, identity, SlotTable(num_slots, stored), prior)
    logger.info(
        "%s: %d of %d KV blocks found in %s in %.2f s",
        worker,
        len(tier.table),
        num_slots,
        place.directory,
        time.monotonic() - began_at,
    )
    return tier, TierThreads(file, memory, post, in_memory=place.in_memory)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tier keeps its file."""

    option: str  # that has its size
    gigabytes: float
    directory: str
    in_memory: bool
    max_unused_s: float

    @property
    def directory_option(self) -> str:
        return "host_dir" if self.in_memory else "disk_dir"

    @property
    def setting(self) -> str:
        return f"{self.directory_option} = {self.directory}"


def _place_of(config: CacheConfig) -> _Place | None:
    if config.disk_gb:
        return _Place("disk_gb", config.disk_gb, config.disk_dir, False, MAX_UNUSED_S)
    if config.host_gb:
        directory = config.host_dir or f"/dev/shm/tandem-{os.geteuid()}"
        return _Place("host_gb", config.host_gb, directory, True, MAX_UNUSED_IN_MEMORY_S)
    return None


def _open_file(place: _Place, worker: str, num_slots: int, block_bytes: int, identity: bytes) -> Opened:
    def slots_of(disk: Disk) -> SlotFile:
        return SlotFile(disk, num_slots, block_bytes, identity)

    max_bytes = num_slots * slot_bytes_for(block_bytes)
    disk = OpenFile.locked(
        place.directory, f"{worker}.kv", max_bytes, place.directory_option, lambda disk: slots_of(disk).has_blocks()
    )
    file = slots_of(disk)
    try:
        if place.in_memory and disk.capacity_bytes < max_bytes:
            file.remove()
            raise ConfigError(
                f"[cache] {place.option} = {place.gigabytes:g} is more than {place.directory} holds "
                f"({round(disk.capacity_bytes / 1e9, 3):g}); in a container, --shm-size is the size of /dev/shm"
            )
        if removed := disk.remove_unused(time.time(), place.max_unused_s):
            logger.info("%s removed files that no worker has used for long: %s", worker, ", ".join(removed))
        late_at = time.monotonic() + MAX_SCAN_S
        return file, file.scan(lambda: time.monotonic() >= late_at)
    except (OSError, ConfigError):
        file.close()  # else this process would hold the lock without a tier
        raise


def _within(limit_s: float, open_file: Callable[[], Opened]) -> Opened:
    """The result or the exception of `open_file`. Raises `TimeoutError` if the disk has not answered in time; a file
    that is opened later is closed."""
    opened: Future[Opened] = Future()

    def run() -> None:
        try:
            result = open_file()
        except Exception as error:  # noqa: BLE001  raised below
            with contextlib.suppress(InvalidStateError):
                opened.set_exception(error)
            return
        try:
            opened.set_result(result)
        except InvalidStateError:
            result[0].close()

    threading.Thread(target=run, name="tandem-disk-open", daemon=True).start()
    try:
        return opened.result(limit_s)
    except TimeoutError:
        if opened.cancel():
            raise TimeoutError(f"the disk has not answered within {limit_s:g} s") from None
        return opened.result()  # it has just ended, or the disk itself raised the error
