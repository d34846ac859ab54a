"""Checks of the facets *modules*, *memory* and *persistence*, on the reference transformer, plain and of DTensors."""

from __future__ import annotations

import math
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.data_parallel.replication import replicate
from hyper_parallel.core.data_parallel.sharding import fully_shard
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.module import distribute_tensor, place_parameter, replicate_module
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import CheckpointError, CheckpointWriteError, HandleError, LayoutError, PlanError
from hyper_parallel.platform.contract.persistence import StateDictOptions
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig
from workshop.conformance.world import Contract, World, covers, logged, raises

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MEMORY", "MODULES", "PERSISTENCE"]

MODULES: Contract = []
MEMORY: Contract = []
PERSISTENCE: Contract = []

_CONFIG = LanguageModelConfig(vocab=23, dim=12, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=14, length=5)


def _model(w: World) -> Any:
    """Return the transformer with the same values on every rank."""
    p = w.platform
    model = harness_of(p).reference_model(_CONFIG)
    random = np.random.default_rng(w.seed)
    parameters_ = sorted(p.parameters_dict(model).items())
    harness_of(p).load_arrays(
        model, {path: random.standard_normal(tuple(value.shape)) / 3 for path, value in parameters_}
    )
    return model


def _step(w: World, model: Any) -> Any:
    """Return loss and gradients of a step on this rank's tokens."""
    p, random = w.platform, np.random.default_rng([w.seed, w.rank])
    tokens = [w.tensor(random.integers(0, _CONFIG.vocab, (2, _CONFIG.length))) for _ in range(2)]
    return harness_of(p).training_step(model, lambda: harness_of(p).reference_loss(model(tokens[0]), tokens[1]))


def _some_weight(w: World, model: Any) -> str:
    """Return the path of the first linear layer's weight."""
    p = w.platform
    paths = [path for path, module in p.get_cells_and_names(model) if p.is_linear_module(module)]
    return f"{paths[0]}.weight"


@covers(MODULES, "get_cell_construct", "get_cells_and_names", "parameters_dict", "search_parameter_by_name",
        "update_parameter_by_name", "is_linear_module", "is_embedding_module")  # fmt: skip
def trees(w: World) -> None:
    """Modules and parameters by path; a parameter is found with its owner, and replaced there."""
    p, model = w.platform, _model(w)
    paths = dict(p.get_cells_and_names(model))
    assert paths[""] is model
    assert p.get_cell_construct(model) is not None
    assert any(p.is_linear_module(module) for module in paths.values())
    assert any(p.is_embedding_module(module) for module in paths.values())
    assert not p.is_linear_module(model)
    name = _some_weight(w, model)
    entry = p.search_parameter_by_name(model, name)
    assert entry is not None
    owner, short, weight = entry
    assert (owner, short) == (paths[name.rpartition(".")[0]], "weight")
    assert weight is p.parameters_dict(model)[name]
    assert p.search_parameter_by_name(model, "no.such.weight") is None
    other = p.new_zero_parameter(weight.shape, weight.dtype)
    p.update_parameter_by_name(model, entry, other)
    assert p.parameters_dict(model)[name] is other


@covers(MODULES, "set_layout_into_parameter", "get_param_local_shape", "get_param_local_data", "update_param_data",
        "load_into_param", "get_param_type_size", "new_zero_parameter")  # fmt: skip
def parameters(w: World) -> None:
    """A parameter is sharded; a global tensor, a local shard and a DTensor can be written to it, and nothing else."""
    p, array = w.platform, w.sample((5, 3), 0)
    plain = p.new_parameter(w.tensor(array), requires_grad=True, name="plain")
    mesh = DeviceMesh(w.device, list(w.ranks))
    param = p.set_layout_into_parameter(plain, Layout.place(mesh, [Shard(0)], (5, 3)))
    assert isinstance(param, p.Parameter)
    low, high = param.layout.local_box()[0]
    assert p.get_param_local_shape(param) == (high - low, 3)
    w.same(p.get_param_local_data(param), array[low:high])
    w.same(p.get_param_local_data(plain), array)
    assert p.get_param_type_size(param) == 8
    for turn, write in enumerate((p.update_param_data, p.load_into_param), 1):
        fresh = w.sample((5, 3), 0, turn)
        for data in (w.tensor(fresh), w.tensor(fresh[low:high]), distribute_tensor(w.tensor(fresh), mesh, [Shard(1)])):
            write(param, w.tensor(array))
            write(param, data)
            w.same(param.full_tensor(), fresh)
        write(plain, w.tensor(fresh))
        w.same(plain, fresh)
    with raises(LayoutError, "the parameter has shape [5, 3]; the data has shape [4, 4]"):
        p.update_param_data(plain, w.tensor(np.ones((4, 4))))
    zero = p.new_zero_parameter((2, 3), p.str_to_dtype("float64"), requires_grad=False)
    w.same(zero, np.zeros((2, 3)))
    assert isinstance(zero, p.Parameter)


