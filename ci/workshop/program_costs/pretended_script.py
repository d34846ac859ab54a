"""Runs a script as torchrun does, with the CPU instead of a device: ``pretended_script.py cuda train.py ...``."""

from __future__ import annotations

import runpy
import sys

from hyper_parallel.verify.frameworks.torch.pretended.installation import install

if __name__ == "__main__":
    install(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
