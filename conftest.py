"""Makes ``@pytest.mark.ranks`` known to every test of the repository."""

from __future__ import annotations

pytest_plugins = ["shardtensor_collectives.testing.pytest_plugin"]
