"""`tandem serve --engine vllm` is refused before Ray starts where vLLM could not run, or would ignore an option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.compose import _load_tokenizer
from cli.diagnosis.doctor_findings import Finding, Health
from cli.diagnosis.start_checks import check_before_start
from cli.diagnosis.vllm_environment import (
    check_machine,
    check_options,
    environment,
    python_of,
    torch_version,
    variables,
)
from cli.vllm import memory_arguments
from core.config import TandemConfig, VllmConfig, from_mapping
from core.errors import ConfigError
from tests.support.deployment import place
from vllm_worker.adapters import adapter_arguments

ROOT = Path(__file__).parents[3]


def config(directory: Path, engine: dict[str, Any] | None = None, **vllm: Any) -> TandemConfig:
    (directory / "config.json").write_text("{}")
    return from_mapping({"engine": {"name": "vllm", "model": str(directory)} | (engine or {}), "vllm": vllm})


@pytest.mark.parametrize(
    ("engine", "vllm", "message"),
    [
        ({"model": "/nowhere"}, {}, "'/nowhere' is none"),
        ({}, {"python": "/nowhere/bin/python"}, "/nowhere/bin/python is not there; run `make vllm`"),
        ({}, {"python": sys.executable}, "vllm: not installed"),
    ],
)
def test_each_fault_has_one_line(tmp_path: Path, engine: dict[str, Any], vllm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(config(tmp_path, engine, **vllm))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"quantization": "int8"}, r"\[engine\] quantization is an option of Tandem's own engine"),
        ({"block_size": 32}, r"\[engine\] block_size is"),
        ({"model": "smollm2-135m"}, "make vllm"),
    ],
)
def test_options_that_vllm_would_ignore_are_refused_in_a_joined_cluster_too(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    joined = {"cluster": {"address": "10.0.0.1:6379"}, "router": {"port": 0}}
    options = from_mapping({"engine": {"name": "vllm", "model": str(tmp_path)} | engine} | joined)
    with pytest.raises(ConfigError, match=message):
        check_before_start(options, Console())
    check_options(from_mapping({"engine": {"name": "vllm", "model": "/models/of/another/machine"}} | joined))


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--model", r"\[engine\] model"),
        ("--kv_transfer_config={}", "lease_s"),
        ("-tp4", "tensor_parallel"),
        ("-tp", "tensor_parallel"),
        ("--no-async-scheduling", "every token before the next step"),
        ("--max-model-len=4", "max_context"),
        ("--kv-transfer-config.kv_role", "lease_s"),  # vLLM's parser drops the connector for it
        ("--kv-offloading-size=8", "drops the connector"),
        ("--max_model=4", "max_context"),  # vLLM's parser takes the beginning of a name
        ("-t", "tensor_parallel"),
        ("--no-enable-logging-iteration-details", "time of each step"),
    ],
)
def test_what_tandem_sets_itself_is_refused_by_name(argument: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        VllmConfig(args=(argument, "x"))


def test_other_arguments_pass() -> None:
    args = ("--enforce-eager", "--max-num-seqs", "8", "--host-memory", "-1", "--config-format", "hf", "-ep", "-O3")
    assert VllmConfig(args=args).args == args


@pytest.mark.parametrize(
    ("adapters", "error"),
    [
        (("sql",), "each must be NAME=DIRECTORY"),
        (("=/sql",), "each must be NAME=DIRECTORY"),
        (("s q l=/sql",), "one is 's q l=/sql'"),
        (("sql=/a", "sql=/b"), "names must be unique"),
    ],
)
def test_a_malformed_adapter_is_refused(adapters: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        VllmConfig(adapters=adapters)


def test_adapters_need_vllm_and_a_name_beside_that_of_the_model() -> None:
    adapters = {"adapters": ["fake:tiny=/adapter"]}
    with pytest.raises(ConfigError, match=r"adapters need \[engine\] name = vllm, is tandem"):
        from_mapping({"vllm": adapters})
    config = from_mapping({"engine": {"name": "vllm", "model": "fake:tiny"}, "vllm": adapters})
    with pytest.raises(ConfigError, match="fake:tiny is the name of the model"):
        _load_tokenizer(config, None)


def test_vllm_gets_the_largest_rank_and_on_a_cpu_a_place_that_stays_empty(tmp_path: Path) -> None:
    directories = {}
    for name, rank in {"small": 4, "large": 24}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        directories[name] = str(tmp_path / name)
    assert adapter_arguments({}, on_gpu=True) == []
    assert adapter_arguments(directories, on_gpu=True)[1:5] == ["--max-lora-rank", "32", "--max-loras", "2"]
    assert adapter_arguments(directories, on_gpu=False)[3:] == ["--max-loras", "3", "--max-cpu-loras", "3"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "sql needs .*adapter_config.json with its rank r: .*No such file"),
        ("{}", "with its rank r: 'r'"),
        ('{"r": 1000}', r"the rank of sql must be in \[1, 512\], is 1000"),
    ],
)
def test_a_directory_without_an_adapter_is_refused_by_name(tmp_path: Path, content: str | None, error: str) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=error):
        adapter_arguments({"sql": str(tmp_path)}, on_gpu=True)


@pytest.mark.parametrize(
    ("gpus", "wanted"), [(None, []), (0.0, []), (1.0, []), (4.0, []), (0.45, ["--gpu-memory-utilization", "0.45"])]
)
def test_a_share_of_a_gpu_bounds_the_memory_that_vllm_takes(gpus: float | None, wanted: list[str]) -> None:
    assert memory_arguments(replace(place(0), gpus=gpus)) == wanted


def test_tensor_parallel_workers_take_whole_gpus() -> None:
    with pytest.raises(ConfigError, match="prefill_gpus must be 1"):
        from_mapping({"vllm": {"tensor_parallel": 2}, "cluster": {"prefill_gpus": 0.5}})


def findings(python: str = sys.executable) -> dict[str, Finding]:
    return {finding.subject: finding for finding in environment(VllmConfig(python=python))}


def test_the_environment_lists_what_is_missing_with_its_command() -> None:
    found = findings()
    assert found["vllm"].health is Health.FAIL
    assert "make vllm" in found["vllm"].fix
    assert found["vLLM's ray"].health is Health.OK
    assert found["Tandem in vLLM's python"].health is Health.OK
    assert found["vLLM's nixl"].fix.endswith("pip install nixl==1.5.1`")


def test_a_library_that_tandem_cannot_import_is_a_fault(tmp_path: Path) -> None:
    """vLLM's pins may bring a protobuf that is older than Tandem's stubs."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['google.protobuf'] = None")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    finding = findings(str(python))["Tandem in vLLM's python"]
    assert finding.health is Health.FAIL
    assert "google.protobuf" in finding.text


