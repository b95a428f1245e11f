"""Speed of the hand-off between two processes, and what a request feels of it: `make bench-transfer`.

Each repeat reads cold blocks by process_vm_readv and hands as many off through plan, machines, agents and transport.
process_vm_readv gets shuffled blocks. Hand-offs have blocks as pools hand them out, many of them neighbours that move
as one, and shuffled blocks.

In serving, the owner digests a block at the end of the step that filled the block. "verify on" therefore has all
digests made before the hand-off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.transfer.side import Spec, packed, unpacked
from core.config import EngineConfig, TransferConfig
from core.kv_layout import KVLayout
from tests.support.child_processes import ChildProcess

POOL_BYTES = 512 << 20
SHARE_IN_USE = 0.9  # of a pool; the rest keeps the order of its blocks from repeating
LAYOUTS = {
    "360 KB": KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64),
    "2 MiB": KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128),
}
TRANSPORTS = ("nixl", "ucxx")
LANES = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp,self"}}
LEAST_RATIO = {"verify off": 0.95, "verify on": 0.6}  # to process_vm_readv
READV, BLOCKS_PER_READV = "process_vm_readv", 16
MOST_EXPOSED_PERCENT, EXPOSED_FROM_TOKENS = 5.0, 1024  # of the prefill
PROMPTS = (256, 1024, 4096)
MODEL = "smollm2-135m"  # whose prefill hides the transfer
PARTS = ("bandwidth", "hidden")
OWNER_CORE, PULLER_CORE = 0, 1  # each side on a core of its own where there are two


@dataclass(frozen=True, slots=True)
class Pair:
    owner: ChildProcess
    puller: ChildProcess
    layout: KVLayout  # of the owner

    def move(self, num_blocks: int, digests_made: bool = False, shuffled: bool = False) -> float:
        """Seconds of one hand-off of blocks that have been offered."""
        blocks = {"transfer_id": secrets.randbits(128), "num_blocks": num_blocks, "shuffled": shuffled}
        self.owner.call("offer", digests_made=digests_made, **blocks)
        self.owner.begin("offer_ended")
        total_s: float = self.puller.call("pull", **blocks)[0]
        self.owner.answer()
        return total_s

    def prefill(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of computing a prompt, and seconds from the end of it until its last block was pulled."""
        transfer_id, num_blocks = secrets.randbits(128), self.layout.num_blocks_for(num_tokens)
        self.owner.begin("prefill", transfer_id=transfer_id, num_tokens=num_tokens)
        pulled_at = self.puller.call("pull", transfer_id=transfer_id, num_blocks=num_blocks, shuffled=False)[1]
        seconds, computed_at = self.owner.answer()
        return seconds, pulled_at - computed_at


@contextlib.contextmanager
def start_pair(owner: Spec, puller: Spec, environment: Mapping[str, str]) -> Iterator[Pair]:
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:

        def started(name: str, spec: Spec, core: int) -> ChildProcess:
            command = [sys.executable, "-m", "benchmarks.transfer.side", packed(spec)]
            side = ChildProcess(name, command, environment, core=cores[core % len(cores)])
            stack.callback(side.stop)
            return side

        first = started("the owner", owner, OWNER_CORE)
        address = first.call("address")
        layout = unpacked(address).layout
        second = started("the puller", replace(puller, layout=layout), PULLER_CORE)
        second.call("meet", address=address)
        first.call("meet", address=second.call("address"))
        yield Pair(first, second, layout)


