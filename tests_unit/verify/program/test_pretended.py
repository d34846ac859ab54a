"""`--pretend`: the CPU stands in for cuda or npu, and a script that names the device runs unchanged."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")

TRAINING = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == "cuda"
assert torch.cuda.device_count() == torch.accelerator.device_count() == size
torch.cuda.set_device(rank)
assert torch.cuda.current_device() == torch.accelerator.current_device_index() == rank
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("dp",))
with torch.device("cuda"):
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.0), nn.Linear(7, 3))
model = nn.parallel.DistributedDataParallel(net.cuda().to(device), device_ids=[rank], process_group=mesh.get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cuda")
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
assert first.type() == "torch.cuda.FloatTensor"
with torch.device("cpu"):  # a mode of functions
    assert first.type() == "torch.cuda.FloatTensor"
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3, device="cuda:0"))
torch.cuda._lazy_call(lambda: torch.cuda.default_generators[rank].set_state(state))
assert torch.equal(first, torch.rand(3, device=device))
torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
assert torch.cuda.memory.max_memory_allocated() == 0
stream, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
data = torch.randn(3, 6, 5, device="cuda", generator=generator).cpu().pin_memory()
for batch in torch.empty(3, 6, 5, pin_memory=True).copy_(data):
    part = batch.chunk(size)[dist.get_rank()].to(device, non_blocking=True)
    begin.record()
    with torch.cuda.stream(stream), torch.cuda.device(device):
        offset = part.new_zeros((), device=0) + torch.zeros_like(part, device="cuda").sum()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        loss = model(part).float().square().mean() + offset
    scaler.scale(loss).backward()
    GRADIENTS
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    dist.barrier(device_ids=[rank])
counted = torch.ones(size, dtype=torch.int64, device="cuda")  # a program would copy these from the device
dist.all_to_all_single(torch.zeros(size), torch.ones(size), counted, counted)
torch.save(net.state_dict(), "weights.pt")
net.load_state_dict(torch.load("weights.pt", map_location="cuda:0"))
assert torch.cuda.memory_stats()["num_ooms"] == torch.cuda.max_memory_allocated() == 0
assert torch.cuda.get_device_properties(0).name == torch.cuda.get_device_name() == "CPU that stands in for cuda"
"""
COUNTS = {"autocast on the device": 3, "events": 2, "modules on the device": 1, "pinned tensors": 2}
"""Some of what every rank of TRAINING asks."""

PLAIN = """
import torch
from torch import nn

PART
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def verified(path, source, pretend="cuda", launch="simulated"):
    """Return the report of a script on two ranks."""
    path.write_text(source)
    return verify_program(str(path), 2, pretend=pretend, launch=launch, allow=["equal-data"])


TOOLS = """
import pickle

import torch.distributed as dist

device, others = torch.cuda, torch.device("meta")
stream, event = torch.Stream(device="cuda"), torch.Event("cuda", enable_timing=True)
event.record(stream)
assert isinstance(stream, torch.Stream) and isinstance(event, torch.Event) and isinstance(torch.Stream(), torch.Stream)
assert event.elapsed_time(torch.Event()) == 0.0
with device.device(0) as nothing:
    assert nothing is None and isinstance(device.device("cuda:0"), device.device)
device.memory._record_memory_history(max_entries=10)
device.memory._dump_snapshot("memory.pickle")
with open("memory.pickle", "rb") as file:
    assert pickle.load(file) == {"segments": [], "device_traces": []}
assert device.memory_snapshot() == [] and device.temperature() == device.power_draw() == device.clock_rate() == 0
device.set_sync_debug_mode("warn")
assert device.get_sync_debug_mode() == 1 and device.get_allocator_backend() == "native"
assert "no processes" in device.list_gpu_processes()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    torch.ones(2, device="cuda") * 2
assert len(profile.events()) > 0
saved = {"weights": torch.arange(3.0, device="cuda")}
name = f"saved{dist.get_rank() if dist.is_initialized() else 0}.pt"
torch.save(saved, name)
for place in (None, "cuda", {"cpu": "cuda:0"}, lambda storage, _: storage.cuda(0), lambda *_: None):
    assert torch.equal(torch.load(name, map_location=place)["weights"], saved["weights"])
