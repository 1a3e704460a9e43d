"""A pool of rank processes for tests, and a pytest plugin built on it.

Examples
--------
In ``conftest.py``::

    pytest_plugins = ["shardtensor_collectives.testing.pytest_plugin"]

and in a test file::

    @pytest.mark.ranks(1, 2, 4)
    def test_sum():
        t = torch.ones(3)
        dist.all_reduce(t)
        assert t[0] == dist.get_world_size()
"""

from __future__ import annotations

from shardtensor_collectives.testing._pool import DEFAULT_PRELOAD, RankFailure, RankPool
from shardtensor_collectives.testing._worker import RankSkip

__all__ = ["DEFAULT_PRELOAD", "RankFailure", "RankPool", "RankSkip"]
