"""Handlers that users register, and their errors, which must be seen as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard

from shardtensor import ShardTensor, _registry
from shardtensor.testing import Layout, shard
from shardtensor_spec import UnsupportedShardingError


@torch.library.custom_op("handlers_test::rows", mutates_args=())
def rows(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.sum(1) * factor


@rows.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.new_empty(x.shape[0])


def _sharded() -> tuple[torch.Tensor, ShardTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    x = torch.arange(10.0).view(5, 2)
    return x, shard(x, mesh, Layout((Shard(0),), {0: {1: (5,), 2: (1, 4)}[mesh.size()]}))


class Registered:
    """Forget what a test registered: the ranks' processes outlive it."""

    def __enter__(self) -> Registered:
        for name in _registry._manifest():
            # A module that is imported while the test runs would be forgotten with it, on the ranks that ran it only.
            _registry._import_for(name)
        tables = (_registry._function_handlers, _registry._named_function_handlers, _registry._dispatch_handlers)
        # With the handlers goes which of them take plain operands: a rank that lost that would reduce in another order.
        self._before = [(table, table.copy()) for table in (*tables, _registry._takes_plain)]
        return self

    def __exit__(self, *_: object) -> None:
        table: Any
        for table, content in self._before:
            table.clear()
            table.update(content)
        _registry._changed()


