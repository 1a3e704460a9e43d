"""The exceptions that the packages of this project raise on purpose.

::

    Exception
      └─ ShardTensorError                  catch this one for "anything that a sharded tensor complained about"
           ├─ LayoutMismatchError          (also a ValueError)           shapes, sizes or placements that contradict
           └─ UnsupportedShardingError     (also a NotImplementedError)  right to ask, but no correct way is known here
"""

from __future__ import annotations

from collections.abc import Sequence

_LABEL_WIDTH = 8


class ShardTensorError(Exception):
    """Base of every error that is raised on purpose.

    Parameters
    ----------
    what : str
        What is wrong, with the numbers that show it.
    where : str, optional
        The operator or function that the user called, and the module that serves it.
    inputs : Sequence of str
        One line per input: shape, placements, rows on every rank.
    advice : str, optional
        How to fix it.

    Notes
    -----
    Instances can be pickled, since errors travel from worker processes through pipes.

    Communication: none. Errors are decided from data that every rank knows.

    Examples
    --------
    >>> error = UnsupportedShardingError(
    ...     "unfold needs windows of 7 rows along dim 2, but the global extent is 5",
    ...     where="torch.Tensor.unfold (shardtensor_ops.window)",
    ...     inputs=["(2, 8, 5, 32)  Shard(2) on axis 'domain', rows 3,2,0"],
    ...     advice="pad the input first, or shard dim 3",
    ... )
    >>> print(error)
    unfold needs windows of 7 rows along dim 2, but the global extent is 5
      in torch.Tensor.unfold (shardtensor_ops.window)
      input   (2, 8, 5, 32)  Shard(2) on axis 'domain', rows 3,2,0
      try     pad the input first, or shard dim 3
    """

    def __init__(
        self, what: str, *, where: str | None = None, inputs: Sequence[str] = (), advice: str | None = None
    ) -> None:
        # Only `what` goes to `args`: unpickling calls cls(*args) and then restores the other attributes.
        super().__init__(what)
        self.what = what
        self.where = where
        self.inputs = tuple(inputs)
        self.advice = advice

    def add_context(self, *, where: str | None = None, inputs: Sequence[str] = (), advice: str | None = None) -> None:
        """Fill in what an inner check could not know; what is already there stays.

        Parameters
        ----------
        where, inputs, advice
            As in the constructor.

        Examples
        --------
        >>> try:
        ...     try:
        ...         raise LayoutMismatchError("sizes 3,2 sum to 5, not 6")
        ...     except ShardTensorError as error:
        ...         error.add_context(where="scatter_tensor")
        ...         raise
        ... except LayoutMismatchError as error:
        ...     print(error)
        sizes 3,2 sum to 5, not 6
          in scatter_tensor
        """
        self.where = self.where or where
        self.inputs = self.inputs or tuple(inputs)
        self.advice = self.advice or advice

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  in {self.where}")
        lines += [f"  {'input':<{_LABEL_WIDTH}}{line}" for line in self.inputs]
        if self.advice:
            lines.append(f"  {'try':<{_LABEL_WIDTH}}{self.advice}")
        return "\n".join(lines)


class LayoutMismatchError(ShardTensorError, ValueError):
    """Shapes, shard sizes, placements or meshes contradict each other."""


class UnsupportedShardingError(ShardTensorError, NotImplementedError):
    """The request makes sense, but no correct way to serve it under this sharding is known."""
