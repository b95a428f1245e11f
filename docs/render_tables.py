"""Draws the tables of the code into the documents, between markers: `python -m docs.render_tables`.

    <!-- table: owner -->   diagram and list of steps, made from core.handoff.OWNER_STEPS   <!-- end -->

This file explains each step of a state once. A step without an explanation, or an explanation without a step, is an
error.
tests/unit/test_docs.py compares the documents with the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from core.handoff import OWNER_STEPS, PULLER_STEPS, OwnerState, PullerState
from core.lifecycle import NEXT_STAGES, Stage
from runtime.prometheus.metrics import ALIASES, METRICS, TYPES
from runtime.tracing.span_names import Attribute, SpanName

DOCS = Path(__file__).resolve().parent
CONSTANT = re.compile(r'    [A-Z_\d]+ = "(.+?)"(?:  # (.+))?')

STAGE_CAUSES = {
    (Stage.TOKENIZE, Stage.QUEUE): "router: the request is valid and the prompt is token ids",
    (Stage.TOKENIZE, Stage.FINISHED): "router: refused on arrival: the queue is full, or the prompt is too long",
    (Stage.QUEUE, Stage.PREFILL): "router: workers with room are chosen; worker: the first chunk is in a step",
    (Stage.QUEUE, Stage.TRANSFER): "decode worker: there is room for the prompt; WANT goes out",
    (Stage.QUEUE, Stage.FINISHED): "router: cancelled, past its deadline, or no decode worker for too long",
    (Stage.PREFILL, Stage.DECODE): "router: the first token has arrived; worker: the first token is sampled",
    (Stage.PREFILL, Stage.QUEUE): "router: an attempt failed before its first token",
    (Stage.PREFILL, Stage.FINISHED): "router: cancelled, past its deadline, or an error that no retry can cure",
    (Stage.TRANSFER, Stage.DECODE): "decode worker: the pull is complete and has brought the first token",
    (Stage.DECODE, Stage.MOVE): "decode worker: the target of a move has caught up, and no step plans the sequence",
    (Stage.MOVE, Stage.DECODE): "decode worker: the move has failed, and the sequence runs on here",
    (Stage.MOVE, Stage.FINISHED): "decode worker: the target has everything, or the call has ended",
    (Stage.DECODE, Stage.FINISHED): "stop, length, cancelled, past its deadline, or an error",
    (Stage.DECODE, Stage.QUEUE): "router: a worker was lost; another worker continues after the delivered tokens",
}

OWNER_CAUSES = {
    (OwnerState.COMPUTING, OwnerState.OFFERED): "the first block is computed and leased",
    (OwnerState.COMPUTING, OwnerState.RELEASED): "RELEASE: the puller lacked no block, or gave up before one was ready",
    (OwnerState.COMPUTING, OwnerState.EXPIRED): "no message of the puller for `lease_s`",
    (OwnerState.COMPUTING, OwnerState.ABORTED): "ABORT, or the peer is lost; no read can be running",
    (OwnerState.OFFERED, OwnerState.RELEASED): "RELEASE: read and verified, or given up",
    (OwnerState.OFFERED, OwnerState.EXPIRED): "no message of the puller for `lease_s`",
    (OwnerState.OFFERED, OwnerState.ABORTED): (
        "ABORT or a broken connection; if blocks were announced, only after RELEASE, the end of the lease, or proof "
        "that the peer's process is dead"
    ),
}

PULLER_CAUSES = {
    (PullerState.RESERVED, PullerState.WANTING): "the worker has room for all missing blocks; WANT goes out",
    (PullerState.RESERVED, PullerState.FAILED): "ABORT, or the owner is lost or does not know the transfer",
    (PullerState.RESERVED, PullerState.CANCELLED): "the call was cancelled or timed out",
    (PullerState.WANTING, PullerState.READING): "announced blocks have got their targets: the first read starts",
    (PullerState.WANTING, PullerState.VERIFYING): "the last READY has arrived, and no block is left to read",
    (PullerState.WANTING, PullerState.FAILED): "ABORT, the owner is lost, or READY lists blocks that cannot be read",
    (PullerState.WANTING, PullerState.CANCELLED): "the call was cancelled or timed out, or gave way to a higher rank",
    (
        PullerState.READING,
        PullerState.WANTING,
    ): "all blocks with a target are verified; others are not announced, or lack a target",
    (PullerState.READING, PullerState.VERIFYING): "all blocks are read and verified",
    (PullerState.READING, PullerState.FAILED): "a read failed, a digest stays wrong, or as above; no read is in flight",
    (PullerState.READING, PullerState.CANCELLED): "as from WANTING, and no read is in flight",
    (PullerState.VERIFYING, PullerState.COMPLETE): "the lease is proven to have covered the last read",
    (PullerState.VERIFYING, PullerState.FAILED): "ABORT (the lease had expired), or the owner is lost",
    (PullerState.VERIFYING, PullerState.CANCELLED): "the call was cancelled or timed out",
}


@dataclass(frozen=True, slots=True)
class Table:
    document: str  # file in docs/
    steps: Mapping[Any, frozenset[Any]]  # state -> the states that may follow it
    causes: Mapping[tuple[Any, Any], str]
    starts: tuple[Enum, ...]


TABLES = {
    "stages": Table("lifecycle.md", NEXT_STAGES, STAGE_CAUSES, (Stage.TOKENIZE, Stage.QUEUE)),
    "owner": Table("protocol.md", OWNER_STEPS, OWNER_CAUSES, (OwnerState.COMPUTING,)),
    "puller": Table("protocol.md", PULLER_STEPS, PULLER_CAUSES, (PullerState.RESERVED,)),
}


def draw(table: Table) -> str:
    """Markdown: a Mermaid diagram, and a row for each step. Raises `ValueError` if causes and steps differ."""
    steps = [(state, after) for state in table.steps for after in type(state) if after in table.steps[state]]
    unmatched = set(steps) ^ set(table.causes)
    if unmatched:
        raise ValueError(f"these steps need an explanation or do not exist: {sorted(map(str, unmatched))}")
    diagram = [f"    [*] --> {start.name}" for start in table.starts]
    diagram += [f"    {state.name} --> {after.name}" for state, after in steps]
    diagram += [f"    {state.name} --> [*]" for state, following in table.steps.items() if not following]
    rows = [f"| {state.name} | {after.name} | {table.causes[state, after]} |" for state, after in steps]
    return "\n".join(
        ["```mermaid", "stateDiagram-v2", *diagram, "```", "", "| from | to | when |", "|---|---|---|", *rows]
    )


def draw_metrics() -> str:
    rows = [
        f"| `{metric.value}` | {TYPES[about.kind]} | {_listed(about.labels)} | {about.text} |"
        for metric, about in METRICS.items()
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows])


def draw_aliases() -> str:
    rows = []
    for name, alias in ALIASES.items():
        selected = [
            f"{label} = {' or '.join(value or 'empty' for value in only)}" for label, only in alias.only.items()
        ]
        where = f", {', '.join(selected)}" if selected else ""
        labels = ("model_name", *alias.labels)
        rows.append(f"| `{name}` | {_listed(labels)} | `{alias.source.value}`{where} |")
    return "\n".join(["| name | labels | the same as |", "|---|---|---|", *rows])


def draw_names(owner: type, head: str) -> str:
    """The constants of a class with the comment behind or above each. Raises `ValueError` for one without a comment."""
    rows, above = [], ""
    for line in inspect.getsource(owner).splitlines():
        if constant := CONSTANT.fullmatch(line):
            meaning = constant[2] or above
            if not meaning:
                raise ValueError(f"{constant[1]} has no comment")
            rows.append(f"| `{constant[1]}` | {meaning} |")
        above = line.strip().removeprefix("# ") if line.startswith("    # ") else ""
    return "\n".join([f"| {head} | meaning |", "|---|---|", *rows])


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


# Name of a marker -> its document, and what stands between the markers.
DRAWN: dict[str, tuple[str, Callable[[], str]]] = {
    **{name: (table.document, partial(draw, table)) for name, table in TABLES.items()},
    "metrics": ("metrics.md", draw_metrics),
    "aliases": ("metrics.md", draw_aliases),
    "spans": ("traces.md", partial(draw_names, SpanName, "span")),
    "attributes": ("traces.md", partial(draw_names, Attribute, "attribute")),
}


def render(text: str, document: str) -> str:
    """`text` with new tables between its markers. Raises `ValueError` if the document lacks the marker of a table."""
    for name, (place, make) in DRAWN.items():
        if place != document:
            continue
        between = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not between.search(text):
            raise ValueError(f"{document} has no marker for the table {name}")
        drawn = make()
        text = between.sub(lambda match, drawn=drawn: f"{match[1]}{drawn}\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    for document in sorted({document for document, _ in DRAWN.values()}):
        path = DOCS / document
        path.write_text(render(path.read_text(encoding="utf-8"), document), encoding="utf-8")


if __name__ == "__main__":
    main()
