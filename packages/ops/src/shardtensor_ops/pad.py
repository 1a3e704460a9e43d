"""``torch.nn.functional.pad`` in every mode, along sharded dims and others; negative padding crops.

New rows belong to the rank that has the row at the edge, so constant and replicated padding need no communication: the
first and the last rank pad, the others don't. Reflected and circular rows are fetched where their rank does not have
them. The backward of every mode sends gradients the same way back and adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor import ShardTensor
from shardtensor_spec import ShardTensorSpec, on_new_world

from ._linear import LinearOperator, brought_to
from ._meta import meta_like, meta_of_call
from ._supported import supported_layout
from ._window import DimWindows, Rows, Window, dim_windows, own_rows, shard_of, split_of, window_of, with_sizes


@dataclass(frozen=True)
class _LocalPad:
    """What a rank does, once its window is there.

    Attributes
    ----------
    window : Window or None
        What is padded in place of the shard.
    pad : tuple of int
        Rows to add on this rank (negative: to cut off), in the order of ``F.pad``.
    picked : tuple of (dim, rows)
        Dims of which the window's rows are picked one by one.
    mode : str
        As in ``F.pad``.
    shape, window_shape : tuple of int
        Shape of this rank's result and of its window.
    """

    window: Window | None
    pad: tuple[int, ...]
    picked: tuple[tuple[int, tuple[int, ...]], ...]
    mode: str
    shape: tuple[int, ...]
    window_shape: tuple[int, ...]

    def forward(self, local: torch.Tensor, value: float = 0) -> torch.Tensor:
        window = local if self.window is None else self.window.fill(local)
        if 0 in self.shape:
            return local.new_empty(self.shape)
        result = window
        for dim, rows in self.picked:
            result = result.index_select(dim, torch.tensor(rows, device=local.device))
        if any(self.pad):
            result = F.pad(result, self.pad, self.mode, value if self.mode == "constant" else None)
        # What was padded may be written to: it is never the shard itself.
        return result.clone() if self.window is None or self.window.view is not None else result

    def adjoint(self, gradient: torch.Tensor) -> torch.Tensor:
        if 0 in self.shape:
            window = gradient.new_zeros(self.window_shape)
        else:
            window = self._adjoint_of_pad(gradient)
            for dim, rows in reversed(self.picked):
                shape = list(window.shape)
                shape[dim] = self.window_shape[dim]
                index = torch.tensor(rows, device=gradient.device)
                window = window.new_zeros(shape).index_add_(dim, index, window)
        return window if self.window is None else self.window.give_back(window)

    def _adjoint_of_pad(self, gradient: torch.Tensor) -> torch.Tensor:
        if not any(self.pad):
            return gradient
        if self.mode == "constant":
            return F.pad(gradient, tuple(-n for n in self.pad))
        name = {"replicate": "replication", "reflect": "reflection"}[self.mode]
        n_dims = len(self.pad) // 2
        backward = getattr(torch.ops.aten, f"{name}_pad{n_dims}d_backward")
        shape = list(gradient.shape)
        for position in range(n_dims):
            shape[-1 - position] -= self.pad[2 * position] + self.pad[2 * position + 1]
        # Only the shape of the input matters.
        result: torch.Tensor = backward(gradient.contiguous(), gradient.new_empty(()).expand(shape), self.pad)
        return result


@dataclass(frozen=True, eq=False)
class _Padding(LinearOperator):
    """Padding with zeros, or with the tensor's own rows."""

    local: _LocalPad = field(kw_only=True)


