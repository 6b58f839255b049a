"""The page in a real browser: figures are drawn, and answer to the mouse."""

import json
from math import log

import pytest
from chromium import Browser, find_chromium

from ghostbatch import Recipe, Regime
from ghostbatch.report.page import write_report
from ghostbatch.study import Instrument, Row, Study
from ghostbatch.study.manifest import write_study

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")

EVIL = "+GBN </script><img src=x onerror=alert(1)>".replace("/", "")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of four columns, one of them unfinished and one with a dangerous name."""
    out = tmp_path_factory.mktemp("runs") / "a study"
    regime = Regime(lr=0.05, epochs=1.6, drops=((0.8, 0.005),))
    recipe = Recipe(model="f1", data="digits", batch=64, base_batch=64, regime=regime)
    columns = ("SB", "LB", "+LR", EVIL)
    for place, column in enumerate(columns):
        for seed in (0, 1):
            write_run(out / "f1-digits" / column / f"seed-{seed}", recipe, seed, place)
    (out / "f1-digits" / "+LR" / "seed-1" / "summary.json").unlink()
    figures = ("error-by-update", "error-zoomed", "distance", "accuracy-by-distance")
    row = Row(dict.fromkeys(columns, recipe), (*figures, "gain-at-drop"), paper={"SB": 90.0})
    t = [float(10**k) for k in range(1, 9)]
    draw = {"times": t, "distances": [log(x) for x in t], "gaps": [1 / log(x) for x in t]}
    draw |= {"length": 1.0, "limit": 1.0, "slack": 0.1}
    (out / "separable.json").write_text(json.dumps({"draws": [draw]}))
    study = Study("a study", {"f1-digits": row}, (0, 1), (Instrument("separable"),))
    write_study(study, out)
    return write_report(out)[0]


def write_run(folder, recipe, seed, place):
    folder.mkdir(parents=True)
    fields = {**recipe.as_dict(), "seed": seed}
    header = {"recipe": fields, "samples": 4000, "device": "cpu", "threads": 1}
    (folder / "run.json").write_text(json.dumps(header))
    rest = {"epoch": 1.0, "loss": 0.5, "lr": 0.05}
    lines = [
        {"update": t, "split": split, "distance": (1 + place) * log(t + 1) + seed / 10}
        | {"accuracy": 20 + 10 * place + 10 * log(t) + seed, **rest}
        for t in range(1, 101)
        for split in ("train", "validation")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = {"status": "finished", "updates": 100, "epochs": 1.6, "seconds": 1.0, "loss": 0.5}
    numbers = {"accuracy": 66.0 + 10 * place + seed, "distance": 5.0 * (1 + place)}
    (folder / "summary.json").write_text(json.dumps({**ended, **numbers}))


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


def test_every_figure_is_drawn_without_a_problem_or_a_request(browser, page):
    browser.open(page)
    drawn = browser.evaluate(
        "[...document.querySelectorAll('figure')].map(f => [f.id, f.dataset.drawn,"
        "f.querySelectorAll('.mark-line path, .mark-symbol path').length])"
    )
    assert [name for name, *_ in drawn] == [
        *("error-by-update", "error-zoomed", "distance", "accuracy-by-distance", "gain-at-drop"),
        *("separable-distance", "separable-gap"),
    ]
    assert all(state == "yes" and marks > 0 for _, state, marks in drawn)
    assert browser.problems == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data", "blob"}


def test_a_dangerous_name_is_shown_as_text(browser, page):
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.evaluate("document.querySelector('tbody').textContent")
    legend = "#distance .role-legend-label text"
    found = f"[...document.querySelectorAll('{legend}')].map(e => e.textContent)"
    assert EVIL in browser.evaluate(found)


def test_the_mouse_shows_the_values_of_the_nearest_point(browser, page):
    browser.open(page)
    browser.middle("#distance .drawing")
    x, y = browser.middle("#distance .drawing svg")
    browser.mouse(x - 5, y)
    browser.mouse(x, y)
    browser.wait("document.querySelector('#vg-tooltip-element.visible')")
    text = browser.evaluate("document.querySelector('#vg-tooltip-element').textContent")
    assert "column" in text
    assert "update" in text
    assert "distance" in text


CURVES = "document.querySelectorAll('#distance .mark-line path').length"


def test_a_click_on_the_legend_hides_a_curve_and_another_shows_it(browser, page):
    browser.open(page)
    before = browser.evaluate(CURVES)
    for count in (before - 2, before):  # a curve and its fit
        place = browser.middle("#distance .role-legend-symbol path")
        browser.mouse(*place, click=True)
        browser.wait(f"{CURVES} === {count}")
    assert browser.problems == []


def test_the_axis_switches_between_log_and_linear(browser, page):
    browser.open(page)
    labels = (
        "[...document.querySelectorAll('#distance .role-axis-label text')].map(e => e.textContent)"
    )
    logarithmic = browser.evaluate(labels)
    for shown in ("x: linear", "x: log"):
        browser.mouse(*browser.middle("#distance button[data-axis=x]"), click=True)
        browser.wait(
            f"document.querySelector('#distance button[data-axis=x]').textContent === '{shown}'"
        )
        same = f"{labels}.join() === {json.dumps(','.join(logarithmic))}"
        browser.wait(same if shown == "x: log" else f"!({same})")
    assert browser.evaluate("document.querySelector('#distance button[data-axis=y]').hidden")
    assert browser.problems == []


def test_dark_mode_has_light_text_in_the_figures_too(browser, page):
    colour = "getComputedStyle(document.querySelector('{}')).{}"
    axis = colour.format("#distance .role-axis-label text", "fill")
    found = {}
    for dark in (False, True):
        browser.open(page, dark=dark)
        back = colour.format("body", "backgroundColor")
        found[dark] = [brightness(browser.evaluate(each)) for each in (axis, back)]
    (text, page_colour), (light_text, dark_page) = found[False], found[True]
    assert text < 100
    assert page_colour > 200
    assert light_text > 200
    assert dark_page < 50


def brightness(colour):
    return sum(int(part) for part in colour.strip("rgb()").split(",")) / 3


def test_a_print_is_black_on_white_even_in_dark_mode_and_has_nothing_to_click(browser, page):
    browser.open(page, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.send("Emulation.setEmulatedMedia", media="print", features=dark)
    colour = "getComputedStyle(document.querySelector('{}')).{}"
    text = colour.format("#distance .role-axis-label text", "fill")
    assert brightness(browser.evaluate(text)) == 0
    assert brightness(browser.evaluate(colour.format("body", "backgroundColor"))) == 255
    shown = "[...document.querySelectorAll('{}')].filter(e => e.offsetParent).length"
    assert browser.evaluate(shown.format("button, summary, .tip")) == 0
    assert browser.evaluate(shown.format("td")) > 10
    browser.send("Emulation.setEmulatedMedia", media="")


def test_a_phone_needs_no_horizontal_scrolling(browser, page):
    browser.open(page, width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    widths = browser.evaluate(
        "[...document.querySelectorAll('.drawing svg')].map(e => e.getBoundingClientRect().right)"
    )
    assert widths
    assert max(widths) <= 390


@pytest.mark.parametrize("kind", ["svg", "png", "csv"])
def test_a_figure_can_be_saved(browser, page, kind):
    browser.open(page)
    browser.evaluate(
        "window.saved = null; HTMLAnchorElement.prototype.click = function () {"
        "window.saved = {name: this.download, href: this.href}; };"
    )
    browser.mouse(*browser.middle(f"#distance button[data-save={kind}]"), click=True)
    browser.wait("window.saved")
    saved = browser.evaluate("window.saved")
    assert saved["name"] == f"distance.{kind}"
    content = browser.evaluate(
        "fetch(window.saved.href).then(r => r.text()).then(t => t.slice(0, 40))"
    )
    assert content.startswith({"svg": "<svg", "csv": "column,split,run"}.get(kind, "�PNG"))
