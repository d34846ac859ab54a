"""The shared style and tables of all pages."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from hyper_parallel.verify import pages
from hyper_parallel.verify.pages import Cell, Column, page, svg, table

README = Path(pages.__file__).with_name("README.md")
OWN = ("page", "panel")
TEXTS = ("text", "quiet", "link", "good", "bad", "warn")
SERIES = ("one", "two", "three", "four", "five", "six")


def luminance(colour):
    """Return the relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    """Return the contrast of two colours, from 1 to 21."""
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


class Balanced(HTMLParser):
    """A parser that asserts that every element is closed, in order."""

    def __init__(self):
        super().__init__()
        self.stack, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        """Record the element and its links."""
        self.seen.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in {"href", "src", "action", "data", "poster", "srcset"}]
        if tag not in {"meta", "br", "input"}:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        """Assert that the tag closes the last open element."""
        assert self.stack.pop() == tag


def parsed(text):
    """Return the parser of a well-formed page, with its elements."""
    parser = Balanced()
    parser.feed(text)
    assert not parser.stack
    return parser


@pytest.mark.parametrize("scheme", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_text_and_series_have_contrast(scheme):
    """Text, curves and bars have a contrast of at least 4.5 to every background."""
    assert set(scheme) == {*OWN, *TEXTS, *SERIES, "line"}
    weak = {(name, own): contrast(scheme[name], scheme[own]) for name in (*TEXTS, *SERIES) for own in OWN}
    assert not {pair: value for pair, value in weak.items() if value < 4.5}


def test_a_page_is_whole_and_fetches_nothing():
    """A page is well formed, has no address but those of its rows, and forbids its own script to fetch anything."""
    text = page("A & B", table("x < y", ["a", "b"], [["<i>", 1]], search=True), footer="by <me>")
    elements = parsed(text)
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert elements.links == ["#row-i"]
    assert "url(" not in text
    assert "@import" not in text
    policies = [
        attrs["content"] for tag, attrs in elements.seen if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert "<title>A &amp; B</title>" in text
    assert "<footer><p>by &lt;me&gt;</p>" in text
    assert "prefers-color-scheme: dark" in text


def test_a_table_has_its_caption_and_scopes():
    """A table has a caption and its heads scopes; text is escaped, markup is not; numbers are right-aligned."""
    text = str(
        table(
            "what < it",
            ["name", Column("count", number=True, choice=True, hint="how many")],
            [["<b>", Cell(3, kind="bad")], [Markup("<i>x</i>"), Cell("none", key="")]],
        )
    )
    parsed(text)
    assert "<caption><span>what &lt; it</span></caption>" in text
    assert '<th scope="col">name</th><th scope="col" class="number" data-choice="count" title="how many">count' in text
    assert '<tr><th scope="row">&lt;b&gt;</th><td class="number bad">3</td></tr>' in text
    assert '<tr><th scope="row"><i>x</i></th><td class="number" data-key="">none</td></tr>' in text
    assert "<table data-sort>" in text
    assert "data-filter" in str(table("t", ["a"], [["x"]], search=True))


@pytest.mark.skipif(not README.exists(), reason="[no-tool] the README is not installed")
def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    """The code in the README of the pages runs unchanged."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code, {})  # noqa: S102 - our own page
    assert "[5@tp, 4] on dp=2 x tp=3" in (tmp_path / "layout.html").read_text()


def test_an_empty_table_has_one_row():
    """A table without rows has one row with a text, and nothing to sort."""
    text = str(table("t", ["a", "b"], [], search=True, empty="nothing ran"))
    assert '<td colspan="2" class="quiet">nothing ran</td>' in text
    assert "data-sort" not in text


def test_a_row_that_does_not_fit_is_rejected():
    """A row must have a value per column, and a cell a kind that the style has."""
    with pytest.raises(ValueError, match=r"^table 't': a row has 1 values for 2 columns$"):
        table("t", ["a", "b"], [["x"]])
    with pytest.raises(ValueError, match=r"^Cell: kind 'red' is none of '', 'good', 'bad', 'warn', 'quiet'$"):
        Cell("x", kind="red")
