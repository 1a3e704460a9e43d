"""Uneven collectives over a process group, with NVTX ranges and a communication trace.

Every function takes the process group, moves the fewest bytes, works with uneven and empty sizes on gloo and NCCL,
has a gradient where that makes sense, and can be traced by ``torch.compile``.
"""

from __future__ import annotations

from shardtensor_collectives._all_gather import all_gather_v
from shardtensor_collectives._all_reduce import all_reduce
from shardtensor_collectives._all_to_all import all_to_all_v
from shardtensor_collectives._broadcast import broadcast, reduce
from shardtensor_collectives._exchange import exchange, exchange_adjoint
from shardtensor_collectives._objects import all_gather_objects
from shardtensor_collectives._pending import Pending
from shardtensor_collectives._reduce_scatter import reduce_scatter_v
from shardtensor_collectives._reduction import ReduceOp
from shardtensor_collectives._ring import ring_blocks, ring_shift
from shardtensor_collectives._scatter import gather_v, scatter_v
from shardtensor_collectives._trace import CommEvent, Summary, comm_trace, current_operator, operator_range

__all__ = [
    "CommEvent",
    "Pending",
    "ReduceOp",
    "Summary",
    "all_gather_objects",
    "all_gather_v",
    "all_reduce",
    "all_to_all_v",
    "broadcast",
    "comm_trace",
    "current_operator",
    "exchange",
    "exchange_adjoint",
    "gather_v",
    "operator_range",
    "reduce",
    "reduce_scatter_v",
    "ring_blocks",
    "ring_shift",
    "scatter_v",
]
