"""vLLM's AsyncLLM as an `Engine`. Four files import vllm: this one, and those that vLLM loads by name, draws.py,
connector.py and nixl_handshake.py.

Tested with vLLM 0.32. Its KV connector moves the blocks (`kv_producer` on a prefill worker, `kv_consumer` on a decode
worker); the parameters that it gives for the other side travel as JSON with a version. What arrives is checked, because
wrong parameters end the whole engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.config import TransferConfig
from core.errors import ConfigError, TandemError, WorkerUnavailable
from core.handoff import AgentAddress, TransferId
from core.lifecycle import FinishReason
from core.model_info import ModelInfo
from core.step import SampledToken
from protos.agent_codec import decode_agent
from tandem_client.stubs import worker_pb2
from vllm_worker.adapters import adapter_arguments
from vllm_worker.engine import (
    BlocksChanged,
    EngineDied,
    EngineInfo,
    EngineOutput,
    EngineReport,
    EngineStep,
    EngineTransfer,
    HandshakeEnded,
    Prompt,
)
from vllm_worker.handoff import EngineAddress, decode_handoff, encode_handoff
from vllm_worker.kv.host_pool import layout_of
from vllm_worker.kv.ledger import decode_holders
from vllm_worker.kv.parameters import (
    HOLDERS,
    LOST_MOVES,
    NUM_LENT,
    RequestEnd,
    decode_end,
    encode_request,
    encode_transfer,
)
from vllm_worker.nixl_handshake import EXTENSION, shake_hands
from vllm_worker.prefix_cache import PrefixCache
from vllm_worker.process_group import Guardian
from vllm_worker.root_cause import output_tail, root_cause
from vllm_worker.sampling import sampling_arguments

DRAWS = "vllm_worker.draws:TandemDraws"
TANDEM_CONNECTOR = "TandemConnector"
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# What a prefill engine is asked for: keep the KV, and say where it is.
OFFER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
CLOSE_TIMEOUT_S = 1.0  # afterwards the guardian kills the processes of vLLM
WARM_UP_TOKENS = (2, 64)  # lengths of the first prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What Tandem asks of vLLM, beside `args` of the operator."""

    model: str  # a directory in Hugging Face format
    info: ModelInfo
    dtype: str
    offers: bool  # a prefill worker
    lease_s: float
    verify_every: int
    connector: str  # of `VllmConfig`
    transfer: TransferConfig  # of the connector "tandem"
    worker: str  # role and ordinal
    tensor_parallel: int
    on_gpu: bool
    host: str  # where other workers reach the side channel of the connector
    side_port: int
    args: tuple[str, ...]
    adapters: dict[str, str]  # directories of LoRA adapters, by name


