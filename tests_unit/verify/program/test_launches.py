"""A program that starts ranks itself, or RPC, is refused at the call, with what to verify instead."""

import functools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.launches import refused_launches

COMMAND = "starts ranks itself: give the command after --, as in -- "
FUNCTION = "starts ranks itself: verify the function that they run, as in "


def refusal(call):
    """Return the message with which ``call`` is refused, without its line."""
    with refused_launches(), pytest.raises(InputError) as caught:
        call()
    place, _, words = str(caught.value).partition(" ")
    assert place == f"{Path(__file__).name}:{call.__code__.co_firstlineno}"
    return words


def test_commands_are_refused():
    """A launcher is found as a list, in a line of a shell, and behind ``python -m``; afterwards Python's own run."""
    plain = subprocess.Popen.__init__
    torchrun = ["torchrun", "--nproc-per-node", "2", "a b.py"]
    quoted = f"{COMMAND}torchrun --nproc-per-node 2 'a b.py' (docs/stacks.md)"
    assert refusal(lambda: subprocess.run(torchrun, check=True)) == quoted
    module = (sys.executable, "-m", "torch.distributed.run", "-m", "job")
    assert refusal(lambda: subprocess.call(module)) == f"{COMMAND}{' '.join(module)} (docs/stacks.md)"
    line = "A=1 accelerate launch train.py"
    for name in ("system", "popen"):
        refused = refusal(lambda name=name: getattr(os, name)(line))
        assert refused == f"{COMMAND}accelerate launch train.py (docs/stacks.md)"
        for behind in ("cd x && ", "nohup "):
            refused = refusal(lambda name=name, behind=behind: getattr(os, name)(f"{behind}torchrun a.py; ls"))
            assert refused == f"{COMMAND}torchrun a.py (docs/stacks.md)"
    words = ["torchrun", "train.py"]
    for name, more in (("execvp", ()), ("execve", ({},))):
        refused = refusal(lambda name=name, more=more: getattr(os, name)("/bin/torchrun", words, *more))
        assert refused == f"{COMMAND}torchrun train.py (docs/stacks.md)"
    assert subprocess.Popen.__init__ is plain


def test_other_commands_run():
    """What starts no program by a launcher is not touched, whatever the words."""
    with refused_launches():
        shell = (f"'{sys.executable}' -c 'exit(3)' deepspeed", "exit 3 # '")  # a quote that does not end
        shell += ("echo start torchrun train.py later > /dev/null; exit 3",)
        for words in ([sys.executable, "-c", "exit(3)", "torchrun", "a.py"], *shell):
            assert subprocess.run(words, shell=isinstance(words, str), check=False).returncode == 3
        with pytest.raises(IndexError):
            subprocess.run([], check=False)
        assert subprocess.run((word for word in (sys.executable, "-c", "exit(3)")), check=False).returncode == 3


def worker(rank):
    """What ranks run."""


@pytest.mark.platforms("torch")
def test_functions_are_refused():
    """``mp.spawn``, what is built on it, elastic launchers: the function is named if it is the user's."""
    import torch.distributed.run as torchrun
    import torch.multiprocessing as mp
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    named = f"{FUNCTION}test_launches.py:worker (docs/stacks.md)"
    assert refusal(lambda: mp.spawn(worker, nprocs=2)) == named
    assert refusal(lambda: mp.start_processes(worker, nprocs=2)) == named
    wrapped = type("Wrapped", (), {"launcher": staticmethod(worker)})()
    assert refusal(lambda: mp.spawn(wrapped, nprocs=2)) == named
    other = (
        f"{FUNCTION}FILE:function; or let the stack take its ranks from torchrun, as "
        'strategy="ddp" does in Lightning (docs/stacks.md)'
    )
    assert refusal(lambda: mp.spawn(os.path.join, nprocs=2)) == other
    assert refusal(lambda: mp.spawn(print, nprocs=2)) == other
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="a")
    assert refusal(lambda: [elastic_launch(config, worker)()]) == named
    assert refusal(lambda: torchrun.main(["--nproc-per-node", "3", "train.py", "--steps", "2"])) == (
        f"{COMMAND}torchrun --nproc-per-node 3 train.py --steps 2 (docs/stacks.md)"
    )


def joins(rank):
    """What ranks run, in a function of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2)


def calls_joins(rank):
    """What ranks run, which calls a function that joins."""
    return joins(rank)


class Trainer:
    """Joins when it is made."""

    def __init__(self, rank):
        joins(rank)

    @staticmethod
    def prepare(rank):
        """Return what is no rank."""
        return rank


def makes_trainer(rank):
    """What ranks run, with a class that joins."""
    return Trainer(rank)


class Ranks(multiprocessing.Process):
    """A process that joins in its method."""

    def run(self):
        """Join."""
        joins(0)


INSIDE = f"{FUNCTION}test_launches.py:function, which must be at the top level of the file (docs/stacks.md)"


@pytest.mark.platforms("torch")
def test_processes_that_join_a_group_are_refused():
    """A process whose function joins a process group is a rank, however it is started; others start."""

    def inner(rank):
        joins(rank)

    named = f"{FUNCTION}test_launches.py:calls_joins (docs/stacks.md)"
    assert refusal(lambda: multiprocessing.Process(target=calls_joins, args=(0,)).start()) == named
    spawn = multiprocessing.get_context("spawn")
    assert refusal(lambda: spawn.Process(target=calls_joins, args=(0,)).start()) == named
    assert refusal(lambda: multiprocessing.Process(target=inner, args=(0,)).start()) == INSIDE
    assert refusal(lambda: Ranks().start()) == INSIDE
    made = f"{FUNCTION}test_launches.py:makes_trainer (docs/stacks.md)"
    assert refusal(lambda: multiprocessing.Process(target=makes_trainer, args=(0,)).start()) == made
    assert refusal(lambda: multiprocessing.Process(target=functools.partial(calls_joins, 0)).start()) == named

    def early(rank):
        return later if rank else rank

    with refused_launches():
        for other in (worker, print, functools.partial(print, end=""), Recursive(), Trainer.prepare, early):
            process = multiprocessing.get_context("fork").Process(target=other, args=(0,))
            process.start()
            process.join()
            assert process.exitcode == 0
    later = 1  # after the process of a function that refers to it has started


class Recursive:
    """An object that is called, and whose name of a method is that of a function that joins."""

    def __call__(self, rank):
        """Call what is no rank."""
        return Recursive().joins(rank)

    def joins(self, rank):
        """Return what is no rank, or call again."""
        return rank if rank == 0 else self(rank)


@pytest.mark.platforms("torch")
def test_workers_that_join_a_group_are_refused():
    """A pool's worker that joins a group raises in the caller; in the process itself, the function is as before."""
    with refused_launches(), multiprocessing.get_context("fork").Pool(1) as pool:
        with pytest.raises(InputError) as caught:
            pool.map(calls_joins, [0])
        assert str(caught.value).endswith(f" {FUNCTION}test_launches.py:calls_joins (docs/stacks.md)")


@pytest.mark.platforms("torch")
def test_a_script_with_rpc_is_refused_before_it_waits(tmp_path):
    """Its agents would wait for each other for ever, since simulated ranks run one at a time."""
    file = tmp_path / "train.py"
    file.write_text('import torch.distributed.rpc as rpc\n\nrpc.init_rpc("worker")\n', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        verify_program(str(file), 2)
    assert str(caught.value) == (
        f"{file}: train.py:3 starts RPC, which is not supported: what ranks compute for each other is not recorded; "
        "exchange tensors by torch.distributed, such as send and recv (docs/stacks.md)"
    )