@functools.lru_cache(maxsize=1024)
def _plan(spec: ShardTensorSpec, pad: tuple[int, ...], mode: str) -> _Padding:
    meta = meta_of_call(F.pad, meta_like(spec), pad, mode)
    n_dims = len(meta.shape)
    local_pad = list(pad)
    windows: dict[int, DimWindows] = {}
    picked = []
    sizes = {}
    for position in range(len(pad) // 2):
        dim = n_dims - 1 - position
        front, back = pad[2 * position : 2 * position + 2]
        if not (front or back) or (dim not in spec.grid and mode != "circular"):
            continue
        found = _dim_windows(spec, dim, meta.shape[dim], front, mode)
        sizes[dim] = found.sizes
        shard = shard_of(spec, dim)
        first, n_rows = found.start(shard), found.sizes[shard]
        (own_start, own_stop), (start, stop) = own_rows(spec, dim)[shard], found.rows[shard]
        is_native = mode in ("constant", "replicate")
        if mode == "reflect" and (start, stop) == (own_start, own_stop):
            is_native = True  # what is mirrored lies in the shard
        if not is_native:
            local_pad[2 * position : 2 * position + 2] = [0, 0]
        elif n_rows:
            local_pad[2 * position : 2 * position + 2] = [
                own_start - (first - front),
                first + n_rows - front - own_stop,
            ]
        if mode == "reflect" and not is_native:
            mirrored = [_mirrored(row - front, split_of(spec, dim).extent) for row in range(first, first + n_rows)]
            picked.append((dim, tuple(row - start for row in mirrored)))
        if mode in ("circular", "reflect"):
            windows[dim] = found
    window = None
    if windows:
        circular = tuple(windows) if mode == "circular" else ()
        window = window_of(spec, tuple((dim, found.rows) for dim, found in windows.items()), circular)
        if window.is_own and mode == "reflect":
            window = None
    result = with_sizes(spec, meta, sizes)
    window_shape = tuple(spec.local_shape) if window is None else window.plan.window_shape
    local = _LocalPad(window, tuple(local_pad), tuple(picked), mode, tuple(result.local_shape), window_shape)
    return _Padding("pad", spec, result, local.forward, local.adjoint, local=local)


def _dim_windows(spec: ShardTensorSpec, dim: int, n_output: int, front: int, mode: str) -> DimWindows:
    n_input = split_of(spec, dim).extent

    def needed(first: int, last: int) -> Rows:
        if mode == "circular":
            return first - front, last - front + 1
        rows = [_mirrored(row - front, n_input) for row in range(first, last + 1)]
        return min(rows), max(rows) + 1

    sizes = split_of(spec, dim).sizes
    if mode in ("constant", "replicate"):  # every rank works on its own rows
        return dim_windows(sizes, n_output, lambda row: row - front, lambda first, last: (0, 0))
    return dim_windows(sizes, n_output, lambda row: row - front, needed)


def _mirrored(row: int, n_rows: int) -> int:
    """The row inside that a row outside mirrors; the edge itself is not repeated."""
    if row < 0:
        return -row
    return 2 * (n_rows - 1) - row if row >= n_rows else row


def _handle(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        pads = tuple(int(n) for n in pad)
        if mode == "circular" and min(pads, default=0) < 0:
            # torch crops first, so that what is cut off is not repeated either.
            meta_of_call(F.pad, meta_like(input._spec), pads, mode)
            input, pads = call(input, [min(n, 0) for n in pads]), tuple(max(n, 0) for n in pads)
        n_dims = len(input._spec.tensor_meta.shape)
        padded = tuple(range(max(n_dims - len(pads) // 2, 0), n_dims))
        source = supported_layout(input._spec, "pad", unfolded=padded)
        operator = _plan(source, pads, mode)
        if value is not None and mode != "constant":
            meta_of_call(F.pad, meta_like(source), pads, mode, value)  # which raises torch's own error
        if value:
            local = operator.local
            operator = replace(operator, forward=lambda tensor: local.forward(tensor, value), derivative=operator)
        return operator(brought_to(input, source))

    return call(*args, **kwargs)


def _handle_constant(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``torch.constant_pad_nd``."""

    def call(input: Any, pad: Any, value: float = 0) -> Any:
        return _handle(F.pad, (), (input, pad, "constant", value), {})

    return call(*args, **kwargs)


ShardTensor.register_function_handler(F.pad, _handle)
ShardTensor.register_function_handler(torch.constant_pad_nd, _handle_constant)
on_new_world(_plan.cache_clear)
