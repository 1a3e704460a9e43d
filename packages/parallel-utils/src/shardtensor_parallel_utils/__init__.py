"""What joins domain parallelism to the rest of ``torch.distributed``: meshes, and equal modules on all ranks."""

from __future__ import annotations

from ._mesh import init_domain_mesh
from ._sync import sync_module_over_mesh

__all__ = ["init_domain_mesh", "sync_module_over_mesh"]
