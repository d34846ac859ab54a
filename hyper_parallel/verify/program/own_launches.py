"""Programs that start their ranks themselves, and what to verify instead; read from the file, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.verify.program.program import Program

__all__ = ["advice_on_launches"]

_OF_FUNCTIONS = {"spawn", "start_processes", "notebook_launcher", "elastic_launch", "Process"}
"""Functions that run another function on each rank."""

_OF_COMMANDS = {"run", "call", "check_call", "check_output", "Popen", "system", "popen"}
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")


def advice_on_launches(program: Program) -> str:
    """Return which line of a program starts ranks, and what to verify instead; empty if none does."""
    if not program.path:
        return ""
    name = Path(program.path).name
    return next((advice for advice in _launches(ast.parse(Path(program.path).read_bytes()), name)), "")


def _launches(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield advice on each call that starts ranks."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).partition("(")[0]
        last, place = called.rpartition(".")[2], f"{file}:{node.lineno}"
        words = [
            leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
        ]
        launcher = next((name for name in _LAUNCHERS if any(name in word for word in words)), "")
        if last in _OF_FUNCTIONS:
            given = [leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and leaf.id in functions]
            target = f"{file}:{given[0]}" if given else "FILE:function"
            yield f"{place} starts ranks itself, by {called}: verify the function that they run, as in {target}"
        elif last in _OF_COMMANDS and launcher:
            yield (
                f"{place} starts ranks itself, by {launcher}: give that command after --, "
                "as in -- torchrun --nproc-per-node 2 train.py"
            )
