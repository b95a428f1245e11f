"""Fields of `Finished` and metadata of a call: its promise, its timings and its receipt (inference.proto)."""

from __future__ import annotations

from collections.abc import Sequence

from core.lifecycle import Stage
from core.service import Metadata
from protos import codec
from router.requests.events import Outcome, Promise
from tandem_client.stubs import inference_pb2


def encode_promise(promise: Promise) -> inference_pb2.Promise:
    return inference_pb2.Promise(
        ttft_ms=promise.ttft_s * 1e3, tpot_ms=promise.tpot_s * 1e3, path=codec.PATH_TO_WIRE[promise.path]
    )


def initial_metadata(promise: Promise) -> Metadata:
    return (
        ("tandem-predicted-ttft-ms", f"{promise.ttft_s * 1e3:.3f}"),
        ("tandem-predicted-tpot-ms", f"{promise.tpot_s * 1e3:.3f}"),
        ("tandem-predicted-path", promise.path.value),
    )


def phase_timings(outcome: Outcome, total_s: float) -> inference_pb2.PhaseTimings:
    timeline, prefill, decode = outcome.timeline, outcome.prefill, outcome.decode
    computed = prefill or decode
    return inference_pb2.PhaseTimings(
        tokenize_ms=timeline.seconds_in(Stage.TOKENIZE) * 1e3,
        router_queue_ms=timeline.seconds_in(Stage.QUEUE) * 1e3,
        prefill_queue_ms=0.0 if computed is None else computed.queue_s * 1e3,
        prefill_ms=outcome.prefill_s * 1e3,
        first_token_ms=outcome.first_token_s * 1e3,
        transfer_ms=0.0 if decode is None else decode.transfer_s * 1e3,
        transfer_exposed_ms=0.0 if decode is None else decode.transfer_exposed_s * 1e3,
        decode_ms=timeline.seconds_in(Stage.DECODE) * 1e3,
        total_ms=total_s * 1e3,
    )


def receipt_of(outcome: Outcome) -> inference_pb2.Receipt:
    computed = outcome.prefill or outcome.decode
    queue_s = outcome.timeline.seconds_in(Stage.QUEUE) + (0.0 if computed is None else computed.queue_s)
    return inference_pb2.Receipt(
        queue_ms=queue_s * 1e3,
        prefill_ms=outcome.prefill_s * 1e3,
        decode_ms=outcome.timeline.seconds_in(Stage.DECODE) * 1e3,
        kv_block_seconds=outcome.kv_block_seconds,
        transferred_bytes=outcome.transferred_bytes,
        read_tokens=outcome.read_tokens,
    )


def trailing_metadata(receipts: Sequence[inference_pb2.Receipt]) -> Metadata:
    """The sums over the choices of a call."""
    return (
        ("tandem-queue-ms", f"{sum(receipt.queue_ms for receipt in receipts):.3f}"),
        ("tandem-prefill-ms", f"{sum(receipt.prefill_ms for receipt in receipts):.3f}"),
        ("tandem-decode-ms", f"{sum(receipt.decode_ms for receipt in receipts):.3f}"),
        ("tandem-kv-block-seconds", f"{sum(receipt.kv_block_seconds for receipt in receipts):.6f}"),
        ("tandem-transferred-bytes", str(sum(receipt.transferred_bytes for receipt in receipts))),
    )
