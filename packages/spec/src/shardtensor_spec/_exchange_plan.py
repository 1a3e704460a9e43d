"""What one rank does in an exchange: frozen records that `plan_exchange` fills and an executor walks through."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from ._boxes import Box, are_disjoint, box_numel, box_of_shape, box_shape

N_CACHED_ADJOINTS = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """One region that moves as a block.

    Attributes
    ----------
    source : Box
        Where it is read, in the coordinates of the tensor that is read.
    target : Box
        Where it is written, in the coordinates of the tensor that is written. Of the same shape as ``source``.
    """

    source: Box
    target: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every dimension."""
        return box_shape(self.source)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return box_numel(self.source)

    def reversed(self) -> Piece:
        """Return the same block, travelling back."""
        return Piece(self.target, self.source)


@dataclass(frozen=True, slots=True)
class Message:
    """All that travels between two ranks in one direction, in one buffer.

    Attributes
    ----------
    peer : int
        The other rank, as its position in the group.
    pieces : tuple of Piece
        In the order in which they lie in the buffer, each in row-major order. The sender's and the receiver's
        message hold equal pieces.
    numel : int
        Elements in the buffer.
    """

    peer: int
    pieces: tuple[Piece, ...]
    numel: int

    def reversed(self) -> Message:
        """Return the message that brings the same pieces back."""
        return Message(self.peer, tuple([piece.reversed() for piece in self.pieces]), self.numel)


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank sends, receives and copies to fill its window of the global tensor.

    An executor allocates the window and then, in this order,

    1. writes its fill value into each box of ``gaps``;
    2. reads ``piece.source`` of the local tensor and writes ``piece.target`` of the window, for each of ``copies``;
    3. exchanges messages: packs ``piece.source`` of the local tensor for each of ``sends``, unpacks
       ``piece.target`` of the window for each of ``receives``;
    4. copies ``piece.source`` of the *window* to ``piece.target`` of the window, for each of ``repeats``, in order.

    Attributes
    ----------
    rank, n_ranks : int
        This rank's position in the group, and the group's size.
    local_shape : tuple of int
        Shape of the part that this rank owns.
    window_shape : tuple of int
        Shape of the window that it wants.
    sends, receives : tuple of Message
        At most one per peer, by ascending peer, none empty. ``source`` is a region of the owner's local tensor,
        ``target`` one of the receiver's window.
    copies : tuple of Piece
        From this rank's local tensor into its window.
    repeats : tuple of Piece
        From the window into the window, where a circular window is longer than the extent: what it holds twice
        travels once.
    gaps : tuple of Box
        Regions of the window that nothing of the above writes (before ``repeats``, which may copy a gap further).
    moves_nothing : bool
        No rank of the group has a message. All ranks know it alike, so that none enters a collective.

    Notes
    -----
    Communication: none here. The executor moves `n_sent` and `n_received` elements, and nothing if ``moves_nothing``.
    """

    rank: int
    n_ranks: int
    local_shape: tuple[int, ...]
    window_shape: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    copies: tuple[Piece, ...]
    repeats: tuple[Piece, ...]
    gaps: tuple[Box, ...]
    moves_nothing: bool
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A plan is a key in many look-ups and holds hundreds of ints: hash it once.
        key = (self.rank, self.local_shape, self.window_shape, self.sends, self.receives, self.copies, self.repeats)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_complete(self) -> bool:
        """Whether the whole window gets values, so that nothing is left to fill."""
        return not self.gaps

    @property
    def is_identity(self) -> bool:
        """Whether this rank's window is exactly its local tensor. It may have to send all the same."""
        whole = box_of_shape(self.local_shape)
        return self.local_shape == self.window_shape and (
            self.copies == (Piece(whole, whole),) or box_numel(whole) == 0
        )

    @property
    def n_sent(self) -> int:
        """Elements that this rank sends."""
        return sum([message.numel for message in self.sends])

    @property
    def n_received(self) -> int:
        """Elements that this rank receives; equals `lower_bound_elements`."""
        return sum([message.numel for message in self.receives])

    def adjoint(self) -> AdjointPlan:
        """Return the plan of the transposed exchange, which carries gradients of the windows to the owners."""
        return _adjoint_of(self)


@dataclass(frozen=True)
class AdjointPlan:
    """The transpose of an `ExchangePlan`: windows go back along the same pieces and are **added** where they meet.

    An executor gets the gradient of the window and returns that of the local tensor:

    1. for each of ``folds``, in order, adds ``piece.source`` of the window gradient to ``piece.target`` of the window
       gradient (in a copy of it, unless ``folds`` is empty);
    2. starts from zeros in the shape of the local tensor (or from uninitialised memory and with writes in place of
       the additions below, if ``writes_each_once``);
    3. adds ``piece.source`` of the window gradient to ``piece.target`` of the local gradient, for each of ``copies``;
    4. exchanges messages, packing ``piece.source`` of the window gradient for each of ``sends`` and adding into
       ``piece.target`` of the local gradient for each of ``receives``.

    What lies in a gap of the window has no owner, and its gradient is dropped.

    Attributes
    ----------
    rank, n_ranks, moves_nothing
        As in the `ExchangePlan`.
    window_shape, local_shape : tuple of int
        Shape of the gradient that goes in, and of the one that comes out.
    sends, receives : tuple of Message
        The receives and sends of the `ExchangePlan`, reversed; the pieces keep their order.
    copies, folds : tuple of Piece
        The copies of the `ExchangePlan`, reversed; its repeats, reversed and in the opposite order.
    writes_each_once : bool
        Every element of the local gradient gets exactly one value, as in a reshard.

    Notes
    -----
    With replicated owners each copy of the source gets the sum over those windows that were filled *from that copy*.
    The gradient of the logical tensor is the sum over its copies, and remains to be reduced by the caller
    (it is a ``Partial`` over the replicas).

    The messages are those of the forward exchange, so `n_sent` and `n_received` change places.
    """

    rank: int
    n_ranks: int
    window_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    copies: tuple[Piece, ...]
    folds: tuple[Piece, ...]
    writes_each_once: bool
    moves_nothing: bool

    @property
    def n_sent(self) -> int:
        """Elements that this rank sends."""
        return sum([message.numel for message in self.sends])

    @property
    def n_received(self) -> int:
        """Elements that this rank receives."""
        return sum([message.numel for message in self.receives])


@functools.lru_cache(maxsize=N_CACHED_ADJOINTS)
def _adjoint_of(plan: ExchangePlan) -> AdjointPlan:
    copies = tuple([piece.reversed() for piece in plan.copies])
    receives = tuple([message.reversed() for message in plan.sends])
    written = [piece.target for piece in copies]
    written += [piece.target for message in receives for piece in message.pieces]
    n_local = box_numel(box_of_shape(plan.local_shape))
    return AdjointPlan(
        rank=plan.rank,
        n_ranks=plan.n_ranks,
        window_shape=plan.window_shape,
        local_shape=plan.local_shape,
        sends=tuple([message.reversed() for message in plan.receives]),
        receives=receives,
        copies=copies,
        folds=tuple([piece.reversed() for piece in reversed(plan.repeats)]),
        writes_each_once=sum([box_numel(box) for box in written]) == n_local and are_disjoint(written),
        moves_nothing=plan.moves_nothing,
    )
