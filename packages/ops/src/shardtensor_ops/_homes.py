"""The layout that the gradient of a slice comes home to.

Torch's backward formula of a slice is told the global shape of what was sliced, but not where its other rows live. So
the function handlers of ``indexing`` hang the layout on the view's node of the autograd graph, from where it is handed
to the backward operator just before that runs. A slice made below the handlers, by a C++ function, has no such note:
the layout of its gradient is then derived from how the slice is split, with the other rows spread evenly. Both depend
on the graph and the layouts alone, so all ranks choose alike.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from shardtensor import ShardTensor, ShardTensorSpec
from shardtensor.extending import without_partial
from shardtensor_spec import DimSplit, chunk_sizes

from ._kept_rows import RowRange
from ._naming import shape_of


class _Handed(threading.local):
    home: ShardTensorSpec | None = None


_handed = _Handed()


def bring_home(view: torch.Tensor, source: ShardTensor) -> torch.Tensor:
    """Let the gradient of a view of ``source`` be made in the layout of ``source``. Returns the view."""
    node = view.grad_fn
    if node is not None:
        home = without_partial(source._spec)

        def hand(gradients: tuple[Any, ...]) -> None:
            _handed.home = None if gradients[0] is None else home

        node.register_prehook(hand)
    return view


def handed_home(gradient: ShardTensorSpec, shape: tuple[int, ...]) -> ShardTensorSpec | None:
    """Take the layout that was handed to the operator that runs now, if it is for a tensor of this shape."""
    home, _handed.home = _handed.home, None
    if home is None or home.mesh != gradient.mesh or shape_of(home) != shape:
        return None
    return home


def split_around(split: DimSplit, rows: RowRange, extent: int) -> DimSplit:
    """Spread the rows around a slice evenly, given how the slice itself is split.

    Examples
    --------
    >>> split_around(DimSplit((0,), (1, 0, 0)), RowRange(0, 1, 1), 9).sizes
    (3, 3, 3)
    >>> split_around(DimSplit((0,), (1, 2, 0)), RowRange(4, 7, 1), 9).sizes
    (5, 2, 2)
    """
    n_shards = len(split.sizes)
    even = chunk_sizes(extent, n_shards)
    if split.n_repeats != 1:
        return DimSplit(split.axes, even)
    cuts, n_before, even_cut = [0], 0, 0
    n_rows = sum(split.sizes)
    for size, even_size in zip(split.sizes[:-1], even[:-1], strict=True):
        n_before, even_cut = n_before + size, even_cut + even_size
        lowest = rows.start + (n_before - 1) * rows.step + 1 if n_before else 0
        highest = rows.start + n_before * rows.step if n_before < n_rows else extent
        cuts.append(max(cuts[-1], min(max(even_cut, lowest), highest)))
    cuts.append(extent)
    return DimSplit(split.axes, tuple(stop - start for start, stop in itertools.pairwise(cuts)))