@covers(MODULES, "fully_sharded")
def sharding_fully(w: World) -> None:
    """A step of the sharded transformer has the average of the ranks' gradients, and keeps nothing gathered."""
    p, mesh = w.platform, DeviceMesh(w.device, list(w.ranks))
    plain, model = _model(w), _model(w)
    averages = {path: p.all_reduce(value, op="avg") for path, value in _step(w, plain).gradients.items()}
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for path, parameter in p.parameters_dict(model).items():
        assert parameter.placements == (Shard(0),)
        w.same(parameter.full_tensor(), w.array(p.parameters_dict(plain)[path]))
    for _ in range(2):  # the second time in the order of the first
        sharded = _step(w, model).gradients
        assert set(sharded) == set(averages)
        for path, average in averages.items():
            w.same(sharded[path].full_tensor(), w.array(average), 1e-12)
    with raises(PlanError, "was applied to this", "before; apply it once"):
        fully_shard(model, mesh=mesh)


@covers(MODULES, "replicated")
def replicating(w: World) -> None:
    """A step of the replicated transformer has the average of the ranks' gradients."""
    p, mesh = w.platform, DeviceMesh(w.device, list(w.ranks))
    plain, model = _model(w), _model(w)
    averages = {path: p.all_reduce(value, op="avg") for path, value in _step(w, plain).gradients.items()}
    replicate(model, mesh, bucket_cap_mb=0.001)
    for _ in range(2):  # the second time in the order of the first
        gradients = _step(w, model).gradients
        assert set(gradients) == set(averages)
        for path, average in averages.items():
            w.same(gradients[path], w.array(average), 1e-12)
    with raises(PlanError, "was applied to this", "before; apply it once"):
        replicate(model, mesh)


@covers(MODULES, "init_parameters", "init_on_device", "meta_device")
def delaying(w: World) -> None:
    """A layer is built without storage, laid out and filled: ranks allocate their shards only, of one global value."""
    p = w.platform
    with p.init_on_device(p.meta_device):
        model = harness_of(p).linear_layer(12, 8 * w.size + 1, dtype=p.str_to_dtype("float32"))
    assert all(p.is_meta(parameter) for parameter in p.parameters_dict(model).values())
    mesh = DeviceMesh(w.device, list(w.ranks))
    place_parameter(p, model, "weight", mesh, [Shard(0)])
    replicate_module(p, model, mesh)
    p.init_parameters(model)
    weight, bias = (p.parameters_dict(model)[name] for name in ("weight", "bias"))
    assert not p.is_meta(p.get_param_local_data(weight))
    local = p.get_param_local_data(weight)
    assert p.get_tensor_storage_size(weight) == math.prod(p.get_param_local_shape(weight)) * 4
    assert tuple(local.shape) == weight.layout.local_shape
    whole = w.array(weight.full_tensor())
    bound = 1 / math.sqrt(12)  # of both frameworks' uniform initialisation of linear layers
    assert whole.shape == (8 * w.size + 1, 12)
    assert 0.9 * bound < np.abs(whole).max() <= bound * (1 + 1e-6)
    assert abs(whole.mean()) < bound / 5
    assert len(np.unique(whole)) > 0.95 * whole.size
    biases = [None] * w.size
    p.all_gather_object(biases, w.array(bias.full_tensor()).tolist())
    assert all(values == biases[0] for values in biases)
    with raises((ValueError, RuntimeError), "mars"):
        p.init_on_device("mars").__enter__()
    with p.meta_device:
        later = harness_of(p).linear_layer(3, 2, dtype=p.str_to_dtype("float32"))
    p.init_parameters(later, 1)
    assert not any(p.is_meta(parameter) for parameter in p.parameters_dict(later).values())


