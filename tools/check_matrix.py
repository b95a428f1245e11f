"""Runs `tandem check` against whole stacks on this machine: `make check-matrix`, 10 minutes for each at most.

    float32, bfloat16   Tandem, a prefill and three decode workers; reference: an undivided fleet
    vllm-inside         the same with vLLM in the workers; reference: `vllm serve`
    vllm-pair           two `vllm serve` with NIXL behind the proxy of vLLM's example; reference: its decode engine
    vllm-flips          the same with a fault: one bit of each prompt's KV is flipped after the read

While streams run, a decode worker is drained and then another one killed. vLLM's pair has one decode engine, which
starts again each time. The last line of a stack is its row in docs/check.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cli.commands.check import show
from cli.diagnosis.vllm_environment import default_model_dir
from cli.screens.terminal import Terminal
from conformance.check import CheckPlan, check
from conformance.findings import Outcome
from conformance.http_exchange import Endpoint
from conformance.stack import StackError
from tests.support.child_processes import tandem
from tests.support.ports import free_port
from tests.support.vllm_proxy import proxy
from tests.support.vllm_server import MODEL, VllmServer, started

LIMIT_S = 120.0  # of an answer, a command, and of the time until the stack serves again
DRAIN_S = 60  # of vLLM, after SIGTERM
POLL_S = 0.2
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
NIXL: dict[str, object] = {
    "kv_connector": "NixlConnector", "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 1},  # each takes a core in a loop
}  # fmt: skip
FLIPPING = "tests.support.flipping_connector:FlippingNixlConnector"
# Of a `tandem serve`, the oldest. A command that imports more would come when the streams have ended.
KILL_DECODE_WORKER = """
import contextlib, psutil, sys
workers = []
for process in psutil.Process(int(sys.argv[1])).children(recursive=True):
    with contextlib.suppress(psutil.Error):  # it has ended
        if "".join(process.cmdline()).startswith("ray::DecodeWorker"):
            workers.append((process.create_time(), process.pid, process))
min(workers)[2].kill()
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """`stack`: its description in the row."""

    stack: str
    plan: CheckPlan


def endpoint(url: str, path: str = "") -> Endpoint:
    return Endpoint.parse(url + path)


# ---- Tandem


@contextlib.contextmanager
def fleet_with_faults(*flags: str) -> Iterator[CheckPlan]:
    port, http = free_port(), free_port()
    flags = ("--http", str(http), "--prefill", "1", "--decode", "3", "--local-prefill", "never", *flags)
    with tandem(port, *flags) as process_id:
        url, python = f"http://127.0.0.1:{http}", shlex.quote(sys.executable)
        yield CheckPlan(
            endpoint(url), metrics=(endpoint(url, "/metrics"),), deadline_header="x-tandem-timeout-ms",
            drain=f"{python} -m cli.main scale --decode 2 --router 127.0.0.1:{port}",
            kill=f"{python} -c {shlex.quote(KILL_DECODE_WORKER)} {process_id}",
        )  # fmt: skip


@contextlib.asynccontextmanager
async def own_engine(dtype: str) -> AsyncIterator[Checked]:
    flags, http = ("--dtype", dtype, "--threads", "1"), free_port()
    with (
        fleet_with_faults(*flags) as plan,
        tandem(free_port(), "--http", str(http), "--prefill", "0", "--decode", "1", *flags),
    ):
        stack = (
            f"`tandem serve --prefill 1 --decode 3 --local-prefill never --threads 1 --dtype {dtype}`, SmolLM2-135M; "
            "reference `--prefill 0 --decode 1`"
        )
        yield Checked(stack, replace(plan, reference=endpoint(f"http://127.0.0.1:{http}")))


@contextlib.asynccontextmanager
async def vllm_inside(directory: Path) -> AsyncIterator[Checked]:
    model = str(default_model_dir())
    reference = VllmServer(directory / "reference.log", max(os.sched_getaffinity(0)))
    config = directory / "tandem.toml"
    config.write_text(
        f'[engine]\nname = "vllm"\nmodel = "{model}"\ndtype = "float32"\nkv_memory_mb = 512\nmax_context = 2048\n'
        '[vllm]\nargs = ["--enforce-eager", "--block-size", "32"]\nconnector = "tandem"\n'
    )
    with started(reference), fleet_with_faults("--config", str(config)) as plan:
        stack = (
            'the same with vLLM 0.32.0 inside (CPU build; `connector = "tandem"`), float32; reference `vllm serve`, '
            "an engine that knows nothing of Tandem"
        )
        yield Checked(stack, replace(plan, reference=endpoint(reference.url)))


