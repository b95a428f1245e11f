"""Faults of a device: memory that is missing, an illegal access, and a peer that is killed while we read its pool.

    out of memory     one prompt of a step is too large: its sequence fails, typed, and its neighbours lose no token
    illegal access    the runner raises DeviceLost, which ends the process; the pool of another process stays intact
    killed peer       the read ends, the blocks that it does not write stay intact, and our device goes on

The first two run in processes of their own, because an illegal access ends all work of a process on the device.
A rehearsal injects the exceptions of torch.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch

from benchmarks.child_process import ChildProcess
from benchmarks.gpu_sections.driver import RunnerDriver, build, random_prompt, request
from benchmarks.gpu_sections.harness import ROOT
from benchmarks.gpu_sections.owner_process import Owner
from benchmarks.gpu_sections.pool_end import SEED, PoolEnd, random_bytes
from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from core.errors import DeviceLost, OutOfDeviceMemory, TransportError
from engine.gpu.runner import GpuRunner
from engine.runner import StepLimits
from kv_transfer.device.device_memory import Copy

MODEL, NUM_OUTPUT, NUM_NEIGHBOURS = "random:smollm2-135m", 24, 4
BIG_PROMPT, ROOM_BYTES = 8000, 48 << 20  # its activations need more than this
NOWHERE = 1 << 20  # an address that no allocation holds
NUM_BLOCKS = 256
KILLED_READ_S = 10.0
CASE_S = 6.0


def run(section: Section) -> None:
    for name, check in (("out of memory", out_of_memory), ("illegal access", illegal_access), ("peer", killed_peer)):
        if section.has_time_for(CASE_S if not section.rehearse else 0, name):
            with section.case(name):
                check(section)


def out_of_memory(section: Section) -> None:
    found = ask_child(section, "out_of_memory")
    failed = found["failed"].get("big", "nothing")
    section.add(Line(f"out of memory: sequences that fail (with {failed})", len(found["failed"]), "", least=1))
    measure = f"out of memory: tokens of {NUM_NEIGHBOURS} neighbours that differ"
    section.add(Line(measure, found["differing"], "", most=0))
    section.add(Line("out of memory: tokens of the same prompt once there is memory", found["later"], "", least=1))


def illegal_access(section: Section) -> None:
    end = PoolEnd(8 if section.rehearse else NUM_BLOCKS, section.rehearse, SEED)
    found = ask_child(section, "illegal_access")
    section.add(
        Line(f"illegal access: steps that raise DeviceLost (raised: {found['raised']})", found["lost"], "", least=1)
    )
    differing = int((end.bytes != random_bytes(end.bytes.numel(), end.bytes.device, SEED)).sum())
    section.add(Line("illegal access: bytes of another process that differ", differing, "", most=0))


def killed_peer(section: Section) -> None:
    """Reads into the first half of our pool go on while the owner is killed."""
    num_blocks = 8 if section.rehearse else NUM_BLOCKS
    end = PoolEnd(num_blocks, section.rehearse, SEED + 1)
    before = end.bytes.clone()
    owner = Owner("pool", section.rehearse, {"num_blocks": num_blocks})
    base = end.memory.map(base64.b64decode(owner.ask({"do": "export"})["handle"]))
    half = num_blocks // 2 * end.layout.block_bytes
    ended = killed = 0
    deadline = time.monotonic() + KILLED_READ_S
    try:
        for number in range(20):
            handle = end.memory.start_copies([Copy(base, end.address(), half)])
            if number == 5:
                os.kill(owner.process_id, signal.SIGKILL)
                killed = 1
            while not end.memory.has_ended(handle):
                assert time.monotonic() < deadline, "a read from a killed peer does not end"
            ended += 1
        end.memory.unmap(base)
    except TransportError as error:
        section.note(f"a read from a killed peer: {error}")
    owner.stop()
    assert killed, "the owner was not killed during a read"
    section.add(Line("killed peer: reads that end, of 20", ended, ""))
    differing = int((end.bytes[half:] != before[half:]).sum())
    section.add(Line("killed peer: bytes beside the read that differ", differing, "", most=0))
    end.copy(end.address(), [(num_blocks // 2, 0, 1)])
    size = end.layout.block_bytes
    same = torch.equal(end.bytes[:size], end.bytes[half : half + size])
    section.add(Line("killed peer: later copies on the device that are right, of 1", int(same), "", least=1))


def ask_child(section: Section, fault: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_sections.faults", fault, str(int(section.rehearse))]
    child = ChildProcess(fault, command, {"PYTHONPATH": str(ROOT)}, ROOT)
    try:
        found: dict[str, Any] = child.answer()
    finally:
        child.stop()
    return found


# ---- the processes


def child_out_of_memory(section: Section) -> dict[str, Any]:
    limits = StepLimits(max_running=8, max_batched_tokens=64 if section.rehearse else 8192)
    options: dict[str, Any] = {} if section.rehearse else {"model": MODEL, "kv_memory_mb": 1024}
    runner = build(section, limits, **options)
    big = random_prompt(50 if section.rehearse else BIG_PROMPT, runner.info.vocab_size, 0)
    expected = with_neighbours(RunnerDriver(runner, limits), [])
    driver = RunnerDriver(runner, limits)
    end_shortage = begin_shortage(runner, section)
    found = with_neighbours(driver, list(big))
    end_shortage()
    differing = sum(a != b for name in expected for a, b in zip(found[name], expected[name], strict=True))
    later = RunnerDriver(runner, limits)
    later.add(request("later", big, max_tokens=2))
    failed = {name: type(error).__name__ for name, error in driver.failed.items()}
    assert all(isinstance(error, OutOfDeviceMemory) for error in driver.failed.values()), failed
    return {"failed": failed, "differing": differing, "later": len(later.run()["later"])}


def with_neighbours(driver: RunnerDriver, big: list[int]) -> dict[str, list[int]]:
    """Some sequences in decode, and a prompt that joins them."""
    draw = random.Random(0)
    for name in map(str, range(NUM_NEIGHBOURS)):
        driver.add(request(name, [draw.randint(3, 250) for _ in range(9)], max_tokens=NUM_OUTPUT))
    driver.run(num_steps=4)
    if big:
        driver.add(request("big", big, max_tokens=2))
    return dict(driver.run())


def begin_shortage(runner: GpuRunner, section: Section) -> Any:
    """Leave too little memory for a large prompt. Returns a function that ends the shortage."""
    if section.rehearse:
        computer: Any = runner._open()
        launch = computer.launch

        def refuse(staged: Any, *others: Any) -> Any:
            if staged.sizes[0] >= 50:
                raise torch.OutOfMemoryError("CUDA out of memory, injected")
            return launch(staged, *others)

        computer.launch = refuse
        return lambda: setattr(computer, "launch", launch)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + ROOM_BYTES) / total, 0)
    return lambda: torch.cuda.set_per_process_memory_fraction(1.0, 0)


def child_illegal_access(section: Section) -> dict[str, Any]:
    limits = StepLimits(max_running=8, max_batched_tokens=64)
    options: dict[str, Any] = {} if section.rehearse else {"model": "random:llama3-tiny", "kv_memory_mb": 64}
    runner = build(section, limits, **options)
    driver = RunnerDriver(runner, limits)
    driver.add(request("a", random_prompt(20, runner.info.vocab_size, 0), max_tokens=1000))
    driver.run(num_steps=4)
    if section.rehearse:

        def fail(*_: Any) -> Any:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered, injected")

        setattr(runner._open(), "launch", fail)  # noqa: B010 (mypy forbids the assignment)
    else:
        memory = runner.device_memory()
        with contextlib.suppress(TransportError):  # the error may appear here already
            memory.start_copies([Copy(NOWHERE, runner.pool_address(), 1 << 20)])
    try:
        driver.run(num_steps=20)
    except DeviceLost as error:
        return {"lost": 1, "raised": str(error)}
    except Exception as error:  # noqa: BLE001 (reported)
        return {"lost": 0, "raised": f"{type(error).__name__}: {error}"}
    return {"lost": 0, "raised": "nothing"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    section = Section(60.0, bool(int(sys.argv[2])), sys.stderr)
    children = {"out_of_memory": child_out_of_memory, "illegal_access": child_illegal_access}
    print(json.dumps(children[sys.argv[1]](section)), file=answers)
    answers.flush()
    os._exit(0)  # a lost device may hang the end of the process


if __name__ == "__main__":
    main()
