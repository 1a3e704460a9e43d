"""`ShardTensorSpec`: where every row of a tensor lives, for every rank, known without asking anybody."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ._boxes import Box
from ._errors import LayoutMismatchError
from ._grid import Grid, grid_of_sizes, normalized_placements, sharded_dims
from ._interning import interned
from ._torch_private import DTensorSpec, FoldedShard, TensorMeta

ShapesOfAxis = tuple[tuple[int, ...], ...]


class _Interned(type):
    """Makes ``ShardTensorSpec(...)`` return the one object of that value."""

    def __call__(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | None = None,
        shard_order: Any = None,
        use_strided_shard_as_shard_order: bool | None = None,
        *,
        _local_shape: torch.Size | None = None,
        _sharding_shapes: Mapping[int, Sequence[Sequence[int]]] | None = None,
        sizes: Mapping[int, Sequence[int]] | None = None,
    ) -> ShardTensorSpec:
        del use_strided_shard_as_shard_order  # a folded placement means a folded dimension here, never an order
        placements = tuple(placements)
        grid: Grid = {}
        if tensor_meta is not None:
            placements = normalized_placements(placements, len(tensor_meta.shape), mesh.ndim)
            if _sharding_shapes and sizes:
                raise LayoutMismatchError("give the shard shapes or the shard sizes, not both")
            if _sharding_shapes:
                sizes = sizes_of_shapes(_sharding_shapes, placements, mesh.ndim)
            grid = grid_of_sizes(tensor_meta.shape, mesh.shape, placements, sizes)
        spec = ShardTensorSpec.of(mesh, placements, tensor_meta, grid)
        if shard_order is not None and tuple(shard_order) != spec.shard_order:
            raise LayoutMismatchError(
                f"shard order {shard_order} is not the order of the mesh axes {spec.shard_order}",
                advice="let the lower mesh axis be the outer one",
            )
        if _local_shape is not None and tensor_meta is not None and tuple(_local_shape) != tuple(spec.local_shape):
            raise LayoutMismatchError(
                f"local shape {tuple(_local_shape)} is not the shape {tuple(spec.local_shape)} that the sizes give"
            )
        return spec


class ShardTensorSpec(DTensorSpec, metaclass=_Interned):
    """The layout of a sharded tensor: placements, and the rows of **every** rank along every sharded dimension.

    Because every rank knows the extents of all ranks, output shapes, offsets and transfers are computed locally.
    A spec is immutable and interned: building an equal one returns the same object, so ``==`` is ``is`` and hashing
    is free.

    Parameters
    ----------
    mesh : DeviceMesh
        The mesh, of any number of axes.
    placements : Sequence of Placement, (n_axes,)
        ``Shard``, ``Replicate`` or ``Partial`` for every mesh axis; negative shard dims count from the end. Axes that
        shard different dimensions form a product grid; axes that shard the same dimension nest, the lower axis
        outermost.
    tensor_meta : TensorMeta, optional
        Shape, stride and dtype of the whole tensor. Without it only mesh and placements are known.
    shard_order, use_strided_shard_as_shard_order
        As in ``DTensorSpec``; only the default order is accepted.
    _local_shape : torch.Size, optional
        Shape of this rank's shard; checked against the sizes.
    _sharding_shapes : Mapping of int to Sequence of shapes, optional
        Mesh axis -> shape of the shards along that axis, on the line of ranks through this one.
    sizes : Mapping of int to Sequence of int, optional
        Tensor dimension -> rows of every shard, row-major where several axes shard it. By default
        ``torch.chunk``'s.

    Raises
    ------
    LayoutMismatchError
        If sizes, shapes and placements contradict each other.
    IndexError
        If a shard dim is out of range.

    Notes
    -----
    Communication: none.

    Examples
    --------
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
    >>> meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
    >>> spec = ShardTensorSpec(mesh, (Shard(0),), meta)
    >>> spec.sharding_shapes()
    {0: ((4, 3),)}
    >>> spec is ShardTensorSpec(mesh, (Shard(0),), meta, sizes={0: (4,)})
    True
    """

    # DTensorSpec is a dataclass, which would compare by value and hash in Python on every cache lookup.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    grid: Grid
    coordinate: tuple[int, ...] | None
    _is_shared: bool
    _local_shape: torch.Size | None
    _sharding_shapes: dict[int, ShapesOfAxis] | None

    @classmethod
    def of(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], tensor_meta: TensorMeta | None, grid: Grid
    ) -> ShardTensorSpec:
        """Return the spec of an already checked grid: the constructor of code that computed the grid itself.

        Parameters
        ----------
        mesh, placements, tensor_meta
            As in the constructor.
        grid : dict of int to DimSplit
            Split of every sharded dimension.
        """
        placements = tuple(placements)
        key = (mesh, placements, tensor_meta, tuple(sorted(grid.items())))
        return cast(ShardTensorSpec, interned(key, lambda: cls._build(mesh, placements, tensor_meta, grid)))

    @classmethod
    def _build(
        cls, mesh: DeviceMesh, placements: tuple[Placement, ...], tensor_meta: TensorMeta | None, grid: Grid
    ) -> ShardTensorSpec:
        spec = object.__new__(cls)
        DTensorSpec.__init__(spec, mesh, placements, tensor_meta, use_strided_shard_as_shard_order=False)
        coordinate = mesh.get_coordinate()
        spec.grid = dict(sorted(grid.items()))
        spec.coordinate = None if coordinate is None else tuple(coordinate)
        spec._local_shape = None
        spec._sharding_shapes = None
        if tensor_meta is not None:
            for dim, split in spec.grid.items():
                assert split.extent == tensor_meta.shape[dim], (dim, split, tensor_meta.shape)
            if spec.coordinate is not None:
                spec._local_shape = torch.Size(spec.shape_at(spec.coordinate))
                spec._sharding_shapes = {
                    axis: spec._shapes_along(axis)
                    for axis, placement in enumerate(placements)
                    if isinstance(placement, (Shard, FoldedShard))
                }
        spec._is_shared = True
        return spec

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's shard.

        Raises
        ------
        RuntimeError
            If the shape of the whole tensor is not known, or this rank is not in the mesh.
        """
        if self._local_shape is None:
            if self.tensor_meta is None:
                raise RuntimeError("the spec has no tensor_meta, so the local shape has not been set")
            raise RuntimeError(f"this rank is not part of the mesh {self.mesh}, so it holds no shard")
        return self._local_shape

    def shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape of the shard that the rank at ``coordinate`` of the mesh holds."""
        shape = list(self._meta.shape)
        for dim, split in self.grid.items():
            shape[dim] = split.n_repeats * split.sizes[split.shard_index(coordinate, self.mesh.shape)]
        return tuple(shape)

    def shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Coordinate of every rank -> shape of its shard: the whole grid."""
        return {coordinate: self.shape_at(coordinate) for coordinate in self.coordinates()}

    def coordinates(self) -> list[tuple[int, ...]]:
        """Coordinates of all ranks of the mesh, row-major: position i is the rank ``mesh.mesh.flatten()[i]``."""
        return list(itertools.product(*(range(n_ranks) for n_ranks in self.mesh.shape)))

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """Box of the whole tensor that the rank at ``coordinate`` holds.

        Raises
        ------
        LayoutMismatchError
            If a dimension is folded: its rows are then no interval. Use `unfolded` first.
        """
        box = [(0, extent) for extent in self._meta.shape]
        for dim, split in self.grid.items():
            if split.n_repeats != 1:
                raise LayoutMismatchError(f"dim {dim} is folded, so the rows of a rank are no box of the tensor")
            box[dim] = split.rows(coordinate, self.mesh.shape)
        return tuple(box)

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """First row of this rank's shard, per mesh axis.

        Parameters
        ----------
        mesh_dim : int, optional
            Mesh axis to get the offset for; all of them by default.

        Returns
        -------
        tuple of int, (n_axes,), or int
            Where several axes shard one dimension, each axis contributes its part and the sum is the first row.
            0 along axes that do not shard.

        Raises
        ------
        RuntimeError
            If the shapes are not known or this rank is not in the mesh.
        """
        self.local_shape  # noqa: B018  raises where there is no shard on this rank
        coordinate = cast("tuple[int, ...]", self.coordinate)
        offsets = [0] * self.mesh.ndim
        for split in self.grid.values():
            # Position of the first shard under the prefix of axes seen so far: what each axis adds is its offset.
            sizes, first = split.sizes, 0
            n_below = len(sizes)
            for axis in split.axes:
                n_below //= self.mesh.shape[axis]
                start = first
                first += coordinate[axis] * n_below
                offsets[axis] = sum(sizes[start:first])
        return tuple(offsets) if mesh_dim is None else offsets[mesh_dim]

    def sharding_shapes(self, mesh_dim: int | None = None) -> dict[int, ShapesOfAxis] | ShapesOfAxis:
        """Shapes of the shards along mesh axes, on the line of ranks through this one.

        Parameters
        ----------
        mesh_dim : int, optional
            Mesh axis; all that shard by default.

        Returns
        -------
        dict of int to tuple of shapes, or tuple of shapes
            Plain int tuples. See `shapes` for the whole grid.

        Raises
        ------
        RuntimeError
            If the shapes are not known or this rank is not in the mesh.
        KeyError
            If the mesh axis does not shard.
        """
        self.local_shape  # noqa: B018  raises where there is no shard on this rank
        shapes = cast("dict[int, ShapesOfAxis]", self._sharding_shapes)
        return dict(shapes) if mesh_dim is None else shapes[mesh_dim]

    def sizes(self) -> dict[int, tuple[int, ...]]:
        """Tensor dimension -> rows of every shard, in the form that the constructor takes."""
        return {dim: split.sizes for dim, split in self.grid.items()}

    def replicated(self) -> ShardTensorSpec:
        """Return the spec of the same tensor, whole on every rank."""
        return ShardTensorSpec.of(self.mesh, (Replicate(),) * self.mesh.ndim, self.tensor_meta, {})

    def with_meta(self, tensor_meta: TensorMeta) -> ShardTensorSpec:
        """Return the spec of a tensor of another dtype or stride, split alike.

        Parameters
        ----------
        tensor_meta : TensorMeta
            Its shape must be the same along all sharded dimensions.
        """
        return ShardTensorSpec.of(self.mesh, self.placements, tensor_meta, self.grid)

    def unfolded(self) -> ShardTensorSpec:
        """Return the spec of the same memory with every folded dimension seen as two: repeats, and rows of one repeat.

        The local tensor of the result is a view of the local tensor of this spec where that is contiguous.
        """
        folded = {dim: split for dim, split in self.grid.items() if split.n_repeats != 1}
        if not folded:
            return self
        shape: list[int] = []
        position: dict[int, int] = {}
        for dim, extent in enumerate(self._meta.shape):
            if dim in folded:
                shape.append(folded[dim].n_repeats)
                extent //= folded[dim].n_repeats
            position[dim] = len(shape)
            shape.append(extent)
        placements = tuple(
            Shard(position[placement.dim]) if isinstance(placement, (Shard, FoldedShard)) else placement
            for placement in self.placements
        )
        grid = {position[dim]: split._replace(n_repeats=1) for dim, split in self.grid.items()}
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), self._meta.dtype)
        return ShardTensorSpec.of(self.mesh, placements, meta, grid)

    @property
    def is_folded(self) -> bool:
        """Whether a dimension is folded."""
        return any(split.n_repeats != 1 for split in self.grid.values())

    @property
    def has_partial(self) -> bool:
        """Whether a reduction is pending along some mesh axis."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    @property
    def _meta(self) -> TensorMeta:
        if self.tensor_meta is None:
            raise RuntimeError("the spec has no tensor_meta, so shapes are not known")
        return self.tensor_meta

    def _shapes_along(self, axis: int) -> ShapesOfAxis:
        here = cast("tuple[int, ...]", self.coordinate)
        line = [(*here[:axis], index, *here[axis + 1 :]) for index in range(self.mesh.shape[axis])]
        return tuple(self.shape_at(coordinate) for coordinate in line)

    def __setattr__(self, name: str, value: Any) -> None:
        # Interned objects are shared: a change would reach tensors that have nothing to do with each other.
        if self.__dict__.get("_is_shared") and name != "_hash":
            raise AttributeError(f"ShardTensorSpec is immutable; build another one instead of setting {name!r}")
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardTensorSpec.of, (self.mesh, self.placements, self.tensor_meta, self.grid)

    def __copy__(self) -> ShardTensorSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensorSpec:
        return self

    def _stable_hash(self) -> str:
        """Hash that is the same in another process: AOT autograd keys its cache on it."""
        key = f"{super()._stable_hash()} {sorted(self.grid.items())}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """One line for error messages: shape, placements by axis name, rows of every shard.

        Examples
        --------
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("domain",))
        >>> meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
        >>> ShardTensorSpec(mesh, (Shard(0),), meta).describe()
        "(4, 3)  Shard(0) on axis 'domain', rows 4"
        """
        names: Sequence[str | int] = self.mesh.mesh_dim_names or range(self.mesh.ndim)
        parts = []
        for axis, placement in enumerate(self.placements):
            text = describe_placement(placement)
            if isinstance(placement, (Shard, FoldedShard)) and self.grid:
                split = self.grid[placement.dim]
                text += f" on axis {names[axis]!r}, rows {','.join(map(str, split.sizes))}"
                if split.n_repeats != 1:
                    text += f" repeated {split.n_repeats} times"
            else:
                text += f" on axis {names[axis]!r}"
            parts.append(text)
        shape = "shape unknown" if self.tensor_meta is None else str(tuple(self.tensor_meta.shape))
        return f"{shape}  {'; '.join(parts)}"

    def __repr__(self) -> str:
        return f"ShardTensorSpec({self.describe()})"

    __str__ = __repr__


def describe_placement(placement: Placement) -> str:
    """Name of a placement as a user writes it: ``Shard(0)``, ``Replicate()``, ``Partial(sum)``."""
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, FoldedShard):
        return f"Shard({placement.dim}) folded"
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op})"
    return "Replicate()"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Stride of a contiguous tensor, as torch computes it (a dimension of no rows counts as one).

    Examples
    --------
    >>> contiguous_stride((2, 0, 3))
    (3, 3, 1)
    """
    stride = []
    step = 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


