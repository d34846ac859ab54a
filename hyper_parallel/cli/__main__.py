"""``python -m hyper_parallel.cli``: the command where it is not installed."""

from __future__ import annotations

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
