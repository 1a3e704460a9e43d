"""Arguments that cannot be right: one clear error on every rank, and no rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import LayoutMismatchError, ShardTensor


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


@pytest.mark.ranks(1, 2)
def test_arguments_that_every_rank_sees() -> None:
    mesh = _mesh()
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"2 placements \(Shard\(0\), Replicate\(\)\) are given for a mesh of 1 axes"):
        ShardTensor.from_local(x, mesh, [Shard(0), Replicate()])
    with pytest.raises(IndexError, match=r"Shard\(7\) is out of range for a tensor of 2 dims"):
        ShardTensor.from_local(x, mesh, [Shard(7)])
    with pytest.raises(IndexError, match=r"Shard\(-3\) is out of range"):
        ShardTensor.from_local(x, mesh, [Shard(-3)], "chunk", (6, 2))
    with pytest.raises(ValueError, match="'chunk' needs the global_shape"):
        ShardTensor.from_local(x, mesh, [Shard(0)], "chunk")
    with pytest.raises(ValueError, match=r"global_shape \(6,\) has 1 dims, but the local tensor \(3, 2\) has 2"):
        ShardTensor.from_local(x, mesh, [Shard(0)], "chunk", (6,))
    with pytest.raises(ValueError, match="sharding_shapes='even' is neither 'infer' nor 'chunk' nor a mapping"):
        ShardTensor.from_local(x, mesh, [Shard(0)], "even")
    with pytest.raises(ValueError, match=r"\[\(3, 2\)\] is neither"):
        ShardTensor.from_local(x, mesh, [Shard(0)], [(3, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no entry for mesh axis 0, which shards dim 1"):
        ShardTensor.from_local(x, mesh, [Shard(1)], {1: [(3, 2)]})
    with pytest.raises(ValueError, match=r"they must be \d shapes of 2 dims"):
        ShardTensor.from_local(x, mesh, [Shard(0)], {0: [(3, 2)] * 3})
    with pytest.raises(ValueError, match="they may differ from it along dim 0 only"):
        ShardTensor.from_local(x, mesh, [Shard(0)], {0: [(3, 9)] * mesh.size()})
    with pytest.raises(ValueError, match=r"the local tensor is \(3, 2\), but by the sizes this rank holds \(4, 2\)"):
        ShardTensor.from_local(x, mesh, [Shard(0)], {0: [(4, 2)] * mesh.size()})
    with pytest.raises(ValueError, match=r"the local tensor is \(3, 2\), but by the sizes this rank holds"):
        ShardTensor.from_local(x, mesh, [Shard(0)], "chunk", (40, 2))
    with pytest.raises(TypeError, match="must be plain, not a ShardTensor"):
        ShardTensor.from_local(ShardTensor.from_local(x, mesh, [Shard(0)]), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, not list"):
        ShardTensor.from_local([1.0], mesh, [Shard(0)])  # type: ignore[arg-type]


ODD_ONES: dict[str, tuple[Any, list[Any]]] = {
    "ndim": (torch.ones(3), [Shard(0)]),
    "dtype": (torch.ones(3, 2, dtype=torch.float64), [Shard(0)]),
    "placement": (torch.ones(3, 2), [Replicate()]),
    "placements count": (torch.ones(3, 2), [Shard(0), Shard(1)]),
    "dim out of range": (torch.ones(3), [Shard(1)]),
    "nothing": (None, [Shard(0)]),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ODD_ONES)
def test_one_rank_is_inconsistent(kind: str) -> None:
    """Rank 2 differs: all ranks raise, and those that are right learn which rank and what it has."""
    mesh, rank = _mesh(), dist.get_rank()
    right = (torch.ones(3, 2), [Shard(1) if kind == "dim out of range" else Shard(0)])
    for check in (False, True):
        local, placements = ODD_ONES[kind] if rank == 2 else right
        with pytest.raises((LayoutMismatchError, IndexError, TypeError)) as raised:
            ShardTensor.from_local(local, mesh, placements, check=check)
        if rank != 2:
            text = str(raised.value)
            assert isinstance(raised.value, LayoutMismatchError)
            assert "rank 2" in text and "rank 0: (3, 2) torch.float32" in text, text
        # Nothing was left behind: the next collective pairs up.
        assert ShardTensor.from_local(torch.ones(1), mesh, [Shard(0)]).sum().item() == 3


@pytest.mark.ranks(3)
def test_one_rank_declares_other_sizes() -> None:
    mesh, rank = _mesh(), dist.get_rank()
    right = {0: [(1, 2), (2, 2), (3, 2)]}
    local = torch.ones(rank + 1, 2)
    for wrong in ({0: [(1, 2), (2, 2), (4, 2)]}, {0: [(2, 2), (2, 2), (3, 2)]}, {0: [(1, 2)]}, {}):
        with pytest.raises(LayoutMismatchError) as raised:
            ShardTensor.from_local(local, mesh, [Shard(0)], wrong if rank == 2 else right, check=True)
        assert rank == 2 or "rank 2" in str(raised.value)
    with pytest.raises(LayoutMismatchError, match=r"rank 2 disagrees with rank 0 about the tensor") as raised:
        ShardTensor.from_local(
            local, mesh, [Shard(0)], {0: [(9, 2), (2, 2), (3, 2)]} if rank == 2 else right, check=True
        )
    assert "rank 0: (6, 2)  Shard(0) on axis 'domain', rows 1,2,3 torch.float32" in str(raised.value)
    assert "rank 2: (14, 2)  Shard(0) on axis 'domain', rows 9,2,3 torch.float32" in str(raised.value)


@pytest.mark.ranks(2)
def test_shards_that_do_not_fit_together() -> None:
    """Extents that differ along a dim that is not sharded."""
    mesh, rank = _mesh(), dist.get_rank()
    local = torch.ones(2, 3 + rank)
    message = r"rank 0 \(2, 3\) and rank 1 \(2, 4\) do not fit together: dim 1 must be equal on both"
    with pytest.raises(ValueError, match=message):
        ShardTensor.from_local(local, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=message):
        ShardTensor.from_local(local, mesh, [Replicate()])


@pytest.mark.ranks(4)
def test_ragged_grids_are_refused() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), dist.get_rank()
    shape = [(2, 3), (2, 1), (1, 3), (1, 2)][rank]  # the last one has a column more than the one above it
    with pytest.raises(ValueError, match=r"rank 1 \(2, 1\) and rank 3 \(1, 2\) do not fit together: dim 1"):
        ShardTensor.from_local(torch.ones(shape), mesh, [Shard(0), Shard(1)])


@pytest.mark.ranks(4)
def test_one_rank_has_another_mesh() -> None:
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    mesh, placements = (square, [Replicate(), Shard(0)]) if rank == 2 else (line, [Shard(0)])
    with pytest.raises(LayoutMismatchError, match="rank 2 disagrees with rank 0") as raised:
        ShardTensor.from_local(torch.ones(2), mesh, placements)
    assert "on a mesh of 2x2 ranks" in str(raised.value) and "on a mesh of 4 ranks" in str(raised.value)


@pytest.mark.ranks(4)
def test_ranks_outside_the_mesh() -> None:
    """A mesh of ranks 0 and 1 in a world of four: the others get an error, and nobody hangs."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("domain",))
    if dist.get_rank() < 2:
        assert ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)]).sum().item() == 4
    else:
        with pytest.raises(LayoutMismatchError, match="this rank is not part of the mesh"):
            ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)])
