"""Why `[vllm]` offers no offloading of vLLM's (docs/vllm.md): a version that could fails here."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from cli.diagnosis.vllm_environment import python_of, variables
from core.config import VllmConfig
from tests.support.service_process import ROOT
from tests.support.vllm_fleet import require_vllm


@pytest.mark.timeout(300)
def test_this_vllm_cannot_offload_beside_a_connector_of_hand_offs() -> None:
    require_vllm()
    python = python_of(VllmConfig())
    done = subprocess.run(
        [str(python), "-m", "tests.support.vllm_offloading"],
        cwd=ROOT, env=os.environ | variables(python), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alone"] == "OffloadingConnector", "the connector of hand-offs is gone, without a word"
    assert "only supported on CUDA-alike and XPU GPUs" in found["caches"]["OffloadingConnector"]
    assert "priority_range" in found["caches"]["SimpleCPUOffloadConnector"], "no stream of CUDA"
    assert "VerifiedConnector" in found["statistics"]
