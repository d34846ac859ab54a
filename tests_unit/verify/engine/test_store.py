"""Arrays on disk: what a handle knows, what is shared, and what remains of a scratch folder."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from hyper_parallel.verify.engine.scratch import Scratch, ScratchError, megabytes
from hyper_parallel.verify.engine.store import (
    ArrayFile,
    StoredArray,
    digest_of,
    is_constant,
    largest,
    same_values,
)

RNG = np.random.default_rng(0)


@pytest.fixture
def scratch(tmp_path):
    """A scratch folder; nothing of it is left when the test ends."""
    with Scratch(tmp_path) as made:
        yield made
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.int64, np.bool_, np.float16])
def test_a_stored_array_reads_as_it_was_written(scratch, dtype):
    """Values, shape and dtype come back bit for bit, in another process as well; NaN and infinity included."""
    array = (RNG.standard_normal((5, 3, 7)) * 9).astype(dtype)
    if np.dtype(dtype).kind == "f":
        array[0, 0, :2] = np.nan, -np.inf
    stored = ArrayFile(scratch, "a").put(array.transpose(2, 0, 1), "x")
    copy = pickle.loads(pickle.dumps(stored))  # noqa: S301 - written on the same line
    for handle in (stored, copy):
        assert np.asarray(handle).tobytes() == np.ascontiguousarray(array.transpose(2, 0, 1)).tobytes()
        assert (handle.shape, handle.dtype, handle.size, handle.ndim) == ((7, 5, 3), array.dtype, 105, 3)
        assert len(handle) == 7
    assert largest(stored) == largest(array)
    assert same_values(stored, array.transpose(2, 0, 1))


def test_equal_arrays_are_stored_once(scratch):
    """Arrays with the same bits share their place on disk; other bits, shapes or dtypes do not."""
    file = ArrayFile(scratch, "a")
    array = RNG.standard_normal((40, 3)).astype(np.float32)
    first, second = file.put(array, "x"), file.put(array.copy(), "x")
    assert second is first
    assert scratch.written == array.nbytes
    others = [file.put(other, "x") for other in (array * np.float32(1.5), array.reshape(3, 40), array.view(np.int32))]
    assert len({(other.offset, other.digest) for other in (first, *others)}) == 4


def test_processes_store_equal_arrays_once(scratch):
    """Files with one index share arrays, as those of ranks that are processes; without it each keeps its own."""
    array = RNG.standard_normal((40, 3)).astype(np.float32)
    first, second = (ArrayFile(scratch, name, "index").put(array.copy(), "x") for name in "ab")
    assert second == first
    assert np.asarray(second).tobytes() == array.tobytes()
    assert ArrayFile(scratch, "c", "index").put(array + 1, "x") != first
    assert ArrayFile(scratch, "d").put(array, "x").path != first.path


def test_minus_zero_is_another_value(scratch):
    """A digest tells bits apart that compare as equal numbers."""
    assert digest_of(np.zeros(3)) != digest_of(-np.zeros(3))


def test_small_arrays_stay_in_memory(scratch):
    """A number needs no place on disk."""
    array = np.arange(32.0)
    assert ArrayFile(scratch, "a").put(array, "x") is array
    assert isinstance(ArrayFile(scratch, "a").put(np.arange(33.0), "x"), StoredArray)


def test_what_is_known_without_reading(scratch):
    """The largest finite magnitude, and whether all elements are equal."""
    file = ArrayFile(scratch, "a")
    assert largest(file.put(np.append(np.arange(-50.0, 9.0), np.inf), "x")) == 50.0
    assert largest(np.array(["text"])) == 0.0
    assert largest(np.zeros((0, 3))) == 0.0
    assert largest(np.array([3 + 4j])) == 5.0
    assert largest(np.array([np.nan, np.inf])) == 0.0
    assert is_constant(file.put(np.full(50, 2.5), "x"))
    assert not is_constant(file.put(np.arange(50), "x"))
    assert not is_constant(np.zeros(0))


def test_no_room_is_said_before_anything_is_written(tmp_path):
    """The message has what is needed, what is taken, and the ways out; files give their bytes back."""
    with Scratch(tmp_path, limit=1000) as scratch:
        file = ArrayFile(scratch, "a")
        file.put(np.zeros(100), "weight 'w' of step 0 of the reference")
        with pytest.raises(ScratchError) as caught:
            file.put(np.ones(100), "weight 'w' of step 1 of the reference")
        assert str(caught.value) == (
            f"no room in the scratch folder {tmp_path} for weight 'w' of step 1 of the reference: 800 bytes more are "
            "needed, and 800 bytes of 1000 bytes are taken; compare fewer steps (--steps), leave out outputs (--only "
            "'layers.0.*'), or name a larger disk (--scratch FOLDER)"
        )
        file.close()
        assert scratch.written == 0
    assert (megabytes(12_300_000), megabytes(5_440_000_000)) == ("12 MB", "5.4 GB")


def test_a_folder_that_is_none(tmp_path):
    """A scratch folder that does not exist is refused with the option's name."""
    with pytest.raises(ScratchError, match=r"--scratch .*nowhere: no folder can be made there \(No such file"):
        Scratch(tmp_path / "nowhere")


def test_what_a_killed_run_left_is_removed(tmp_path):
    """Folders whose owner is gone are removed by the next run; those of running ones stay."""
    running = Scratch(tmp_path)
    killed = Scratch(tmp_path)
    (killed.path / "arrays").write_bytes(b"1234")
    os.close(killed._folder._lock)  # as the kernel does for a process that was killed
    with Scratch(tmp_path) as third:
        assert third.removed == [str(killed.path)]
        assert running.path.is_dir()
    running.close()
    assert list(tmp_path.iterdir()) == []
