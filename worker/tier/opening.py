"""Opens the disk tier of a worker, or says why the worker serves without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from core.config import CacheConfig
from core.errors import ConfigError
from core.scheduling.block_pool import BlockPool
from kv_transfer.transports.transport import PoolMemory
from worker.tier.disk_tier import MAX_WRITES, DiskTier
from worker.tier.events import TierEvent
from worker.tier.names import identity_of
from worker.tier.slot_file import OpenFile, SlotFile, slot_bytes_for
from worker.tier.slot_table import SlotTable
from worker.tier.threads import TierThreads

logger = logging.getLogger(__name__)


def open_tier(
    config: CacheConfig, worker: str, pool: BlockPool, memory: PoolMemory, post: Callable[[TierEvent], None]
) -> tuple[DiskTier, TierThreads] | None:
    """The tier of `worker`, with the blocks that an earlier process of this name has left. Blocks: call it in a thread.

    None if the config has none, or if the disk cannot be used. Raises `ConfigError` if the config cannot be right.
    """
    if not config.disk_gb:
        return None
    if memory.view is None:
        raise ConfigError("[cache] disk_gb needs KV pools in host memory ([engine] device = cpu)")
    block_bytes, identity = memory.layout.block_bytes, identity_of(memory.layout)
    slot_bytes = slot_bytes_for(block_bytes)
    num_slots = int(config.disk_gb * 1e9) // slot_bytes
    if num_slots < MAX_WRITES:
        raise ConfigError(f"[cache] disk_gb = {config.disk_gb:g} holds {num_slots} KV blocks, fewer than {MAX_WRITES}")
    began_at = time.monotonic()
    try:
        disk = OpenFile.locked(config.disk_dir, f"{worker}.kv", num_slots * slot_bytes)
        file = SlotFile(disk, num_slots, block_bytes, identity)
        stored = file.scan()
    except BlockingIOError:
        logger.warning("%s serves without its disk tier: another process has its file in %s", worker, config.disk_dir)
        return None
    except OSError as error:
        logger.warning("%s serves without its disk tier: %s", worker, error)
        return None
    tier = DiskTier(pool, block_bytes, identity, SlotTable(num_slots, stored))
    logger.info(
        "%s: %d of %d KV blocks found on disk in %.2f s",
        worker,
        len(tier.table),
        num_slots,
        time.monotonic() - began_at,
    )
    return tier, TierThreads(file, memory, post)