assert torch.load(name, map_location={"cpu": "meta"})["weights"].is_meta
assert torch.load(name, map_location=lambda storage, _: storage)["weights"].device.type == "cpu"
"""


def test_streams_memory_profiles_and_files(tmp_path):
    """Generic streams and events, snapshots of memory, profiles, and files that a device reads run on the CPU."""
    options = "dist.init_process_group('nccl', pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))"
    tools = TOOLS.replace("device, others", f"{options}\nassert torch.cuda.nccl.version() > (2, 10)\ndevice, others", 1)
    report = verified(tmp_path / "train.py", PLAIN.replace("PART", tools))
    assert report.ok, report.text()
    assert report.json()["pretended"]["counts"]["options of groups"] == 1


@pytest.mark.parametrize(
    "how", ["import torch_npu.contrib.transfer_to_npu", "from torch_npu.contrib import transfer_to_npu"]
)
def test_scripts_that_transfer_cuda_to_npu(how, tmp_path):
    """A script for cuda that imports the adapter of Ascend runs under the NPU's name and under its own."""
    part = f"""
import torch_npu
{how}
from torch_npu.npu.amp import GradScaler
assert torch.npu.is_available() and torch.cuda.is_available() and not torch.ones(1).is_npu
torch.npu.config.allow_internal_format = False
torch.npu.set_compile_mode(jit_compile=False)
with torch.npu.amp.autocast(dtype=torch.bfloat16):
    assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="npu")).dtype == torch.bfloat16
assert float(GradScaler(init_scale=2.0).scale(torch.ones((), device="npu"))) == 2.0
torch.npu.mstx.mark("step")
try:
    torch_npu.profiler
except AttributeError as error:
    text = "module 'torch_npu' has no attribute 'profiler' when the CPU replaces the device (docs/stacks.md)"
    assert str(error) == text
"""
    report = verified(tmp_path / "train.py", PLAIN.replace("PART", part + TOOLS), "npu")
    assert report.ok, report.text()


@pytest.mark.parametrize("pretend, launch", [
    ("cuda", "simulated"),
    ("npu", "simulated"),
    pytest.param("cuda", "processes", marks=pytest.mark.sweep),  # what is pretended is the same in real ranks
])  # fmt: skip
def test_scripts_that_name_the_device_are_equal(pretend, launch, tmp_path):
    """Queries, placement, streams, events, generators, pinned memory, autocast and the engine's name hold."""
    source = TRAINING.replace("GRADIENTS", "").replace("nccl", "hccl" if pretend == "npu" else "nccl")
    report = verified(tmp_path / "train.py", source.replace("cuda", pretend), pretend, launch)
    assert report.ok, report.text()
    assert f"the CPU stood in for {pretend}: on rank 0, autocast on the device 3, calls of " in report.text()
    counts = report.json()["pretended"]["counts"]
    engine = "hccl" if pretend == "npu" else "nccl"
    assert counts.items() >= {**COUNTS, f"groups of {engine}": 1}.items()
    assert not torch.cuda.is_available()


OWN_MESH = """
import torch
from torch import nn
from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor, get_platform, init_device_mesh

world = get_platform().get_world_size()
mesh = init_device_mesh("npu", (world,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = nn.Linear(5, 3).to("npu")
for name, parameter in list(model.named_parameters()):
    placed = DTensor.from_local(parameter.detach(), mesh, [Replicate()])
    setattr(model, name, nn.Parameter(placed))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.randn(7, 5, device="npu")
for step in range(2):
    rows = distribute_tensor(x, mesh, [Shard(0)])
    again = DTensor.from_local(rows.to_local(), mesh, [Shard(0)], shape=x.shape, stride=x.stride())
    loss = model(again).square().mean()
    loss.backward()
    GRADIENTS
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("pretend", ["npu", "cuda"])
@pytest.mark.parametrize(
    "change, equal", [("", True), ("model.weight.grad.to_local().mul_(1 + mesh.rank)", False)], ids=["right", "wrong"]
)
def test_a_mesh_of_this_library_may_name_the_device(pretend, change, equal, tmp_path):
    """Tensors that a program puts on the device are on the device of its mesh, local shards included."""
    source = OWN_MESH.replace("GRADIENTS", change).replace('"npu"', f'"{pretend}"')
    (tmp_path / "train.py").write_text(source)
    report = verify_program(str(tmp_path / "train.py"), 3, pretend=pretend, allow=["equal-data"])
    assert report.ok is equal, report.text()
    if not equal:
        assert report.verdict.first.name == "weight"


def test_an_error_on_the_pretended_device_is_caught(tmp_path):
    """A gradient that one rank scales is reported with its parameter."""
    wrong = "model.module[0].weight.grad.mul_(1 + dist.get_rank())"
    report = verified(tmp_path / "train.py", TRAINING.replace("GRADIENTS", wrong))
    assert report.status == 1
    assert report.verdict.first.name == "0.weight"


@pytest.mark.skipif(find_spec("triton") is not None, reason="[no-tool] triton is installed, so no stub replaces it")
def test_a_package_that_is_imported_only_to_look_is_a_stub(tmp_path):
    """A kernel or a type may be declared; searches and guarded imports find nothing; the report names who imports."""
    part = """
