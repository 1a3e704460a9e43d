"""Plain tensors and DTensors that meet a ShardTensor: replicated on its mesh, and their gradients summed over it."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardtensor_collectives import operator_range
from shardtensor_spec import LayoutMismatchError, ShardTensorSpec, describe_placement

from . import _tensor
from ._layout import replicated_spec
from ._torch_private import direct_apply, make_wrapper
from ._transition import transition

logger = logging.getLogger("shardtensor")


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor that meets a ShardTensor.

    Attributes
    ----------
    DISABLED
        Mixing raises `LayoutMismatchError`.
    WARN
        Promoted, with a logged warning each time.
    SILENT
        Promoted. The default.
    """

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


_default_mode = TensorPromotionMode.SILENT
_mode_in_context: contextvars.ContextVar[TensorPromotionMode | None] = contextvars.ContextVar(
    "shardtensor_promotion_mode", default=None
)


def get_promotion_mode() -> TensorPromotionMode:
    """Return the mode in force in this context."""
    return _mode_in_context.get() or _default_mode


def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
    """Set the mode for all threads; an enclosing `promotion_mode` keeps precedence in its own."""
    global _default_mode
    _default_mode = TensorPromotionMode(mode)


@contextlib.contextmanager
def promotion_mode(mode: TensorPromotionMode | str) -> Iterator[None]:
    """Set the mode inside a ``with`` block, for this thread."""
    token = _mode_in_context.set(TensorPromotionMode(mode))
    try:
        yield
    finally:
        _mode_in_context.reset(token)


class _Promote(torch.autograd.Function):
    """Plain -> replicated. The gradient comes back plain, complete and equal on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: ShardTensorSpec) -> Any:
        return make_wrapper(_tensor.ShardTensor, tensor.detach(), spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor, None]:
        return (_Complete.apply(gradient) if torch.is_grad_enabled() else _complete(gradient)), None


_apply_promote = direct_apply(_Promote)


class _Complete(torch.autograd.Function):
    """ShardTensor -> plain whole tensor, the adjoint of `_Promote`."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        ctx.mesh = tensor._spec.mesh
        return _complete(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Promote.apply(gradient, replicated_spec(gradient, ctx.mesh))


def _complete(tensor: Any) -> torch.Tensor:
    spec = tensor._spec
    with operator_range("promotion backward"):
        return transition(tensor._local_tensor, spec, spec.replicated()).detach()


def check_may_promote(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Honour the promotion mode for one plain tensor.

    Raises
    ------
    LayoutMismatchError
        In mode ``DISABLED``, for tensors of at least one dimension.
    """
    mode = get_promotion_mode()
    if mode is TensorPromotionMode.SILENT or tensor.ndim == 0:
        return
    if mode is TensorPromotionMode.DISABLED:
        raise LayoutMismatchError(
            f"a plain tensor of shape {tuple(tensor.shape)} meets a ShardTensor, and promotion is disabled",
            advice="replicate it with ShardTensor.from_local(tensor, mesh), or set_promotion_mode('silent')",
        )
    logger.warning("plain tensor of shape %s is replicated on the mesh %s", tuple(tensor.shape), mesh)


def promote(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Turn one plain tensor or DTensor into a ShardTensor on a mesh.

    Parameters
    ----------
    tensor : Tensor
        Plain tensor, the same on all ranks, or DTensor on the same mesh.
    mesh : DeviceMesh
        The mesh of the ShardTensor that it meets.

    Raises
    ------
    LayoutMismatchError
        If promotion is disabled, or a DTensor lives on another mesh.

    Notes
    -----
    Communication: none; in backward one all-reduce of the gradient over the axes where it is pending.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise LayoutMismatchError(
                f"a DTensor on the mesh {tensor.device_mesh} meets a ShardTensor on the mesh {mesh}",
                inputs=[f"{tuple(tensor.shape)}  {'; '.join(map(describe_placement, tensor.placements))}"],
                advice="redistribute one of them to the mesh of the other (full_tensor() and from_local())",
            )
        return _tensor.ShardTensor.from_dtensor(tensor)
    check_may_promote(tensor, mesh)
    spec = replicated_spec(tensor, mesh)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _apply_promote(tensor, spec)
    return make_wrapper(_tensor.ShardTensor, tensor.detach(), spec, requires_grad=False)


def promote_all(value: Any, mesh: DeviceMesh) -> Any:
    """Promote every plain tensor and DTensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, _tensor.ShardTensor) else promote(value, mesh)
    if isinstance(value, (list, tuple)):
        promoted = [promote_all(item, mesh) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*promoted) if hasattr(value, "_fields") else type(value)(promoted)
    if isinstance(value, dict):
        return {key: promote_all(item, mesh) for key, item in value.items()}
    return value
