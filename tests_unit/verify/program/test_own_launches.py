"""Programs that start their ranks themselves are told what to verify instead."""

from __future__ import annotations

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.own_launches import advice_on_launches
from hyper_parallel.verify.program.program import find_program

pytestmark = pytest.mark.platforms("torch")

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
            "def work(rank): pass\nmp.spawn(work, nprocs=2)",
            "train.py:2 starts ranks itself, by mp.spawn: verify the function that they run, as in train.py:work",
        ),
        (
            "import other\nnotebook_launcher(other.main, num_processes=2)",
            (
                "train.py:2 starts ranks itself, by notebook_launcher: verify the function that they run, as in "
                "FILE:function"
            ),
        ),
        (
            "def main(): pass\nelastic_launch(config, main)()",
            "train.py:2 starts ranks itself, by elastic_launch: verify the function that they run, as in train.py:main",
        ),
        (
            "subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'base.py'])",
            (
                "train.py:1 starts ranks itself, by torch.distributed.run: give that command after --, as in "
                "-- torchrun --nproc-per-node 2 train.py"
            ),
        ),
        (
            "import os\nos.system('accelerate launch base.py')",
            (
                "train.py:2 starts ranks itself, by accelerate: give that command after --, as in "
                "-- torchrun --nproc-per-node 2 train.py"
            ),
        ),
        ("subprocess.run(['ls'])\nwork.call('x')", ""),
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


def test_a_script_that_spawns_is_refused_and_what_it_spawns_is_verified(tmp_path):
    """The script records nothing; the function that its ranks run gets the rank and the number of ranks."""
    file = tmp_path / "train.py"
    file.write_text(WORKER, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        verify_program(str(file), 2)
    assert str(caught.value).endswith(
        "nothing was recorded; train.py:23 starts ranks itself, by mp.spawn: verify the function that they run, as in "
        "train.py:worker"
    )
    report = verify_program(f"{file}:worker", 3)
    assert report.status == 0, report.text()
