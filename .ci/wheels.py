"""Build every wheel and install them bottom-up into one clean environment, importing each before the next is there.

An import that a package forgot to declare fails here: what it needs is not installed yet, or never will be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
BOTTOM_UP = {
    "packages/spec": "shardtensor_spec",
    "packages/collectives": "shardtensor_collectives",
    "packages/shardtensor": "shardtensor",
    "packages/ops": "shardtensor_ops",
    "packages/parallel-utils": "shardtensor_parallel_utils",
    ".": "domain_parallel",
}
IMPORT = """
import importlib, importlib.metadata, sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own; numpy is nobody's dependency here
module = importlib.import_module(sys.argv[1])
assert (module.__file__ or "").startswith(sys.prefix), f"{module.__path__} is not the installed package"
for entry in importlib.metadata.entry_points(group="shardtensor.ops"):
    assert isinstance(entry.load(), dict), f"{entry.value} is not a manifest"
"""


def build(folder: Path, target: Path) -> Path:
    """Return the wheel built from ``folder``."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=folder,
        check=True,
        env={**os.environ, "HATCH_QUIET": "1"},
    )
    return max(target.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)


def check_contents(wheel: Path, module: str) -> None:
    """Raise if the wheel lacks its type marker or licence, or holds anything but its package."""
    names = zipfile.ZipFile(wheel).namelist()
    assert f"{module}/py.typed" in names, f"{wheel.name} lacks py.typed"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), f"{wheel.name} lacks its licence"
    strangers = [name for name in names if not name.startswith(f"{module}/") and ".dist-info/" not in name]
    assert not strangers, f"{wheel.name} holds {strangers}"


def main() -> None:
    """Build, install, import, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="keep the wheels in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        output = (arguments.output or Path(scratch) / "dist").resolve()
        output.mkdir(parents=True, exist_ok=True)
        environment = Path(scratch) / "environment"
        venv.create(environment, with_pip=True)
        python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        start = time.monotonic()
        subprocess.run([*pip, "install", "-q", TORCH], check=True)
        print(f"{TORCH} in {time.monotonic() - start:.0f} s", flush=True)
        for folder, module in BOTTOM_UP.items():
            wheel = build(ROOT / folder, output)
            check_contents(wheel, module)
            subprocess.run([*pip, "install", "-q", str(wheel)], check=True)
            subprocess.run([str(python), "-I", "-c", IMPORT, module], check=True, cwd=scratch)
            print(f"{wheel.name} installs and imports", flush=True)
        subprocess.run([*pip, "check"], check=True)


if __name__ == "__main__":
    main()