import importlib.util

assert importlib.util.find_spec("triton") is None
try:
    import flash_attn
except ImportError:
    flash_attn = None
assert flash_attn is None
import triton
import triton.language as tl
from triton.runtime import driver

@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    tl.load(x)

def graph(key: int) -> torch.cuda.CUDAGraph | None:
    return None

assert not isinstance(graph(1), torch.cuda.CUDAGraph)
"""
    path = tmp_path / "train.py"
    report = verified(path, PLAIN.replace("PART", part))
    assert report.ok, report.text()
    assert f"the CPU stood in for triton, which {path}:14 imports: a stub" in report.text()


@pytest.mark.parametrize(
    "part, message",
    [
        (
            "import flash_attn\nflash_attn.flash_attn_func(torch.ones(1), 2)",
            (
                "flash_attn.flash_attn_func was called, which does not exist when the CPU replaces the device: "
                'attn_implementation="sdpa" in transformers, --attention-backend unfused in Megatron (docs/stacks.md)'
            ),
        ),
        (
            "import triton\n@triton.jit\ndef kernel(x): pass\nkernel[(1,)](torch.ones(1))",
            (
                "triton.jit of kernel was called, which does not exist when the CPU replaces the device: "
                if find_spec("triton") is None
                else "a kernel of triton needs a device: "
            )
            + "choose the implementation in PyTorch, such as use_liger_kernel=False in transformers (docs/stacks.md)",
        ),
        (
            "torch.cuda.CUDAGraph()",
            (
                "torch.cuda.CUDAGraph was called, which does not exist when the CPU replaces the device: "
                "run without graphs of the device (docs/stacks.md)"
            ),
        ),
        (
            "from transformer_engine.pytorch import Linear\nclass Layer(Linear): pass\nLayer(3, 2)",
            (
                "transformer_engine.pytorch.Linear was called, which does not exist when the CPU replaces the device: "
                "--transformer-impl local in Megatron, get_gpt_layer_local_spec() in megatron.core (docs/stacks.md)"
            ),
        ),
        (
            "from apex.optimizers import FusedAdam\nFusedAdam([torch.ones(1)], lr=0.1)",
            (
                "apex.optimizers.FusedAdam was called, which does not exist when the CPU replaces the device: "
                "torch.optim for its optimizers; --no-gradient-accumulation-fusion and --no-persist-layer-norm in "
                "Megatron "
                "(docs/stacks.md)"
            ),
        ),
        (
            "torch.cuda.MemPool()",
            (
                "torch.cuda.MemPool was called, which does not exist when the CPU replaces the device: "
                "allocate with torch.empty (docs/stacks.md)"
            ),
        ),
        ("torch.cuda.set_device(1)", "cuda device 1 of 1 does not exist; every rank has one, LOCAL_RANK"),
    ],
)
def test_what_the_cpu_lacks_is_named(part, message, tmp_path):
    """A kernel that is called is an error that names it and what to switch."""
    with pytest.raises(InputError) as caught:
        verified(tmp_path / "train.py", PLAIN.replace("PART", part))
    assert message in str(caught.value)


def test_a_fused_function_of_the_npu_is_named(tmp_path):
    """A fused function that is called is an error that names it and what to call in its place."""
    with pytest.raises(InputError) as caught:
        verified(
            tmp_path / "train.py",
            PLAIN.replace("PART", "import torch_npu\ntorch_npu.npu_fusion_attention(1, 2)"),
            "npu",
        )
    assert (
        "torch_npu.npu_fusion_attention was called, which does not exist when the CPU replaces the device: "
        "call PyTorch's own functions, such as scaled_dot_product_attention (docs/stacks.md)"
    ) in str(caught.value)


def body():
    """A function, whose ranks are threads."""


@pytest.mark.parametrize(
    "program, options, message",
    [
        ("script", {"pretend": "tpu"}, "--pretend 'tpu' must be cuda or npu"),
        (
            "script",
            {"pretend": "npu", "device": "cuda"},
            "--pretend npu lets the CPU stand in, and --device cuda asks for a device; leave out one",
        ),
        (
            "script",
            {"pretend": "cuda", "launch": "threads"},
            "--pretend cuda needs ranks that are processes of their own: --launch simulated or processes",
        ),
        (
            body,
            {"pretend": "cuda", "platform": "torch"},
            "--pretend cuda is for scripts, which have processes of their own; this is a function",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(program, options, message, tmp_path):
    """Only processes that end with the run can be changed for good."""
    if program == "script":
        program = str(tmp_path / "train.py")
        (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(InputError) as caught:
        verify_program(program, 2, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "part, device",
    [
        ("torch.ones(1).cuda()", "cuda"),
        ("import torch_npu", "npu"),
        pytest.param("torch.device('npu')", "npu", marks=pytest.mark.sweep),  # the device's name, as the first
    ],
)
def test_a_script_for_a_device_is_told_of_pretending(part, device, tmp_path):
    """The error of a script that names a device which is not there says which option helps."""
    with pytest.raises(InputError, match=f"--pretend {device} lets the CPU stand in for {device}"):
        verified(tmp_path / "train.py", PLAIN.replace("PART", part), "")


RING = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl")
torch.manual_seed(0)
mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("cp",))
ENABLE


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.split, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        parts = [part.view(*part.shape[:2], 2, 3).transpose(1, 2) for part in self.split(x).chunk(3, -1)]
        if size > 1:
            parts = [DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts]
        found = nn.functional.scaled_dot_product_attention(*parts, is_causal=CAUSAL)
        found = found.to_local() if size > 1 else found
        return self.out(found.transpose(1, 2).flatten(2))


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
halves = torch.arange(4 * size).chunk(2 * size)
places = torch.cat([halves[rank], halves[2 * size - 1 - rank]]) if CAUSAL else torch.arange(4 * size).chunk(size)[rank]
weights = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(2))
for batch in torch.randn(3, 2, TOKENS, 6, generator=torch.Generator().manual_seed(1)).cuda():
    (model(batch[:, places]) * weights[places]).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
ENABLE = """
from torch.distributed.tensor.experimental import _attention
_attention._enable_context_parallel_dispatcher()
_attention._cp_options.enable_load_balance = CAUSAL
"""


def ring(causal, enable=ENABLE):
    """Return a program whose tokens are spread over ranks; a causal one in pairs of early and late tokens."""
    text = RING.replace("ENABLE", enable).replace("4 * size", "TOKENS").replace("CAUSAL", str(causal))
    return text.replace("TOKENS", "24")


@pytest.mark.parametrize("causal, world_size", [(True, 2), (True, 3), (False, 2), (False, 4)])
def test_attention_over_the_tokens_of_all_ranks(tmp_path, causal, world_size):
    """PyTorch's ring, which has kernels of devices alone, gives the attention of one rank, forward and backward."""
    file = tmp_path / "train.py"
    file.write_text(ring(causal), encoding="utf-8")
    report = verify_program(str(file), world_size, pretend="cuda")
    assert report.status == 0, report.text()
    assert "rings of attention 6" in report.text()


