"""nixl is built for one major version of CUDA: `nixl_cu12` needs libcudart 12 for device memory, `nixl_cu13` needs 13.

Each of the two moves host memory, and imports without CUDA. If both are installed, `import_nixl` takes the one whose
CUDA runtime this process has loaded, as a process that computes on a GPU has.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

PACKAGES = ("nixl_cu13", "nixl_cu12")
MAPS = Path("/proc/self/maps")


def import_nixl(packages: tuple[str, ...] = PACKAGES, maps: Path = MAPS) -> ModuleType:
    """The installed package, with its `_bindings` imported. Raises `ImportError`, which names every package."""
    installed = [name for name in packages if importlib.util.find_spec(name) is not None]
    loaded = maps.read_text() if len(installed) > 1 and maps.exists() else ""
    installed.sort(key=lambda name: f"libcudart.so.{name[-2:]}" not in loaded)
    failures = []
    for name in installed:
        try:
            importlib.import_module(f"{name}._bindings")
            return importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
    wanted = " or ".join(name.replace("_", "-") for name in packages)
    raise ImportError(f"transport nixl needs {wanted} ({'; '.join(failures) or 'neither is installed'})")
