"""pytest plugin: ``@pytest.mark.ranks(1, 2, 4, timeout=20)`` runs a test body on every rank.

Notes
-----
The body runs in worker processes with a fresh gloo world; ``torch.distributed`` is initialised there, never
in the process that runs pytest. ``parametrize``, ``pytest.raises``, ``pytest.skip`` (on all ranks alike),
``monkeypatch`` and fixtures whose values can be pickled work. ``SHARDTENSOR_TIMEOUT_SCALE=3`` in the
environment multiplies all limits, for slow machines; the ini option ``rankpool_preload`` lists further modules to
import once for all workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from shardtensor_collectives.testing._body import TestBody, parametrized_values, pickled_or_empty
from shardtensor_collectives.testing._pool import DEFAULT_PRELOAD, RankFailure, RankPool
from shardtensor_collectives.testing._worker import RankSkip

_ARGUMENT = "_n_ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini("rankpool_preload", "modules that the rank pool imports once for all workers", "linelist", [])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers", "ranks(*sizes, timeout=20): run the body on every rank of a fresh gloo world of each size"
    )


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let a test module import helper modules beside it, which pytest's ``importlib`` mode does not by itself."""
    if isinstance(collector, pytest.Module):
        folder = str(collector.path.parent)
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that nothing installed is shadowed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item per world size."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    if not mark.args or not all(isinstance(n, int) and n > 0 for n in mark.args):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: ranks() takes world sizes, for example ranks(1, 2, 4)")
    metafunc.fixturenames.append(_ARGUMENT)
    metafunc.parametrize(_ARGUMENT, mark.args, ids=[f"{n}r" for n in mark.args])


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The pool that all tests of the session share."""
    preload = (*DEFAULT_PRELOAD, "_pytest.assertion.rewrite", *request.config.getini("rankpool_preload"))
    with RankPool(preload=preload) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked body on the pool instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    config = pyfuncitem.config
    filters = [*config.getini("filterwarnings"), *(config.known_args_namespace.pythonwarnings or ())]
    for extra in reversed(list(pyfuncitem.iter_markers("filterwarnings"))):
        filters += extra.args
    names = pyfuncitem._fixtureinfo.argnames
    rows = {}
    for name in names:
        values = parametrized_values(name, list(pyfuncitem.iter_markers("parametrize")))
        for row, value in enumerate(values):
            if value is pyfuncitem.funcargs[name]:
                rows[name] = row
    body = TestBody(
        path=str(pyfuncitem.path),
        module_name=pyfuncitem.function.__module__,
        qualname=pyfuncitem.function.__qualname__,
        arguments={name: pickled_or_empty(pyfuncitem.funcargs[name]) for name in names},
        rows=rows,
        search_path=tuple(sys.path),
        filters=tuple(filters),
    )
    pool: RankPool = pyfuncitem._request.getfixturevalue("rank_pool")
    n_ranks = cast(int, pyfuncitem.callspec.params[_ARGUMENT])
    scale = float(os.environ.get("SHARDTENSOR_TIMEOUT_SCALE", "1"))
    try:
        pool.run(body, n_ranks, timeout=scale * mark.kwargs.get("timeout", 20.0))
    except RankFailure as failure:
        pytest.fail(str(failure), pytrace=False)
    except RankSkip as skip:
        pytest.skip(str(skip))
    return True
