"""The Python environment of vLLM: where it is, what it needs, and the variables of the processes in it.

vLLM pins versions of torch and transformers that differ from ours, so its workers run in an environment of their own.
`make vllm` installs one with vLLM's CPU build. For GPUs, docs/vllm.md lists the packages; `[vllm] python` names the
interpreter.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import vllm_worker
from cli.diagnosis.doctor_findings import Finding, Health, judge
from core.config import EngineConfig, TandemConfig, VllmConfig
from core.errors import ConfigError
from kv_transfer.device.device_checks import GET_ZCOPY
from model_files.catalogue import CATALOGUE, default_cache_dir
from vllm_worker.adapters import adapter_arguments

VLLM_VERSION = "0.32.0"
# What a worker needs beside vLLM, in the versions of Tandem's own environment.
WIRE_PACKAGES = (
    "ray", "xxhash", "grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "opentelemetry-sdk",
)  # fmt: skip
TRANSFER_PACKAGES = ("nixl-cu12==1.5.1", "nixl==1.5.1")
INSTALL = "run `make vllm` (for GPUs see docs/vllm.md)"
MODEL_FORMAT = "a directory in Hugging Face format"
PROBE_TIMEOUT_S = 60.0

# Prints the versions of the packages, and the fault of an import of what Ray starts there.
_PROBE = """
import importlib.metadata, json
found = {str(one.name).lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
fault = ""
try:
    import cli.vllm, fleet.ray.hosts
except Exception as error:
    fault = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps([found, fault]))
"""
# Of the engine, which a worker with vLLM does not have.
_OWN_OPTIONS = ("quantization", "kv_dtype", "block_size", "prefill_block_size", "kernels")


def vllm_dir() -> Path:
    """The environment of `make vllm`."""
    return default_cache_dir() / "peers" / f"vllm-{VLLM_VERSION}"


def default_model_dir() -> Path:
    """The default model in Hugging Face format, which `make vllm` writes."""
    return default_cache_dir() / "peers" / "smollm2-135m-hf"


def python_of(config: VllmConfig) -> Path:
    """Absolute, because workers run in other directories. A resolved link would lead out of the environment."""
    return Path(config.python).expanduser().absolute() if config.python else vllm_dir() / "bin" / "python"


def variables(python: Path) -> dict[str, str]:
    """The environment variables of a process with vLLM, beside those of this process."""
    directory = python.parent.parent
    tcmalloc = next(iter(sorted(directory.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))), None)
    libraries = [tcmalloc, directory / "lib" / "libiomp5.so"]  # as vLLM's manual recommends for a CPU
    preload = [str(library) for library in libraries if library is not None and library.exists()]
    return {
        "PYTHONPATH": str(Path(vllm_worker.__file__).resolve().with_name("startup")),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the interface of its logits processors is another one
        "HF_HUB_OFFLINE": "1",
        GET_ZCOPY: os.environ.get(GET_ZCOPY, "y"),  # else reads of GPU memory fall back to TCP
        **({"LD_PRELOAD": ":".join(preload)} if preload else {}),
    }


def torch_version(python: Path) -> str:
    """Of the torch in the environment of an interpreter; empty if it has none. A CPU build ends in +cpu."""
    site_packages = [str(directory) for directory in python.parent.parent.glob("lib/python*/site-packages")]
    found = importlib.metadata.distributions(name="torch", path=site_packages)
    return next((torch.version for torch in found), "")


def check_options(config: TandemConfig) -> None:
    """Raises `ConfigError` if workers with vLLM would ignore an option, on whatever machine they run."""
    engine, plain = config.engine, EngineConfig()
    for name in _OWN_OPTIONS:
        if getattr(engine, name) != getattr(plain, name):
            raise ConfigError(f"[engine] {name} is an option of Tandem's own engine; for vLLM use [vllm] args")
    if engine.model in CATALOGUE:
        raise ConfigError(f"[engine] model: vLLM needs {MODEL_FORMAT}; `make vllm` writes one for {engine.model}")


def check_machine(config: TandemConfig) -> None:
    """Raises `ConfigError` if workers with vLLM could not start on this machine."""
    model = config.engine.model
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"[engine] model: vLLM needs {MODEL_FORMAT}, {model!r} is none")
    for finding in environment(config.vllm):
        if finding.health is Health.FAIL:
            raise ConfigError(f"[vllm] python: {finding.subject}: {finding.text}; {finding.fix}")


def check_files(config: VllmConfig) -> None:
    """Raises `ConfigError` if this machine lacks the interpreter or an adapter."""
    adapter_arguments(config.adapter_directories, on_gpu=False)
    if not os.access(python_of(config), os.X_OK):
        raise ConfigError(f"[vllm] python: {python_of(config)} is not there; {INSTALL}")


def environment(config: VllmConfig) -> Iterator[Finding]:
    """What the environment has, and what is missing."""
    python = python_of(config)
    if not os.access(python, os.X_OK):
        yield Finding("vLLM's python", Health.FAIL, f"{python} is not there", INSTALL)
        return
    try:
        command, env = [str(python), "-c", _PROBE], os.environ | variables(python)
        probed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S, env=env)
        found, fault = json.loads(probed.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield Finding("vLLM's python", Health.FAIL, f"{python} does not run: {error}", INSTALL)
        return
    version = found.get("vllm", "")
    yield judge(bool(version), "vllm", version or "not installed", INSTALL, Health.FAIL)
    tested = version.partition("+")[0].startswith(VLLM_VERSION.rpartition(".")[0])
    if version and not tested:
        yield Finding("vllm", Health.WARN, f"{version} was not tested", f"Tandem is tested with {VLLM_VERSION}")
    for name in WIRE_PACKAGES:
        ours, theirs = importlib.metadata.version(name), found.get(name, "")
        exact = name == "ray"  # Ray refuses an actor with another version
        fix = f"run `{python} -m pip install {name}=={ours}`"
        good = theirs == ours if exact else bool(theirs)
        yield judge(good, f"vLLM's {name}", theirs or "not installed", fix, Health.FAIL)
    nixl = found.get("nixl") or found.get("nixl-rocm")  # their backends, such as nixl-cu12, are not enough for vLLM
    fix = f"run `{python} -m pip install {TRANSFER_PACKAGES[-1]}`"
    yield judge(bool(nixl), "vLLM's nixl", nixl or "not installed", fix, Health.FAIL)
    pinned = " ".join(f"{name}=={importlib.metadata.version(name)}" for name in WIRE_PACKAGES)
    fix = f"run `{python} -m pip install {pinned}`"
    yield judge(not fault, "Tandem in vLLM's python", fault or "its modules import", fix, Health.FAIL)
