"""A config comes from defaults, the file and flags; what follows when the config of a fleet changes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from cli.commands import fleet_commands, fleet_config, fleet_polls
from cli.commands.fleet_config import Order, first_line, options_as_json, revision_of, toml_lines
from cli.commands.serve import fleet_spec
from cli.config_file import load_config
from cli.credentials import with_cluster_token
from cli.diagnosis import named_code
from core.config import (
    ARRAYS,
    ApiKeyConfig,
    ClusterConfig,
    ConfigText,
    EngineConfig,
    GatewayConfig,
    RouterConfig,
    SchedulerConfig,
    TandemConfig,
    VllmConfig,
    WorkerConfig,
    from_mapping,
)
from core.errors import ConfigError, InvalidRequest, TandemError, WorkerUnavailable
from fleet.supervisor.spec import FleetSpec, NextSpec
from tandem_client import CallFailed
from tandem_client.stubs import cluster_pb2
from tests.unit.cli.conftest import connection_to

EXAMPLE = Path(__file__).parents[3] / "deploy" / "tandem.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    return path


def test_a_flag_overrides_the_file_and_the_file_overrides_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster]\nnum_prefill = 3\nnum_decode = 4\n")
    cluster = load_config(path, {"prefill": 7, "decode": None}).cluster
    assert (cluster.num_prefill, cluster.num_decode) == (7, 4)


def test_the_example_file_lists_every_option_with_its_default() -> None:
    example = tomllib.loads(EXAMPLE.read_text())
    assert from_mapping(example) == TandemConfig()
    for table in dataclasses.fields(TandemConfig):
        if table.name in ARRAYS:
            continue  # its entries stand in comments
        options = {option.name for option in dataclasses.fields(getattr(TandemConfig(), table.name))}
        assert set(example[table.name]) == options, f"[{table.name}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[router]\nprot = 1\n", r"tandem.toml: \[router\] prot is not an option; known: .*port"),
        ("port = 1\n", "port is outside a table"),
        ("[router\n", "is not valid TOML"),
        (f"[router]\nport = {'9' * 5000}\n", "is not valid TOML: Exceeds the limit"),
        (f"[router]\nport = 0x{'f' * 5000}\n", r"\[router\] port must be in .*, is int of a size that cannot be shown"),
        (f"[router]\nport = {'[' * 5000}\n", "is not valid TOML"),
    ],
)
def test_the_error_for_a_wrong_file_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_a_file_with_the_mark_of_an_editor_of_windows_is_read(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "\ufeff[router]\r\nport = 7\r\n"), {}).router.port == 7


@pytest.mark.parametrize("model", ["m" * 5000, "~nobody-here/model"])
def test_a_text_that_can_be_no_path_is_refused_by_its_flag(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^--model: \[engine\] model cannot be a path here \(.*\), is '") as refused:
        load_config(None, {"model": model})
    assert len(str(refused.value)) < 300


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^cannot read nowhere\.toml: No such file"):
        load_config(Path("nowhere.toml"), {})


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    path = write(tmp_path, '[security]\ntls_cert = "c"\ntls_key = "k"\ntls_ca = "a"\n')
    config = load_config(path, {"model": "model.gguf", "trace_file": "spans.jsonl"})
    security = config.security
    assert [Path(each) for each in (security.tls_cert, security.tls_key, security.tls_ca)] == [
        tmp_path / name for name in "cka"
    ]
    assert security.cluster_token_file == "", "an empty path stays empty"
    assert config.engine.model == str(tmp_path / "model.gguf")
    assert config.telemetry.trace_file == str(tmp_path / "spans.jsonl")
    assert load_config(None, {"model": "smollm2-135m"}).engine.model == "smollm2-135m"


def test_a_linked_file_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of Hugging Face, a GGUF file is a link to a file with a hash for a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "5fa3").touch()
    for link in ("model.gguf", "key"):
        (tmp_path / link).symlink_to("5fa3")
    (tmp_path / "tandem.toml").write_text('[security]\ncluster_token_file = "key"\n')
    config = load_config(Path("tandem.toml"), {"model": "model.gguf"})
    assert config.engine.model == str(tmp_path / "model.gguf")
    assert config.security.cluster_token_file == str(tmp_path / "key")


STARTED = with_cluster_token(
    TandemConfig(engine=EngineConfig(device="cpu"), router=RouterConfig(port=7000, slo_ttft_ms=500.0))
)
SPEC = fleet_spec(STARTED, {"port": 7000, "slo_ttft_ms": 500.0})


def file_of(config: TandemConfig) -> str:
    return json.dumps(ConfigText.of(config).tables)


def after(spec: FleetSpec, config: str = "", restart: bool = False, **tables: dict[str, object]) -> NextSpec:
    """As the supervisor finds it, in another process."""
    spec = pickle.loads(pickle.dumps(spec))
    return spec.after(config, json.dumps(tables) if tables else "", restart)


def test_live_options_reach_services_and_the_time_limits_of_the_supervisor_without_a_new_start() -> None:
    new = after(SPEC, cluster={"restart_backoff_s": 7}, worker={"drain_timeout_s": 8}, router={"slo_ttft_ms": 50})
    assert new.changes == (
        "[worker] drain_timeout_s 30.0 -> 8.0",
        "[router] slo_ttft_ms 500.0 -> 50.0",
        "[cluster] restart_backoff_s 1.0 -> 7.0",
    )
    assert not new.restarts
    assert (new.spec.rules.config.restart_backoff_s, new.spec.rules.drain_timeout_s) == (7.0, 8.0)
    assert (new.spec.live.worker.drain_timeout_s, new.spec.live.router.slo_ttft_ms) == (8.0, 50.0)
    assert after(new.spec, worker={"drain_timeout_s": 8}).changes == ()


def test_any_other_option_and_an_order_to_do_so_start_every_service_again_with_the_token_of_the_start() -> None:
    key = ApiKeyConfig("bob", "0" * 64)
    file = TandemConfig(engine=EngineConfig(device="cpu"), worker=WorkerConfig(drain_timeout_s=3.0), api_keys=(key,))
    new = after(SPEC, file_of(file))
    assert (new.restarts, new.changes) == (True, ("[worker] drain_timeout_s 30.0 -> 3.0", "[[api_keys]]"))
    built: Any = new.spec.decode
    assert built.args[0] == replace(STARTED, worker=file.worker, api_keys=(key,)), "flags and the token stay"
    assert SPEC.after("", "", restart=True) == NextSpec(SPEC, (), True)
    assert after(SPEC, restart=True, router={"max_queued": 7}).restarts


def test_a_fixed_option_and_a_size_are_refused_with_the_way_to_change_them_and_a_file_leaves_the_sizes() -> None:
    with pytest.raises(
        InvalidRequest, match=r"start `tandem serve` again to change \[engine\] dtype, \[gateway\] port"
    ):
        after(SPEC, engine={"dtype": "float32"}, gateway={"port": 80}, router={"max_queued": 7})
    with pytest.raises(InvalidRequest, match=r"use `tandem scale` in place of \[cluster\] num_decode"):
        after(SPEC, cluster={"num_decode": 3})
    sized = replace(STARTED, cluster=ClusterConfig(num_decode=3))
    assert (after(SPEC, file_of(sized)).changes, after(SPEC, file_of(sized)).restarts) == ((), False)


def test_another_token_is_refused_by_its_option_and_the_present_one_changes_nothing() -> None:
    token = STARTED.security.cluster_token
    orders = {"cluster_token": "another-token-of-a-fleet", "cluster_token_file": "/etc/tandem/token"}
    for name, value in orders.items():
        text = json.dumps({"security": {name: value}})
        for config, options in ((text, ""), ("", text)):
            with pytest.raises(InvalidRequest, match=rf"\[security\] {name}: the token of a running fleet never") as no:
                SPEC.after(config, options, restart=False)
            assert value not in str(no.value)
    with pytest.raises(InvalidRequest, match="never changes"):
        after(SPEC, security={"cluster_token": ""})
    assert after(SPEC, security={"cluster_token": token, "cluster_token_file": ""}).changes == ()


def test_engines_are_built_for_the_steps_of_their_start_so_that_a_limit_may_rise_again() -> None:
    low = after(SPEC, scheduler={"max_running": 2})
    built: list[Any] = [low.spec.decode, SPEC.decode]
    assert built[0].args == built[1].args
    assert (low.restarts, low.spec.live.scheduler) == (False, SchedulerConfig(max_running=2))
    high = after(low.spec, scheduler={"max_running": 64})
    assert (high.restarts, high.spec.live.scheduler.max_running) == (False, 64)
    higher = after(high.spec, scheduler={"max_running": 65})
    assert higher.restarts
    built = [higher.spec.decode]
    assert built[0].args[0].scheduler == SchedulerConfig(max_running=65)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"security": 1}', "config: security must be a table"),
        ('{"router": {"prot": 1}}', r"config: \[router\] prot is not an option"),
        ('{"router": {"max_queued": "many"}}', r"config: \[router\] max_queued must be int"),
        ('{"scheduler": {"max_running": 9, "max_batched_tokens": 8}}', r"max_batched_tokens \(8\) must be at least"),
        (r'{"telemetry": {"trace_file": "\ud800"}}', "config: .*surrogates"),
        (r'{"telemetry": {"trace_file": "\u0000"}}', r"config: \[telemetry\] trace_file .*null"),
        (r'{"gateway": {"tls_cert": "c", "tls_key": "\u0000"}}', r"config: \[gateway\] tls_key .*null"),
        ('{"telemetry": {"trace_file": "~nobody-here/x"}}', r"config: \[telemetry\] trace_file .*home directory"),
    ],
)
def test_a_config_that_cannot_be_read_names_the_fault(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        after(SPEC, text)


def test_a_config_that_does_not_fit_into_a_message_of_a_router_is_refused() -> None:
    large = after(SPEC, telemetry={"service_namespace": "x" * 3_000_000})
    assert large.names == ("[telemetry] service_namespace",)
    assert len(large.changes[0]) < 300
    with pytest.raises(InvalidRequest, match=r"at most 4190208 fit into a message \(\[router\] max_message_bytes\)"):
        after(large.spec, cluster={"decode_resource": "y" * 3_000_000})
    with pytest.raises(InvalidRequest, match="at most 1044480 fit into a message"):
        after(large.spec, router={"max_message_bytes": 1024**2})
    assert after(large.spec, telemetry={"service_namespace": "tandem"}).restarts


def test_a_fleet_without_a_maker_of_specs_restarts_and_changes_nothing() -> None:
    fixed = replace(SPEC, make=None)
    assert fixed.after("", "", True).restarts
    with pytest.raises(InvalidRequest, match="cannot change its config"):
        fixed.after("{}", "", False)


POLICY = """
import subprocess, time
from router.routing.policy import SecondsPolicy
def wrong(config): return object()
def broken(config): return config.absent
def good(config): return SecondsPolicy(config)
def endless(config): time.sleep(60)
def leaving(config): subprocess.Popen(["sleep", "20"]); return SecondsPolicy(config)
"""


@pytest.fixture
def named_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that a supervisor can import, and of no files."""
    (tmp_path / "own_policy.py").write_text(POLICY)
    (tmp_path / "unreadable_policy.py").write_text("def make(:")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


