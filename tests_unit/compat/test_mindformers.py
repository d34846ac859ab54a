"""MindFormers' Trainer, its files unmodified, trains on simulated ranks as on one device.

What MindSpore has for Ascend devices alone is replaced as ``--pretend npu`` does, on one device as on many. Environment
`mindformers` of tox installs the wheel.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.simulate import simulate

pytestmark = [
    pytest.mark.platforms("mindspore"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None,
        reason="[no-tool] MindFormers is not installed: tox -e mindformers",
    ),
]

SCRIPT = str(Path(__file__).with_name("train_with_mindformers.py"))


def whole(value):
    """The values of the whole tensor."""
    from hyper_parallel import DTensor

    return np.array((value.full_tensor() if isinstance(value, DTensor) else value).asnumpy())


def train(model, batch, parallelism):
    """Train on this rank; return losses, norms, the clipped gradients of the first step, and the last weights."""
    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    record = {"losses": [], "norms": [], "gradients": {}}

    def recorder():
        from mindformers.pynative.callback import TrainerCallback

        class Recorder(TrainerCallback):
            def on_step_end(self, *_, loss, grad_norm, **__):
                if loss is not None:  # only the last stage of a pipeline has it
                    record["losses"].append(float(loss.asnumpy()))
                record["norms"].append(float(grad_norm.asnumpy()))

        return Recorder()

    def recorded(trainer, update):
        optimizer, step = trainer.optimizer, trainer.optimizer.construct

        def construct(gradients):
            names = [parameter.name for parameter in optimizer.parameters]
            record["gradients"] = record["gradients"] or dict(zip(names, map(whole, gradients), strict=True))
            return step(gradients)

        optimizer.construct = construct
        try:
            return update()
        finally:
            optimizer.construct = step

    with pretended_npu() as calls:
        trainer = runpy.run_path(SCRIPT)["make_trainer"](model, batch, parallelism, [recorder()])
        trainer._optimizer_update = functools.partial(recorded, trainer, trainer._optimizer_update)
        trainer.train()
        record["weights"] = {
            name: whole(parameter)
            for part in trainer.model
            for name, parameter in part.parameters_and_names()
            if parameter.requires_grad
        }
        record["biases"] = {
            name: whole(parameter)
            for part in trainer.model
            for name, parameter in part.parameters_and_names()
            if name.endswith("expert_bias")
        }
    assert calls["FlashAttentionScore"] >= 2
    return record


@functools.cache
def on_one_device(model, batch):
    """The record of one device, which accumulates the gradients of the batch."""
    return simulate(train, 1, platform="mindspore", args=(model, batch, {}), timeout=600)[0]


@pytest.mark.parametrize(
    "world, model, batch, parallelism",
    [
        pytest.param(2, "dense", 4, {"tensor_parallel": 2}, id="tensor parallel"),
        pytest.param(3, "dense", 6, {}, id="fully sharded, uneven"),
        pytest.param(4, "dense", 4, {"tensor_parallel": 2}, id="fully sharded and tensor parallel"),
        pytest.param(4, "dense", 8, {"data_parallel_shard": 2}, id="two replicas, accumulated"),
        pytest.param(3, "experts", 6, {"expert_parallel": 3}, id="expert parallel, three ranks"),
        pytest.param(4, "experts", 4, {"expert_parallel": 2}, id="expert parallel, experts fully sharded"),
        pytest.param(2, "experts", 2, {"tensor_parallel": 2}, id="experts, tensor parallel"),
        pytest.param(
            2, "experts", 2, {"tensor_parallel": 2, "expert_parallel": 2}, id="experts, tensor and expert parallel"
        ),
        pytest.param(4, "experts", 4, {"tensor_parallel": 2}, id="experts, tensor parallel, fully sharded"),
        pytest.param(2, "experts", 4, {}, id="experts without expert parallelism"),
        pytest.param(
            2,
            "experts",
            4,
            {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 4},
            id="pipeline of two stages",
        ),
        pytest.param(
            4,
            "experts",
            4,
            {
                "pipeline_parallel": 2,
                "pipeline_parallel_microbatch_size": 2,
                "expert_parallel": 2,
                "pipeline_parallel_schedule": "gpipe",
            },
            id="pipeline of two stages, expert parallel",
        ),
        pytest.param(
            4,
            "experts",
            4,
            {
                "pipeline_parallel": 2,
                "pipeline_parallel_microbatch_size": 2,
                "expert_parallel": 2,
                "pipeline_parallel_overlap_b_f": True,
            },
            id="pipeline of two stages, expert parallel, asked to overlap",
        ),
        pytest.param(
            2,
            "long",
            1,
            {"context_parallel": 2, "context_parallel_method": "ulysses"},
            id="context parallel, exchanged",
        ),
        pytest.param(
            4,
            "long",
            1,
            {"context_parallel": 4, "context_parallel_method": "hybrid", "ulysses_degree_in_cp": 2},
            id="context parallel, both",
        ),
        pytest.param(
            2,
            "latent",
            1,
            {"context_parallel": 2, "context_parallel_method": "ulysses", "context_parallel_async": True},
            id="context parallel, asynchronous",
        ),
    ],
)
def test_the_trainer_trains_as_on_one_device(world, model, batch, parallelism, tmp_path, monkeypatch):
    """Losses, gradient norms, gradients and weights are those of one device, on every rank, for two clipped steps."""
    monkeypatch.chdir(tmp_path)  # MindFormers writes its log beside
    compare(world, model, batch, parallelism)


def compare(world, model, batch, parallelism):
    """Hold the records of all ranks against one device's."""
    expected = on_one_device(model, batch)
    # Of "latent": embedding, output, last norm; two norms of the layer; qkv, qb, kvb, proj of its attention; fc1, fc2.
    count = {"dense": 19, "experts": 22, "long": 11, "latent": 3 + 2 + 4 + 2}[model]
    assert len(expected["gradients"]) == len(expected["weights"]) == count
    assert min(expected["norms"]) > 0.2, "nothing is clipped"
    results = simulate(train, world, platform="mindspore", args=(model, batch, parallelism), timeout=600)
    stages = parallelism.get("pipeline_parallel", 1)
    for rank, record in enumerate(results):
        losses = expected["losses"] if rank >= world - world // stages else []
        np.testing.assert_allclose(record["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(record["norms"], expected["norms"], rtol=1e-5)
        for name, values in record["biases"].items():  # they follow the tokens that all ranks have counted
            np.testing.assert_array_equal(values, expected["biases"][name], err_msg=name)
        for kind in ("gradients", "weights"):
            assert stages > 1 or record[kind].keys() == expected[kind].keys()
            for name, values in record[kind].items():
                scale = np.abs(expected[kind][name]).max()
                np.testing.assert_allclose(values / scale, expected[kind][name] / scale, atol=2e-5, err_msg=name)
    assert {name for record in results for name in record["weights"]} == expected["weights"].keys()


TRAINS = "make_trainer(model, int(batch), json.loads(parallelism) if get_world_size() > 1 else {}).train()"
# The groups of the modules, rather than a function that warm ranks would keep for the next program.
FORGOTTEN_SUM = """from hyper_parallel.core.data_parallel.sharding import groups_of

    trainer = {}
    for part in trainer.model:
        for group in sum(groups_of(part), []):
            group.reduction.adds_copies = False
    trainer.train()"""


@pytest.mark.parametrize("broken", [False, True])
def test_verify_program_takes_the_trainers_script(broken, tmp_path, monkeypatch):
    """The script is equal; gradients of norms that are not summed over tensor parallelism are found by their names."""
    monkeypatch.chdir(tmp_path)
    source = Path(SCRIPT).read_text(encoding="utf-8")
    assert source.count(TRAINS) == 1
    (tmp_path / "train.py").write_text(
        source.replace(TRAINS, FORGOTTEN_SUM.format(TRAINS.removesuffix(".train()"))) if broken else source
    )
    report = verify_program(
        "train.py", 2, platform="mindspore", pretend="npu", steps=1, args=["dense", "2", '{"tensor_parallel": 2}']
    )
    assert report.ok is not broken, report.text()
    if broken:  # what follows differs by the norm that clips
        assert report.verdict.first.name.endswith("layernorm.weight"), report.text()
    else:
        assert "the CPU stood in for npu: on rank 0, Cell.to_empty 1, FlashAttentionScore 4, " in report.text()
        assert "38 gradients" in report.text()


@pytest.mark.parametrize(
    "model, parallelism, text",
    [
        ("dense", {"tensor_parallel": 3}, "tensor_parallel(3) * pipeline_parallel(1) * context_parallel(1) must be"),
        ("experts", {"expert_parallel": 3}, "ep(3) must divide dp_shard(2) * cp(1) * tp(1) = 2"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_named(model, parallelism, text, tmp_path, monkeypatch):
    """MindFormers itself refuses sizes that do not divide two ranks, and its sentence is the cause of the report."""
    monkeypatch.chdir(tmp_path)
    args = [model, "2", json.dumps(parallelism)]
    report = verify_program(SCRIPT, 2, platform="mindspore", pretend="npu", steps=1, args=args)
    assert not report.ok
    assert report.cause.startswith("ValueError: "), report.text()
    assert text in report.cause


def test_keys_and_values_are_gathered_over_context_parallelism(tmp_path, monkeypatch):
    """As the other configurations; last, since MindFormers keeps the layout that it chooses for the process's life."""
    monkeypatch.chdir(tmp_path)
    compare(2, "long", 1, {"context_parallel": 2})
