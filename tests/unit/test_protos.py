"""The checked-in stubs are what the .proto files generate, and every message and field says what it is."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").glob("*.proto"))


DOCUMENTED = re.compile(r"(rpc |service |message |enum |[A-Z_0-9]+ = \d+;|(optional |repeated )?[\w.<>, ]+ \w+ = \d+;)")


def test_the_checked_in_stubs_are_what_make_protos_makes(tmp_path: Path) -> None:
    for name in ("Makefile", "protos", "tandem_client"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    made = ["make", "--silent", "--old-file=setup", "protos", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(made, cwd=tmp_path, check=True, timeout=60)
    stubs = {path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*") if "__pycache__" not in path.parts}
    assert len(stubs) >= 2 * len(PROTOS)
    for stub in sorted(stubs):
        assert (ROOT / stub).read_text() == (tmp_path / stub).read_text(), f"{stub} is stale: run `make protos`"


def test_the_stubs_were_made_by_the_pinned_compiler() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert importlib.metadata.version("grpcio-tools") == pins["grpcio-tools"]


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_every_service_call_message_field_and_value_is_documented(proto: Path) -> None:
    lines = [line.strip() for line in proto.read_text().splitlines()]
    assert [
        line for above, line in itertools.pairwise(lines) if DOCUMENTED.match(line) and not above.startswith("//")
    ] == []
