"""A config comes from defaults, the file and flags."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from cli.config_file import load_config
from core.config import ARRAYS, TandemConfig, from_mapping
from core.errors import ConfigError

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
