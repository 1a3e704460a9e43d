"""Importing the library must cost nothing that a user did not ask for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MODULES = [
    "domain_parallel",
    "shardtensor",
    "shardtensor_collectives",
    "shardtensor_ops",
    "shardtensor_parallel_utils",
    "shardtensor_spec",
]


@pytest.mark.parametrize("module", MODULES)
def test_import_initialises_nothing(module):
    program = f"""
        import sys
        import torch
        import torch.distributed as dist

        seed = torch.initial_seed()
        n_threads = torch.get_num_threads()
        import {module}

        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        assert not dist.is_initialized(), "a process group was made"
        assert torch.initial_seed() == seed, "the random state was touched"
        assert torch.get_num_threads() == n_threads, "the number of threads was changed"
        loaded = {{"matplotlib", "monai", "nibabel", "nilearn", "pytest", "rich"}} & set(sys.modules)
        assert not loaded, f"optional libraries were imported: {{loaded}}"
        """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(program)], check=True, timeout=120)
