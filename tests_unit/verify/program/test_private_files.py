"""What a run writes goes to a private copy, and is read there; the user's files stay as they are."""

import importlib.util
import io
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.verify.program.file_functions import redirected
from hyper_parallel.verify.program.isolation import files_of_process, keep
from hyper_parallel.verify.program.private_files import PrivateFiles
from hyper_parallel.verify.program.write_guard import WriteRefusedError, kernel_denies


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A working folder of the user, with files, folders and links."""
    folder = tmp_path / "user"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "last.txt").write_text("user")
    (folder / "data" / "a").write_text("a")
    (folder / "data" / "deep" / "b").write_text("b")
    (folder / "link.txt").symlink_to("last.txt")
    (folder / "linked").symlink_to(folder / "data")
    monkeypatch.chdir(folder)
    before = listing(folder)
    yield folder
    assert listing(folder) == before


@pytest.fixture
def run(tmp_path):
    """Inside of what it returns, this process writes to the overlay in that folder."""
    return lambda name="run": redirected(PrivateFiles(tmp_path / name), this_thread=True)


def listing(folder):
    """Everything in a folder: names, kinds, times, contents."""
    paths = sorted(folder.rglob("*"))
    return [(str(p), p.lstat().st_mode, p.lstat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in paths]


def test_reads_see_what_the_run_has_written(user, run):
    """Appended, truncated, exclusive and updating opens, by relative and absolute paths and through links."""
    with run():
        with open("last.txt", "a") as file:  # noqa: PTH123 - the function under test
            file.write("+run")
            assert file.name == "last.txt"
        assert (user / "link.txt").read_text() == "user+run"
        Path("link.txt").write_text("by link")
        assert Path("last.txt").read_text() == "by link"
        assert Path("link.txt").is_symlink()
        with pytest.raises(FileExistsError, match=r"exists: .last\.txt.$"):
            open("last.txt", "x")  # noqa: PTH123, SIM115
        with open(file=user / "data" / "a", mode="r+b") as updated:  # noqa: PTH123
            updated.write(b"A")
        handle = os.open("linked/a", os.O_RDWR)
        assert os.read(handle, 9) == b"A"
        os.close(handle)
        assert Path("last.txt").resolve() == user / "last.txt"
        with pytest.raises(FileNotFoundError) as caught:
            Path("missing/new").write_text("")
        assert str(caught.value) == "[Errno 2] No such file or directory: 'missing/new'"
        assert (user / "last.txt").stat().st_size == len("by link")
    assert Path("last.txt").read_text() == "user"


def test_folders_show_both_and_hide_what_was_removed(user, run):
    """Listings, walks and globs; removed, renamed, copied and made folders."""
    with run():
        Path("data/new").write_text("")
        Path("data/a").unlink()
        assert sorted(os.listdir("data")) == ["deep", "new"]  # noqa: PTH208
        assert os.listdir(b"data/deep") == [b"b"]  # noqa: PTH208
        with os.scandir("data") as entries:
            assert sorted((entry.name, entry.is_dir(), entry.is_file(), entry.is_symlink()) for entry in entries) == [
                ("deep", True, False, False),
                ("new", False, True, False),
            ]
        assert sorted(map(str, user.rglob("*b"))) == [str(user / "data" / "deep" / "b")]
        with pytest.raises(FileNotFoundError):
            Path("data/a").read_text()
        with pytest.raises(OSError, match="not empty"):
            Path("data").rmdir()
        with pytest.raises(FileExistsError):
            Path("data").mkdir()
        shutil.copytree("data", "copied")
        Path("data").rename("moved")
        assert (Path("moved/deep/b").read_text(), Path("data").exists(), Path("linked").exists()) == ("b", False, False)
        shutil.rmtree("moved")
        assert not Path("moved").exists()
        Path("data/deep").mkdir(parents=True)
        assert list(Path("data/deep").iterdir()) == []
        assert Path("copied/deep/b").read_text() == "b"
        shutil.move("copied", "data/copied")
        walked = [folder for folder, _, _ in os.walk("data")]
        assert sorted(walked) == ["data", "data/copied", "data/copied/deep", "data/deep"]


def test_renamed_files_links_times_and_modes(user, run):
    """A file takes the place of another; links are made, read and followed; modes and times change in the copy."""
    with run():
        Path("new.txt").write_text("new")
        Path("new.txt").replace("last.txt")
        assert (Path("last.txt").read_text(), Path("new.txt").exists()) == ("new", False)
        Path("latest").symlink_to("data/deep")
        assert Path("latest/b").read_text() == "b"
        assert (str(Path("latest").readlink()), Path("latest").resolve()) == ("data/deep", user / "data" / "deep")
        Path("latest/c").write_text("c")
        assert Path("data/deep/c").read_text() == "c"
        os.link("data/a", "hard")
        assert Path("hard").read_text() == "a"
        Path("data/a").chmod(0o600)
        os.utime("data/a", (1, 2))
        os.truncate("data/a", 0)
        assert (Path("data/a").stat().st_mode & 0o777, Path("data/a").stat().st_size) == (0o600, 0)
        Path("turn").symlink_to("turn")
        with pytest.raises(OSError, match="symbolic links"):
            Path("turn").read_text()


def test_the_working_folder_may_be_one_of_the_run(user, run):
    """A program that works in a folder that it makes finds its own name for it, and files of the user above it."""
    with run():
        Path("out/1").mkdir(parents=True)
        os.chdir("out/1")
        assert Path.cwd() == user / "out" / "1"
        Path("log").write_text("log")
        assert Path("../../last.txt").read_text() == "user"
        assert (user / "out" / "1" / "log").read_text() == "log"
        os.chdir("../../data")
        assert Path("a").read_text() == "a"
        os.chdir(user)


def test_native_code_reads_and_writes_the_copy(user, run):
    """NumPy, its memory maps, and SQLite; temporary files are the run's, and go with it."""
    with run():
        np.save("array.npy", np.arange(3))
        mapped = np.load("array.npy", mmap_mode="r+")
        mapped[0] = 7
        assert np.load("array.npy").tolist() == [7, 1, 2]
        with sqlite3.connect("runs.db") as database:
            database.execute("create table runs (name)")
        database.close()
        assert Path("runs.db").exists()
        with tempfile.NamedTemporaryFile() as file:
            made = Path(file.name)
            reads = "import sys; open(sys.argv[1]).close()"
            subprocess.run([sys.executable, "-c", reads, made], check=True)
    assert user not in made.parents
    assert tempfile.gettempdir() != str(made.parent)


