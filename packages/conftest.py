"""Gives every doctest of the packages a process group and a mesh of one rank, as ``docs/`` promises readers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture(autouse=True)
def _world_of_one(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = request.getfixturevalue("doctest_namespace")
        names["mesh"] = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
        yield
    finally:
        dist.destroy_process_group()
