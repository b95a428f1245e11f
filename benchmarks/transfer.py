"""How fast KV moves from one process to another, and what of it a request feels: `make bench-transfer`.

Everything is measured side by side, in one run: each repeat copies as many cold blocks by memcpy, reads them by
process_vm_readv, and hands them off through plan, machines, agents and transport. Medians are printed, and written to
build/bench/transfer.json, one object for each line. A goal that is missed is printed as missed.

Blocks are handed off twice: as two pools hand them out of which others hold a tenth, so that many are neighbours on
both sides and move as one; and shuffled, so that hardly any do. memcpy and process_vm_readv get theirs shuffled.
Between unequal pools, where the puller keeps half of the heads, a block of the owner's is 64 runs.

With verification on there are two lines. In serving the owner digests a block at the end of the step that filled it, so
all digests but those of a prompt's last chunk are there when they are asked for: the goal is for that line. The other
one has the owner digest every block during the hand-off.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Line, Report, load
from benchmarks.transfer_peer import Pair, start_pair
from benchmarks.transfer_side import Cost, Spec
from core.config import EngineConfig, TransferConfig
from core.errors import TandemError
from core.kv_layout import KVLayout

POOL_BYTES = 536_870_912  # a hand-off's first read begins after two milliseconds; this is about the speed after them
SHARE_IN_USE = 0.9  # of a pool; the rest keeps the order of its blocks from repeating
LAYOUTS = {
    "360 KB": KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, block_size=16, head_dim=64),
    "2 MiB": KVLayout("m", "bfloat16", num_layers=32, num_kv_heads=8, block_size=16, head_dim=128),
}
LANES = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp,self"}}
DIGESTS = {  # name of a line: (whether digests are verified, what of process_vm_readv is asked for)
    "verify off": (False, 0.95),
    "verify on": (True, 0.6),
    "verify on, digests made meanwhile": (True, None),
}
MAX_EXPOSED_SHARE = 0.05  # of the prefill time, for prompts of at least 1,024 tokens
MAX_IDLE_CORES = 0.02
MAX_STALL_S = 0.005
STALL_BYTES = 1_000_000_000
STALL_REPEATS = 7
IDLE_REPEATS = 7
PROMPTS = (256, 1024, 4096)
CHUNK_TOKENS = 512
PARTS = ("bandwidth", "unequal", "hidden", "missing", "idle")
OWNER_CORE, PULLER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What one figure of the bandwidth is about."""

    transport: str
    lane: str
    size: str  # of the blocks
    digests: str  # a key of DIGESTS

    def __str__(self) -> str:
        return f"{self.transport}, {self.lane}, {self.size}, {self.digests}"


def pinned(
    config: TransferConfig, layout: KVLayout, environment: dict[str, str], pool_bytes: int = POOL_BYTES
) -> tuple[Spec, Spec]:
    cores = sorted(os.sched_getaffinity(0))
    num_blocks = pool_bytes // layout.block_bytes
    owner, puller = [
        Spec(config, layout, num_blocks, cores[core % len(cores)], environment) for core in (OWNER_CORE, PULLER_CORE)
    ]
    return owner, puller


