"""`--data`: all ranks together draw every sample of an epoch once; others are named with their ranks and line."""

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.frameworks.contract.records import DRAWS, LoaderPass, RankRecords, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.data import compare_data

SCRIPT = """
import argparse, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("--sampler", default="right")
parser.add_argument("--workers", type=int, default=0)
given = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Data(Dataset):
    rows = torch.randn(12, 5)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Rows(IterableDataset):
    def __iter__(self):
        return iter(Data.rows)


class Same(list):
    pass


class Again(DistributedSampler):
    def __iter__(self):
        indices = list(super().__iter__())
        return iter([indices[0], indices[0], *indices[2:]])


def loader_of(data):
    size = 4 // world
    if given.sampler == "weighted":
        sampler = WeightedRandomSampler([1.0, 3.0] * 6, 12, generator=torch.Generator().manual_seed(3))
        return DataLoader(data, batch_size=4, sampler=sampler)
    if given.sampler == "same":
        return DataLoader(data, batch_size=4, sampler=Same([3, 1, 2, 9, 9, 5, 4, 0, 7, 8, 11, 10]))
    if given.sampler == "stream":
        return DataLoader(Rows(), batch_size=4)
    sampler = (Again if given.sampler == "again" else DistributedSampler)(data, world, rank)
    return DataLoader(data, size, sampler=sampler, num_workers=given.workers, persistent_workers=given.workers > 0)


model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader, evaluation = loader_of(Data()), DataLoader(Data(), 3, sampler=[5, 1])
for epoch in range(2):
    for rows in loader:
        whole = given.sampler in ("weighted", "stream", "same")
        model(rows.tensor_split(world)[rank] if whole else rows).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for rows in evaluation:
            model(rows)
"""


