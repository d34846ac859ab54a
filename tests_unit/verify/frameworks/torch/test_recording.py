"""What the recorder of PyTorch programs takes: names, calls, regions, and nothing that changes the program."""

import contextlib
import inspect
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.base import active_transport, use_transport
from hyper_parallel.transport.simulated.endpoint import RankAbortedError
from hyper_parallel.verify import simulate, verify_program
from hyper_parallel.verify.frameworks.contract.record_log import (
    ProgramStopped,
    RecordingError,
    RecordLimits,
    RecordLog,
    active_log,
    record,
)
from hyper_parallel.verify.frameworks.contract.records import Pending, Region
from hyper_parallel.verify.frameworks.torch.fingerprints import TorchFingerprints
from hyper_parallel.verify.frameworks.torch.hooks import recording
from hyper_parallel.verify.frameworks.torch.local_values import read_tensor

pytestmark = pytest.mark.platforms("torch")


class Net(nn.Module):
    """Two layers with a dropout between them."""

    def __init__(self, probability=0.0, recompute=False):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.probability, self.recompute = probability, recompute
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        """Count the call."""
        self.count += 1
        x = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        return self.second(nn.functional.dropout(x, self.probability, self.training))


def recorded(program, rank=0, **limits):
    """Return the records of a program on this rank."""
    log = RecordLog(rank, RecordLimits(**limits))
    try:
        with recording(log):
            program()
    except ProgramStopped:
        pass
    return log.result()


def test_torchscript_compiles_what_is_recorded():
    """TorchScript takes a function that is recorded for the operator, as PyTorch does in modules that it compiles."""

    def larger(one, other):
        return torch.maximum(one, other) + torch.relu(one)

    plain = torch.maximum
    compiled = []
    recorded(lambda: compiled.append((torch.maximum, torch.jit.script(larger))))
    (replaced, scripted), (one, other) = compiled[0], torch.randn(2, 5)
    assert replaced is not plain
    assert torch.equal(scripted(one, other), torch.maximum(one, other) + torch.relu(one))
    assert torch.maximum is plain
    assert torch.jit._builtins._find_builtin(replaced) is None


def train(model, steps=2, optimizer=None, rows=4):
    """Train a model on random rows."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(rows, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def names(result, kind, step=0):
    """Return the names of the records of one kind and step, in order."""
    return [entry.name for entry in result.records if entry.kind == kind and entry.step == step]


def test_a_step_leaves_outputs_loss_gradients_state_weights_buffers_and_rate():
    """Every kind is taken, weights and buffers also before training, under the names of the model."""
    result = recorded(lambda: train(Net()))
    parameters = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert names(result, "output") == ["first", "second", "(model)"]
    assert names(result, "loss") == ["loss"]
    assert names(result, "gradient") == names(result, "weight") == names(result, "weight", -1) == parameters
    assert names(result, "buffer", -1) == names(result, "buffer", 1) == ["count"]
    assert names(result, "state")[:3] == ["first.weight:step", "first.weight:exp_avg", "first.weight:exp_avg_sq"]
    assert names(result, "rate") == ["optimizer 0, group 0"]
    assert [entry.step for entry in result.records[:5]] == [-1] * 5
    assert result.notes["optimizers"] == ["Adam"]
    (loss,) = [entry for entry in result.records if entry.kind == "loss" and entry.step == 0]
    assert loss.site.startswith(__file__)


def test_recording_changes_nothing():
    """Weights and random state after a recorded training are those of an unrecorded one, bit for bit."""
    results = []
    for run in (lambda program: program(), recorded):
        torch.manual_seed(0)
        model = Net(0.5)
        run(lambda model=model: train(model))
        results.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert torch.equal(results[0][1], results[1][1])
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert active_log() is None


def test_modules_called_again_recomputed_or_evaluated():
    """Micro-batches count as calls, recomputation as none, and evaluation has a name of its own."""

    def program():
        model = Net(recompute=True)
        with torch.no_grad():
            model(torch.ones(2, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    result = recorded(program)
    outputs = [(entry.name, entry.call) for entry in result.records if entry.kind == "output"]
    evaluated = [("first (no_grad)", 0), ("second (no_grad)", 0), ("(model) (no_grad)", 0)]
    steps = [(name, call) for call in (0, 1) for name in ("first", "second", "(model)")]
    assert outputs == evaluated + steps


def test_checkpoints_of_another_process_are_refused_on_simulated_ranks():
    """It would wait forever for the processes of other ranks; other kinds of saving go to PyTorch."""
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS

    def save():
        with recording(RecordLog(dist.get_rank())):
            dcp.async_save({"weight": torch.ones(3)}, checkpoint_id="kept", async_checkpointer_type=kind)

    with pytest.raises(RankFailedError) as caught:
        simulate(save, 2)
    assert str(caught.value.__cause__) == (
        "async_save(async_checkpointer_type=PROCESS) starts a process that joins those of other ranks over a network, "
        "which simulated ranks do not have; call dcp.save in verified runs"
    )


def test_wrappers_have_no_names():
    """DDP, torch.compile's wrapper and the user's own ``self.module`` do not change a name."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    def wrapped_by_compiler(model):
        # Simulated ranks have no compiler without this argument, as of PyTorch 2.12.
        has_own_code = "isolate_recompiles" in inspect.signature(torch.compile).parameters
        return torch.compile(model, backend="eager", disable=True) if has_own_code else model

    def body():
        plain, wrapped = (
            recorded(lambda wrap=wrap: train(wrap(Net()), 1)) for wrap in (lambda m: m, DistributedDataParallel)
        )
        own = recorded(lambda: train(Wrapper(wrapped_by_compiler(Net())), 1))
        return [[entry.key for entry in result.records] for result in (plain, wrapped, own)]

    ((plain, wrapped, own),) = simulate(body, 1, "torch")
    assert plain == wrapped == own