# ---- vLLM alone


@contextlib.asynccontextmanager
async def kept_alive(server: VllmServer) -> AsyncIterator[None]:
    """Starts the server again whenever it has ended, as a supervisor does."""

    async def watch() -> None:
        while True:
            assert server.process is not None
            while server.process.poll() is None:
                await asyncio.sleep(POLL_S)
            server.kill()  # what is left of its group
            server.start()
            with contextlib.suppress(AssertionError):  # it has been killed again
                await asyncio.to_thread(server.wait_until_ready)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@contextlib.asynccontextmanager
async def vllm_pair(directory: Path, flips: bool = False) -> AsyncIterator[Checked]:
    """`flips`: one bit of each prompt's KV is wrong after its hand-off."""
    cores, options = sorted(os.sched_getaffinity(0)), ("--shutdown-timeout", str(DRAIN_S))
    connector = NIXL
    if flips:
        connector = NIXL | {
            "kv_connector": FLIPPING.rpartition(":")[2],
            "kv_connector_module_path": FLIPPING.partition(":")[0],
        }
    prefill, decode = (
        VllmServer(directory / f"{role}.log", core, connector | {"kv_role": role}, options, {"FLIP_WHILE": os.devnull})
        for role, core in (("kv_producer", cores[0]), ("kv_consumer", cores[-1]))
    )
    with started(prefill, decode):
        async with kept_alive(decode), proxy(prefill.url, decode.url) as url:
            yield Checked(
                "the same, one bit of each prompt's KV flipped after the read" if flips else
                "two `vllm serve` 0.32.0 (CPU build), NixlConnector, a proxy as vLLM's example, SmolLM2-135M in "
                "float32; reference: the decode engine",
                CheckPlan(
                    endpoint(url), endpoint(decode.url),
                    (endpoint(prefill.url, "/metrics"), endpoint(decode.url, "/metrics")), MODEL,
                    drain=f"kill -TERM $(cat {decode.pid_file})", kill=f"kill -KILL -$(cat {decode.pid_file})",
                ),
            )  # fmt: skip


STACKS: dict[str, Callable[[Path], contextlib.AbstractAsyncContextManager[Checked]]] = {
    "float32": lambda _: own_engine("float32"),
    "bfloat16": lambda _: own_engine("bfloat16"),
    "vllm-inside": vllm_inside,
    "vllm-pair": vllm_pair,
    "vllm-flips": lambda directory: vllm_pair(directory, flips=True),
}


async def run(name: str, directory: Path, whole_s: float, console: Terminal) -> None:
    start = time.monotonic()
    async with STACKS[name](directory) as checked:
        console.print(f"{name}: serves after {time.monotonic() - start:.0f} s", highlight=False)
        start, findings = time.monotonic(), []
        async for finding in check(replace(checked.plan, whole_s=whole_s, limit_s=LIMIT_S)):
            findings.append(finding)
            show(finding, console)
        seconds = time.monotonic() - start
    by_outcome = {outcome: [one.question for one in findings if one.outcome is outcome] for outcome in Outcome}
    cells = [
        f"{len(by_outcome[outcome])}" + ": " * bool(names) + "; ".join(names)
        for outcome in Outcome
        for names in [[] if outcome is Outcome.HOLDS else by_outcome[outcome]]
    ]
    load = os.getloadavg()[0]
    console.print(
        f"| {checked.stack} | {' | '.join(cells)} | {datetime.date.today()}, {seconds:.0f} s, load {load:.1f} |",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def stop(*_: object) -> None:
    """End the stack, whatever waits for it. Servers have groups of their own, which no signal of a terminal reaches."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # a second one would leave processes behind; each end has a deadline
    raise KeyboardInterrupt


def main() -> None:
    for number in STOPS:
        signal.signal(number, stop)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--whole", type=float, default=450.0, help="longest time of one check, in seconds")
    arguments = parser.parse_args()
    console, failed = Terminal(), False
    for name in arguments.stacks:
        with tempfile.TemporaryDirectory() as directory:
            try:
                asyncio.run(run(name, Path(directory), arguments.whole, console))
            except (AssertionError, RuntimeError, StackError) as error:  # the others are checked
                print(f"{name}: {error}")
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
