"""How the installed vLLM offloads by itself, beside a connector of hand-offs; run in vLLM's environment.

    python -m tests.support.vllm_offloading

The last line is JSON: the connector that is left beside `--kv-offloading-size`; for each connector that offloads, and
that `MultiConnector` could put beside another one, the error with which vLLM refuses the caches of this platform; and
the error for the statistics of a connector that is loaded by its module. Empty where vLLM takes them.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs

from cli.diagnosis.vllm_environment import default_model_dir
from tests.support.vllm_caches import allocate_caches

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 16, 32, 2
HAND_OFF = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 1},
}
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def config_of(transfer: dict[str, Any], **options: Any) -> Any:
    return EngineArgs(
        model=str(default_model_dir()), dtype="float32", block_size=BLOCK_SIZE, max_model_len=512, enforce_eager=True,
        distributed_executor_backend="uni", hf_overrides={"num_hidden_layers": NUM_LAYERS},
        kv_transfer_config=KVTransferConfig(**transfer), **options,
    ).create_engine_config()  # fmt: skip


def refusal(offloading: str) -> str:
    """Of a rank. `MultiConnector` hands the caches to each of its connectors."""
    options = {"cpu_bytes_to_use": 1 << 24}
    config = config_of({"kv_connector": offloading, "kv_role": "kv_both", "kv_connector_extra_config": options})
    caches, views = allocate_caches(config, NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE)
    try:
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches).register_kv_caches(views)
    except Exception as error:  # noqa: BLE001  vLLM has no class for it
        return f"{type(error).__name__}: {error}"
    return ""


def refused_statistics() -> str:
    """`MultiConnector` rebuilds the statistics that another process has sent by the names of its connectors."""
    sent: dict[str, Any] = {"VerifiedConnector": {"counts": {}, "inner": None, "options": {}}}
    try:
        MultiConnector.build_kv_connector_stats(sent)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    alone = config_of(HAND_OFF, kv_offloading_size=1.0).kv_transfer_config
    found = {name: refusal(name) for name in OFFLOADING}
    print(json.dumps({"alone": alone.kv_connector, "caches": found, "statistics": refused_statistics()}))


if __name__ == "__main__":
    main()
