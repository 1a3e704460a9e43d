from __future__ import annotations

import copy
import pickle

import pytest

from shardtensor_spec import LayoutMismatchError, ShardTensorError, UnsupportedShardingError

MESSAGE = """\
unfold needs windows of 7 rows along dim 2, but the global extent is 5
  in torch.Tensor.unfold (shardtensor_ops.window)
  input   (2, 8, 5, 32)  Shard(2) on axis 'domain', rows 3,2,0
  input   (7,)  plain
  try     pad the input first, or shard dim 3"""


def make(cls: type[ShardTensorError]) -> ShardTensorError:
    return cls(
        "unfold needs windows of 7 rows along dim 2, but the global extent is 5",
        where="torch.Tensor.unfold (shardtensor_ops.window)",
        inputs=["(2, 8, 5, 32)  Shard(2) on axis 'domain', rows 3,2,0", "(7,)  plain"],
        advice="pad the input first, or shard dim 3",
    )


@pytest.mark.parametrize(
    ("cls", "builtin"), [(LayoutMismatchError, ValueError), (UnsupportedShardingError, NotImplementedError)]
)
def test_errors_can_be_caught_as_ours_and_as_the_builtin(cls: type[ShardTensorError], builtin: type[Exception]) -> None:
    assert isinstance(make(cls), ShardTensorError)
    assert isinstance(make(cls), builtin)


@pytest.mark.parametrize("cls", [ShardTensorError, LayoutMismatchError, UnsupportedShardingError])
def test_message_survives_pickle_and_copy(cls: type[ShardTensorError]) -> None:
    error = make(cls)
    assert str(error) == MESSAGE
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == MESSAGE
        assert (twin.what, twin.where, twin.inputs, twin.advice) == (
            error.what,
            error.where,
            error.inputs,
            error.advice,
        )


def test_context_adds_what_is_missing_and_replaces_nothing() -> None:
    error = LayoutMismatchError("a", advice="b")
    error.add_context(where="c", inputs=["d"], advice="e")
    error.add_context(where="f")
    assert str(error) == "a\n  in c\n  input   d\n  try     b"
