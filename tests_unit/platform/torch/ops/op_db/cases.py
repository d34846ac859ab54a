"""Samples of PyTorch's operator database (``op_db``), and placements of their tensors."""

import itertools
import random
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.platform.select import get_torch_platform

get_torch_platform()  # as a user's first import does, before the database takes hold of PyTorch's functions

from torch.testing._internal import common_methods_invocations as database  # noqa: E402 - after the platform
from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402 - the same

from hyper_parallel.core.dtensor.placements import Replicate, Shard  # noqa: E402 - the same

# The database seeds PyTorch's generator for some random operators; here it must show that they are random.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

SAMPLES = 4
DRAWN = 8
SINGLE = 16
MAX_ELEMENTS = 20000
DTYPES = {"float32": torch.float32, "float64": torch.float64, "complex128": torch.complex128, "int64": torch.int64,
          "bool": torch.bool}  # fmt: skip


@dataclass
class Sample:
    """A call: its flattened arguments, and the indices of those that are tensors."""

    leaves: list[Any]
    spec: Any
    tensors: list[int]
    process: Any
    text: str

    def arguments(self, tensors):
        """Positional and keyword arguments with ``tensors`` in place of the sample's own."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.tensors, tensors, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, self.spec)

    @property
    def values(self):
        """The sample's own tensors."""
        return [self.leaves[index] for index in self.tensors]


def entries(dtype):
    """The entries that take ``dtype``, by full name."""
    return {_name(op): op for op in database.op_db if DTYPES[dtype] in op.dtypes}


def _name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples(op, dtype, count=SAMPLES):
    """At most ``count`` small distinct samples, spread over those of the database."""
    torch.manual_seed(0)
    random.seed(0)
    wanted = DTYPES[dtype]
    grad = op.supports_autograd and (wanted.is_floating_point or wanted.is_complex)
    by_text: dict[str, Sample] = {}
    for sample in itertools.islice(op.sample_inputs("cpu", wanted, requires_grad=grad), 400):
        candidate = _sample(sample)
        if sum(value.numel() for value in candidate.values) <= MAX_ELEMENTS:
            by_text.setdefault(candidate.text, candidate)
    distinct = list(by_text.values())
    if len(distinct) <= count:
        return distinct
    # The ends are where the database puts its plainest and its oddest sample.
    return [distinct[round(index * (len(distinct) - 1) / (count - 1))] for index in range(count)]


def _sample(sample):
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return Sample(leaves, spec, tensors, sample.output_process_fn_grad, ", ".join(map(_text, leaves)))


def _text(leaf):
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def placements(sample, name, axes=1):
    """For each operand one placement per axis: all replicated, each sharded along each dim, some at random."""
    draw = random.Random(zlib.crc32(f"{name} {sample.text}".encode()))  # noqa: S311 - no secret
    if axes == 1:
        return [tuple((place,) for place in combo) for combo in _on_one_axis(sample, draw)]
    kinds = [[Replicate(), *(Shard(dim) for dim in range(value.ndim))] for value in sample.values]
    whole = tuple((kind[0],) * axes for kind in kinds)
    sampled = [tuple(tuple(draw.choices(kind, k=axes)) for kind in kinds) for _ in range(DRAWN + SINGLE)]
    return list(dict.fromkeys([whole, *sampled]))


def _on_one_axis(sample, draw):
    kinds = [[Replicate(), *(Shard(dim) for dim in range(value.ndim))] for value in sample.values]
    whole = tuple(kind[0] for kind in kinds)
    singles = [(*whole[:index], place, *whole[index + 1 :]) for index, kind in enumerate(kinds) for place in kind[1:]]
    if len(singles) > SINGLE:
        singles = draw.sample(singles, SINGLE)
    sampled = [tuple(draw.choice(kind) for kind in kinds) for _ in range(DRAWN)]
    return list(dict.fromkeys([whole, *singles, *sampled]))
