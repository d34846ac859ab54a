"""What the stack tells about a call of a PyTorch program: who calls, and for what."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.platform.torch.versions import current_graph_task_id

__all__ = ["infers_shapes", "recomputes"]

_LIBRARIES = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[3]))
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_shape_inference")  # of PyTorch's stages, by release


def infers_shapes() -> bool:
    """Return whether a pipeline's stage calls its module on empty tensors, to learn the shapes of what it returns."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_name in _SHAPE_INFERENCE:
            return True
        frame = frame.f_back
    return False


def recomputes() -> bool:
    """Return whether backward is running: modules that it calls are recomputed."""
    return bool(current_graph_task_id() != -1)
