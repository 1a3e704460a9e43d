"""``torch.nn.functional.linear`` for any layout of input, weight and bias.

==========================  ==============================================================
what is sharded             forward; backward
==========================  ==============================================================
leading dims of the input   local; the gradient of a plain weight and bias in one all-reduce
output features             local, the output is sharded; the input's gradient is pending
input features (contracted) local, the output is pending, the bias added once; local
==========================  ==============================================================
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardtensor import ShardTensor
from shardtensor.extending import register_function_handler

from ._autocast import autocast_is_on, in_autocast_dtype
from ._contraction import Contraction, contract, contraction_of
from ._operands import promoted, takes_as_they_are


def serve_linear(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve ``linear(input, weight, bias=None)``. See `linear`."""
    return linear(*args, **kwargs)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Apply ``input @ weight.T + bias``, one operator for any number of leading dims.

    Parameters
    ----------
    input : Tensor, (*rows, in_features)
        Sharded along any dims, folded ones included, or pending.
    weight : Tensor, (out_features, in_features) or (in_features,)
        A plain one gets a plain, complete gradient.
    bias : Tensor, (out_features,), optional
        Likewise.

    Returns
    -------
    ShardTensor, (*rows, out_features)

    Notes
    -----
    Communication: none where weight and bias are replicated. See the table of the module.
    """
    if type(input) is not ShardTensor or not takes_as_they_are(weight, bias):
        input, weight, bias = promoted(input, weight, bias)
    contraction = _contraction(len(input.shape), len(weight.shape))
    if bias is not None and bias.shape != weight.shape[:-1]:
        return linear(input, weight) + bias  # a bias that broadcasts
    if autocast_is_on():
        return in_autocast_dtype(contract, contraction, input, weight, bias)
    return contract(contraction, input, weight, bias)


@functools.cache
def _contraction(n_input_dims: int, n_weight_dims: int) -> Contraction:
    rows = tuple(range(n_input_dims - 1))
    kernel = torch.nn.functional.linear
    if n_weight_dims == 1:
        return contraction_of((*rows, "in"), ("in",), rows)
    return contraction_of((*rows, "in"), ("out", "in"), (*rows, "out"), kernel)


register_function_handler(torch.nn.functional.linear, serve_linear, promote=False)
