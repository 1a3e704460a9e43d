"""The examples of the guide's page on operators run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardtensor.testing import check_op, layouts_of

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "extending.md"


@pytest.mark.ranks(3)
def test_the_rule_the_handler_and_their_check_work() -> None:
    rule, handler, check, _manifest = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    for example in (rule, handler, check):
        exec(compile(example, str(GUIDE), "exec"), names)
    names["test_weighted_rows"]()  # type: ignore[operator]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(5, 2, dtype=torch.float64)
    for layout in layouts_of(x.shape, mesh):
        check_op(torch.special.expit, x, mesh=mesh, layouts=[layout], fallback="error")
