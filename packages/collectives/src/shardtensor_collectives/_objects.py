"""Small Python objects from every rank: for checks and reports, never for data."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardtensor_collectives._checks import members


def all_gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collect a picklable object from every rank.

    Parameters
    ----------
    value : object
        This rank's. Of any size, but meant for a few hundred bytes.
    group : ProcessGroup
        The ranks to collect from.

    Returns
    -------
    list of object, (n_ranks,)
        In rank order, equal on all ranks.

    Raises
    ------
    UnsupportedShardingError
        If this rank is not in the group.

    Notes
    -----
    Communication: two all-gathers, of the pickled lengths and of the longest length from every rank.
    None with one rank.

    Examples
    --------
    >>> import torch
    >>> group = mesh.get_group()  # a mesh of one rank
    >>> all_gather_objects("here", group)
    ['here']
    """
    n_ranks, _ = members(group)
    if n_ranks == 1:
        return [value]
    values: list[Any] = [None] * n_ranks
    dist.all_gather_object(values, value, group=group)
    return values
