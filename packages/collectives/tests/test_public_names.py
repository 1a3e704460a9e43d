from __future__ import annotations

import re
from pathlib import Path

import shardtensor_collectives as sc
from shardtensor_collectives import testing


def test_every_public_name_is_documented_and_sorted():
    for module in (sc, testing):
        assert module.__all__ == sorted(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            assert isinstance(value, tuple) or name == "ReduceOp" or value.__doc__, name


def test_the_readme_names_only_what_exists():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    used = set(re.findall(r"\bsc\.(\w+)", text)) | set(re.findall(r"^\| `(\w+)[(`]", text, re.MULTILINE))
    assert used - {"compile"} <= set(sc.__all__), used - set(sc.__all__)
    assert {"all_gather_v", "exchange", "comm_trace"} <= used
