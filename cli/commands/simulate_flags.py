"""The flags of `tandem simulate`. Each has a default, so a command without any flag simulates something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.flags import CommandFlag


@dataclass(frozen=True, slots=True)
class SimulateFlag(CommandFlag):
    default: Any


def _flag(name: str, default: Any, help: str, type_: Any = None) -> SimulateFlag:
    shown = f" (default: {default or repr(default)})" if default is not None else ""
    return SimulateFlag(name, type_ or type(default), help + shown, default)


SIMULATE_FLAGS = (
    _flag("workload", "synthetic",
          "synthetic, or a file: .jsonl in the format of Mooncake or of agent sessions, .csv in that of Azure."),
    _flag("requests", None, "Requests to replay. (default: the whole file; 1000 synthetic ones)", int),
    _flag("divisor", 1, "Divide the lengths of the prompts of a file by this."),
    _flag("output-divisor", 1, "Divide the lengths of the outputs of a file by this."),
    _flag("rate", None, "Requests per second. (default: the times of the file; 1 for synthetic requests)", float),
    _flag("load", None, "In place of --rate: share of the time in which the prefill workers would compute "
          "if nothing were cached.", float),
    _flag("arrivals", None, "trace, poisson or gamma; gamma comes in bursts, for synthetic requests. "
          "(default: trace; poisson for synthetic requests)", str),
    _flag("burstiness", 4.0, "Of gamma: squared coefficient of variation of the gaps between requests."),
    _flag("input-tokens", 1024, "Synthetic: mean length of a prompt, with its prefix."),
    _flag("output-tokens", 128, "Synthetic: mean length of an output."),
    _flag("spread", 0.5, "Synthetic: lengths lie within the mean times 1 - spread and 1 + spread."),
    _flag("prefix-groups", 0, "Synthetic: number of prefixes that prompts share."),
    _flag("prefix-tokens", 0, "Synthetic: length of a shared prefix."),
    _flag("session-rate", 0.1, "Agent sessions: sessions that begin per second."),
    _flag("prefill", 4, "Prefill workers; 0 = decode workers compute the prompts."),
    _flag("decode", 4, "Decode workers."),
    _flag("routers", 1, "Routers."),
    _flag("prefill-pool-tokens", 1_000_000, "KV pool of each prefill worker."),
    _flag("decode-pool-tokens", 400_000, "KV pool of each decode worker."),
    _flag("block-size", 64, "Tokens of a KV block."),
    _flag("max-batched-tokens", None, "Token budget of one step. (default: that of the costs)", int),
    _flag("slo-ttft-ms", 1000.0, "Wanted time to the first token."),
    _flag("slo-itl-ms", 50.0, "Wanted time between tokens: the limit of TPOT, and of a step with decodes."),
    _flag("local-prefill", "auto", "auto or never: may a decode worker compute prompts?"),
    _flag("peer-prefixes", "auto", "auto or never: may workers read prefixes that peers have cached?"),
    _flag("admission", "queue", "queue or shed; shed = refuse a request whose predicted first token misses "
          "--slo-ttft-ms."),
    _flag("costs", "h100-8b", "h100-8b, or a file of `tandem calibrate`."),
    _flag("seed", 0, "Decides every random number."),
    _flag("seeds", 1, "Repeat with this many seeds, and show medians."),
    _flag("processes", None, "Processes to use. (default: the cores of this machine)", int),
    _flag("json", None, "Write the result into this file.", Path),
    _flag("plot", None, "Draw a chart into this file, .png or .svg; needs the extra plots.", Path),
    _flag("sweep", None, "Simulate a grid, such as --sweep prefill=1..16 decode=1..16, or rate=0.5..8:0.5.",
          list[str]),
)  # fmt: skip


def values_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The given value or the default of every flag."""
    return {
        flag.parameter: flag.default if flags.get(flag.parameter) is None else flags[flag.parameter]
        for flag in SIMULATE_FLAGS
    }
