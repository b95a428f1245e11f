"""`tandem demo`: runs a whole fleet on this machine, and shows the duration of each phase of a request.

The demo starts Ray, a router and one worker of each pool, asks three questions over the public gRPC API, and stops the
fleet. By default the decode worker computes a prompt itself where that costs less. The demo sends every prompt through
both pools.
"""

from __future__ import annotations

from functools import partial

from rich.console import Console

from cli.commands.pull import pull_if_listed
from cli.commands.serve import fleet, fleet_spec
from cli.credentials import with_cluster_token
from cli.interrupts import run_interruptible
from cli.screens.terminal import print_line
from cli.screens.waterfall import draw
from core.config import TandemConfig
from core.errors import TandemError
from core.wire_names import short_name
from fleet.ray.cluster import Cluster
from tandem_client import AsyncClient
from tandem_client.stubs import inference_pb2

TIMEOUT_S = 60.0
MAX_TOKENS = 64

STORY = (
    "For two hundred years the lighthouse on the northern cape was kept by one family. Every evening somebody climbed "
    "the hundred and twelve steps, trimmed the wick, polished the lens and wrote the weather into a book. When the "
    "electric lamp came, the last keeper stayed on, although nobody paid him any more. He said that a light which is "
    "not watched is only a lamp. After his death the village found the books: seventy thousand evenings, not one "
    "missing, and on the first page of each the same sentence: somebody is out there."
)

Chat = tuple[tuple[str, str], ...]  # (role, content) of each message

CHATS: tuple[Chat, ...] = (
    # Without the system message, the two likeliest first tokens differ by 0.08 nats, and bfloat16 may swap them.
    (("system", "Answer in one sentence."), ("user", "What is the capital of France?")),
    (("user", f"Summarize this story in one sentence.\n\n{STORY}"),),
    (
        ("system", "You are a patient teacher. Answer in two or three short sentences."),
        ("user", "Why is the sky blue?"),
        ("assistant", "Because air scatters blue light more strongly than red light."),
        ("user", "And why is it red at sunset?"),
    ),
)
FIRST_ANSWER_SAYS = "Paris"


async def ask(
    client: AsyncClient, messages: tuple[tuple[str, str], ...], console: Console
) -> tuple[str, inference_pb2.Finished]:
    """Stream one greedy answer to the terminal. Returns its text and its last message."""
    request = inference_pb2.GenerateRequest()
    for role, content in messages:
        request.chat.messages.add(role=role, content=content)
    request.sampling.temperature = 0.0
    request.stop.max_tokens = MAX_TOKENS
    text = ""
    async for response in client.generate(request, TIMEOUT_S):
        if response.HasField("finished"):
            console.print()
            return text, response.finished
        text += response.tokens.text
        console.print(response.tokens.text, end="", markup=False, highlight=False, soft_wrap=True)
    raise TandemError("the stream ended without its last message")


def report(finished: inference_pb2.Finished, console: Console) -> None:
    """Print the phases, the path and the token counts of a request."""
    for line in draw(finished.timings):
        console.print(f"  {line}", style="cyan", highlight=False, markup=False)
    path = short_name(inference_pb2.RequestPath, finished.path)
    usage = finished.usage
    print_line(
        console,
        f"  {path}: {finished.prefill_worker or finished.decode_worker} -> {finished.decode_worker}, "
        f"{finished.transferred_bytes / 1e6:.2f} MB of KV moved, {usage.prompt_tokens} prompt tokens "
        f"({usage.cached_tokens} cached), {usage.completion_tokens} new, attempts {finished.attempts}\n",
        "dim",
    )


async def ask_all(address: str, console: Console) -> None:
    """Ask every question. Raises `TandemError` if an answer or a path is wrong."""
    paths = []
    async with AsyncClient(address) as client:
        for index, messages in enumerate(CHATS):
            question, *story = messages[-1][1].splitlines()
            more = f" (and {sum(len(line.split()) for line in story)} words)" if story else ""
            print_line(console, f"> {question}{more}", "bold")
            text, finished = await ask(client, messages, console)
            report(finished, console)
            paths.append(finished.path)
            if index == 0 and FIRST_ANSWER_SAYS not in text:
                raise TandemError(f"the first answer does not say {FIRST_ANSWER_SAYS}: {text!r}")
    if inference_pb2.REQUEST_PATH_DISAGGREGATED not in paths:
        raise TandemError("no request went through both pools; see `tandem doctor`")


def demo(config: TandemConfig, cluster: Cluster, console: Console) -> None:
    """`cluster` is starting already. Raises `TandemError` on a failure, `KeyboardInterrupt` after a Ctrl-C."""

    show = partial(print_line, console, style="dim")

    async def main() -> None:
        async with fleet(cluster, spec, show) as (address, *_):
            show(f"router at {address}\n")
            await ask_all(address, console)

    spec = fleet_spec(with_cluster_token(config))
    pull_if_listed(config.engine.model, console)  # the file is cached; this checks its hash
    cluster.join()
    if run_interruptible(main, show):
        raise KeyboardInterrupt