def test_the_torch_of_an_environment_tells_its_build(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert torch_version(python) == ""
    metadata = tmp_path / "lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: torch\nVersion: 2.13.0+cpu\n")
    assert torch_version(python) == "2.13.0+cpu"


def test_a_relative_interpreter_keeps_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolved link of a virtual environment starts the Python that the environment was made with."""
    monkeypatch.chdir(tmp_path)
    Path("python").symlink_to(sys.executable)
    assert python_of(VllmConfig(python="python")) == tmp_path / "python"


def test_the_processes_of_vllm_find_every_package_of_tandem_and_no_library_beside_them(tmp_path: Path) -> None:
    """A wheel puts Tandem beside its own torch, which hid vLLM's when the folder was on the path."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    for package in packages:
        (site_packages / package).symlink_to(ROOT / package)
    (site_packages / "xxhash.py").write_text("raise ImportError('of another environment')")
    program = f"import xxhash, {', '.join(packages)}; print(core.__file__, cli.__file__)"
    startup = Path(variables(Path(sys.executable))["PYTHONPATH"]).relative_to(ROOT)
    environment = os.environ | {"PYTHONPATH": str(site_packages / startup)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(site_packages / name / "__init__.py") for name in ("core", "cli")]


def test_hand_offs_read_gpu_memory_over_cuda_ipc_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", raising=False)
    assert variables(Path(sys.executable))["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "y"
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "auto")
    assert variables(Path(sys.executable))["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "auto"
