"""Interface that each framework implements for random programs, as a module that is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from hyper_parallel.platform.select import FRAMEWORKS

if TYPE_CHECKING:
    from hyper_parallel.core.shard.entry import Binder
    from hyper_parallel.core.shard.sample import Sample

__all__ = ["LANGUAGES", "Language", "language_of"]

LANGUAGES = {name: f"hyper_parallel.verify.frameworks.{name}.programs" for name in FRAMEWORKS}
"""The module of each supported framework; it has the functions of :class:`Language`."""

Arguments = Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]


class Language(Protocol):
    """The functions of such a module, which documents them.

    Attributes:
        MODES: kinds of differentiation that may follow the steps of a program.
        DTYPES: the dtypes of programs; frequent ones are listed several times.
        FUNCTIONS: the functions that idioms call, by the name that idioms use.
        LEFT_OUT: the reason why an idiom is left out, by kind and name.
        HEAD: the imports of a program, as a line of source.
        COPY: source of a copy of ``{}``.
        ASSERTION: source that compares a DTensor's values ``y`` with a plain tensor's ``z`` within ``{bound}``.
    """

    MODES: tuple[str, ...]
    DTYPES: tuple[str, ...]
    FUNCTIONS: Mapping[str, str]
    LEFT_OUT: Mapping[str, str]
    HEAD: str
    COPY: str
    ASSERTION: str

    def modules(self) -> dict[str, tuple[Sample, ...]]:
        """Return the samples of modules, by the name of their call."""

    def forms(
        self, op: str, arguments: Mapping[str, Any], canonical: Binder, *, writes: bool
    ) -> list[tuple[str, Arguments]]:
        """Return the public calls of a canonical operator."""

    def unsound(self, name: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
        """Return why the framework's own result of a call is not a valid reference; empty if it is valid."""

    def call_named(self, name: str) -> Callable[..., Any]:
        """Return a function, method, operator or module by its name."""

    def settle(self) -> None:
        """Wait until asynchronous calls have completed, and raise their errors."""

    def source(self, name: str, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
        """Return a call as source."""

    def literal(self, value: Any) -> str:
        """Return an argument that is not a tensor as source."""

    def values_of(self, array: Any, dtype: str) -> str:
        """Return a tensor's values as source."""

    def leaf(self, tensor: Any, *, requires_grad: bool) -> Any:
        """Return a tensor as a leaf that receives a gradient."""

    def leaf_source(self, text: str, *, requires_grad: bool) -> str:
        """Return the source of a tensor as a leaf that receives a gradient."""

    def detached_source(self, text: str) -> str:
        """Return the source of a leaf's values, detached."""

    def copied(self, tensor: Any) -> Any:
        """Return a copy of a tensor, plain or distributed, through which gradients flow."""

    def state(self, tensor: Any) -> Any:
        """Return a marker that changes with every in-place write to a plain tensor."""

    def may_have_gradient(self, tensor: Any) -> bool:
        """Whether a plain tensor that was computed while the program was generated can be differentiated."""

    def shares_memory(self, tensor: Any, others: Sequence[Any]) -> bool:
        """Whether a plain tensor shares memory with another."""

    def moved(self, tensor: Any, array: Any, gradient: Callable[[Any], Any] | None) -> Any:
        """Return a plain tensor plus ``array``; ``gradient`` changes the gradient that passes through the result."""

    def gradients(
        self,
        body: Callable[[Mapping[int, Any]], Sequence[Any]],
        leaves: Mapping[int, Any],
        differentiated: Sequence[int],
        mode: str,
        cotangents: Sequence[int],
        second: Sequence[tuple[int, int]],
    ) -> dict[tuple[str, int], Any]:
        """Run a program, and differentiate it.

        Args:
            body: function that computes the outputs to differentiate.
            leaves: input tensors of the program, by number.
            differentiated: numbers of the leaves whose gradient is taken.
            mode: one of ``MODES``.
            cotangents: numbers of the leaves that are the cotangents of the outputs.
            second: pairs of numbers: a leaf, and the leaf that is the cotangent of its gradient.

        Returns:
            gradients by ``("gradient", number)`` and ``("second gradient", number)``; None for a gradient that does not
            exist.
        """

    def body_source(
        self,
        steps: Sequence[str],
        values: Sequence[str],
        mode: str,
        outs: Sequence[str],
        by: Sequence[str],
        seeds: Sequence[str],
        second: Mapping[str, str],
    ) -> list[str]:
        """Return the source lines of a function that runs steps, differentiates, and returns values and gradients.

        Args:
            steps: the steps as lines of source.
            values: names of the results.
            mode: one of ``MODES``.
            outs: names of the outputs.
            by: names of the leaves that receive gradients.
            seeds: names of the cotangents.
            second: name of the cotangent of a leaf's gradient, by name of the leaf.
        """


def language_of(framework: str) -> Language:
    """Return the language of a framework.

    Raises:
        ValueError: the framework has no language for programs.
    """
    if framework not in LANGUAGES:
        msg = f"no random programs are written for {framework!r}; there are some for {', '.join(LANGUAGES)}"
        raise ValueError(msg)
    return cast("Language", importlib.import_module(LANGUAGES[framework]))
