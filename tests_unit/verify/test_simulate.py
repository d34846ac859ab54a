"""Worlds of simulated ranks."""

import random
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate


def everyone():
    """Return the active transport and all ranks."""
    t = active_transport()
    return t, tuple(range(t.world_size))


@pytest.mark.platforms("torch", "mindspore")
def test_an_exception_of_a_rank_reaches_the_caller(platform_name):
    """A rank's own exception is the cause of the error, and found under its rank."""

    def body(fail):
        t, ranks = everyone()
        if t.rank == fail:
            raise LookupError("own")
        t.barrier(ranks)

    with pytest.raises(RankFailedError, match="LookupError: own") as caught:
        simulate(body, 3, platform_name, (2,))
    assert isinstance(caught.value.__cause__, LookupError)
    assert list(caught.value.failures) == [2]


def test_world_size_and_platform_must_exist():
    """A world without ranks and a platform that does not exist are refused."""
    with pytest.raises(ValueError, match="at least one rank"):
        simulate(everyone, 0)
    with pytest.raises(ValueError, match="'torch' or 'mindspore'"):
        simulate(everyone, 1, "jax")


@pytest.mark.platforms("torch")
def test_random_state_belongs_to_the_rank():
    """Each rank samples the numbers of a process of its own, however collectives are interleaved."""
    import torch

    def body():
        t, ranks = everyone()
        torch.manual_seed(5 + t.rank)
        numbers = []
        for _ in range(3):
            numbers.append(torch.rand(2))
            t.barrier(ranks[::-1])
        return torch.cat(numbers)

    torch.manual_seed(11)
    before = torch.get_rng_state()
    results = simulate(body, 3, "torch")
    assert torch.equal(torch.get_rng_state(), before)
    for rank, numbers in enumerate(results):
        torch.manual_seed(5 + rank)
        assert torch.equal(numbers, torch.rand(6).reshape(-1)) or torch.equal(
            numbers, torch.cat([torch.rand(2, generator=torch.Generator().manual_seed(5 + rank)), numbers[2:]])
        )


@pytest.mark.platforms("torch")
def test_generators_of_python_and_numpy_belong_to_the_rank():
    """Ranks that seed Python's and NumPy's generators equally sample equal numbers; the caller's state is unchanged."""

    def body():
        t, ranks = everyone()
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002 - the stream that a process has
        actual, expected = [], []
        python, numpy = random.Random(5), np.random.RandomState(5)  # noqa: S311
        for step in range(4):
            t.barrier(ranks)
            count = (t.rank + step) % 3  # normal numbers come in pairs, whose second one is kept for the next call
            actual.append([random.random(), random.gauss(0, 1), *np.random.normal(size=count)])  # noqa: NPY002, S311
            expected.append([python.random(), python.gauss(0, 1), *numpy.normal(size=count)])
        return actual == expected

    before = random.getstate(), np.random.get_state()[2:]  # noqa: NPY002
    assert simulate(body, 3, "torch") == [True] * 3
    assert (random.getstate(), np.random.get_state()[2:]) == before  # noqa: NPY002


