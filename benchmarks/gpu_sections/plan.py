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
        240, "decode of an 8B model, 1, 32 and 128 sequences of 2,048 and 8,192 tokens; with fp8 weights, with fp8 KV",
        "whether launches, products of few rows and the draw of tokens need work: sampling at most 3 % of a step of 32"
        "; what the 8-bit options gain",
    ),
    "prefill": About(
        120, "prompts of 2,048 and 8,192 tokens of an 8B model; with fp8 KV",
        "whether prompts need work on kernels: at least 0.6 of the rate of a product; what fp8 KV costs them",
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