def sizes_of_shapes(
    shapes: Mapping[int, Sequence[Sequence[int]]], placements: Sequence[Placement], n_axes: int
) -> dict[int, tuple[int, ...]]:
    """Turn the shapes of the shards along mesh axes into rows per tensor dimension.

    Parameters
    ----------
    shapes : Mapping of int to Sequence of shapes
        Mesh axis -> shape of each shard along it.
    placements : Sequence of Placement, (n_axes,)
        One per mesh axis.
    n_axes : int
        Axes of the mesh.

    Returns
    -------
    dict of int to tuple of int
        Tensor dimension -> rows of every shard.

    Raises
    ------
    LayoutMismatchError
        If an axis is given that does not shard, or two axes shard one dimension: the line of ranks through this one
        then does not show the others' rows.
    """
    nested = {axis for axes in sharded_dims(placements).values() if len(axes) > 1 for axis in axes}
    sizes = {}
    for axis, shapes_of_axis in shapes.items():
        placement = placements[axis] if 0 <= axis < n_axes else None
        if not isinstance(placement, (Shard, FoldedShard)):
            raise LayoutMismatchError(f"shard shapes are given for mesh axis {axis}, which does not shard the tensor")
        if axis in nested:
            raise LayoutMismatchError(
                f"dim {placement.dim} is sharded by several mesh axes: shapes along axis {axis} do not tell the whole",
                advice="give the sizes per tensor dimension",
            )
        sizes[placement.dim] = tuple(shape[placement.dim] for shape in shapes_of_axis)
    return sizes
