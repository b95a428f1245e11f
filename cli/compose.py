"""The composition root: the only module that names concrete runners, transports and services.

A factory is a module-level function, so that `functools.partial(factory, config)` can be pickled for other processes.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.config import EngineConfig, GatewayConfig, RouterConfig, TandemConfig, TransferConfig, WorkerConfig
from core.cost.model_work import Peak
from core.cost.step_cost_fit import StepCostFit
from core.errors import ConfigError, TransportError
from core.lifecycle import ServiceRole
from core.scheduling.block_pool import BlockPool
from core.scheduling.scheduler import Scheduler
from fleet.host.service_host import Placement
from kv_transfer.agent import AgentIdentity, TransferAgent
from kv_transfer.device.device_checks import check_environment
from kv_transfer.path_probe import keep_for_probes
from kv_transfer.protocol.events import AgentEvent, AgentFailed
from kv_transfer.protocol.machine import TransferMachine
from kv_transfer.transports.host_address import is_loopback
from kv_transfer.transports.memory_transport import MemoryFabric, MemoryTransport
from kv_transfer.transports.transport import PoolMemory, Transport
from model_files.model_source import content_digest, resolve_model
from router.routing.policy import SecondsPolicy
from router.routing.question import Policy
from runtime.large_blocks import give_large_blocks_back
from runtime.named_function import load_function
from runtime.rpc.security import load_credentials
from worker.core import WorkerCore
from worker.executor import StepExecutor, pinned
from worker.request_check import RequestCheck, refuse_grammars
from worker.service import BuildParts, WorkerParts, WorkerService
from worker.serving_worker import Servicer
from worker.step_stats import StepStats
from worker.tier.opening import open_tier
from worker.view import WorkerMachine
from worker.warm_up import warm_up

# With `transport = "memory"`, workers in one process (tests) reach each other's pools through this fabric.
FABRIC = MemoryFabric()


def router_host(config: TandemConfig, machine: str) -> str:
    """The host that routers listen on; `machine` as `Placement.host`."""
    return _listen_on(config.router.host, RouterConfig().host, machine)


def http_host(config: TandemConfig, machine: str) -> str:
    """The host that the HTTP servers of routers listen on; `machine` as `Placement.host`."""
    return _listen_on(config.gateway.host, GatewayConfig().host, machine)


def build_router(config: TandemConfig, placement: Placement, cache_dir: Path | None = None) -> Any:
    """A `core.service.RouterControl`. Each router of a machine has a metrics port of its own."""
    from router.service import RouterParts, RouterPlace, RouterService

    router, telemetry = replace(config.router, host=router_host(config, placement.host)), config.telemetry
    if placement.address:
        router = replace(router, port=int(placement.address.rpartition(":")[2]))
    if telemetry.metrics_port:
        telemetry = replace(telemetry, metrics_port=telemetry.metrics_port + placement.ordinal)
    load = functools.partial(_load_tokenizer, config, cache_dir)
    # A planner may keep no prefill worker at all.
    begins_with_prefill = (
        router.local_prefill == "never" and config.cluster.num_prefill > 0 and not config.planner.enabled
    )
    place = RouterPlace(placement.ordinal, bool(placement.address), placement.control, begins_with_prefill)
    front = None
    if config.gateway.port:
        from cli.gateway import http_front

        front = functools.partial(http_front, config, http_host(config, placement.host))
    parts = RouterParts(load, load_policy(router), front)
    give_large_blocks_back()
    return RouterService(router, parts, telemetry, place, config.security, config.api_keys)


def _load_tokenizer(config: TandemConfig, cache_dir: Path | None) -> Any:
    """A `ModelTokenizer`, which also knows the adapters of the workers, and the default sampling of requests."""
    from model_files.default_sampling import default_sampling
    from model_files.model_source import resolve_model
    from text.tokenizer import load_tokenizer

    engine = config.engine
    tokenizer = load_tokenizer(engine.model, engine.max_context, cache_dir, own_engine=engine.name == "tandem")
    adapters = tuple(config.vllm.adapter_directories)
    if tokenizer.info.name in adapters:
        raise ConfigError(f"[vllm] adapters: {tokenizer.info.name} is the name of the model")
    sampling = default_sampling(resolve_model(engine.model, cache_dir)) if engine.generation_config == "auto" else {}
    tokenizer.info = replace(tokenizer.info, adapters=adapters, default_sampling=sampling)
    return tokenizer


def load_policy(config: RouterConfig) -> Policy:
    """The routing policy that the config names, or `SecondsPolicy`. Raises `ConfigError`."""
    if not config.policy:
        return SecondsPolicy(config)
    policy: Any = load_function("[router] policy", config.policy)(config)
    for name in ("compared", "choose", "candidates"):
        if not hasattr(policy, name):
            raise ConfigError(f"[router] policy: {config.policy} must return a Policy, its object has no {name}")
    made: Policy = policy
    return made


def build_prefill_worker(config: TandemConfig, placement: Placement, cache_dir: Path | None = None) -> WorkerService:
    return _build_worker(ServiceRole.PREFILL, config, placement, cache_dir)


def build_decode_worker(config: TandemConfig, placement: Placement, cache_dir: Path | None = None) -> WorkerService:
    return _build_worker(ServiceRole.DECODE, config, placement, cache_dir)


def _build_worker(
    role: ServiceRole, config: TandemConfig, placement: Placement, cache_dir: Path | None
) -> WorkerService:
    from decode_worker.servicer import DecodeServicer
    from prefill_worker.servicer import PrefillServicer

    timeout_s = config.worker.default_timeout_s
    servicers: dict[ServiceRole, Servicer] = {
        ServiceRole.PREFILL: PrefillServicer(timeout_s),
        ServiceRole.DECODE: DecodeServicer(timeout_s),
    }
    build = _worker_parts(role, config, placement, cache_dir)
    return WorkerService(role, _worker_config(config, placement), build, servicers, load_credentials(config.security))


def role_option(config: EngineConfig) -> str:
    """The option that keeps a worker from serving in the other role; empty = it can."""
    if config.name == "vllm":
        return "[engine] name = vllm"
    if config.prefill_block_size not in (0, config.block_size):
        return f"[engine] prefill_block_size = {config.prefill_block_size} beside block_size = {config.block_size}"
    return ""


def open_transport(config: TransferConfig, name: str, on_device: bool = False, is_local: bool = False) -> Transport:
    """`on_device`: the pool is on a GPU. `is_local`: no other machine can reach the worker."""
    if on_device:
        check_environment(os.environ)
    if config.transport == "memory":
        return MemoryTransport(name, FABRIC)
    if config.transport == "nixl":
        try:
            from kv_transfer.transports.nixl_transport import NixlTransport
        except ImportError as error:
            raise ConfigError(str(error)) from error
        return NixlTransport(name, on_device, is_local)
    if config.transport == "ucxx":
        try:
            from kv_transfer.transports.ucxx_transport import UcxxTransport
        except ImportError as error:
            raise ConfigError(f"transport ucxx needs `pip install 'tandem-serve[ucxx]'`: {error}") from error
        return UcxxTransport(name, config.connect_timeout_s)
    raise ConfigError(f"transport {config.transport!r} is not built in")


def _worker_config(config: TandemConfig, placement: Placement) -> WorkerConfig:
    return replace(config.worker, host=_listen_on(config.worker.host, WorkerConfig().host, placement.host))


def _listen_on(configured: str, default: str, machine: str) -> str:
    """The host to listen on: in a joined cluster the machine's address, unless the config sets another host."""
    return machine if machine and configured == default else configured


