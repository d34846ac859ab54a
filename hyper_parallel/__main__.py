"""``python -m hyper_parallel``: the command ``hyper-parallel``, which also works in a checkout."""

from __future__ import annotations

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
