"""A CUDA graph without CUDA: `CpuGraph` holds a computation to the rules of a graph, and replays it.

    rule of a graph                                  check of `CpuGraph`
    only kernels; the host reads nothing             an operator that is not in ALLOWED is refused at capture
    each replay uses the addresses of the capture    a replay computes into the tensors of the capture
    nothing else is kept alive by the graph          other tensors are held weakly; a replay fails if one is gone
    memory of a graph holds nothing between replays  every tensor of the capture is poisoned before each replay

A tensor is of the capture if an operator of the capture allocated it. All others are static: weights, tables, the pool
and the buffers of inputs and results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operators without a synchronisation, whose memory and launches do not depend on values. tandem:: are our own.
_NAMES = """
_reshape_alias _scaled_mm _scaled_mm_v2 _to_copy _unsafe_view add add_ addmm alias as_strided cat chunk clamp clamp_min
clone contiguous copy_ detach embedding expand fill_ flatten ge gt index_select linear lt matmul
mean mm mul mul_ narrow pow reshape rms_norm _fused_rms_norm rsqrt select sigmoid
silu slice split split_with_sizes squeeze sub t to transpose unsqueeze view where zero_ zeros zeros_like
"""
_WITHOUT_CONTENTS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
ALLOWED = _WITHOUT_CONTENTS | {f"aten::{name}" for name in _NAMES.split()}
_OWN = "tandem::"


class NotCapturable(AssertionError):
    """The computation cannot be captured in a graph."""


class _OperatorCall:
    """One operator of the capture. Static tensors are held weakly."""

    def __init__(self, function: Any, inputs: tuple[Any, dict[str, Any]], outputs: list[torch.Tensor]) -> None:
        self.function = function
        self.inputs = inputs
        self.outputs = outputs  # tensors that the operator allocated

    def run(self) -> None:
        args, kwargs = tree_map(_alive, self.inputs)
        found = tree_leaves(self.function(*args, **kwargs)) if self.outputs else []
        if not self.outputs:
            self.function(*args, **kwargs)
        for target, source in zip(self.outputs, found, strict=True):
            target.copy_(source)


class _Static:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)


def _alive(value: Any) -> Any:
    if not isinstance(value, _Static):
        return value
    tensor = value.tensor()
    if tensor is None:
        raise NotCapturable("a graph reads a tensor that is gone")
    return tensor


class CpuGraph(TorchDispatchMode):
    """Captures what `compute` does, and replays it. `result` has the tensors that `compute` returned."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._calls: list[_OperatorCall] = []
        self._captured: dict[int, torch.Tensor] = {}  # every result of an operator, by the id of the object
        self._allocated: dict[int, torch.Tensor] = {}  # by the address of the memory
        with self:
            self.result = compute()

    def replay(self) -> None:
        for tensor in self._allocated.values():
            poison(tensor)
        for call in self._calls:
            call.run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in ALLOWED and not name.startswith(_OWN):
            raise NotCapturable(f"a graph must not hold {func.name()}")
        inputs = (args, kwargs or {})
        result = func(*args, **inputs[1])
        given = {_address(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor for tensor in made if _address(tensor) not in given]
        # A replay finds views as they are, and has nothing to compute for memory without contents.
        if name not in _WITHOUT_CONTENTS and (fresh or func._schema.is_mutable):
            assert not fresh or len(fresh) == len(made), f"{func.name()} returns new tensors and views"
            self._calls.append(_OperatorCall(func, tree_map(self._weakly, inputs), fresh))
        for tensor in made:
            self._captured[id(tensor)] = tensor
        for tensor in fresh:
            self._allocated[_address(tensor)] = tensor
        return result

    def _weakly(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in self._captured:
            return _Static(value)
        return value


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, or with numbers that are no place in anything."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
