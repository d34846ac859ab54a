"""Pages in headless Chromium: sorting, filtering, both colour schemes, narrow and wide windows, nothing fetched."""

from functools import cache
from pathlib import Path

import pytest
from markupsafe import Markup

from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.verify.pages import layout_svg, page
from hyper_parallel.verify.pages.explain_page import explain_page
from hyper_parallel.verify.pages.model_page import model_page
from hyper_parallel.verify.pages.operators_page import operators_page
from hyper_parallel.verify.pages.program_page import program_page
from hyper_parallel.verify.pages.report_pages import bugs_page, comparison_page, fuzz_page
from hyper_parallel.verify.pages.start_page import FoundReport, start_page
from hyper_parallel.verify.pages.timeline_page import timeline_page
from workshop.bench.page import bench_page
from workshop.conformance.page import contract_page
from workshop.conformance.results import ContractOutcome
from workshop.mutation.page import mutation_page
from workshop.nights.night_page import night_page
from workshop.nights.trend_page import trend_page

pytestmark = [pytest.mark.slow]

NAMES = (
    "model",
    "diverged",
    "ended",
    "operators",
    "mutation",
    "contract",
    "corpus",
    "program",
    "timeline",
    "comparison",
    "nights",
    "night",
    "pictures",
    "start",
    "explained",
    "fuzz",
    "costs",
)

OVERFLOW = """
const wide = [...document.querySelectorAll("main *")].filter(
  (one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll table, figure > *"));
const page = document.documentElement.scrollWidth;
return { window: innerWidth, page, wide: wide.map((one) => one.outerHTML.slice(0, 90)) };
"""

# Links inside the page, rows, headings and the first column: that each leads somewhere, and what stays in view.
LINKS = """
const links = [...document.querySelectorAll("a[href^='#']")].map((one) => decodeURIComponent(one.hash.slice(1)));
const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
const rows = [...document.querySelectorAll("tbody tr:has(> th)")];
return { dead: links.filter((one) => !document.getElementById(one)), twice: ids.length - new Set(ids).size,
         rows: rows.filter((one) => one.querySelector(":scope > th > a.permalink")?.hash !== `#${one.id}`).length,
         contents: [document.querySelectorAll(":is(h2, h3):not(details *)").length > 4,
                    !!document.querySelector("nav.contents li")],
         copy: document.querySelectorAll(".command > button.copy").length };
"""

COLUMN_STAYS = """
const moved = [];
for (const region of document.querySelectorAll(".scroll")) {
  const head = region.querySelector("tbody th");
  if (!head || !head.getClientRects().length || region.scrollWidth <= region.clientWidth) continue;
  const before = head.getBoundingClientRect().left;
  region.scrollLeft = 60;
  moved.push(Math.abs(head.getBoundingClientRect().left - before) > 1 || region.scrollLeft === 0);
}
return moved;
"""

HEADS = """
const lines = (head) => {
  const range = document.createRange();
  range.selectNodeContents(head);
  return new Set([...range.getClientRects()].map((line) => Math.round(line.top))).size;
};
const heads = [...document.querySelectorAll("tbody th:not(:has(code))")].filter((head) => head.getClientRects().length);
return heads.filter((head) => /^\\w{1,12}$/.test(head.textContent.trim()) && lines(head) > 1)
  .map((head) => head.textContent);
"""

