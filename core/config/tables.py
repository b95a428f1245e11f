"""All tables of the config file, and their reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from core.config.cache import CacheConfig
from core.config.cluster import ClusterConfig, SecurityConfig, TelemetryConfig
from core.config.front import ApiKeyConfig, GatewayConfig, ModelRuleConfig, RouterConfig, ServedModelConfig
from core.config.options import LARGEST_FLOAT, require, rule_in_words, shown, written
from core.config.planner import PlannerConfig
from core.config.transfer import TransferConfig
from core.config.vllm import VllmConfig
from core.config.worker import EngineConfig, SchedulerConfig, WorkerConfig
from core.errors import ConfigError, shortened
from core.plain_text import escaped


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """All options. Only cli/ reads the whole."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    api_keys: tuple[ApiKeyConfig, ...] = ()
    models: tuple[ServedModelConfig, ...] = ()
    model_rules: tuple[ModelRuleConfig, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        first, num_routers = self.telemetry.metrics_port, self.cluster.num_routers
        last = first + num_routers  # of the router that a roll starts beside the others
        for table, port in (("router", self.router.port), ("gateway", self.gateway.port)):
            require(
                not first or not first <= port <= last,
                f"[telemetry] metrics_port is {first}: router-{port - first} would have [{table}] port, {port} (a roll "
                "starts one router more)",
            )
        require(
            not first or last <= 65535,
            f"[telemetry] metrics_port must be at most {65535 - num_routers} for {num_routers} routers and one more, "
            f"is {first}",
        )
        silence_s = min(self.router.report_stale_s, self.router.worker_lost_s)
        for name in ("report_interval_s", "idle_report_interval_s"):
            require(
                getattr(self.worker, name) < silence_s,
                f"[worker] {name} must be less than {silence_s:g} ([router] report_stale_s or worker_lost_s), "
                f"is {getattr(self.worker, name):g}",
            )
        require(
            not self.cluster.router_resource or self.router.port != 0,
            "[cluster] router_resource needs a fixed [router] port, the same on every machine; port is 0",
        )
        for name in ("max_prefill", "max_decode"):
            require(
                not self.planner.enabled or getattr(self.planner, name) <= self.cluster.max_workers,
                f"[planner] {name} must be at most {self.cluster.max_workers} ([cluster] max_workers), "
                f"is {getattr(self.planner, name)}",
            )
        require(
            self.engine.name == "vllm" or not self.vllm.adapters,
            f"[vllm] adapters need [engine] name = vllm, is {self.engine.name}",
        )
        for name in ("disk_gb", "host_gb"):
            require(
                self.engine.name == "tandem" or not getattr(self.cache, name),
                f"[cache] {name} needs Tandem's own engine, [engine] name is {self.engine.name}",
            )
        for name in ("prefill_gpus", "decode_gpus"):
            require(
                self.vllm.tensor_parallel == 1 or getattr(self.cluster, name) in (0.0, 1.0),
                f"[cluster] {name} must be 1 for workers with [vllm] tensor_parallel, is {getattr(self.cluster, name)}",
            )
        for name in ("prefill_accelerator", "decode_accelerator"):
            accelerator = getattr(self.cluster, name)
            require(
                self.engine.device != "cpu" or not accelerator,
                f"[cluster] {name} = {accelerator!r} needs [engine] device = cuda or auto, is cpu",
            )

    def _check_names(self) -> None:
        """Names of keys and models are unique, and each rule chooses a model."""
        keys = [key.name for key in self.api_keys] + [key.sha256 for key in self.api_keys]
        require(len(set(keys)) == len(keys), "[[api_keys]] name and sha256 must be unique")
        models = [model.name for model in self.models]
        names = models + [alias for model in self.models for alias in model.aliases]
        require(len(set(names)) == len(names), "[[models]] names and aliases must be unique")
        for rule in self.model_rules:
            require(rule.model in models, f"[[model_rules]] model {rule.model!r} is not the name of one of [[models]]")
            require(rule.name not in names, f"[[model_rules]] name {rule.name!r} is the name of one of [[models]]")


# Arrays of tables -> the class of their entries.
ARRAYS: dict[str, type] = {"api_keys": ApiKeyConfig, "models": ServedModelConfig, "model_rules": ModelRuleConfig}


def from_mapping(tables: Mapping[str, object]) -> TandemConfig:
    """A `TandemConfig` from TOML tables. Raises `ConfigError` naming an unknown table or option, or a wrong type."""
    known_tables = {f.name: f for f in fields(TandemConfig)}
    parts: dict[str, object] = {}
    for table, options in tables.items():
        if table not in known_tables:
            raise ConfigError(f"[{_name(table)}] is not a table of the config; known: {', '.join(known_tables)}")
        if table in ARRAYS:
            if not (isinstance(options, list) and all(isinstance(entry, dict) for entry in options)):
                raise ConfigError(f"{table} must be an array of tables ([[{table}]] and its options below)")
            parts[table] = tuple(_part(f"[[{table}]]", ARRAYS[table], entry) for entry in options)
            continue
        if not isinstance(options, dict):
            raise ConfigError(f"{table} must be a table ([{table}] and its options below), is {written(options)}")
        parts[table] = _part(f"[{table}]", known_tables[table].default_factory, options)
    return TandemConfig(**parts)  # type: ignore[arg-type]


def _part(where: str, part: Any, options: Mapping[str, object]) -> Any:
    """An instance of the dataclass `part`, whose fields all have defaults."""
    known = {f.name: f for f in fields(part)}
    values = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{where} {_name(name)} is not an option; known: {', '.join(sorted(known))}")
        values[name] = _value(f"{where} {name}", known[name], value)
    try:
        return part(**values)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error


def _value(option: str, known: Field[Any], value: object) -> object:
    """The value in the type of the option, within what services, messages and `tandem config` can hold."""
    wanted: Any = type(known.default)
    if wanted is tuple:
        if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise ConfigError(f"{option} must be an array of strings, is {shown(known, value)}")
        value = tuple(value)
    elif not (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)) and not (
        wanted is float and type(value) is int
    ):
        rule = rule_in_words(known)
        raise ConfigError(f"{option} must be {wanted.__name__}{rule and f', {rule}'}, is {shown(known, value)}")
    if isinstance(value, str | tuple):
        try:
            "".join(value).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{option} must be Unicode text without surrogates, is {shown(known, value)}") from error
    # A larger whole number, of which Python may make no float, stays as it is: its option refuses it.
    return float(value) if wanted is float and abs(value) <= LARGEST_FLOAT else value  # type: ignore[arg-type]


def _name(name: str) -> str:
    return escaped(shortened(name))
