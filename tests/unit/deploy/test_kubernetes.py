"""deploy/kubernetes without a cluster: every field is known, its numbers agree, and its commands do what they say."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

from cli.config_file import load_config
from core.config import RouterConfig, TandemConfig
from tests.support.commands_of_docs import check_command
from tests.support.kuberay_schema import RAY_CLUSTER
from tests.support.kubernetes import OVERLAYS, RayPod, Resource, copy_with_tokens, one, pods, render, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "kubectl is there")

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ("1.31", kubernetes_validate.latest_version())
LAST_WORDS_S = 10  # from the end of a drain to the end of the last process


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Resource]]:
    folder = copy_with_tokens(tmp_path_factory.mktemp("deploy"))
    return cache(lambda overlay: render(folder, overlay))


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest, rendered: Callable[[str], list[Resource]]) -> list[Resource]:
    return rendered(request.param)


def config_of(resources: list[Resource], folder: Path) -> TandemConfig:
    path = folder / "tandem.toml"
    path.write_text(one(resources, "ConfigMap")["data"]["tandem.toml"], encoding="utf-8")
    return load_config(path, {})


def check(resources: list[Resource], version: str = KUBERNETES[-1]) -> None:
    """Raises `jsonschema.ValidationError` for a field that neither Kubernetes nor KubeRay knows."""
    for resource in resources:
        if resource["kind"] == "RayCluster":
            jsonschema.validate(resource, RAY_CLUSTER)
            for pod in pods(resource):
                kubernetes_validate.validate(pod.as_pod(), version, strict=True)
        else:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_and_kuberay_know_every_field(resources: list[Resource], version: str) -> None:
    kinds = [resource["kind"] for resource in resources]
    assert set(kinds) == {"ConfigMap", "Secret", "Service", "PodDisruptionBudget", "NetworkPolicy", "RayCluster"}
    check(resources, version)


MISSPELT = (
    "rayVersions headGroupSpec.templates workerGroupSpecs.1.minReplica autoscalerOptions.idleTimeoutSecond "
    "workerGroupSpecs.0.template.spec.terminationGracePeriodSecond "
    "headGroupSpec.template.spec.containers.0.readynessProbe"
)


@pytest.mark.parametrize("path", MISSPELT.split())
def test_a_misspelt_field_is_found(rendered: Callable[[str], list[Resource]], path: str) -> None:
    cluster = one(copy.deepcopy(rendered("autoscaling")), "RayCluster")
    *outer, name = path.split(".")
    place = cluster["spec"]
    for step in outer:
        place = place[int(step) if step.isdigit() else step]
    place[name] = 1
    with pytest.raises(jsonschema.ValidationError, match=name):
        check([cluster])


def test_without_tokens_nothing_is_rendered(tmp_path: Path) -> None:
    folder = copy_with_tokens(tmp_path)
    (folder / "base/tokens/ray").unlink()
    with pytest.raises(ValueError, match="tokens/ray"):
        render(folder, "cpu")


def test_the_config_agrees_with_the_ports_and_the_places(resources: list[Resource], tmp_path: Path) -> None:
    config, cluster = config_of(resources, tmp_path), one(resources, "RayCluster")
    head, *groups = pods(cluster)
    ports = {port["name"]: port["containerPort"] for port in head.container["ports"]}
    numbers = config.router.port, config.gateway.port, config.telemetry.metrics_port
    listening = dict(zip(("grpc", "http", "tandem-metrics"), numbers, strict=True))
    assert ports == listening | {"gcs-server": 6379}
    assert {each["targetPort"]: each["port"] for each in one(resources, "Service")["spec"]["ports"]} == listening
    assert config.router.host == config.gateway.host == "0.0.0.0"
    sizes = config.cluster.num_prefill, config.cluster.num_decode
    assert [(pod.group, pod.replicas) for pod in groups] == [("prefill", sizes[0]), ("decode", sizes[1])]


def test_ray_reads_the_places_of_each_group(resources: list[Resource]) -> None:
    """As Ray's autoscaler reads them: one place for one worker of Tandem, and one GPU where the config wants GPUs."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    types = _derive_autoscaling_config_from_ray_cr(one(resources, "RayCluster"))["available_node_types"]
    gpus = 'device = "cuda"' in one(resources, "ConfigMap")["data"]["tandem.toml"]
    for role in ("prefill", "decode"):
        found = types[role]["resources"]
        assert found.pop("memory") > 2**30
        assert found == {"CPU": 0, role: 1} | ({"GPU": 1} if gpus else {})
        assert types[role]["min_workers"] >= 1
    assert not {"prefill", "decode"} & types["headgroup"]["resources"].keys()


