"""torch's private names still are what we take them for. A failure here means: torch moved, look at _torch_private."""

from __future__ import annotations

import torch

from shardtensor_ops import _torch_private


class _Subclass(torch.Tensor):
    pass


def test_requires_grad_looks_at_every_argument() -> None:
    leaf = torch.ones(2, requires_grad=True).as_subclass(_Subclass)
    assert _torch_private.requires_grad(None, torch.ones(1), leaf)
    assert not _torch_private.requires_grad(None, torch.ones(1), 3)


def test_functions_run_below_torch_function() -> None:
    tensor = torch.ones(2).as_subclass(_Subclass)
    total = _torch_private.run_below_torch_function(torch.sum, (_Subclass,), (tensor,), {})
    assert type(total) is torch.Tensor


def test_autocast_is_seen() -> None:
    assert not _torch_private.autocast_is_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch_private.autocast_is_on()


def test_meta_computations_hide_from_modes() -> None:
    with torch._subclasses.FakeTensorMode(), _torch_private.outside_modes():
        assert type(torch.ones(1)) is torch.Tensor


def test_the_kernels_of_resampling_have_their_private_names() -> None:
    rows = torch.arange(4.0).view(1, 1, 4)
    want = torch.nn.functional.interpolate(rows, size=3, mode="nearest-exact")
    assert _torch_private.nearest_exact_1d(rows, [3], None).equal(want)
    for n_dims, backward in (
        (2, _torch_private.adaptive_average_2d_backward),
        (3, _torch_private.adaptive_average_3d_backward),
    ):
        ones = torch.ones(1, 1, *[1] * n_dims)
        assert (
            backward(ones, torch.empty(()).expand(1, 1, *[2] * n_dims)).flatten().tolist() == [0.5**n_dims] * 2**n_dims
        )
    for mode, name in _torch_private.UPSAMPLING.items():
        n_dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
        assert hasattr(torch.ops.aten, name.format(n_dims)), mode
        assert hasattr(torch.ops.aten, f"{name.format(n_dims)}_backward"), mode
