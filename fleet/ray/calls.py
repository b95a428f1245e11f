"""Calls of Ray actors."""

from __future__ import annotations

import os
from typing import Any

from fleet.host.host import HostDied, OtherVersion


def begin_call(actor: Any, method: str, *arguments: Any) -> Any:
    """For `await_actor`. Raises `OtherVersion`."""
    try:
        return getattr(actor, method).remote(*arguments)
    except (AttributeError, TypeError) as error:  # Ray knows the methods of an actor and their parameters
        raise OtherVersion(f"its version of Tandem does not take the call {method}: {error}") from error


async def await_actor(call: Any) -> Any:
    """The result of an actor call. Raises `HostDied` if the actor is dead or dies."""
    import ray

    try:
        return await call
    except ray.exceptions.OutOfMemoryError as error:  # no `RayActorError`
        raise HostDied("Ray killed its process, because the machine is short of memory") from error
    except ray.exceptions.RayActorError as error:
        raise HostDied(f"its process ended; its log is in {log_dir()}") from error


def log_dir() -> str:
    import ray

    node: Any = ray._private.worker._global_node
    return os.path.join(node.get_session_dir_path(), "logs")
