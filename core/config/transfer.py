"""Options of the hand-off of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.options import check_options, option, require

MAX_TRANSFERS = 16_384  # one heartbeat, a single message, lists every transfer


def heartbeat_s(lease_s: float) -> float:
    """The interval between heartbeats of a reader to an owner with this lease."""
    return lease_s / 6


@dataclass(frozen=True, slots=True)
class TransferConfig:
    # ucxx needs the extra ucxx; memory is for tests in one process
    transport: str = option("nixl", choices=("nixl", "ucxx", "memory"))
    # Limit: an offered block is kept so long after the last heartbeat of its reader; beyond: the block is free
    lease_s: float = option(20.0, positive=True)
    # Limit: time for a peer to answer after connecting; beyond: the path is unreachable
    connect_timeout_s: float = option(5.0, positive=True)
    # Limit: least speed of a read; beyond: cancelled; the call fails and is retried
    min_bytes_per_s: float = option(50e6, positive=True)
    read_grace_s: float = 2.0  # time added to the limit of each read; beyond: as above
    max_reads_in_flight: int = option(4, least=1)  # reads of a transfer at the same time; beyond: they wait
    # More blocks cost less per block; fewer let a cancelled read end sooner
    max_blocks_per_read: int = option(512, least=1)
    # The same in bytes; a copy over shared memory blocks the transfer agent
    max_bytes_per_read: int = option(134_217_728, least=1)
    max_read_attempts: int = option(2, least=1)  # of the same blocks, when a digest does not match
    # Limit: open offers, likewise pulls, early messages, remembered ends; beyond: `QueueFull`, or dropped, counted
    max_transfers: int = option(1024, least=1, most=MAX_TRANSFERS)
    verify_digests: bool = True  # check the bytes of every block after its read
    slow_path_share: float = option(0.25, positive=True)  # a path is slow below this share of its expected bandwidth
    expected_path_bytes_per_s: float = 0.0  # expected bandwidth of each path; 0 = derived from the hardware
    # Interval between polls of the transport without an open transfer
    idle_poll_interval_s: float = option(0.02, positive=True)
    active_poll_interval_s: float = option(0.001, positive=True)  # ... with open transfers, while no bytes move

    def __post_init__(self) -> None:
        check_options(self)
        require(self.slow_path_share < 1, f"slow_path_share must be less than 1, is {self.slow_path_share}")

    def blocks_per_read(self, block_bytes: int) -> int:
        return max(1, min(self.max_blocks_per_read, self.max_bytes_per_read // block_bytes))

    @property
    def heartbeat_s(self) -> float:
        return heartbeat_s(self.lease_s)
