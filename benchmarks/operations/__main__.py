"""What clients feel of changes to a fleet: `make bench-operations`.

    roll, change        an operator changes the fleet (benchmarks/operations/changes.py; 2 minutes)
    gap, drain, router  requests move, workers and routers die (benchmarks/operations/moves.py; 10 minutes)
    disk                a killed worker finds its KV on disk (benchmarks/operations/prefixes.py; 2 minutes)
    prefix, source      a worker reads a history from a peer (there; 4 minutes)

Within a part the load, the fleet and the cores are the same, and only the named event differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from benchmarks.operations import changes, moves, prefixes
from benchmarks.report import Report, parser_of, run_parts

PARTS = moves.PARTS | {"disk": prefixes.disk, "prefix": prefixes.prefix, "source": prefixes.source}


def main() -> None:
    arguments = parser_of(__doc__, (*changes.PARTS, *PARTS), repeats=3).parse_args()
    report, repeats = Report("operations"), arguments.repeats
    parts: dict[str, Callable[[], None]] = {part: partial(changes.run, part, report, repeats) for part in changes.PARTS}
    parts |= {name: partial(run_moves, part, report, repeats) for name, part in PARTS.items()}
    run_parts(report, parts, arguments.parts)


def run_moves(part: moves.Part, report: Report, repeats: int) -> None:
    asyncio.run(part(report, repeats))


if __name__ == "__main__":
    main()
