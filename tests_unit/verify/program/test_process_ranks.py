"""A MindSpore program on ranks that are warm processes: started like a script, and forgotten afterwards."""

import numpy as np
import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import find_program
from hyper_parallel.verify.program.worlds import World, run_world

pytestmark = pytest.mark.platforms("mindspore")

LAYERS = """
import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

init()
RANK, SIZE = get_rank(), get_group_size()


def make():
    return nn.Dense(5, 3, dtype=ms.float64)
"""
SCRIPT = """
import os
import sys

import mindspore as ms
import numpy as np
from layers import RANK, SIZE, make
from mindspore import Tensor, nn, ops

from hyper_parallel.verify.frameworks.contract.record_log import record

if "exit" in sys.argv:
    sys.exit(3)


@ms.jit
def mean(gradient):
    return ops.AllReduce()(gradient) / SIZE


if __name__ == "__main__":
    told = [os.environ[name] for name in ("RANK_ID", "RANK_SIZE", "LOCAL_RANK")]
    record("told", np.array([int(value) for value in told] + [RANK, SIZE, int(sys.argv[1])]))
    model, random = make(), np.random.default_rng(0)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x: (model(x) ** 2).mean(), None, model.trainable_params())
    for _ in range(5):
        x = np.array_split(random.normal(size=(6, 5)), SIZE)[RANK]
        print("printed by a rank")
        optimizer(tuple(mean(gradient) for gradient in step(Tensor(x.copy()))[1]))
"""


def meshed(mesh):
    """A function that is told its mesh."""
    from mindspore import Tensor

    from hyper_parallel.verify.frameworks.contract.record_log import record

    record("mesh", Tensor([float(mesh.size()), float(mesh.get_local_rank("tp"))]))


@pytest.fixture
def script(tmp_path):
    """A training script beside a module of its own."""
    (tmp_path / "layers.py").write_text(LAYERS)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def recorded(run, rank, kind, name, step=0):
    """The value of a record."""
    (value,) = [r.value for r in run.ranks[rank].records if (r.kind, r.name, r.step) == (kind, name, step)]
    return value


def test_a_script_on_one_rank_and_on_several(script, capfd):
    """It finds arguments, environment and modules of its rank, compiled functions run as written, nothing stays."""
    from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits

    program = find_program(str(script), ["7"], "FILE")
    world = World(2, "mindspore", limits=RecordLimits(steps=3), timeout=120)
    alone, several, again = (run_world(program, w) for w in (world.alone("nothing"), world, world.alone("nothing")))
    assert [recorded(alone, 0, "value", "told").tolist()] == [[0, 1, 0, 0, 1, 7]]
    assert [recorded(several, rank, "value", "told").tolist() for rank in (0, 1)] == [
        [0, 2, 0, 0, 2, 7],
        [1, 2, 1, 1, 2, 7],
    ]
    for step in range(3):
        expected = recorded(alone, 0, "gradient", "weight", step)
        np.testing.assert_array_equal(recorded(again, 0, "gradient", "weight", step), expected)
        for rank in (0, 1):
            np.testing.assert_allclose(recorded(several, rank, "gradient", "weight", step), expected, rtol=1e-12)
    assert several.ranks[1].notes["optimizer steps"] == 3
    assert "printed by a rank" not in capfd.readouterr().out


def test_an_exit_status_and_a_mesh(script):
    """A script that ends with a status other than 0 is not an input; a function gets the mesh of the ranks."""
    program = find_program(str(script), ["7", "exit"], "FILE")
    with pytest.raises(InputError) as caught:
        run_world(program, World(2, "mindspore", timeout=120))
    assert str(caught.value) == (
        f"{script}: the program ended with sys.exit(3) in a world of 2; a program that is verified must end with "
        "status 0"
    )
    run = run_world(find_program(meshed, [], "FILE"), World(2, "mindspore", mesh=(("tp", 2),), timeout=120))
    assert [recorded(run, rank, "value", "mesh").tolist() for rank in (0, 1)] == [[2, 0], [2, 1]]
