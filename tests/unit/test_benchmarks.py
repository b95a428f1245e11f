"""Each benchmark starts; ratios and verdicts follow from what was measured."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from packaging.utils import canonicalize_name

from benchmarks.asking import Answer, take_event
from benchmarks.engine.figures import VLLM
from benchmarks.gpu_sections import harness
from benchmarks.gpu_sections.beside_vllm import Limits, is_inside
from benchmarks.gpu_sections.harness import About, Run, plan_text, run_sections, states_of
from benchmarks.gpu_sections.vllm_inside import Likeness, likeness
from benchmarks.report import Line, Report, run_parts
from model_files.builtin_configs import RANDOM_CONFIGS
from model_files.model_config import config_from_hf
from tests.support import child_processes
from tests.support.child_processes import ChildEnded, ChildProcess, serving
from text.tokenizer import load_tokenizer
from tools.gpu_archive import pins, unpack
from tools.hf_model import write_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def modules_to_start() -> list[str]:
    """The modules that the Makefile's targets run."""
    return sorted(set(re.findall(r"python -m ((?:benchmarks|tools)\.\S+)", (ROOT / "Makefile").read_text())))


# In one process, because each would import torch.
LIST_OPTIONS = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (module, end.code)
"""


def test_benchmarks_that_are_too_slow_for_a_test_start_and_list_their_options(tmp_path: Path) -> None:
    modules = modules_to_start()
    command = [sys.executable, "-c", LIST_OPTIONS, *modules]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(modules) > 5


def test_a_measured_program_answers_line_by_line_and_its_last_words_are_reported() -> None:
    program = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin:\n  print(line.upper(), end='', flush=True)\n"
    child = ChildProcess("echo", [sys.executable, "-c", program + "  sys.exit('no more')"], {"SOME": "value"})
    assert child.call("it", much=1) == {"DO": "IT", "MUCH": 1}
    with pytest.raises(ChildEnded, match="echo ended: no more"):
        child.call("more")
    child.stop()


def test_a_server_runs_with_its_children_from_its_ready_line_to_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_processes, "STOP_TIMEOUT_S", 0.1)  # the child below never ends by itself
    sleeps = "import subprocess, time; subprocess.Popen(['sleep', '600'])"
    program = f"{sleeps}; print('serving at once', flush=True); time.sleep(600)"
    with serving([sys.executable, "-c", f"print('warms up'); {program}"], "^serving ") as process_id:
        server = psutil.Process(process_id)
        (child,) = server.children()
    assert psutil.wait_procs([server, child], 30.0)[1] == []
    with pytest.raises(RuntimeError, match=r"did not start: warms up \| no luck"):
        with serving([sys.executable, "-c", "print('warms up'); print('no luck, so never serving ')"], "^serving "):
            pass


def test_a_line_is_judged_printed_and_written_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report("trial")
    report.add(Line("less time is faster", 8.0, "ms", VLLM, 10.0, floor=4.0, least_ratio=1.25))
    report.add(Line("more tokens are faster", 1000.0, "tokens/s", VLLM, 800.0, floor=2000.0, least_ratio=1.5))
    report.add(Line("without its peer", 8.0, "ms", VLLM, None, least_ratio=1.25))
    report.add(Line("slow", 2.0, "s", most=1))
    report.add_table(("rate", "nothing", "failed"), [(1.5, "", 0), (2.0, "", 1)])
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert {"machine", "commit", "date", "load average"} < written.keys()
    judged = [(line["ratio"], line["share_of_floor"], line["holds"]) for line in written["lines"]]
    assert judged == [(1.25, 0.5, True), (1.25, 0.5, False), (None, None, None), (None, None, False)]
    assert "MISSED" in capsys.readouterr().out
    page = Path("build/bench/trial.md").read_text()
    assert "| without its peer | 8 ms | vLLM: not measured |" in page
    assert page.endswith("\n\n| rate | failed |\n| --- | --- |\n| 1.5 | 0 |\n| 2.0 | 1 |\n")


def test_a_part_that_fails_is_a_row_and_the_parts_after_it_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report("trial")

    def fails() -> None:
        report.add(Line("before", 1.0, "s"))
        raise RuntimeError("no luck")

    parts = {"broken": fails, "whole": lambda: report.add(Line("after", 2.0, "s")), "unwanted": fails}
    with pytest.raises(SystemExit, match="these sections failed: broken"):
        run_parts(report, parts, ["broken", "whole"])
    written = json.loads(Path("build/bench/trial.json").read_text())
    assert [line["measure"] for line in written["lines"]] == ["before", "after"]
    assert written["failed"] == {"broken": "RuntimeError: no luck"}
    assert "| broken | failed: RuntimeError: no luck |" in Path("build/bench/trial.md").read_text()


@contextlib.contextmanager
def tool_and_its_server(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A program that starts a server and prints its process id. Both have ended after the block."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tool:
        assert tool.stdout is not None
        server = psutil.Process(int(tool.stdout.readline()))
        try:
            yield tool, server
        finally:
            tool.kill()
            if server.is_running():
                server.kill()


BLOCKED_STACK = """
import contextlib, sys, time
from tests.support.child_processes import serving
from tools import check_matrix

@contextlib.asynccontextmanager
async def blocked(_):
    with serving(["sh", "-c", "echo serving; exec sleep 600"], "^serving") as process_id:
        print(process_id, flush=True)
        time.sleep(600)
        yield

