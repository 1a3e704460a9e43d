"""`scatter_tensor`: only the source needs the tensor, and nobody receives more than its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import LayoutMismatchError, ShardTensor, scatter_tensor
from shardtensor.testing import splits
from shardtensor_collectives import comm_trace


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


@pytest.mark.ranks(1, 2, 3, 4)
def test_only_the_source_needs_the_tensor() -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(7, 3)
    for source in (0, mesh.size() - 1):
        for dim in (0, 1, -1):
            for sizes in splits(whole.shape[dim], mesh.size()):
                mine = whole.clone() if rank == source else None
                t = scatter_tensor(mine, source, mesh, [Shard(dim)], sizes={dim: sizes})
                assert isinstance(t, ShardTensor) and not t.requires_grad
                assert t._spec.sizes() == {dim % 2: sizes} and t.dtype == torch.float64
                assert torch.equal(t.full_tensor(), whole)
                with torch.no_grad():
                    t.zero_()
                assert mine is None or torch.equal(mine, whole)  # the caller's own is another memory


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_receives_its_shard_and_nothing_else() -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(7, 3)
    for sizes in splits(7, mesh.size()):
        with comm_trace() as trace:
            scatter_tensor(
                whole if rank == 0 else None, 0, mesh, (Shard(0),), whole.shape, whole.dtype, sizes={0: sizes}
            )
        received = sum(event.bytes_received for event in trace.events if event.collective == "exchange")
        sent = sum(event.bytes_sent for event in trace.events if event.collective == "exchange")
        assert received == (0 if rank == 0 else sizes[rank] * 3 * 8)
        assert sent == ((7 - sizes[0]) * 3 * 8 if rank == 0 else 0)
        rest = [event for event in trace.events if event.collective != "exchange"]
        assert all(event.bytes_received <= 4096 for event in rest), rest


@pytest.mark.ranks(2, 3)
def test_replicas_and_scalars() -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(4, 2)
    mine = whole.clone() if rank == 1 else None
    t = scatter_tensor(mine, 1, mesh, [Replicate()], requires_grad=True)
    assert t.requires_grad and t.is_leaf and torch.equal(t.full_tensor(), whole)
    with torch.no_grad():
        t.zero_()
    assert mine is None or torch.equal(mine, whole)
    scalar = scatter_tensor(torch.tensor(3) if rank == 0 else None, 0, mesh, [Replicate()])
    assert scalar.dtype == torch.int64 and scalar.shape == () and scalar.item() == 3
    empty = scatter_tensor(torch.ones(0, 2) if rank == 0 else None, 0, mesh, [Shard(0)])
    assert empty.shape == (0, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    mesh, rank = _mesh(), dist.get_rank()
    whole = (_whole(3, 4) % 3).to(dtype).t()
    t = scatter_tensor(whole if rank == 0 else None, 0, mesh, [Shard(0)], sizes={0: (1, 3)})
    assert t.dtype == dtype and torch.equal(t.full_tensor(), whole)
    cast = scatter_tensor(whole if rank == 0 else None, 0, mesh, [Shard(0)], dtype=torch.complex128)
    assert cast.dtype == torch.complex128 and torch.equal(cast.full_tensor(), whole.to(torch.complex128))


@pytest.mark.ranks(4)
def test_two_axes_and_meshes_in_another_order() -> None:
    rank, whole = dist.get_rank(), _whole(7, 5)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for placements, sizes in [
        ((Shard(0), Shard(1)), {0: (6, 1), 1: (0, 5)}),
        ((Shard(0), Shard(0)), {0: (1, 0, 4, 2)}),
        ((Replicate(), Shard(1)), None),
        ((Replicate(), Replicate()), None),
    ]:
        t = scatter_tensor(whole if rank == 2 else None, 2, square, placements, sizes=sizes)
        assert torch.equal(t.full_tensor(), whole), placements
    # A process group sorts its members, so the shards could not come in the order of such a mesh.
    for mesh in (DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[0, 2], [1, 3]])):
        with pytest.raises(LayoutMismatchError, match=r"the ranks \[.*\] of the mesh .* do not ascend"):
            scatter_tensor(whole, 3, mesh, [Shard(0)] * mesh.ndim)


@pytest.mark.ranks(4)
def test_a_mesh_of_some_ranks_only() -> None:
    """The ranks of the sub-mesh are not 0..n-1, and the others get an error at once."""
    rank, whole = dist.get_rank(), _whole(5, 2)
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("domain",))
    if rank in (1, 3):
        t = scatter_tensor(whole if rank == 3 else None, 3, mesh, [Shard(0)], sizes={0: (4, 1)})
        assert t._local_tensor.shape == ((4, 2) if rank == 1 else (1, 2))
        assert torch.equal(t.full_tensor(), whole)
        with pytest.raises(ValueError, match=r"global_src 0 is not in the mesh, whose ranks are \[1, 3\]"):
            scatter_tensor(whole, 0, mesh, [Shard(0)])
    else:
        with pytest.raises(LayoutMismatchError, match="this rank is not part of the mesh"):
            scatter_tensor(whole, 3, mesh, [Shard(0)])


Arguments = Callable[[DeviceMesh, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]

WRONG: list[tuple[str, str, Arguments]] = [
    (
        "no integer",
        "must be the global rank of the source, an int, not 'a'",
        lambda m, x: ((x, "a", m, [Shard(0)]), {}),
    ),
    ("a bool", "an int, not True", lambda m, x: ((x, True, m, [Shard(0)]), {})),
    ("no rank", "global_src 7 is not in the mesh", lambda m, x: ((x, 7, m, [Shard(0)]), {})),
    ("placements", "2 placements .* a mesh of 1 axes", lambda m, x: ((x, 0, m, [Shard(0), Shard(1)]), {})),
    ("partial", "cannot be scattered to Partial", lambda m, x: ((x, 0, m, [Partial()]), {})),
    ("no tensor", "source rank 0 passed no tensor", lambda m, x: ((None, 0, m, [Shard(0)]), {})),
    ("known shape", "passed no tensor", lambda m, x: ((None, 0, m, [Shard(0)], (5, 2), torch.float64), {})),
    ("a list", "passed a list", lambda m, x: (([1.0], 0, m, [Shard(0)]), {})),
    ("shape", r"is \(5, 2\), not the global_shape \(6, 2\)", lambda m, x: ((x, 0, m, [Shard(0)], (6, 2)), {})),
    ("and dtype", r"is \(5, 2\), not the global_shape", lambda m, x: ((x, 0, m, [Shard(0)], (6, 2), x.dtype), {})),
    ("dim", r"Shard\(2\) is out of range", lambda m, x: ((x, 0, m, [Shard(2)]), {})),
    ("sizes", "sum to 4, but the global extent is 5", lambda m, x: ((x, 0, m, [Shard(0)]), {"sizes": {0: (3, 1)}})),
    (
        "sharded",
        "passed a ShardTensor instead of a plain tensor",
        lambda m, x: ((ShardTensor.from_local(x, m, [Replicate()]), 0, m, [Shard(0)]), {}),
    ),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name, _, _ in WRONG])
def test_errors_reach_all_ranks(name: str) -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(5, 2)
    message, arguments = next((message, arguments) for key, message, arguments in WRONG if key == name)
    args, kwargs = arguments(mesh, whole)
    args = (args[0] if rank == 0 else None, *args[1:])
    with pytest.raises((ValueError, IndexError), match=message):
        scatter_tensor(*args, **kwargs)
    assert scatter_tensor(whole if rank == 0 else None, 0, mesh, [Shard(0)]).shape == (5, 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["sizes", "placements", "count", "source", "shape"])
def test_one_rank_asks_for_something_else(kind: str) -> None:
    mesh, rank, whole = _mesh(), dist.get_rank(), _whole(5, 2)
    is_odd = rank == 2
    source = 1 if is_odd and kind == "source" else 0
    placements = (
        {"placements": [Shard(1)], "count": [Shard(0), Shard(0)]}.get(kind, [Shard(0)]) if is_odd else [Shard(0)]
    )
    sizes = {0: (3, 1, 1)} if is_odd and kind == "sizes" else {0: (1, 1, 3)}
    shape = (9, 2) if is_odd and kind == "shape" else (5, 2)
    expected = r"is \(5, 2\), not the global_shape \(9, 2\)" if kind == "shape" else "rank 2|2 placements"
    with pytest.raises(LayoutMismatchError, match=expected) as raised:
        scatter_tensor(
            whole if rank == 0 else None,
            source,
            mesh,
            placements,
            shape,
            whole.dtype,
            sizes=sizes if kind in ("sizes", "source", "shape") else None,
        )
    assert kind == "shape" or (kind == "count" and rank == 2) or "rank 0: source 0" in str(raised.value)
    assert scatter_tensor(whole if rank == 0 else None, 0, mesh, [Shard(0)]).shape == (5, 2)
