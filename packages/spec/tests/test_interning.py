"""Equal layouts are one object, as long as somebody holds it and its world lives."""

from __future__ import annotations

import gc

import torch
from spec_worlds import meta, world
from torch.distributed.tensor import Replicate, Shard

from shardtensor_spec import ShardTensorSpec, forget_old_world, on_new_world
from shardtensor_spec._interning import _forget_callbacks, _specs


def test_equal_is_identical() -> None:
    with world(1, (4,)) as mesh:
        spec = ShardTensorSpec(mesh, (Shard(0),), meta(7, 3))
        assert ShardTensorSpec(mesh, [Shard(0)], meta(7, 3)) is spec
        assert ShardTensorSpec(mesh, (Shard(0),), meta(7, 3), sizes={0: (2, 2, 2, 1)}) is spec
        shapes = {0: ((2, 3), (2, 3), (2, 3), (1, 3))}
        assert ShardTensorSpec(mesh, (Shard(0),), meta(7, 3), _sharding_shapes=shapes) is spec
        assert ShardTensorSpec(mesh, (Shard(0),), meta(7, 3), _local_shape=torch.Size((2, 3))) is spec
        others = [
            ShardTensorSpec(mesh, (Shard(0),), meta(7, 3), sizes={0: (1, 3, 2, 1)}),
            ShardTensorSpec(mesh, (Shard(1),), meta(7, 3)),
            ShardTensorSpec(mesh, (Replicate(),), meta(7, 3)),
            ShardTensorSpec(mesh, (Shard(0),), meta(7, 3, dtype=torch.float64)),
            ShardTensorSpec(mesh, (Shard(0),), meta(7, 3)._replace(stride=(1, 7))),
            ShardTensorSpec(mesh, (Shard(0),)),
        ]
        assert all(other is not spec and other != spec for other in others)
        assert len({spec, *others}) == 7
        assert hash(spec) == hash(ShardTensorSpec(mesh, (Shard(0),), meta(7, 3)))


def test_layouts_that_nobody_holds_are_forgotten() -> None:
    with world(0, (2,)) as mesh:
        gc.collect()
        before = len(_specs)
        for n_rows in range(500):
            assert ShardTensorSpec(mesh, (Shard(0),), meta(n_rows)).local_shape[0] == -(-n_rows // 2)
        gc.collect()
        assert len(_specs) <= before + 1


def test_a_new_world_shares_nothing_with_the_old_one() -> None:
    """Their meshes may be equal, but the groups of the first are gone, and this rank may have moved."""
    calls: list[int] = []
    on_new_world(lambda: calls.append(1))
    try:
        with world(0, (2,)) as mesh:
            old = ShardTensorSpec(mesh, (Shard(0),), meta(3))
            assert old.local_shape == (2,) and len(calls) == 1
            assert ShardTensorSpec(mesh, (Shard(0),), meta(3)) is old
            assert len(calls) == 1
        with world(1, (2,)) as mesh:
            forget_old_world()
            assert len(calls) == 2
            new = ShardTensorSpec(mesh, (Shard(0),), meta(3))
            assert new is not old and new.local_shape == (1,)
            assert len(calls) == 2
            # The old one still answers for its own world.
            assert old.local_shape == (2,)
        forget_old_world()
        forget_old_world()
        assert len(calls) == 3
        with world(1, (2,)) as mesh:
            assert ShardTensorSpec(mesh, (Shard(0),), meta(3)) is not new
            assert len(calls) == 4
    finally:
        del _forget_callbacks[-1]
