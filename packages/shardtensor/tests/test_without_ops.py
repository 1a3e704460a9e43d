"""`shardtensor` without `shardtensor_ops`: everything is right, through gathers where no rule is at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor, UnsupportedShardingError, _registry
from shardtensor.testing import Layout, check_op, fallback_mode, shard, splits

Function = Callable[..., Any]


@contextmanager
def without_ops() -> Iterator[None]:
    """Hide the installed operators; only what `shardtensor` itself registers remains."""
    kept = {name: rule for name, rule in _registry._rules.items() if rule.__module__.startswith("shardtensor.")}
    functions = {f: h for f, h in _registry._function_handlers.items() if h.__module__.startswith("shardtensor.")}
    before = (_registry._manifest, dict(_registry._rules), dict(_registry._function_handlers))
    _registry._manifest = lambda: {}  # type: ignore[assignment]
    for table, content in ((_registry._rules, kept), (_registry._function_handlers, functions)):
        table.clear()  # type: ignore[attr-defined]
        table.update(content)  # type: ignore[attr-defined]
    _registry._changed()
    try:
        yield
    finally:
        _registry._manifest = before[0]
        _registry._rules.update(before[1])
        _registry._function_handlers.update(before[2])
        _registry._changed()


def _in_place(write: Function) -> Function:
    """A function that writes to a copy of its argument and returns it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        write(copy)
        return copy

    return run


def _out(function: Function) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        assert function(x, out=out) is out
        return out

    return run


row = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)

