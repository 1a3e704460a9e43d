"""Makes ``@pytest.mark.ranks`` known to every test, and gives doctests a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest_plugins = ["shardtensor_collectives.testing.pytest_plugin"]


@pytest.fixture(autouse=True)
def _doctest_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let doctests use ``torch`` and ``mesh``: one rank, one axis "domain", as long as the doctest lives."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        namespace = request.getfixturevalue("doctest_namespace")
        namespace.update(torch=torch, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("domain",)))
        yield
    finally:
        dist.destroy_process_group()
