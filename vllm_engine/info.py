"""A worker's description of itself for the routers of other projects."""

from __future__ import annotations

import datetime

from smg_grpc_proto import vllm_engine_pb2

from core.errors import TandemError
from core.model_info import ModelInfo
from core.scheduling.block_pool import Column
from worker.service import WorkerParts

# smg carries the parameters of this connector from the prefill to the decode worker without looking at them.
KV_CONNECTOR = "NixlConnector"


def health(parts: WorkerParts, failure: TandemError | None, stopped: bool) -> vllm_engine_pb2.HealthCheckResponse:
    """A draining worker is not healthy: it refuses new requests."""
    if failure is not None or stopped:
        return vllm_engine_pb2.HealthCheckResponse(healthy=False, message="this worker stops, or has failed")
    if parts.machine.core.draining:
        return vllm_engine_pb2.HealthCheckResponse(healthy=False, message="this worker is draining")
    return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")


def model_info(info: ModelInfo, path: str, most_tokens: int) -> vllm_engine_pb2.GetModelInfoResponse:
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=path,
        tokenizer_path=path,
        is_generation=True,
        max_context_length=info.context_length,
        max_req_input_len=most_tokens - 1,
        vocab_size=info.vocab_size,
        served_model_name=info.name,
        eos_token_ids=sorted(info.eos_token_ids),
        bos_token_id=info.bos_token_id or 0,
    )


def server_info(
    parts: WorkerParts, kv_role: str, num_calls: int, uptime_s: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    layout, scheduler = parts.agent.address.layout, parts.machine.core.scheduler
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=num_calls,
        uptime_seconds=uptime_s,
        server_type="vllm-grpc",
        kv_connector=KV_CONNECTOR,
        kv_role=kv_role,
        kv_engine_id=parts.worker_id,
        data_parallel_size=1,
        kv_cache_dtype=layout.dtype,
        model_dtype="" if layout.has_scales else f"torch.{layout.dtype}",  # the dtype of a pool with scales is its own
        block_size=scheduler.block_size,
        max_num_seqs=scheduler.config.max_running,
    )


def loads(parts: WorkerParts) -> vllm_engine_pb2.GetLoadsResponse:
    load, core = parts.machine.load(), parts.machine.core
    block_size, num_blocks = core.scheduler.block_size, core.pool.num_blocks
    num_used = num_blocks - load.ledger[Column.FREE] - load.ledger[Column.CACHED]
    return vllm_engine_pb2.GetLoadsResponse(
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
        version="tandem",
        dp_rank_count=1,
        loads=[
            vllm_engine_pb2.SchedulerLoad(
                num_running_reqs=load.num_running,
                num_waiting_reqs=load.num_waiting,
                num_total_reqs=load.num_running + load.num_waiting,
                num_used_tokens=num_used * block_size,
                max_total_num_tokens=num_blocks * block_size,
                token_usage=num_used / num_blocks,
                max_running_requests=core.scheduler.config.max_running,
                num_waiting_uncached_tokens=load.num_queued_tokens,
            )
        ],
    )
