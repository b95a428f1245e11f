"""The flags of `tandem simulate`. Each has a default, so a command without any flag simulates something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.flags import CommandFlag


@dataclass(frozen=True, slots=True)
class DefaultedFlag(CommandFlag):
    default: Any


def flag_of(name: str, default: Any, help: str, type_: Any = None) -> DefaultedFlag:
    shown = f" (default: {default or repr(default)})" if default is not None else ""
    return DefaultedFlag(name, type_ or type(default), help + shown, default)


SIMULATE_FLAGS = (
    flag_of("workload", "synthetic",
          "synthetic, or a file: .jsonl of Mooncake, Dynamo, agent sessions or calls of OpenAI's API, .csv of Azure."),
    flag_of("requests", None, "Requests to replay. (default: the whole file; 1000 synthetic ones)", int),
    flag_of("divisor", 1, "Divide the lengths of the prompts of a file by this."),
    flag_of("output-divisor", 1, "Divide the lengths of the outputs of a file by this."),
    flag_of("rate", None, "Requests per second. (default: the times of the file; 1 for synthetic requests)", float),
    flag_of("load", None, "In place of --rate: share of the time in which the prefill workers would compute "
          "if nothing were cached.", float),
    flag_of("arrivals", None, "trace, poisson or gamma; gamma comes in bursts, for synthetic requests. "
          "(default: trace; poisson for synthetic requests)", str),
    flag_of("burstiness", 4.0, "Of gamma: squared coefficient of variation of the gaps between requests."),
    flag_of("input-tokens", 1024, "Synthetic: mean length of a prompt, with its prefix."),
    flag_of("output-tokens", 128, "Synthetic: mean length of an output."),
    flag_of("spread", 0.5, "Synthetic: lengths lie within the mean times 1 - spread and 1 + spread."),
    flag_of("prefix-groups", 0, "Synthetic: number of prefixes that prompts share."),
    flag_of("prefix-tokens", 0, "Synthetic: length of a shared prefix."),
    flag_of("session-rate", 0.1, "Agent sessions: sessions that begin per second."),
    flag_of("prefill", 4, "Prefill workers; 0 = decode workers compute the prompts."),
    flag_of("decode", 4, "Decode workers."),
    flag_of("routers", 1, "Routers."),
    flag_of("prefill-pool-tokens", 1_000_000, "KV pool of each prefill worker."),
    flag_of("decode-pool-tokens", 400_000, "KV pool of each decode worker."),
    flag_of("block-size", 64, "Tokens of a KV block."),
    flag_of("max-batched-tokens", None, "Token budget of one step. (default: that of the costs)", int),
    flag_of("slo-ttft-ms", 1000.0, "Wanted time to the first token."),
    flag_of("slo-itl-ms", 50.0, "Wanted time between tokens: the limit of TPOT, and of a step with decodes."),
    flag_of("local-prefill", "auto", "auto or never: may a decode worker compute prompts?"),
    flag_of("peer-prefixes", "auto", "auto or never: may workers read prefixes that peers have cached?"),
    flag_of("admission", "queue", "queue or shed; shed = refuse a request whose predicted first token misses "
          "--slo-ttft-ms."),
    flag_of("costs", "h100-8b", "h100-8b, or a file of `tandem calibrate`."),
    flag_of("seed", 0, "Decides every random number."),
    flag_of("seeds", 1, "Repeat with this many seeds, and show medians."),
    flag_of("processes", None, "Processes to use. (default: the cores of this machine)", int),
    flag_of("json", None, "Write the result into this file.", Path),
    flag_of("plot", None, "Draw a chart into this file, .png or .svg; needs the extra plots.", Path),
    flag_of("sweep", None, "Simulate a grid, such as --sweep prefill=1..16 decode=1..16, or rate=0.5..8:0.5.",
          list[str]),
)  # fmt: skip


def values_of(flags: Mapping[str, Any], table: Sequence[DefaultedFlag] = SIMULATE_FLAGS) -> dict[str, Any]:
    """The given value or the default of every flag."""
    return {
        flag.parameter: flag.default if flags.get(flag.parameter) is None else flags[flag.parameter] for flag in table
    }
