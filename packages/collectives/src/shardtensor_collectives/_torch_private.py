"""Every private torch name that this package uses; ``tests/test_torch_private.py`` fails loudly when one moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["all_gather_single", "functional_collectives", "is_traced", "reduce_scatter_single", "resolved"]

# Public, but renamed: the old names warn on torch 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TRACED_TENSORS = (FakeTensor, FunctionalTensor)
_TRACING_MODES = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` is being recorded into a graph instead of run.

    AOTAutograd traces a tensor subclass by calling its ``__torch_dispatch__`` on fake or functional tensors, where
    ``torch.compiler.is_compiling()`` may be false.
    """
    if torch.compiler.is_compiling():
        return True
    if isinstance(tensor, _TRACED_TENSORS):
        return True
    if _len_torch_dispatch_stack() == 0:
        return False
    return any(isinstance(mode, _TRACING_MODES) for mode in _get_current_dispatch_mode_stack())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective, whether it is traced or not."""
    if isinstance(tensor, functional_collectives.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor
