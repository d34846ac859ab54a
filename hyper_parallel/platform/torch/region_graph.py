"""Traces a function of local tensors, through the DTensors inside it, into a forward and a backward graph.

PyTorch's AOTAutograd traces. This file separates forward and backward by the order of the trace, so that both run the
program's operators and collectives in the program's order, and turns the collectives into calls of the transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.region_collectives import COLLECTIVE, recorded_call
from hyper_parallel.platform.torch.region_numbers import NUMBERS, drawing, forget_numbers
from hyper_parallel.platform.torch.region_run import Halves, single_node
from hyper_parallel.platform.torch.region_views import remove_idle_views
from hyper_parallel.platform.torch.versions import overload_call

__all__ = ["INDUCTOR", "Backend", "Region"]

INDUCTOR = "inductor"
"""Name of PyTorch's own compiler, which fuses operators; results are equal within its tolerance."""
_INDUCTOR_OPTIONS = {"fallback_random": True}
"""Setting of Inductor with which random operators draw from PyTorch's generator, as they do uncompiled."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Compiles a graph, given example inputs, into a function, as backends of ``torch.compile`` do."""


class Region:
    """A function that runs as graphs, which are traced at its first call.

    Args:
        function: function of local tensors; returns a list of them.
        backend: compiles the graphs, or "inductor"; by default they run operator by operator.
        while_tracing: context that is closed at the end of the trace.
    """

    run: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], backend: Backend | str | None, while_tracing: ExitStack) -> None:
        from hyper_parallel.platform.torch.versions import aot_function, make_boxed_func  # imports PyTorch's compiler

        self._halves: Halves | None = None
        decompositions = None
        if backend == INDUCTOR:
            from hyper_parallel.platform.torch.versions import inductor_config, select_decomp_table

            with inductor_config.patch(_INDUCTOR_OPTIONS):
                backend, decompositions = _fused, select_decomp_table()

        def compile_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            while_tracing.close()
            run = backend(graph, examples) if callable(backend) else _function_of(graph)
            return run if getattr(run, "_boxed_call", False) else make_boxed_func(run)

        def compile_alone(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            if backend is None:
                remove_idle_views(graph.graph, len(_results(graph)), ())
                self._halves = _halves(graph)
            return compile_graph(graph, examples)

        def separate(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[Any, Any]:
            del inputs
            while_tracing.close()
            forward, backward = _separated(joint, num_fwd_outputs)
            if backend is None:
                self._halves = _halves(forward, backward, num_fwd_outputs)
            return forward, backward

        self.run = aot_function(
            function,
            compile_graph,
            compile_graph,
            partition_fn=separate,
            decompositions=decompositions,
            inference_compiler=compile_alone,
        )

    def first(self, *inputs: Any) -> Any:
        """Trace and run for the first time; afterwards ``run`` is the cheapest equivalent."""
        outputs = self.run(*inputs)
        halves, self._halves = self._halves, None
        if halves is not None:
            self.run = single_node(halves, inputs, outputs) or self.run
        return outputs


def _results(module: fx.GraphModule) -> Sequence[Any]:
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    results: Sequence[Any] = end.args[0]
    return results


def _halves(forward: fx.GraphModule, backward: fx.GraphModule | None = None, outputs: int | None = None) -> Halves:
    inputs = len(forward.graph.find_nodes(op="placeholder"))
    run, outputs = _function_of(forward), len(_results(forward)) if outputs is None else outputs
    if backward is None:
        return Halves(run, inputs, outputs)
    tangents = [node.meta["val"].stride() for node in backward.graph.find_nodes(op="placeholder") if _is_backward(node)]
    return Halves(run, inputs, outputs, _function_of(backward), tangents)


def _fused(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor; keep the traced strides, and draw from PyTorch's generator."""
    from hyper_parallel.platform.torch.versions import compile_fx_inner, inductor_config

    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    end.meta["user_visible_output_idxs"] = [
        index for index, node in enumerate(end.args[0]) if isinstance(node, fx.Node)
    ]  # backward was traced with the strides of the tensors that forward saves
    with inductor_config.patch(_INDUCTOR_OPTIONS):
        compiled: Callable[..., Any] = compile_fx_inner(graph, examples)
    return compiled


def _separated(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward: the nodes traced before and after backward began."""
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    body = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    (end,) = (node for node in joint.graph.nodes if node.op == "output")
    begin = next((index for index, node in enumerate(body) if _is_backward(node)), len(body))
    remove_idle_views(joint.graph, outputs, frozenset(body[begin:]))
    results, left = list(end.args[0]), frozenset(joint.graph.nodes)
    ahead, behind = ([node for node in part if node in left] for part in (body[:begin], body[begin:]))
    first = {*(node for node in inputs if not _is_backward(node)), *ahead}
    needed = [node for later in (*behind, _Results(results[outputs:])) for node in later.all_input_nodes]
    saved = [node for node in dict.fromkeys(needed) if node in first]
    _check_random(behind)
    primals = [node for node in inputs if not _is_backward(node)]
    tangents = [node for node in inputs if _is_backward(node)]
    forward = _extracted(joint, primals, ahead, [*results[:outputs], *saved], "Forward")
    backward = _extracted(joint, [*saved, *tangents], behind, results[outputs:], "Backward")
    return forward, backward


class _Results:
    """The results of backward, accessible like a node."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.all_input_nodes = [node for node in results if isinstance(node, fx.Node)]


def _is_backward(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return "tangents" in str(node.target)
    return node.meta.get("partitioner_tag") == "is_backward"


def _extracted(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], results: Sequence[Any], name: str
) -> fx.GraphModule:
    """Return the graph that consists of ``body``."""
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] if isinstance(node, fx.Node) else node for node in results])
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(joint, graph, name)


def _check_random(backward: Sequence[fx.Node]) -> None:
    """Refuse operators that draw from PyTorch's generator in backward: a recomputation would draw different numbers."""
    for node in backward:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            msg = (
                f"compile: backward of the compiled module runs {node.target}, which draws from PyTorch's generator; "
                "recompute the compiled module as a whole, not parts inside of it"
            )
            raise UnsupportedOperatorError(msg)


_ATEN = torch.ops.aten
_PUBLIC = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.as_strided.default: torch.as_strided,
    _ATEN.as_strided_copy.default: torch.as_strided_copy,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.clone.default: torch.clone,
    _ATEN.expand.default: torch.Tensor.expand,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.t.default: torch.t,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.view.default: torch.Tensor.view,
}
"""Functions that call only these operators but parse their arguments faster."""
_HEAD = re.compile(r"def forward\(self(?:, )?(.*)\)(?: -> .*)?:")
_FUNCTION = "hyper_parallel.function"
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def _function_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs the graph: this package's operators as functions, PyTorch's without look-ups.

    The function takes a list of inputs and empties it, so that each tensor is freed after its last use.
    """
    if _FUNCTION in module.meta:
        return module.meta[_FUNCTION]
    _lower(module.graph)
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(operator: re.Match[str]) -> str:
        name = "_".join(("operator", *operator.groups()))
        overload = attrgetter(".".join(operator.groups()))(torch.ops)
        names[name] = _PUBLIC.get(overload) or overload_call(overload)
        return name

    source = _HEAD.sub(r"def forward(self, inputs):\n    [\1] = inputs\n    inputs.clear()", code.src, count=1)
    exec(compile(_OPERATOR.sub(bind, source), "<compiled region>", "exec"), names)  # noqa: S102 - as fx does
    run = module.meta[_FUNCTION] = _Boxed(names["forward"], module)
    return run


class _Boxed(partial[Any]):
    """A function of a list of inputs; its attribute makes PyTorch pass a list and keep no other references."""

    _boxed_call = True


def _lower(graph: fx.Graph) -> None:
    """Replace this package's operators by the functions that implement them."""
    for node in list(graph.nodes):
        if node.target is COLLECTIVE:
            tensors, name = node.args
            call = recorded_call(name)
            if len(call.outputs) == 1:
                for user in list(node.users):  # each user reads the only result
                    user.replace_all_uses_with(node)
                    graph.erase_node(user)
            node.target, node.args = call.bound(), (tensors if call.takes_list else tensors[0],)
        elif node.target is NUMBERS:
            stream, name = node.args
            node.target, node.args = drawing(name), (stream,)
            forget_numbers(name)
