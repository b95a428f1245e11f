"""What Tandem asks of vLLM: the arguments of its engine, with the KV connector that moves the blocks.

The options of the operator (`[vllm] args`) come behind these, and win.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.config import TransferConfig
from core.errors import ConfigError
from core.model_info import ModelInfo
from vllm_worker.adapters import adapter_arguments
from vllm_worker.handoff import EngineAddress
from vllm_worker.nixl_handshake import EXTENSION

DRAWS = "vllm_worker.draws:TandemDraws"
TANDEM_CONNECTOR = "TandemConnector"

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


def own_arguments(arguments: EngineArguments, events: str) -> list[str]:
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


def parse(args: Sequence[str]) -> Any:
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


def address_of(config: Any, arguments: EngineArguments) -> bytes:
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
