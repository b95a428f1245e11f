"""Options of the hand-off of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.requirements import require, require_choice, require_finite_floats, require_positive

MAX_TRANSFERS = 16_384  # one heartbeat, a single message, lists every transfer


def heartbeat_s(lease_s: float) -> float:
    """The interval between heartbeats of a reader to an owner with this lease."""
    return lease_s / 6


@dataclass(frozen=True, slots=True)
class TransferConfig:
    transport: str = "nixl"  # nixl | ucxx (install the extra ucxx) | memory (one process only, for tests)
    # Limit: an offered block is kept so long after the last heartbeat of its reader; beyond: the block is free
    lease_s: float = 20.0
    connect_timeout_s: float = 5.0  # time for a peer to answer after connecting; beyond: the path is unreachable
    min_bytes_per_s: float = 50e6  # least speed of a read; beyond: cancelled; the call fails and is retried
    read_grace_s: float = 2.0  # time added to the limit of each read; beyond: as above
    max_reads_in_flight: int = 4  # reads of a transfer at the same time; beyond: they wait
    max_blocks_per_read: int = 512  # more blocks cost less per block; fewer let a cancelled read end sooner
    max_bytes_per_read: int = 134_217_728  # the same in bytes; a copy over shared memory blocks the transfer agent
    max_read_attempts: int = 2  # of the same blocks, when a digest does not match
    # Limit: open offers, likewise pulls, early messages, remembered ends; beyond: `QueueFull`, or dropped, counted
    max_transfers: int = 1024
    verify_digests: bool = True  # check the bytes of every block after its read
    slow_path_share: float = 0.25  # a path is slow below this share of its expected bandwidth
    expected_path_bytes_per_s: float = 0.0  # expected bandwidth of each path; 0 = derived from the hardware
    idle_poll_interval_s: float = 0.02  # interval between polls of the transport without an open transfer
    active_poll_interval_s: float = 0.001  # ... with open transfers, while no bytes move

    def __post_init__(self) -> None:
        require_choice(self, "transport", "nixl", "ucxx", "memory")
        require_positive(
            self, "lease_s", "connect_timeout_s", "min_bytes_per_s", "max_reads_in_flight", "max_blocks_per_read",
            "max_bytes_per_read", "max_read_attempts", "max_transfers", "slow_path_share",
            "idle_poll_interval_s", "active_poll_interval_s",
        )  # fmt: skip
        require_finite_floats(self)
        require(
            self.max_transfers <= MAX_TRANSFERS,
            f"max_transfers must be at most {MAX_TRANSFERS}, is {self.max_transfers}",
        )
        require(self.slow_path_share < 1, f"slow_path_share must be less than 1, is {self.slow_path_share}")

    def blocks_per_read(self, block_bytes: int) -> int:
        return max(1, min(self.max_blocks_per_read, self.max_bytes_per_read // block_bytes))

    @property
    def heartbeat_s(self) -> float:
        return heartbeat_s(self.lease_s)
