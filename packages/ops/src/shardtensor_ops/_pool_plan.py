"""What every rank does in a pooling, from the layouts alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor_spec import ShardTensorSpec, on_new_world

from ._meta import meta_like, metas_of_call
from ._naming import shape_of
from ._window import Rows, Window, dim_windows, is_alone, own_rows, shard_of, split_of, window_of, with_sizes


@dataclass(frozen=True)
class PoolingPlan:
    """A pooling on one layout.

    Attributes
    ----------
    n_spatial : int
        Number of pooled dims, the last ones.
    source, result : ShardTensorSpec
        Layouts of input and result.
    window : Window or None
        What is pooled in place of the shard.
    kernel, stride, padding, dilation : tuple of int, (n_spatial,)
        For the call on this rank: a window brings its own padding.
    ceil_mode : bool
        As torch takes it.
    window_shape, window_start : tuple of int, (n_spatial,)
        Rows of the window, and the global coordinates of its first element.
    shape : tuple of int
        Shape of this rank's result.
    counts : tuple of tuple of int, (n_spatial, n_local)
        For an average, the rows that each output row of this rank averages over along each dim; their product is the
        divisor.
    output_size : tuple of int, (n_spatial,), optional
        For an adaptive pooling of whole dims, which has no kernel.
    """

    n_spatial: int
    source: ShardTensorSpec
    result: ShardTensorSpec
    window: Window | None
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool
    window_shape: tuple[int, ...]
    window_start: tuple[int, ...]
    shape: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    output_size: tuple[int, ...] | None = None

    @property
    def global_extents(self) -> tuple[int, ...]:
        """Rows of the whole input along the pooled dims."""
        return shape_of(self.source)[-self.n_spatial :]

    def fill(self, local: torch.Tensor, value: float) -> torch.Tensor:
        """Fetch the window, with ``value`` outside of the tensor."""
        return local if self.window is None else self.window.fill(local, value)

    def give_back(self, window: torch.Tensor) -> torch.Tensor:
        """Run the adjoint of `fill`."""
        return window if self.window is None else self.window.give_back(window)


@functools.lru_cache(maxsize=1024)
def plan_pooling(
    function: Callable[..., Any],
    spec: ShardTensorSpec,
    n_spatial: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    counts_padding: bool = True,
) -> PoolingPlan:
    """Plan a pooling.

    Parameters
    ----------
    function : callable
        Called with a meta tensor for the result's shape and for torch's own errors.
    spec : ShardTensorSpec
        Layout of the input; no pooled dim is folded.
    n_spatial : int
        Number of pooled dims, the last ones.
    kernel, stride, padding, dilation : tuple of int, (n_spatial,)
        In global terms.
    ceil_mode, counts_padding : bool
        As torch takes them.
    """
    meta = metas_of_call(function, meta_like(spec))[0]
    first_dim = len(meta.shape) - n_spatial
    windows, local_padding, sizes = {}, list(padding), {}
    for position in range(n_spatial):
        dim = first_dim + position
        if dim not in spec.grid:
            continue
        reach = dilation[position] * (kernel[position] - 1)
        step, before = stride[position], padding[position]

        def needed(first: int, last: int, step: int = step, before: int = before, reach: int = reach) -> Rows:
            return first * step - before, last * step - before + reach + 1

        found = dim_windows(
            split_of(spec, dim).sizes,
            meta.shape[dim],
            lambda row, step=step, offset=reach // 2 - before: row * step + offset,  # type: ignore[misc]
            needed,
        )
        sizes[dim] = found.sizes
        if not is_alone(spec, dim) and found.rows != own_rows(spec, dim):
            windows[dim] = found
            local_padding[position] = 0
    window = window_of(spec, tuple((dim, found.rows) for dim, found in windows.items())) if windows else None
    result = with_sizes(spec, meta, sizes)
    window_shape = tuple(spec.local_shape) if window is None else window.plan.window_shape
    starts, counts = [], []
    for position in range(n_spatial):
        dim = first_dim + position
        shard = shard_of(spec, dim)
        starts.append(windows[dim].rows[shard][0] if dim in windows else own_rows(spec, dim)[shard][0])
        first = sum(sizes[dim][:shard]) if dim in sizes else 0
        counts.append(
            _counts(
                range(first, first + result.local_shape[dim]),
                shape_of(spec)[dim],
                kernel[position],
                stride[position],
                padding[position],
                counts_padding,
            )
        )
    return PoolingPlan(
        n_spatial,
        spec,
        result,
        None if window is not None and window.is_own else window,
        kernel,
        stride,
        tuple(local_padding),
        dilation,
        ceil_mode,
        tuple(window_shape[first_dim:]),
        tuple(starts),
        tuple(result.local_shape),
        tuple(counts),
    )


def _counts(rows: range, n_input: int, kernel: int, stride: int, padding: int, counts_padding: bool) -> tuple[int, ...]:
    """Rows that each output row averages over."""
    counts = []
    for row in rows:
        start = row * stride - padding
        stop = min(start + kernel, n_input + padding)
        if not counts_padding:
            start, stop = max(start, 0), min(stop, n_input)
        counts.append(stop - start)
    return tuple(counts)


# -- averages ---------------------------------------------------------------------------------------------------------


def sum_windows(plan: PoolingPlan, window: torch.Tensor) -> torch.Tensor:
    """Sum over the kernel, on a filled window."""
    if 0 in plan.shape:
        return window.new_empty(plan.shape)
    if plan.n_spatial == 1:
        wide = F.avg_pool2d(
            window.unsqueeze(-2),
            (1, *plan.kernel),
            (1, *plan.stride),
            (0, *plan.padding),
            plan.ceil_mode,
            divisor_override=1,
        )
        return wide.squeeze(-2)
    pool = F.avg_pool2d if plan.n_spatial == 2 else F.avg_pool3d
    return pool(window, plan.kernel, plan.stride, plan.padding, plan.ceil_mode, divisor_override=1)


def spread_windows(plan: PoolingPlan, gradient: torch.Tensor) -> torch.Tensor:
    """Run the adjoint of `sum_windows`."""
    first_dim = gradient.ndim - plan.n_spatial
    shape = [*gradient.shape[:first_dim], *plan.window_shape]
    if 0 in plan.shape:
        return gradient.new_zeros(shape)
    kernel, stride, padding = plan.kernel, plan.stride, plan.padding
    if plan.n_spatial == 1:
        gradient, shape = gradient.unsqueeze(-2), [*shape[:-1], 1, shape[-1]]
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    name = "avg_pool3d_backward" if plan.n_spatial == 3 else "avg_pool2d_backward"
    backward = getattr(torch.ops.aten, name)
    # Only the shape of the input matters.
    like = gradient.new_empty(()).expand(shape)
    window: torch.Tensor = backward(gradient.contiguous(), like, kernel, stride, padding, plan.ceil_mode, True, 1)
    return window.squeeze(-2) if plan.n_spatial == 1 else window


def divide_by_counts(plan: PoolingPlan, tensor: torch.Tensor, divisor: int | None) -> torch.Tensor:
    """Divide by the number of elements that each output averages over, or by one number for all."""
    if divisor is not None:
        return tensor / divisor
    constant = math.prod(counts[0] for counts in plan.counts if counts and len(set(counts)) == 1)
    result = tensor / constant
    for position, counts in enumerate(plan.counts):
        if len(set(counts)) > 1:
            shape = [-1 if p == position else 1 for p in range(plan.n_spatial)]
            result /= torch.tensor(counts, dtype=tensor.dtype, device=tensor.device).view(shape)
    return result


# -- maxima -----------------------------------------------------------------------------------------------------------


def find_maxima(plan: PoolingPlan, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima and their places in the flattened window."""
    if 0 in plan.shape:
        return window.new_empty(plan.shape), window.new_empty(plan.shape, dtype=torch.int64)
    if plan.output_size is not None:
        adapt = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[plan.n_spatial - 1]
        found: tuple[torch.Tensor, torch.Tensor] = adapt(window, plan.output_size, return_indices=True)
        return found
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[plan.n_spatial - 1]
    values, places = pool(
        window, plan.kernel, plan.stride, plan.padding, plan.dilation, plan.ceil_mode, return_indices=True
    )
    return values, _inside(plan, places)


