"""What stops programs of stacks is answered with the option that helps and the page about it, verbatim."""

from __future__ import annotations

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.program.advice import advice_on_error, shortened

PRETEND = "--pretend cuda lets the CPU stand in for cuda (docs/stacks.md)"
NO_ANSWER = "what stands in for cuda has no answer to this question: leave it out on a CPU (docs/stacks.md)"
NO_KERNEL = (
    "the CPU has no kernel of this operator: choose the stack's implementation in PyTorch, such as "
    'attn_implementation="sdpa" in transformers (docs/stacks.md)'
)
OPERATOR = "NotImplementedError: Could not run 'aten::_flash_attention_forward' with arguments from the 'CPU' backend"


@pytest.mark.parametrize(
    "text, pretended, advice",
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "", PRETEND),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "", PRETEND),
        ("AttributeError: module 'torch._C' has no attribute '_nccl_version'", "cuda", NO_ANSWER),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_tunableop'", "cuda", NO_ANSWER),
        ("ModuleNotFoundError: No module named 'triton'", "", PRETEND),
        ("ModuleNotFoundError: No module named 'flash_attn'", "", PRETEND),
        ("ModuleNotFoundError: No module named 'transformer_engine.pytorch'", "", PRETEND),
        ("ModuleNotFoundError: No module named 'apex'", "", PRETEND),
        ("ModuleNotFoundError: No module named 'bitsandbytes'", "", ""),
        (
            "RuntimeError: type at start of device string: npu",
            "",
            "--pretend npu lets the CPU stand in for npu (docs/stacks.md)",
        ),
        (OPERATOR, "cuda", NO_KERNEL),
        (OPERATOR, "", NO_KERNEL),
        (
            "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
            "cuda",
            (
                "kernels for CUDA are compiled, which the CPU cannot run: choose the stack's implementation in PyTorch "
                "(docs/stacks.md)"
            ),
        ),
        (
            "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo",
            "cuda",
            (
                "gloo has no such reduction, by which FSDP divides gradients: leave out --launch processes, simulated "
                "ranks have it (docs/stacks.md)"
            ),
        ),
        (
            "RuntimeError: SymmetricMemory does not support device type cpu",
            "",
            (
                "symmetric memory is a device's alone: leave out what needs it, such as "
                "parallelism.enable_async_tensor_parallel of torchtitan (docs/stacks.md)"
            ),
        ),
        (
            "ImportError: pyarrow requires NumPy 2.0 or newer",
            "",
            "the package needs NumPy 2, and MindSpore NumPy 1: use an environment without MindSpore (docs/stacks.md)",
        ),
        (
            "RuntimeError: Unsupported op [LARSUpdate] on CPU",
            "",
            "MindSpore's CPU has no such kernel; --pretend npu computes some of them from others (docs/stacks.md)",
        ),
        (
            "RuntimeError: Unsupported op [LARSUpdate] on CPU",
            "npu",
            "neither MindSpore's CPU nor --pretend npu has this kernel: call another operator (docs/stacks.md)",
        ),
        ("ValueError: shapes do not fit", "cuda", ""),
    ],
)
def test_errors_are_answered(text, pretended, advice):
    """By their text, and by whether the CPU stands in for a device already."""
    assert advice_on_error(text, pretended) == advice


def test_the_list_of_devices_that_have_an_operator_is_left_out():
    """PyTorch names forty of them in one line."""
    more = ". This could be because the operator doesn't exist for this backend, or was omitted during the build"
    assert shortened(OPERATOR + more) == OPERATOR
    assert shortened("ValueError: 3") == "ValueError: 3"


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "pretend, call, cause, advice",
    [
        ("", "torch.cuda.set_device(rank)", "AttributeError: module 'torch._C' has no attribute '_cuda_", PRETEND),
        (
            "cuda",
            "torch.ops.aten._flash_attention_forward(*[x] * 3, None, None, 4, 4, 0.0, False, False)",
            OPERATOR,
            NO_KERNEL,
        ),
    ],
)
def test_what_stops_the_ranks_alone_is_answered_as_well(pretend, call, cause, advice, tmp_path):
    """A program that runs on one rank, and asks for a device or a kernel of it on several."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os\nimport torch\nfrom torch import nn\n"
        "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        f"x = torch.ones(1, 4, 2, 16)\nif size > 1:\n    {call}\nmodel = nn.Linear(16, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel(x).square().mean().backward()\noptimizer.step()\n"
    )
    lines = verify_program(str(path), 2, pretend=pretend).text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("FAILED on 2 ranks: "))
    assert lines[place].startswith(f"FAILED on 2 ranks: {cause}")
    assert len(lines[place]) < 200
    assert lines[place + 1] == f"  {advice}"