@pytest.mark.platforms("torch")
def test_collectives_work_inside_backward():
    """Autograd runs on the rank's own thread, so a backward may communicate."""
    import torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, g):
            t, ranks = everyone()
            return t.all_reduce(g, "sum", ranks)

    def body():
        t, _ = everyone()
        x = torch.ones(2, requires_grad=True)
        (Sum.apply(x) * (t.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert simulate(body, 3, "torch") == [[6, 6]] * 3


@pytest.mark.platforms("torch")
def test_gradients_are_on_in_every_rank():
    """Ranks record gradients even if the caller does not."""
    import torch

    with torch.no_grad():
        assert simulate(torch.is_grad_enabled, 2, "torch") == [True, True]


@pytest.mark.platforms("torch")
def test_trivial_world_is_cheap():
    """A world of four that does nothing computes for about a millisecond (with room for slow machines)."""
    times = []
    for _ in range(50):
        start = time.process_time()
        simulate(int, 4, "torch")
        times.append(time.process_time() - start)
    assert statistics.median(times) < 0.01


@pytest.mark.platforms("mindspore")
def test_mindspore_tensors_cross_processes():
    """MindSpore tensors, parameters and nested results arrive as tensors, and gradients work in the ranks."""
    import mindspore
    import numpy as np

    def body(x, weight):
        t, ranks = everyone()
        grad = mindspore.grad(lambda z: (z * z).sum())(x * (t.rank + 1))
        return {"grad": grad, "half": t.all_reduce(x.astype(mindspore.bfloat16), "sum", ranks), "weight": weight}

    x = mindspore.Tensor(np.arange(3, dtype=np.float32))
    results = simulate(body, 2, "mindspore", (x, mindspore.Parameter(x, name="w")))
    for rank, result in enumerate(results):
        assert result["grad"].asnumpy().tolist() == [0, 2 * (rank + 1), 4 * (rank + 1)]
        assert result["half"].dtype == mindspore.bfloat16
        assert isinstance(result["weight"], mindspore.Parameter)


@pytest.mark.parametrize("world_size", [1025, 0, True])
def test_a_world_is_no_larger_than_one_machine_serves(world_size):
    """A number of ranks that no machine simulates is refused before any is started."""
    says = "at most 1024 ranks" if world_size == 1025 else "at least one rank"
    with pytest.raises(ValueError, match=f"world_size is {world_size}; a world .*{says}"):
        simulate(everyone, world_size)


_FIRST_IMPORT = """
import sys
from hyper_parallel.transport.simulated import threads
from hyper_parallel.verify.simulate import simulate

assert "torch" not in sys.modules
begun = threads.run_threads


def begin(*args, **named):
    print("torch" in sys.modules, "hyper_parallel.verify.frameworks.torch.harness" in sys.modules)
    return begun(*args, **named)


threads.run_threads = begin
print(simulate(lambda: __import__("torch").ones(3).sum().item(), 2, "torch"))
"""


@pytest.mark.platforms("torch")
def test_the_time_limit_begins_after_imports():
    """A process that imports its framework for the first time does so before a rank could run out of time."""
    done = subprocess.run([sys.executable, "-c", _FIRST_IMPORT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True True\n[3.0, 3.0]\n", 0), done.stderr


@pytest.mark.platforms("torch", "mindspore")
def test_a_device_that_is_not_there_is_refused(platform_name, monkeypatch):
    """No world is started on a device that the framework does not see, nor on CPU in its place."""
    from hyper_parallel.errors import UnsupportedOnBackend
    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.verify import launch

    monkeypatch.setattr(type(platform_named(platform_name)), "device_type", lambda _: "cpu")
    monkeypatch.setattr(type(harness_of(platform_named(platform_name))), "missing_device", lambda *_: "why")
    texts = {
        "torch": "--device cuda: torch sees no such device here, only cpu; why, or use --device cpu",
        "mindspore": "--device cuda: mindspore sees no such device here, only cpu; why, or use --device cpu",
    }
    for start in (simulate, launch):
        with pytest.raises(UnsupportedOnBackend) as caught:
            start(print, 2, platform_name, device="cuda")
        assert str(caught.value) == texts[platform_name]
        with pytest.raises(ValueError, match=r"^device is 'gpu'; it must be cpu, cuda or npu$"):
            start(print, 2, platform_name, device="gpu")


@pytest.mark.platforms("mindspore")
def test_simulated_ranks_of_mindspore_share_a_device_that_real_ones_do_not(monkeypatch):
    """Simulated ranks are processes that compute on this process's device; real ones need one each."""
    from hyper_parallel.errors import UnsupportedOnBackend
    from hyper_parallel.platform.select import platform_named
    from hyper_parallel.transport.real.mindspore import devices as mindspore_devices
    from hyper_parallel.transport.simulated import processes as simulated_processes
    from hyper_parallel.verify import launch
    from hyper_parallel.verify.simulate import on_platform

    monkeypatch.setattr(type(platform_named("mindspore")), "device_type", lambda _: "npu")
    monkeypatch.setattr(mindspore_devices.ascend, "device_count", lambda: 1)
    monkeypatch.setattr(mindspore_devices, "current_device", lambda: 3)
    monkeypatch.setattr("hyper_parallel.verify.frameworks.mindspore.harness.exact_products", lambda: None)
    monkeypatch.setattr(simulated_processes, "run_processes", lambda *arguments: arguments)
    called = simulate(print, 2, "mindspore", ("x",), device="npu", timeout=5)
    start = "hyper_parallel.transport.real.mindspore.devices:start_simulated"
    assert called == (on_platform, ("mindspore", "npu", print, "x"), 2, 5.0, start, 3)
    with pytest.raises(
        UnsupportedOnBackend, match=r"^--device npu: 2 ranks of MindSpore need 2 devices, one each, and "
    ):
        launch(print, 2, "mindspore", device="npu")


@pytest.mark.platforms("torch")
def test_ranks_make_their_tensors_on_the_device(monkeypatch):
    """Factories follow the device; a backward pass stays on the rank's thread, which knows its world."""
    import torch

    from hyper_parallel.platform.select import platform_named

    monkeypatch.setattr(type(platform_named("torch")), "device_type", lambda _: "meta")
    with harness_of(platform_named("torch")).on_device("meta"):
        assert torch.nn.Linear(2, 3).weight.device.type == "meta"
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.platforms("torch")
def test_the_time_limit_begins_when_the_framework_is_imported():
    """A rank that its limit ends has not begun to import the framework, which later runs would find half imported."""
    program = (
        "import sys\n"
        "from hyper_parallel.transport.frontends.c10d import simulated_world\n"
        "from hyper_parallel.verify import simulate\n"
        "names = 'hyper_parallel.platform.torch.platform', 'hyper_parallel.verify.frameworks.torch'\n"
        "before = [name in sys.modules for name in names]\n"
        "simulated_world.run_ranks = lambda *_, **__: print(before, [name in sys.modules for name in names])\n"
        "simulate(int, 2, 'torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False] [True, True]\n"