def test_the_autoscaling_overlay_lets_groups_grow(rendered: Callable[[str], list[Resource]]) -> None:
    cluster = one(rendered("autoscaling"), "RayCluster")["spec"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert all(group["minReplicas"] < group["maxReplicas"] for group in cluster["workerGroupSpecs"])
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert all(each in head["env"] for each in cluster["autoscalerOptions"]["env"]), "it joins with the same token"


def test_the_grace_of_a_pod_exceeds_its_drain(resources: list[Resource], tmp_path: Path) -> None:
    config = config_of(resources, tmp_path)
    head, *groups = pods(one(resources, "RayCluster"))
    for pod in groups:
        drain_s = float(pod.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert pod.spec["terminationGracePeriodSeconds"] >= drain_s + LAST_WORDS_S
        assert drain_s > config.worker.drain_timeout_s
    limit_s = config.router.drain_timeout_s + 2 * LAST_WORDS_S
    assert head.spec["terminationGracePeriodSeconds"] >= limit_s


def test_the_cluster_has_the_version_of_ray_that_is_pinned(resources: list[Resource]) -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert one(resources, "RayCluster")["spec"]["rayVersion"] == pinned[1]


def test_one_image_runs_everywhere_and_every_container_has_its_own_probes(resources: list[Resource]) -> None:
    found = list(pods(one(resources, "RayCluster")))
    assert len({pod.container["image"] for pod in found}) == 1
    for pod in found:
        ports = {port["name"] for port in pod.container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = pod.container[probe]
            assert asked.get("grpc") == {"port": RouterConfig().port} or asked["tcpSocket"]["port"] in ports
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_every_selector_finds_pods_and_every_budget_lets_a_pool_drain(resources: list[Resource]) -> None:
    found = list(pods(one(resources, "RayCluster")))

    def selected(labels: dict[str, str]) -> list[RayPod]:
        chosen = [pod for pod in found if labels.items() <= pod.labels.items()]
        assert chosen, labels
        return chosen

    (head,) = selected(one(resources, "Service")["spec"]["selector"])
    assert head.group == "headgroup"
    for resource in resources:
        if resource["kind"] == "NetworkPolicy":
            selected(resource["spec"]["podSelector"]["matchLabels"])
        if resource["kind"] == "PodDisruptionBudget":
            (pod,) = selected(resource["spec"]["selector"]["matchLabels"])
            assert set(resource["spec"]) == {"minAvailable", "selector"}, "maxUnavailable needs a scale subresource"
            left = pod.replicas - resource["spec"]["minAvailable"]
            assert left == (0 if pod is head else 1)


def run_container(pod: RayPod, folder: Path) -> list[list[str]]:
    """Run the command of the first container with programs that note their arguments; returns those, in order."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("ray", "tandem"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" $$ >>"$NOTES"; echo >>"$NOTES"\n')
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "POD_IP": "10.1.2.3",
        "KUBERAY_GEN_RAY_START_CMD": pod.start_command,
    }
    process = subprocess.Popen([*pod.container["command"], *pod.container["args"]], env=environment)
    assert process.wait(20) == 0
    notes = [line.split("\0")[:-1] for line in (folder / "notes").read_text().splitlines()]
    assert notes[-1][-1] == str(process.pid), "the last program is the first process, which Kubernetes sends SIGTERM"
    return [note[:-1] for note in notes]


def test_the_head_starts_ray_and_becomes_tandem_serve(resources: list[Resource], tmp_path: Path) -> None:
    head, *_ = pods(one(resources, "RayCluster"))
    ray, tandem = run_container(head, tmp_path)
    assert ray[:3] == ["ray", "start", "--head"]
    assert "--block" not in ray
    assert tandem == ["tandem", "serve", "--config", "/etc/tandem/tandem.toml", "--address", "10.1.2.3:6379"]
    check_command(ray)
    check_command(tandem)


@pytest.mark.parametrize("number", [1, 2], ids=["prefill", "decode"])
def test_a_worker_pod_becomes_ray_with_a_place(resources: list[Resource], tmp_path: Path, number: int) -> None:
    pod = list(pods(one(resources, "RayCluster")))[number]
    (ray,) = run_container(pod, tmp_path)
    assert "--block" in ray
    assert f'--resources={{"{pod.group}": 1}}' in ray
    assert not any("dashboard" in option for option in ray), "Ray refuses it without --head"
    check_command(ray)