SAME_ORDER = "and all 2 epochs have the same order on rank 0: call its set_epoch(epoch) before each"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the path of a script with one of several samplers."""
    path = tmp_path_factory.mktemp("data") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def case_of(script, *args, world_size=2, **options):
    """Verify the script; return what was found about its samples."""
    report = verify_program(script, world_size, args=args, data=True, upcast=False, logged=False, **options)
    (case,) = [case for case in report.hardened if case.title == "data"]
    return report, case


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_sample_of_an_epoch_is_drawn_once(script, workers):
    """A right program is equal; its evaluation is not compared; a sampler that repeats its order is noted."""
    report, case = case_of(script, "--workers", workers)
    assert report.ok, report.text()
    assert case.verdict.counts == {"sample": 24}
    assert case.lines() == [
        "data: Data of loader 1, epochs 1, 2: 12 of 12 samples, drawn by rank 0 and rank 1",
        f"data: DistributedSampler shuffles, {SAME_ORDER}",
        f"data: {case.verdict.headline()}",
    ]


@pytest.mark.platforms("torch")
def test_an_epoch_that_is_stopped_is_compared_for_repetitions(script):
    """Of an epoch that is not drawn to its end nothing is called lost."""
    report, case = case_of(script, steps=2)
    assert report.ok, report.text()
    assert case.words == [
        "Data of loader 1, epoch 1: 12 of 12 samples, drawn by rank 0 and rank 1; the program leaves it before its end"
    ]


@pytest.mark.platforms("torch")
def test_what_one_rank_draws_twice_is_named(script):
    """One rank does what several do, so that they are equal; the samples are wrong all the same."""
    report, case = case_of(script, "--sampler", "same")
    assert report.verdict.equal
    assert (report.ok, report.status) == (False, 1)
    first, second = case.verdict.differences[:2]
    assert (first.cause.kind, second.cause.kind) == ("samples-repeated", "samples-lost")
    assert first.cause.evidence == "Same draws sample 9 2 times"
    assert second.why == "1 sample drawn by no rank, although the epoch has come to its end: 6"
    assert first.ranks == (0, 1)
    assert first.site.endswith(":57")


@pytest.mark.platforms("torch")
def test_a_sampler_with_replacement_is_not_compared(script):
    """It draws samples twice and leaves some out by design."""
    report, case = case_of(script, "--sampler", "weighted")
    assert case.skipped == "WeightedRandomSampler draws samples of Data with replacement"
    assert report.status == 3


@pytest.mark.platforms("torch")
def test_a_sampler_of_ranks_that_repeats_is_named(script):
    """The sample, its ranks and what was lost for it are in the report; so is the difference from one rank."""
    report, case = case_of(script, "--sampler", "again", world_size=4)
    assert not report.ok
    assert case.verdict.first.cause.kind == "samples-repeated"
    assert case.verdict.first.why.startswith("4 samples drawn more than once in one epoch: ")


@pytest.mark.platforms("torch")
def test_samples_without_indices_are_not_compared(script):
    """A stream of samples gives status 3 with the reason, as nothing was compared."""
    report, case = case_of(script, "--sampler", "stream")
    assert case.skipped == "samples of Rows have no indices, so that none can be recognized again"
    assert report.status == 3


def test_a_program_of_mindspore_is_refused():
    """Its datasets draw in native code."""
    with pytest.raises(InputError) as caught:
        verify_program(len, 2, platform="mindspore", data=True)
    assert str(caught.value) == "--data is implemented for PyTorch; len uses mindspore, whose datasets show no indices"


def made(indices, size=7, *, last=1, number=0, complete=True, trains=True, drops=False):
    """Return a pass over a loader."""
    return LoaderPass(
        0,
        number,
        "Data",
        "Own",
        size,
        drops,
        False,
        False,
        3 * number,
        "a.py:9",
        trains,
        True,
        list(indices),
        last,
        complete,
    )


def found(*ranks):
    """Compare the passes of ranks."""
    return compare_data(Run([RankRecords(rank, [], [], {DRAWS: passes}) for rank, passes in enumerate(ranks)]))


def test_parts_that_overlap_name_their_ranks():
    """A sample that two groups of ranks draw is repeated, also where the epoch is stopped; equal parts are one part."""
    case = found([made([0, 2, 4])], [made([0, 2, 4])], [made([1, 4, 3])], [made([5, 6])])
    (first,) = case.verdict.differences
    assert str(first) == (
        "in step 1: the samples of Data of loader 1, epoch 1 on ranks 0, 1, 2: 1 sample drawn more than once in one "
        "epoch: 4"
    )
    assert first.cause.evidence == "sample 4 is drawn by ranks 0, 1 and by rank 2"
    assert case.words == ["Data of loader 1, epoch 1: 7 of 7 samples, drawn by ranks 0, 1 and rank 2 and 1 more parts"]
    assert not found([made([0, 1], complete=False)], [made([1, 2], complete=False)]).ok


def test_samples_that_no_rank_draws_are_lost():
    """All are counted and the first four listed; the second epoch, which is right, has a line only."""
    case = found([made([0], last=1), made([0, 1, 2, 3], number=1)], [made([1], last=1), made([4, 5, 6], number=1)])
    (lost,) = case.verdict.differences
    assert lost.why == "5 samples drawn by no rank, although the epoch has come to its end: 2, 3, 4, 5 and 1 more"
    assert lost.cause.evidence == "the ranks draw 2 times, 2 different samples; the dataset has 7"
    assert case.words[1] == "Data of loader 1, epoch 2: 7 of 7 samples, drawn by rank 0 and rank 1"


def test_equal_parts_are_filled_up_and_cut():
    """What the last batches repeat is no error where nothing is lost; what drop_last leaves out is none either."""
    filled = found([made([0, 2, 4, 6], last=2)], [made([1, 3, 5, 0], last=2)])
    assert filled.ok
    assert filled.words[1:] == [
        "Data of loader 1, epoch 1: Own draws 1 sample twice, to fill up the last batches of equal parts"
    ]
    assert not found([made([0, 2, 4, 5], last=2)], [made([1, 3, 5, 0], last=2)]).ok  # and 6 is lost
    assert not found([made([0, 2, 4, 6], last=1)], [made([0, 1, 3, 5], last=1)]).ok  # not in a last batch
    cut = found([made([0, 2, 4], last=1, drops=True)], [made([1, 3, 5], last=1, drops=True)])
    assert cut.words[1:] == ["Data of loader 1, epoch 1: 1 sample left out with an incomplete last batch"]
    assert cut.ok
    assert not found([made([0, 2, 4])], [made([1, 3, 5])]).ok
    assert not found([made([0, 2], drops=True)], [made([1, 3], drops=True)]).ok


def test_nothing_drawn_is_nothing_compared():
    """An evaluation alone, and no loader, end with the reason; a dataset may have no length."""
    why = "the program trains with no sample of a data loader of PyTorch"
    assert found([made([0], trains=False)], []).skipped == why
    case = found([made("ab", None)], [made("c", None)])
    assert case.ok
    assert case.words == ["Data of loader 1, epoch 1: 3 samples, drawn by rank 0 and rank 1"]
