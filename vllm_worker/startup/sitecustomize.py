"""Finds Tandem's packages, and nothing else beside them, for the processes of vLLM.

Python imports this module at its start, because `PYTHONPATH` is this folder. Tandem's packages may lie beside its own
torch and transformers (after `pip install tandem-serve`). Their folder on the path would hide those of vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGES = frozenset({
    "core", "protos", "runtime", "model_files", "text", "engine", "kv_transfer", "worker", "router", "prefill_worker",
    "decode_worker", "verified_kv", "vllm_worker", "fleet", "tandem_client", "gateway", "simulator",
    "conformance", "cli",
})  # fmt: skip


class TandemFinder:
    """A finder as in `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT], target) if path is None and name in PACKAGES else None


sys.meta_path.insert(0, TandemFinder)
