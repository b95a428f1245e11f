"""Checks and measures everything that needs a GPU, in one call: `python benchmarks/gpu.py --out DIR`.

Each section is a process of its own with a deadline. The sections with the most important decisions come first
(`--plan`). DIR/gpu.json is written anew when a section ends, so a run that is cut short keeps the sections before. The
same call goes on from there: it measures only what DIR/gpu.json does not have of this code on this device. DIR/gpu.md
has the tables for docs/gpu.md, DIR/gpu.log the messages of the libraries.

The run needs Python 3.11, torch, triton and numpy. The sections of fleets need Tandem's other packages, too
(tools/gpu_archive.py); nixl is used if it is installed. `--rehearse` runs the same sections on a CPU with tiny
shapes: a test of this program, not a measurement.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The first entry is the folder of this file, where the folder `engine` hides the package of that name.
sys.path[0] = str(ROOT)

from benchmarks.gpu_sections.harness import (  # noqa: E402 (needs the path above)
    SECTIONS,
    Run,
    plan_text,
    run_sections,
    states_of,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="for all sections to do (default: the sum in the plan)")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for gpu.json and gpu.log")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--plan", action="store_true", help="print the sections and what DIR has of them")
    parser.add_argument("--again", action="store_true", help="measure also what DIR/gpu.json has")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--commit", default="", help="the commit of the code, where there is no git")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the section that this process is
    parser.add_argument("--allowed-s", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        from benchmarks.gpu_sections.section import Section, run_section

        run_section(Section(options.child, options.out, options.allowed_s, options.rehearse))
    run = Run(Path(__file__).resolve(), options.out, options.seconds, options.rehearse, options.commit)
    if options.plan:
        print(plan_text(SECTIONS, states_of(run)))
        return 0
    return run_sections(run, options.sections, options.again)


if __name__ == "__main__":
    sys.exit(main())