HTTP = replace(STARTED, gateway=GatewayConfig(port=8000))
NAMED: dict[
    str, list[tuple[Any, str]]
] = {  # By option: a value that no service can start with, and the end of the refusal.
    "router.policy": [
        ("no_such:make", "cannot import no_such: ModuleNotFoundError: No module named 'no_such' (see PYTHONPATH)"),
        ("unreadable_policy:make", "cannot import unreadable_policy: SyntaxError: "),
        ("own_policy:wrong", "own_policy:wrong must return a Policy, its object has no compared"),
        ("own_policy:broken", "AttributeError: "),
    ],
    "gateway.guardrail": [("no_such:build", "cannot import no_such: ")],
    "gateway.tls": [("/no/cert.pem", "tls_cert and tls_key must be a certificate")],
    "telemetry.trace_file": [("/no/folder/spans.jsonl", "cannot write /no/folder/spans.jsonl")],
    "vllm.python": [("/no/python", "/no/python is not there")],
    "vllm.adapters": [(["one=/no/adapter"], "one needs /no/adapter/adapter_config.json")],
}


@pytest.mark.usefixtures("named_things")
@pytest.mark.parametrize(("option", "value", "reason"), [(name, *row) for name, rows in NAMED.items() for row in rows])
def test_a_value_that_names_nothing_on_this_machine_is_refused_before_a_service_starts_again(
    option: str, value: Any, reason: str
) -> None:
    table, _, name = option.partition(".")
    names = {"tls": ("tls_cert", "tls_key")}.get(name, (name,))
    started = replace(HTTP, engine=EngineConfig(name="vllm", model="/m")) if table == "vllm" else HTTP
    with pytest.raises(InvalidRequest) as refused:
        fleet_spec(started).after("", json.dumps({table: dict.fromkeys(names, value)}), restart=False)
    assert reason in refused.value.message
    assert refused.value.message.startswith(f"[{table}] {names[0]}")