@pytest.mark.platforms("torch")
def test_checkpoints_of_pytorch(user, run):
    """``torch.save`` and safetensors, which open files in native code, mapped loads, and distributed checkpoints."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.arange(5.0)}
    with run():
        for path in ("last.txt", user / "state.pt"):
            torch.save(state, path)
            assert torch.equal(torch.load(path)["weight"], state["weight"])
            assert torch.equal(torch.load(path, mmap=True)["weight"], state["weight"])
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, "state.safetensors")
        assert torch.equal(safetensors.load_file("state.safetensors")["weight"], state["weight"])
        dcp.save(state, checkpoint_id="distributed", no_dist=True)
        loaded = {"weight": torch.zeros(5)}
        dcp.load(loaded, checkpoint_id="distributed", no_dist=True)
        assert torch.equal(loaded["weight"], state["weight"])


def test_runs_do_not_see_each_other_and_ranks_do(user, run, tmp_path):
    """A second run finds the user's files; processes of one run share what it has written; some of it is kept."""
    with run("first"):
        Path("last.txt").write_text("first")
        Path("made").mkdir()
        Path("made/file").write_text("made")
    with run("second"):
        assert (Path("last.txt").read_text(), Path("made").exists()) == ("user", False)
    with run("first"):
        assert (Path("last.txt").read_text(), Path("made").exists()) == ("first", True)
    keep(tmp_path / "first", tmp_path / "kept")
    assert sorted(str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*")) == [
        "last.txt",
        "made",
        "made/file",
    ]


