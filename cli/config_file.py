"""Makes one `TandemConfig` from flags and a TOML file. A flag overrides the file, the file overrides the default.

`FLAGS` lists every flag of `tandem serve`. The command line and its help are made from this list, so no flag is without
an option. The file sets the options that have no flag; deploy/tandem.toml shows every option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import EngineConfig, TandemConfig, from_mapping
from core.errors import ConfigError, quoted


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `serve`, and the config option that it sets."""

    name: str  # without the dashes
    table: str
    option: str
    help: str

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def default(self) -> float | str:
        value: float | str = getattr(getattr(TandemConfig(), self.table), self.option)
        return value

    def typed(self, value: float | str) -> float | str:
        """In the type of the option. A text that is none stays: the config names the limit of the option."""
        try:
            return type(self.default)(value)
        except ValueError:
            return value


FLAGS = (
    Flag("engine", "engine", "name", "The engine inside the workers: tandem, or vllm with the options of [vllm]."),
    Flag("model", "engine", "model", "A catalogue name, a GGUF file, a Hugging Face directory, or random:<config>."),
    Flag("prefill", "cluster", "num_prefill", "Prefill workers to start with; 0 = decode workers compute the prompts."),
    Flag("decode", "cluster", "num_decode", "Decode workers to start with."),
    Flag("routers", "cluster", "num_routers", "Routers to start with; those of one machine share its port."),
    Flag("host", "router", "host", "Address that routers listen on; 0.0.0.0 = every address of their machine."),
    Flag("port", "router", "port", "Port that routers listen on; 0 = any free port."),
    Flag("address", "cluster", "address",
         "host:port of a Ray cluster to join. Without this flag, a Ray starts on this machine."),
    Flag("dtype", "engine", "dtype", "Number format of the model: auto, float32 or bfloat16."),
    Flag("quantization", "engine", "quantization", "Weight quantization: none, int8, int4 or fp8."),
    Flag("device", "engine", "device", "Device that runs the model: auto, cpu or cuda."),
    Flag("kv-memory-mb", "engine", "kv_memory_mb",
         "Size of the KV pool of each worker, in MB; 0 = 512 on a CPU, all that is left on a GPU."),
    Flag("max-context", "engine", "max_context",
         "Most tokens of a prompt and its output together; 0 = the limit of the model."),
    Flag("generation-config", "engine", "generation_config",
         "auto or none: whether generation_config.json of the model has the defaults of requests, as temperature."),
    Flag("threads", "engine", "num_threads",
         "Compute threads of each worker; 0 = an equal share of the machine's cores or CPU quota."),
    Flag("max-batched-tokens", "scheduler", "max_batched_tokens",
         "Token budget of one step; 0 = 512 on a CPU, 8192 on a GPU."),
    Flag("slo-ttft-ms", "router", "slo_ttft_ms", "Wanted time to the first token."),
    Flag("slo-itl-ms", "scheduler", "slo_itl_ms", "Wanted time between tokens, the limit of a step with decodes."),
    Flag("admission", "router", "admission",
         "queue or shed; shed = refuse a request at once if its predicted first token misses --slo-ttft-ms."),
    Flag("local-prefill", "router", "local_prefill",
         "auto or never: whether a decode worker may compute prompts while a prefill worker serves."),
    Flag("http", "gateway", "port", "Port of the OpenAI-compatible HTTP server; 0 = none."),
    Flag("http-host", "gateway", "host", "Address that the HTTP server listens on; 0.0.0.0 = every address."),
    Flag("trace-file", "telemetry", "trace_file", "Append every span to this file, one JSON object a line."),
    Flag("otlp-endpoint", "telemetry", "otlp_endpoint", "Collector to send traces to, e.g. http://localhost:4317."),
    Flag("metrics-port", "telemetry", "metrics_port",
         "Port of the Prometheus page of the first router, the next router has the next port; 0 = no page."),
)  # fmt: skip


# Options that name files, by table. `model` may also be a directory or a name of the catalogue.
_PATHS = {
    "engine": ("model",),
    "telemetry": ("trace_file",),
    "security": ("cluster_token_file", "tls_cert", "tls_key", "tls_ca"),
    "gateway": ("tls_cert", "tls_key"),
}

