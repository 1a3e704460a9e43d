"""``python -m shardtensor_collectives doctor``."""

from __future__ import annotations

import sys

from shardtensor_collectives._doctor import main

if __name__ == "__main__":
    sys.exit(main())