def test_attention_of_distributed_tokens_without_context_parallelism(tmp_path):
    """Where the program has not enabled it, attention fails as PyTorch's does on the CPU."""
    file = tmp_path / "train.py"
    file.write_text(ring(True, ""), encoding="utf-8")
    text = verify_program(str(file), 2, pretend="cuda").text()
    assert "does not have a sharding strategy registered" in text


NORMALIZED = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(2, 3, 3, dtype=torch.float64), nn.BatchNorm2d(3, dtype=torch.float64), nn.Flatten())
net = CONVERTED.to("cuda")
model = nn.parallel.DistributedDataParallel(net, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(1)
for _ in range(3):
    batch = torch.randn(10, 2, 5, 5, dtype=torch.float64, generator=generator)
    loss = model(batch.chunk(ranks)[rank].cuda()).square().sum(1).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()(batch.chunk(ranks)[rank].cuda())
"""


@pytest.mark.parametrize("converted, status", [("nn.SyncBatchNorm.convert_sync_batchnorm(net)", 0), ("net", 1)])
def test_batch_norm_of_all_ranks_runs_on_the_pretended_device(converted, status, tmp_path):
    """Statistics of all ranks' batches, running ones too, are those of the batch; of a rank's own batch they differ."""
    report = verified(tmp_path / "train.py", NORMALIZED.replace("CONVERTED", converted))
    assert report.status == status, report.text()
    if status:
        assert (report.verdict.first.kind, report.verdict.first.name) == ("output", "1")
