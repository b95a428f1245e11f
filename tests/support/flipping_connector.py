"""vLLM's NIXL connector, with a fault: while the file $FLIP_WHILE exists, one bit of the first block is wrong when a
request has been read.

Runs inside vLLM, as the inner connector of `VerifiedConnector`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_worker.connector import WaitingNixlConnector

EXPONENT_BIT = 0x40  # the highest one of a float32, in its last byte


class FlippingNixlConnector(WaitingNixlConnector):
    _caches: list[torch.Tensor]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = list(kv_caches.values())
        self._blocks: dict[str, int] = {}  # of requests that are being read

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        for request_id, request in self._get_connector_metadata().reqs_to_recv.items():
            self._blocks[request_id] = request.local_block_ids[0][0]
        super().start_load_kv(forward_context, **options)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            block = self._blocks.pop(request_id)
            if not os.path.exists(os.environ["FLIP_WHILE"]):
                continue
            head = self._caches[3][block, 0]  # of one layer: first the keys of all tokens, then the values
            values = head[len(head) // 2]  # of the first token, and behind them those of the second
            (place,) = (values.abs() < 1.0).nonzero()[0].tolist()  # the bit makes it huge
            values[place : place + 1].view(torch.uint8)[-1] ^= EXPONENT_BIT
            print(f"flipped one bit of {request_id}", flush=True)
        return results
