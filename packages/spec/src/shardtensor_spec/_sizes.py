"""How one dimension is split: the rows of each shard, and where each shard begins.

A *split* is a tuple of non-negative ints, one per shard, in shard order, zeros allowed. Nothing here knows a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._errors import LayoutMismatchError

FRACTION_TOLERANCE = 1e-6
"""How far the sum of a list of fractions may be from one."""


def chunk_sizes(extent: int, n_chunks: int) -> tuple[int, ...]:
    """Split a dimension as ``torch.chunk`` and ``DTensor`` do, with an entry for every chunk.

    Parameters
    ----------
    extent : int
        Rows of the whole dimension.
    n_chunks : int
        Number of shards, at least one.

    Returns
    -------
    tuple of int, (n_chunks,)
        Rows of each shard: all of ``ceil(extent / n_chunks)``, then the remainder, then zeros (``torch.chunk``
        leaves the empty ones out).

    Raises
    ------
    LayoutMismatchError
        If ``extent`` is negative or ``n_chunks`` is not positive.

    Examples
    --------
    >>> chunk_sizes(10, 4)
    (3, 3, 3, 1)
    >>> chunk_sizes(5, 4)
    (2, 2, 1, 0)
    """
    if extent < 0 or n_chunks < 1:
        raise LayoutMismatchError(f"cannot split {extent} rows into {n_chunks} chunks")
    rows = -(-extent // n_chunks)
    return tuple(max(0, min(rows, extent - index * rows)) for index in range(n_chunks))


def offsets_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """First row of each shard.

    Parameters
    ----------
    sizes : Sequence of int, (n_shards,)
        Rows of each shard.

    Returns
    -------
    tuple of int, (n_shards,)
        Sum of the sizes before each shard. An empty shard begins where the next one does.

    Examples
    --------
    >>> offsets_of((3, 0, 2))
    (0, 3, 3)
    """
    offsets = []
    start = 0
    for size in sizes:
        offsets.append(start)
        start += size
    return tuple(offsets)


def check_sizes(sizes: Sequence[int], extent: int, n_shards: int, dim: int) -> tuple[int, ...]:
    """Check that a list of sizes is a split of a dimension.

    Parameters
    ----------
    sizes : Sequence of int, (n_shards,)
        Rows of each shard.
    extent : int
        Rows that they have to add up to.
    n_shards : int
        Number of entries that are needed.
    dim : int
        The tensor dimension, for the message.

    Returns
    -------
    tuple of int, (n_shards,)
        The sizes.

    Raises
    ------
    LayoutMismatchError
        If the number of entries or their sum differs, or one is negative or not an integer. The message has the
        list and its total.

    Examples
    --------
    >>> check_sizes([3, 0, 2], extent=5, n_shards=3, dim=0)
    (3, 0, 2)
    >>> check_sizes([3, 2], extent=6, n_shards=2, dim=1)
    Traceback (most recent call last):
    shardtensor_spec._errors.LayoutMismatchError: shard sizes 3,2 along dim 1 sum to 5, but the global extent is 6
    """
    listed = ",".join(str(size) for size in sizes)
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise LayoutMismatchError(f"shard sizes {listed} along dim {dim} are not all whole numbers")
    total = sum(sizes)
    if len(sizes) != n_shards:
        raise LayoutMismatchError(
            f"{len(sizes)} shard sizes ({listed}, total {total}) along dim {dim}, but it has {n_shards} shards",
            advice="give one size per shard, 0 for an empty one",
        )
    if any(size < 0 for size in sizes):
        raise LayoutMismatchError(f"shard sizes {listed} along dim {dim} (total {total}) contain a negative one")
    if total != extent:
        raise LayoutMismatchError(
            f"shard sizes {listed} along dim {dim} sum to {total}, but the global extent is {extent}"
        )
    return tuple(sizes)


def sizes_from_fractions(extent: int, fractions: Sequence[float]) -> tuple[int, ...]:
    """Turn the share of each shard into whole rows, by largest remainder.

    Parameters
    ----------
    extent : int
        Rows of the whole dimension.
    fractions : Sequence of float, (n_shards,)
        Share of each shard; together one.

    Returns
    -------
    tuple of int, (n_shards,)
        Rows of each shard. They add up to ``extent``, each is within one row of its exact share, and a share of
        zero is an empty shard. Equal remainders go to the lower shard first.

    Raises
    ------
    LayoutMismatchError
        If there are no fractions, one is negative or not finite, or they do not add up to one within
        `FRACTION_TOLERANCE`; or if ``extent`` is negative. The message has the list and its total.

    Examples
    --------
    >>> sizes_from_fractions(91, (0.3, 0.5, 0.2))
    (27, 46, 18)
    >>> sizes_from_fractions(91, (0.5, 0, 0.5))
    (46, 0, 45)
    """
    listed = ",".join(f"{fraction:g}" for fraction in fractions)
    if extent < 0:
        raise LayoutMismatchError(f"cannot split {extent} rows by the fractions {listed}")
    total = math.fsum(fractions)
    # Written so that NaN fails both comparisons.
    if not all(fraction >= 0 for fraction in fractions) or not abs(total - 1) <= FRACTION_TOLERANCE:
        raise LayoutMismatchError(
            f"fractions {listed} sum to {total:g}; they must be at least 0 and sum to 1",
            advice="divide each by the total",
        )
    # Dividing by the total keeps a list that is off by the tolerance within one row of its share on long dimensions.
    exact = [extent * fraction / total for fraction in fractions]
    sizes = [math.floor(share) for share in exact]
    n_left = extent - sum(sizes)
    by_remainder = sorted(
        (index for index, fraction in enumerate(fractions) if fraction > 0),
        key=lambda index: (sizes[index] - exact[index], index),
    )
    for index in by_remainder[:n_left]:
        sizes[index] += 1
    return tuple(sizes)
