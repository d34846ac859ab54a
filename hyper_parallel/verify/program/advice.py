"""Advice on common errors of training stacks, found by the error's text: which option, and which page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["advice_on_error", "shortened"]

PAGE = "docs/stacks.md"

_STUBBED = ("triton", "flash_attn", "transformer_engine", "apex")
"""Packages replaced by stubs if the CPU stands in for a device."""

_CUDA = (
    "not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "has no attribute '_cuda_",
    "has no attribute '_nccl_",
    *(f"No module named '{package}" for package in _STUBBED),
)
_NPU = ("No module named 'torch_npu'", "type at start of device string: npu", "Cannot use meta tensor as input on CPU")
_KERNELS_OF_MINDSPORE = (" unregistered.", "Unsupported op [")
"""Errors of programs that run if the CPU stands in for their device."""

_NO_KERNEL = "with arguments from the 'CPU' backend"
_MORE = ". This could be because the operator doesn't exist for this backend"

_INSTEAD = {
    _NO_KERNEL: "the CPU has no kernel of this operator: choose the stack's implementation in PyTorch, such as "
    'attn_implementation="sdpa" in transformers',
    "CUDA_HOME environment variable is not set": "kernels for CUDA are compiled, which the CPU cannot run: choose the "
    "stack's implementation in PyTorch",
    "ReduceOp.PREMUL_SUM with Gloo": "gloo has no such reduction, by which FSDP divides gradients: leave out --launch "
    "processes, simulated ranks have it",
    "SymmetricMemory does not support": "symmetric memory is a device's alone: leave out what needs it, such as "
    "parallelism.enable_async_tensor_parallel of torchtitan",
    "has no attribute '_cuda_": "what stands in for cuda has no answer to this question: leave it out on a CPU",
    "has no attribute '_nccl_": "what stands in for cuda has no answer to this question: leave it out on a CPU",
    "requires NumPy 2": "the package needs NumPy 2, and MindSpore NumPy 1: use an environment without MindSpore",
}
"""Advice by a part of the error's text, if the CPU already stands in for the device or that does not help."""


def advice_on_error(text: str, pretended: str = "") -> str:
    """Return advice on an error that stopped a program, and its page; empty if there is none.

    Args:
        text: the error, in one line.
        pretended: the device that the CPU stood in for; empty if it did not.
    """
    return next(_advice(lambda sign: sign in text, pretended), "")


def _advice(has: Callable[[str], bool], pretended: str) -> Iterator[str]:
    """Yield advice, the likeliest first; ``has`` says whether the text has a sign."""
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


def shortened(text: str) -> str:
    """Return the text of an error without PyTorch's list of the devices that have an operator."""
    return text.partition(_MORE)[0]
