"""A sweep of PyTorch's operator database: a part in every run, all of it by `tox -e sweeps`."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.platforms("torch")

SWEEP = Path(__file__).with_name("sweep.py")
# One or more of each family; most entries of the database are relatives of these.
QUICK = [
    "add", "clamp", "special.i1", "frexp", "polar", "__rmatmul__", "addr", "block_diag", "sum", "var_mean", "median",
    "aminmax", "cummax", "masked.softmax", "bucketize", "histc", "multinomial", "normal", "cat", "item",
    "nn.functional.linear", "nn.functional.bilinear", "linspace.tensor_overload", "combinations", "cov",
]  # fmt: skip
# Entries that were ok when this line was last touched; never lower it.
FLOOR = 600


def swept(tmp_path, *arguments):
    """The results by entry, and the finished process of the command."""
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, str(SWEEP), "--out", str(out), *arguments], capture_output=True, text=True, check=False
    )
    return {result["name"]: result for result in map(json.loads, out.read_text().splitlines())}, done


@pytest.mark.untraced
def test_a_part_of_each_family_holds(tmp_path):
    """Values, dtypes, shapes and gradients of these entries are the plain ones in every sampled placement."""
    results, done = swept(tmp_path, "--samples", "2", "--meshes", "3", "--jobs", "1", *QUICK)
    assert {name: result["messages"] for name, result in results.items() if result["outcome"] != "ok"} == {}, (
        done.stdout
    )
    assert sorted(results) == sorted(QUICK)
    assert done.returncode == 0


@pytest.fixture
def ledger(load_file):
    """The ledger of entries that PyTorch added and removed."""
    return load_file(SWEEP.with_name("ledger.py"))


@pytest.mark.parametrize(
    "version", ["2.9.1", "2.10.0+cpu", "2.12.1", "2.13.0", "2.14.1+cu130", "2.16.0.dev20261101+cpu"]
)
def test_entries_that_pytorch_added_or_removed_are_in_the_ledger(ledger, version):
    """Each version has the entries of the ledger; one that is there too early or too late is named, as is a count."""
    minor = tuple(map(int, version.split(".")[:2]))
    early, late = minor < (2, 13), minor >= (2, 14)
    names = [name for name, since in ledger.NEW.items() if tuple(map(int, since.split("."))) <= minor]
    names += [] if late else list(ledger.GONE)
    names += [f"entry{number}" for number in range((672 if early else 678 if late else 677) - len(names))]
    assert ledger.unexplained(version, names) == []
    if minor == (2, 13):
        assert ledger.unexplained(version, [*names[1:], "linalg.polar"]) == [
            "PyTorch 2.13.0: linalg.polar is there, and 2.14 added it",
            "PyTorch 2.13.0: bmm.triton_optimized is not there, and 2.13 added it",
        ]
        assert ledger.unexplained(version, [name for name in names if name != "qr"]) == [
            "PyTorch 2.13.0: qr is not there, and only 2.14 removed it",
            "PyTorch 2.13.0: there are 676 entries, and 677 in 2.13: add those that changed to ledger.py",
        ]
    if late:
        assert ledger.unexplained(version, [*names[1:], "qr"]) == [
            f"PyTorch {version}: qr is there, and 2.14 removed it",
            f"PyTorch {version}: bmm.triton_optimized is not there, and 2.13 added it",
        ]


# Entries that PyTorch decomposes only where autograd is on, or that are views.
COMPOSITE = [
    "nn.functional.pad.circular", "nn.functional.hinge_embedding_loss", "nn.functional.poisson_nll_loss",
    "nn.functional.upsample_bilinear", "nn.functional.conv1d", "tensordot", "vsplit", "trapz", "atleast_2d", "mH",
]  # fmt: skip


def counts_by_mode(tmp_path, *arguments):
    """Of each entry, the outcomes of its checks under no_grad and under inference_mode."""
    results = [swept(tmp_path, "--variant", mode, *arguments)[0] for mode in ("no_grad", "inference")]
    return [{name: result["counts"] for name, result in each.items()} for each in results]


@pytest.mark.sweep  # as the next test, of all entries; operators of both modes are in test_dtensor.py every day
@pytest.mark.untraced
def test_inference_mode_is_as_no_grad(tmp_path):
    """What runs under no_grad runs under inference_mode, with the values of one device."""
    without_gradient, inference = counts_by_mode(tmp_path, "--samples", "2", "--meshes", "3", "--jobs", "1", *COMPOSITE)
    assert sorted(inference) == sorted(COMPOSITE)
    assert all(set(counts) == {"ok"} for counts in inference.values()), inference
    assert inference == without_gradient


@pytest.mark.sweep
def test_inference_mode_is_as_no_grad_for_all_entries(tmp_path):
    """Each check has the same outcome in both modes."""
    without_gradient, inference = counts_by_mode(tmp_path, "--samples", "2")
    assert inference == without_gradient


@pytest.mark.sweep
@pytest.mark.parametrize("variant", ["function", "inplace", "out"])
def test_no_entry_is_wrong(tmp_path, variant):
    """No entry of the database gives a wrong value, a wrong gradient or a plain tensor, and most of them run."""
    results, done = swept(tmp_path, "--variant", variant, *(() if variant == "function" else ("--samples", "2")))
    assert done.returncode == 0, done.stdout
    assert variant != "function" or sum(result["outcome"] == "ok" for result in results.values()) >= FLOOR, done.stdout


@pytest.fixture
def checked(monkeypatch):
    """`checked(call)`: the outcome that the sweep reports for a function of one tensor."""
    monkeypatch.syspath_prepend(str(SWEEP.parent))
    import cases
    import checks
    import torch

    def check(call):
        values = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(5, 2)
        leaves, spec = cases.tree_flatten(((values,), {}))
        sample = cases.Sample(leaves, spec, [0], lambda out: out, "float64[5, 2]")
        monkeypatch.setattr(cases, "samples", lambda *_: [sample])
        op = SimpleNamespace(name="it", op=call, supports_autograd=True)
        return checks.check_entry("it", op, "float64", [(2,)])

    return check


def distributed(x):
    """Return whether this is the run on DTensors."""
    from hyper_parallel import DTensor

    return isinstance(x, DTensor)


BROKEN = {
    "wrong value": ("wrong", lambda x: x * 2 + 1e-6 if distributed(x) else x * 2),
    "wrong gradient": ("wrong", lambda x: x * x.detach() if distributed(x) else x * x),
    "lost gradient": ("wrong", lambda x: (x * x).detach() if distributed(x) else x * x),
    "wrong dtype": ("wrong", lambda x: x.float() if distributed(x) else x * 1),
    "wrong shape": ("wrong", lambda x: x.sum(0, keepdim=True) if distributed(x) else x.sum(0)),
    "wrong type": ("wrong", lambda x: list(x.max(0)) if distributed(x) else x.max(0)),
    "plain": ("plain", lambda x: x.to_local() if distributed(x) else x * 1),
    "crash": ("crash", lambda x: x.no_such_thing if distributed(x) else x * 1),
    "one rank only": ("crash", lambda x: 1 / x.device_mesh.rank if distributed(x) else x * 1),
    "refused": ("rejects", lambda x: x.numpy() if distributed(x) else x * 1),
    "right": ("ok", lambda x: x * 2),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_seen(checked, what):
    """The sweep distinguishes a wrong value, gradient, dtype, shape or type, a plain tensor, a crash and a refusal."""
    outcome, call = BROKEN[what]
    assert checked(call).outcome == outcome


def test_numbers_sampled_per_rank_are_detected(checked):
    """A random call that samples from each rank's own generator is wrong; one that uses the common stream is ok."""
    import torch

    from hyper_parallel import DTensor

    def apart(x):
        if not distributed(x):
            return torch.rand_like(x)
        return DTensor.from_local(torch.rand_like(x.to_local()), x.device_mesh, x.placements, shape=x.shape)

    assert checked(apart).outcome == "wrong"
    assert checked(torch.rand_like).outcome == "ok"
