"""The example of the README runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.ranks(4)
def test_readme_example_runs_and_gives_equal_gradients():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    torch.manual_seed(dist.get_rank())
    exec(compile(example, str(README), "exec"), names)
    for parameter in names["model"].parameters():
        assert type(parameter.grad) is torch.Tensor
        copies = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.grad)
        for copy in copies:
            torch.testing.assert_close(copy, copies[0])
        assert parameter.grad.abs().max() > 0