def bandwidth(report: Report, path: Measured, pool_bytes: int, repeats: int) -> float:
    """Lines for one path; returns its bytes per second."""
    verify, least = DIGESTS[path.digests]
    config, layout = TransferConfig(transport=path.transport, verify_digests=verify), LAYOUTS[path.size]
    made_before = path.digests == "verify on"
    judged = least is not None and path.lane == "shared memory"
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    with start_pair(*pinned(config, layout, LANES[path.lane], pool_bytes)) as pair:
        count = int(pool_bytes // layout.block_bytes * SHARE_IN_USE)
        pair.move(count)  # connects
        for _ in range(repeats):
            seconds["memcpy"].append(pair.puller.call("copy_memory", count))
            of_owner = (pair.owner_pid, pair.owner_address, count)
            seconds["process_vm_readv"].append(pair.puller.call("read_process", *of_owner))
            moved = pair.move(count, made_before)
            seconds["path"].append(moved.total_s)
            seconds["shuffled"].append(pair.move(count, made_before, shuffled=True).total_s)
            seconds["reading"].append(moved.read_s)
            seconds["one"].append(pair.move(1, made_before).total_s)
            if not verify:
                seconds["bare"].append(pair.puller.call("read_bare", pair.owner_address, count))
                if judged:
                    seconds["one by one"].append(pair.puller.call("read_process", *of_owner, 1))
            if made_before:
                seconds["bound"].append(pair.puller.call("read_and_hash", *of_owner))
                seconds["hash"].append(pair.puller.call("hash_memory", count))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    per_s = {name: count * layout.block_bytes / value for name, value in middle.items()}
    share = per_s["path"] / per_s["process_vm_readv"]
    goal, holds = (f"at least {least} of process_vm_readv", share >= least) if judged else ("", None)
    report.add(Line(str(path), goal, per_s["path"] / 1e9, "GB/s", "process_vm_readv", share, holds))
    share = per_s["shuffled"] / per_s["process_vm_readv"]
    holds = share >= least if judged else None
    report.add(Line(f"{path}: shuffled", goal, per_s["shuffled"] / 1e9, "GB/s", "process_vm_readv", share, holds))
    report.add(Line(f"{path}: from the first read on", "", per_s["reading"] / 1e9, "GB/s", "process_vm_readv",
                    per_s["reading"] / per_s["process_vm_readv"]))  # fmt: skip
    report.add(Line(f"{path}: share of memcpy", "", per_s["path"] / 1e9, "GB/s", "memcpy",
                    per_s["path"] / per_s["memcpy"]))  # fmt: skip
    report.add(Line(f"{path}: each block", "", middle["path"] / count * 1e6, "us"))
    report.add(Line(f"{path}: a hand-off of one block", "", middle["one"] * 1e3, "ms"))
    if not verify:
        report.add(Line(f"{path}: the transport's reads alone", "", per_s["bare"] / 1e9, "GB/s", "process_vm_readv",
                        per_s["bare"] / per_s["process_vm_readv"]))  # fmt: skip
    if "one by one" in per_s:
        report.add(Line(f"{path}: process_vm_readv, a call for each block", "", per_s["one by one"] / 1e9, "GB/s",
                        "process_vm_readv", per_s["one by one"] / per_s["process_vm_readv"]))  # fmt: skip
    if made_before:
        report.add(Line(f"{path}: one core that reads and hashes, no more", "", per_s["bound"] / 1e9, "GB/s",
                        "process_vm_readv", per_s["bound"] / per_s["process_vm_readv"]))  # fmt: skip
        report.add(Line(f"{path}: xxh3 of cold blocks", "", per_s["hash"] / 1e9, "GB/s"))
        report.add(Line(f"{path}: the digest of a block, after its step", "", middle["hash"] / count * 1e6, "us"))
    return per_s["path"]


def unequal(report: Report, transport: str, repeats: int) -> None:
    """The owner's blocks have the heads of two pullers; what moves are one puller's."""
    layout = LAYOUTS["2 MiB"]
    half = replace(layout, num_kv_heads=layout.num_kv_heads // 2)
    count = int(POOL_BYTES // layout.block_bytes * SHARE_IN_USE)
    for digests, verify in (("verify off", False), ("verify on", True)):
        config = TransferConfig(transport=transport, verify_digests=verify)
        owner, puller = pinned(config, layout, {})
        with start_pair(owner, replace(puller, layout=half)) as pair:
            pair.move(count)  # connects
            plain, path = [], []
            for _ in range(repeats):
                plain.append(pair.puller.call("read_process", pair.owner_pid, pair.owner_address, count))
                path.append(pair.move(count).total_s)
        per_s, peer = [count * half.block_bytes / statistics.median(seconds) for seconds in (path, plain)]
        what = f"{transport}, shared memory, half the heads of 2 MiB, {digests}"
        report.add(Line(what, "", per_s / 1e9, "GB/s", "process_vm_readv of whole blocks", per_s / peer))


def perftest_bytes_per_s() -> float | None:
    """Cold ucx_perftest: messages of 64 MB, larger than the caches. The better of its tag and get tests."""
    package = importlib.util.find_spec("libucx")
    root = Path(next(iter(package.submodule_search_locations or []))) if package else Path()
    program = root / "bin" / "ucx_perftest"
    if not program.exists():
        return None
    environment = os.environ | {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    best = 0.0
    for number, test in enumerate(("tag_bw", "ucp_get")):
        port = str(23_000 + number + os.getpid() % 5000)
        options = ["-t", test, "-s", "67108864", "-n", "30", "-w", "3", "-p", port]
        there, here = [["taskset", "-c", str(core), str(program)] for core in (OWNER_CORE, PULLER_CORE)]
        quiet = subprocess.DEVNULL
        server = subprocess.Popen([*there, "-p", port], env=environment, stdout=quiet, stderr=quiet)
        try:
            for _ in range(20):  # until the server listens
                command = [*here, "127.0.0.1", *options]
                said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
                if said.returncode == 0:
                    break
                time.sleep(0.1)
            final = re.search(r"Final:\s+(.*)", said.stdout)
            if final:
                best = max(best, float(final.group(1).split()[-3]) * 1_048_576)
        finally:
            server.kill()
            server.wait()
    return best or None


def compare_with_perftest(report: Report, paths: dict[str, float]) -> None:
    theirs = perftest_bytes_per_s()
    if theirs is None:
        report.say("ucx_perftest was not found; it comes with the extra `ucxx`")
        return
    report.add(Line("ucx_perftest, 64 MB messages", "", theirs / 1e9, "GB/s"))
    for what, ours in paths.items():
        report.add(Line(f"{what}, verify off, against ucx_perftest", "more than cold ucx_perftest", ours / 1e9, "GB/s",
                        "ucx_perftest", ours / theirs, ours > theirs))  # fmt: skip


def hidden(report: Report, model: str, prompts: list[int]) -> None:
    """What a request feels of its transfer, when the prompt is really computed."""
    config = TransferConfig()
    engine = EngineConfig(model=model, num_threads=1, kv_memory_mb=256 if max(prompts) <= 1024 else 768)
    owner, puller = pinned(config, LAYOUTS["360 KB"], {})
    blocks = max(prompts) // engine.block_size * 5 // 4 + 16  # others hold some
    owner = Spec(config, owner.layout, blocks, owner.core, {}, engine)
    puller = Spec(config, owner.layout, blocks, puller.core, {})
    with start_pair(owner, puller) as pair:
        pair.prefill(64, CHUNK_TOKENS, False)  # connects, and warms the model
        for num_tokens in prompts:
            seconds, exposed = pair.prefill(num_tokens, CHUNK_TOKENS, False)
            late_seconds, late_exposed = pair.prefill(num_tokens, CHUNK_TOKENS, True)
            share, late_share = exposed / seconds, late_exposed / late_seconds
            goal = f"at most {MAX_EXPOSED_SHARE:.0%} of the prefill" if num_tokens >= 1024 else ""
            what = f"{num_tokens} tokens, prefill {seconds * 1e3:.0f} ms, not hidden"
            report.add(Line(f"{what}, chunk by chunk", goal, exposed * 1e3, "ms", "prefill", share,
                            share <= MAX_EXPOSED_SHARE if goal else None))  # fmt: skip
            report.add(Line(f"{what}, all at the end", "", late_exposed * 1e3, "ms", "prefill", late_share))


def only_missing(report: Report) -> None:
    layout = LAYOUTS["360 KB"]
    with start_pair(*pinned(TransferConfig(), layout, {})) as pair:
        first, second = pair.move(64), pair.move(80, num_cached=64)
    needed = 16 * layout.block_bytes
    report.add(Line("second request with 64 of its 80 blocks cached", "only its 16 new blocks move",
                    second.num_bytes / 1e6, "MB", "the first request's bytes", second.num_bytes / first.num_bytes,
                    second.num_bytes == needed))  # fmt: skip


def idle_and_stall(report: Report, transport: str) -> None:
    config, layout = TransferConfig(transport=transport), LAYOUTS["360 KB"]
    num_blocks = POOL_BYTES // layout.block_bytes
    spec = Spec(config, layout, num_blocks, None, {})
    with start_pair(spec, spec) as pair:
        pair.move(64)
        idle(report, transport, pair)
        stall(report, transport, pair, int(num_blocks * SHARE_IN_USE))


def idle(report: Report, transport: str, pair: Pair) -> None:
    for name, side in (("owner", pair.owner), ("puller", pair.puller)):
        time.sleep(0.5)
        costs: list[Cost] = [side.call("idle", 1.0) for _ in range(IDLE_REPEATS)]
        cores = [cost.cpu_seconds / cost.seconds for cost in costs]
        what, middle = f"{transport}: the {name}, connected and idle", statistics.median(cores)
        report.add(Line(f"{what}, median of {IDLE_REPEATS} s", f"under {MAX_IDLE_CORES:.0%} of a core",
                        100 * middle, "% of a core", holds=middle < MAX_IDLE_CORES))  # fmt: skip
        report.add(Line(f"{what}, worst of {IDLE_REPEATS} s", "", 100 * max(cores), "% of a core"))


def stall(report: Report, transport: str, pair: Pair, num_blocks: int) -> None:
    """Each repeat moves so many blocks again and again, until it was 1 GB."""
    stalls, plain = [], []
    times = -(-STALL_BYTES // (num_blocks * pair.owner_address.layout.block_bytes))
    for _ in range(STALL_REPEATS):
        ids = [secrets.randbits(128) for _ in range(times)]
        pair.owner.start("offer_often", pair.puller_address, ids, num_blocks)
        stalls.append(pair.puller.call("pull_often", pair.owner_address, ids, num_blocks).longest_stall_s)
        pair.owner.end()
        cost: Cost = pair.puller.call("read_often", pair.owner_pid, pair.owner_address, times, num_blocks)
        plain.append(cost.longest_stall_s)
    what, peer = f"{transport}: longest stall of the event loop while 1 GB moves", "process_vm_readv on a thread"
    middle = statistics.median(stalls)
    report.add(Line(f"{what}, median of {STALL_REPEATS}", "under 5 ms", middle * 1e3, "ms", peer,
                    middle / statistics.median(plain), middle < MAX_STALL_S))  # fmt: skip
    report.add(Line(f"{what}, worst of {STALL_REPEATS}", "", max(stalls) * 1e3, "ms", peer, max(stalls) / max(plain)))


def paths(arguments: argparse.Namespace) -> Iterator[Measured]:
    for transport in arguments.transports:
        for lane in arguments.lanes:
            for size in LAYOUTS:
                for digests in DIGESTS:
                    yield Measured(transport, lane, size, digests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["nixl", "ucxx"], choices=["nixl", "ucxx"])
    parser.add_argument("--lanes", nargs="+", default=list(LANES), choices=list(LANES))
    parser.add_argument("--pool-mb", type=int, default=POOL_BYTES >> 20, help="a hand-off moves 0.9 of a pool")
    parser.add_argument("--repeats", type=int, default=31, help="over shared memory (default 31); else a sixth of it")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), help="in tokens")
    parser.add_argument("--model", default="smollm2-135m", help="whose prefill hides the transfer")
    arguments = parser.parse_args()
    few = max(1, arguments.repeats // 6)
    report = Report("transfer")
    report.say(f"medians of {arguments.repeats} interleaved repeats over shared memory and of {few} elsewhere, "
               f"pools of {arguments.pool_mb} MB; {load()}")  # fmt: skip
    shared: dict[str, float] = {}
    for path in paths(arguments) if "bandwidth" in arguments.parts else ():
        repeats = arguments.repeats if path.lane == "shared memory" else few
        try:
            per_s = bandwidth(report, path, arguments.pool_mb << 20, repeats)
        except (RuntimeError, TandemError) as error:
            report.console.print(f"{path}: {error}", style="red", markup=False)
            continue
        if path.lane == "shared memory" and path.digests == "verify off":
            shared[f"{path.transport}, {path.lane}, {path.size}"] = per_s
    if "bandwidth" in arguments.parts:
        compare_with_perftest(report, shared)
    for transport in arguments.transports if "unequal" in arguments.parts else ():
        unequal(report, transport, few)
    if "hidden" in arguments.parts:
        hidden(report, arguments.model, arguments.prompts)
    if "missing" in arguments.parts:
        only_missing(report)
    for transport in arguments.transports if "idle" in arguments.parts else ():
        idle_and_stall(report, transport)
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
