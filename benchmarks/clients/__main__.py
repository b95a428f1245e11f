"""Other people's clients against `tandem serve --http` with the real model: `make clients`.

Each client lives in an environment of its own and runs as its users run it. Command, version, result and
output of each run are in build/clients/<name>.json; the table in docs/clients.md is made from them with --write-docs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks import install_peers
from benchmarks.processes import serving
from model_files.catalogue import default_cache_dir

HERE = Path(__file__).parent
OUTPUT_DIR = Path("build/clients")
DOCUMENT = Path("docs/clients.md")
TABLE_START, TABLE_END = "<!-- table: runs -->\n", "<!-- end -->"
MODEL = install_peers.MODEL
HTTP_PORT, GRPC_PORT = 18_411, 18_412
URL = f"http://127.0.0.1:{HTTP_PORT}"
CLIENT_TIMEOUT_S = 300.0
TRACE_REQUESTS = 9  # aiperf gives more to processes of its own, which find no tokenizer in a local directory
TRACE_MS, TRACE_BLOCK = 8_000, 512
MAX_INPUT, MAX_OUTPUT = 1024, 16  # tokens of a request of a trace
Package = tuple[str, str]  # name and version of an environment
PYTHON, NODE = ("openai-python", "3.54.0"), ("openai-node", "6.49.0")
AIPERF, GUIDELLM = ("aiperf", "0.13.0"), ("guidellm", "0.8.1")
NO_ERRORS = "Request Error Rate (%) │ 0.00"  # in the table of aiperf
LAST_CHARS = 20_000  # of an output that is kept


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    package: Package
    command: Callable[[Path], list[str]]  # from a directory for its files
    shows: str
    good: str  # a part of its output if the run was good, with single spaces
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    version: str
    command: str
    shows: str
    seconds: float
    result: str  # "ok", or the reason of the failure
    output: str


def _weights() -> str:
    return str(install_peers.vllm_weights())


def _tool(package: Package, program: str) -> str:
    return str(directory_of(package) / "bin" / program)


def _aiperf(directory: Path, *options: str) -> list[str]:
    return [
        _tool(AIPERF, "aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", _weights(), "--ui", "none", "--artifact-dir", str(directory), *options,
    ]  # fmt: skip


def write_short_trace(source: Path, target: Path) -> None:
    """The first requests of a Mooncake trace for aiperf, cut to what a small model can take.

    Equal hash ids, one for each 512 tokens, mean equal text, so cut prompts share the prefixes of the whole ones.
    """
    with source.open(encoding="utf-8") as lines:
        requests = [json.loads(line) for line in islice(lines, TRACE_REQUESTS)]
    first, last = requests[0]["timestamp"], requests[-1]["timestamp"]
    with target.open("w", encoding="utf-8") as lines:
        for request in requests:
            length = min(request["input_length"], MAX_INPUT)
            cut = {
                "timestamp": round((request["timestamp"] - first) * TRACE_MS / max(1, last - first)),
                "input_length": length,
                "output_length": max(1, min(request["output_length"], MAX_OUTPUT)),
                "hash_ids": request["hash_ids"][: -(-length // TRACE_BLOCK)],
            }
            lines.write(json.dumps(cut) + "\n")


def clients(trace: Path | None) -> list[Client]:
    """Without a trace, its replay is left out."""

    def mooncake(directory: Path) -> list[str]:
        assert trace is not None
        cut = directory / "trace.jsonl"
        write_short_trace(trace, cut)
        options = ("--input-file", str(cut), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule")
        return _aiperf(directory, *options)

    replay = Client("aiperf, Mooncake trace", AIPERF, mooncake, "9 requests at the times of the trace", NO_ERRORS)
    return [
        Client(
            "openai for Python", PYTHON,
            lambda _: [_tool(PYTHON, "python"), str(HERE / "openai_client.py"), URL, MODEL],
            "chat, streaming, completions, responses, tools, errors, retries, cancellation", "cancellation: no request",
        ),
        Client(
            "openai for Node", NODE, lambda _: ["node", str(HERE / "openai_client.mjs"), URL, MODEL],
            "chat, streaming, tools, errors, retries, cancellation", "cancellation: no request",
            {"OPENAI_MODULES": str(directory_of(NODE))},
        ),
        Client(
            "vllm bench serve", ("vllm", install_peers.VLLM_VERSION),
            lambda _: [
                str(install_peers.vllm_dir() / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "bench", "serve",
                "--backend", "openai-chat", "--base-url", URL, "--endpoint", "/v1/chat/completions", "--model", MODEL,
                "--tokenizer", _weights(), "--dataset-name", "random", "--random-input-len", "64",
                "--random-output-len", "16", "--num-prompts", "16", "--request-rate", "4", "--ignore-eos",
            ],
            "16 requests at 4 a second, ignore_eos", "Failed requests: 0",
            {"HF_HUB_OFFLINE": "1"},
        ),
        Client(
            "aiperf", AIPERF,
            lambda directory: _aiperf(directory, "--request-count", "10", "--concurrency", "2",
                                      "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
            "10 requests, 2 at once", NO_ERRORS,
        ),
        *[replay] * (trace is not None),
        Client(
            "guidellm", GUIDELLM,
            lambda _: [
                _tool(GUIDELLM, "guidellm"), "run", "--backend",
                f"kind=openai_http,target={URL},model={MODEL}", "--tokenizer",
                f"kind=huggingface_auto,model={_weights()}", "--profile", "kind=synchronous",
                "--constraint", "kind=max_requests,count=6",
                "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8",
            ],
            "6 requests, one after the other", "Benchmark",
        ),
    ]  # fmt: skip


def run_client(client: Client) -> Outcome:
    directory = OUTPUT_DIR.absolute() / file_name(client.name)
    directory.mkdir(parents=True, exist_ok=True)
    command, start = client.command(directory), time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=directory, env=os.environ | dict(client.environment), timeout=CLIENT_TIMEOUT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
        output, status = done.stdout, f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        kept = error.stdout or b""
        output = kept.decode(errors="replace") if isinstance(kept, bytes) else kept
        status = f"not done after {CLIENT_TIMEOUT_S:g} s"
    result = status or ("ok" if client.good in " ".join(output.split()) else f"the output lacks {client.good!r}")
    return Outcome(
        client.name, client.package[1], shown(command), client.shows, round(time.monotonic() - start, 1), result,
        output[-LAST_CHARS:],
    )  # fmt: skip


def shown(command: list[str]) -> str:
    """The command as a reader can use it: without the directories of this machine."""
    words = [word.replace(str(Path.cwd()), ".").replace(_weights(), "$MODEL_DIR") for word in command]
    words[0] = Path(words[0]).name
    return shlex.join(words).replace("'$MODEL_DIR'", "$MODEL_DIR")


def file_name(name: str) -> str:
    return name.replace(" ", "-").replace(",", "").lower()


def directory_of(package: Package) -> Path:
    return default_cache_dir() / "clients" / "-".join(package)


def install_all(wanted: list[Client]) -> dict[str, str]:
    """Name of a client -> the reason why it cannot run."""
    reasons = {package: install_client(package) for package in dict.fromkeys(client.package for client in wanted)}
    return {client.name: reasons[client.package] for client in wanted if reasons[client.package]}


def install_client(package: Package) -> str:
    """The reason why the client cannot be installed; empty if it is installed."""
    name, version = package
    try:
        if name == "vllm":
            installed = install_peers.is_installed(install_peers.vllm_dir())
            return "" if installed else "not installed: run `make bench-peers`"
        install_peers.install(directory_of(package), partial(STEPS[name], version))
    except install_peers.InstallFailed as reason:
        return str(reason)
    return ""


def _with_pip(project: str, version: str, directory: Path) -> None:
    before = [(f"torch=={install_peers.TORCH_VERSION}",)] * (project == "guidellm")  # else a build for GPUs
    install_peers.make_environment(directory, *before, (f"{project}=={version}",))


def _install_node(version: str, directory: Path) -> None:
    install_peers.npm_install(directory, '{"private": true, "type": "module"}', f"openai@{version}")


STEPS: dict[str, Callable[[str, Path], None]] = {
    "openai-python": partial(_with_pip, "openai"),
    "openai-node": _install_node,
    "aiperf": partial(_with_pip, "aiperf"),
    "guidellm": partial(_with_pip, "guidellm"),
}


def write_outcome(outcome: Outcome) -> None:
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    path = OUTPUT_DIR / f"{file_name(outcome.name)}.json"
    path.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    print(f"{outcome.name} {outcome.version}: {outcome.result} ({outcome.seconds} s)", flush=True)
    if outcome.result != "ok":
        print(outcome.output[-3000:], flush=True)


def table(outcomes: list[Outcome]) -> str:
    rows = ["| client | version | shows | result | seconds |", "|---|---|---|---|---|"]
    rows += [f"| {o.name} | {o.version} | {o.shows} | {o.result} | {o.seconds:g} |" for o in outcomes]
    commands = [f"\n{o.name}:\n\n```sh\n{o.command}\n```" for o in outcomes]
    return "\n".join([*rows, *commands]) + "\n"


def recorded(wanted: list[Client]) -> list[Outcome]:
    """The newest outcome of each client that ever ran here."""
    paths = [OUTPUT_DIR / f"{file_name(client.name)}.json" for client in wanted]
    return [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.is_file()]


def write_docs(outcomes: list[Outcome]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(TABLE_START)
    _, _, after = rest.partition(TABLE_END)
    DOCUMENT.write_text(f"{before}{TABLE_START}\n{table(outcomes)}\n{TABLE_END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="parts of the names of the clients to run")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, whose first requests aiperf replays")
    parser.add_argument("--write-docs", action="store_true", help=f"write the results into {DOCUMENT}")
    arguments = parser.parse_args()
    wanted = [c for c in clients(arguments.trace) if not arguments.only or any(o in c.name for o in arguments.only)]
    missing = install_all(wanted)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    fleet = [
        sys.executable, "-m", "cli.main", "serve", "--model", MODEL, "--port", str(GRPC_PORT), "--http", str(HTTP_PORT)
    ]  # fmt: skip
    outcomes = []
    with serving(fleet):
        for client in wanted:
            if client.name not in missing:
                outcomes.append(run_client(client))
                write_outcome(outcomes[-1])
    if arguments.write_docs:
        write_docs(recorded(clients(arguments.trace)))
    sys.exit(any(outcome.result != "ok" for outcome in outcomes) or not outcomes)


if __name__ == "__main__":
    main()
