"""`ShardTensorSpec`: what every rank knows of every shard, and the contradictions that it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from spec_worlds import meta, world
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardtensor_spec import LayoutMismatchError, ShardTensorSpec, describe_placement, folded_placement
from shardtensor_spec._torch_private import DTensorSpec

LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...], dict[int, tuple[int, ...]]]] = [
    ((1,), (Shard(0),), {}),
    ((3,), (Shard(1),), {1: (0, 4, 1)}),
    ((4,), (Replicate(),), {}),
    ((2, 2), (Shard(1), Shard(0)), {0: (7, 0), 1: (2, 3)}),
    ((2, 2), (Shard(0), Shard(0)), {0: (1, 0, 4, 2)}),
    ((2, 2), (Partial(), Shard(1)), {1: (1, 4)}),
    ((2, 3), (Shard(0), Shard(0)), {}),
    ((2, 2, 2), (Shard(0), Shard(1), Shard(0)), {0: (1, 2, 0, 4), 1: (5, 0)}),
]


@pytest.mark.parametrize(("mesh_shape", "placements", "sizes"), LAYOUTS)
def test_boxes_shapes_and_offsets_of_all_ranks(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: dict[int, tuple[int, ...]]
) -> None:
    shape = (7, 5)
    counts = torch.zeros(shape, dtype=torch.int64)
    for rank in range(torch.Size(mesh_shape).numel()):
        with world(rank, mesh_shape) as mesh:
            spec = ShardTensorSpec(mesh, placements, meta(*shape), sizes=sizes)
            assert isinstance(spec, DTensorSpec)
            assert spec.coordinate == spec.coordinates()[rank] == tuple(mesh.get_coordinate() or ())
            box = spec.box_at(spec.coordinate)
            assert tuple(stop - start for start, stop in box) == spec.local_shape == spec.shapes()[spec.coordinate]
            counts[tuple(slice(*extent) for extent in box)] += 1
            # The offsets along the axes that shard a dim add up to the first row.
            offsets = spec.offsets()
            assert isinstance(offsets, tuple) and offsets == tuple(spec.offsets(axis) for axis in range(mesh.ndim))
            for dim, (start, _) in enumerate(box):
                along = [o for o, p in zip(offsets, placements, strict=True) if isinstance(p, Shard) and p.dim == dim]
                assert sum(along) == start
            assert all(o == 0 for o, p in zip(offsets, placements, strict=True) if not isinstance(p, Shard))
            _check_cross_section(spec)
    n_copies = 1
    for extent, placement in zip(mesh_shape, placements, strict=True):
        n_copies *= 1 if isinstance(placement, Shard) else extent
    assert bool((counts == n_copies).all())


def _check_cross_section(spec: ShardTensorSpec) -> None:
    shapes = spec.sharding_shapes()
    assert isinstance(shapes, dict)
    here = spec.coordinate
    assert here is not None
    for axis, placement in enumerate(spec.placements):
        assert (axis in shapes) == isinstance(placement, Shard)
        if axis in shapes:
            line = tuple(
                spec.shapes()[(*here[:axis], index, *here[axis + 1 :])] for index in range(spec.mesh.shape[axis])
            )
            assert spec.sharding_shapes(axis) == shapes[axis] == line
            assert all(type(entry) is tuple and all(type(extent) is int for extent in entry) for entry in line)
        else:
            with pytest.raises(KeyError):
                spec.sharding_shapes(axis)
    shapes.clear()  # a copy: the shared object does not change
    assert bool(spec.sharding_shapes()) == any(isinstance(p, Shard) for p in spec.placements)


def test_negative_dims_count_from_the_end() -> None:
    with world(0, (2,)) as mesh:
        spec = ShardTensorSpec(mesh, (Shard(-1),), meta(7, 5))
        assert spec is ShardTensorSpec(mesh, (Shard(1),), meta(7, 5))
        assert spec.placements == (Shard(1),)


def _refused(
    mesh: DeviceMesh, placements: Sequence[Placement], match: str, error: type[Exception], **kwargs: object
) -> None:
    with pytest.raises(error, match=match):
        ShardTensorSpec(mesh, tuple(placements), meta(7, 5), **kwargs)  # type: ignore[arg-type]


def test_contradictions_are_refused() -> None:
    with world(0, (2, 2)) as mesh:
        nested, grid, mixed = (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(0))
        _refused(mesh, nested[:1], "1 placements .* a mesh of 2 axes", LayoutMismatchError)
        _refused(mesh, (Shard(2), Shard(0)), r"Shard\(2\) is out of range for a tensor of 2 dims", IndexError)
        _refused(mesh, (Shard(-3), Shard(0)), r"Shard\(-3\) is out of range", IndexError)
        _refused(mesh, mixed, "dim 1, but the placements .* do not shard it", LayoutMismatchError, sizes={1: (1, 4)})
        _refused(mesh, mixed, "sum to 6, but the global extent is 7", LayoutMismatchError, sizes={0: (2, 4)})
        shapes = {0: ((3, 5), (4, 5))}
        _refused(mesh, mixed, "mesh axis 0, which does not shard", LayoutMismatchError, _sharding_shapes=shapes)
        _refused(mesh, mixed, "mesh axis 5, which does not shard", LayoutMismatchError, _sharding_shapes={5: shapes[0]})
        _refused(mesh, nested, "sharded by several mesh axes", LayoutMismatchError, _sharding_shapes=shapes)
        both = {"sizes": {0: (3, 4)}, "_sharding_shapes": shapes}
        _refused(mesh, grid, "the shard shapes or the shard sizes, not both", LayoutMismatchError, **both)
        _refused(
            mesh, grid, r"local shape \(4, 2\) is not the shape \(4, 3\)", LayoutMismatchError, _local_shape=(4, 2)
        )
        _refused(mesh, nested, "shard order .* is not the order of the mesh axes", LayoutMismatchError, shard_order=())
        order = ShardTensorSpec(mesh, nested, meta(7, 5)).shard_order
        assert ShardTensorSpec(mesh, nested, meta(7, 5), order).shard_order == order


def test_without_a_shape_only_mesh_and_placements_are_known() -> None:
    with world(0, (2,)) as mesh:
        spec = ShardTensorSpec(mesh, (Shard(0),))
        assert (spec.mesh, spec.placements, spec.sizes()) == (mesh, (Shard(0),), {})
        for ask in (lambda: spec.local_shape, spec.offsets, spec.sharding_shapes):
            with pytest.raises(RuntimeError, match="local shape has not been set"):
                ask()
        assert spec.describe() == "shape unknown  Shard(0) on axis 'a'"


def test_a_rank_outside_the_mesh_knows_the_shards_of_others() -> None:
    with world(2, (3,)):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",), _init_backend=False)
        spec = ShardTensorSpec(mesh, (Shard(0),), meta(7, 5))
        assert spec.coordinate is None
        assert spec.shapes() == {(0,): (4, 5), (1,): (3, 5)}
        with pytest.raises(RuntimeError, match="this rank is not part of the mesh"):
            _ = spec.local_shape


def test_layouts_derived_from_another() -> None:
    with world(1, (2, 2)) as mesh:
        spec = ShardTensorSpec(mesh, (Partial(), Shard(0)), meta(7, 5), sizes={0: (1, 6)})
        assert spec.has_partial and not spec.is_folded
        assert spec.replicated().placements == (Replicate(), Replicate()) and spec.replicated().sizes() == {}
        halved = spec.with_meta(meta(7, 5, dtype=torch.float16))
        assert halved.sizes() == {0: (1, 6)} and halved.tensor_meta is not None
        assert halved.tensor_meta.dtype == torch.float16 and halved.with_meta(meta(7, 5)) is spec
        assert spec.unfolded() is spec


def test_folded_dims() -> None:
    with world(1, (2,)) as mesh:
        spec = ShardTensorSpec(mesh, (folded_placement(0, 3),), meta(12, 5), sizes={0: (1, 3)})
        assert spec.is_folded and spec.local_shape == (9, 5)
        with pytest.raises(LayoutMismatchError, match="dim 0 is folded"):
            spec.box_at((0,))
        unfolded = spec.unfolded()
        assert unfolded is ShardTensorSpec(mesh, (Shard(1),), meta(3, 4, 5), sizes={1: (1, 3)})
        assert unfolded.local_shape == (3, 3, 5)
        assert spec.describe() == "(12, 5)  Shard(0) folded on axis 'a', rows 1,3 repeated 3 times"


def test_texts() -> None:
    with world(0, (2, 2)) as mesh:
        spec = ShardTensorSpec(mesh, (Partial("avg"), Shard(0)), meta(7, 5), sizes={0: (0, 7)})
        assert spec.describe() == "(7, 5)  Partial(avg) on axis 'a'; Shard(0) on axis 'b', rows 0,7"
        assert repr(spec) == str(spec) == f"ShardTensorSpec({spec.describe()})"
        assert describe_placement(Replicate()) == "Replicate()"
        nameless = DeviceMesh("cpu", [0, 1], _init_backend=False)
        assert ShardTensorSpec(nameless, (Shard(0),), meta(3)).describe() == "(3,)  Shard(0) on axis 0, rows 2,1"


def test_shared_objects_cannot_be_changed() -> None:
    with world(0, (2,)) as mesh:
        spec = ShardTensorSpec(mesh, (Shard(0),), meta(7, 5))
        for name in ("placements", "tensor_meta", "mesh", "grid", "_local_shape"):
            with pytest.raises(AttributeError, match=f"immutable; build another one instead of setting '{name}'"):
                setattr(spec, name, None)


def test_copies_and_pickles_are_the_object_itself() -> None:
    with world(1, (2,)) as mesh:
        spec = ShardTensorSpec(mesh, (Shard(0),), meta(7, 5), sizes={0: (6, 1)})
        assert copy.copy(spec) is spec
        assert copy.deepcopy({"a": spec})["a"] is spec
        assert pickle.loads(pickle.dumps(spec)) is spec


def test_the_stable_hash_tells_layouts_apart() -> None:
    with world(0, (2,)) as mesh:
        hashes = {
            ShardTensorSpec(mesh, (Shard(0),), meta(7, 5), sizes={0: sizes})._stable_hash()
            for sizes in [(6, 1), (1, 6), (4, 3)]
        }
        assert len(hashes) == 3
        again = ShardTensorSpec(mesh, (Shard(0),), meta(7, 5), sizes={0: (6, 1)})._stable_hash()
        assert again in hashes
