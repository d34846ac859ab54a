"""Advice on calls of `verify program`: after errors, for programs that start ranks, and on further checks.

Errors are recognised by their text. Programs that start their own ranks are recognised by reading their file, without
running it. Further checks are proposed from the records of the program.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from hyper_parallel.verify.engine.samples import calls_of_first_step
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.program.launch_line import launch_in
from hyper_parallel.verify.program.launches import INSTEAD_OF_COMMAND, PAGE, command_words
from hyper_parallel.verify.program.program import Program

__all__ = ["advice_on_error", "advice_on_launches", "error_text", "untested_relations"]

_STUBBED = ("triton", "flash_attn", "transformer_engine", "apex")
"""Packages that are replaced by stubs if the CPU stands in for a device."""

_CUDA = (
    "not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "has no attribute '_cuda_",
    "has no attribute '_nccl_",
    "No supported gpu backend found",  # Lightning's texts, like the next three
    "`CUDAAccelerator` can not run on your system",
    "requires a GPU accelerator",
    "FSDP is only available on GPU",
    *(f"No module named '{package}" for package in _STUBBED),
)
_NPU = ("No module named 'torch_npu'", "type at start of device string: npu", "Cannot use meta tensor as input on CPU")
_KERNELS_OF_MINDSPORE = (" unregistered.", "Unsupported op [")
"""Texts of errors of programs that would run if the CPU stood in for their device."""

_NO_KERNEL = "with arguments from the 'CPU' backend"
_MORE = ". This could be because the operator doesn't exist for this backend"

_OF_TRITON = (
    "a kernel of triton needs a device: choose the implementation in PyTorch, such as use_liger_kernel=False in "
    "transformers"
)

_INSTEAD = {
    _NO_KERNEL: "the CPU has no kernel of this operator: choose the stack's implementation in PyTorch, such as "
    'attn_implementation="sdpa" in transformers',
    "CUDA_HOME environment variable is not set": "kernels for CUDA are compiled, which the CPU cannot run: choose the "
    "stack's implementation in PyTorch",
    "ReduceOp.PREMUL_SUM with Gloo": "FSDP divides gradients by this reduction, which gloo lacks: leave out --launch "
    "processes; simulated ranks support it",
    "SymmetricMemory does not support": "the CPU has no symmetric memory: leave out what needs it, such as "
    "parallelism.enable_async_tensor_parallel of torchtitan",
    "has no attribute '_cuda_": "--pretend cuda does not support this query of the device: leave it out on a CPU",
    "has no attribute '_nccl_": "--pretend cuda does not support this query of the device: leave it out on a CPU",
    "libcuda.so cannot found": _OF_TRITON,
    "0 active drivers": _OF_TRITON,
    "requires NumPy 2": "the package needs NumPy 2, on which MindSpore cannot convert bfloat16: use an "
    "environment without MindSpore",
}
"""Advice by a substring of the error's text, for errors that a stand-in device does not prevent."""

_OF_FUNCTIONS = {"notebook_launcher", "Process"}
"""Functions that may run a function on each rank, but may also do other work. Those that always start ranks are in
``launches.py``.
"""

_OF_POOLS = {"apply", "apply_async", "map", "map_async", "starmap", "starmap_async", "submit"}
"""Methods of pools of processes; they start ranks if the function that they run joins a process group."""


def advice_on_error(text: str, pretended: str = "") -> str:
    """Return advice on an error that stopped a program, with a page of the documentation; empty if there is none.

    Args:
        text: the error, in one line.
        pretended: the device that the CPU stood in for; empty if it did not.
    """
    return next(_advice(lambda sign: sign in text, pretended), "")


def _advice(has: Callable[[str], bool], pretended: str) -> Iterator[str]:
    """Yield advice, the most likely first; ``has`` is a function that returns whether the text contains a string."""
    if not pretended:
        for device, signs in (("cuda", _CUDA), ("npu", _NPU)):
            if any(map(has, signs)):
                yield f"--pretend {device} lets the CPU stand in for {device} ({PAGE})"
    if any(map(has, _KERNELS_OF_MINDSPORE)):
        if pretended:
            yield f"neither MindSpore's CPU nor --pretend npu has this kernel: call another operator ({PAGE})"
        else:
            yield f"MindSpore's CPU has no such kernel; --pretend npu computes some of them from others ({PAGE})"
    yield from (f"{words} ({PAGE})" for sign, words in _INSTEAD.items() if has(sign))


def error_text(text: str) -> str:
    """Return the text of an error without PyTorch's long list of devices for which an operator exists."""
    return text.partition(_MORE)[0]


def advice_on_launches(program: Program) -> str:
    """Return the line at which a program starts ranks, and what to verify instead; empty if there is no such line."""
    if not program.path:
        return ""
    name = Path(program.path).name
    return next((advice for advice in _launches(ast.parse(Path(program.path).read_bytes()), name)), "")


def _launches(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield advice on each call that starts ranks."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).partition("(")[0]
        last, place = called.rpartition(".")[2], f"{file}:{node.lineno}"
        given = [leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and leaf.id in functions]
        joins = any("init_process_group" in ast.unparse(functions[name]) for name in given)
        if last in _OF_FUNCTIONS or (joins and last in _OF_POOLS):
            target = f"{file}:{given[0]}" if given else "FILE:function"
            yield f"{place} starts ranks itself, by {called}: verify the function that they run, as in {target}"
    for line, words in _commands(tree):
        yield f"{file}:{line} {INSTEAD_OF_COMMAND.format(shlex.join(words))} ({PAGE})"


def _commands(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the words of each list or string in a file that is a launch command."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if not isinstance(node, (ast.List, ast.Tuple, ast.Constant)) or id(node) in alone:
            continue
        command = node.value if isinstance(node, ast.Constant) else [_word(element) for element in node.elts]
        words = launch_in(command_words(command), anywhere=isinstance(command, str))
        if words:
            yield node.lineno, words


def _word(element: ast.expr) -> str:
    """Return a word of a command; an expression gives its source text, but ``sys.executable`` gives ``python``."""
    if isinstance(element, ast.Constant):
        return str(element.value)
    text = ast.unparse(element)
    if isinstance(element, ast.JoinedStr):
        return text[2:-1]  # without f""
    return "python" if text == "sys.executable" else text


def untested_relations(program: Program, run: Run, *, accumulates: bool, resumes: bool) -> list[str]:
    """Return sentences about errors that one rank and several ranks may share, and about how to test for them.

    Args:
        program: the program; nothing is returned for a function, which has no arguments to change.
        run: the run on one rank.
        accumulates: whether the program's micro-batches are compared with one batch.
        resumes: whether a restart of the program is compared.
    """
    rank = run.ranks[0]
    lines: list[str] = []
    if not program.is_script:
        return lines
    calls = calls_of_first_step(rank.notes)
    if calls > 1 and not accumulates:
        lines.append(
            f"whether micro-batches train like one batch (the script calls its model {calls} times before the first "
            "optimizer step); give the script's arguments for one batch with --accumulate"
        )
    anew = any(record.kind == "state" and not record.step and record.call for record in rank.records)
    saves = any(record.kind == "saved" for record in rank.records)
    if (saves or anew) and not resumes:
        what = "it saves tensors" if saves else "two optimizers train one parameter, and the second starts anew"
        lines.append(
            f"whether the script continues correctly from what it has saved ({what}); give the script's arguments for "
            "a restart with --resume"
        )
    return lines
