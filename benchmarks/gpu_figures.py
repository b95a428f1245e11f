"""Draws docs/gpu.md: `python -m benchmarks.gpu_figures gpu.json` takes the figures of a run, and draws the page anew.

Figures of a GPU come from the JSON of benchmarks/gpu.py alone, one file for each kind of device in docs/gpu/. A row
without a figure says "not measured". The table of pools is arithmetic on datasheets and on the sizes of a model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.harness import FORMAT, SECTIONS
from benchmarks.report import line_of, table
from core.cost.step_cost import StepWork
from model_files.builtin_configs import RANDOM_CONFIGS

DOCS = Path(__file__).resolve().parents[1] / "docs"
MEASURED = DOCS / "gpu"
NOT_MEASURED = "not measured"
MODEL = "llama-3.1-8b"
CONTEXT, BATCHES, PROMPT = 8192, (1, 32), 8192
KV_SHARE = 0.9  # of the memory that the weights leave


@dataclass(frozen=True, slots=True)
class Datasheet:
    name: str
    memory_gb: float
    tb_per_s: float
    bf16_tflops: float  # dense
    source: str


DATASHEETS = (
    Datasheet("L40S", 48, 0.864, 362, "https://www.nvidia.com/en-us/data-center/l40s/"),
    Datasheet("A100 80GB SXM", 80, 2.039, 312, "https://www.nvidia.com/en-us/data-center/a100/"),
    Datasheet("H100 SXM", 80, 3.35, 989, "https://www.nvidia.com/en-us/data-center/h100/"),
    Datasheet("H200 SXM", 141, 4.8, 989, "https://www.nvidia.com/en-us/data-center/h200/"),
)


def load_measured(folder: Path = MEASURED) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def refuse(measured: dict[str, Any]) -> None:
    """Raise `ValueError` for a JSON that is no measurement of a GPU with a known commit."""
    if measured.get("format") != FORMAT:
        raise ValueError(f"the JSON has format {measured.get('format')}, this program reads {FORMAT}")
    if measured["device"] != "cuda":
        raise ValueError("the JSON is a rehearsal on a CPU: only a run on a GPU gives figures")
    if measured["commit"] == "unknown" or measured["commit"].endswith("+"):
        raise ValueError(
            f"the commit of the JSON is {measured['commit']}: run benchmarks/gpu.py on a clean tree, with --commit "
            "where there is no git"
        )


def take(path: Path, folder: Path = MEASURED) -> Path:
    """Keep the figures of a run in the place of older figures of the same kind of device."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    refuse(measured)
    name = re.sub(r"[^a-z0-9]+", "-", measured["machine"]["device"].lower()).strip("-")
    folder.mkdir(exist_ok=True)
    target = folder / f"{name}.json"
    target.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return target


def draw_figures(all_measured: Sequence[dict[str, Any]] | None = None) -> str:
    """The figures of each device under the sections' titles, and how they came about."""
    devices = load_measured() if all_measured is None else all_measured
    parts = [_overview(devices)]
    for measured in devices:
        machine = measured["machine"]
        versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "triton", "python"))
        parts.append(f"### {machine['device']}\n\n{measured['started']}, commit {measured['commit']}, {versions}.")
        parts += [_section(section) for section in measured["sections"]]
    return "\n\n".join(parts)


def _overview(devices: Sequence[dict[str, Any]]) -> str:
    names = [measured["machine"]["device"] for measured in devices] or ["any GPU"]
    rows = [f"| section | goal | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for name, about in SECTIONS.items():
        cells = [_verdict(measured, name) for measured in devices] or [NOT_MEASURED]
        rows.append(f"| {about.title} | {about.goal} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _verdict(measured: dict[str, Any], name: str) -> str:
    section = next((section for section in measured["sections"] if section["name"] == name), None)
    if section is None or section["status"] == "not run":
        return NOT_MEASURED
    judged = [line["holds"] for line in section["lines"] if line["holds"] is not None]
    goals = f"{sum(judged)} of {len(judged)} goals hold" if judged else f"{len(section['lines'])} figures"
    return goals if section["status"] == "complete" else f"{section['status']}; {goals}"


def _section(section: dict[str, Any]) -> str:
    parts = [f"#### {SECTIONS[section['name']].title[:1].upper()}{SECTIONS[section['name']].title[1:]}"]
    if section["status"] != "complete":
        parts.append(f"The section ended early: {section['status']}. {section['error']}".rstrip())
    parts.append(
        table([line_of(line).row() for line in section["lines"]]).rstrip() if section["lines"] else "No figure."
    )
    parts += [f"- {note}" for note in section["notes"]]
    return "\n\n".join(parts)


def draw_pools() -> str:
    """The limits of each GPU by its datasheet, for prefill and for decode of an 8B model in bfloat16."""
    config = RANDOM_CONFIGS[MODEL]
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    sizes = config.sizes(2.0, token_bytes)
    weight_bytes = 2.0 * (sizes.num_layer_weights + 2 * sizes.num_head_weights)  # the embedding and the head
    pairs = PROMPT * (PROMPT + 1) // 2
    prompt = StepWork(num_decodes=0, decode_context=0, prefill_tokens=PROMPT, attended_pairs=pairs)
    rows = [
        f"| GPU | memory | bandwidth | dense bf16 | FLOP a byte | prompts of {PROMPT:,} tokens | "
        + " | ".join(f"decode of {batch} x {CONTEXT:,}" for batch in BATCHES)
        + f" | sequences of {CONTEXT:,} that fit |",
        "|---|---|---|---|---|---|" + "---|" * (len(BATCHES) + 1),
    ]
    for sheet in DATASHEETS:
        flop_per_s, bytes_per_s = sheet.bf16_tflops * 1e12, sheet.tb_per_s * 1e12
        cells = [
            f"[{sheet.name}]({sheet.source})",
            f"{sheet.memory_gb:g} GB",
            f"{sheet.tb_per_s:g} TB/s",
            f"{sheet.bf16_tflops:g} TFLOP/s",
            f"{flop_per_s / bytes_per_s:.0f}",
            f"{PROMPT * flop_per_s / sizes.flop(prompt) / 1e3:.0f} k tokens/s",
        ]
        num_fitting = int(KV_SHARE * (sheet.memory_gb * 1e9 - weight_bytes) // (CONTEXT * token_bytes))
        for batch in BATCHES:
            work = StepWork(num_decodes=batch, decode_context=batch * CONTEXT, prefill_tokens=0, attended_pairs=0)
            seconds = max(sizes.memory_bytes(work) / bytes_per_s, sizes.flop(work) / flop_per_s)
            cells.append(f"{batch / seconds:,.0f} tokens/s" if batch <= num_fitting else "does not fit")
        cells.append(f"{num_fitting}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    from docs import render_tables

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="gpu.json of a run of benchmarks/gpu.py")
    try:
        for path in parser.parse_args().runs:
            print(f"kept {take(path)}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    render_tables.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
