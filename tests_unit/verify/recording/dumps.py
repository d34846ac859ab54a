"""Writes dumps as msprobe does, of a small model in NumPy whose ranks have parts of its sequence."""

import json

import numpy as np

LINES = ["File /usr/lib/python3/site-packages/torch/nn/modules/module.py, line 11, in _call_impl, \n x",
         "File /home/user/train.py, line 21, in forward, \n y = self.up(x)"]  # fmt: skip


def describe(array, framework="pytorch", dtype="", path=None, **more):
    """The description of a tensor, with its file where a path is given."""
    prefix = "torch." if framework == "pytorch" else ""
    name = dtype or str(array.dtype)
    found = {"type": "torch.Tensor" if prefix else "mindspore.Tensor", "shape": list(array.shape), **more}
    found["dtype"] = prefix + (name if prefix else name.capitalize())
    if array.size:
        numbers = array.max(), array.min(), array.mean(dtype=np.float32), np.linalg.norm(array.astype(np.float32))
        if array.dtype.kind == "f":
            found |= dict(zip(("Max", "Min", "Mean", "Norm"), map(float, numbers), strict=True))
        else:
            found |= {"Max": numbers[0].item(), "Min": numbers[1].item(), "Mean": None, "Norm": None}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if framework == "pytorch":
            import torch

            torch.save(torch.from_numpy(array), path)
        else:
            np.save(path, array)
        found["data_name"] = path.name
    return found


def write(folder, data, task="statistics", framework="pytorch", construct=None, **other):
    """Write the files of a rank in a step."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"task": task, "level": "mix", "framework": framework, "dump_data_dir": None, "data": data, **other}
    (folder / "dump.json").write_text(json.dumps(found))
    (folder / "construct.json").write_text(json.dumps(construct or {}))
    (folder / "stack.json").write_text(json.dumps({"0": [list(data), LINES]}))


def training(
    folder, *, ranks=1, steps=(0, 1), task="statistics", framework="pytorch", seed=0, bug="", where=None, copies=1
):
    """Write the dump of two layers on a batch of 2, a sequence of 7 and a width of 5.

    Args:
        folder: of the dump.
        ranks: among which the sequence is split, as unevenly as 7 is.
        steps: that are dumped.
        task: ``statistics`` or ``tensor``.
        framework: ``pytorch`` or ``mindspore``.
        seed: of the weights.
        bug: ``scale``, ``order``, ``nan`` or ``samples``.
        where: step and rank of the bug; all by default.
        copies: ranks that have each part, one after the other.
    """
    weights = [np.random.default_rng(seed).normal(size=size).astype(np.float32) for size in ((5, 11), (11, 3))]
    for step in range(max(steps) + 1):
        shift = 1000 if bug == "samples" else 0
        batch = np.random.default_rng(step + 7 + shift).normal(size=(2, 7, 5)).astype(np.float32)
        gradients = [np.zeros_like(weight) for weight in weights]
        parts = [part for part in np.array_split(batch, ranks, axis=1) for _ in range(copies)]
        for number, x in enumerate(parts):
            found = _computed(x, weights, bug if where in (None, (step, number)) else "")
            gradients = [one + two / copies for one, two in zip(gradients, found["own"], strict=True)]
            if step in steps:
                _write_rank(folder / f"step{step}" / f"rank{number}", x, weights, found, task, framework)
        weights = [weight - np.float32(0.1) * gradient for weight, gradient in zip(weights, gradients, strict=True)]
    return folder


def _computed(x, weights, bug):
    """What a rank computes of its part, and the gradients of its weights."""
    up = x @ weights[0]
    if bug == "order":
        up = x[..., 2:] @ weights[0][2:] + x[..., :2] @ weights[0][:2]
    tanh = np.tanh(up)
    with np.errstate(divide="ignore", invalid="ignore"):
        hidden = {"scale": tanh * np.float32(1.01), "nan": tanh / np.float32(0) * 0}.get(bug, tanh)
    out = hidden @ weights[1]
    back = out / np.float32(42)
    into = back @ weights[1].T
    own = [np.einsum("bsi,bsj->ij", x, into * (1 - hidden**2)), np.einsum("bsi,bsj->ij", hidden, back)]
    return {"up": up, "tanh": tanh, "hidden": hidden, "out": out, "back": back, "into": into, "own": own}


def _write_rank(to, x, weights, found, task, framework):
    """Write what a rank has computed in a step."""
    kind, prefix = ("Module", "Functional") if framework == "pytorch" else ("Cell", "Mint")

    def named(name, array):
        path = to / "dump_tensor_data" / f"{name}.{'pt' if framework == 'pytorch' else 'npy'}"
        return describe(np.ascontiguousarray(array), framework, path=path if task == "tensor" else None)

    def module(name, given, weight, result):
        return {
            "input_args": [named(f"{name}.forward.0.input.0", given), {"type": "int", "value": 3}], "input_kwargs": {},
            "parameters": {"weight": named(f"{name}.forward.0.parameters.weight", weight)},
            "output": [named(f"{name}.forward.0.output.0", result)],
        }  # fmt: skip

    up, down = (f"{kind}.module.{name}.Linear" for name in ("up", "down"))
    tanh = {"input_args": [named("tanh.0.input", found["up"])], "output": [named("tanh.0.output", found["tanh"])]}
    data = {
        f"{up}.forward.0": module(up, x, weights[0], found["up"]),
        f"{prefix}.tanh.0.forward": tanh,
        f"{down}.forward.0": module(down, found["hidden"], weights[1], found["out"]),
        f"{down}.backward.0": {"input": [named("back", found["back"])], "output": [named("into", found["into"])]},
    }
    for name, gradient in zip((up, down), found["own"], strict=True):
        data[f"{name}.parameters_grad.0"] = {"weight": [named(f"{name}.grad", gradient)]}
    write(to, data, task, framework, {f"{prefix}.tanh.0.forward": None})
