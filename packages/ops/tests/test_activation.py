"""Every activation function of ``torch.nn.functional`` runs on the shards alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardtensor.testing import check_op, layouts_of
from shardtensor_collectives import comm_trace

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "celu": F.celu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "rrelu_eval": functools.partial(F.rrelu, training=False),
    "selu": F.selu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": F.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": functools.partial(F.threshold, threshold=0.1, value=2.0),
}


@pytest.mark.ranks(1, 2, 3)
def test_pointwise_activations_are_local() -> None:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))
    x = torch.randn(5, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh)[::2]:
        for name, function in ACTIVATIONS.items():
            try:
                check_op(function, x, mesh=mesh, layouts=[layout], fallback="error")
            except Exception as error:
                raise AssertionError(f"{name} with {layout}") from error
        check_op(F.prelu, x, torch.rand(4).double(), mesh=mesh, layouts=[layout, None], fallback="error")
        check_op(F.prelu, x, torch.rand(1).double(), mesh=mesh, layouts=[layout, None], fallback="error")


@pytest.mark.ranks(2, 3)
def test_glu_is_local_along_other_dims_and_moves_shards_along_its_own() -> None:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("domain",))
    x = torch.randn(5, 6, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        check_op(functools.partial(F.glu, dim=1), x, mesh=mesh, layouts=[layout], fallback="error")
    with comm_trace() as trace:
        for layout in layouts_of(x.shape, mesh, dims=[0]):
            check_op(functools.partial(F.glu, dim=1), x, mesh=mesh, layouts=[layout], fallback="error")
    assert {event.collective for event in trace.events} <= {"all_gather_v"}  # of the comparison


@pytest.mark.ranks(2)
def test_in_place_activations() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = torch.randn(5, 4, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        for function in (F.relu, F.leaky_relu, F.elu, F.hardtanh, F.silu, F.hardswish, F.mish, F.selu, F.celu):
            check_op(
                lambda t, f=function: f(t * 1, inplace=True), x, mesh=mesh, layouts=[layout], fallback="error"
            )  # fmt: skip
