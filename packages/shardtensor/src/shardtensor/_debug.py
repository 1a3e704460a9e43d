"""``SHARDTENSOR_DEBUG=1``: every operator first checks that all ranks are about to run the same one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor_collectives import all_gather_objects
from shardtensor_spec import LayoutMismatchError

from ._groups import whole_group


def debug_enabled() -> bool:
    """Whether the environment asks for the checks."""
    return os.environ.get("SHARDTENSOR_DEBUG", "0") not in ("", "0")


def check_agreement(operator: str, description: str, plain: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Compare what every rank of the mesh is about to do.

    Parameters
    ----------
    operator : str
        Name of the operator.
    description : str
        Layouts and arguments, as text.
    plain : Iterable of Tensor
        Plain tensors that are about to be promoted: they must be equal everywhere, so their checksums are compared.
    mesh : DeviceMesh
        Who has to agree.

    Raises
    ------
    LayoutMismatchError
        On all ranks, naming the first rank that differs and both sides.

    Notes
    -----
    Communication: one all-gather of a short text per operator. Meant for finding faults, not for production.
    """
    checksums = " ".join(_checksum(tensor) for tensor in plain)
    mine = f"{operator}  {description}" + (f"  plain tensors {checksums}" if checksums else "")
    texts = all_gather_objects(mine, whole_group(mesh))
    for position, text in enumerate(texts):
        if text != texts[0]:
            rank = int(mesh.mesh.flatten()[position])
            first = int(mesh.mesh.flatten()[0])
            raise LayoutMismatchError(
                f"rank {rank} is about to run something else than rank {first}",
                where=operator,
                inputs=[f"rank {first}: {texts[0]}", f"rank {rank}: {text}"],
                advice="make every rank run the same operators on tensors of the same layout",
            )


def _checksum(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
