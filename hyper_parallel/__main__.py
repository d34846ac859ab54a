"""``python -m hyper_parallel``: the command ``hyper-parallel``, also where it is not installed."""

from __future__ import annotations

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
