"""Packs what a machine with a GPU needs for `tests/gpu` and `benchmarks/gpu.py`: `python -m tools.gpu_archive`.

The machine has Python 3.12, torch, triton, numpy and transformers, but no network. It unpacks and runs:

    tar xJf site.tar.xz -C DIR
    PYTHONPATH=DIR/site python benchmarks/gpu.py      in a checkout, or in DIR/tandem of an archive with --sources

The packages are those of pyproject.toml and their dependencies, in the versions that `make setup` has installed, as
wheels of PyPI for Linux on x86-64. Parts that no GPU program loads are left out: a third of the bytes remains.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
# They need torch and numpy alone. `nixl` is the name under which the connectors of vLLM import nixl-cu13.
GPU_PACKAGES = ("nixl-cu13==1.5.1", "nixl==1.5.1")
# The machine has these; nixl-cu12 is for CUDA 12, and of tokenizers only what is read from files is used.
LEFT_TO_THE_MACHINE = frozenset({"torch", "triton", "numpy", "nixl-cu12", "huggingface-hub"})
MACHINE = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
GLIBC_MINORS = range(17, 40)  # the machine has glibc 2.39; pip takes wheels of the named versions alone
# Patterns of paths inside the wheels.
LEFT_OUT = (
    "ray/jars/*", "ray/rllib/*", "ray/tune/*", "ray/train/*", "ray/serve/*", "ray/llm/*", "ray/data/*",
    "ray/dashboard/client/*", "ray/cpp/*", "ray/core/libjemalloc.so",
    "nixl_ep*", "nixl_cu13.scripts/*", "*/libucx_perftest*",
    "*libplugin_[!UP]*",  # of nixl's plugins, UCX and POSIX stay
    "nixl_cu13.libs/libaws*", "nixl_cu13.libs/libazure*", "nixl_cu13.libs/libxml2*", "nixl_cu13.libs/libs2n*",
    "nixl_cu13.libs/libgusli*",
    "*.data/scripts/*", "*.data/headers/*", "*.data/data/*", "*/tests/*", "*.pyi", "*.dist-info/RECORD",
)  # fmt: skip
MAX_BYTES = 52_000_000


class ArchiveFailed(Exception):
    """The message is one line for the operator."""


def pins() -> list[str]:
    """The packages of the archive as `name==version`, in the versions that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = closure([*project["dependencies"], *TEST_PACKAGES])
    return [*(f"{name}=={metadata.version(name)}" for name in names), *GPU_PACKAGES]


def closure(requirements: Sequence[str]) -> list[str]:
    """The packages that the machine needs for `requirements`, by the metadata of the packages installed here."""
    found: set[str] = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name in LEFT_TO_THE_MACHINE:
            continue
        found.add(name)
        for needed in map(Requirement, metadata.requires(name) or []):
            extras = {"", *requirement.extras}
            if needed.marker is None or any(needed.marker.evaluate(MACHINE | {"extra": extra}) for extra in extras):
                todo.append(needed)
    return sorted(found)


def download(packages: Sequence[str], target: Path) -> list[Path]:
    """The wheels. Raises `ArchiveFailed` with the last line of pip."""
    names = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS), "manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [option for name in names for option in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(target), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArchiveFailed((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return sorted(target.glob("*.whl"))


def unpack(wheel: Path, site: Path) -> None:
    """Write the files of a wheel that the archive keeps."""
    with zipfile.ZipFile(wheel) as content:
        for entry in content.infolist():
            if entry.is_dir() or any(fnmatch.fnmatchcase(entry.filename, pattern) for pattern in LEFT_OUT):
                continue
            folder, _, inner = entry.filename.partition("/")
            place = inner.partition("/")[2] if folder.endswith(".data") else entry.filename  # purelib, platlib
            file = site / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read(entry))
            file.chmod(0o755 if entry.external_attr >> 16 & 0o100 else 0o644)  # Ray executes some of its files


def strip(site: Path) -> None:
    """Remove the symbols that only debuggers read: a quarter of all bytes."""
    binaries = [path for path in site.rglob("*") if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]
    subprocess.run(["strip", "--strip-unneeded", *binaries], check=True)


def copy_sources(target: Path) -> None:
    """The files of the last commit."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as content:
        content.extractall(target, filter="data")


def pack(folder: Path, out: Path) -> None:
    """Replaces `out` when the archive is whole. The same files make the same bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(out.name + ".new")
    options = ["--use-compress-program=xz -6 -T0", "--sort=name", "--mtime=@0", "--owner=0", "--group=0"]
    subprocess.run(["tar", *options, "-C", folder, "-cf", new, "."], check=True)
    new.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/site.tar.xz"), help="the archive to write")
    parser.add_argument("--sources", action="store_true", help="with the sources of Tandem at the last commit")
    options = parser.parse_args()
    try:
        packages = pins()
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "archive", "site")
            for wheel in download(packages, Path(folder, "wheels")):
                unpack(wheel, site)
            strip(site)
            if options.sources:
                copy_sources(site.with_name("tandem"))
            pack(site.parent, options.out)
    except ArchiveFailed as error:
        print(f"no archive: {error}", file=sys.stderr)
        return 1
    size = options.out.stat().st_size
    print(f"{options.out}: {size / 1e6:.1f} MB, {len(packages)} packages")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
