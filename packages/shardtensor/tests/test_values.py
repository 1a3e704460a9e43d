"""Reading values (collective, complete) and looking at a tensor (no communication, on one rank alone)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, shard
from shardtensor_collectives import comm_trace


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))


def _ten() -> tuple[ShardTensor, ShardTensor]:
    """0 to 9 with the rows of field case A4, and their pending sum."""
    mesh = _mesh()
    rows = {1: (10,), 2: (2, 8), 3: (2, 0, 8), 4: (2, 5, 0, 3)}[mesh.size()]
    t = shard(torch.arange(10.0), mesh, Layout((Shard(0),), {0: rows}))
    return t, ShardTensor.from_local(t._local_tensor.sum(), mesh, [Partial()])


@pytest.mark.ranks(1, 2, 3, 4)
def test_values_of_a_pending_sum() -> None:
    t, pending = _ten()
    for total in (pending, t.sum()):
        assert total.item() == 45 and float(total) == 45 and int(total) == 45 and complex(total) == 45
        assert bool(total > 44) and not bool(total > 45) and bool(total == 45)
        assert total.tolist() == 45 and total.numpy() == 45 and total.cpu().numpy() == 45
        assert f"{total:.0f}" == "45" and f"{total:8.2f}" == "   45.00"
        assert total == 45  # an `if` takes the same branch on every rank
        assert [1, 2, 3][(total - 44).int()] == 2
        assert range(int(total))[-1] == 44
    assert bool(torch.isfinite(t).all())
    assert (t.max().item(), t.min().item(), t.mean().item()) == (9, 0, 4.5)


@pytest.mark.ranks(1, 2, 4)
def test_values_of_shards() -> None:
    t, _ = _ten()
    assert t.tolist() == list(range(10))
    assert t.numpy().tolist() == list(range(10))
    import numpy as np

    assert np.asarray(t).sum() == 45
    assert np.asarray(t, dtype=np.int64).dtype == np.int64
    with pytest.raises(RuntimeError, match="numpy\\(\\) on a ShardTensor that requires grad"):
        t.requires_grad_().numpy()
    assert t.numpy(force=True).sum() == 45
    with pytest.raises(RuntimeError, match=r"elements cannot be converted|only one element"):
        t.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(t)
    with pytest.raises(TypeError, match=r"unsupported format string|only"):
        format(t, ".2f")
    alone = shard(torch.tensor([7.0]), t.device_mesh, Layout((Shard(0),)))
    assert alone.item() == 7  # only the first rank has it


@pytest.mark.ranks(2, 4)
def test_looking_communicates_with_nobody() -> None:
    """Field case C9: the last rank alone looks; if anything communicated, it would wait for ever."""
    t, pending = _ten()
    nested = shard(torch.ones(5, 3), t.device_mesh, Layout((Replicate(),)), requires_grad=True)
    product = nested * 2
    if dist.get_rank() == dist.get_world_size() - 1:
        with comm_trace() as trace:
            for tensor in (t, pending, nested, product):
                assert "ShardTensor(" in repr(tensor) and str(tensor) == repr(tensor) == f"{tensor}"
                assert tensor.shape == tensor.size() and tensor.ndim == tensor.dim() == len(tensor.shape)
                assert tensor.numel() == tensor.shape.numel() and tensor.dtype == torch.float32
                assert tensor.device.type == "cpu" and not tensor.is_cuda and tensor.layout == torch.strided
                assert tensor.stride() == torch.empty(tensor.shape).stride() and tensor.is_contiguous()
                assert tensor.storage_offset() == 0 and tensor.element_size() == 4
                assert tensor.nbytes == 4 * tensor.numel() and tensor.itemsize == 4
                assert tensor.is_floating_point() and not tensor.is_complex() and not tensor.is_sparse
                assert tensor.placements == tensor._spec.placements and tensor.device_mesh == t.device_mesh
                assert tensor.requires_grad == (tensor is nested or tensor is product)
                assert tensor.is_leaf == (tensor is not product) and (tensor.grad_fn is None) == tensor.is_leaf
                assert isinstance(hash(tensor), int) and hash(tensor._spec) == hash(tensor._spec)
                assert {tensor: 1}[tensor] == 1 and tensor in [tensor]
                assert isinstance(tensor.offsets(), tuple) and isinstance(tensor.offsets(0), int)
                if tensor.ndim:
                    assert len(tensor) == tensor.shape[0]
        assert not trace.events
        assert "reduction pending" in repr(pending) and "pending" not in repr(t)
        assert "Shard(0) on axis 'domain', rows 2," in repr(t)
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(pending)


@pytest.mark.ranks(2)
def test_iteration_and_membership() -> None:
    t, _ = _ten()
    rows = list(t)
    assert len(rows) == 10 and all(isinstance(row, ShardTensor) for row in rows)
    assert [row.item() for row in rows] == list(range(10))
    assert 9.0 in t and 11.0 not in t
