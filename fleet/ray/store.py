"""A `HandoverStore` in the key-value table of Ray's GCS, which lives as long as the names of detached actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from core.errors import WorkerUnavailable

KEY, NAMESPACE = b"handover", b"tandem"
# Limit: a write of the record for the next supervisor, below `CALL_TIMEOUT_S`; beyond: tried again a second later
TIMEOUT_S = 2.0


class RayStore:
    async def read(self) -> str:
        value: bytes | None = await _call(lambda table: table.internal_kv_get(KEY, NAMESPACE, timeout=TIMEOUT_S))
        return (value or b"").decode(errors="replace")

    async def write(self, record: str) -> None:
        await _call(lambda table: table.internal_kv_put(KEY, record.encode(), True, NAMESPACE, timeout=TIMEOUT_S))


async def _call(call: Callable[[Any], Any]) -> Any:
    import ray
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    try:
        return await asyncio.to_thread(call, internal_kv_get_gcs_client())
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:
        raise WorkerUnavailable(f"Ray does not answer: {error}") from error
