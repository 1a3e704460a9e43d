"""``SHARDTENSOR_DEBUG=1``: every operator first checks that all ranks are about to run the same one."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import Counter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardtensor_collectives import all_gather_objects
from shardtensor_spec import LayoutMismatchError, ShardTensorSpec

from ._groups import whole_group

enabled = os.environ.get("SHARDTENSOR_DEBUG", "0") not in ("", "0")
"""Whether the environment asks for the checks."""


def check_agreement(operator: str, arguments: Any, mesh: DeviceMesh) -> None:
    """Compare what every rank of the mesh is about to do.

    Parameters
    ----------
    operator : str
        Name of the operator.
    arguments : object
        Its arguments, in nested tuples, lists and dicts. Of a ShardTensor the layout is compared; of a plain tensor,
        which is about to be promoted and must be equal everywhere, the values too; of anything else the text.
    mesh : DeviceMesh
        Who has to agree.

    Raises
    ------
    LayoutMismatchError
        On all ranks, naming the first rank that differs from the most, and both sides.

    Notes
    -----
    Communication: one all-gather of a short text per operator. Meant for finding faults, not for production.
    """
    if torch.compiler.is_compiling():
        return
    texts = all_gather_objects(f"{operator}({_described(arguments)})", whole_group(mesh))
    common = Counter(texts).most_common(1)[0][0]
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    for rank, text in zip(ranks, texts, strict=True):
        if text != common:
            first = ranks[texts.index(common)]
            raise LayoutMismatchError(
                f"rank {rank} is about to run something else than rank {first}",
                where=operator,
                inputs=[f"rank {first}: {common}", f"rank {rank}: {text}"],
                advice="make every rank run the same operators on tensors of the same layout",
            )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        if isinstance(spec, ShardTensorSpec):
            return f"{spec.describe()} {value.dtype}"
        if isinstance(value, DTensor):
            return f"DTensor {tuple(value.shape)} {value.placements} {value.dtype}"
        return f"plain {tuple(value.shape)} {value.dtype} with checksum {_checksum(value)}"
    if isinstance(value, ShardTensorSpec):
        return value.describe()
    if isinstance(value, dict):
        return ", ".join(f"{name}={_described(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_described, value)))  # no keyword arguments, no text
    # The text of most other objects is their address, which no two processes share.
    is_data = isinstance(value, (bool, int, float, complex, str, slice, torch.dtype, torch.device, type(None)))
    return repr(value) if is_data else type(value).__name__


def _checksum(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.numel() else b""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
