"""Speed of the hand-off between two processes, and what a request feels of it: `make bench-transfer`.

Each repeat reads cold blocks by process_vm_readv and hands as many off through plan, machines, agents and transport.
process_vm_readv gets shuffled blocks. Hand-offs have blocks as pools hand them out, many of them neighbours that move
as one, and shuffled blocks.

In serving, the owner digests a block at the end of the step that filled the block. "verify on" therefore has all
digests made before the hand-off. "verify on, digests made meanwhile" has every block digested during the hand-off.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import secrets
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.transfer.pair import Pair, start_pair
from benchmarks.transfer.side import Spec
from core.config import EngineConfig, TransferConfig
from core.kv_layout import KVLayout

SHARE_IN_USE = 0.9  # of a pool; the rest keeps the order of its blocks from repeating
LAYOUTS = {
    "360 KB": KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64),
    "2 MiB": KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128),
}
LANES = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp,self"}}
LEAST_RATIO = {"verify off": 0.95, "verify on": 0.6, "verify on, digests made meanwhile": None}  # to process_vm_readv
READV, BLOCKS_PER_READV = "process_vm_readv", 16
MOST_EXPOSED_PERCENT, EXPOSED_FROM_TOKENS = 5.0, 1024  # of the prefill
MOST_IDLE_PERCENT = 2.0
MOST_STALL_MS = 5.0
STALL_BYTES = 1_000_000_000
STALL_REPEATS = IDLE_REPEATS = 7
PROMPTS = (256, 1024, 4096)
PARTS = ("bandwidth", "unequal", "hidden", "idle")
OWNER_CORE, PULLER_CORE = 0, 1


def specs(config: TransferConfig, layout: KVLayout, pool_bytes: int, lane: str = "shared memory") -> tuple[Spec, Spec]:
    """The owner and the puller, each on a core of its own where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    owner = Spec(config, layout, pool_bytes // layout.block_bytes, cores[OWNER_CORE], LANES[lane])
    return owner, replace(owner, core=cores[PULLER_CORE % len(cores)])


def bandwidth(report: Report, path: tuple[str, str, str], size: str, pool_bytes: int, repeats: int) -> float:
    """Lines for one path, (transport, lane, digests), and one block size. Returns bytes/s with pools' own order."""
    transport, lane, digests = path
    layout, verify = LAYOUTS[size], digests != "verify off"
    shared, made_before = lane == "shared memory", digests == "verify on"
    count = int(pool_bytes // layout.block_bytes * SHARE_IN_USE)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    config = TransferConfig(transport=transport, verify_digests=verify)
    with start_pair(*specs(config, layout, pool_bytes, lane)) as pair:
        pair.move(count)  # connects
        source = (pair.owner_pid, pair.owner_address, count)
        for _ in range(repeats):
            seconds[READV].append(pair.puller.call("read", *source, BLOCKS_PER_READV))
            seconds["ordered"].append(pair.move(count, made_before))
            seconds["shuffled"].append(pair.move(count, made_before, shuffled=True))
            seconds["one"].append(pair.move(1, made_before))
    per_s = {name: count * layout.block_bytes / statistics.median(values) for name, values in seconds.items()}

    def line(measure: str, name: str, least_ratio: float | None = None) -> Line:
        return Line(measure, per_s[name] / 1e9, "GB/s", READV, per_s[READV] / 1e9, least_ratio=least_ratio)

    least, what = LEAST_RATIO[digests] if shared else None, f"{transport}, {lane}, {digests}"
    report.add(line(f"{what}: {size} blocks", "ordered", least))
    report.add(line(f"{what}: {size} blocks, shuffled", "shuffled", least))
    report.add(Line(f"{what}: one {size} block", statistics.median(seconds["one"]) * 1e3, "ms"))
    return per_s["ordered"]


def bandwidths(report: Report, arguments: argparse.Namespace, few: int) -> None:
    unverified: dict[str, float] = {}
    for transport, lane, size, digests in itertools.product(arguments.transports, LANES, LAYOUTS, LEAST_RATIO):
        repeats = arguments.repeats if lane == "shared memory" else few
        found = 0.0
        with report.section(f"{transport}, {lane}, {digests}: {size} blocks"):
            found = bandwidth(report, (transport, lane, digests), size, arguments.pool_mb << 20, repeats)
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


def unequal(report: Report, transport: str, pool_bytes: int, repeats: int) -> None:
    """The puller holds half of the heads of the owner's blocks, so a block is 64 runs."""
    layout = LAYOUTS["2 MiB"]
    half = replace(layout, num_kv_heads=layout.num_kv_heads // 2)
    count = int(pool_bytes // layout.block_bytes * SHARE_IN_USE)
    for digests, verify in (("verify off", False), ("verify on", True)):
        owner, puller = specs(TransferConfig(transport=transport, verify_digests=verify), layout, pool_bytes)
        with start_pair(owner, replace(puller, layout=half)) as pair:
            pair.move(count)  # connects
            seconds = statistics.median(pair.move(count) for _ in range(repeats))
        per_s = count * half.block_bytes / seconds
        report.add(Line(f"{transport}, shared memory, {digests}: half the heads of 2 MiB blocks", per_s / 1e9, "GB/s"))


def hidden(report: Report, model: str, prompts: list[int], repeats: int) -> None:
    """The time from the end of a real prefill until its last block has been pulled."""
    layout = LAYOUTS["360 KB"]
    engine = EngineConfig(model=model, num_threads=1, kv_memory_mb=256 if max(prompts) <= 1024 else 768)
    num_blocks = max(prompts) // engine.block_size * 5 // 4 + 16  # others hold some
    owner, puller = specs(TransferConfig(), layout, num_blocks * layout.block_bytes)
    with start_pair(replace(owner, engine=engine), puller) as pair:
        pair.prefill(64, False)  # connects, and warms the model
        for num_tokens in prompts:
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for late in (False, True) * repeats:
                found[late].append(pair.prefill(num_tokens, late))
            for late, way in ((False, "chunk by chunk"), (True, "all at the end")):
                seconds, exposed = (statistics.median(values) for values in zip(*found[late], strict=True))
                what = f"not hidden behind a prefill of {num_tokens:,} tokens, {way}"
                report.add(Line(f"{what}, of {seconds * 1e3:,.0f} ms", exposed * 1e3, "ms"))
                most = MOST_EXPOSED_PERCENT if num_tokens >= EXPOSED_FROM_TOKENS and not late else None
                report.add(Line(what, 100 * exposed / seconds, "% of the prefill", most=most))


def idle_and_stall(report: Report, transport: str, pool_bytes: int) -> None:
    layout = LAYOUTS["360 KB"]
    owner, puller = specs(TransferConfig(transport=transport), layout, pool_bytes)
    with start_pair(replace(owner, core=None), replace(puller, core=None)) as pair:
        pair.move(64)
        for name, side in (("owner", pair.owner), ("puller", pair.puller)):
            time.sleep(0.5)
            percent = [100 * side.call("idle", 1.0) for _ in range(IDLE_REPEATS)]
            what, unit = f"{transport}: the {name}, connected and idle", "% of a core"
            report.add(Line(f"{what}, median of {IDLE_REPEATS} s", statistics.median(percent), unit,
                            most=MOST_IDLE_PERCENT))  # fmt: skip
            report.add(Line(f"{what}, worst of {IDLE_REPEATS} s", max(percent), unit))
        stall(report, transport, pair, int(owner.num_blocks * SHARE_IN_USE))


def stall(report: Report, transport: str, pair: Pair, num_blocks: int) -> None:
    """Each repeat moves blocks again and again until 1 GB has moved."""
    stalls, plain = [], []
    times = -(-STALL_BYTES // (num_blocks * pair.owner_address.layout.block_bytes))
    for _ in range(STALL_REPEATS):
        ids = [secrets.randbits(128) for _ in range(times)]
        pair.owner.start("offer_often", ids, pair.puller_address, num_blocks)
        stalls.append(1e3 * pair.puller.call("stall_of_pulls", ids, pair.owner_address, num_blocks))
        pair.owner.end()
        source = (pair.owner_pid, pair.owner_address, times, num_blocks, BLOCKS_PER_READV)
        plain.append(1e3 * pair.puller.call("stall_of_reads", *source))
    what, peer = f"{transport}: longest stall of the event loop while 1 GB moves", f"{READV} on a thread"
    report.add(Line(f"{what}, median of {STALL_REPEATS}", statistics.median(stalls), "ms",
                    peer, statistics.median(plain), most=MOST_STALL_MS))  # fmt: skip
    report.add(Line(f"{what}, worst of {STALL_REPEATS}", max(stalls), "ms", peer, max(plain)))


def main() -> None:
    parser = parser_of(__doc__, PARTS, repeats=31)
    parser.add_argument("--transports", nargs="+", default=["nixl", "ucxx"], choices=["nixl", "ucxx"])
    parser.add_argument("--pool-mb", type=int, default=512, help="a hand-off moves 0.9 of a pool")
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="in tokens")
    parser.add_argument("--model", default="smollm2-135m", help="whose prefill hides the transfer")
    arguments = parser.parse_args()
    few, pool_bytes = max(1, arguments.repeats // 6), arguments.pool_mb << 20
    report = Report("transfer")
    report.say(f"medians of {arguments.repeats} interleaved repeats over shared memory and of {few} elsewhere, "
               f"pools of {arguments.pool_mb} MB")  # fmt: skip

    def each_transport(measure: Callable[[str], None]) -> None:
        for transport in arguments.transports:
            with report.section(f"{measure.__name__}, {transport}"):
                measure(transport)

    def unequal_heads(transport: str) -> None:
        unequal(report, transport, pool_bytes, few)

    def idle(transport: str) -> None:
        idle_and_stall(report, transport, pool_bytes)

    parts: dict[str, Callable[[], None]] = {
        "bandwidth": lambda: bandwidths(report, arguments, few),
        "unequal": lambda: each_transport(unequal_heads),
        "hidden": lambda: hidden(report, arguments.model, arguments.prompts, min(few, 3)),
        "idle": lambda: each_transport(idle),
    }
    run_parts(report, parts, arguments.parts)


if __name__ == "__main__":
    main()