@pytest.mark.usefixtures("named_things")
def test_a_policy_has_a_time_to_load_and_may_leave_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started_s = time.monotonic()
    assert after(SPEC, router={"policy": "own_policy:leaving"}).restarts
    assert time.monotonic() - started_s < 20
    monkeypatch.setattr(named_code, "LOAD_TIMEOUT_S", 1.0)
    with pytest.raises(InvalidRequest, match=r"\[router\] policy: not loaded within 1 s"):
        after(SPEC, router={"policy": "own_policy:endless"})


def test_a_policy_that_was_mended_is_taken_and_one_that_broke_stops_no_live_change(named_things: Path) -> None:
    """The supervisor keeps no module of an operator."""
    spec = after(SPEC, router={"policy": "own_policy:good"}).spec
    assert spec.text.config.router.policy == "own_policy:good"
    (named_things / "own_policy.py").write_text("def good(config: return 1")
    assert after(spec, router={"max_queued": 7}).changes
    with pytest.raises(InvalidRequest, match=r"\[router\] policy: cannot import own_policy"):
        after(spec, restart=True)
    (named_things / "own_policy.py").write_text(POLICY)
    assert after(spec, restart=True).restarts


# ---- `tandem config` prints TOML that can be applied again. `tandem apply` reads options and waits for every service.