def test_functions_are_put_back_and_others_are_left_alone(user, run):
    """Afterwards every module has its own functions; who has kept a replacement, and other threads, use real files."""
    del user
    plain = (open, os.open, os.stat, io.open, shutil._use_fd_functions, tempfile.tempdir, os.environ.get("TMPDIR"))
    waiting, done, seen = threading.Event(), threading.Event(), []

    def other():
        waiting.wait()
        seen.append(Path("last.txt").read_text())
        done.set()

    threading.Thread(target=other).start()
    with run():
        kept = os.stat
        Path("last.txt").write_text("longer than it was")
        waiting.set()
        done.wait()
        assert os.stat in os.supports_follow_symlinks
    assert seen == ["user"]
    assert kept("last.txt").st_size == len("user")
    assert kept not in os.supports_follow_symlinks
    assert plain == (
        open, os.open, os.stat, io.open, shutil._use_fd_functions, tempfile.tempdir, os.environ.get("TMPDIR"),
    )  # fmt: skip


def test_caches_are_shared(user, run, tmp_path, monkeypatch):
    """A cache that a variable names is written for real, unless the user works in it."""
    del user
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    with run():
        (tmp_path / "cache" / "file").write_text("cached")
    assert (tmp_path / "cache" / "file").read_text() == "cached"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with run("other"):
        (tmp_path / "cache" / "file").write_text("run")
    assert (tmp_path / "cache" / "file").read_text() == "cached"


def test_what_python_cannot_redirect_is_refused_by_name(user, tmp_path):
    """Without the kernel's help, a write by a function that is not replaced raises an error that names the file."""
    with files_of_process(tmp_path / "run", ends=False):
        Path("last.txt").write_text("run")
        Path("made").mkdir()
        with pytest.raises(WriteRefusedError) as caught:
            io.FileIO("data/a", "w")
        assert sqlite3.connect(":memory:")
    assert str(caught.value) == (
        f"{user}/data/a is written by a function that cannot be redirected to the run's private copy; open it with "
        "open() or pathlib"
    )


_DENIED = """
import io, os, subprocess, sys, threading
from pathlib import Path
from hyper_parallel.verify.program.isolation import files_of_process, files_of_threads
from hyper_parallel.verify.program.write_guard import denied_by_kernel

def body():
    Path("last.txt").write_text("run")
    Path("made").mkdir()
    Path("last.txt").rename("made/last.txt")
    assert Path("made/last.txt").read_text() == "run" and not Path("last.txt").exists()
    for write in (lambda: io.FileIO("data/a", "w"), lambda: io.FileIO("native", "w")):
        try:
            write()
        except PermissionError:
            pass
        else:
            sys.exit(3)
    shell = "echo x > data/a; rm data/a; mv data/a data/c; mkdir d; echo x > new; cat last.txt"
    ended = subprocess.run(shell, shell=True, capture_output=True)
    assert ended.stdout == b"user" and ended.stderr.count(b"ermission denied") == 5, ended

def thread():
    denied_by_kernel(files)
    body()

if sys.argv[2] == "thread":
    with files_of_threads(Path(sys.argv[1])) as files:
        started = threading.Thread(target=thread)
        started.start()
        started.join()
    Path(sys.argv[3]).write_text("this thread may write")
else:
    with files_of_process(Path(sys.argv[1]), ends=True):
        body()
"""


@pytest.mark.skipif(not kernel_denies(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_kernel_denies_native_code_and_subprocesses(user, tmp_path, monkeypatch, kind):
    """What cannot be redirected cannot write, remove, rename or make files of the user; other threads can."""
    del user
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    command = [sys.executable, "-c", _DENIED, str(tmp_path / "run"), kind, str(tmp_path / "plain")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "plain").exists() == (kind == "thread")


def test_a_module_imported_in_a_run_has_the_plain_functions_afterwards(user, tmp_path):
    """What a module binds while files are redirected is redirected in the next run, too, and not after it."""
    module = tmp_path / "binds.py"
    module.write_text("from os import mkdir\n")
    for run in ("one", "two"):
        files = PrivateFiles(tmp_path / run)
        with redirected(files, this_thread=True):
            binds = sys.modules.get("binds") or _imported("binds", module)
            binds.mkdir("made")
        assert (files.written_in(user) / "made").is_dir()
    binds.mkdir(tmp_path / "plain")
    assert (tmp_path / "plain").is_dir()
    del sys.modules["binds"]


def _imported(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
