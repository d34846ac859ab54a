from __future__ import annotations

import pickle

import pytest

import hyper_parallel
from hyper_parallel.errors import HyperParallelError, MeshLookupError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


class Given:
    """The names of a library and a tensor on its mesh of two axes, with which a mistake is made."""

    def __init__(self, names, init, mesh_type, styles, local_map):
        """Build the meshes of a world of four."""
        import torch
        from torch import nn

        self.names, self.init, self.mesh_type, self.styles, self.local_map = names, init, mesh_type, styles, local_map
        self.nn = nn
        self.mesh = init("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.flat = init("cpu", (4,), mesh_dim_names=("all",))
        self.unnamed = init("cpu", (4,))
        self.places = [names.Shard(0), names.Replicate()]
        self.plain = torch.zeros(4, 4)
        self.held = names.distribute_tensor(self.plain, self.mesh, self.places)

    def parallelized(self, style, module=None):
        """A linear layer, or another module, in a style."""
        return self.styles.parallelize_module(module or self.nn.Linear(4, 4), self.flat, style)

    def twice_distributed(self):
        """A module that is distributed a second time."""
        module = self.names.distribute_module(self.nn.Linear(4, 4), self.mesh)
        return self.names.distribute_module(module, self.mesh)

    def mapped(self, outputs, inputs, **options):
        """A call of a mapped identity."""
        return self.local_map(lambda x: x, outputs, inputs, device_mesh=self.mesh, **options)(self.held)


def far(on):
    """Placements of a dim that no tensor here has."""
    return [on.names.Shard(5), on.names.Replicate()]


# What PyTorch accepts, or raises only by accident (an AttributeError of an int), is not here.
MISTAKES = {
    "the world is smaller": lambda on: on.init("cpu", (3, 2)),
    "names repeat": lambda on: on.init("cpu", (2, 2), mesh_dim_names=("a", "a")),
    "too few names": lambda on: on.init("cpu", (2, 2), mesh_dim_names=("a",)),
    "a device with an index": lambda on: on.init("cuda:0", (2, 2)),
    "a size below zero": lambda on: on.init("cpu", (-1, 4)),
    "a size that is a string": lambda on: on.init("cpu", ("a",)),
    "ragged rows": lambda on: on.mesh_type("cpu", [[0, 1], [2]]),
    "a rank below zero": lambda on: on.mesh_type("cpu", [0, -1]),
    "an unknown axis": lambda on: on.mesh["nope"],
    "an axis of a mesh without names": lambda on: on.unnamed["nope"],
    "an axis twice": lambda on: on.mesh["dp", "dp"],
    "the group of an unknown axis": lambda on: on.mesh.get_group("nope"),
    "the group of no axis": lambda on: on.mesh.get_group(),
    "the group of an axis number too far": lambda on: on.mesh.get_group(7),
    "the place on no axis": lambda on: on.mesh.get_local_rank(),
    "the place on an unknown axis": lambda on: on.mesh.get_local_rank("nope"),
    "the place of an outsider": lambda on: on.mesh_type("cpu", [on.mesh.get_rank() ^ 1]).get_local_rank(),
    "the size of an axis number too far": lambda on: on.mesh.size(7),
    "from_local: a dim too far": lambda on: on.names.DTensor.from_local(on.plain, on.mesh, far(on)),
    "from_local: no placements": lambda on: on.names.DTensor.from_local(on.plain, on.mesh, [0, 1]),
    "from_local: a DTensor": lambda on: on.names.DTensor.from_local(on.held, on.mesh, on.places),
    "from_local: no mesh": lambda on: on.names.DTensor.from_local(on.plain, None, on.places),
    "redistribute: too few": lambda on: on.held.redistribute(on.mesh, on.places[:1]),
    "redistribute: a dim too far": lambda on: on.held.redistribute(on.mesh, far(on)),
    "redistribute: another mesh": lambda on: on.held.redistribute(on.flat, on.places[:1]),
    "distribute_tensor: too few": lambda on: on.names.distribute_tensor(on.plain, on.mesh, on.places[:1]),
    "distribute_tensor: a dim too far": lambda on: on.names.distribute_tensor(on.plain, on.mesh, far(on)),
    "distribute_tensor: a dim too low": lambda on: on.names.distribute_tensor(
        on.plain, on.mesh, [on.names.Shard(-5), on.names.Replicate()]
    ),
    "distribute_tensor: no placements": lambda on: on.names.distribute_tensor(on.plain, on.mesh, [0, 1]),
    "distribute_tensor: another mesh": lambda on: on.names.distribute_tensor(on.held, on.flat, on.places[:1]),
    "distribute_tensor: another layout": lambda on: on.names.distribute_tensor(on.held, on.mesh, on.places[::-1]),
    "zeros: too few": lambda on: on.names.zeros(4, 4, device_mesh=on.mesh, placements=on.places[:1]),
    "zeros: a dim too far": lambda on: on.names.zeros(4, 4, device_mesh=on.mesh, placements=far(on)),
    "distribute_tensor: on a graph": lambda on: on.names.distribute_tensor(
        on.plain.clone().requires_grad_() * 2, on.mesh, on.places
    ),
    "distribute_module: twice": lambda on: on.twice_distributed(),
    "distribute_module: an input_fn of one argument": lambda on: on.names.distribute_module(
        on.nn.Linear(4, 4), on.mesh, input_fn=lambda _: None
    ),
    "distribute_module: an output_fn of one argument": lambda on: on.names.distribute_module(
        on.nn.Linear(4, 4), on.mesh, output_fn=lambda _: None
    ),
    "parallelize_module: no plan": lambda on: on.parallelized(3),
    "parallelize_module: no style": lambda on: on.parallelized({"": 3}, on.nn.Sequential(on.nn.Linear(4, 4))),
    "parallelize_module: a mesh of two axes": lambda on: on.styles.parallelize_module(
        on.nn.Linear(4, 4), on.init("cpu", (2, 2)), on.styles.ColwiseParallel()
    ),
    "ColwiseParallel: a norm": lambda on: on.parallelized(on.styles.ColwiseParallel(), on.nn.LayerNorm(4)),
    "RowwiseParallel: a norm": lambda on: on.parallelized(on.styles.RowwiseParallel(), on.nn.LayerNorm(4)),
    "SequenceParallel: no tensor": lambda on: on.parallelized(on.styles.SequenceParallel(), on.nn.LayerNorm(4))(3),
    "PrepareModuleInput: no wish": lambda on: on.styles.PrepareModuleInput(input_layouts=on.places[1]),
    "PrepareModuleInput: fewer wishes": lambda on: on.styles.PrepareModuleInput(
        input_layouts=tuple(on.places), desired_input_layouts=(on.places[0],)
    ),
    "PrepareModuleInput: fewer wishes by name": lambda on: on.styles.PrepareModuleInput(
        input_kwarg_layouts={"x": on.places[0]}, desired_input_kwarg_layouts={}
    ),
    "PrepareModuleInput: another number of inputs": lambda on: on.parallelized(
        on.styles.PrepareModuleInput(input_layouts=tuple(on.places), desired_input_layouts=tuple(on.places))
    )(on.plain),
    "PrepareModuleInput: no tensor": lambda on: on.parallelized(
        on.styles.PrepareModuleInput(input_layouts=on.places[1], desired_input_layouts=on.places[1])
    )(3),
    "PrepareModuleOutput: fewer wishes": lambda on: on.styles.PrepareModuleOutput(
        output_layouts=tuple(on.places), desired_output_layouts=(on.places[0],)
    ),
    "PrepareModuleOutput: another number of outputs": lambda on: on.parallelized(
        on.styles.PrepareModuleOutput(output_layouts=tuple(on.places), desired_output_layouts=tuple(on.places))
    )(on.plain),
    "local_map: another number of inputs": lambda on: on.mapped(on.places, (on.places, on.places)),
    "local_map: another layout": lambda on: on.mapped(on.places, (on.places[::-1],)),
    "local_map: a placement of a DTensor missing": lambda on: on.mapped(on.places, (None,)),
    "local_map: another number of outputs": lambda on: on.mapped((on.places, on.places), (on.places,)),
    "a plain operand": lambda on: on.held + on.plain,
    "operands of two meshes": lambda on: on.held @ on.names.distribute_tensor(on.plain, on.flat, on.places[:1]),
}


def raised(case):
    """Return the exception of each mistake."""
    text = {}
    for name, mistake in MISTAKES.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
            mistake(case)
        text[name] = caught.value
    return text


@pytest.fixture(scope="module")
def theirs():
    """The exceptions of PyTorch, in a fake world of four."""
    import torch.distributed as dist
    import torch.distributed.tensor as names
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import parallel
    from torch.distributed.tensor.experimental import local_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        return raised(Given(names, init_device_mesh, DeviceMesh, parallel, local_map))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ours():
    """The exceptions of this library on rank 0 of a simulated world of four."""

    def rank():
        names = hyper_parallel
        return raised(Given(names, names.init_device_mesh, names.DeviceMesh, names, names.local_map))

    return simulate(rank, 4, "torch")[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_caught_the_mistake_on_pytorch_catches_it_here(mistake, theirs, ours):
    """Our error of a mistake is an instance of the type that PyTorch raises for it, and of our own base."""
    assert isinstance(ours[mistake], HyperParallelError)
    assert isinstance(ours[mistake], type(theirs[mistake]))


def test_a_lookup_error_reads_plainly():
    """Our lookup error shows its plain message, unlike KeyError, also after pickling between ranks."""
    error = MeshLookupError("mesh has no axis 'x'")
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    assert str(error) == str(copied) == "mesh has no axis 'x'"
    assert isinstance(copied, KeyError)