CONFIG = TandemConfig(
    router=RouterConfig(max_queued=7, policy="a:b"),
    vllm=VllmConfig(args=("--enforce-eager", "--max-logprobs=5")),
    api_keys=(ApiKeyConfig('bob "ü"', "0" * 64, operator=True), ApiKeyConfig("eve", "1" * 64)),
)


def test_the_printed_config_is_the_config_and_marks_live_options() -> None:
    lines = list(toml_lines(ConfigText.of(CONFIG).tables))
    assert from_mapping(tomllib.loads("\n".join(lines))) == CONFIG
    marked = [line.split()[0] for line in lines if line.endswith("# live")]
    assert {"max_queued", "max_running", "slo_ttft_ms"} <= set(marked)
    assert set(marked).isdisjoint({"policy", "dtype", "port"})


def test_a_printed_config_names_its_revision_for_the_command_that_applies_it() -> None:
    printed = "\n".join([first_line(12, "localhost:50051"), *toml_lines(ConfigText.of(CONFIG).tables)])
    assert revision_of(printed) == 12
    assert from_mapping(tomllib.loads(printed)) == CONFIG
    odd = [f"# Config {number} of the fleet at x" for number in ("9999999999", "٣")]
    for text in ("", "\n" + printed, "[router]\n", *odd):
        assert revision_of(text) == 0


