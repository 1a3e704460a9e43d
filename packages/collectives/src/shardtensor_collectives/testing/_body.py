"""A pytest test function as a job for the rank pool."""

from __future__ import annotations

import ast
import pickle
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtensor_collectives.testing._worker import RankSkip

_ready: dict[str, types.ModuleType] = {}


@dataclass(frozen=True)
class TestBody:
    """The body of one test item; calling it runs it in this process.

    Arguments that cannot be pickled (lambdas in ``parametrize``) are looked up again by their row
    in the marks of the function, which the worker has imported.
    """

    __test__ = False  # not a test class, whatever its name

    path: str
    module_name: str
    qualname: str
    arguments: Mapping[str, bytes]
    rows: Mapping[str, int]
    search_path: tuple[str, ...]
    filters: tuple[str, ...]

    def prepare(self) -> None:
        """Import the test module, with pytest's assertion rewriting."""
        sys.path += [entry for entry in self.search_path if entry not in sys.path]
        if self.path not in _ready:
            _ready[self.path] = _load(self.path, self.module_name)

    def __call__(self) -> None:
        import pytest
        from _pytest.config import parse_warning_filter

        owner: Any = _ready[self.path]
        marks = list(_marks_of(owner))
        *owners, name = self.qualname.split(".")
        for part in owners:
            owner = getattr(owner, part)
            marks += _marks_of(owner)
        function = getattr(owner() if owners else owner, name)
        marks += _marks_of(function)
        kwargs = {key: self._argument(key, marks) for key in self.arguments}
        patch = pytest.MonkeyPatch()
        if "monkeypatch" in kwargs:
            kwargs["monkeypatch"] = patch
        try:
            with warnings.catch_warnings():
                for text in self.filters:
                    warnings.filterwarnings(*parse_warning_filter(text, escape=False))
                function(**kwargs)
        except pytest.skip.Exception as skip:
            raise RankSkip(skip.msg or "skipped") from None
        finally:
            patch.undo()

    def _argument(self, key: str, marks: Sequence[Any]) -> Any:
        if self.arguments[key]:
            return pickle.loads(self.arguments[key])
        if key in self.rows:
            return parametrized_values(key, marks)[self.rows[key]]
        if key == "monkeypatch":
            return None
        raise TypeError(f"the value of fixture {key!r} cannot be pickled, so it cannot reach the ranks")


def parametrized_values(key: str, marks: Sequence[Any]) -> list[Any]:
    """All values that ``parametrize`` marks give to the argument `key`."""
    from _pytest.mark import ParameterSet

    for mark in marks:
        if mark.name != "parametrize":
            continue
        names, rows = mark.args[0], mark.args[1]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        if key in names:
            column = list(names).index(key)
            rows = [row.values if isinstance(row, ParameterSet) else row if len(names) > 1 else (row,) for row in rows]
            return [row[column] for row in rows]
    return []


def pickled_or_empty(value: object) -> bytes:
    """The pickled value, or nothing when it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return b""


def _marks_of(owner: Any) -> list[Any]:
    marks = getattr(owner, "pytestmark", [])
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


def _load(path: str, module_name: str) -> types.ModuleType:
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    module = types.ModuleType(module_name)
    module.__file__ = path
    sys.modules[module_name] = module  # so that classes of the test module can be pickled
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    return module
