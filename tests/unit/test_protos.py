"""The checked-in stubs are what the .proto files generate, and every message and field says what it is."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").glob("*.proto"))


WITH_SERVICES = [path for path in PROTOS if "\nservice " in path.read_text()]
DOCUMENTED = re.compile(r"(rpc |service |message |enum |[A-Z_0-9]+ = \d+;|(optional |repeated )?[\w.<>, ]+ \w+ = \d+;)")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stubs made anew, as `make protos` does it."""
    out = tmp_path_factory.mktemp("stubs")
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    names = [str(path.relative_to(ROOT)) for path in PROTOS]
    with_services = [str(path.relative_to(ROOT)) for path in WITH_SERVICES]
    subprocess.run([*protoc, f"--python_out={out}", f"--pyi_out={out}", *names], cwd=ROOT, check=True, timeout=60)
    subprocess.run([*protoc, f"--grpc_python_out={out}", *with_services], cwd=ROOT, check=True, timeout=60)
    return out / "protos"


def test_there_are_protos() -> None:
    assert {path.name for path in PROTOS} == {
        "cluster.proto",
        "handoff.proto",
        "inference.proto",
        "kserve.proto",
        "worker.proto",
    }


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_the_checked_in_stubs_are_current(proto: Path, generated: Path) -> None:
    for suffix in ("_pb2.py", "_pb2.pyi", *(["_pb2_grpc.py"] if proto in WITH_SERVICES else [])):
        name = proto.stem + suffix
        checked_in = ROOT / "protos" / name
        assert checked_in.read_text() == (generated / name).read_text(), f"{name} is stale: run `make protos`"


def test_the_stubs_were_made_by_the_pinned_compiler() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert importlib.metadata.version("grpcio-tools") == pins["grpcio-tools"]


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_every_service_call_message_field_and_value_is_documented(proto: Path) -> None:
    lines = [line.strip() for line in proto.read_text().splitlines()]
    assert [
        line for above, line in itertools.pairwise(lines) if DOCUMENTED.match(line) and not above.startswith("//")
    ] == []
