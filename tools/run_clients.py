"""Other people's clients against `tandem serve --http` with the real model: `make clients`.

Each client lives in an environment of its own and runs as its users run it, one after the other at the same fleet. A
row has the seconds of its run, and is a failure where its output lacks the words of a good run. build/clients/<name>
keeps the output.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Line, Report, parser_of
from model_files.catalogue import default_cache_dir
from tests.support.child_processes import tandem
from tools import install_peers
from tools.install_peers import make_environment

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_DIR = Path("build/clients").absolute()
MODEL = install_peers.MODEL
HTTP_PORT, GRPC_PORT = 18_411, 18_412
URL = f"http://127.0.0.1:{HTTP_PORT}"
CLIENT_TIMEOUT_S = 300.0
LAST_CHARS = 2_000  # of an output that is printed


@dataclass(frozen=True, slots=True)
class Client:
    """`command` has {bin}, the programs of its environment, and {model_dir}, {url}, {out}, {root}."""

    shows: str
    command: str
    good: str  # a part of its output if the run was good, with single spaces
    directory: Path  # of its environment
    install: Callable[[Path], object]
    environment: Mapping[str, str] = field(default_factory=dict)


def directory_of(package: str) -> Path:
    return default_cache_dir() / "clients" / package.replace("==", "-")


def from_pip(*packages: str) -> tuple[Path, Callable[[Path], object]]:
    """The last package names the directory; the ones before it are installed first."""
    return directory_of(packages[-1]), lambda directory: make_environment(directory, *((name,) for name in packages))


CPU_TORCH = f"torch=={install_peers.TORCH_VERSION}"  # else guidellm brings a build for GPUs
CLIENTS = {
    "openai for Python": Client(
        "streaming", "{bin}/python {root}/examples/openai_client.py {url}", "tokens of", *from_pip("openai==3.54.0")
    ),
    "openai for Node": Client(
        "streaming", "node {root}/examples/node/openai_client.js {url}", "tokens of", ROOT / "examples/node",
        lambda directory: install_peers.run("installing openai for Node", ["npm", "ci", "--silent"], cwd=directory),
    ),
    "vllm bench serve": Client(
        "16 requests at 4 a second, ignore_eos",
        "{bin}/python -m vllm.entrypoints.cli.main bench serve --backend openai-chat --base-url {url} "
        "--endpoint /v1/chat/completions --model smollm2-135m --tokenizer {model_dir} --dataset-name random "
        "--random-input-len 64 --random-output-len 16 --num-prompts 16 --request-rate 4 --ignore-eos",
        "Failed requests: 0", install_peers.vllm_dir(), install_peers.install_vllm, {"HF_HUB_OFFLINE": "1"},
    ),
    "aiperf": Client(
        "10 requests, 2 at once",
        "{bin}/aiperf profile --model smollm2-135m --url {url} --endpoint-type chat --streaming --tokenizer "
        "{model_dir} --ui none --artifact-dir {out} --request-count 10 --concurrency 2 "
        "--synthetic-input-tokens-mean 64 --output-tokens-mean 16",
        "Request Error Rate (%) │ 0.00", *from_pip("aiperf==0.13.0"),
    ),
    "guidellm": Client(
        "6 requests, one after the other",
        "{bin}/guidellm run --backend kind=openai_http,target={url},model=smollm2-135m --tokenizer "
        "kind=huggingface_auto,model={model_dir} --profile kind=synchronous --constraint kind=max_requests,count=6 "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=8",
        "Benchmark", *from_pip(CPU_TORCH, "guidellm==0.8.1"),
    ),
}  # fmt: skip


def run_client(name: str, client: Client) -> float:
    """Seconds of a good run. Raises `RuntimeError` with the end of the output of another."""
    out = OUTPUT_DIR / name.replace(" ", "-").lower()
    out.mkdir(parents=True, exist_ok=True)
    command = client.command.format(
        bin=client.directory / "bin", model_dir=install_peers.vllm_weights(), url=URL, out=out, root=ROOT
    )
    start = time.monotonic()
    done = subprocess.run(
        shlex.split(command), cwd=out, env=os.environ | dict(client.environment), timeout=CLIENT_TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    seconds = time.monotonic() - start
    (out / "output").write_text(done.stdout, encoding="utf-8")
    if done.returncode or client.good not in " ".join(done.stdout.split()):
        raise RuntimeError(f"status {done.returncode}, {client.good!r} expected: {done.stdout[-LAST_CHARS:]}")
    return seconds


def install(client: Client) -> None:
    """Node's packages lie in the tree, and npm itself knows whether they are whole."""
    if client.directory.is_relative_to(ROOT):
        client.install(client.directory)
    else:
        install_peers.install(client.directory, client.install)


def main() -> None:
    arguments = parser_of(__doc__, tuple(CLIENTS)).parse_args()
    report = Report("clients")
    with tandem(GRPC_PORT, "--model", MODEL, "--http", str(HTTP_PORT)):
        for name in arguments.parts:
            client = CLIENTS[name]
            with report.section(name):
                install(client)
                report.add(Line(f"{name}, {client.directory.name}: {client.shows}", run_client(name, client), "s"))
    report.write()


if __name__ == "__main__":
    main()