def _inside(plan: PoolingPlan, places: torch.Tensor) -> torch.Tensor:
    """Move places in the padding, which only a kernel over nothing but -inf gives, to the first row inside."""
    if min(plan.window_start) >= 0:
        return places
    coordinates = _coordinates(plan, places)
    for position, start in enumerate(plan.window_start):
        if start < 0:
            row = coordinates[position] + start
            first_inside = torch.remainder(row, plan.dilation[position])
            coordinates[position] = torch.where(row < 0, first_inside, row) - start
    return _flat(coordinates, plan.window_shape)


def global_places(plan: PoolingPlan, places: torch.Tensor) -> torch.Tensor:
    """Places in the flattened whole input, from places in the flattened window."""
    if plan.window_shape == plan.global_extents and not any(plan.window_start):
        return places
    coordinates = [
        coordinate + start for coordinate, start in zip(_coordinates(plan, places), plan.window_start, strict=True)
    ]
    return _flat(coordinates, plan.global_extents)


def _coordinates(plan: PoolingPlan, places: torch.Tensor) -> list[torch.Tensor]:
    coordinates = []
    for extent in reversed(plan.window_shape):
        coordinates.append(places % extent)
        places = places // extent
    return coordinates[::-1]


def _flat(coordinates: list[torch.Tensor], extents: tuple[int, ...]) -> torch.Tensor:
    flat = coordinates[0]
    for coordinate, extent in zip(coordinates[1:], extents[1:], strict=True):
        flat = flat * extent + coordinate
    return flat


def pick(plan: PoolingPlan, window: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Take the elements of a window at some places."""
    if 0 in plan.shape:
        return window.new_empty(plan.shape)
    return window.flatten(-plan.n_spatial).gather(-1, places.flatten(-plan.n_spatial)).view(plan.shape)


def put(plan: PoolingPlan, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add values into an empty window at some places: the adjoint of `pick`."""
    outer = values.shape[: values.ndim - plan.n_spatial]
    window = values.new_zeros((*outer, *plan.window_shape))
    if 0 not in plan.shape:
        flat = values.flatten(-plan.n_spatial)
        window.flatten(-plan.n_spatial).scatter_add_(-1, places.flatten(-plan.n_spatial), flat)
    return window


on_new_world(plan_pooling.cache_clear)