def test_options_are_read_as_toml_and_else_as_text() -> None:
    text = options_as_json(["router.max_queued = 7", "router.admission=shed", "scheduler.slo_itl_ms=5e1"])
    assert json.loads(text) == {
        "router": {"max_queued": 7, "admission": "shed"},
        "scheduler": {"slo_itl_ms": 50.0},
    }


def test_a_value_of_more_than_python_reads_is_text_and_of_more_than_it_writes_is_refused() -> None:
    for value in ("9" * 6000, "[" * 5000):
        assert json.loads(options_as_json([f"router.max_queued={value}"])) == {"router": {"max_queued": value}}
    with pytest.raises(InvalidRequest, match="options: have a value that is no JSON"):
        options_as_json(["router.max_queued=0x" + "f" * 6000])


@pytest.mark.parametrize("text", ["max_queued=7", "router.max_queued", "router.=7", ".max_queued=7"])
def test_an_option_without_table_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be TABLE\.OPTION=VALUE"):
        options_as_json([text])


BEFORE = cluster_pb2.FleetNote(number=1, subject="decode-0", what="serves")
NOTES = [
    cluster_pb2.FleetNote(number=2, subject="fleet", what="rolls to config 2"),
    cluster_pb2.FleetNote(number=3, subject="decode-1", what="serves"),
    cluster_pb2.FleetNote(number=4, subject="fleet", what="has rolled"),
]

DRAINING, SERVING, STARTING = (
    cluster_pb2.SLOT_STATE_DRAINING, cluster_pb2.SLOT_STATE_SERVING, cluster_pb2.SLOT_STATE_STARTING,
)  # fmt: skip
AWAY = CallFailed(grpc.StatusCode.UNAVAILABLE, "no router", retryable=True)
NO_ANSWER = CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
ENDED = r"no router has answered for 0\.{} s: the fleet has ended, .* \(no router\)"
WRONG_TOKEN = CallFailed(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


class Router:
    """A router of a fleet that gets config 2, by a change that one service takes late, or by a roll of three events."""

    def __init__(
        self,
        num_calls_late: int = 0,
        changes: tuple[str, ...] = ("[router] max_queued 1024 -> 7",),
        rolls_to: int = 0,  # that config
        error: CallFailed | None = None,  # of the first call during the roll
        last_seen: tuple[cluster_pb2.SlotState, ...] = (),  # routers of a fleet that answers one call and goes away
    ) -> None:
        self._num_calls_late, self._changes, self._rolls_to, self._error = num_calls_late, changes, rolls_to, error
        self._last_seen = last_seen
        self._num_happened = 0

    async def apply(
        self, config: str, options: str, restart: bool, stop: bool, expected_revision: int
    ) -> cluster_pb2.ApplyResponse:
        assert (config, options, restart, stop, expected_revision) == ("", "{}", False, False, 7)
        return cluster_pb2.ApplyResponse(config_revision=2, changes=self._changes, restarts=bool(self._rolls_to))

    async def fleet(self) -> cluster_pb2.GetFleetResponse:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._last_seen:
            self.fleet = self._away  # type: ignore[method-assign]
            router = cluster_pb2.SERVICE_ROLE_ROUTER
            slots = [cluster_pb2.FleetSlot(state=state, role=router) for state in self._last_seen]
            return cluster_pb2.GetFleetResponse(slots=slots, config_revision=2, rolling=True)
        if self._rolls_to:
            self._num_happened += 1
            rolling = self._num_happened < len(NOTES)
            return cluster_pb2.GetFleetResponse(config_revision=self._rolls_to, rolling=rolling)
        self._num_calls_late -= 1
        slots = [
            cluster_pb2.FleetSlot(name="decode-0", state=SERVING, config_revision=1 if self._num_calls_late > 0 else 2),
            cluster_pb2.FleetSlot(name="decode-1", state=cluster_pb2.SLOT_STATE_WAITING, config_revision=1),
        ]
        return cluster_pb2.GetFleetResponse(slots=slots, config_revision=2)

    async def _away(self) -> cluster_pb2.GetFleetResponse:
        raise AWAY

    async def events(self, limit: int, after: int = 0) -> cluster_pb2.ListEventsResponse:
        found = [note for note in (BEFORE, *NOTES[: self._num_happened]) if note.number > after]
        return cluster_pb2.ListEventsResponse(events=found[-limit:])


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "ROLL_REFRESH_S", 0.001)


