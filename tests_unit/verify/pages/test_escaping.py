"""Names and messages of any text never become elements, attributes or scripts of a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st
from markupsafe import Markup

from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport
from hyper_parallel.verify.pages import layout_svg, page, table
from hyper_parallel.verify.pages.model_page import model_page
from hyper_parallel.verify.pages.operators_page import operators_page
from hyper_parallel.verify.pages.program_page import program_page
from hyper_parallel.verify.pages.report_pages import bugs_page, comparison_page, fuzz_page
from hyper_parallel.verify.pages.start_page import FoundReport, start_page
from hyper_parallel.verify.pages.timeline_page import timeline_page
from hyper_parallel.verify.report import command_line
from workshop.bench.page import bench_page
from workshop.conformance.page import contract_page
from workshop.conformance.results import ContractOutcome
from workshop.mutation.page import mutation_page
from workshop.nights.night_page import night_page
from workshop.nights.trend_page import trend_page

PLAIN = "plain"
TEXTS = st.text(st.sampled_from("<>\"'&/=;- \nax{}%$\\\u2028\0"), min_size=1, max_size=12)


class Elements(HTMLParser):
    """Collects each element with the names of its attributes, and the text of scripts."""

    def __init__(self):
        super().__init__()
        self.seen, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        """Note an element."""
        self.seen.append((tag, *sorted(name for name, _ in attrs)))

    def handle_data(self, data):
        """Note what a script consists of."""
        if self.lasttag in {"script", "style"}:
            self.scripts.append(data)


def elements(text):
    """Return the elements and scripts of a page."""
    parser = Elements()
    parser.feed(str(text))
    parser.close()
    return parser.seen, parser.scripts


def model(samples, text):
    """The page of a run whose names and messages are ``text``."""
    report = samples.run(wrong=True, error=text, modules=("first", text))
    layouts = [replace(report.parameter_layouts[0], path=text), *report.parameter_layouts[1:]]
    return model_page(
        [replace(report, name=text, cause=text, skipped=[text], settings={text: text}, parameter_layouts=layouts)]
    )


def operators(samples, text):
    """The page of a sweep of an operator of this name, with its messages."""
    entry = samples.operator(text, "torch", "wrong", forward=3)
    findings = [{"problem": text, "places": text}]
    entry |= {"wrong": findings, "crash": findings, "rejected": {text: 1}, "skipped": {text: 1}, "exempt": text}
    return operators_page([samples.sweep("torch", entry)])


def mutation(samples, text):
    """The page of a mutation run of a rule of this name."""
    report = samples.mutation()
    report["survivors"] = [{**entry, "op": text, "kind": text, "change": text} for entry in report["survivors"]]
    report["operators"] = {text: next(iter(report["operators"].values()))}
    return mutation_page(report)


def corpus(samples, text):
    """The page of the corpus with one program of these names."""
    report = samples.corpus()
    result = report.results[0]
    result = replace(
        result,
        bug=replace(result.bug, sentence=text, source=text, tensor=text),
        broken=replace(result.broken, name=text, evidence=text, error=text),
    )
    return bugs_page(replace(report, results=[result], note=text))


def program(samples, text):
    """The page of a program with values and messages of these names."""
    return program_page(samples.program(text))


def failed_program(samples, text):
    """The page of a program that failed with these words."""
    return program_page(samples.failed_program(text))


def programs(samples, text):
    """The page of random programs with a finding, a refusal and a call of these names."""
    del samples
    finding = Finding("torch", "wrong", text, 5, 7, (2,), text, text, calls=text, shown=True)
    outcomes = {"torch": Counter(equal=8, wrong=1)}
    return fuzz_page(
        FuzzReport(5, ("torch",), outcomes, steps=Counter({text: 9}), refusals=Counter({text: 2}), findings=[finding])
    )


def costs(samples, text):
    """The page of costs with an operation of this name, too slow."""
    del samples
    row = {"name": text, "plain": 1.0, "peer": 2.0, "ours": 9.0, "ratio": 4.0, "budget": 1.0, "ok": False}
    return bench_page([row], [{"name": text, "seconds": 9.0, "budget": 1.0, "problem": text, "ok": False}])


def contract(samples, text):
    """The page of the contract with a gap and a failure of these words."""
    del samples
    members = {"get_rank": f"gap: {text}", "swap_wrapper": f"failed: {text}"}
    gap = {"member": text, "reason": text, "substitute": text, "devices": [text]}
    return contract_page([ContractOutcome("torch", text, text, 2, members, [gap], text)], [])


def timeline(samples, text):
    """The timeline of a world with calls of these names, in which a rank raised this."""
    flight = samples.flight(error=text)
    for record in flight.records.values():
        record["doing"] = text
        for call in record["calls"]:
            call |= {"site": text, "operation": text, "text": text, "group": text, "facts": {text: text}}
    return timeline_page(flight)


def comparison(samples, text):
    """The comparison of two reports with values of these names."""
    before = samples.comparison()
    header = {**before.headers[0], "date": text, "command": text, "versions": {text: text}}
    changes = tuple(replace(change, what=text, before=text, after=text) for change in before.changes)
    return comparison_page(replace(before, headers=(header, {}), changes=changes))


def nights(samples, text):
    """The history of values, suites and reasons of these names."""
    return trend_page(samples.history(text))


def one_night(samples, text):
    """A night with suites, tests, reasons, reports and addresses of these names."""
    return night_page(samples.night(text), {(f"{text}/st", f"{text} new"): text})


def folder(samples, text):
    """The start page of a folder with a report of these words."""
    del samples
    return start_page(Path("a"), [FoundReport(Path("a/b.html"), text, False, text, text, text)], Path("a/index.html"))


def headed(samples, text):
    """A page in whose footer stands the header of a run with this command."""
    del samples
    with command_line([text]):
        return page("title", "body")


def pictures(samples, text):
    """A page with a table and with the picture of a layout whose axes have this name."""
    mesh = samples.mesh(2, 3, names=(text, "tp"))
    picture = layout_svg(samples.layout(mesh, [Shard(0), Partial()], (5, 4)))
    body = Markup("{}{}").format(table(text, [text], [[text]], search=True), Markup(picture))  # noqa: S704 - our own picture
    return page(text, body, footer=text)


@pytest.mark.parametrize("build", [
    model, operators, mutation, corpus, program, failed_program, programs, costs, contract, timeline, comparison,
    nights, one_night, folder, headed, pictures,
])  # fmt: skip
def test_no_text_becomes_markup(samples, build):
    """A page has the same elements, attributes and scripts whatever its names and messages are."""
    expected = elements(build(samples, PLAIN))

    @settings(max_examples=30)
    @given(TEXTS)
    @example("</script><script>alert(1)</script>")
    @example('"><img src=x onerror=alert(1)>')
    @example("' onload='alert(1)")
    @example("]]><svg onload=alert(1)>")
    def hostile(text):
        assert elements(build(samples, text)) == expected

    hostile()