@covers(MODULES, "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook")
def hooks(w: World) -> None:
    """Hooks see and replace arguments and gradients, in order, keyword arguments included; each is removed once."""
    p = w.platform
    log: list[Any] = []
    layer = harness_of(p).linear_layer(3, 2, dtype=p.str_to_dtype("float64"))
    x = w.sample((4, 3))

    def gradient() -> tuple[Any, Any]:
        return w.gradient(layer, x, np.ones((4, 2)))

    out, grad = (w.array(tensor) for tensor in gradient())
    handles = [
        p.register_forward_pre_hook(layer, lambda _, args: (args[0] * 2,)),
        p.register_forward_pre_hook(layer, lambda _, args, kwargs: logged(log, kwargs, (args, {})), False, True),
        p.register_full_backward_hook(layer, lambda _, inputs, __: logged(log, "second", (inputs[0] * 3,))),
        p.register_full_backward_hook(layer, lambda *_: logged(log, "first"), True),
        p.register_full_backward_pre_hook(layer, lambda _, outputs: logged(log, "before", (outputs[0] * 5,))),
    ]
    doubled, changed = gradient()
    bias = w.array(p.parameters_dict(layer)["bias"])
    w.same(doubled, 2 * (out - bias) + bias, 1e-12)
    w.same(changed, 30 * grad, 1e-12)
    assert log == [{}, "before", "first", "second"], log
    with p.no_grad():
        layer(w.tensor(x), unknown=1)  # removed by the hook
    assert log[-1] == {"unknown": 1}
    for handle, kind in zip(handles, ("forward pre-hook", "forward pre-hook", "backward hook", "backward hook",
                                      "backward pre-hook"), strict=True):  # fmt: skip
        handle.remove()
        with raises(HandleError, f"this {kind} of ", "was already removed; remove it once"):
            handle.remove()
    for register in (p.register_forward_pre_hook, p.register_full_backward_hook, p.register_full_backward_pre_hook):
        with raises(TypeError, "hook None cannot be called"):
            register(layer, None)  # type: ignore[arg-type] # wrong
    log.clear()
    w.same(gradient()[1], grad)
    assert log == []


@covers(MODULES, "clip_grad_norm_")
def clipping(w: World) -> None:
    """The norm of every order is that of all gradients, over two meshes and plain parameters, and scales them."""
    p, arrays = w.platform, [w.sample((5, 3), 0), w.sample((4,), 0, 1), w.sample((2, 2), 0, 2)]
    line = DeviceMesh(w.device, list(w.ranks), mesh_dim_names=("x",))
    grid = DeviceMesh(w.device, [[rank] for rank in w.ranks], mesh_dim_names=("a", "b"))
    every = np.concatenate([array.reshape(-1) for array in arrays])
    for order in (1, 2, 3, math.inf):
        gradients = [
            distribute_tensor(w.tensor(arrays[0]), line, [Shard(0)]),
            distribute_tensor(w.tensor(arrays[1]), grid, [Shard(0), Replicate()]),
            w.tensor(arrays[2]),
        ]
        clipped = [harness_of(p).parameter_with_gradient(gradient) for gradient in gradients]
        norm = np.linalg.norm(every, order)
        w.same(p.clip_grad_norm_(clipped, 0.5, order), norm, 1e-9)
        for parameter, array in zip(clipped, arrays, strict=True):
            gradient = p.gradient_of(parameter)
            w.same(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient, array * 0.5 / norm, 1e-5)
    with raises(ValueError, "norm_type must be positive, got 0"):
        p.clip_grad_norm_(clipped, 1.0, 0)
    for bound in (-1.0, math.nan):
        with raises(ValueError, f"max_norm must not be negative, got {bound}"):
            p.clip_grad_norm_(clipped, bound)
    w.same(p.clip_grad_norm_([], 1.0), np.zeros(()))
    bad = [harness_of(p).parameter_with_gradient(w.tensor(np.array([np.inf])))]
    with raises(RuntimeError, "nothing was scaled"):
        p.clip_grad_norm_(bad, 1.0, 2.0, True)


def _same_training(w: World, plain: Any, wrapped: Any) -> None:
    """Assert equal losses, gradients and state-dict keys."""
    p, expected, actual = w.platform, _step(w, plain), _step(w, wrapped)
    w.same(actual.loss, w.array(expected.loss))
    assert set(expected.gradients) == set(actual.gradients)
    for path, gradient in expected.gradients.items():
        w.same(actual.gradients[path], w.array(gradient), 1e-12)
    assert list(p.get_model_state_dict(wrapped)) == list(p.get_model_state_dict(plain))
    assert isinstance(wrapped, type(plain))


