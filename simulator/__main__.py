"""`python -m simulator --seed 17 --verbose` replays one seed. `python -m simulator --seeds 0..199` runs many."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from simulator.search.simulation import run_seed


def _seed_range(text: str) -> range:
    first, separator, last = text.partition("..")
    if not separator:
        raise argparse.ArgumentTypeError(f"a range looks like 0..199, not {text!r}")
    return range(int(first), int(last) + 1)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run one seed")
    which.add_argument("--seeds", type=_seed_range, help="run a range of seeds, first..last, both included")
    parser.add_argument("--verbose", action="store_true", help="print every event")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--harsh", dest="kind", action="store_const", const="harsh", default="plain",
        help="run the seeds with more requests and many more faults",
    )  # fmt: skip
    kind.add_argument(
        "--vllm", dest="kind", action="store_const", const="vllm", help="run them with vLLM inside the workers"
    )
    kind.add_argument(
        "--disk", dest="kind", action="store_const", const="disk", help="run them with a disk below each pool"
    )
    options = parser.parse_args(arguments)
    seeds = options.seeds if options.seed is None else [options.seed]
    totals: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        try:
            totals += run_seed(seed, print if options.verbose else None, kind=options.kind).counts
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed} FAILED: {type(error).__name__}: {error}", file=sys.stderr)
            if options.seed is not None:
                traceback.print_exc()
    for name, count in sorted(totals.items()):
        print(f"{count:9d}  {name}")
    if failed:
        print(f"{len(failed)} of {len(seeds)} seeds failed. Replay with", file=sys.stderr)
        flag = "" if options.kind == "plain" else f"--{options.kind} "
        for seed in failed:
            print(f"python -m simulator {flag}--seed {seed} --verbose", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
