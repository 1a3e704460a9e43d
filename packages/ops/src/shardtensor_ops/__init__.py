"""PyTorch's operators on uneven shards, one module per family.

`MANIFEST` names the module of every operator. A module is imported the first time one of its operators meets a
ShardTensor.
"""

from __future__ import annotations

from ._manifest import MANIFEST

__all__ = ["MANIFEST"]