def _wrap_blocks(w: World, model: Any, wrap: Any) -> Any:
    """Wrap every block of a model in place, and return the model."""
    p = w.platform
    cells = dict(p.get_cells_and_names(model))
    for index in range(_CONFIG.layers):
        layers = cells["layers"]
        layers[index] = wrap(layers[index])
    return model


@covers(MEMORY, "checkpoint", "ckpt_wrapper", "noop_context_fn")
def recomputing(w: World) -> None:
    """A wrapped module trains like the plain one, and runs again in backward."""
    p = w.platform
    _same_training(w, _model(w), _wrap_blocks(w, _model(w), p.ckpt_wrapper))
    _same_training(w, _model(w), _wrap_blocks(w, _model(w), lambda block: p.ckpt_wrapper(block, p.checkpoint)))
    runs = []

    def twice(x: Any) -> Any:
        runs.append(1)
        return x * x

    x, seed = w.sample((3,)), w.sample((3,), turn=1)
    out, grad = w.gradient(lambda t: p.checkpoint(twice, t, use_reentrant=False, context_fn=p.noop_context_fn), x, seed)
    w.same(out, x * x, 1e-12)
    w.same(grad, 2 * x * seed, 1e-12)
    assert len(runs) == 2
    assert len(p.noop_context_fn()) == 2


@covers(MEMORY, "create_selective_checkpoint_contexts")
def selecting(w: World) -> None:
    """Gradients and state-dict keys are the same whatever is kept, by operators or by a policy."""
    p = w.platform
    recomputing_: list[bool] = []
    named = lambda ctx, op, *_, **__: logged(recomputing_, ctx.is_recompute, op in harness_of(p).kept_operators())  # noqa: E731 - a policy
    policies: list[Any] = [harness_of(p).kept_operators(), [], named, lambda *_, **__: False]
    for policy in policies:
        contexts = lambda chosen=policy: p.create_selective_checkpoint_contexts(chosen)  # noqa: E731 - per forward
        wrapped = _wrap_blocks(w, _model(w), lambda block: p.ckpt_wrapper(block, context_fn=contexts))  # noqa: B023
        _same_training(w, _model(w), wrapped)
    assert False in recomputing_


@covers(MEMORY, "swap_wrapper", "async_save_on_cpu")
def swapping(w: World) -> None:
    """Swapped tensors return unchanged; the policy sees the saved tensors, and parameters stay on the device."""
    p = w.platform
    seen: list[Any] = []
    everything = lambda tensor: logged(seen, tuple(tensor.shape), True)  # noqa: E731 - a policy
    _same_training(w, _model(w), _wrap_blocks(w, _model(w), lambda block: p.swap_wrapper(block, everything)))
    assert seen
    _same_training(w, _model(w), _wrap_blocks(w, _model(w), p.swap_wrapper))
    x, seed = w.sample((64, 33)), w.sample((64, 33), turn=1)
    for policy in (None, lambda _: True, lambda _: False):

        def saved(t: Any, chosen: Any = policy) -> Any:
            with p.async_save_on_cpu(chosen):
                return (t * 2) * (t * 3)

        out, grad = w.gradient(saved, x, seed)
        w.same(out, 6 * x * x, 1e-12)
        w.same(grad, 12 * x * seed, 1e-12)


@contextmanager
def _folder(w: World) -> Iterator[Path]:
    """Yield one folder for all ranks."""
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_contract_") as name:
        names = [None] * w.size
        w.platform.all_gather_object(names, name)
        yield Path(str(names[0]))
        w.platform.barrier()


@covers(PERSISTENCE, "get_model_state_dict")
def states(w: World) -> None:
    """A state dict is sharded or whole, on the host or not, without gradients, with the plain model's keys."""
    p, plain, model = w.platform, _model(w), _model(w)
    mesh, name = DeviceMesh(w.device, list(w.ranks)), _some_weight(w, plain)
    entry = p.search_parameter_by_name(model, name)
    assert entry is not None
    sharded_weight = p.set_layout_into_parameter(entry[2], Layout.place(mesh, [Shard(0)], entry[2].shape))
    p.update_parameter_by_name(model, entry, sharded_weight)
    want = p.get_model_state_dict(plain)
    sharded = p.get_model_state_dict(model)
    whole = p.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(want) == list(sharded) == list(whole)
    assert set(p.parameters_dict(plain)) <= set(want)
    assert isinstance(sharded[name], p.DTensorBase)
    for key, value in whole.items():
        assert not isinstance(value, p.DTensorBase)
        w.same(value, w.array(want[key]))

    class Foreign:
        """Options of another library, one of which is not supported."""

        broadcast_from_rank0 = True

    with raises(ValueError, "option broadcast_from_rank0 is not supported; supported: full_state_dict"):
        p.get_model_state_dict(model, options=Foreign())
    with raises(ValueError, "'full' must have the attributes full_state_dict, cpu_offload, ignore_frozen_params"):
        p.get_model_state_dict(model, options="full")


