"""deploy/kubernetes as `kubectl kustomize` renders it, and the pods that KubeRay would make of it."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu", "autoscaling")
OLDEST_KUSTOMIZE = 5  # older ones know no `labels` of a kustomization
_HEAD_GROUP = "headgroup"

Resource = dict[str, Any]


def why_not() -> str:
    """Why overlays cannot be rendered here; empty if they can."""
    if shutil.which("kubectl") is None:
        return "kubectl not installed"
    version = json.loads(_kubectl("version", "--client", "--output", "json").stdout)["kustomizeVersion"]
    too_old = int(version.lstrip("v").partition(".")[0]) < OLDEST_KUSTOMIZE
    return f"kubectl is too old: it has kustomize {version}" if too_old else ""


def _kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("kubectl", *arguments), capture_output=True, text=True, timeout=60, check=False)


def copy_with_tokens(folder: Path) -> Path:
    """A copy of deploy/kubernetes in `folder`, with the tokens that an operator makes."""
    copied = shutil.copytree(FOLDER, folder / "kubernetes", ignore=shutil.ignore_patterns("tokens"))
    (copied / "base/tokens").mkdir()
    for name in ("ray", "fleet"):
        (copied / "base/tokens" / name).write_text(secrets.token_hex(32))
    return copied


def render(kubernetes: Path, overlay: str) -> list[Resource]:
    """Raises `ValueError` with the words of kustomize."""
    done = _kubectl("kustomize", str(kubernetes / "overlays" / overlay))
    if done.returncode:
        raise ValueError(done.stderr)
    return list(yaml.safe_load_all(done.stdout))


def one(resources: list[Resource], kind: str) -> Resource:
    (found,) = (resource for resource in resources if resource["kind"] == kind)
    return found


@dataclass(frozen=True, slots=True)
class RayPod:
    """A pod of a group of a RayCluster."""

    group: str
    replicas: int
    start_params: dict[str, str]
    spec: Resource
    labels: dict[str, str]

    @property
    def container(self) -> Resource:
        first: Resource = self.spec["containers"][0]
        return first

    @property
    def environment(self) -> dict[str, str]:
        """Of the first container, variables with a fixed value only."""
        return {each["name"]: each["value"] for each in self.container["env"] if "value" in each}

    @property
    def start_command(self) -> str:
        """As KubeRay writes KUBERAY_GEN_RAY_START_CMD: rayStartParams for a shell, always with --block."""
        head = self.group == _HEAD_GROUP
        params = {**self.start_params, "block": "true"} | ({} if head else {"address": "head.svc:6379"})
        options = (f" --{name} " if value == "true" else f" --{name}={value} " for name, value in params.items())
        return f"ray start {'--head ' if head else ''}{''.join(options)}"

    def as_pod(self) -> Resource:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": self.labels}, "spec": self.spec}


def pods(cluster: Resource) -> Iterator[RayPod]:
    """One pod of each group, the head first, with the labels that KubeRay sets."""
    head = {**cluster["spec"]["headGroupSpec"], "groupName": _HEAD_GROUP, "replicas": 1}
    for group in (head, *cluster["spec"]["workerGroupSpecs"]):
        labels = {
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/node-type": "head" if group is head else "worker",
            "ray.io/group": group["groupName"],
        }
        yield RayPod(group["groupName"], group["replicas"], group["rayStartParams"], group["template"]["spec"], labels)
