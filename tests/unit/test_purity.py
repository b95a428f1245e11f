"""core/ decides and never acts: it imports stdlib and xxhash alone, and nothing that waits, draws or connects."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "core").rglob("*.py"))
NEVER = frozenset({"time", "random", "asyncio", "threading", "socket", "secrets", "select", "multiprocessing", "uuid"})
ALLOWED = (sys.stdlib_module_names | {"core", "xxhash"}) - NEVER
# What the interpreter or the standard library loads on its own behalf proves nothing, so it is measured and taken off.
LIST_MODULES = "import json, sys; {imports}; print(json.dumps(sorted(sys.modules)))"


def imported_packages(path: Path) -> set[str]:
    """First names of all that a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            assert node.module is not None
            found.add(node.module.partition(".")[0])
    return found


def loaded_after(imports: str) -> set[str]:
    program = LIST_MODULES.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_core_file_imports_only_what_is_allowed(path: Path) -> None:
    assert imported_packages(path) <= ALLOWED


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_core_file_imports_nothing_behind_our_back(path: Path) -> None:
    called = set(map(_called_name, ast.walk(ast.parse(path.read_text()))))
    assert not called & {"__import__", "open", "input", "exec", "eval"}


def _called_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def test_loading_all_of_core_loads_no_clock_no_socket_and_no_library_but_xxhash() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES]
    ours = loaded_after("; ".join(f"import {name}" for name in names))
    theirs = loaded_after("import " + ", ".join(sorted(_stdlib_imports())))
    assert "core" in ours
    fresh = ours - theirs
    assert {name for name in fresh if name not in sys.stdlib_module_names} <= {"core", "xxhash"}
    assert not fresh & NEVER


def _stdlib_imports() -> set[str]:
    return {name for path in MODULES for name in imported_packages(path)} & sys.stdlib_module_names


def test_the_check_sees_an_import_wherever_it_hides(tmp_path: Path) -> None:
    sly = tmp_path / "sly.py"
    sly.write_text("def f():\n    from time import monotonic\n    import os.path, socket as s\n")
    assert imported_packages(sly) == {"time", "os", "socket"}
    assert not imported_packages(sly) <= ALLOWED
