"""Who owns what, and from whom each rank takes what it wants: the choice that all ranks have to make alike."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ._boxes import Box, are_disjoint, box_numel, intersect, merge_adjacent, subtract_from_all
from ._windows import Tile, window_tiles

N_CACHED_GROUPS = 128

Layout = tuple[Box, ...]
Taken = tuple[tuple[int, Tile], ...]
"""Pairs of an owner and a tile that is taken from it."""


@dataclass(frozen=True)
class Owners:
    """The distinct boxes that a group owns.

    Attributes
    ----------
    holders : tuple of (Box, tuple of int)
        Each distinct non-empty box with the ranks that own it, ascending.
    is_exclusive : bool
        No element has two owners.
    boxes_are_disjoint : bool
        Two ranks own equal boxes or disjoint ones.
    is_tiling : bool
        Every element of the global tensor has an owner. False may also mean "not known", if boxes overlap.
    """

    holders: tuple[tuple[Box, tuple[int, ...]], ...]
    is_exclusive: bool
    boxes_are_disjoint: bool
    is_tiling: bool


@functools.lru_cache(maxsize=N_CACHED_GROUPS)
def find_owners(owned: Layout, global_shape: tuple[int, ...]) -> Owners:
    """Group the ranks by the box that they own."""
    ranks_of: dict[Box, list[int]] = {}
    for rank, box in enumerate(owned):
        if box_numel(box):
            ranks_of.setdefault(box, []).append(rank)
    disjoint = are_disjoint(list(ranks_of))
    n_elements = math.prod(global_shape)
    return Owners(
        holders=tuple((box, tuple(ranks)) for box, ranks in ranks_of.items()),
        is_exclusive=disjoint and all(len(ranks) == 1 for ranks in ranks_of.values()),
        boxes_are_disjoint=disjoint,
        is_tiling=(disjoint and sum(map(box_numel, ranks_of)) == n_elements)
        or any(box_numel(box) == n_elements for box in ranks_of),
    )


def own_tiles(tiles: list[Tile], own: Box) -> list[Tile]:
    """Parts of the tiles that a rank owns itself."""
    found = []
    for tile in tiles:
        common = intersect(tile.region, own)
        if common is not None:
            found.append(Tile(common, tile.offset))
    return found


def lacking_tiles(tiles: list[Tile], own: Box) -> list[Tile]:
    """Parts of the tiles that a rank does not own itself."""
    return [Tile(region, tile.offset) for tile in tiles for region in subtract_from_all([tile.region], own)]


@functools.lru_cache(maxsize=N_CACHED_GROUPS)
def assign_owners(
    owned: Layout, wanted: Layout, global_shape: tuple[int, ...], circular: tuple[int, ...]
) -> tuple[Taken, ...]:
    """Choose the owner of each element that each rank has to receive, where elements have several owners.

    The receivers choose in rank order. Each goes through the other owners, beginning with the one from which the
    fewest elements have been taken so far (of equals, the next one after the receiver, cyclically), and takes from
    each all that it still lacks and that one owns. So two replicas serve two equal windows one each, and a single
    window is never cut over several replicas.

    Returns
    -------
    tuple of tuple of (int, Tile), (n_ranks,)
        For each receiver, what it takes from whom.
    """
    n_ranks = len(owned)
    owners = find_owners(owned, global_shape)
    n_taken = [0] * n_ranks
    choices: list[Taken] = []
    for receiver in range(n_ranks):
        lacking = lacking_tiles(window_tiles(wanted[receiver], global_shape, circular), owned[receiver])
        taken: list[tuple[int, Tile]] = []
        if lacking:
            # Of those who own the same box the first takes it all, so one candidate per distinct box is enough.
            candidates = sorted(
                (*min((n_taken[rank], (rank - receiver) % n_ranks, rank) for rank in ranks), box)
                for box, ranks in owners.holders
                if box != owned[receiver]
            )
            for _, _, owner, box in candidates:
                found = own_tiles(lacking, box)
                if not found:
                    continue
                lacking = lacking_tiles(lacking, box)
                found = _merge(found)
                n_taken[owner] += sum([box_numel(tile.region) for tile in found])
                taken += [(owner, tile) for tile in found]
                if not lacking:
                    break
        choices.append(tuple(taken))
    return tuple(choices)


@functools.lru_cache(maxsize=N_CACHED_GROUPS)
def group_is_silent(owned: Layout, wanted: Layout, global_shape: tuple[int, ...], circular: tuple[int, ...]) -> bool:
    """Whether no rank lacks an element that another one owns."""
    owners = find_owners(owned, global_shape)
    for window, own in zip(wanted, owned, strict=True):
        lacking = lacking_tiles(window_tiles(window, global_shape, circular), own)
        if not lacking:
            continue
        if owners.is_tiling:
            return False
        if any(own_tiles(lacking, box) for box, _ in owners.holders):
            return False
    return True


def _merge(tiles: list[Tile]) -> list[Tile]:
    """Join adjacent tiles of one lap."""
    if len(tiles) < 2:
        return tiles
    by_offset: dict[tuple[int, ...], list[Box]] = {}
    for tile in tiles:
        by_offset.setdefault(tile.offset, []).append(tile.region)
    return [Tile(region, offset) for offset, regions in by_offset.items() for region in merge_adjacent(regions)]