@pytest.mark.ranks(1, 2)
def test_a_function_handler_receives_distributed_tensors_only() -> None:
    x, t = _sharded()
    seen: list[Any] = []

    def dot(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.extend([func, *args, *kwargs.values()])
        a, b = args
        local = a.redistribute(placements=b.placements, sharding_shapes=b._spec.sizes()).to_local()
        return ShardTensor.from_local((local * b.to_local()).sum(), b.device_mesh, [Partial()], {})

    weight = torch.arange(5.0, requires_grad=True)
    column = t[:, 0].detach().redistribute(placements=[Shard(0)]).requires_grad_()
    with Registered():
        ShardTensor.register_function_handler(torch.dot, dot)
        result = torch.dot(weight, column)
    assert seen[0] is torch.dot and all(isinstance(tensor, ShardTensor) for tensor in seen[1:])
    expected = torch.dot(torch.arange(5.0), x[:, 0])
    assert result.placements == (Partial(),) and result.item() == expected
    result.backward()
    assert type(weight.grad) is torch.Tensor and torch.equal(weight.grad, x[:, 0])
    assert column.grad is not None and torch.equal(column.grad.full_tensor(), torch.arange(5.0))


@pytest.mark.ranks(1, 2)
def test_a_custom_operator_by_its_name() -> None:
    x, t = _sharded()
    calls: list[str] = []

    def serve(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(str(func))
        tensor, factor = args
        return ShardTensor.from_local(rows(tensor.to_local(), factor), tensor.device_mesh, tensor.placements)

    with Registered():
        ShardTensor.register_named_function_handler("handlers_test.rows.default", serve)
        result = torch.ops.handlers_test.rows(t, 2.0)
        assert result.placements == (Shard(0),) and torch.equal(result.full_tensor(), x.sum(1) * 2)
        assert torch.equal(rows(t, 3.0).full_tensor(), x.sum(1) * 3)
        assert torch.equal(torch.ops.handlers_test.rows.default(t, 1.0).full_tensor(), x.sum(1))
    assert calls == ["handlers_test.rows", *["handlers_test.rows.default"] * 2]  # as it was called
    ShardTensor.set_fallback_mode("silent")
    assert torch.equal(rows(t, 3.0).full_tensor(), x.sum(1) * 3)  # no handler: gathered
    assert len(calls) == 3


@pytest.mark.ranks(1, 2)
def test_a_dispatch_handler_goes_before_rules() -> None:
    x, t = _sharded()
    calls: list[tuple[Any, ...]] = []

    def multiply(a: Any, b: Any) -> Any:
        calls.append((a, b))
        return ShardTensor(a._local_tensor * 100, a._spec, requires_grad=False)

    torch.equal((t * 2).full_tensor(), x * 2)  # cached before the registration
    with Registered():
        ShardTensor.register_dispatch_handler(torch.ops.aten.mul.Tensor, multiply)
        assert torch.equal((t * 2).full_tensor(), x * 100)
        t * torch.ones(2)
        assert isinstance(calls[1][1], ShardTensor)
    assert torch.equal((t * 2).full_tensor(), x * 2)
    assert len(calls) == 2


CALLS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a + b": (torch.ops.aten.add.Tensor, lambda t: t + t),
    "a + 1": (torch.ops.aten.add.Tensor, lambda t: t + 1),
    "plain + b": (torch.ops.aten.add.Tensor, lambda t: torch.ones(5, 2) + t),
    "a % b": (torch.ops.aten.remainder.Tensor, lambda t: t % t),
    "1 - a": (torch.ops.aten.rsub.Scalar, lambda t: 1 - t),
    "a += b": (torch.ops.aten.add_.Tensor, lambda t: _iadd(t)),
    "a == b": (torch.ops.aten.eq.Tensor, lambda t: t == t),
    "a / b": (torch.ops.aten.div.Tensor, lambda t: t / t),
    "2 / a": (torch.ops.aten.reciprocal.default, lambda t: 2 / t),
    "a ** 2": (torch.ops.aten.pow.Tensor_Scalar, lambda t: t**2),
    "a // 2": (torch.ops.aten.floor_divide.default, lambda t: t // 2),
}


def _iadd(t: Any) -> Any:
    t += t
    return t


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [NotImplementedError, UnsupportedShardingError, TypeError, ValueError])
def test_the_message_of_a_handler_is_visible(name: str, error: type[Exception]) -> None:
    """Field case F2: Python takes a NotImplemented for "not mine" and raises something else."""
    _, t = _sharded()
    op, call = CALLS[name]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("cannot do this with three shards")

    with Registered():
        ShardTensor.register_dispatch_handler(op, fail)
        expected = RuntimeError if error is TypeError else error
        with pytest.raises(expected, match="cannot do this with three shards"):
            call(t)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("error", [NotImplementedError, UnsupportedShardingError, TypeError])
def test_the_message_of_a_function_handler_is_visible(error: type[Exception]) -> None:
    _, t = _sharded()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("cannot do this with three shards")

    functions: list[tuple[Any, Callable[[], Any]]] = [
        (torch.Tensor.matmul, lambda: t @ torch.ones(2, 2)),
        (torch.Tensor.matmul, lambda: torch.ones(2, 5) @ t),
        (torch.Tensor.add, lambda: t + t),
        (torch.Tensor.add, lambda: 1 + t),
        (torch.Tensor.__rsub__, lambda: 1 - t),
        (torch.Tensor.add_, lambda: _iadd(t)),
        (torch.Tensor.pow, lambda: t**2),
        (torch.nn.functional.linear, lambda: torch.nn.functional.linear(t, torch.ones(3, 2))),
    ]
    for function, call in functions:
        with Registered():
            ShardTensor.register_function_handler(function, fail)
            is_wrapped = error is TypeError and function is not torch.nn.functional.linear
            with pytest.raises(RuntimeError if is_wrapped else error, match="cannot do this with three shards"):
                call()


@pytest.mark.ranks(1)
def test_operands_that_do_not_go_together_are_not_ours_to_explain() -> None:
    _, t = _sharded()
    with pytest.raises(TypeError, match=r"unsupported operand|must be Tensor"):
        t + "text"
    with pytest.raises(TypeError):
        object() * t  # type: ignore[operator]


def test_served_names_are_sorted_and_include_registrations() -> None:
    from shardtensor import served_names

    with Registered():
        ShardTensor.register_named_function_handler("handlers_test.rows.default", lambda *args: None)
        names = served_names()
    assert names == sorted(names) and {"aten.detach", "handlers_test.rows.default", "aten.equal.default"} <= set(names)


def test_two_distributions_that_claim_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            self.name = name

    class EntryPoint:
        value = "module:MANIFEST"

        def __init__(self, name: str, manifest: dict[str, str]) -> None:
            self.dist, self._manifest = Distribution(name), manifest

        def load(self) -> dict[str, str]:
            return self._manifest

    points = [EntryPoint("first-ops", {"aten.mm": "first.mm"}), EntryPoint("second-ops", {"aten.mm": "second.mm"})]
    monkeypatch.setattr(_registry, "entry_points", lambda group: points)
    _registry._manifest.cache_clear()
    try:
        with pytest.raises(_registry.ManifestConflictError) as raised:
            _registry._manifest()
        assert "aten.mm is served by both first-ops (first.mm) and second-ops (second.mm)" in str(raised.value)
        points[1]._manifest["aten.mm"] = "first.mm"  # the same module under two names is no conflict
        assert _registry._manifest() == {"aten.mm": "first.mm"}
    finally:
        _registry._manifest.cache_clear()
