"""The sections of benchmarks/gpu.py in their order: what decides most comes first.

Time on a GPU is short and may end at any moment, so a run is made of sections with deadlines of their own, and what an
earlier run of the same code on the same device has is kept. `python benchmarks/gpu.py --plan` prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    seconds: float  # until its deadline, the start of the process included
    title: str
    decides: str  # what follows from its figures


SECTIONS = {
    "tests": About(
        280, "the tests that need a GPU",
        "whether any figure counts: a wrong token or a lost block comes first",
    ),
    "vllm_inside": About(
        200, "vLLM inside Tandem: hand-offs by NIXL, the tokens of two pools, a kill of each worker",
        "whether workers with vLLM may be called tested on GPUs",
    ),
    "beside_vllm": About(
        420, "Tandem beside vLLM: one 8B model, one client, one load",
        "for which load to choose two pools, one worker, or vLLM alone: decode and prompts at least 1.0 x vLLM",
    ),
    "decode": About(
        180, "decode of an 8B model in bfloat16, 1, 32 and 128 sequences of 2,048 and 8,192 tokens",
        "whether launches, products of few rows and the draw of tokens need work: sampling at most 3 % of a step of 32",
    ),
    "hand_off": About(
        90, "blocks of an 8B model between two processes: runs and shuffled blocks",
        "what a hand-off of blocks that lie apart costs, beside one of runs",
    ),
    "kernels": About(
        60, "products with fp8 weights and attention over fp8 KV, beside the same in bfloat16",
        "what the 8-bit options cost or gain: below 1.3 x in decode, the text of fp8 KV names its price",
    ),
    "rates": About(
        60, "rates of the device; decode attention over both layouts of the pool",
        "the floors of all other figures, and the layout of the pool",
    ),
    "prefill": About(
        90, "prompts of 2,048 and 8,192 tokens of an 8B model",
        "whether prompts need work on kernels: at least 0.6 of the rate of a product",
    ),
    "fleet": About(
        150, "`tandem serve` with an 8B model: two pools that share the GPU, and one undivided worker",
        "what the path from client to token adds to the engine's own figures",
    ),
}  # fmt: skip


def plan_text(sections: Mapping[str, About], states: Mapping[str, str]) -> str:
    """The table of `--plan`. `states`: what an earlier run has of a section; none = to do."""
    rows = [
        f"{name:12s} {about.seconds:4.0f} s  {states.get(name, 'to do')}\n"
        f"    {about.title}\n    Decides {about.decides}."
        for name, about in sections.items()
    ]
    seconds = sum(about.seconds for name, about in sections.items() if states.get(name) != "done")
    return "\n".join([*rows, f"{seconds:.0f} s to do"])
