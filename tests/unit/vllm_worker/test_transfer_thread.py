"""The thread that owns the KV transfers of a vLLM engine."""

from __future__ import annotations

import threading

import pytest

from core.config import TransferConfig
from core.kv_layout import KVLayout
from kv_transfer.agent import AgentIdentity
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory
from vllm_worker.kv import transfer_thread
from vllm_worker.kv.transfer_thread import TransferThread
from vllm_worker.kv.transfers import OfferCancelled

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=4)


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_thread, "CLOSE_TIMEOUT_S", 0.05)
    pool = PoolMemory(0, 4, LAYOUT, memoryview(bytearray(4 * LAYOUT.block_bytes)))
    fabric, may_go_on = MemoryFabric(), threading.Event()
    thread = TransferThread(
        TransferConfig(), AgentIdentity("w", 1), pool, lambda name: MemoryTransport(name, fabric), vocab_size=100
    )
    monkeypatch.setattr(thread.machine, "handle", lambda *_: may_go_on.wait() and [])
    thread.post(OfferCancelled(7))
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive()
    assert thread._thread.is_alive(), "it hangs"
    may_go_on.set()
    thread._thread.join(10.0)
    assert not thread._thread.is_alive()
