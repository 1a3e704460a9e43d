"""Losses on every layout, against plain torch: means divide by the global count or the global weight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import Layout, check_op, layouts_of, shard
from shardtensor_collectives import comm_trace

REPLICATED = Layout((Replicate(),))
REDUCTIONS = ("mean", "sum", "none")


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("domain",))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.ranks(4)
def test_field_case_a1_means_weight_every_element_alike() -> None:
    mesh = _mesh()
    x = torch.arange(10.0)
    cut = Layout((Shard(0),), {0: (2, 5, 0, 3)})
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], float]] = [
        (lambda t: F.mse_loss(t, 0 * t), 28.5),
        (lambda t: F.huber_loss(t, 0 * t), 4.05),
        (torch.mean, 4.5),
        (torch.std, 3.02765),
    ]
    for function, value in cases:
        t = shard(x, mesh, cut, requires_grad=True)
        whole = x.clone().requires_grad_()
        loss = function(t)
        assert loss.item() == pytest.approx(value, abs=1e-5)
        loss.backward()
        function(whole).backward()
        assert t.grad is not None and whole.grad is not None
        assert t.grad._spec.sizes() == {0: (2, 5, 0, 3)}
        assert torch.allclose(t.grad.full_tensor(), whole.grad)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": functools.partial(F.smooth_l1_loss, beta=0.5),
    "huber": functools.partial(F.huber_loss, delta=0.7),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.detach().sign(), reduction=reduction),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
    "bce_logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(x, y.exp(), reduction=reduction),
    "kl_div_log": functools.partial(F.kl_div, log_target=True),
    "poisson": functools.partial(F.poisson_nll_loss, full=False),
    "gaussian": lambda x, y, reduction: F.gaussian_nll_loss(x, y, y.exp(), reduction=reduction),
    "hinge": lambda x, y, reduction: F.hinge_embedding_loss(x, y.detach().sign(), reduction=reduction),
    "margin_ranking": lambda x, y, reduction: F.margin_ranking_loss(x, y, x.detach().sign(), reduction=reduction),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch about its own kl_div
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_of_corresponding_elements(name: str) -> None:
    mesh = _mesh()
    x, y = _random(5, 4), _random(5, 4)
    for reduction in REDUCTIONS:
        function = functools.partial(ELEMENTWISE[name], reduction=reduction)
        for layout in layouts_of(x.shape, mesh):
            check_op(function, x, y, mesh=mesh, layouts=[layout, layout], fallback="error")
            check_op(function, x, y, mesh=mesh, layouts=[layout, None], fallback="error")


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch about its own kl_div
@pytest.mark.ranks(2)
def test_kl_div_batchmean_and_weights() -> None:
    mesh = _mesh()
    x, y, weight, positive = _random(5, 4), _random(5, 4), torch.rand(4).double(), torch.rand(4).double()
    for layout in layouts_of(x.shape, mesh):
        check_op(functools.partial(F.kl_div, reduction="batchmean"), x, y, mesh=mesh, layouts=[layout, None])
        for reduction in REDUCTIONS:
            check_op(
                lambda a, b, r=reduction: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), weight, reduction=r),
                x, y, mesh=mesh, layouts=[layout, None], fallback="error",
            )  # fmt: skip
            check_op(
                lambda a, b, r=reduction: F.binary_cross_entropy_with_logits(
                    a, b.sigmoid(), weight, pos_weight=positive, reduction=r
                ),
                x, y, mesh=mesh, layouts=[layout, None], fallback="error",
            )  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_target_cut_at_other_places_or_along_another_dim() -> None:
    mesh = _mesh()
    x, y = _random(5, 4), _random(5, 4)
    for layout in layouts_of(x.shape, mesh)[::2]:
        for other in [*layouts_of(x.shape, mesh), REPLICATED]:
            for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss):
                check_op(function, x, y, mesh=mesh, layouts=[layout, other], fallback="error")


@pytest.mark.ranks(4)
def test_two_dimensional_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    x, y = _random(5, 4), _random(5, 4)
    classes = torch.tensor([0, 3, -100, 1, 2])
    for layout in layouts_of(x.shape, mesh):
        check_op(F.mse_loss, x, y, mesh=mesh, layouts=[layout, None], fallback="error")
        check_op(F.cross_entropy, x, classes, mesh=mesh, layouts=[layout, None])


@pytest.mark.ranks(2)
def test_mean_losses_are_pending_and_complete_at_no_cost_in_backward() -> None:
    mesh = _mesh()
    x, y = (shard(_random(5, 4), mesh, Layout((Shard(0),), {0: (1, 4)}), requires_grad=True) for _ in range(2))
    with comm_trace() as trace:
        loss = F.mse_loss(x, y)
        loss.backward()
    assert loss.placements == (Partial(),) and not trace.events
    assert x.grad is not None and x.grad._spec is x._spec


@pytest.mark.ranks(2)
def test_pending_input_and_empty_tensors() -> None:
    mesh = _mesh()
    rank = torch.distributed.get_rank()
    pending = ShardTensor.from_local(torch.tensor([1.0 + rank, 2.0]), mesh, [Partial()])
    assert F.mse_loss(pending, torch.zeros(2)).item() == pytest.approx((9 + 16) / 2)
    nothing = shard(torch.zeros(0, 3), mesh, Layout((Shard(0),)))
    assert F.mse_loss(nothing, nothing).full_tensor().isnan()
    assert F.mse_loss(nothing, nothing, reduction="sum").item() == 0


@pytest.mark.ranks(2)
def test_a_mean_in_half_precision_does_not_overflow() -> None:
    mesh = _mesh()
    x = torch.full((4096,), 8.0, dtype=torch.float16)
    t = shard(x, mesh, Layout((Shard(0),), {0: (4000, 96)}))
    assert F.mse_loss(t, torch.zeros_like(t)).item() == 64
    logits = torch.zeros(70_000, 2, dtype=torch.float16)
    t = shard(logits, mesh, Layout((Shard(0),), {0: (69_000, 1_000)}))
    expected = F.nll_loss(logits - 1, torch.zeros(70_000, dtype=torch.int64))
    assert F.nll_loss(t - 1, torch.zeros(70_000, dtype=torch.int64)).item() == pytest.approx(
        expected.item(), nan_ok=True
    )


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 5), (2, 4, 3, 5), (2, 4, 3, 2, 2)], ids=str)
def test_cross_entropy_of_class_indices(shape: tuple[int, ...]) -> None:
    mesh = _mesh()
    x = _random(*shape)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target.view(-1)[1] = 2
    weight = torch.rand(shape[1]).double()
    for layout in layouts_of(x.shape, mesh):
        target_layout = _of_rows(layout)
        for reduction in REDUCTIONS:
            for kwargs in ({}, {"ignore_index": 2}):
                function = functools.partial(F.cross_entropy, reduction=reduction, **kwargs)
                check_op(function, x, target, mesh=mesh, layouts=[layout, target_layout], fallback="error")
                check_op(
                    lambda a, b, w, f=function: f(a, b, weight=w.detach()),
                    x, target, weight, mesh=mesh, layouts=[layout, None, None], fallback="error",
                )  # fmt: skip


def _of_rows(layout: Layout) -> Layout | None:
    """Layout of a target for the layout of an input; plain where the classes are sharded."""
    (placement,) = layout.placements
    assert isinstance(placement, Shard)
    if placement.dim == 1:
        return None
    dim = max(0, placement.dim - 1)
    return Layout((Shard(dim),), {dim: layout.sizes[placement.dim]})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3, 5)], ids=str)
def test_cross_entropy_of_probabilities_and_label_smoothing(shape: tuple[int, ...]) -> None:
    mesh = _mesh()
    x, probabilities = _random(*shape), _random(*shape).softmax(1)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target.view(-1)[1] = 2
    weight = torch.rand(shape[1]).double()
    for layout in layouts_of(x.shape, mesh):
        for reduction in REDUCTIONS:
            soft = functools.partial(F.cross_entropy, reduction=reduction, weight=weight, label_smoothing=0.1)
            check_op(soft, x, probabilities, mesh=mesh, layouts=[layout, layout], fallback="error")
            check_op(
                functools.partial(soft, ignore_index=2), x, target, mesh=mesh, layouts=[layout, None], fallback="error"
            )
            plain = functools.partial(F.cross_entropy, reduction=reduction, label_smoothing=0.1, ignore_index=2)
            check_op(plain, x, target, mesh=mesh, layouts=[layout, None], fallback="error")


@pytest.mark.ranks(2)
def test_cross_entropy_of_one_row_and_with_everything_ignored() -> None:
    mesh = _mesh()
    x = _random(4)
    for layout in [*layouts_of(x.shape, mesh), REPLICATED]:
        check_op(F.cross_entropy, x, torch.tensor(2), mesh=mesh, layouts=[layout, None])
    t = shard(_random(6, 4), mesh, Layout((Shard(0),), {0: (1, 5)}), requires_grad=True)
    ignored = torch.full((6,), -100)
    assert F.cross_entropy(t, ignored).isnan().item()
    assert F.cross_entropy(t, ignored, reduction="sum").item() == 0


@pytest.mark.ranks(2)
def test_the_mean_of_cross_entropy_costs_one_small_all_reduce() -> None:
    mesh = _mesh()
    t = shard(_random(6, 4), mesh, Layout((Shard(0),), {0: (1, 5)}), requires_grad=True)
    target = shard(torch.randint(0, 4, (6,)), mesh, Layout((Shard(0),), {0: (1, 5)}))
    log_p = t.log()
    with comm_trace() as trace:
        loss = F.nll_loss(log_p, target)
        loss.backward()
    assert [(event.collective, event.bytes_sent) for event in trace.events] == [("all_reduce", 24)]
    assert loss.placements == (Replicate(),)


ROWWISE: dict[str, Callable[..., Any]] = {
    "cosine_embedding": lambda x, y, r: F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, 1, -1]), reduction=r),
    "triplet": lambda x, y, r: F.triplet_margin_loss(x, y, x + y, reduction=r),
    "triplet_distance": lambda x, y, r: F.triplet_margin_with_distance_loss(x, y, x + y, reduction=r),
    "multi_margin": lambda x, y, r: F.multi_margin_loss(x, torch.tensor([0, 3, 1, 1, 2]), reduction=r),
    "multilabel_margin": lambda x, y, r: F.multilabel_margin_loss(
        x, torch.tensor([[0, 3, -1, 1]] * 4 + [[2, -1, 0, 1]]), reduction=r
    ),
    "multilabel_soft_margin": lambda x, y, r: F.multilabel_soft_margin_loss(x, y.detach().gt(0).double(), reduction=r),
    "cosine_similarity": lambda x, y, r: F.cosine_similarity(x, y, dim=-1),
    "pairwise_distance": lambda x, y, r: F.pairwise_distance(x, y),
}


def _rowwise(name: str, reduction: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ROWWISE[name](x, y, reduction)
    return result


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ROWWISE)
def test_losses_of_rows(name: str) -> None:
    mesh = _mesh()
    x, y = _random(5, 4), _random(5, 4)
    for reduction in REDUCTIONS:
        for layout in layouts_of(x.shape, mesh):
            for other in (layout, None):
                function = functools.partial(_rowwise, name, reduction)
                check_op(function, x, y, mesh=mesh, layouts=[layout, other], fallback="error")


@pytest.mark.ranks(2)
def test_second_derivatives() -> None:
    mesh = _mesh()
    x, y = _random(5, 4), _random(5, 4)

    def penalty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(F.mse_loss(a * a, b), a, create_graph=True)
        return (gradient * gradient).sum()

    for layout in layouts_of(x.shape, mesh):
        check_op(penalty, x, y, mesh=mesh, layouts=[layout, None])


@pytest.mark.ranks(2)
def test_a_class_out_of_range_on_one_rank_is_raised_on_all() -> None:
    """Field case C1: the other ranks would wait for the sums of the one that raised."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = shard(torch.randn(5, 3), mesh, Layout((Shard(0),), {0: (1, 4)}))
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(x, torch.tensor([0, 1, 2, 7, 0]))
    assert F.cross_entropy(x, torch.tensor([0, 1, 2, 2, 0])).isfinite().all()
