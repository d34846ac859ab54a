"""Programs are random, and depend on their seed and number alone."""

from collections import Counter

import pytest

from hyper_parallel import Partial, Shard
from hyper_parallel.verify.fuzz.campaign import BATCH, world_of
from hyper_parallel.verify.fuzz.generate import Generator, meshes_of
from hyper_parallel.verify.fuzz.program import Outcome, operands
from hyper_parallel.verify.fuzz.reproduce import source_of

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture(scope="module")
def generator():
    """Return a generator of programs of PyTorch."""
    return Generator("torch")


def sources(generator, numbers, seed=5):
    """Return programs as text."""
    made = [generator.program(seed, number, 4) for number in numbers]
    return {p.seed[1]: source_of(p, Outcome("equal"), "torch", generator.language) for p in made}


def test_a_program_depends_on_seed_and_number(generator):
    """In any order, and from a new generator, the same programs are made; another seed makes others."""
    first = sources(generator, range(6))
    assert sources(Generator("torch"), [3, 5, 1]) == {number: first[number] for number in (1, 3, 5)}
    assert not set(first.values()) & set(sources(generator, range(6), seed=6).values())


def test_programs_vary(generator):
    """Modes, dtypes, placements, aliases, chains and sizes of all kinds are among a few hundred programs."""
    programs = [generator.program(1, number, 4) for number in range(150)]
    assert {program.mode for program in programs} == {"forward", "backward", "grad", "double"}
    leaves = [leaf for program in programs for leaf in program.leaves.values()]
    assert {leaf.dtype for leaf in leaves} >= {"float64", "float32", "bfloat16", "int64", "bool"}
    placements = Counter(type(p).__name__ for leaf in leaves for p in leaf.placements)
    assert min(placements[name] for name in ("Shard", "Replicate", "Partial")) > 20
    assert {0, 1, 2, 3, 5} <= {size for leaf in leaves for size in leaf.array.shape}
    steps = [step for program in programs for step in program.steps]
    assert sum(step.aliases for step in steps) > 50
    assert len({step.call for step in steps}) > 200
    chained = sum(not set(operands(step)) <= set(program.leaves) for program in programs for step in program.steps)
    assert chained > len(steps) / 3
    assert {len(program.mesh) for program in programs} == {1, 2}
    assert any(Shard(1) in leaf.placements and Partial("sum") in leaf.placements for leaf in leaves)


def test_dtypes_that_are_chosen_are_mixed():
    """Leaves have all the chosen dtypes, several meet in a step, and integers and booleans have no gradient."""
    mixed = Generator("torch", ("bool", "uint8", "int32", "float16"))
    programs = [mixed.program(2, number, 3) for number in range(80)]
    leaves = [leaf for program in programs for leaf in program.leaves.values()]
    counts = Counter(leaf.dtype for leaf in leaves)
    assert min(counts[name] for name in mixed.dtypes) > 20
    assert not {"float32", "float64", "bfloat16", "int8"} & set(counts)
    assert {leaf.dtype for leaf in leaves if leaf.requires_grad} - {"complex32", "complex64"} == {
        "float16"
    }  # samples with complex
    assert all(str(leaf.array.dtype) == leaf.dtype.replace("complex32", "complex64") for leaf in leaves)
    several = [
        {p.leaves[number].dtype for number in operands(step) if number in p.leaves}
        for p in programs
        for step in p.steps
    ]
    assert sum(len(dtypes) > 1 for dtypes in several) > 20


@pytest.mark.parametrize(
    "ranks, meshes",
    [(1, {(1,), (1, 1)}), (3, {(3,), (1, 3), (3, 1)}), (4, {(4,), (1, 4), (2, 2), (4, 1)})],
)
def test_meshes_have_all_ranks(ranks, meshes):
    """All meshes of one or two axes are there; with eight ranks one of three."""
    assert set(meshes_of(ranks)) == meshes
    assert (2, 2, 2) in meshes_of(8)


def test_batches_have_worlds_of_many_sizes():
    """The number of ranks of a batch depends on the seed and its number."""
    worlds = [world_of(0, batch) for batch in range(60)]
    assert set(worlds) == {1, 2, 3, 4, 6, 8}
    assert worlds == [world_of(0, batch) for batch in range(60)]
    assert BATCH >= 32