# Contrast of every text with the nearest ground behind it, as WCAG 2 computes it.
CONTRAST = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
  .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
  .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const colour = parts(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  throw new Error("no ground");
};
const weak = [];
let count = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const one = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || one.closest("script, title, desc, option")) continue;
  const style = getComputedStyle(one);
  const [a, b] = [light(parts(one.closest("svg") ? style.fill : style.color)), light(ground(one))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  count += 1;
  if (ratio < 4.5) weak.push([walker.currentNode.data, ratio]);
}
return { count, weak, dark: light(ground(document.querySelector("h1"))) < 0.2 };
"""

COLUMN = """
const table = [...document.querySelectorAll("table")].find((one) => one.caption.textContent.startsWith("Checks per"));
const at = (name) => [...table.tHead.rows[0].cells].findIndex((one) => one.textContent === name);
const click = (name) => table.tHead.rows[0].cells[at(name)].querySelector("button").click();
const rows = () => [...table.tBodies[0].rows].filter((one) => !one.hidden);
const column = (name) => rows().map((one) => one.cells[at(name)].textContent);
const controls = table.closest(".scroll").previousElementSibling;
const set = (control, value) => {
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
};
"""


def _outcome(platform):
    """An outcome with a gap with a long reason, a failure, and members that did not run."""
    members = {"get_rank": "served", "checkpoint": f"gap: {'why ' * 40}", "swap_wrapper": "failed: rank 1: x < y"}
    gap = {"member": "checkpoint", "reason": "<none>", "substitute": "nothing", "devices": ["cpu", "npu"]}
    return ContractOutcome(platform, "cpu", "simulated", 2, members, [gap], "2026-01-02T03:04:05+00:00")


def _found(name, *, good):
    """A report in a folder."""
    return FoundReport(Path(f"run/{name}.html"), "Programs", good, "verdict " * 20, "2026-01-02", "hyper-parallel " * 9)


@pytest.fixture(scope="module")
def pages(samples):
    """Every kind of page, by name."""
    mesh = samples.mesh(2, 12)
    layout = samples.layout(mesh, [Partial(), Shard(0)], (29, 7))
    return {
        "model": model_page([samples.run(), samples.run(wrong=True)]),
        "diverged": model_page([samples.run(wrong=True, modules=("a" * 60, "layers.0." * 12))]),
        "ended": model_page([samples.run(error="rank 0 failed\n" + "x" * 300)]),
        "operators": operators_page([samples.sweep("torch"), samples.sweep("mindspore")]),
        "mutation": mutation_page(samples.mutation()),
        "contract": contract_page([_outcome("torch"), _outcome("mindspore")], []),
        "corpus": bugs_page(samples.corpus()),
        "program": program_page(samples.program("layers.0." * 12)),
        "timeline": timeline_page(samples.flight()),
        "comparison": comparison_page(samples.comparison()),
        "nights": trend_page(samples.history("a" * 50, 40)),
        "night": night_page(samples.night("a" * 50), {}),
        "start": start_page(
            Path("run"), [_found("a" * 60, good=True), _found("b", good=False)], Path("run/index.html")
        ),
        "explained": explain_page([samples.explained()]),
        "fuzz": fuzz_page(samples.campaign("layers.0." * 12)),
        "costs": bench_page([samples.COST], [samples.TIMING]),
        "pictures": page("pictures", Markup("<figure>{}</figure>").format(layout_svg(layout))),
    }


FETCHED = """
const parts = document.querySelectorAll("script, link, img, iframe, object");
return { asked: performance.getEntriesByType("resource").map((one) => one.name),
         sources: [...parts].filter((one) => one.src || one.href || one.data).length };
"""

each_page = pytest.mark.parametrize("name", NAMES)
each_way = pytest.mark.parametrize("width", [390, 1280], ids=["narrow", "wide"])
each_scheme = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@pytest.fixture(scope="module")
def seen(browser, pages, tmp_path_factory):
    """Return the results of every probe of a page, in one width and colour scheme; one browser loads all pages."""
    probes = {"overflow": OVERFLOW, "contrast": CONTRAST, "fetched": FETCHED, "heads": HEADS, "links": LINKS,
              "moved": COLUMN_STAYS}  # fmt: skip
    script = "return { " + ", ".join(f"{name}: (() => {{ {body} }})()" for name, body in probes.items()) + " };"

    @cache
    def look(width, dark):
        return browser.ask_all(tmp_path_factory.mktemp("page"), pages, script, width=width, dark=dark)

    return lambda name, width, dark: look(width, dark)[name]


@each_scheme
@each_way
@each_page
def test_no_page_is_wider_than_its_window(seen, name, width, dark):
    """At 390 and at 1280 pixels no element is wider than the window: wide ones scroll inside themselves."""
    assert seen(name, width, dark)["overflow"] == {"window": width, "page": width, "wide": []}


@each_scheme
@each_way
@each_page
def test_every_text_can_be_read(seen, name, width, dark):
    """In the scheme that the reader's system prefers, every text has a contrast of at least 4.5 to its background."""
    contrast = seen(name, width, dark)["contrast"]
    assert contrast["dark"] is dark
    assert contrast["weak"] == []
    assert contrast["count"] > 20