# Values by the parameter name of a flag; None = not given.
Flags = Mapping[str, float | str | None]


def read_config(path: Path) -> str:
    """Of a file that some editor of Windows has written, too. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def load_config(path: Path | None, flags: Flags, text: str | None = None) -> TandemConfig:
    """`text`: of the file, which may be a pipe and then gives it once. Raises `ConfigError` naming the option, and its
    file or flag.
    """
    tables = _read(path, text) if path is not None else {}
    try:
        return config_of(tables, flags)
    except ConfigError as error:
        given = (flag for flag in FLAGS if flags.get(flag.parameter) is not None)
        found = (f"--{flag.name}" for flag in given if str(error).startswith(f"[{flag.table}] {flag.option} "))
        where = next(found, path)
        raise ConfigError(str(error) if where is None else f"{where}: {error}") from error


def config_of(tables: dict[str, dict[str, object]], flags: Flags) -> TandemConfig:
    """Flags win over tables. Raises `ConfigError` naming the option."""
    for flag in FLAGS:
        value = flags.get(flag.parameter)
        if value is not None:
            tables.setdefault(flag.table, {})[flag.option] = flag.typed(value)
    config = _for_vllm(from_mapping(tables))
    return _with_full_paths(config)


def set_by_flags(config: TandemConfig, flags: Flags) -> dict[str, dict[str, object]]:
    """The options that these flags have set in the config, by table."""
    tables: dict[str, dict[str, object]] = {}
    for flag in FLAGS:
        if flags.get(flag.parameter) is not None:
            tables.setdefault(flag.table, {})[flag.option] = getattr(getattr(config, flag.table), flag.option)
    return tables


def _for_vllm(config: TandemConfig) -> TandemConfig:
    """With vLLM inside, a name of the catalogue means the copy in Hugging Face format, and a start takes longer."""
    if config.engine.name != "vllm":
        return config
    from cli.diagnosis.vllm_environment import default_model_dir

    engine, start_timeout_s = config.engine, max(config.cluster.start_timeout_s, config.vllm.start_timeout_s)
    if engine.model == EngineConfig().model and default_model_dir().is_dir():
        engine = dataclasses.replace(engine, model=str(default_model_dir()))
    cluster = dataclasses.replace(config.cluster, start_timeout_s=start_timeout_s)
    return dataclasses.replace(config, engine=engine, cluster=cluster)


def _read(path: Path, text: str | None) -> dict[str, dict[str, object]]:
    if text is None:
        text = read_config(path)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML, or a number of more digits than Python reads
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, table in content.items():
        if not isinstance(table, dict | list):
            raise ConfigError(f"{path}: {name} is outside a table; the tables are [engine], [router] and so on")
    return content


def _with_full_paths(config: TandemConfig) -> TandemConfig:
    """Make relative paths absolute: workers run in other directories. Raises `ConfigError` naming the option."""
    for table, names in _PATHS.items():
        part: Any = getattr(config, table)
        paths = {}
        for name in names:
            try:
                paths[name] = _full_path(getattr(part, name), may_be_name=table == "engine")
            except (OSError, ValueError, RuntimeError) as error:  # a null byte, or the home of an unknown user
                why = error.strerror if isinstance(error, OSError) else error
                text = quoted(getattr(part, name))
                raise ConfigError(f"[{table}] {name} cannot be a path here ({why}), is {text}") from error
        config = dataclasses.replace(config, **{table: dataclasses.replace(part, **paths)})
    return config


def _full_path(text: str, may_be_name: bool) -> str:
    """A link to a file stays a link: its target may have another name, and Kubernetes moves that of a secret."""
    path = Path(text).expanduser()
    if may_be_name and path.is_dir():
        return str(path.resolve())
    if not text or (may_be_name and not path.is_file()):
        return text
    full = path.absolute()
    with contextlib.suppress(OSError):
        full.lstat()  # raises `ValueError` for a text that no file can have as its name
    return str(full)