async def shown(router: Router) -> list[str]:
    out = io.StringIO()
    order = Order(options="{}", expected_revision=7)
    await fleet_config.apply(connection_to(router), order, Console(file=out))
    return out.getvalue().splitlines()


async def test_the_command_ends_when_every_serving_service_has_the_change() -> None:
    changed, told = await shown(Router(num_calls_late=3))
    assert changed == "[router] max_queued 1024 -> 7"
    assert told.startswith("config 2: every service has it after 0.")


async def test_a_change_of_nothing_says_so() -> None:
    assert await shown(Router(changes=())) == ["config 2: it has these values already"]


async def test_a_service_that_does_not_take_the_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_config, "PATIENCE_S", 0.05)
    with pytest.raises(TandemError, match=r"not every service has config 2 after 0\.05 s: decode-0$"):
        await shown(Router(num_calls_late=1000))


@pytest.mark.parametrize("error", [AWAY, NO_ANSWER], ids=["away", "no answer"])
async def test_each_event_of_a_roll_is_shown_once_also_if_the_router_is_replaced_meanwhile(error: CallFailed) -> None:
    changed, *events, told = await shown(Router(rolls_to=2, error=error))
    assert changed == "[router] max_queued 1024 -> 7"
    seen = [line.split("  ")[1] for line in events]
    assert seen == ["fleet rolls to config 2", "decode-1 serves", "fleet has rolled"]
    assert told.startswith("config 2: every service has it after ")


@pytest.mark.parametrize(
    ("router", "error", "told"),
    [
        (Router(rolls_to=1), TandemError, "the change has failed: every service has config 1 again"),
        (Router(rolls_to=2, error=WRONG_TOKEN), CallFailed, "wrong token"),
        (Router(last_seen=(SERVING, DRAINING)), WorkerUnavailable, ENDED.format("05")),
        # A router that starts may be the next to answer. A fleet that goes on has more routers than those that drain.
        (Router(last_seen=(DRAINING, STARTING)), WorkerUnavailable, ENDED.format("5")),
        (Router(last_seen=(DRAINING, DRAINING)), WorkerUnavailable, "stops before the change to config 2 is complete"),
    ],
    ids=["undone", "wrong token", "ended", "routers start", "routers drain"],
)
async def test_a_roll_that_fails_ends_the_command(
    router: Router, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_polls, "GONE_S", 0.05)
    monkeypatch.setattr(fleet_polls, "SILENT_S", 0.5)
    with pytest.raises(error, match=told):
        await shown(router)


def test_a_file_that_was_printed_is_applied_to_its_own_revision_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Order] = []

    async def apply(_connection: object, order: Order, _console: Console) -> None:
        orders.append(order)

    monkeypatch.setattr(fleet_config, "apply", apply)
    file, pipe = tmp_path / "tandem.toml", tmp_path / "pipe"  # as `tandem apply <(...)`: it gives its text once
    os.mkfifo(pipe)
    for first, path in ((first_line(12, "localhost:1"), file), ("", file), ("\ufeff" + first_line(13, "a:1"), pipe)):
        text = f"{first}\n[router]\nmax_queued = 7\n"
        writing = threading.Thread(target=path.write_text, args=(text, "utf-8"), daemon=True)
        writing.start()
        if path == file:
            writing.join()
        fleet_commands.apply([str(path)], router="localhost:1")
    assert [order.expected_revision for order in orders] == [12, 0, 13]
    assert {json.loads(order.config)["router"]["max_queued"] for order in orders} == {7}
