"""What import-linter cannot see: who communicates, and who touches torch's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {path.name: path for path in sorted((ROOT / "packages").glob("*/src/*")) if path.is_dir()}
PACKAGES["domain_parallel"] = ROOT / "src" / "domain_parallel"

COMMUNICATING_MODULES = (
    "torch.distributed._functional_collectives",
    "torch.distributed.nn",
    "torch.ops._c10d_functional",
    "torch.ops._c10d_functional_autograd",
    "torch.ops.c10d",
)
COMMUNICATING_FUNCTIONS = {
    f"torch.distributed.{name}"
    for name in (
        "P2POp",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
    )
}
# Methods of a ProcessGroup, under names that nothing else has.
COMMUNICATING_METHODS = {
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
}


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, full name) of everything below ``torch`` that a module imports or reaches by attributes."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        attributes: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
            inner = inner.value
        if attributes and isinstance(inner, ast.Name) and inner.id in bound:
            yield node.lineno, ".".join([bound[inner.id], *reversed(attributes)])


def communication(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    found = [
        (line, name)
        for line, name in torch_names(tree)
        if name in COMMUNICATING_FUNCTIONS
        or any(name == module or name.startswith(f"{module}.") for module in COMMUNICATING_MODULES)
    ]
    found += [
        (node.lineno, node.func.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COMMUNICATING_METHODS
    ]
    return sorted(set(found))


def private_torch_names(source: str) -> list[tuple[int, str]]:
    def is_private(part: str) -> bool:
        return part.startswith("_") and not part.endswith("__")

    found = {name for name in torch_names(ast.parse(source)) if any(map(is_private, name[1].split(".")))}
    inner = {(line, name.rpartition(".")[0]) for line, name in found}  # of torch._C.f, torch._C is no news
    return sorted(found - inner)


def python_files(package: str) -> list[Path]:
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files, f"{package} holds no Python file: did it move?"
    return files


def listing(path: Path, found: list[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found]


def test_all_packages_are_seen():
    assert sorted(PACKAGES) == [
        "domain_parallel",
        "shardtensor",
        "shardtensor_collectives",
        "shardtensor_ops",
        "shardtensor_parallel_utils",
        "shardtensor_spec",
    ]


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"shardtensor_collectives"}))
def test_only_collectives_communicates(package):
    found = [line for path in python_files(package) for line in listing(path, communication(path.read_text()))]
    assert not found, (
        "call shardtensor_collectives instead, so that traces and NVTX ranges miss nothing:\n" + "\n".join(found)
    )


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_private_torch_names_live_in_one_module(package):
    found = [
        line
        for path in python_files(package)
        if path.name != "_torch_private.py"
        for line in listing(path, private_torch_names(path.read_text()))
    ]
    assert not found, "import these from the package's _torch_private.py, beside their test:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", "torch.distributed.all_reduce"),
        ("from torch import distributed\ndistributed.barrier()", "torch.distributed.barrier"),
        ("import torch\ntorch.distributed.send(x, 1)", "torch.distributed.send"),
        ("from torch.distributed import broadcast as share", "torch.distributed.broadcast"),
        ("import torch.distributed.nn.functional as f", "torch.distributed.nn.functional"),
        ("import torch\ntorch.ops._c10d_functional.all_reduce(x)", "torch.ops._c10d_functional.all_reduce"),
        ("group.allreduce([x])", "allreduce"),
    ],
)
def test_communication_is_found_however_it_is_spelled(source, expected):
    assert expected in [name for _, name in communication(source)]


def test_what_does_not_communicate_passes():
    assert not communication(
        "import torch.distributed as dist\ndist.get_rank()\nfrom x import all_reduce\nall_reduce(y)"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
            ["torch.distributed.tensor._dtensor_spec.DTensorSpec"],
        ),
        ("import torch\ntorch._C._get_dispatch_mode(0)", ["torch._C._get_dispatch_mode"]),
        ("import torch\nx._local_tensor\ntorch.nn.Module.__init__", []),
    ],
)
def test_private_names_are_found(source, expected):
    assert [name for _, name in private_torch_names(source)] == expected
