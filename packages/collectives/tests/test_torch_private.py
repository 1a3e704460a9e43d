"""torch's private names still are what we take them for. A failure here means: torch moved, look at _torch_private."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor_collectives import _torch_private
from shardtensor_collectives._torch_private import is_traced, resolved


def test_plain_tensors_are_not_traced():
    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    assert not is_traced(torch.ones(1))
    assert not is_traced(torch.nn.Parameter(torch.ones(1)))
    with Observer():  # a mode that only watches
        assert not is_traced(torch.ones(1))


def test_every_way_of_tracing_is_noticed():
    with FakeTensorMode() as mode:
        fake = torch.ones(1)
        assert is_traced(fake)
    assert is_traced(mode.from_tensor(torch.ones(1)))
    plain = torch.ones(1)
    with FakeTensorMode():
        assert is_traced(plain)
    with FunctionalTensorMode():
        assert is_traced(FunctionalTensor.to_functional(plain))
    seen = []

    def function(x):
        seen.append(is_traced(x))
        return x + 1

    make_fx(function)(plain)
    torch.compile(lambda x: x + is_traced(x), backend="eager", fullgraph=True)(plain)
    assert seen == [True]
    assert torch.compile(lambda x: x + is_traced(x), backend="eager", fullgraph=True)(plain) == 2


def test_functional_collectives_have_the_calls_we_make():
    calls = _torch_private.functional_collectives
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        for result in (
            calls.all_to_all_single(torch.ones(3), [2, 1], [1, 2], group),
            calls.all_reduce(torch.ones(3), "sum", group),
        ):
            assert isinstance(result, calls.AsyncCollectiveTensor)
            assert type(resolved(result)) is torch.Tensor
            assert resolved(result).shape == (3,)
    finally:
        dist.destroy_process_group()
