"""A short trace in Mooncake's form for aiperf: the first requests of a real one, cut to what a small model can take.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one for each 512 tokens]}

Equal hash ids mean equal text, so cut prompts share the prefixes that the whole ones share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_REQUESTS = 20
MAX_INPUT, MAX_OUTPUT = 1024, 16  # tokens
BLOCK = 512
LENGTH_MS = 8_000


def write_short_trace(source: Path | None, target: Path) -> None:
    """Without a source, the requests are made up: half of them share their first block."""
    requests = list(_first_of(source) if source is not None else _made_up())
    first, last = requests[0]["timestamp"], requests[-1]["timestamp"]
    pace = LENGTH_MS / max(1, last - first)
    with target.open("w", encoding="utf-8") as lines:
        for request in requests:
            length = min(request["input_length"], MAX_INPUT)
            cut = {
                "timestamp": round((request["timestamp"] - first) * pace),
                "input_length": length,
                "output_length": max(1, min(request["output_length"], MAX_OUTPUT)),
                "hash_ids": request["hash_ids"][: -(-length // BLOCK)],
            }
            lines.write(json.dumps(cut) + "\n")


def _first_of(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as lines:
        for _, line in zip(range(NUM_REQUESTS), lines, strict=False):
            yield json.loads(line)


def _made_up() -> Iterator[dict[str, Any]]:
    for index in range(NUM_REQUESTS):
        hash_ids = [0 if index % 2 else 1000 + index, 2000 + index]
        yield {"timestamp": index * 100, "input_length": 600, "output_length": 12, "hash_ids": hash_ids}