def bandwidth(report: Report, path: tuple[str, str, str], size: str, repeats: int) -> float:
    """Lines for one path, (transport, lane, digests), and one block size. Returns bytes/s with pools' own order."""
    transport, lane, digests = path
    layout, verify, shared = LAYOUTS[size], digests == "verify on", lane == "shared memory"
    count = int(POOL_BYTES // layout.block_bytes * SHARE_IN_USE)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    config = TransferConfig(transport=transport, verify_digests=verify)
    side = Spec(config, layout, POOL_BYTES // layout.block_bytes)
    with start_pair(side, side, LANES[lane]) as pair:
        pair.move(count)  # connects
        source = {"pid": pair.owner.pid, "num_blocks": count, "per_call": BLOCKS_PER_READV}
        for _ in range(repeats):
            seconds[READV].append(pair.puller.call("read", **source))
            seconds["ordered"].append(pair.move(count, verify))
            seconds["shuffled"].append(pair.move(count, verify, shuffled=True))
            seconds["one"].append(pair.move(1, verify))
    per_s = {name: count * layout.block_bytes / statistics.median(values) for name, values in seconds.items()}

    def line(measure: str, name: str, least_ratio: float | None = None) -> Line:
        return Line(measure, per_s[name] / 1e9, "GB/s", READV, per_s[READV] / 1e9, least_ratio=least_ratio)

    least, what = LEAST_RATIO[digests] if shared else None, f"{transport}, {lane}, {digests}"
    report.add(line(f"{what}: {size} blocks", "ordered", least))
    report.add(line(f"{what}: {size} blocks, shuffled", "shuffled", least))
    report.add(Line(f"{what}: one {size} block", statistics.median(seconds["one"]) * 1e3, "ms"))
    return per_s["ordered"]


def bandwidths(report: Report, repeats: int, few: int) -> None:
    unverified: dict[str, float] = {}
    for transport, lane, size, digests in itertools.product(TRANSPORTS, LANES, LAYOUTS, LEAST_RATIO):
        count = repeats if lane == "shared memory" else few
        found = 0.0
        with report.section(f"{transport}, {lane}, {digests}: {size} blocks"):
            found = bandwidth(report, (transport, lane, digests), size, count)
        if found and lane == "shared memory" and digests == "verify off":
            unverified[f"{transport}, {lane}, {digests}: {size} blocks"] = found / 1e9
    theirs = perftest_gb_per_s()
    if theirs is None:
        report.say("ucx_perftest was not found; the extra `ucxx` brings it")
    for what, ours in unverified.items() if theirs is not None else ():
        report.add(Line(f"{what}, beside ucx_perftest", ours, "GB/s", "cold ucx_perftest", theirs, least_ratio=1.0))


def perftest_gb_per_s() -> float | None:
    """Cold ucx_perftest: messages of 64 MB, larger than the caches. The better one of its tag and get tests."""
    package = importlib.util.find_spec("libucx")
    root = Path(next(iter(package.submodule_search_locations or []))) if package else Path()
    program = root / "bin" / "ucx_perftest"
    if not program.exists():
        return None
    environment = os.environ | {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    there, here = [["taskset", "-c", str(core), str(program)] for core in (OWNER_CORE, PULLER_CORE)]
    best = 0.0
    for number, test in enumerate(("tag_bw", "ucp_get")):
        port = str(23_000 + number + os.getpid() % 5000)
        command = [*here, "127.0.0.1", "-t", test, "-s", "67108864", "-n", "30", "-w", "3", "-p", port]
        quiet = subprocess.DEVNULL
        server = subprocess.Popen([*there, "-p", port], env=environment, stdout=quiet, stderr=quiet)
        try:
            for _ in range(20):  # until the server listens
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
                if done.returncode == 0:
                    break
                time.sleep(0.1)
            if final := re.search(r"Final:\s+(.*)", done.stdout):
                best = max(best, float(final.group(1).split()[-3]) * 1_048_576 / 1e9)
        finally:
            server.kill()
            server.wait()
    return best or None


def hidden(report: Report, repeats: int) -> None:
    """The time from the end of a real prefill until its last block has been pulled."""
    layout, longest = LAYOUTS["360 KB"], max(PROMPTS)
    engine = EngineConfig(model=MODEL, num_threads=1, kv_memory_mb=768)
    num_blocks = longest // engine.block_size * 5 // 4 + 16  # others hold some
    puller = Spec(TransferConfig(), layout, num_blocks)
    with start_pair(replace(puller, engine=engine), puller, {}) as pair:
        pair.prefill(64)  # connects, and warms the model
        for num_tokens in PROMPTS:
            found = [pair.prefill(num_tokens) for _ in range(repeats)]
            seconds, exposed = (statistics.median(values) for values in zip(*found, strict=True))
            what = f"not hidden behind a prefill of {num_tokens:,} tokens"
            report.add(Line(f"{what}, of {seconds * 1e3:,.0f} ms", exposed * 1e3, "ms"))
            most = MOST_EXPOSED_PERCENT if num_tokens >= EXPOSED_FROM_TOKENS else None
            report.add(Line(what, 100 * exposed / seconds, "% of the prefill", most=most))


def main() -> None:
    arguments = parser_of(__doc__, PARTS, repeats=31).parse_args()
    repeats, few = arguments.repeats, max(1, arguments.repeats // 6)
    report = Report("transfer")
    report.say(f"medians of {repeats} interleaved repeats over shared memory and of {few} elsewhere, "
               f"pools of {POOL_BYTES >> 20} MB")  # fmt: skip

    parts: dict[str, Callable[[], None]] = {
        "bandwidth": lambda: bandwidths(report, repeats, few),
        "hidden": lambda: hidden(report, min(few, 3)),
    }
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
