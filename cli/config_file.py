"""From flags and a TOML file to one `TandemConfig`. A flag wins over the file, the file over the default.

`FLAGS` is the whole list of what `tandem serve` takes: its help, its command line and this module are made from it, so
a flag that does nothing cannot exist. Options without a flag are set in the file; deploy/tandem.toml shows them all.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import TandemConfig, from_mapping
from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `serve` and the option it sets."""

    name: str  # without the dashes
    table: str
    option: str
    help: str

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def default(self) -> int | str:
        value: int | str = getattr(getattr(TandemConfig(), self.table), self.option)
        return value


FLAGS = (
    Flag("model", "engine", "model", "A catalogue name, a GGUF file, a Hugging Face directory, or random:<config>."),
    Flag("prefill", "cluster", "num_prefill", "Prefill workers to start with; 0 = decode workers compute the prompts."),
    Flag("decode", "cluster", "num_decode", "Decode workers to start with."),
    Flag("host", "router", "host", "Address the router listens on; 0.0.0.0 = every one of this machine."),
    Flag("port", "router", "port", "Port the router listens on; 0 = any free one."),
    Flag("address", "cluster", "address", "host:port of a Ray cluster to join. Without it, one is started here."),
    Flag("dtype", "engine", "dtype", "auto, float32 or bfloat16."),
    Flag("quantization", "engine", "quantization", "none, int8 or int4: bits of a weight."),
    Flag("device", "engine", "device", "auto, cpu or cuda."),
    Flag("kv-memory-mb", "engine", "kv_memory_mb", "Size of each worker's KV pool."),
    Flag("max-context", "engine", "max_context", "Longest prompt and output together, in tokens; 0 = the model's own."),
    Flag("threads", "engine", "num_threads", "Compute threads of each worker; 0 = its share of the machine's cores."),
    Flag("max-batched-tokens", "scheduler", "max_batched_tokens", "Token budget of one step."),
    Flag("local-prefill-tokens", "router", "local_prefill_tokens",
         "Prompts with at most this many uncached tokens are computed on the decode worker."),
    Flag("trace-file", "telemetry", "trace_file", "Append every span to this file, one JSON object a line."),
    Flag("otlp-endpoint", "telemetry", "otlp_endpoint", "Send traces there, e.g. http://localhost:4317."),
    Flag("metrics-port", "telemetry", "metrics_port", "Port of the router's Prometheus page; 0 = none."),
)  # fmt: skip


def load_config(path: Path | None, flags: Mapping[str, int | str | None]) -> TandemConfig:
    """`flags` by parameter name; None = not given. Raises `ConfigError` naming the file and the option."""
    tables = _read(path) if path is not None else {}
    for flag in FLAGS:
        value = flags.get(flag.parameter)
        if value is not None:
            tables.setdefault(flag.table, {})[flag.option] = value
    try:
        return _with_full_paths(from_mapping(tables))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path is not None else str(error)) from error


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} stands outside a table; the tables are [engine], [router] and so on")
    return content


def _with_full_paths(config: TandemConfig) -> TandemConfig:
    """Workers run in directories of their own: what names a file here must name it there."""
    engine, telemetry = config.engine, config.telemetry
    if Path(engine.model).expanduser().exists():
        engine = dataclasses.replace(engine, model=str(Path(engine.model).expanduser().resolve()))
    if telemetry.trace_file:
        telemetry = dataclasses.replace(telemetry, trace_file=str(Path(telemetry.trace_file).expanduser().resolve()))
    security = config.security
    for name in ("cluster_token_file", "tls_cert", "tls_key", "tls_ca"):
        path = getattr(security, name)
        whole: Any = {name: str(Path(path).expanduser().resolve())} if path else {}
        security = dataclasses.replace(security, **whole)
    return dataclasses.replace(config, engine=engine, telemetry=telemetry, security=security)
