"""KubeRay's RayCluster (ray.io/v1) as a JSON schema that knows no other field.

Written by hand from the types of KubeRay's API, because no package carries its CRD. The schema omits the fields that
have no place in deploy/kubernetes (`headService`, `numOfHosts`, `scaleStrategy`, ...). Pod templates are those of
Kubernetes: `pods` in tests/support/kubernetes.py takes them out for `kubernetes-validate`.
"""

from __future__ import annotations

from typing import Any

_COUNT = {"type": "integer", "minimum": 0}
_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}


def _only(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEMPLATE = _only(("spec",), metadata={"type": "object"}, spec={"type": "object"})
_HEAD = _only(
    ("rayStartParams", "template"),
    rayStartParams=_WORDS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    template=_TEMPLATE,
)
_GROUP = _only(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName={"type": "string"},
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    idleTimeoutSeconds=_COUNT,
    suspend={"type": "boolean"},
    rayStartParams=_WORDS,
    template=_TEMPLATE,
)
_AUTOSCALER = _only(
    (),
    version={"enum": ["v1", "v2"]},
    idleTimeoutSeconds=_COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    image={"type": "string"},
    env={"type": "array"},
    resources={"type": "object"},
)
RAY_CLUSTER = _only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=_only(("name",), name={"type": "string"}, namespace={"type": "string"}, labels=_WORDS, annotations=_WORDS),
    spec=_only(
        ("headGroupSpec", "workerGroupSpecs"),
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_AUTOSCALER,
        suspend={"type": "boolean"},
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _GROUP},
    ),
)
