"""The mesh of data parallelism times domain parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtensor_spec import LayoutMismatchError

AXIS_NAMES = ("ddp", "domain")


def init_domain_mesh(
    *, ddp: int | None = None, domain: int | None = None, device_type: str | None = None
) -> DeviceMesh:
    """Arrange all processes in a mesh with the axes ``"ddp"`` and ``"domain"``.

    Ranks of one row of ``"domain"`` hold the parts of one sample; they are neighbours in rank order, so that the
    traffic inside a sample stays on one host where it fits.

    Parameters
    ----------
    ddp : int, optional
        Samples that are trained on at a time. By default as many as there are processes for.
    domain : int, optional
        Parts of each sample. By default what ``ddp`` leaves; with neither given, all processes share one sample.
    device_type : str, optional
        ``"cuda"`` where there is a GPU, else ``"cpu"``, by default.

    Returns
    -------
    DeviceMesh, (ddp, domain)
        ``mesh["ddp"]`` is for DDP or FSDP2, ``mesh["domain"]`` for ShardTensors.

    Raises
    ------
    LayoutMismatchError
        (a ``ValueError``) If ``ddp * domain`` is not the number of processes. On all ranks alike.

    Notes
    -----
    Communication: what ``init_device_mesh`` does. It starts the default process group where there is none.

    Examples
    --------
    >>> mesh = init_domain_mesh(device_type="cpu")
    >>> mesh.mesh_dim_names, tuple(mesh.shape)
    (('ddp', 'domain'), (1, 1))
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    n_ranks = dist.get_world_size()
    wanted = (ddp, domain)
    if ddp is None:
        ddp = 1 if domain is None else max(1, n_ranks // max(domain, 1))
    if domain is None:
        domain = max(1, n_ranks // max(ddp, 1))
    if ddp < 1 or domain < 1 or ddp * domain != n_ranks:
        raise LayoutMismatchError(
            f"a mesh of ddp={wanted[0]} by domain={wanted[1]} does not use the {n_ranks} processes: "
            f"{ddp} x {domain} = {ddp * domain}",
            where="init_domain_mesh",
            advice=f"choose ddp and domain whose product is {n_ranks}, or start as many processes as their product",
        )
    return init_device_mesh(device_type, (ddp, domain), mesh_dim_names=AXIS_NAMES)
