"""Gathers are said, said once, said by one rank, or forbidden on all."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import (
    LayoutMismatchError,
    ShardTensor,
    UnsupportedShardingError,
    get_fallback_mode,
    set_fallback_mode,
)
from shardtensor.testing import Layout, fallback_mode, shard

_library = torch.library.Library("fallback_test", "DEF")
_library.define("double(Tensor a) -> Tensor")
for key in ("CPU", "Meta"):
    _library.impl("double", lambda a: a + a, key)


class Recorder(logging.Handler):
    """Keeps the messages of the package's logger while it is entered."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        logging.getLogger("shardtensor").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("shardtensor").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.messages.append(record.getMessage())


def _sharded() -> ShardTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    return shard(torch.arange(10.0).view(5, 2), mesh, Layout((Shard(0),), {0: (1, 4)}))


@pytest.mark.ranks(2)
def test_warn_once_per_operator_on_the_first_rank() -> None:
    t = _sharded()
    set_fallback_mode("warn")
    with Recorder() as messages:
        for _ in range(3):
            torch.ops.fallback_test.double(t)
        torch.ops.fallback_test.double(t * 1)
    if dist.get_rank() == 0:
        (message,) = messages
        assert "fallback_test.double.default has no rule for this layout" in message
        assert "(40 bytes)" in message
        assert "(5, 2)  Shard(0) on axis 'domain', rows 1,4" in message
        assert "set_fallback_mode('silent')" in message
    else:
        assert not messages
    set_fallback_mode("warn")  # begins anew
    with Recorder() as messages:
        torch.ops.fallback_test.double(t)
    assert len(messages) == (dist.get_rank() == 0)


@pytest.mark.ranks(2)
def test_silent() -> None:
    t = _sharded()
    ShardTensor.set_fallback_mode("silent")
    with Recorder() as messages:
        assert torch.equal(torch.ops.fallback_test.double(t).full_tensor(), 2 * torch.arange(10.0).view(5, 2))
    assert not messages
    set_fallback_mode("warn")


@pytest.mark.ranks(2)
def test_error_on_all_ranks() -> None:
    t = _sharded()
    with fallback_mode("error"):
        assert get_fallback_mode() == "error"
        with pytest.raises(UnsupportedShardingError, match=r"fallback_test.double.default has no rule") as raised:
            torch.ops.fallback_test.double(t)
        assert isinstance(raised.value, NotImplementedError)
        assert "(5, 2)  Shard(0) on axis 'domain', rows 1,4" in str(raised.value)
        # What gathers nothing is no fallback: the operand is whole already.
        whole = t.redistribute(placements=[Replicate()])
        assert torch.equal(torch.ops.fallback_test.double(whole).to_local(), 2 * torch.arange(10.0).view(5, 2))
    assert get_fallback_mode() == "warn"


def test_unknown_modes() -> None:
    before = get_fallback_mode()
    with pytest.raises(LayoutMismatchError, match="fallback mode 'loud' is none of 'silent', 'warn', 'error'"):
        set_fallback_mode("loud")  # type: ignore[arg-type]
    assert get_fallback_mode() == before