class AsyncEngine:
    """Raises `ConfigError` in `start` for `args` that vLLM refuses."""

    def __init__(self, arguments: EngineArguments) -> None:
        self._arguments = arguments
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._handshake: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()  # of the process that computes
        self._moves_blocks = False  # by a transfer agent of ours
        self._events: asyncio.Task[None] | None = None
        self._llm: Any = None
        self._adapters: dict[str, Any] = {}  # vLLM's LoRARequest, by name
        self._guardian: Guardian | None = None
        self._report: Callable[[EngineReport], None]

    async def start(self, report: Callable[[EngineReport], None]) -> EngineInfo:
        self._report = report
        self._guardian = Guardian()
        arguments = self._arguments
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = arguments.host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(arguments.side_port)
        os.environ["VLLM_RPC_BASE_PATH"] = self._guardian.sockets
        from vllm.v1.engine.async_llm import AsyncLLM

        self._endpoint = f"ipc://{self._guardian.sockets}/kv-events"
        engine_args = _parse([*_own_arguments(arguments, self._endpoint), *arguments.args])
        try:
            # Starts processes and waits for them, so it would block the loop.
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, engine_args, stat_loggers=[self._stat_logger]
            )
        except Exception as error:
            raise TandemError(f"vLLM did not start: {root_cause(error, output_tail())}") from error
        config = self._llm.vllm_config
        agent = await self._transfer_agent()
        self._moves_blocks = agent is not None
        layout = layout_of(arguments.info.fingerprint, config) if agent is None else agent.layout
        self._prefix_cache = PrefixCache(layout.block_size)
        await self._load_adapters()
        await self._warm_up()
        self._events = asyncio.create_task(self._follow_blocks(), name="kv-events")
        self._events.add_done_callback(self._on_task_ended)
        return EngineInfo(
            num_blocks=config.cache_config.num_gpu_blocks - 1,  # one is the null block, which holds no tokens
            layout=layout,
            eos_token_ids=arguments.info.eos_token_ids,
            context_length=config.model_config.max_model_len,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            agent=agent,
            address=_address(config, arguments) if arguments.offers and agent is None else b"",
        )

    async def _transfer_agent(self) -> AgentAddress | None:
        """The address of the agent in the engine's process; None if vLLM's own connector moves the blocks."""
        if self._llm.vllm_config.kv_transfer_config.kv_connector != TANDEM_CONNECTOR:
            return None
        encoded = (await self._llm.collective_rpc("tandem_transfer_agent"))[0]
        return decode_agent(worker_pb2.AgentAddress.FromString(encoded)) if encoded else None

    async def _load_adapters(self) -> None:
        from vllm.lora.request import LoRARequest

        for number, (name, directory) in enumerate(self._arguments.adapters.items(), 1):
            self._adapters[name] = adapter = LoRARequest(name, number, directory)
            try:
                await self._llm.add_lora(adapter)
            except Exception as error:
                raise TandemError(f"[vllm] adapters: vLLM cannot load {name}: {error}") from error

    async def _warm_up(self) -> None:
        """Compute some tokens: vLLM compiles at its first steps, which took 50 s on one core."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        for num_tokens in WARM_UP_TOKENS:
            prompt = TokensPrompt(prompt_token_ids=[1] * num_tokens, cache_salt="warm-up")
            async for _ in self._llm.generate(prompt, sampling, f"warm-up-{num_tokens}"):
                pass

    # ---- requests

    def submit(self, prompt: Prompt) -> None:
        task = asyncio.create_task(self._generate(prompt), name=prompt.request_id)
        self._tasks[prompt.request_id] = task
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """A request that was aborted may have a successor of the same name."""
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]

    def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def move(self, request_id: str, transfer: EngineTransfer, num_known_tokens: int) -> None:
        self._call("tandem_move", request_id, encode_transfer(transfer), num_known_tokens)

    def stay(self, request_id: str, transfer_id: TransferId) -> None:
        self._call("tandem_stay", request_id, f"{transfer_id:032x}")

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of `WorkerExtension` between two steps."""
        task = asyncio.create_task(self._call_between_steps(method, arguments), name=method)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call_between_steps(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:  # noqa: BLE001  logged: the reader gives up, and the request goes on
            logger.warning("%s of request %s failed: %s", method, arguments[0], error)

    async def _generate(self, prompt: Prompt) -> None:
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineDeadError

        client_error = getattr(exceptions, "VLLMClientError", ValueError)  # vLLM 0.26 has ValueErrors alone
        request_id = prompt.request_id
        try:
            await self._stream(prompt)
        except EngineDeadError as error:
            self._report(EngineDied(str(error) or "its process has ended"))
        except (TandemError, client_error, ValueError) as error:
            self._report(EngineOutput(request_id, (), error=str(error), invalid=not isinstance(error, TandemError)))
        except Exception as error:
            logger.exception("request %s failed in vLLM", request_id)
            self._report(EngineOutput(request_id, (), error=f"{type(error).__name__}: {error}"))

    async def _stream(self, prompt: Prompt) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request = prompt.request
        arguments = sampling_arguments(
            request, self._arguments.info.eos_token_ids, max_tokens=1 if prompt.offers else 0
        )
        if self._moves_blocks:
            transfer: dict[str, Any] | None = encode_request(prompt.request_id, prompt.transfer)
        else:
            transfer = OFFER if prompt.offers else decode_handoff(prompt.handoff) if prompt.handoff else None
        if transfer is not None:
            arguments["extra_args"] = {**(arguments.get("extra_args") or {}), "kv_transfer_params": transfer}
        sampling = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        tokens = TokensPrompt(prompt_token_ids=list(request.token_ids))
        if request.cache_salt:
            tokens["cache_salt"] = request.cache_salt
        generated = self._llm.generate(
            tokens, sampling, prompt.request_id, lora_request=self._adapter(request.adapter), priority=request.priority
        )
        async for output in generated:
            self._report(self._output_of(prompt, output))

    def _adapter(self, name: str) -> Any:
        """None without a name. Another worker may know one that this one does not: a roll has changed `adapters`."""
        if name and name not in self._adapters:
            raise WorkerUnavailable(f"this worker has no adapter {name!r}")
        return self._adapters.get(name)

    def _output_of(self, prompt: Prompt, output: Any) -> EngineOutput:
        completion = output.outputs[0]
        tokens = tuple(_sampled_tokens(completion.token_ids, completion.logprobs, prompt.request.sampling.num_logprobs))
        error, finish_reason, handoff, end = "", None, b"", RequestEnd()
        if output.finished:
            finish_reason = FINISH.get(completion.finish_reason)
            if finish_reason is None:
                error = f"it ended with {completion.finish_reason!r}"
            if self._moves_blocks:
                end = decode_end(output.kv_transfer_params)
            elif prompt.offers and output.kv_transfer_params:
                handoff = encode_handoff(output.kv_transfer_params)
        num_cached_tokens = output.num_cached_tokens or 0
        metrics = output.metrics
        return EngineOutput(
            prompt.request_id,
            tokens,
            finish_reason,
            num_cached_tokens,
            handoff,
            scheduled_at=0.0 if metrics is None else metrics.scheduled_ts,
            error=error,
            num_pulled_tokens=_num_pulled_tokens(prompt, num_cached_tokens),
            pulled_tokens=end.pulled_tokens,
            is_moved=end.is_moved,
        )

    # ---- handshakes

    def shake_hands(self, peer: str, address: bytes) -> None:
        self._handshake = asyncio.create_task(self._shake_hands(peer, address), name=f"handshake with {peer}")

    async def _shake_hands(self, peer: str, address: bytes) -> None:
        """Never fails: whatever goes wrong, the first hand-off from the peer shakes hands."""
        started_at = time.monotonic()
        try:
            error = await shake_hands(self._llm, EngineAddress.decode(address))
        except Exception as failure:  # noqa: BLE001  logged, and no request is at stake
            error = f"{type(failure).__name__}: {failure}"
        if error:
            logger.warning("the first hand-off from %s will shake hands with it: %s", peer, error)
        else:
            logger.info("shook hands with %s in %.3f s", peer, time.monotonic() - started_at)
        self._report(HandshakeEnded(peer, error))

    # ---- steps and blocks

    def _stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A factory of a vLLM `StatLoggerBase` that reports each step."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class StepReporter(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def log_engine_initialized(self) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    engine._report(_step_of(scheduler_stats))

        return StepReporter(vllm_config, engine_index)

    async def _follow_blocks(self) -> None:
        """Report the changes of vLLM's prefix cache, which arrive in numbered batches."""
        import msgspec
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.connect(self._endpoint)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            while True:
                _, number, payload = await socket.recv_multipart()
                changes = self._prefix_cache.take(int.from_bytes(number, "big"), decoder.decode(payload).events)
                if changes:
                    self._report(BlocksChanged(tuple(changes)))

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the events of vLLM's prefix cache ended", exc_info=error)
            self._report(EngineDied(f"its block events ended: {error}"))

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._calls, *filter(None, (self._handshake, self._events))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, CLOSE_TIMEOUT_S)


