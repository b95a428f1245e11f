"""`WaitingNixlConnector` leaves the thread that makes it on its cores: in vLLM's engine, that thread computes."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import ModuleType

import pytest

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


class MovingConnector:
    """As vLLM 0.32 on a CPU."""

    def __init__(self) -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def test_vllm_does_not_move_the_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = MODULE.split(".")
    for depth in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), ModuleType(names[depth - 1]))
    monkeypatch.setattr(sys.modules[MODULE], "NixlPullConnector", MovingConnector, raising=False)
    monkeypatch.delitem(sys.modules, "vllm_worker.connector", raising=False)
    connector = importlib.import_module("vllm_worker.connector")
    monkeypatch.setattr(connector, "wait_between_polls", lambda: None)
    cores: list[set[int]] = []

    def make() -> None:
        cores.append(os.sched_getaffinity(0))
        connector.WaitingNixlConnector()
        cores.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=make)  # pins itself alone
    thread.start()
    thread.join()
    monkeypatch.delitem(sys.modules, "vllm_worker.connector")
    before, after = cores
    assert after == before
