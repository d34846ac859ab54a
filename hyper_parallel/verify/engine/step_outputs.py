"""Decides which outputs belong to training steps, not to evaluations: all in grad mode, and some under ``no_grad``."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from hyper_parallel.verify.engine.activations import EVALUATION
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.store import same_values

__all__ = ["StepOutputs"]


class StepOutputs:
    """The outputs and losses of the training steps of a reference.

    An output under ``no_grad`` belongs to a training step in two cases. It may be computed between the forward and the
    backward of the step, like the output of the reference model in preference training. Or it may be the output of a
    frozen module that every step calls, such as a teacher: no parameter of the module has a gradient or changes.

    Args:
        runs: both runs.
        trained: the steps whose gradients were compared; the other steps are left out.
    """

    def __init__(self, runs: PairedRuns, trained: Collection[int]) -> None:
        self.reference, self.names = runs.bounds.reference, runs.parameters.names()
        self.trained = set(trained)
        self._frozen: dict[str, bool] = {}

    def __contains__(self, key: Key) -> bool:
        """Return whether a value is an output or a loss of a training step."""
        if key[2] not in self.trained or key[0] not in {"output", "loss"}:
            return False
        return EVALUATION not in key[1] or key in self._inside or self._is_called_frozen(key)

    @cached_property
    def _inside(self) -> set[Key]:
        """The outputs under ``no_grad`` that are computed between the forward and the backward of a step."""
        inside: set[Key] = set()
        step, pending = -1, False
        for key in self.reference:
            if key[2] != step or key[0] in {"loss", "gradient"}:
                step, pending = key[2], False
            if key[0] == "output" and EVALUATION not in key[1]:
                pending = True
            elif key[0] == "output" and pending:
                inside.add(key)
        return inside

    def _is_called_frozen(self, key: Key) -> bool:
        """Return whether an output comes from a frozen module and is recorded in every training step."""
        always = all((*key[:2], step, 0) in self.reference for step in self.trained)
        return always and self._is_frozen(self.reference[key].module)

    def _is_frozen(self, module: str) -> bool:
        """Return whether a module, or else its nearest enclosing module with parameters, has no trained parameter."""
        if module not in self._frozen:
            own = [name for name in self.names if not module or name.startswith(f"{module}.")]
            around = module.rpartition(".")[0]
            if own or not module:
                self._frozen[module] = bool(own) and self._changing.isdisjoint(own)
            else:
                self._frozen[module] = self._is_frozen(around)
        return self._frozen[module]

    @cached_property
    def _changing(self) -> set[str]:
        """The parameters that have a gradient, or whose values change."""
        found = {key[1] for key in self.reference if key[0] == "gradient"}
        for key, record in self.reference.items():
            if key[0] == "weight" and key[1] not in found:  # the others are not read
                first = self.reference.get(("weight", key[1], -1, 0))
                if first is None or not same_values(first.value, record.value):
                    found.add(key[1])
        return found
