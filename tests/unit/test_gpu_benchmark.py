"""The plan of benchmarks/gpu.py, with sections that pretend to measure, and the archive for a machine with a GPU."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from benchmarks.gpu_archive import pins, unpack
from benchmarks.gpu_sections import harness
from benchmarks.gpu_sections.harness import Run, run_sections, states_of
from benchmarks.gpu_sections.plan import SECTIONS, About, plan_text

ROOT = Path(__file__).parents[2]
# Each section writes a figure; one then fails, one hangs. `count` has a line for each start.
PROGRAM = """
import json, signal, sys
from pathlib import Path
name, out = sys.argv[sys.argv.index("--child") + 1], Path(sys.argv[sys.argv.index("--out") + 1])
line = {"measure": name, "value": 1.0, "unit": "s"}
(out / "messages").write_text(json.dumps({"machine": {"device": "pretended"}}) + "\\n" + json.dumps({"line": line}))
with (out / "count").open("a") as count:
    print(name, file=count)
if name == "hangs" and not (out / "mended").exists():
    signal.pause()
sys.exit(name == "fails")
"""
ABOUT = About(60.0, "a title", "what follows")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "source_digest", lambda _: "one source")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run_of(program: Path, **sections: About) -> Run:
    return Run(program, program.parent, None, rehearse=True, commit="here", sections=sections)


def statuses(out: Path) -> dict[str, str]:
    return {section["name"]: section["status"] for section in json.loads((out / "gpu.json").read_text())["sections"]}


def starts(out: Path) -> list[str]:
    return (out / "count").read_text().split()


def test_a_section_that_hangs_is_killed_at_its_deadline_and_the_others_run_in_their_order(program: Path) -> None:
    run = run_of(program, hangs=About(1.0, "a title", ""), fails=ABOUT, last=ABOUT)
    assert run_sections(run, ["last", "fails", "hangs"]) == 1
    assert statuses(program.parent) == {"hangs": "out of time", "fails": "failed", "last": "complete"}
    assert starts(program.parent)[-2:] == ["fails", "last"]


def test_a_second_run_measures_what_the_first_one_has_not(program: Path) -> None:
    run = run_of(program, hangs=About(1.0, "a title", ""), first=ABOUT, last=ABOUT)
    assert run_sections(run, ["first", "hangs"]) == 1
    plan = plan_text(run.sections, states_of(run))
    assert "first          60 s  done\n" in plan
    assert "hangs           1 s  to do (out of time: killed after" in plan
    assert plan.endswith("61 s to do")
    (program.parent / "mended").touch()
    (program.parent / "count").unlink()
    assert run_sections(run, list(run.sections)) == 0
    assert starts(program.parent) == ["hangs", "last"]
    sections = json.loads((program.parent / "gpu.json").read_text())["sections"]
    assert [(section["name"], section["lines"][0]["measure"]) for section in sections] == [
        ("hangs", "hangs"), ("first", "first"), ("last", "last")
    ]  # fmt: skip
    assert run_sections(run, ["first"], again=True) == 0
    assert starts(program.parent) == ["hangs", "last", "first"]


@pytest.mark.parametrize("change", ["source", "device"])
def test_figures_of_other_code_or_of_another_device_are_not_kept(
    program: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    run = run_of(program, first=ABOUT)
    assert run_sections(run, ["first"]) == 0
    if change == "source":
        monkeypatch.setattr(harness, "source_digest", lambda _: "another source")
    else:
        run = replace(run, rehearse=False)
        monkeypatch.setattr(harness, "device_name", lambda: "another device")
    assert states_of(run) == {}
    assert run_sections(run, ["first"]) == 0
    assert starts(program.parent) == ["first", "first"]


def test_every_section_says_what_it_decides() -> None:
    assert all(about.title and about.decides for about in SECTIONS.values())
    assert "Decides whether any figure counts" in plan_text(SECTIONS, {})


# ---- the archive


def test_the_archive_has_each_package_that_a_gpu_program_imports() -> None:
    """Each import is a module of Python, of this house, of the machine or of the archive."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = [pattern.rstrip("*") for pattern in settings["setuptools"]["packages"]["find"]["include"]]
    ours = [*packages, "benchmarks", "tests"]
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    files += [*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "benchmarks/gpu_sections").glob("*.py")]
    archived = {pin.partition("==")[0] for pin in pins()}
    distributions = metadata.packages_distributions()
    missing = {
        name
        for name in set().union(*map(imports_of, files)).difference(sys.stdlib_module_names, ours)
        if not archived.intersection({name, *map(canonicalize_name, distributions.get(name, ()))})
    }
    # Of the machine; for charts and other transports; and what vLLM's environment has.
    assert missing == {"torch", "triton", "numpy", "matplotlib", "ucxx", "vllm", "msgspec", "zmq"}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_a_wheel_is_unpacked_without_the_parts_that_no_gpu_program_loads(tmp_path: Path) -> None:
    wheel, site = tmp_path / "ray-1-py3-none-any.whl", tmp_path / "site"
    kept = {"ray/core/raylet": 0o755, "ray/__init__.py": 0o644, "ray-1.data/purelib/extra.py": 0o644}
    with zipfile.ZipFile(wheel, "w") as content:
        for name, mode in (kept | {"ray/jars/big.jar": 0o644, "ray-1.data/scripts/ray": 0o755}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            content.writestr(info, "content")
    unpack(wheel, site)
    found = {str(path.relative_to(site)): path.stat().st_mode & 0o777 for path in site.rglob("*") if path.is_file()}
    assert found == {"ray/core/raylet": 0o755, "ray/__init__.py": 0o644, "extra.py": 0o644}
