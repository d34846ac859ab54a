"""The bundled scenarios: parallel training equals single-device training, and injected faults are found."""

import numpy as np
import pytest

from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.faults import FAULTS, parse_fault
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.run import verify_model, verify_scenario
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan
from hyper_parallel.verify.run_arguments import parse_mesh, require_seed
from hyper_parallel.verify.scenarios import scenario_named
from hyper_parallel.verify.simulate import simulate

BUFFERS = 3  # two tables of angles and the causal mask
PARAMETERS = {"2x2-rms-tied": 34, "2x2-layer-untied": 40, "3-rms-untied": 35, "3-layer-tied": 39, "3-tutorial": 0}
TUTORIAL = "3-tutorial"
MODULES = 28  # root, embedding, 2 blocks of 12, final norm, head


def states(scenario):
    """Return how many values the optimizer keeps: two moments and a count per weight, or one."""
    return PARAMETERS[scenario.name] * (3 if scenario.optimizer == "adamw" else 1)


# Two every day: two axes with tied weights, and one axis with layer norm. System tests have them on real ranks.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("2x2-rms-tied", "3-layer-tied") else pytest.mark.sweep)
        for name in PARAMETERS
        if name != TUTORIAL
    ],
)
def test_every_scenario_trains_like_one_device(platform_name, name):
    """Outputs of every module, the loss, every gradient, weight and buffer are equal on every rank after each step."""
    scenario, steps = scenario_named(name), 2
    report = verify_scenario(scenario, platform=platform_name, steps=steps)
    assert report.ok, report.text()
    ranks = 4 if name.startswith("2x2") else 3
    assert report.counts == {
        "output": ranks * steps * MODULES,
        "loss": ranks * steps,
        "gradient": ranks * steps * PARAMETERS[name],
        "weight": ranks * (1 + steps) * PARAMETERS[name],
        "state": ranks * steps * states(scenario),
        "buffer": ranks * (1 + steps) * BUFFERS,
        "rate": ranks * steps,
    }
    assert report.skipped == []
    assert report.losses[1] < report.losses[0]
    assert report.parallel_losses == pytest.approx(report.losses, rel=1e-12)
    assert len(report.parameter_layouts) == PARAMETERS[name]


def test_a_tutorial_trains_like_one_device(platform_name):
    """The framework's own training step, callbacks and checkpoints are compared like the harness's, on every rank."""
    report = verify_scenario(scenario_named(TUTORIAL), platform=platform_name, steps=3)
    assert report.ok, report.text()
    counts = {"output": 12, "loss": 3, "gradient": 12, "weight": 16, "state": 12, "rate": 3, "saved": 12}
    if platform_name == "mindspore":  # each step evaluates another model, recorded at its first call and after the step
        counts = {**counts, "output": 24, "weight": 40}
    assert report.counts == {kind: 3 * count for kind, count in counts.items() if count}
    assert report.skipped == []
    assert report.parallel_losses == pytest.approx(report.losses, rel=1e-12)
    restored = next((row for row in report.traffic if row.collective == "all_gather"), None)
    assert (restored is not None) == (platform_name == "mindspore")  # whole values, for the file


@pytest.mark.untraced
def test_a_fault_in_a_tutorial_is_found(platform_name):
    """An injected fault diverges in its module under the framework's own training step."""
    report = verify_scenario(scenario_named(TUTORIAL), platform=platform_name, steps=1, inject="drop-allreduce@down")
    assert report.faulty_module == "down", report.text()


def test_a_report_has_the_layouts_of_parameters(platform_name):
    """The report has the layouts of the parallel model's parameters, uneven ones too, and the settings."""
    report = verify_scenario(scenario_named("3-rms-untied"), platform=platform_name, steps=1, inject="drop-allreduce")
    layouts = {parameter.path: parameter.layout for parameter in report.parameter_layouts}
    embedding = layouts["embed.weight"]
    assert embedding.notation() == "[259@tp, 22]"
    assert [embedding.local_shape_at((rank,)) for rank in range(3)] == [(87, 22), (87, 22), (85, 22)]
    assert layouts["norm.weight"].is_replicated
    assert report.axes == {"tp": 3}
    assert report.settings["optimizer"] == "adamw, learning rate 0.01"
    assert report.settings["injected fault"] == "drop-allreduce"
    assert "layers.*.mlp.down: RowwiseParallel" in report.settings["plan"]
    assert report.parallel_losses[0] != pytest.approx(report.losses[0], rel=1e-6)


