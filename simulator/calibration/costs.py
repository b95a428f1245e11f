"""The costs of a deployment, as a JSON file: `tandem calibrate` writes it, `tandem simulate --costs` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from core.cost.step_cost import StepCost
from core.kv_layout import KVLayout
from simulator.replay.trace_rows import open_regular
from simulator.shells.cost_model import H100_8B, RDMA_400G, LinkCost, layout_8b

VERSION = 1
MAX_FILE_BYTES = 1_000_000  # bytes of a file of costs; beyond: `ValueError` that names the file


@dataclass(frozen=True, slots=True)
class Costs:
    """Times that stand for a model, its devices and a network."""

    source: str  # where the numbers come from, for readers
    prefill: StepCost
    decode: StepCost
    link: LinkCost
    token_bytes: int  # KV of one token
    max_step_tokens: int  # token budget of a step
    message_delay_s: float = 0.0005  # of a message between router and worker, as ReplayConfig.message_delay_s
    median_error: float | None = None  # of the predicted times, as a share; None = unknown
    largest_error: float | None = None

    def __post_init__(self) -> None:
        for name, cost in (("prefill", self.prefill), ("decode", self.decode)):
            if any(seconds < 0.0 or not math.isfinite(seconds) for seconds in asdict(cost).values()):
                raise ValueError(f"{name}: a time is negative or not a number")
            if cost.step_s + cost.token_s <= 0.0:
                raise ValueError(f"{name}: a step takes no time")
        if not self.link.bytes_per_s > 0.0 or not self.link.latency_s >= 0.0:
            raise ValueError("link: the speed must be positive, and the latency must not be negative")
        if self.token_bytes < 4 or self.token_bytes % 4:
            raise ValueError(f"token_bytes must be a positive multiple of 4, is {self.token_bytes}")
        if not 0.0 <= self.message_delay_s <= 10.0:
            raise ValueError(f"message_delay_s must be in [0, 10], is {self.message_delay_s}")
        if self.max_step_tokens < 1:
            raise ValueError(f"max_step_tokens must be at least 1, is {self.max_step_tokens}")

    def layout(self, block_size: int) -> KVLayout:
        """A layout with as many bytes for each token. The simulator reads no other dimension."""
        return KVLayout(self.source, "bfloat16", 1, 1, block_size, self.token_bytes // 4)


_H100_8B = Costs(
    "Llama-3.1-8B-Instruct on H100 SXM, TensorRT-LLM, and a link of 400 Gb/s",
    H100_8B, H100_8B, RDMA_400G, layout_8b(1).token_bytes, 8192, median_error=0.018, largest_error=0.065,
)  # fmt: skip


def _wide_8b(width: int, cost: StepCost, median_error: float, largest_error: float) -> Costs:
    """The fit of the 45 public points of the same server with tensor parallelism; each GPU has a link of its own."""
    return replace(
        _H100_8B,
        source=f"{_H100_8B.source} for each of {width} GPUs",
        prefill=cost,
        decode=cost,
        link=replace(RDMA_400G, bytes_per_s=width * RDMA_400G.bytes_per_s),
        median_error=median_error,
        largest_error=largest_error,
    )


_WIDTHS = {  # by name, then by the number of GPUs of a worker
    "h100-8b": {
        1: _H100_8B,
        2: _wide_8b(2, StepCost(4.448e-3, 0.0, 2.613e-8, 1.2152e-5, 0.0), 0.029, 0.109),
        4: _wide_8b(4, StepCost(3.310e-3, 0.0, 1.476e-8, 7.969e-6, 0.0), 0.066, 0.42),
        8: _wide_8b(8, StepCost(2.775e-3, 0.0, 1.074e-8, 6.311e-6, 0.0), 0.108, 0.514),
    }
}
BUILT_IN = {
    name if width == 1 else f"{name}-tp{width}": costs
    for name, widths in _WIDTHS.items()
    for width, costs in widths.items()
}


def built_in_widths(name: str) -> dict[int, Costs]:
    """The costs of this name by the number of GPUs of a worker. Raises `ValueError` for an unknown name."""
    if name not in _WIDTHS:
        raise ValueError(f"there are no costs of {name}, only of {', '.join(_WIDTHS)}")
    return _WIDTHS[name]


def write_costs(path: Path, costs: Costs) -> None:
    """Raises `OSError`."""
    path.write_text(json.dumps({"version": VERSION} | asdict(costs), indent=2) + "\n", encoding="utf-8")


def read_costs(name: str) -> Costs:
    """A built-in name or a file. Raises `ValueError` that names the file for malformed content, and `OSError`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.exists():
        raise ValueError(f"{name}: neither a file of costs nor built-in costs, which are {', '.join(BUILT_IN)}")
    with open_regular(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: longer than {MAX_FILE_BYTES:,} bytes")
    try:
        return _costs(json.loads(content.decode("utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON at line {error.lineno}: {error.msg}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _costs(data: object) -> Costs:
    content = _mapping("the file", data)
    if content.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, is {content.get('version')}")
    names = {field.name for field in fields(Costs)} - {"prefill", "decode", "link"}
    _require_names("the file", content, {"version", "prefill", "decode", "link", *names})
    return Costs(
        prefill=_record(StepCost, "prefill", content["prefill"]),
        decode=_record(StepCost, "decode", content["decode"]),
        link=_record(LinkCost, "link", content["link"]),
        **{name: content[name] for name in names},
    )


def _record(kind: type[Any], where: str, data: object) -> Any:
    content = _mapping(where, data)
    _require_names(where, content, {field.name for field in fields(kind)})
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in content.values()):
        raise ValueError(f"{where}: every value must be a number")
    return kind(**content)


def _mapping(where: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must hold a JSON object")
    return data


def _require_names(where: str, content: Mapping[str, Any], wanted: set[str]) -> None:
    """Raise `ValueError` that names the missing and the unknown entries."""
    if missing := sorted(wanted - content.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(content.keys() - wanted):
        raise ValueError(f"{where} holds unknown entries: {', '.join(unknown)}")
