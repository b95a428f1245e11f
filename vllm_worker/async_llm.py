"""vLLM's AsyncLLM as an `Engine`. Two files import vllm, this one and engine_arguments.py, beside those that vLLM loads
by name: draws.py, connector.py, nixl_handshake.py and kv/connector.py.

Tested with vLLM 0.32. Its KV connector moves the blocks (`kv_producer` on a prefill worker, `kv_consumer` on a decode
worker); the parameters that it gives for the other side travel as JSON with a version. What arrives is checked, because
wrong parameters end the whole engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from core.errors import TandemError, WorkerUnavailable
from core.handoff import AgentAddress, TransferId
from kv_transfer.transports.host_address import is_loopback
from protos.agent_codec import decode_agent
from tandem_client.stubs import worker_pb2
from vllm_worker.engine import (
    BlocksChanged,
    EngineDied,
    EngineInfo,
    EngineOutput,
    EngineReport,
    EngineTransfer,
    HandshakeEnded,
    Prompt,
)
from vllm_worker.engine_arguments import TANDEM_CONNECTOR, EngineArguments, address_of, own_arguments, parse
from vllm_worker.engine_reports import output_of, step_of
from vllm_worker.handoff import EngineAddress, decode_handoff
from vllm_worker.kv.host_pool import layout_of
from vllm_worker.kv.parameters import encode_request, encode_transfer
from vllm_worker.nixl_handshake import shake_hands
from vllm_worker.prefix_cache import PrefixCache
from vllm_worker.process_group import Guardian
from vllm_worker.root_cause import output_tail, root_cause
from vllm_worker.sampling import sampling_arguments

# What a prefill engine is asked for: keep the KV, and say where it is.
OFFER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
CLOSE_TIMEOUT_S = 1.0  # afterwards the guardian kills the processes of vLLM
WARM_UP_TOKENS = (2,), (64, 64)  # lengths of the first prompts, and of those at one time afterwards

logger = logging.getLogger(__name__)


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
        if is_loopback(arguments.host):  # as LOCAL_UCX_OPTIONS of our nixl transport
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(arguments.side_port)
        os.environ["VLLM_RPC_BASE_PATH"] = self._guardian.sockets
        from vllm.v1.engine.async_llm import AsyncLLM

        self._endpoint = f"ipc://{self._guardian.sockets}/kv-events"
        engine_args = parse([*own_arguments(arguments, self._endpoint), *arguments.args])
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
            vocab_size=arguments.info.vocab_size,
            context_length=config.model_config.max_model_len,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            agent=agent,
            address=address_of(config, arguments) if arguments.offers and agent is None else b"",
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
        """Compute some tokens: vLLM compiles at its first steps, which took 50 s on one core, and what counts the ranks
        of log probabilities with the first request that asks for one (14 s): once for a row, once for more rows."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=0)

        async def warm_up(num_tokens: int, request_id: str) -> None:
            prompt = TokensPrompt(prompt_token_ids=[1] * num_tokens, cache_salt="warm-up")
            async for _ in self._llm.generate(prompt, sampling, request_id):
                pass

        for lengths in WARM_UP_TOKENS:
            await asyncio.gather(*(warm_up(length, f"warm-up-{number}") for number, length in enumerate(lengths)))

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

    def give_prefix(self, transfer: EngineTransfer, token_ids: tuple[int, ...], cache_salt: str) -> None:
        self._call("tandem_give_prefix", encode_transfer(transfer), list(token_ids), cache_salt)

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of `WorkerExtension` between two steps."""
        task = asyncio.create_task(self._call_between_steps(method, arguments), name=method)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call_between_steps(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:  # noqa: BLE001  logged: the reader gives up, and the request goes on
            logger.warning("%s failed: %s", method, error)

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
            transfer: dict[str, Any] | None = encode_request(prompt.request_id, prompt.transfer, prompt.prefix)
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
            self._report(output_of(prompt, output, moves_blocks=self._moves_blocks))

    def _adapter(self, name: str) -> Any:
        """None without a name. Another worker may know one that this one does not: a roll has changed `adapters`."""
        if name and name not in self._adapters:
            raise WorkerUnavailable(f"this worker has no adapter {name!r}")
        return self._adapters.get(name)

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
                    engine._report(step_of(scheduler_stats))

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
