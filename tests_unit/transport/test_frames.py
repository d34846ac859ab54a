"""The traceback of a failed rank as users see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport import frames
from hyper_parallel.transport.frames import fold_frames, stack, trace

TEXT = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    net(x)
    ^^^^^^
  File "/env/site-packages/torch/nn/modules/module.py", line 1, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/env/site-packages/torch/nn/modules/module.py", line 2, in _call_impl
    return forward_call(*args, **kwargs)
  File "/env/site-packages/hyper_parallel/core/tensor_parallel/parallelize.py", line 3, in call
    return forward(x)
  File "/home/me/train.py", line 8, in forward
    return self.linear(x)
  File "/env/site-packages/torch/nn/modules/module.py", line 1, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/env/site-packages/torch/nn/modules/module.py", line 2, in _call_impl
    return forward_call(*args, **kwargs)
  File "/env/site-packages/torch/nn/modules/linear.py", line 4, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: shapes cannot be multiplied:
  File "/of/the/message", line 1"""

SHORT = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    net(x)
    ^^^^^^
  (3 frames of /env/site-packages/torch/, /env/site-packages/hyper_parallel/core/ not shown)
  File "/home/me/train.py", line 8, in forward
    return self.linear(x)
  (2 frames of /env/site-packages/torch/ not shown)
  File "/env/site-packages/torch/nn/modules/linear.py", line 4, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: shapes cannot be multiplied:
  File "/of/the/message", line 1"""


def test_frames_of_packages_are_counted():
    """Between the program's frames a package's are a count; the one that raised is shown."""
    assert fold_frames(TEXT) == SHORT
    assert fold_frames(SHORT) == SHORT


RUNNING = """\
  File "/python/threading.py", line 1002, in _bootstrap
    self._bootstrap_inner()
  File "/env/hyper_parallel/transport/simulated/threads.py", line 192, in _rank_main
    self.results[rank] = self._call(rank)
  File "/home/me/train.py", line 7, in step
    net(x)
  File "/env/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args, **kwargs)
  File "/env/site-packages/torch/nn/modules/module.py", line 2, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/env/hyper_parallel/transport/simulated/threads.py", line 148, in pause
    self._batons[rank].acquire()
"""


def test_the_stack_of_a_running_rank_has_the_programs_frames(monkeypatch):
    """Frames that start a rank and run its collectives are left out, a package's are folded; a variable shows all."""
    monkeypatch.setattr(frames, "_STARTERS", ("/python/threading.py", "multiprocessing/spawn.py"))
    monkeypatch.delenv("HP_FULL_TRACEBACK", raising=False)
    assert stack(RUNNING).splitlines() == [
        '  File "/home/me/train.py", line 7, in step',
        "    net(x)",
        '  File "/env/site-packages/torch/nn/modules/module.py", line 1, in _call_impl',
        "    return forward_call(*args, **kwargs)",
        '  File "/env/site-packages/torch/nn/modules/module.py", line 2, in _wrapped_call_impl',
        "    return self._call_impl(*args, **kwargs)",
    ]
    first = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/env/hyper_parallel/transport/simulated/rank_process.py", line 3 in wait\n'
        '  File "/home/me/train.py", line 7 in step\n'
        '  File "/python/multiprocessing/spawn.py", line 3 in main\n'
    )
    assert stack(first).splitlines() == [first.splitlines()[0], '  File "/home/me/train.py", line 7 in step']
    monkeypatch.setenv("HP_FULL_TRACEBACK", "1")
    assert stack(RUNNING) == RUNNING.rstrip()


def failing_through(*paths):
    """Return a function that raises ``ValueError`` through functions of files with these paths, the innermost last."""
    function = None
    for path in reversed(paths):
        names = {"inner": function}
        body = "raise ValueError('wrong')" if function is None else "inner()"
        exec(compile(f"def outer():\n    {body}", path, "exec"), names)  # noqa: S102 - files that do not exist
        function = names["outer"]
    return function


