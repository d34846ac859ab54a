"""What stops programs of stacks is answered with the option that helps and the page about it, verbatim."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.engine.samples import calls_of_first_step
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.advice import (
    advice_on_error,
    advice_on_launches,
    error_text,
    untested_relations,
)
from hyper_parallel.verify.program.program import Program, find_program
from hyper_parallel.verify.program.report import ProgramReport

PRETEND = "--pretend cuda lets the CPU stand in for cuda (docs/stacks.md)"
NO_ANSWER = "--pretend cuda does not support this query of the device: leave it out on a CPU (docs/stacks.md)"
NO_KERNEL = (
    "the CPU has no kernel of this operator: choose the stack's implementation in PyTorch, such as "
    'attn_implementation="sdpa" in transformers (docs/stacks.md)'
)
OPERATOR = "NotImplementedError: Could not run 'aten::_flash_attention_forward' with arguments from the 'CPU' backend"
# Of PyTorch's build for the CPU, and of the one for CUDA without a driver.
NO_DEVICE = ("AttributeError: module 'torch._C' has no attribute '_cuda_", "RuntimeError: Found no NVIDIA driver")


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
        ("MisconfigurationException: No supported gpu backend found!", "", PRETEND),
        ("ValueError: The strategy `fsdp` requires a GPU accelerator, but received `accelerator='cpu'`.", "", PRETEND),
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
                "FSDP divides gradients by this reduction, which gloo lacks: leave out --launch processes; simulated "
                "ranks support it (docs/stacks.md)"
            ),
        ),
        (
            "RuntimeError: SymmetricMemory does not support device type cpu",
            "",
            (
                "the CPU has no symmetric memory: leave out what needs it, such as "
                "parallelism.enable_async_tensor_parallel of torchtitan (docs/stacks.md)"
            ),
        ),
        (
            "ImportError: pyarrow requires NumPy 2.0 or newer",
            "",
            (
                "the package needs NumPy 2, on which MindSpore cannot convert bfloat16: use an environment without "
                "MindSpore (docs/stacks.md)"
            ),
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
    assert error_text(OPERATOR + more) == OPERATOR
    assert error_text("ValueError: 3") == "ValueError: 3"


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "pretend, call, cause, advice",
    [
        ("", "torch.cuda.set_device(rank)", NO_DEVICE, PRETEND),
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
    assert lines[place].removeprefix("FAILED on 2 ranks: ").startswith(cause)
    assert len(lines[place]) < 200
    assert lines[place + 1] == f"  {advice}"


WORKER = """
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def worker(rank, world_size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(1)):
        model(batch.tensor_split(world_size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
"""


@pytest.mark.parametrize(
    "source, advice",
    [
        (
            "def work(rank): pass\nmp.Process(target=work).start()",
            "train.py:2 starts ranks itself, by mp.Process: verify the function that they run, as in train.py:work",
        ),
        (
            "import other\nnotebook_launcher(other.main, num_processes=2)",
            (
                "train.py:2 starts ranks itself, by notebook_launcher: verify the function that they run, as in "
                "FILE:function"
            ),
        ),
        (
            "def work(rank): dist.init_process_group()\nwith Pool(2) as pool:\n    pool.map(work, range(2))",
            "train.py:3 starts ranks itself, by pool.map: verify the function that they run, as in train.py:work",
        ),
        ("def work(rank): pass\nwith Pool(2) as pool:\n    pool.map(work, range(2))", ""),
        (
            "import sys\ncommand = (sys.executable, '-m', 'torch.distributed.run', f'-n={2}', 'train.py')",
            (
                "train.py:2 starts ranks itself: give the command after --, as in -- python -m torch.distributed.run "
                "'-n={2}' train.py (docs/stacks.md)"
            ),
        ),
        (
            "os.spawnlp(0, 'sh', '-c', 'cd x; torchrun train.py; ls')",
            "train.py:1 starts ranks itself: give the command after --, as in -- torchrun train.py (docs/stacks.md)",
        ),
        ("'torchrun train.py'\nsubprocess.run(['ls'])\nwork.call('x')", ""),
    ],
)
def test_lines_that_start_ranks(source, advice, tmp_path):
    """The line, what starts the ranks, and what to give instead."""
    file = tmp_path / "train.py"
    file.write_text(source, encoding="utf-8")
    assert advice_on_launches(find_program(str(file), [], "FILE")) == advice


def test_a_function_has_no_line_that_starts_ranks():
    """A function object has no file to read."""
    assert not advice_on_launches(find_program(print, [], "FILE"))


@pytest.mark.platforms("torch")
def test_a_script_that_spawns_is_refused_and_what_it_spawns_is_verified(tmp_path):
    """The script is refused at the call; the function that its ranks run gets the rank and the number of ranks."""
    file = tmp_path / "train.py"
    file.write_text(WORKER, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        verify_program(str(file), 2)
    assert str(caught.value) == (
        f"{file}: train.py:23 starts ranks itself: verify the function that they run, as in train.py:worker "
        "(docs/stacks.md)"
    )
    report = verify_program(f"{file}:worker", 3)
    assert report.status == 0, report.text()


SCRIPT = Program("train.py", "train.py")
MICRO = (
    "whether micro-batches train like one batch (the script calls its model 2 times before the first optimizer step); "
    "give the script's arguments for one batch with --accumulate"
)
RESUME = (
    "whether the script continues correctly from what it has saved ({}); give the script's arguments for a "
    "restart with "
    "--resume"
)


def run(*records, calls=1):
    """Return a run of records that are a kind, a name and a step, whose first step called the model so often."""
    names = [record[:2] for record in records]
    made = [
        Record(kind, name, "", step, names[:place].count((kind, name)), np.zeros(1))
        for place, (kind, name, step) in enumerate(records)
    ]
    return Run([RankRecords(0, made, [], {"inputs": [(call, 0, np.zeros(1)) for call in range(calls)]})])


@pytest.mark.parametrize(
    "records, calls, said",
    [
        ((("rate", "optimizer 0", 0), ("state", "w:step", 0), ("state", "b:step", 0)), 1, []),
        ((), 2, [MICRO]),
        ((("saved", "model", 1),), 1, [RESUME.format("it saves tensors")]),
        (
            (("state", "w:step", 0), ("state", "w:step", 0)),
            1,
            [RESUME.format("two optimizers train one parameter, and the second starts anew")],
        ),
    ],
)
def test_what_was_not_tested_is_said(records, calls, said):
    """Each sign has its sentence, which is gone where the option is given; a function has no arguments."""
    found = run(*records, calls=calls)
    assert untested_relations(SCRIPT, found, accumulates=False, resumes=False) == said
    assert untested_relations(SCRIPT, found, accumulates=True, resumes=True) == []
    assert untested_relations(Program("f", "", print), found, accumulates=False, resumes=False) == []


def test_different_models_are_no_micro_batches():
    """A model, the cell of its loss and one that takes gradients are called once each."""
    inputs = [(0, "0", np.zeros((2, 3))), (1, "0", np.zeros((2, 3))), (1, "1", np.zeros(2)), (2, "0", np.zeros(3))]
    assert calls_of_first_step({"inputs": inputs}) == 1
    assert calls_of_first_step({"inputs": [*inputs, (3, "0", np.zeros((4, 5)))]}) == 2


def test_the_report_lists_it():
    """The text has a line for each, and the JSON the sentences."""
    report = ProgramReport("train.py", "torch", "simulated", 2, 0, untested=[MICRO])
    assert f"not tested: {MICRO}" in report.text()
    assert report.json()["untested"] == [MICRO]