check_matrix.STACKS["blocked"] = blocked
sys.argv = ["check_matrix", "--stacks", "blocked"]
check_matrix.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_server_of_the_matrix_behind(number: signal.Signals) -> None:
    """While the stack starts and the loop is blocked."""
    command = [sys.executable, "-c", BLOCKED_STACK]
    with tool_and_its_server(command) as (tool, server):
        tool.send_signal(number)
        assert tool.wait(TIMEOUT_S) == -signal.SIGINT
        assert not server.is_running()


STUBBORN = """
import subprocess, sys, time
from pathlib import Path
from tests.support.child_processes import serving
from tests.support.vllm_server import VllmServer

told = sys.argv[2]
command = ["sh", "-c", f"trap 'touch {told}' TERM; touch {told}.trapped; echo serving; while :; do sleep 0.1; done"]

def run(process_id):
    while not Path(f"{told}.trapped").exists():
        time.sleep(0.01)
    print(process_id, flush=True)
    time.sleep(600)

if sys.argv[1] == "serving":
    with serving(command, "^serving") as process_id:
        run(process_id)
else:
    server = VllmServer(Path(told), 0)
    server.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        run(server.process.pid)
    finally:
        server.end()
"""


@pytest.mark.parametrize("kind", ["serving", "vllm"])
def test_a_second_ctrl_c_leaves_no_server_behind_that_does_not_end(kind: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", STUBBORN, kind, str(told)]
    with tool_and_its_server(command) as (tool, server):
        tool.send_signal(signal.SIGINT)
        limit = time.monotonic() + TIMEOUT_S
        while not told.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        tool.send_signal(signal.SIGINT)
        assert tool.wait(TIMEOUT_S) == -signal.SIGINT
        assert not server.is_running()


# ---- benchmarks/gpu.py: its plan, with sections that pretend to measure; its archive; what its sections conclude.


# Each section writes a figure; one then fails, one hangs. `count` has a line for each start.
PROGRAM = """
import json, signal, sys
from pathlib import Path
name, out = sys.argv[sys.argv.index("--child") + 1], Path(sys.argv[sys.argv.index("--out") + 1])
(out / f"{name}.json").write_text(json.dumps({"lines": [{"measure": name, "value": 1.0, "unit": "s"}]}))
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
        monkeypatch.setattr(harness, "query_gpu", lambda _: "another device")
    assert states_of(run) == {}
    assert run_sections(run, ["first"]) == 0
    assert starts(program.parent) == ["first", "first"]


# ---- the archive


def test_the_archive_has_each_package_that_a_gpu_program_imports() -> None:
    """Each import is a module of Python, of this house, of the machine or of the archive."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = [pattern.rstrip("*") for pattern in settings["setuptools"]["packages"]["find"]["include"]]
    ours = [*packages, "benchmarks", "tests", "tools"]
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


# ---- what the sections of benchmarks/gpu.py conclude from what they receive

LLAMA_8B = RANDOM_CONFIGS["llama-3.1-8b"]


def test_a_model_without_weights_has_the_architecture_and_names_each_token(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA_8B)
    assert config_from_hf(json.loads((tmp_path / "config.json").read_text())) == LLAMA_8B
    tokenizer = load_tokenizer(str(tmp_path), own_engine=False)
    assert tokenizer.decode([300, 128_255]) == "<300><128255>"
    assert tokenizer.decode(tokenizer.encode("a byte: ö")) == "a byte: ö"


def test_pieces_of_text_have_times_and_the_server_counts_the_tokens() -> None:
    received = Answer()
    events: list[dict[str, Any]] = [{"choices": [{"text": text}], "usage": None} for text in ("<1>", "", "<2><3>")]
    for at, event in enumerate([*events, {"choices": [], "usage": {"completion_tokens": 3}}]):
        take_event(event, received, float(at))
    assert (received.times, received.num_tokens, received.gaps, received.tpot_s) == ([0.0, 2.0], 3, [2.0], 1.0)
    with pytest.raises(ValueError, match="overloaded"):
        take_event({"error": "overloaded"}, received, 4.0)


@pytest.mark.parametrize(
    ("times", "error", "expected"),
    [
        ([0.5, 0.52, 0.54], "", (True, True)),
        ([0.6, 0.61, 0.62], "", (False, False)),  # a late first token
        ([0.1, 0.2, 0.2], "", (False, False)),  # 50 ms a token
        ([0.1] * 9 + [0.25], "", (True, False)),  # a pause of 150 ms
        ([], "refused", (False, False)),
    ],
)
def test_a_request_is_inside_by_its_first_token_and_its_mean_gap(
    times: list[float], error: str, expected: tuple[bool, bool]
) -> None:
    answer = Answer(times, len(times), error=error)
    assert (is_inside(answer, Limits()), is_inside(answer, Limits(), smooth=True)) == expected


def completion(*places: tuple[int, tuple[int, ...]]) -> Any:
    """`places`: of each token its id, and the ids of the most likely ones."""
    logprobs = [
        SimpleNamespace(token_id=token_id, top=[SimpleNamespace(token_id=other) for other in best])
        for token_id, best in places
    ]
    return SimpleNamespace(logprobs=logprobs)


def test_tokens_may_differ_where_each_pass_has_the_token_of_the_other_among_its_best() -> None:
    first = (7, (7, 8))
    one = completion(first, (1, (1, 2)), (3, (3, 4)))
    assert likeness(one, completion(first, (1, (1, 9)), (3, (3, 5)))) is Likeness.EQUAL
    assert likeness(one, completion(first, (2, (2, 1)), (99, (99, 98)))) is Likeness.ROUNDED
    assert likeness(one, completion(first, (2, (2, 6)), (3, (3, 4)))) is Likeness.WRONG
    assert likeness(one, completion((8, (8, 9)), (1, (1, 2)), (3, (3, 4)))) is Likeness.WRONG
