"""A config comes from defaults, the file and flags."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from cli.config_file import FLAGS, load_config
from core.config import ARRAYS, TandemConfig, from_mapping
from core.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "tandem.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    return path


def test_without_file_and_flags_everything_is_default() -> None:
    assert load_config(None, {}) == TandemConfig()


def test_a_flag_overrides_the_file_and_the_file_overrides_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[cluster]\nnum_prefill = 3\nnum_decode = 4\n")
    cluster = load_config(path, {"prefill": 7, "decode": None}).cluster
    assert (cluster.num_prefill, cluster.num_decode) == (7, 4)


# Parameter of `tandem serve`, its value, and the table and option that it sets.
GIVEN = [
    ("model", "fake:tiny", "engine", "model"),
    ("prefill", 9, "cluster", "num_prefill"),
    ("decode", 9, "cluster", "num_decode"),
    ("routers", 9, "cluster", "num_routers"),
    ("host", "0.0.0.0", "router", "host"),
    ("port", 1234, "router", "port"),
    ("address", "head:6379", "cluster", "address"),
    ("dtype", "float32", "engine", "dtype"),
    ("quantization", "int4", "engine", "quantization"),
    ("device", "cpu", "engine", "device"),
    ("kv_memory_mb", 77, "engine", "kv_memory_mb"),
    ("max_context", 4096, "engine", "max_context"),
    ("threads", 3, "engine", "num_threads"),
    ("max_batched_tokens", 1024, "scheduler", "max_batched_tokens"),
    ("slo_ttft_ms", 750.0, "router", "slo_ttft_ms"),
    ("slo_itl_ms", 25.0, "scheduler", "slo_itl_ms"),
    ("admission", "shed", "router", "admission"),
    ("local_prefill", "never", "router", "local_prefill"),
    ("http", 8000, "gateway", "port"),
    ("http_host", "0.0.0.0", "gateway", "host"),
    ("trace_file", "/somewhere/spans.jsonl", "telemetry", "trace_file"),
    ("otlp_endpoint", "http://somewhere:4317", "telemetry", "otlp_endpoint"),
    ("metrics_port", 9464, "telemetry", "metrics_port"),
]


@pytest.mark.parametrize(("parameter", "value", "table", "option"), GIVEN, ids=[row[0] for row in GIVEN])
def test_each_flag_sets_its_option_and_no_other(parameter: str, value: float | str, table: str, option: str) -> None:
    assert load_config(None, {parameter: value}) == from_mapping({table: {option: value}}) != TandemConfig()


def test_every_flag_has_a_row() -> None:
    assert {flag.parameter for flag in FLAGS} == {row[0] for row in GIVEN}


def test_the_example_file_lists_every_option_with_its_default() -> None:
    example = tomllib.loads(EXAMPLE.read_text())
    assert from_mapping(example) == TandemConfig()
    for table in dataclasses.fields(TandemConfig):
        if table.name in ARRAYS:
            continue  # its entries stand in comments
        options = {option.name for option in dataclasses.fields(getattr(TandemConfig(), table.name))}
        assert set(example[table.name]) == options, f"[{table.name}]"


def test_every_option_of_the_example_file_is_explained() -> None:
    lines = EXAMPLE.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if "=" in line and not line.startswith("#"):
            assert "# " in line or before.startswith("# "), line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[router]\nprot = 1\n", r"tandem.toml: \[router\] prot is not an option; known: .*port"),
        ("[routers]\n", r"\[routers\] is not a table"),
        ('[router]\nport = "1"\n', r"\[router\] port must be int, is '1'"),
        ("port = 1\n", "port is outside a table"),
        ("[router\n", "is not valid TOML"),
        ("[router]\nport = 70000\n", r"port must be in \[0, 65535\]"),
    ],
)
def test_the_error_for_a_wrong_file_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml: No such file"):
        load_config(Path("nowhere.toml"), {})


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    config = load_config(None, {"model": "model.gguf", "trace_file": "spans.jsonl"})
    assert config.engine.model == str(tmp_path / "model.gguf")
    assert config.telemetry.trace_file == str(tmp_path / "spans.jsonl")
    assert load_config(None, {"model": "smollm2-135m"}).engine.model == "smollm2-135m"
