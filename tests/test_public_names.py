"""The exported names are the documented ones, no more and no fewer."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = [
    "shardtensor",
    "shardtensor_collectives",
    "shardtensor_ops",
    "shardtensor_parallel_utils",
    "shardtensor_spec",
]
MODULES = [
    "domain_parallel",
    *MEMBERS,
    "shardtensor.extending",
    "shardtensor.testing",
    "shardtensor_collectives.testing",
]


def documented_names(module: str) -> list[str]:
    """Read the names from the tables ``| `name` | what it is |`` of ``docs/reference/<module>.md``."""
    page = ROOT / "docs" / "reference" / f"{module}.md"
    return re.findall(r"^\| \{py:obj\}`~[\w.]*?(\w+)`", page.read_text(), flags=re.MULTILINE)


def constants_classes_functions(name: str) -> tuple[int, str]:
    """Sort as ruff's RUF022 does."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", MODULES)
def test_exported_names_are_the_documented_ones(module):
    exported = importlib.import_module(module).__all__
    assert list(exported) == sorted(set(exported), key=constants_classes_functions)
    assert sorted(documented_names(module)) == sorted(exported)


@pytest.mark.parametrize("module", MODULES)
def test_exported_names_exist_and_are_described(module):
    imported = importlib.import_module(module)
    for name in imported.__all__:
        value = getattr(imported, name)
        if callable(value) and not hasattr(value, "__origin__"):  # an alias of a type cannot have a docstring
            assert value.__doc__, f"{module}.{name} has no docstring"


def test_the_meta_package_only_passes_on_what_its_members_export():
    domain_parallel = importlib.import_module("domain_parallel")
    exported = {
        name: getattr(importlib.import_module(m), name) for m in MEMBERS for name in importlib.import_module(m).__all__
    }
    for name in domain_parallel.__all__:
        assert getattr(domain_parallel, name) is exported[name]


@pytest.mark.parametrize("module", ["shardtensor", "shardtensor_parallel_utils"])
def test_the_meta_package_has_all_that_a_training_script_needs(module):
    domain_parallel = importlib.import_module("domain_parallel")
    assert set(importlib.import_module(module).__all__) <= set(domain_parallel.__all__)
