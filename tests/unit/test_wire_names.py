"""A value of an enum has a short name wherever people or programs read it, and one of a later version has one, too."""

from __future__ import annotations

from collections.abc import Callable

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
