"""Assert that a split run is the same training as the single-process one.

python train.py --output one
torchrun --nproc-per-node 2 train.py --split 0.4,0.6 --output two
python check.py one two
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from brain_mri._checks import compare
from brain_mri._record import load_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="folder of the single-process run")
    parser.add_argument("run", type=Path, help="folder of the split run")
    parser.add_argument("--skip-memory", action="store_true", help="where a job is too small for the bound")
    arguments = parser.parse_args()
    try:
        checks = compare(load_run(arguments.reference), load_run(arguments.run))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    if arguments.skip_memory:
        checks = [check for check in checks if "memory" not in check.name]
    for check in checks:
        print(f"{'ok  ' if check.has_passed else 'FAIL'}  {check.name}: {check.detail}")
    if not all(check.has_passed for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
