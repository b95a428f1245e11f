"""The checked-in stubs are what the .proto files generate, every message says what it is, values have short names."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands import demo, explain, status, trace
from cli.screens import fleet_health
from core.wire_names import short_name
from gateway.dashboard import views
from gateway.formats.outputs import AnswerHead
from gateway.formats.usage import _path
from tandem_client.results import _completion
from tandem_client.stubs import cluster_pb2, inference_pb2, worker_pb2

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


# ---- A value of an enum has a short name wherever people or programs read it, and one of a later version has one, too.

LATER = 99
PATH = worker_pb2.PathReport(state=LATER, lane=LATER)  # type: ignore[arg-type]
WORKER = cluster_pb2.FleetWorker(role=LATER, state=LATER)  # type: ignore[arg-type]
SLOT = cluster_pb2.FleetSlot(role=LATER, state=LATER)  # type: ignore[arg-type]
HOLDER = worker_pb2.BlockHolder(kind=LATER, state=LATER)  # type: ignore[arg-type]
END = inference_pb2.Finished(finish_reason=LATER, path=LATER)  # type: ignore[arg-type]
QUIET = Console(quiet=True)


def test_a_name_has_neither_capitals_nor_the_name_of_its_enum() -> None:
    assert short_name(worker_pb2.WorkerState, worker_pb2.WORKER_STATE_SERVING) == "serving"
    assert short_name(worker_pb2.HolderKind, worker_pb2.HOLDER_KIND_PULL) == "pull"
    assert short_name(inference_pb2.RequestPath, LATER) == f"unknown {LATER}"


@pytest.mark.parametrize(
    "read",
    [
        lambda: views._worker_view(WORKER),
        lambda: views._path_view(PATH),
        lambda: views._path_name(LATER),  # type: ignore[arg-type]
        lambda: AnswerHead("", "", 0, frozenset(), ()).finish_reason(END),
        lambda: _path(LATER),
        lambda: _completion([], END),
        lambda: fleet_health.status_json(cluster_pb2.GetFleetResponse(slots=[SLOT], workers=[WORKER])),
        lambda: status._state(WORKER),
        lambda: status._holder_row(HOLDER),
        lambda: explain.candidates_table(cluster_pb2.ExplainResponse(path=LATER)),  # type: ignore[arg-type]
        lambda: trace.show_list([cluster_pb2.RequestSummary(path=LATER)], QUIET),  # type: ignore[arg-type]
        lambda: demo.report(END, QUIET),
    ],
)
def test_a_value_of_a_later_version_is_shown(read: Callable[[], object]) -> None:
    read()
