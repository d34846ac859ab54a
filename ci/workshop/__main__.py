"""``python ci/workshop COMMAND``: the commands that only maintainers run, from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

# Python puts this folder first, where `coverage` would be found instead of the tool.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from workshop.commands import main  # noqa: E402 - found by the line above

if __name__ == "__main__":
    sys.exit(main())
