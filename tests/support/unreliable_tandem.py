"""The `tandem` command with unreliable transports in its workers:

python -m tests.support.unreliable_tandem LOG SEED RATE serve ...

The arguments are those of `Faults`, then those of `tandem`. A roll that reads another config has reliable transports.
Workers read prefixes wherever they can (tests/support/eager_reads.py).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from cli import compose, main
from core.lifecycle import ServiceRole
from tests.support.unreliable_transport import Faults, build_eager_router, build_worker


def run() -> None:
    log, seed, rate = sys.argv[1:4]
    del sys.argv[1:4]
    faults = Faults(Path(log), int(seed), float(rate))
    compose.build_prefill_worker = functools.partial(build_worker, ServiceRole.PREFILL, faults)
    compose.build_decode_worker = functools.partial(build_worker, ServiceRole.DECODE, faults)
    compose.build_router = build_eager_router
    main.run()


if __name__ == "__main__":
    run()