def _engine_config(role: ServiceRole, config: EngineConfig, placement: Placement) -> EngineConfig:
    """The engine's options for a worker of this role at this place."""
    is_prefill = role is ServiceRole.PREFILL
    own_size = config.prefill_block_size if is_prefill else 0
    device = config.device
    if placement.gpus is not None:
        device = "cuda" if placement.gpus else "cpu"  # CUDA shows the worker no GPU but its own
    return replace(
        config,
        device=device,
        num_threads=config.num_threads or placement.num_threads,
        block_size=own_size or config.block_size,
        # A prefill worker proposes nothing before it serves as a decode worker, so its device need not be able to.
        speculation=config.speculation.replace("lookup", "auto") if is_prefill else config.speculation,
    )


def _is_on_gpu(engine: EngineConfig) -> bool:
    """Whether a worker's model runs on a GPU. A fake model does not, and its worker never imports torch."""
    if engine.is_fake:
        return False
    from engine.backend import choose_device

    return choose_device(engine.device).type == "cuda"


def _worker_parts(
    role: ServiceRole,
    config: TandemConfig,
    placement: Placement,
    cache_dir: Path | None,
) -> BuildParts:
    """Returns the function that builds a worker's parts: runner, pool, transfer agent, machine. Runs in a thread."""

    def build(post: Callable[[Any], None], fail: Callable[[BaseException], None]) -> WorkerParts:
        from decode_worker.machine import DecodeMachine
        from engine.factory import build_runner
        from engine.runner import StepLimits
        from prefill_worker.machine import PrefillMachine
        from text.grammars import GrammarReader
        from text.tokenizer import load_tokenizer

        engine = _engine_config(role, config.engine, placement)
        if engine.device.startswith("cuda"):  # fails before a model is loaded
            check_environment(os.environ)
        cores = placement.cores if engine.pin_threads and engine.num_threads <= len(placement.cores) else ()
        grammars = GrammarReader(functools.partial(load_tokenizer, engine.model, engine.max_context, cache_dir))
        with pinned(cores):  # loading must not use the other workers' cores
            step = config.scheduler.on_device(_is_on_gpu(engine))
            limits = StepLimits(step.max_running, step.max_batched_tokens)
            runner = build_runner(engine, cache_dir, limits, gpu_share=placement.gpus or 1.0, grammars=grammars)
        executor, costs = StepExecutor(runner, cores), StepCostFit()
        if not engine.is_fake:
            max_tokens = min(step.max_batched_tokens, runner.info.context_length - 1)
            warm_up(executor, costs, runner.layout.block_size, runner.num_blocks, max_tokens)
        # The identity includes an incarnation, so peers treat a restarted worker as a new worker.
        name = placement.slot or f"{role.value}-{placement.ordinal}"
        identity = AgentIdentity(name, secrets.randbits(63) | 1)
        on_device = runner.pool_device() is not None
        num_blocks, probe_bytes = keep_for_probes(runner.num_blocks, runner.layout, on_device)
        memory = PoolMemory(
            runner.pool_address(), num_blocks, runner.layout, runner.pool_memory(), runner.pool_device(), probe_bytes,
            runner.device_memory(),
        )  # fmt: skip
        pool = BlockPool(num_blocks)
        weight_bytes = None if runner.sizes is None else runner.sizes.weight_bytes  # of the dtype that auto has chosen

        def model() -> str:
            weights = f"{content_digest(resolve_model(engine.model, cache_dir))} {engine.dtype} {weight_bytes}"
            return f"{weights} gpu" if on_device else weights  # a GPU rounds otherwise than a CPU

        tier, disk = open_tier(config.cache, name, pool, memory, post, model) or (None, None)
        # Both halves of a hand-off read this: without digests, READYs and reads need not be small.
        transfer = replace(config.transfer, verify_digests=config.transfer.verify_digests and memory.has_digests)

        def on_events(events: list[AgentEvent]) -> None:
            for event in events:
                if isinstance(event, AgentFailed):
                    fail(TransportError(event.detail))
                else:
                    post(event)

        is_local = is_loopback(_worker_config(config, placement).host)
        open_ours = functools.partial(open_transport, transfer, on_device=on_device, is_local=is_local)
        agent = TransferAgent(transfer, identity, memory, open_ours, on_events)
        address = agent.start()
        runner.start_background_work()
        eos = runner.info.eos_token_ids
        scheduler = Scheduler(step, pool, runner.layout.block_size, eos)
        stats = StepStats(runner.sizes, Peak(engine.peak_tflops * 1e12, engine.peak_gb_per_s * 1e9))
        core = WorkerCore(scheduler, pool, costs=costs, stats=stats, tier=tier)
        transfers = TransferMachine(transfer, pool, address, runner.info.vocab_size)

        def make_machine(role: ServiceRole) -> WorkerMachine:
            # A prefill worker samples one token of each prompt, so it has no use for guesses.
            core.take_role(speculates=runner.proposes and role is ServiceRole.DECODE)
            if role is ServiceRole.PREFILL:
                return PrefillMachine(core, transfers)
            return DecodeMachine(core, transfers, config.worker.max_pulls_waiting)

        check_grammar = grammars.compile_aside if runner.takes_grammars else refuse_grammars
        check = RequestCheck(runner.info.vocab_size, runner.info.context_length, check_grammar)
        return WorkerParts(identity.name, make_machine(role), make_machine, executor, agent, check, disk)

    return build