@each_page
def test_short_heads_of_rows_stay_on_a_line(seen, name):
    """At 390 pixels, a word of up to a dozen letters at the head of a row is not broken into several lines."""
    assert seen(name, 390, True)["heads"] == []


@each_page
def test_links_lead_to_parts_of_the_page(seen, name):
    """Every link inside a page has a target, ids are unique, every row has its own link, the command can be copied."""
    links = seen(name, 1280, False)["links"]
    many, has_contents = links.pop("contents")
    assert links == {"dead": [], "twice": 0, "rows": 0, "copy": 1}
    assert has_contents or not many


@each_page
def test_the_first_column_stays_in_view(seen, name):
    """On a phone, tables scroll sideways under their first column."""
    moved = seen(name, 390, True)["moved"]
    assert not any(moved)
    assert moved or name in {"pictures", "explained"}


@each_page
def test_a_page_fetches_nothing(seen, name):
    """Loading a page fetches nothing, and no element in it has an address."""
    assert seen(name, 1280, False)["fetched"] == {"asked": [], "sources": 0}


def test_the_policy_forbids_fetching(browser, tmp_path):
    """The page's own policy stops an image."""
    script = """return { width: document.querySelector("img").naturalWidth,
                         asked: performance.getEntriesByType("resource").filter((one) => one.transferSize).length };"""
    dot = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
    result = browser.ask(tmp_path, page("t", Markup('<img src="{}" alt="">').format(dot)), script)
    assert result == {"width": 0, "asked": 0}


def test_a_probe_that_must_fail_does(browser, tmp_path):
    """The probes find text of too little contrast and a box that is too wide."""
    bad = page("t", Markup('<p style="width:900px">wide</p><p style="color:#888;background:#777">grey</p>'))
    assert browser.ask(tmp_path, bad, OVERFLOW, width=400)["page"] > 400
    assert [weak[0] for weak in browser.ask(tmp_path, bad, CONTRAST)["weak"]] == ["grey"]


def test_light_and_dark_look_different(browser, pages, tmp_path):
    """The same page has another screenshot in the other scheme."""
    assert browser.screenshot(tmp_path, pages["model"]) != browser.screenshot(tmp_path, pages["model"], dark=True)


def test_a_click_on_a_head_sorts(browser, pages, tmp_path):
    """A click on a head sorts numbers up, then down, with empty cells last, and marks the head."""
    script = (
        COLUMN
        + """
    const shown = [];
    click("uneven"); shown.push(column("uneven"));
    const up = table.tHead.rows[0].cells[at("uneven")].ariaSort;
    click("uneven"); shown.push(column("uneven"));
    const down = table.tHead.rows[0].cells[at("uneven")].ariaSort;
    click("operator"); shown.push(column("operator"));
    return { shown, up, down, left: table.tHead.rows[0].cells[at("uneven")].ariaSort };
    """
    )
    result = browser.ask(tmp_path, pages["operators"], script)
    assert result["shown"][0] == ["none", "none", "10", "10", "90", "90", "n/a", "n/a"]
    assert result["shown"][1] == ["90", "90", "10", "10", "none", "none", "n/a", "n/a"]
    assert result["shown"][2] == [name for name in ("add", "argsort", "matmul", "zeros") for _ in range(2)]
    assert (result["up"], result["down"], result["left"]) == ("ascending", "descending", None)


def test_search_and_choices_filter(browser, pages, tmp_path):
    """All words of the search and the chosen values select rows, and the number of rows is shown."""
    script = (
        COLUMN
        + """
    const shown = [];
    const [search, framework, outcome, gaps] = controls.querySelectorAll("input, select");
    const keep = () => shown.push([column("operator").join(" "), controls.querySelector("output").textContent]);
    keep();
    set(search, "TORCH add"); keep();
    set(search, ""); set(framework, "mindspore"); keep();
    set(outcome, "exempt"); keep();
    set(outcome, ""); set(gaps, "uneven"); keep();
    set(search, "nothing has this"); keep();
    return { shown, offered: [...framework.options].map((one) => one.textContent) };
    """
    )
    result = browser.ask(tmp_path, pages["operators"], script)
    assert result["shown"] == [
        ["add add argsort argsort matmul matmul zeros zeros", "8 of 8 rows"],
        ["add", "1 of 8 rows"],
        ["add argsort matmul zeros", "4 of 8 rows"],
        ["zeros", "1 of 8 rows"],
        ["argsort", "1 of 8 rows"],
        ["", "0 of 8 rows"],
    ]
    assert result["offered"] == ["any", "mindspore", "torch"]