def test_frames_of_what_runs_ranks_are_left_out(monkeypatch):
    """A registered file that runs ranks is in no traceback, and a registered folder is counted like a framework's."""
    monkeypatch.setattr(frames, "RUNNERS", [])
    monkeypatch.setattr(frames, "WRAPPERS", [])
    frames.hide_file("/env/running.py")
    frames.hide_folder(Path("/env/watching"))
    monkeypatch.delenv("HP_FULL_TRACEBACK", raising=False)
    paths = ("/env/running.py", "/home/me/train.py", "/env/watching/a.py", "/env/watching/b.py", "/home/me/net.py")
    with pytest.raises(ValueError, match="wrong") as raised:
        failing_through(*paths)()
    lines = [line for line in trace(raised.value).splitlines() if line.strip(" ~^")]  # Python 3.13 marks calls
    assert lines[3:] == [
        '  File "/home/me/train.py", line 2, in outer',
        "  (2 frames of /env/watching/ not shown)",
        '  File "/home/me/net.py", line 2, in outer',
        "ValueError: wrong",
    ]


def test_frames_after_the_program_are_left_out_for_errors_of_the_library():
    """An error of this library says everything itself: no frame of a package follows the program's last line."""
    end = SHORT.index("  (2 frames")
    short = SHORT[:end] + "  (3 frames of /env/site-packages/torch/ not shown)\n" + SHORT[SHORT.index("RuntimeError") :]
    assert fold_frames(TEXT, shows_last=False) == short
    single = (
        TEXT[: TEXT.index('  File "/env')] + TEXT[TEXT.index('  File "/env/site-packages/torch/nn/modules/linear') :]
    )
    assert fold_frames(single, shows_last=False).splitlines()[4] == "  (1 frame of /env/site-packages/torch/ not shown)"
    without_program = "Traceback (most recent call last):\n" + TEXT[TEXT.rindex('  File "/env') :]
    assert fold_frames(without_program, shows_last=False) == without_program


def test_errors_of_the_library_end_at_the_program(monkeypatch):
    """The traceback of a CollectiveMismatchError ends with the program's call, unless the user asks for every frame."""
    names = {"error": CollectiveMismatchError("ranks disagree")}
    where = "/env/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile("def call():\n    raise error\n", where, "exec"), names)  # noqa: S102 - a frame of a file that is not there
    with pytest.raises(CollectiveMismatchError) as raised:
        names["call"]()
    monkeypatch.delenv("HP_FULL_TRACEBACK", raising=False)
    assert trace(raised.value).splitlines()[-2:] == [
        "  (1 frame of /env/site-packages/torch/ not shown)",
        "hyper_parallel.errors.CollectiveMismatchError: ranks disagree",
    ]
    monkeypatch.setenv("HP_FULL_TRACEBACK", "1")
    assert f'File "{where}", line 2, in call' in trace(raised.value)


def test_one_frame_of_a_package_stays():
    """A count in the place of a single frame would save nothing."""
    text = TEXT.replace(TEXT[TEXT.index('  File "/env/site-packages/torch/nn/modules/module.py", line 2') :], "")
    assert fold_frames(text) == text


@pytest.mark.parametrize("full", [True, False])
def test_causes_are_folded_too(monkeypatch, full):
    """A traceback has the cause's, and both are whole if the user asks for it."""
    monkeypatch.setenv("HP_FULL_TRACEBACK", "1" if full else "")
    names = {}
    where = "/env/site-packages/mindspore/nn/cell.py"
    exec(compile("def call(f):\n    return inner(f)\ndef inner(f):\n    return f()\n", where, "exec"), names)  # noqa: S102 - frames of a file that is not there

    def fail():
        raise ValueError("inside")

    def outer():
        try:
            names["call"](fail)
        except ValueError as error:
            raise TypeError("outside") from error

    with pytest.raises(TypeError) as raised:
        names["call"](outer)
    text = trace(raised.value)
    assert text.count("(2 frames of /env/site-packages/mindspore/ not shown)") == (0 if full else 2)
    assert text.count(f'File "{where}"') == (4 if full else 0)
    assert "ValueError: inside" in text
    assert text.endswith("TypeError: outside")
