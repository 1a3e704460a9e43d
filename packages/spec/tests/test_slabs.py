from __future__ import annotations

import pytest
import torch
from spec_worlds import world
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardtensor_spec import LayoutMismatchError, local_slices


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "sizes"),
    [
        ((4,), (Shard(0),), None),
        ((4,), (Shard(0),), {0: (0, 5, 1, 1)}),
        ((4,), (Shard(-1),), {-1: (1, 1, 0, 4)}),
        ((2, 2), (Shard(0), Shard(1)), {0: (2, 5), 1: (6, 0)}),
        ((2, 2), (Shard(0), Shard(0)), {0: (1, 0, 4, 2)}),
        ((2, 2), (Replicate(), Shard(1)), None),
        ((3, 2), (Shard(0), Shard(0)), None),
    ],
)
def test_the_slabs_of_all_ranks_make_up_the_array(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: dict[int, tuple[int, ...]] | None
) -> None:
    whole = torch.zeros(7, 6, dtype=torch.int64)
    n_ranks = torch.Size(mesh_shape).numel()
    for rank in range(n_ranks):
        with world(rank, mesh_shape) as mesh:
            slab = whole[local_slices((7, 6), mesh, placements, sizes)]
            slab += 1
            if sizes is not None and len(mesh_shape) == 1:
                ((dim, rows),) = sizes.items()
                assert slab.shape[dim] == rows[rank]
    n_copies = 2 if Replicate() in placements else 1
    assert bool((whole == n_copies).all())


def test_errors() -> None:
    with world(0, (2,)) as mesh:
        with pytest.raises(
            LayoutMismatchError, match="shard sizes 3,3 along dim 0 sum to 6, but the global extent is 7"
        ):
            local_slices((7, 6), mesh, [Shard(0)], {0: (3, 3)})
        with pytest.raises(LayoutMismatchError, match="2 placements"):
            local_slices((7, 6), mesh, [Shard(0), Shard(1)])
        with pytest.raises(IndexError, match=r"Shard\(2\) is out of range for a tensor of 2 dims"):
            local_slices((7, 6), mesh, [Shard(2)])
    with world(2, (3,)), pytest.raises(RuntimeError, match="this rank is not part of the mesh"):
        local_slices((7, 6), DeviceMesh("cpu", [0, 1], _init_backend=False), [Shard(0)])
