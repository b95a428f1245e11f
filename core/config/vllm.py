"""Options of workers with vLLM inside."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.config.options import check_options, option, require

# What Tandem sets itself, by vLLM's name -> the option that sets it.
OWN_ARGUMENTS = {
    "model": "[engine] model",
    "dtype": "[engine] dtype",
    "max-model-len": "[engine] max_context",
    "generation-config": "[engine] generation_config",
    "tensor-parallel-size": "[vllm] tensor_parallel",
    "kv-transfer-config": "[vllm] connector, lease_s and verify_every",
    "kv-offloading-size": "[cache] of Tandem's own engine: vLLM drops the connector of hand-offs for it",
    "kv-offloading-backend": "[cache] of Tandem's own engine: vLLM drops the connector of hand-offs for it",
    "kv-events-config": "nothing: routers need the events",
    "logits-processors": "nothing: Tandem draws the tokens",
    "async-scheduling": "nothing: Tandem's draws need every token before the next step",
    "skip-tokenizer-init": "nothing: the router has the tokenizer",
    "enable-logging-iteration-details": "nothing: routers need the time of each step",
    "seed": "the seed of a request",
    "enable-lora": "[vllm] adapters",
    "host": "[worker] host",
    "port": "nothing: the port of a worker is free",
}
CONNECTORS = ("nixl", "tandem")
TENSOR_PARALLEL = "tp"  # vLLM's short name
_ADAPTER_NAME = re.compile(r"[\w./:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    python: str = ""  # interpreter of vLLM's environment; empty = the one that `make vllm` installs
    args: tuple[str, ...] = ()  # of vLLM's engine, as on the command line of `vllm serve`
    adapters: tuple[str, ...] = ()  # LoRA adapters as NAME=DIRECTORY; requests name one in place of the model
    tensor_parallel: int = option(1, least=1)  # GPUs of each worker, on one machine
    # Limit: a prefill worker keeps the KV of a prompt so long for its decode worker; beyond: the KV is freed
    lease_s: float = option(30.0, positive=True)
    # Moves the KV: nixl (of vLLM, verified by digests) or tandem (as of our engine)
    connector: str = option("nixl", choices=CONNECTORS)
    verify_every: int = 1  # with nixl, decode workers verify the KV of each n-th prompt by digests; 0 = none
    # ... in place of [cluster] start_timeout_s, if that is shorter
    start_timeout_s: float = option(600.0, positive=True)

    def __post_init__(self) -> None:
        check_options(self)
        for argument in self.args:
            name = _own_argument(argument)
            require(not name, f"args: Tandem sets --{name} itself; use {OWN_ARGUMENTS.get(name)}")
        for adapter in self.adapters:
            name, _, directory = adapter.partition("=")
            require(
                bool(_ADAPTER_NAME.fullmatch(name) and directory),
                "adapters: each must be NAME=DIRECTORY, with a name of 1 to 128 letters, digits and './_:-', "
                f"one is {adapter!r}",
            )
        require(len(self.adapter_directories) == len(self.adapters), "adapters: names must be unique")

    @property
    def adapter_directories(self) -> dict[str, str]:
        """By name, in the order of the config."""
        return dict(adapter.split("=", 1) for adapter in self.adapters)


def _own_argument(argument: str) -> str:
    """The name in `OWN_ARGUMENTS` of the option that an argument sets, or an empty text.

    vLLM's parser takes underscores, the beginning of a name, and one key of a JSON value: --kv-transfer-config.kv_role.
    """
    bare = argument.lstrip("-")
    name = bare.partition("=")[0].partition(".")[0].replace("_", "-")
    num_dashes = len(argument) - len(bare)
    if not name or not num_dashes:
        return ""
    if num_dashes == 1:
        is_size = name.startswith(TENSOR_PARALLEL) and name.removeprefix(TENSOR_PARALLEL).isdigit()
        return "tensor-parallel-size" if is_size or TENSOR_PARALLEL.startswith(name) else ""
    beginnings = (name, name.removeprefix("no-") or name)
    return next((own for own in OWN_ARGUMENTS if own.startswith(beginnings)), "")