DIFFERENTIABLE: dict[str, Function] = {
    "add": lambda x: x + x * 2 - 1,
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax 0": lambda x: x.softmax(0),
    "log_softmax 1": lambda x: x.log_softmax(1),
    "sum": lambda x: x.sum(),
    "sum 0": lambda x: x.sum(0, keepdim=True),
    "mean": lambda x: x.mean((0, 2)),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "std": lambda x: x.std(),
    "prod": lambda x: (x + 2).prod(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "max dim": lambda x: x.max(0),
    "amax": lambda x: x.amax((0, 1)),
    "logsumexp": lambda x: x.logsumexp(0),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x.topk(2, dim=0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("abc,abd->cd", x, x),
    "linear": lambda x: F.linear(x, row.view(1, 4).expand(3, 4)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(2, 3, 3, dtype=x.dtype), padding=1),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "pad": lambda x: F.pad(x, (1, 2), mode="replicate"),
    "layer_norm": lambda x: F.layer_norm(x, (4,), row, row),
    "group_norm": lambda x: F.group_norm(x, 3),
    "split": lambda x: x.split([1, 3, 3], 0),
    "chunk": lambda x: x.chunk(3, 2),
    "unbind": lambda x: x.unbind(1),
    "slice": lambda x: x[1:5, ::2],
    "select": lambda x: x[-1],
    "index": lambda x: x[torch.tensor([0, 2, 2, 6])],
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 1])),
    "gather": lambda x: x.gather(0, torch.zeros(1, 3, 4, dtype=torch.int64)),
    "scatter": lambda x: x.scatter(0, torch.zeros(1, 3, 4, dtype=torch.int64), 5.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(21, 4),
    "reshape": lambda x: x.transpose(0, 2).reshape(4, -1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "expand": lambda x: x[:1].expand(2, 3, 4),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(2, 0),
    "cat": lambda x: torch.cat([x, x * 2], 0),
    "stack": lambda x: torch.stack([x, x], 1),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "unfold": lambda x: x.unfold(0, 3, 2),
    "mse_loss": lambda x: F.mse_loss(x, x * 0.5),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.ones(7, 4, dtype=torch.int64)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "to": lambda x: x.to(torch.float32),
    "cdist": lambda x: torch.cdist(x, x * 2 + 1),
    "index_put": lambda x: x.index_put((torch.tensor([1]),), row),
    "add_": _in_place(lambda c: c.add_(2)),
    "mul_ by itself": _in_place(lambda c: c.mul_(c.detach() + 1)),
    "copy_": _in_place(lambda c: c.copy_(c.detach() * 3)),
    "zero_": _in_place(lambda c: c.zero_()),
    "relu_": _in_place(F.relu_),
    "clamp_": _in_place(lambda c: c.clamp_(0, 1)),
}

NOT_DIFFERENTIABLE: dict[str, Function] = {
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3, dtype=torch.int64),
    "new_ones": lambda x: x.new_ones(2, 5),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "comparison": lambda x: (x > 0) & (x < 1),
    "any": lambda x: [(x > 0).any(), (x > 9).any(0), (x > -9).all()],
    "argmax": lambda x: [x.argmax(), x.argmax(0)],
    "count_nonzero": lambda x: x.count_nonzero(0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x[x > 0],
    "unique": lambda x: (x * 2).round().unique(),
    "histc": lambda x: x.histc(5, -2, 2),
    "isnan": lambda x: torch.isnan(x),
    "sign": torch.sign,
    "round": lambda x: x.round(decimals=1),
    "bucketize": lambda x: torch.bucketize(x, row),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
    "allclose": lambda x: torch.allclose(x, x + 1e-12),
    "equal": lambda x: [torch.equal(x, x.clone()), torch.equal(x, x + 1)],
    "out add": _out(lambda x, out: torch.add(x, 1, out=out)),
    "out cumsum": _out(lambda x, out: torch.cumsum(x, 0, out=out)),
    "sort_ out": lambda x: x.clone().copy_(x.sort(0).values),
    "foreach": lambda x: torch._foreach_add([x, x * 2], 1.0),
    "foreach_": lambda x: _foreach(x),
    "index_fill_": _in_place(lambda c: c.index_fill_(0, torch.tensor([0, 6]), 9.0)),
    "masked_fill_": _in_place(lambda c: c.masked_fill_(c > 0, 0.0)),
    "fill_": _in_place(lambda c: c.fill_(4.0)),
    "cumsum_": _in_place(lambda c: c.cumsum_(0)),
    "index_put_": _in_place(lambda c: c.index_put_((torch.tensor([1, 2]),), row)),
    "setitem mask": _in_place(lambda c: c.__setitem__(c > 0, 5.0)),
    "iteration": lambda x: [row_ * 2 for row_ in x],
}


def _foreach(x: torch.Tensor) -> list[torch.Tensor]:
    tensors = [x.clone(), x.clone()]
    torch._foreach_mul_(tensors, 3.0)
    torch._foreach_add_(tensors, [x, x])
    return tensors


def _layouts(mesh: DeviceMesh) -> list[Layout]:
    return [Layout((Shard(0),), {0: splits(7, mesh.size())[-1]}), Layout((Shard(2),), {2: splits(4, mesh.size())[1]})]


def _whole() -> torch.Tensor:
    return torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.ranks(2, 3, timeout=60)
def test_a_table_of_operators() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    wrong = {}
    with without_ops():
        for table, gradient in ((DIFFERENTIABLE, True), (NOT_DIFFERENTIABLE, False)):
            for name, function in table.items():
                for layout in _layouts(mesh):
                    try:
                        result = check_op(function, _whole(), mesh=mesh, layouts=[layout], gradient=gradient)
                    except Exception as error:
                        wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
                    else:
                        listed = result if isinstance(result, (list, tuple)) else [result]
                        kinds = {type(item) for item in listed}
                        assert kinds <= {ShardTensor, bool}, (name, kinds)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@pytest.mark.ranks(2)
def test_in_place_operators_keep_layout_and_memory() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    with without_ops(), fallback_mode("silent"):
        for write in (
            lambda t: t.add_(1),
            lambda t: t.cumsum_(0),
            lambda t: t.mul_(row),
            lambda t: torch.neg(t, out=t),
        ):
            t = shard(_whole(), mesh, Layout((Shard(0),), {0: (2, 5)}))
            spec, address, expected = t._spec, t._local_tensor.data_ptr(), _whole()
            write(expected)
            assert write(t) is t
            assert t._spec is spec and t._local_tensor.data_ptr() == address
            assert torch.equal(t.full_tensor(), expected)


@pytest.mark.ranks(2)
def test_what_writes_through_a_copied_view_is_refused() -> None:
    """Field case A23: the base changes as in plain torch, or all ranks raise."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    writes: list[Function] = [
        lambda t: t[:2].zero_(),
        lambda t: t.__setitem__((slice(None), 1), 5.0),
        lambda t: torch.nn.init.zeros_(t[:2]),
    ]
    with without_ops(), fallback_mode("silent"):
        for write in writes:
            t = shard(_whole(), mesh, Layout((Shard(0),), {0: (2, 5)}))
            with pytest.raises(UnsupportedShardingError, match="a write would reach only one of the two"):
                write(t)
            assert torch.equal(t.full_tensor(), _whole())


@pytest.mark.ranks(2)
def test_results_say_what_they_are() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    with without_ops(), fallback_mode("silent"):
        t = shard(_whole(), mesh, Layout((Shard(0),), {0: (2, 5)}))
        assert (t + t).placements == (Replicate(),)  # gathered: no rule here
        assert t.clone().placements == t.to(torch.float32).placements == torch.zeros_like(t).placements == (Shard(0),)
        values, indices = t.max(0)
        assert type(t.max(0)).__name__ == "max" and values.dtype == torch.float64 and indices.dtype == torch.int64
        assert isinstance(t.split(2), tuple) and isinstance(t.unbind(), tuple)