def test_collectives_of_sequence_parallelism(platform_name):
    """A block gathers twice and reduce-scatters twice in forward; q, k and v share one reduce-scatter in backward."""
    report = verify_scenario(scenario_named("3-rms-untied"), platform=platform_name, steps=1)
    block = [row for row in report.traffic if "layers.0" in row.module]
    assert {(row.module, row.phase): (row.collective, row.count) for row in block} == {
        ("layers.0.attn", "forward"): ("all_gather", 1),
        ("layers.0.attn.o", "forward"): ("reduce_scatter", 1),
        ("layers.0.mlp", "forward"): ("all_gather", 1),
        ("layers.0.mlp.down", "forward"): ("reduce_scatter", 1),
        ("layers.0.mlp.down", "backward"): ("all_gather", 1),
        ("layers.0.mlp.gate", "backward"): ("reduce_scatter", 1),
        ("layers.0.mlp_norm", "backward"): ("all_reduce", 1),
        ("layers.0.attn.o", "backward"): ("all_gather", 1),
        ("layers.0.attn.q", "backward"): ("reduce_scatter", 1),
        ("layers.0.attn_norm", "backward"): ("all_reduce", 1),
    }
    assert all(row.implicit == 0 for row in report.traffic if row.module != "(loss)")


@pytest.mark.parametrize("name", ["2x2-layer-untied", pytest.param("3-rms-untied", marks=pytest.mark.sweep)])
# A lost sum and a lost reduction every day; test_faults.py has each fault on small models.
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if fault in ("drop-allreduce", "unreduced-norm-grad") else pytest.mark.sweep)
        for fault in FAULTS
    ],
)
@pytest.mark.untraced
def test_an_injected_fault_is_found_in_its_module(platform_name, fault, name):
    """Each fault makes the verification fail, and the first divergence is in the fault's module."""
    report = verify_scenario(scenario_named(name), platform=platform_name, steps=1, inject=fault)
    assert not report.ok
    assert report.faulty_module == FAULTS[fault][0], report.text()
    kind = {"unreduced-norm-grad": "gradient", "wrong-shard-dim": "weight"}.get(fault, "output")
    assert report.first.kind == kind
    when = "before training" if kind == "weight" else "step 1"
    assert f"DIVERGED first in module {FAULTS[fault][0]}: {when}, {kind} of" in report.verdict()