@covers(PERSISTENCE, "save_checkpoint", "load_checkpoint")
def files(w: World) -> None:
    """Every dtype is restored, DTensors whole; a damaged file is refused, and a failed write keeps the old file."""
    p, mesh = w.platform, DeviceMesh(w.device, list(w.ranks))
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
    state = {name: p.tensor_type_cast(w.tensor(w.sample((3, 2), 0)), name) for name in names}
    state.update(scalar=w.tensor(np.array(2.5)))
    with _folder(w) as folder:
        for file_format in (p.own_format, "safetensors"):
            if file_format == "safetensors":  # MindSpore's own has no empty tensors
                state.update(empty=w.tensor(np.zeros((0, 3))))
            path = folder / f"{w.rank}.{file_format}"
            p.save_checkpoint(state, path, file_format)
            loaded = p.load_checkpoint(path, file_format)
            assert set(loaded) == set(state)
            for name, value in state.items():
                assert loaded[name].dtype == value.dtype
                w.same(loaded[name], w.array(value))
        shared = folder / "shared.safetensors"
        whole = w.sample((5, 3), 0)
        p.save_checkpoint({"x": distribute_tensor(w.tensor(whole), mesh, [Shard(0)])}, shared)
        w.same(p.load_checkpoint(shared)["x"], whole)
        _refusals(w, folder, folder / f"{w.rank}.safetensors", state)
        with raises(CheckpointWriteError, "nowhere", "the previous file is unchanged"):
            p.save_checkpoint({"x": distribute_tensor(w.tensor(whole), mesh, [Shard(0)])}, folder / "nowhere" / "x")
        with raises(CheckpointError, "y is complex128, which safetensors does not support; convert it first"):
            unsupported = {
                "x": distribute_tensor(w.tensor(whole), mesh, [Shard(0)]),
                "y": w.tensor(np.ones(2, "complex128")),
            }
            p.save_checkpoint(unsupported, folder / "odd")
        model = _model(w)
        p.save_checkpoint(model, folder / f"{w.rank}.model")
        loaded = p.load_checkpoint(folder / f"{w.rank}.model")
        assert set(loaded) == set(p.get_model_state_dict(model))
        p.barrier()
        assert not list(folder.glob(".*")), "a partial file was left"


def _refusals(w: World, folder: Path, good: Path, state: dict[str, Any]) -> None:
    p, data = w.platform, good.read_bytes()
    with raises(FileNotFoundError, "missing"):
        p.load_checkpoint(folder / "missing")
    wrong = folder / f"{w.rank}.wrong"
    for content in (data[:-1], data[:20], b"", b"not a file of tensors at all"):
        wrong.write_bytes(content)
        with raises(CheckpointError, str(wrong), "is not a complete safetensors file"):
            p.load_checkpoint(wrong)
    ran = folder / f"{w.rank}.ran"
    # A pickle that would create a file when loaded.
    wrong.write_bytes(b"\x80\x04cpathlib\nPath\n(V" + str(ran).encode() + b"\ntR.")
    with raises(CheckpointError, "is a pickle, not safetensors; it was not loaded"):
        p.load_checkpoint(wrong)
    wrong.write_bytes(b"PK\x03\x04 and so on")
    with raises(CheckpointError, "is a zip archive, as torch.save writes, not safetensors"):
        p.load_checkpoint(wrong)
    assert not ran.exists()
    for member in (lambda: p.load_checkpoint(good, "pickle"), lambda: p.save_checkpoint(state, good, "pickle")):
        with raises(CheckpointError, f"ckpt_format 'pickle' is unknown; known: safetensors, {p.own_format}"):
            member()
    with raises(CheckpointError, "a is not a named tensor"):
        p.save_checkpoint({"a": 1}, good)
    with raises(CheckpointError, "1 is not a named tensor"):
        p.save_checkpoint({1: w.tensor(np.ones(2))}, good)
    with raises(CheckpointError, "expected a module or a mapping of names to tensors, got None"):
        p.save_checkpoint(None, good)
    with raises(CheckpointWriteError, "cannot be written", "the previous file is unchanged"):
        p.save_checkpoint(state, good / "below a file")
    assert good.read_bytes() == data