@pytest.mark.parametrize("transposed", [False, True])
def test_inputs_that_are_contiguous_are_noted(transposed):
    """A rank notes whether every matrix that a model was called with is contiguous; vectors say nothing."""

    def program():
        model = nn.Linear(5, 3)
        inputs = [torch.ones(5), torch.ones(4, 5), torch.ones(5, 4).T if transposed else torch.ones(4, 5)]
        loss = sum(model(x).sum() for x in inputs)
        loss.backward()

    assert recorded(program).notes["contiguous inputs"] is not transposed


def test_models_and_optimizers_are_told_apart():
    """The second model goes by its class, its optimizer by its number; each step belongs to its own optimizer."""

    def program():
        generator, critic = Net(), nn.Sequential(nn.Linear(3, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
        for _ in range(2):
            for optimizer in optimizers:
                critic(generator(torch.ones(2, 5))).mean().backward()
                optimizer.step()

    result = recorded(program)
    assert names(result, "gradient", 1)[-2:] == ["Sequential.0.weight", "Sequential.0.bias"]
    assert names(result, "rate", 1) == ["optimizer 0, group 0", "optimizer 1, group 0"]
    assert result.notes["optimizer steps"] == 2


def test_masks_norms_and_factors_are_taken():
    """A dropout's mask, and the norm and factor of clipping, imported by name before the recording or not."""
    from torch.nn.utils import clip_grad_norm_

    def program():
        model = Net(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(6, 5)).sum().backward()
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    result = recorded(program)
    (mask,) = [entry.value for entry in result.records if entry.kind == "mask"]
    norm, factor = [entry.value for entry in result.records if entry.kind == "norm"]
    assert mask.dtype == bool
    assert 0 < mask.mean() < 1
    assert factor == pytest.approx(1e-3 / (norm + 1e-6))


def test_the_program_stops_after_its_last_step():
    """``steps`` ends the program after so many steps of every optimizer."""
    result = recorded(lambda: train(Net(), 5), steps=3)
    assert max(entry.step for entry in result.records) == 2
    assert result.notes["optimizer steps"] == 3


def test_weights_are_taken_when_the_program_goes_on():
    """What a program changes after the optimizer's step, as a broadcast from the owner does, belongs to the step."""

    def program():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            model.weight.data.fill_(step)

    for limits in ({}, {"steps": 2}):
        weights = [record for record in recorded(program, **limits).records if record.kind == "weight"]
        assert [(record.step, record.value[0, 0]) for record in weights[1:]] == [
            (step, step) for step in range(limits.get("steps", 3))
        ]


def test_records_that_do_not_fit_are_an_error():
    """The error says what did not fit and how to record less."""
    with pytest.raises(RecordingError) as caught:
        recorded(lambda: train(Net()), size=2000)
    assert str(caught.value) == (
        "the records of rank 0 do not fit in memory: gradient 'second.weight' of step 1 takes 84 bytes, and 1944 of "
        "the 2000 bytes of this rank are taken; record fewer steps (--steps 1), record only some outputs "
        "(--only 'layers.0.*')"
    )


def test_only_some_outputs_are_taken():
    """``only`` selects outputs by pattern, and leaves gradients alone."""
    result = recorded(lambda: train(Net(), 1), only=("sec*",))
    assert names(result, "output") == ["second"]
    assert len(names(result, "gradient")) == 4


def test_parameters_that_no_optimizer_has_and_no_model_has():
    """An optimizer made before the model was replaced trains parameters that nobody uses: both are noted."""

    def program():
        old, model = Net(), Net()
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        for parameter in old.parameters():
            parameter.grad = torch.zeros_like(parameter)
        train(model, 1, optimizer)

    result = recorded(program)
    assert result.notes["parameters that no optimizer has"] == [
        "first.weight", "first.bias", "second.weight", "second.bias",
    ]  # fmt: skip
    assert result.notes["parameters that no model has"] == [[7, 5], [7], [3, 7], [3]]
    assert len(names(result, "gradient")) == 4


def partitioned(reduce=dist.all_reduce):
    """Train as DeepSpeed's ZeRO and Megatron's distributed optimizer do: a flat float32 partition a rank, padded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    flat = nn.functional.pad(flat, (0, -len(flat) % size))
    part = nn.Parameter(flat.chunk(size)[rank].clone())
    for parameter in parameters:
        parameter.main_param = part
    optimizer = torch.optim.AdamW([part], lr=0.1)
    for batch in torch.randn(3, 6, 5):
        model(batch.tensor_split(size)[rank]).square().mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        reduce(gradient)
        gradient = nn.functional.pad(gradient / size, (0, len(flat) - len(gradient)))
        model.zero_grad(set_to_none=True)
        part.grad = gradient.chunk(size)[rank].clone()
        optimizer.step()
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.detach())
        nn.utils.vector_to_parameters(torch.cat(parts)[: sum(map(torch.numel, parameters))], parameters)


@pytest.mark.parametrize("world_size", [2, 3])
def test_flat_partitions_are_compared(world_size):
    """What an optimizer trains in place of the model's parameters is compared; no parameter counts as untrained."""
    report = verify_program(partitioned, world_size, platform="torch")
    assert report.ok, report.text()
    assert "gradients that are zero" not in report.text()
    assert report.verdict.to_json()["compared"]["gradient"] == 3 * world_size
    report = verify_program(lambda: partitioned(lambda _: None), world_size, platform="torch")
    assert report.verdict.first.name == "optimizer 0, parameter 0"


def test_tensors_without_a_model_have_names():
    """Tensors that are trained without a module are called by their place in the optimizer; frozen ones are noted."""

    def program():
        weight = torch.ones(3, requires_grad=True)
        model = nn.Linear(3, 2)
        model.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.1)
        model(weight).sum().backward()
        optimizer.step()

    result = recorded(program)
    assert names(result, "gradient") == ["bias", "optimizer 0, parameter 0"]
    assert names(result, "weight", -1) == ["weight", "bias", "optimizer 0, parameter 0"]
    assert result.notes["frozen parameters"] == ["weight"]


def test_record_takes_tensors_arrays_and_numbers_and_says_what_it_cannot_take():
    """``record`` keeps the call's line, and does nothing outside of a verification."""
    record("loss", object())

    def program():
        record("x", torch.ones(2, dtype=torch.bfloat16))
        record("x", 3.5)
        record("part", np.ones((2, 3)), placement={"shape": (4, 3), "start": (2, 0)})

    values = [(entry.name, entry.call, entry.value.shape, entry.region) for entry in recorded(program).records]
    assert values == [("x", 0, (2,), None), ("x", 1, (), None), ("part", 0, (2, 3), Region((4, 3), (2, 0)))]
    with pytest.raises(RecordingError, match=r"^record\('x'\): expected a tensor, an array or a number, got object$"):
        recorded(lambda: record("x", object()))


def test_sharded_parameters_say_their_part():
    """Parameters of fully_shard are uneven boxes, recorded as they are when the optimizer sees them."""

    def program():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = Net()
        model(torch.ones(2, 5))  # records the weights before they are sharded; they are then recorded again
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        train(fully_shard(model, mesh=mesh), 1)

    def body():
        return recorded(program, rank=dist.get_rank())

    results = simulate(body, 2, "torch")
    for step in (-1, 0):
        (part,) = [entry for entry in results[1].records if entry.key == ("weight", "first.weight", step, 0)]
        assert (part.value.shape, part.region) == ((3, 5), Region((7, 5), (4, 0)))
    assert [(group.name, group.ranks) for group in results[0].groups] == [("dp", (0, 1))]


def test_tensor_parallel_outputs_say_their_part():
    """A column's output, handed on as a plain local tensor, is still known as a shard."""

    def body():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return recorded(lambda: train(model, 1), rank=dist.get_rank())

    result = simulate(body, 3, "torch")[2]
    outputs = {entry.name: entry for entry in result.records if entry.kind == "output"}
    assert outputs["0"].region == Region((4, 6), (0, 4))
    assert outputs["(model)"].value.shape == (4, 3)


def test_placements_of_pytorchs_dtensors():
    """Shards of one dim over two axes, pending sums, and placements that have no box."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.ones(2, 3)
        pending = DTensor.from_local(local, mesh, [Partial(), Replicate()], run_check=False)
        twice = distribute_tensor(torch.arange(7.0), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        product = DTensor.from_local(local, mesh, [Partial("product"), Replicate()], run_check=False)
        return read_tensor(pending)[1], read_tensor(twice), read_tensor(product), read_tensor("text")

    pending, twice, product, text = simulate(body, 4, "torch")[3]
    assert pending == Region((2, 3), (0, 0), (Pending("sum", (1, 3)),))
    assert twice[1] == Region((7,), (6,))
    assert twice[0].tolist() == [6.0]
    assert product is None
    assert text is None


def test_this_librarys_dtensors_say_their_part():
    """A DTensor of this library is recorded as its local part, half precision as float32 with the dtype's name."""
    import hyper_parallel as hp

    def body(dtype):
        mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        return read_tensor(hp.distribute_tensor(torch.arange(7.0).to(dtype), mesh, [hp.Shard(0)]))

    for dtype, name in ((torch.float32, ""), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        array, region, told = simulate(body, 3, "torch", (dtype,))[1]
        assert array.tolist() == [3.0, 4.0, 5.0]
        assert (array.dtype, told) == (np.float32, name)
        assert region == Region((7,), (3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_reading_a_tensor_leaves_its_storage_to_the_program(dtype):
    """The program may resize it, as FSDP does to free what it has gathered, and the values read stay as they were."""
    values = torch.arange(6).to(dtype).reshape(2, 3).T
    expected = values.tolist()
    array = read_tensor(values).array
    values.untyped_storage().resize_(0)
    assert array.tolist() == expected


def _accumulated():
    """Two steps of two micro-batches with FSDP2, which keeps whole parameters until it reduces gradients."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.randn(4, 6, 5).split(2):
        for last, part in zip((False, True), batch, strict=True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            (model(part.chunk(world)[rank]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp_may_free_parameters_that_were_recorded():
    """Parameters that stay whole between micro-batches are recorded then, and freed after the last."""
    report = verify_program(_accumulated, 2)
    assert report.status == 0, report.text()


def test_recorded_and_kept_numbers_leave_storages_resizable():
    """What a recording computes of a tensor, or keeps, does not keep the program from freeing the memory."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.arange(6.0, dtype=dtype).requires_grad_()
        numbers, array = TorchFingerprints().of(tensor), TorchFingerprints().array(tensor)
        tensor.untyped_storage().resize_(0)
        assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert numbers[1] == 15


def test_a_rank_outside_of_a_mesh_records_nothing_of_its_tensors():
    """A rank that holds no part of a DTensor has none to record, whichever library the DTensor is of."""
    import hyper_parallel as hp

    def body():
        x = torch.arange(7.0)
        ours = hp.distribute_tensor(x, hp.DeviceMesh("cpu", [2, 0], mesh_dim_names=("tp",)), [hp.Shard(0)])
        theirs = distribute_tensor(x, DeviceMesh("cpu", [0, 2]), [Shard(0)], src_data_rank=None)
        return read_tensor(ours), read_tensor(theirs)

    inside, outside, _ = simulate(body, 3, "torch")
    assert outside == (None, None)
    assert [(value.array.tolist(), value.region) for value in inside] == [
        ([4.0, 5.0, 6.0], Region((7,), (4,))),
        ([0.0, 1.0, 2.0, 3.0], Region((7,), (0,))),
    ]


def test_this_librarys_tensors_are_recorded():
    """Functions that stand for PyTorch's during a recording are dispatched on DTensors of this library as those are."""
    from hyper_parallel import init_device_mesh as init_mesh
    from hyper_parallel.core.dtensor.module import distribute_tensor as distribute
    from hyper_parallel.core.dtensor.placements import Shard as Sharded

    def on_rank():
        mesh = init_mesh("cpu", (3,), mesh_dim_names=("tp",))
        log = RecordLog(0, RecordLimits(), None)
        with recording(log):
            x = distribute(torch.arange(1.0, 8.0), mesh, [Sharded(0)]).requires_grad_()
            whole = nn.functional.dropout(x, 0.5, training=False).full_tensor().tolist()
            output = nn.functional.dropout(x, 0.5)
            torch.autograd.backward([output.sum()])
        return whole, x.grad.full_tensor().tolist()

    for whole, gradient in simulate(on_rank, 3, "torch"):
        assert whole == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert set(gradient) <= {0.0, 2.0}


def test_an_abandoned_rank_leaves_no_functions():
    """A rank that waits in C when its time is over never ends its recording: the end of its world does."""
    plain = nn.Module.__call__, torch.autograd.backward, nn.functional.dropout
    began, go_on = threading.Event(), threading.Event()

    def body():
        with recording(RecordLog(0)):
            began.set()
            lock = threading.Lock()
            lock.acquire()
            while not go_on.is_set():
                with contextlib.suppress(BaseException):
                    lock.acquire(timeout=0.2)

    with pytest.raises(RankFailedError, match=r"did not finish within 5 s"):
        simulate(body, 2, "torch", timeout=5.0)
    try:
        assert began.is_set()
        assert (nn.Module.__call__, torch.autograd.backward, nn.functional.dropout) == plain
    finally:
        go_on.set()
    for thread in threading.enumerate():
        if thread.name == "rank-0":
            thread.join()
    assert (nn.Module.__call__, torch.autograd.backward, nn.functional.dropout) == plain


def test_a_recording_after_the_end_is_refused():
    """A rank whose world has ended starts no recording, which nobody would end."""
    plain, transports = nn.Module.__call__, []
    simulate(lambda: transports.append(active_transport()), 1, "torch")
    with use_transport(transports[0]), pytest.raises(RankAbortedError), recording(RecordLog(0)):
        pass
    assert nn.Module.__call__ is plain


def train_flat(wrong=None, clip=lambda model: model.clip_grad_norm_(0.1)):
    """Train 66 weights in a flat parameter of FSDP1 on a part of the batch."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        part = torch.randn(8, 5).tensor_split(dist.get_world_size())[dist.get_rank()]
        model(part).square().mean().backward()
        if dist.get_rank() == wrong:
            for parameter in model.parameters():
                parameter.grad.mul_(1.5)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrong", [None, 3])
def test_flat_parameters_are_compared_without_padding(wrong):
    """66 weights on 4 ranks are 17, 17, 17 and 15: values, gradients and states of each, and two of padding."""
    report = verify_program(lambda: train_flat(wrong), 4, platform="torch")
    assert report.ok == (wrong is None), report.text()
    if wrong is None:
        assert report.verdict.counts["gradient"] == 16
        assert report.verdict.counts["norm"] == 16
        assert not report.verdict.unplaced
    else:
        assert (report.verdict.first.kind, report.verdict.first.name) == ("gradient", "_flat_param")


def test_a_norm_of_a_shard_is_no_norm_of_fsdp():
    """Clipping by PyTorch's own function, which sees a rank's part alone, is reported as a local norm."""

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    report = verify_program(lambda: train_flat(clip=clip), 2, platform="torch")
    first = report.verdict.first
    assert (first.kind, first.name, first.cause.kind) == ("norm", "gradient norm", "norm-local"), report.text()