def test_without_its_script_a_page_is_whole(browser, pages, tmp_path):
    """Without scripts, every row is shown, and no button or field is without effect."""
    text = str(pages["operators"])
    still = text[: text.rindex("<script>")] + "</body></html>"
    script = """return { rows: document.querySelectorAll("tbody tr").length,
                         dead: document.querySelectorAll("button, input, select").length };"""
    assert browser.ask(tmp_path, still, script) == {"rows": 16, "dead": 0}


@pytest.mark.parametrize("dark", [False, True])
def test_charts_fit_a_phone(browser, pages, tmp_path, dark):
    """At 390 pixels, charts are not wider than the window, and their text is at least 7 pixels high."""
    script = """
    const charts = [...document.querySelectorAll("figure svg")]
      .filter((one) => one.style.maxWidth && one.getClientRects().length);
    const texts = charts.flatMap((one) => [...one.querySelectorAll("text")]);
    return { count: charts.length, wide: charts.filter((one) => one.getBoundingClientRect().right > innerWidth).length,
             high: Math.min(...texts.map((one) => one.getBoundingClientRect().height)) };"""
    result = browser.ask(tmp_path, pages["diverged"], script, width=390, dark=dark)
    assert (result["count"], result["wide"]) == (2, 0)
    assert result["high"] >= 7


def test_a_link_unfolds_its_operator(browser, pages, tmp_path):
    """A click on an operator in the matrix opens its part, which has a contrast and width like the rest."""
    script = """
    const part = document.getElementById("matmul-torch");
    const before = part.open;
    location.hash = "#matmul-torch";
    dispatchEvent(new Event("hashchange"));
    return { before, after: part.open };"""
    assert browser.ask(tmp_path, pages["operators"], script) == {"before": False, "after": True}


def test_a_chart_uses_the_width(browser, pages, tmp_path):
    """In a wide window a chart is wider than on a phone, has titles of both axes, and each step shows its values."""
    script = """
    const charts = [...document.querySelectorAll("figure svg")]
      .filter((one) => one.style.maxWidth && one.getClientRects().length);
    return charts.map((one) => [one.getBoundingClientRect().width > 800, one.textContent]);"""
    (loss, gradients) = browser.ask(tmp_path, pages["diverged"], script)
    assert loss[0]
    assert gradients[0]
    assert all(text in loss[1] for text in ("step 3: single device 1.5, parallel 1.75", "loss", "step"))
    assert "largest gradient error of a module, logarithmic" in gradients[1]


def test_a_click_copies_the_command(browser, pages, tmp_path):
    """The button next to the command gives the clipboard the command and nothing else."""
    script = """
    const command = document.querySelector("[data-copy]");
    const copied = [];
    const writeText = (text) => { copied.push(text); return Promise.resolve(); };
    Object.defineProperty(navigator, "clipboard", { value: { writeText } });
    command.nextElementSibling.click();
    return { copied, shown: command.textContent };"""
    result = browser.ask(tmp_path, pages["model"], script)
    assert result["copied"] == [result["shown"]]
    assert result["shown"]


def test_a_link_to_a_row_shows_it(browser, pages, tmp_path):
    """A link to a row that a filter hides, or that is in folded text, brings it into view."""
    script = """
    const row = document.querySelector("tr[id^='row-matmul']");
    row.hidden = true;
    location.hash = row.querySelector("a.permalink").hash;
    dispatchEvent(new Event("hashchange"));
    const link = row.querySelector("a[href^='#matmul']");
    return { hidden: row.hidden, link: !!link };"""
    assert browser.ask(tmp_path, pages["operators"], script) == {"hidden": False, "link": True}