# ---- vLLM's configuration


def _own_arguments(arguments: EngineArguments, events: str) -> list[str]:
    block_events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    return [
        *_cpu_arguments(arguments),
        *adapter_arguments(arguments.adapters, arguments.on_gpu),
        "--model", arguments.model,
        "--dtype", arguments.dtype,
        "--max-model-len", str(arguments.info.context_length),
        "--tensor-parallel-size", str(arguments.tensor_parallel),
        "--kv-transfer-config", json.dumps(_connector(arguments)),
        "--kv-events-config", json.dumps(block_events),
        "--logits-processors", DRAWS,
        "--worker-extension-cls", EXTENSION,
        "--no-async-scheduling",
        "--skip-tokenizer-init",
        "--enable-logging-iteration-details",
        "--disable-log-stats",  # its own log, a line for each step; ours gets the same figures
        "--seed", "0",
    ]  # fmt: skip


def _connector(arguments: EngineArguments) -> dict[str, Any]:
    """vLLM's KVTransferConfig. The options of vLLM's connector are there also if Tandem's takes its place: it gives way
    to the other one for a model that it does not support."""
    connector = _nixl_connector(arguments)
    if arguments.connector == "tandem" and _can_hand_off(arguments):
        connector["kv_connector_extra_config"]["tandem"] = {
            "worker": arguments.worker,
            "model": arguments.info.fingerprint,
            "transfer": json.dumps(asdict(arguments.transfer)),
        }
        connector |= {
            "kv_connector": TANDEM_CONNECTOR,
            "kv_connector_module_path": "vllm_worker.kv.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    return connector


def _nixl_connector(arguments: EngineArguments) -> dict[str, Any]:
    name, path = ("NixlConnector", "") if arguments.on_gpu else ("WaitingNixlConnector", "vllm_worker.connector")
    options: dict[str, Any] = {"kv_lease_duration": arguments.lease_s}
    every = arguments.verify_every or int(arguments.connector == "tandem")
    verifies = every > 0 and _can_verify()
    if verifies:
        options["verified_kv"] = {
            "inner": name, "inner_module_path": path, "required": False, "every": every,
            "host": arguments.host,
        }  # fmt: skip
        name, path = "VerifiedConnector", "verified_kv.connector"
    connector: dict[str, Any] = {
        "kv_connector": name,
        "kv_role": "kv_producer" if arguments.offers else "kv_consumer",
        "kv_load_failure_policy": "recompute" if verifies else "fail",
        "kv_connector_extra_config": options,
    }
    if path:
        connector["kv_connector_module_path"] = path
    if not arguments.on_gpu:
        connector["kv_buffer_device"] = "cpu"
        options["num_threads"] = 1
    return connector


def _can_hand_off(arguments: EngineArguments) -> bool:
    """Whether TandemConnector can move the blocks, as far as it is known before vLLM has read the model."""
    try:
        import vllm_worker.kv.connector  # noqa: F401
    except ImportError as error:  # another version of vLLM
        problem = str(error)
    else:
        problem = "a KV cache on a device" if arguments.on_gpu else "tensor parallelism"
        if not arguments.on_gpu and arguments.tensor_parallel == 1:
            return True
    logger.warning("vLLM's own connector moves the KV blocks, not Tandem's: %s", problem)
    return False


def _can_verify() -> bool:
    try:
        import verified_kv.connector  # noqa: F401
    except ImportError as error:  # another version of vLLM
        logger.warning("KV blocks are not verified: %s", error)
        return False
    return True


def _cpu_arguments(arguments: EngineArguments) -> list[str]:
    """On a CPU the model shares its cores with everything else.

    A compiled model compiles again for other shapes, for seconds, while its streams wait. Between two processes, engine
    and model wait for each other in loops of sched_yield: the kernel then starved programs of other sessions, such as
    clients, for more than a second at a time. vLLM lets one process do both only with this variable.
    """
    if arguments.on_gpu:
        return []
    if arguments.tensor_parallel > 1:
        return ["--enforce-eager"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return ["--enforce-eager", "--distributed-executor-backend", "uni"]


def _parse(args: Sequence[str]) -> Any:
    """vLLM's `AsyncEngineArgs`. Raises `ConfigError` with vLLM's own words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise ConfigError(f"[vllm] args: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vLLM", exit_on_error=False))
    try:
        return AsyncEngineArgs.from_cli_args(parser.parse_args(list(args)))
    except ConfigError:
        raise
    except (SystemExit, ValueError, TypeError) as error:
        raise ConfigError(f"[vllm] args: {error}") from error


def _address(config: Any, arguments: EngineArguments) -> bytes:
    """The engines of a data-parallel worker have an id each, so the address of one is of no use."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return b""
    dcp_size = parallel.decode_context_parallel_size
    return EngineAddress(
        config.kv_transfer_config.engine_id,
        arguments.host,
        arguments.side_port,
        tp_size=max(parallel.tensor_parallel_size, dcp_size),
        dcp_size=dcp_size,
        pp_size=parallel.pipeline_parallel_size,
    ).encode()


# ---- vLLM's reports


def _num_pulled_tokens(prompt: Prompt, num_cached_tokens: int) -> int:
    """An engine that samples the first token computes at least one token of the prompt for it."""
    is_pull = prompt.transfer is not None and not prompt.transfer.is_offer
    return max(0, num_cached_tokens + 1 - len(prompt.request.token_ids)) if is_pull else 0


def _sampled_tokens(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, num_logprobs: int | None
) -> list[SampledToken]:
    if num_logprobs is None or not logprobs:
        return [SampledToken(token_id) for token_id in token_ids]
    tokens = []
    for token_id, row in zip(token_ids, logprobs, strict=True):
        ranked = sorted(row.items(), key=lambda entry: entry[1].rank)
        top = tuple((other, entry.logprob) for other, entry in ranked if entry.rank <= num_logprobs)
        tokens.append(SampledToken(token_id, row[token_id].logprob, top))
    return tokens


def _step_of(stats: Any) -> EngineStep:
    details, transfers = stats.iteration_details, stats.kv_connector_stats or {}
    return EngineStep(
        num_running=stats.num_running_reqs,
        num_waiting=stats.num_waiting_reqs,
        kv_usage=stats.kv_cache_usage,
        num_decodes=0 if details is None else details.num_generation_requests,
        prompt_tokens=0 if details is None else details.num_ctx_tokens,
        num_lent=transfers.get(NUM_LENT, 0),
        holders=decode_holders(transfers.get(HOLDERS, ())),
        lost_moves=tuple(int(transfer_id, 16) for transfer_id in transfers.get(LOST_MOVES, ())),
    )
