"""Builds a worker with vLLM inside. Runs in vLLM's environment, which has no Tandem but its files."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from core.config import TandemConfig, WorkerConfig
from core.lifecycle import ServiceRole
from fleet.host.service_host import EVERY_ADDRESS, Placement
from model_files.model_source import SourceKind, describe, resolve_model
from runtime.rpc.security import load_credentials
from vllm_worker.async_llm import AsyncEngine
from vllm_worker.engine_arguments import EngineArguments
from vllm_worker.machine import Limits
from vllm_worker.service import VllmService

DEFAULT_KV_GB = 1  # of a worker on a CPU; vLLM takes whole gigabytes


def build_prefill_worker(config: TandemConfig, placement: Placement) -> VllmService:
    return _build(ServiceRole.PREFILL, config, placement)


def build_decode_worker(config: TandemConfig, placement: Placement) -> VllmService:
    return _build(ServiceRole.DECODE, config, placement)


def _build(role: ServiceRole, config: TandemConfig, placement: Placement) -> VllmService:
    engine, vllm = config.engine, config.vllm
    source = resolve_model(engine.model)
    assert source.kind is SourceKind.HUGGING_FACE, "the config names a directory for vLLM"
    _set_cpu(config, placement)
    host = placement.host if placement.host and config.worker.host == WorkerConfig().host else config.worker.host
    step = config.scheduler.on_device(bool(placement.gpus))
    arguments = EngineArguments(
        model=str(source.path),
        info=describe(source, engine.max_context, own_engine=False),
        dtype=engine.dtype,
        offers=role is ServiceRole.PREFILL,
        lease_s=vllm.lease_s,
        verify_every=vllm.verify_every,
        connector=vllm.connector,
        transfer=replace(config.transfer, transport="nixl", lease_s=vllm.lease_s),
        worker=f"{role.value}-{placement.ordinal}",
        tensor_parallel=vllm.tensor_parallel,
        on_gpu=bool(placement.gpus),
        host=host if host not in EVERY_ADDRESS else placement.host or "127.0.0.1",
        side_port=_free_port(),
        args=(*memory_arguments(placement), *_step_sizes(config), *vllm.args),
        adapters=vllm.adapter_directories,
    )
    return VllmService(
        role,
        placement.ordinal,
        replace(config.worker, host=host),
        AsyncEngine(arguments),
        Limits(config.worker.step_timeout_s, step.max_waiting, step.max_running, step.slo_itl_ms / 1e3),
        load_credentials(config.security),
    )


def memory_arguments(placement: Placement) -> list[str]:
    """By itself, vLLM takes nearly the whole GPU of a worker that has a share of one."""
    share = placement.gpus or 0.0
    return ["--gpu-memory-utilization", f"{share:g}"] if 0 < share < 1 else []


def _step_sizes(config: TandemConfig) -> list[str]:
    """vLLM's own sizes, unless the config has others."""
    sizes = config.scheduler
    given = {"--max-num-batched-tokens": sizes.max_batched_tokens, "--max-num-seqs": sizes.max_running}
    return [part for name, size in given.items() if size for part in (name, str(size))]


def _set_cpu(config: TandemConfig, placement: Placement) -> None:
    """Memory and cores of vLLM on a CPU, which takes both from the environment."""
    if placement.gpus:
        return
    kv_gb = -(-config.engine.kv_memory_mb // 1024) or DEFAULT_KV_GB
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gb)
    if placement.cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, placement.cores))


def _free_port() -> int:
    """For the side channel of the connector: fresh at each start, because a dead engine may hold the old one."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
