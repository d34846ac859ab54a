"""How large the summands of a bias's gradient are: what decides how exact a sum that cancels can be.

The gradient of a bias is the sum of the gradient of its module's output over tokens. Where that sum is zero (a
normalization over the batch, or softmax, takes the bias out again), rounding leaves noise of the size of the summands.
Measured against itself, or against other gradients, such noise looks like a fault; measured against what was summed, it
is what rounding allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.verify.compare import magnitude

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Cotangents"]

_ADDED = ("bias", "beta")
"""Names under which PyTorch's and MindSpore's layers hold what they add to their output."""


class Cotangents:
    """The largest gradient of the output of every module of ``model`` that has a bias, by the bias's path.

    Attributes:
        largest: of the steps since :meth:`clear`; a module that runs several times adds up.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module that adds a bias."""
        self.platform = platform
        self.largest: dict[str, float] = {}
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            held = platform.direct_parameters(module)
            names = [name for name in _ADDED if held.get(name) is not None]
            if names and id(module) not in attached:
                attached.add(id(module))
                paths = [f"{path}.{name}" if path else name for name in names]
                platform.register_forward_hook(module, self._hook(paths))

    def clear(self) -> None:
        """Forget the last backward."""
        self.largest.clear()

    def _hook(self, paths: list[str]) -> Callable[..., None]:
        def keep(gradient: Any) -> None:
            size = magnitude(np.asarray(self.platform.tensor_to_numpy(self.platform.detach(gradient))))
            for path in paths:
                self.largest[path] = self.largest.get(path, 0.0) + size

        def attach(module: Any, args: Any, output: Any) -> None:
            del module, args
            if self.platform.is_tensor(output):
                self.platform.watch_gradient(output, keep)

        return attach