@pytest.mark.parametrize(
    "fault",
    [  # one every day: the place is read in the same way for each fault
        pytest.param("drop-allreduce@layers.0.attn.o", marks=pytest.mark.sweep),
        "unreduced-norm-grad@norm",
        pytest.param("double-bias@layers.0.mlp.down", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.untraced
def test_a_fault_may_be_put_elsewhere(platform_name, fault):
    """NAME@MODULE injects the fault into another module, and that module is named."""
    report = verify_scenario(scenario_named("3-layer-tied"), platform=platform_name, steps=1, inject=fault)
    assert report.faulty_module == fault.partition("@")[2], report.text()


@pytest.mark.sweep
@pytest.mark.slow
def test_over_real_processes(platform_name):
    """The same scenario is equal over real processes, with the counts and the collectives of the simulation."""
    require_transport(platform_name)
    scenario = scenario_named("3-rms-untied")
    real = verify_scenario(scenario, platform=platform_name, launch="processes", steps=2)
    assert real.ok, real.text()
    simulated = verify_scenario(scenario, platform=platform_name, steps=2)
    assert real.losses == simulated.losses
    assert real.traffic == simulated.traffic
    assert real.counts == simulated.counts


def test_float32(platform_name):
    """In float32 the wider bound of that precision applies, and the run is within it."""
    report = verify_scenario(scenario_named("2x2-rms-tied").with_dtype("float32"), platform=platform_name, steps=1)
    assert report.ok, report.text()
    assert "of float32" in report.bound
    assert report.worst.error > 1e-12


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_frameworks_agree():
    """Both frameworks train the same model: equal losses, and the same collectives in every module's forward."""
    scenario = scenario_named("2x2-rms-tied")
    first, second = (verify_scenario(scenario, platform=name, steps=2) for name in ("torch", "mindspore"))
    # MindSpore keeps Python scalars (the norm's eps, the learning rate) in float32.
    assert first.losses == pytest.approx(second.losses, rel=2**-24)

    def collectives(report):
        # MindSpore's transforms return a loss that is reduced, outside of any module.
        forward = [row for row in report.traffic if row.phase == "forward" and row.module not in ("(loss)", "")]
        return [(row.module, row.collective, row.axes, row.count, row.bytes) for row in forward]

    assert collectives(first) == collectives(second)


@pytest.mark.parametrize(
    "mesh, world, expected",
    [
        ("2x2", None, ((2, 2), ("dp", "tp"))),
        ("3", 3, ((3,), ("tp",))),
        (None, 4, ((4,), ("tp",))),
        ("ep=2,tp=3", 6, ((2, 3), ("ep", "tp"))),
    ],
)
def test_meshes(mesh, world, expected):
    """A mesh is sizes, with the customary names, or names with sizes."""
    assert parse_mesh(mesh, world) == expected


@pytest.mark.parametrize("mesh", ["", "x", "2x", "-1", "dp=2,tp", "2,2"])
def test_no_meshes(mesh):
    """A text that is not a mesh is refused with examples of valid ones."""
    with pytest.raises(InputError, match="must look like 3, 2x2 or dp=2,tp=3"):
        parse_mesh(mesh, None)


def test_fault_names():
    """NAME injects into the usual module, NAME@MODULE into another, None nowhere; unknown names list the known ones."""
    assert parse_fault(None) is None
    assert parse_fault("double-bias").module == "layers.1.attn.o"
    assert parse_fault("double-bias@x.y").module == "x.y"
    with pytest.raises(InputError, match="--inject 'no' is not one of drop-allreduce, wrong-shard-dim"):
        parse_fault("no")


@pytest.mark.parametrize(
    "inject, text",
    [
        pytest.param(  # as the next one
            "unreduced-norm-grad@layers.0.mlp.up",
            "there was nothing to change in module 'layers.0.mlp.up'",
            marks=pytest.mark.sweep,
        ),
        ("wrong-shard-dim@norm", "there was nothing to change in module 'norm'"),
        ("wrong-shard-dim@normal", "the model has no module 'normal'"),
    ],
)
def test_a_fault_that_changes_nothing_is_an_error(platform_name, inject, text):
    """A fault that changed nothing is an error, because it would look like an unnoticed one."""
    with pytest.raises(InputError, match=text):
        verify_scenario(scenario_named("3-layer-tied"), platform=platform_name, steps=1, inject=inject)


def _dropped_sums(platform):
    """Return the results of a transport before and while it drops sums."""
    from hyper_parallel.transport.base import active_transport
    from hyper_parallel.verify.faults import Fault, _DroppingTransport

    inner, ranks = active_transport(), (0, 1)
    fault = Fault("drop-allreduce", "m")
    transport = _DroppingTransport(inner, fault)
    x = platform_named(platform).from_numpy(np.full(2, inner.rank + 1.0, np.float32))
    values = lambda tensor: platform_named(platform).tensor_to_numpy(tensor).tolist()  # noqa: E731 - short
    summed = values(transport.start("all_reduce", x, "sum", ranks).wait())
    transport.dropping = True
    dropped = values(transport.start("all_reduce", x, "sum", ranks).wait())
    chunk = values(transport.start("reduce_scatter", [x[:1], x[1:]], "sum", ranks).wait())
    broadcast = values(transport.start("broadcast", x, 0, ranks).wait())
    return summed, dropped, chunk, broadcast, transport.world_size, fault.hits


def test_a_transport_that_drops_sums_drops_started_ones(platform_name):
    """Asynchronous sums are dropped like blocking ones: each rank gets its own value; other collectives are intact."""
    for rank, results in enumerate(simulate(_dropped_sums, 2, platform_name, (platform_name,))):
        own = rank + 1.0
        assert results == ([3.0, 3.0], [own, own], [own], [1.0, 1.0], 2, 2)


@pytest.mark.platforms("torch")
def test_what_a_model_raises_is_in_the_report():
    """If the parallel model raises, the run is not verified, and the report has the message with its cause."""
    import torch
    from torch import nn

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            if hasattr(self.weight, "placements"):
                raise ArithmeticError("no more numbers\nsecond line")
            return x * self.weight

    batches = [(np.ones((2, 3), np.float32),)] * 3
    case = ModelCase(Failing, batches, lambda output, _: output.sum(), inputs=1)
    plan = ParallelPlan({}, {})
    report = verify_model(lambda: case, lambda _: plan, (2,), ("tp",), platform="torch", name="failing")
    assert not report.ok
    assert report.cause == "ArithmeticError: no more numbers"
    assert "second line" in report.error


@pytest.mark.parametrize(
    "options, text",
    [
        ({"steps": 0}, "--steps is 0; at least one step must be compared"),
        ({"launch": "threads"}, "--launch 'threads' must be simulated or processes"),
    ],
)
def test_runs_that_make_no_sense_are_refused(options, text):
    """Options that leave nothing to compare are refused."""
    with pytest.raises(InputError) as caught:
        verify_model(dict, dict, (2,), ("tp",), platform="torch", **options)
    assert str(caught.value) == text


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.5])
def test_a_seed_is_one_that_every_framework_takes(seed):
    """Other seeds are refused with the range."""
    with pytest.raises(InputError) as raised:
        require_seed(seed)
    assert str(raised.value) == f"--seed is {seed!r}; it must be a whole number from 0 to 4294967295"


def test_a_world_has_a_rank():
    """A world size below one is refused under its own name."""
    with pytest.raises(InputError, match="--world-size 0 must be at least 1"):
        parse_mesh(None, 0)
