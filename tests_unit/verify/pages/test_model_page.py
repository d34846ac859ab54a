"""The page of a model verification shows its report."""

import re

from hyper_parallel.verify.pages.model_page import model_page
from hyper_parallel.verify.step_timeline import StepCall


def rows(page, caption):
    """Return the texts of the cells of a table, by its caption."""
    body = re.search(rf"<caption><span>{re.escape(caption)}.*?<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]


def test_the_verdict_of_an_equal_run_comes_first(samples):
    """The verdict comes first, then settings, the mesh, losses, gradients, modules, collectives, layouts, gaps."""
    page = model_page([samples.run()])
    marks = [
        "toy &lt;1&gt; on torch", '<div class="verdict good"><strong>equal</strong>', ">Settings</h3>", ">Mesh</h3>",
        ">Loss</h3>", ">Gradients</h3>", ">Modules</h3>", ">Collectives</h3>", ">Parameters on ranks</h3>",
        ">Not compared, and why</h3>",
    ]  # fmt: skip
    places = [page.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "sgd, learning rate 0.1" in page
    assert "output of &lt;norm&gt;: why not" in page
    assert "Whole on every rank: up.bias." in page
    assert "Plain tensors, the same on every rank: scale." in page
    assert "up.weight: [7@tp, 3]" in page


def test_losses_of_both_runs_are_shown(samples):
    """Every step has both losses and the error of the report, equal or not."""
    steps = rows(model_page([samples.run()]), "Loss per step")
    assert steps[0] == ["1", "3", "3", "0", "1.0e-09", "equal"]
    assert steps[2] == ["3", "1.5", "1.5", "", "", "not compared"]
    assert rows(model_page([samples.run(wrong=True)]), "Loss per step")[2][1:3] == ["1.5", "1.75"]


def test_the_module_that_diverged_first_comes_first(samples):
    """The module that diverged first is in the verdict and leads its tables, wherever it stands in the model."""
    page = model_page([samples.run(wrong=True)])
    assert "<strong>DIVERGED first in module layers.0.down</strong>" in page
    assert "step 1, output of layers.0.down.x, rank 0: 0.5, single device 0.25" in page
    assert page.lower().count("diverged first") == 1
    modules = rows(page, "What was compared")
    assert [row[0] for row in modules[:2]] == ["layers.0.down"] * 2
    assert modules[0][1:7] == ["output", "1\N{NO-BREAK SPACE}differ", "1", "3", "1.0e+00", "1.0e-09"]
    assert modules[-1][2] == "equal"
    labels = re.findall(r'text-anchor="end"[^>]*>([^<]+)</text>', page[page.index(">Gradients</h3>") :])
    assert labels[:2] == ["layers.0.down", "layers.0.up"]


def test_collectives_carry_bytes(samples):
    """Collectives are listed per module with count, size in its unit and the number of implicit ones."""
    page = model_page([samples.run()])
    caption = "Collectives of one training step, as received by the worst rank: 2 collectives, 640\N{NO-BREAK SPACE}B"
    assert rows(page, caption)[0][:6] == [
        "layers.0.down", "forward", "all_reduce", "tp", "2", "640\N{NO-BREAK SPACE}B",
    ]  # fmt: skip


def test_a_run_that_ended_shows_its_traceback(samples):
    """A run that ended early is not a success, and shows every rank's traceback."""
    page = model_page([samples.run(error="rank 0:\n<traceback>")])
    assert "<strong>ENDED</strong><p>ENDED: ValueError: &lt;no&gt;</p>" in page
    assert "<pre>rank 0:\n&lt;traceback&gt;</pre>" in page
    assert 'class="verdict good"' not in page


def test_several_runs_have_an_overview(samples):
    """Every run is one line with its verdict and a link; one failed run fails the page's verdict."""
    page = model_page([samples.run(), samples.run(wrong=True)])
    assert page.index("<strong>1 of 2 runs equal to one device</strong>") < page.index("Every run")
    assert [row[4] for row in rows(page, "Every run")] == ["equal", "DIVERGED first in module layers.0.down"]
    assert all(f'href="#run-{number}"' in page and f'id="run-{number}"' in page for number in (0, 1))
    assert '<div class="verdict good"><strong>2 of 2' in model_page([samples.run(), samples.run()])


def test_an_interrupted_command_is_no_success(samples):
    """After an interrupt, the page states that the rest was not verified; without any run it is not a success."""
    page = model_page([samples.run()], "partial report: 1 of 4 runs finished")
    assert '<div class="verdict bad"><strong>1 of 1 runs equal to one device</strong><p>partial report: 1' in page
    assert '<div class="verdict bad"><strong>0 of 0' in model_page([])


def test_the_plan_is_a_table(samples):
    """Every parameter is a row: its shape, its placement over each axis, and its largest shard; plain ones say so."""
    assert rows(model_page([samples.run()]), "What the plan makes of every parameter") == [
        ["up.weight", "7 x 3", "Replicate()", "Shard(0)", "4 x 3"],
        ["up.bias", "7", "Replicate()", "Replicate()", "7"],
        ["scale", "1", "plain tensor", "plain tensor", "1"],
    ]


def test_the_last_step_is_a_timeline(samples):
    """Calls of the last step are bars per rank, with module and members; the time of every rank is a table."""
    report = samples.run()
    assert ">One step</h3>" not in model_page([report])
    whole = StepCall("all_reduce", (0, 1), "layers.<0>", 1.0, 1.0, 1.5)
    unwaited = StepCall("all_gather", (0, 1), "", 2.0, 2.0, None)
    report.timeline = [[whole, unwaited], []]
    page = model_page([report])
    assert page.index(">Collectives</h3>") < page.index(">One step</h3>") < page.index(">Parameters on ranks</h3>")
    assert "all_reduce of ranks 0, 1 (completed), 500.00 ms, at layers.&lt;0&gt;" in page
    assert "all_gather of ranks 0, 1 (completed), 0.00 ms, at (no module)" in page
    assert "coloured the wait for slower ranks, as if every rank had a processor of its own" in page
    times = rows(page, "Time of every rank")
    assert times == [["0", "500.00", "500.00", "all_reduce"], ["1", "0.00", "0.00", "no calls"]]
