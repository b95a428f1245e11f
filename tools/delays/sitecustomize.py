"""Delays by chance, in every Python process that has this folder in its `PYTHONPATH`, but those with vLLM inside:

    PYTHONPATH=$PWD/tools/delays:$PWD DELAYS_LOG=/tmp/delays.log pytest -q -n 2 tests/integration tests/faults

They come where another thread, process or machine may be late: before and after a gRPC call is answered, before a
message of a stream, after a step, between two rounds of a transfer agent, before `asyncio.to_thread`. A test that fails
so may hold only on a quick machine, or it has found a fault that users meet on a slow one. No seed would replay a run,
so each delay is a line of the log: when, in which process, where, how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# Where: how probable a delay is, and its longest, in seconds.
PLACES = {
    "call": (0.25, 0.4), "answer": (0.15, 0.3), "message": (0.03, 0.2), "thread": (0.2, 0.2), "step": (0.02, 0.15),
    "agent": (0.002, 0.1),
}  # fmt: skip
_generator = random.Random()
_log = os.open(os.environ["DELAYS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def draw(place: str) -> float:
    """Seconds, mostly 0."""
    probability, longest = PLACES[place]
    if _generator.random() >= probability:
        return 0.0
    seconds = _generator.random() * longest
    with contextlib.suppress(OSError):  # some tests allow no larger file
        os.write(_log, f"{time.time():.6f} {os.getpid()} {place} {seconds:.3f}\n".encode())
    return seconds


async def late(place: str) -> None:
    if seconds := draw(place):
        await asyncio.sleep(seconds)


class _Context:
    """A call's context whose `write` is late."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await late("message")
        await self._context.write(message)


def _delay_calls(module: Any) -> None:
    plain = module.checked

    def checked(handler: Any, abort: Any) -> Any:
        found = plain(handler, abort)
        behave = getattr(found, module._kind_of(found))

        async def answer(raw: Any, context: Any) -> Any:
            await late("call")
            result = await behave(raw, _Context(context) if found.response_streaming else context)
            await late("answer")
            return result

        async def answer_all(raw: Any, context: Any) -> AsyncIterator[Any]:
            await late("call")
            async for message in behave(raw, context):
                await late("message")
                yield message

        return module.of_same_kind(found, answer_all if inspect.isasyncgenfunction(behave) else answer)

    module.checked = checked


def _delay_method(place: str, owner: str, name: str) -> Callable[[Any], None]:
    def patch(module: Any) -> None:
        plain = getattr(getattr(module, owner), name)

        def delayed(*arguments: Any) -> Any:
            result = plain(*arguments)
            time.sleep(draw(place))
            return result

        setattr(getattr(module, owner), name, delayed)

    return patch


PATCHES: dict[str, Callable[[Any], None]] = {
    "runtime.rpc.checked_handlers": _delay_calls,
    "worker.executor": _delay_method("step", "StepExecutor", "_collect"),
    "kv_transfer.agent": _delay_method("agent", "TransferAgent", "_run_once"),
}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        PATCHES[module.__name__](module)


class _Finder:
    """A finder as in `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in PATCHES else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


async def _to_thread(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    await late("thread")
    return await _plain_to_thread(function, *arguments, **named)


sys.meta_path.insert(0, _Finder)
_plain_to_thread, asyncio.to_thread = asyncio.to_thread, _to_thread
