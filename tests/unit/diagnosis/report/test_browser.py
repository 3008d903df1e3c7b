"""Pages in a real browser, offline: no error, every figure drawn, nothing beyond the screen's edge.

Chromium is the system's, or Playwright's own (`playwright install chromium`).
"""

import shutil
from pathlib import Path

import pytest

from rljax.diagnosis import Diagnosis, Finding, History, Link, Severity, all_rules, diagnose
from rljax.diagnosis.report import comparison_page, run_page

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        system = shutil.which("chromium") or shutil.which("google-chrome")
        if not own.is_file() and system is None:
            pytest.skip("left out: no Chromium (playwright install chromium, or the system's package)")
        browser = playwright.chromium.launch(executable_path=None if own.is_file() else system, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(workdir, tmp_path_factory) -> dict[str, Path]:
    """A broken run's page, and the comparison of the run with itself."""
    directory, history = tmp_path_factory.mktemp("pages"), History.load(workdir)
    series = ("ppo_actor/update/approx_kl",)
    finding = Finding("policy.kl", Link.POLICY, Severity.BROKEN, 11, ("evidence",), series, ("a cause",), "a run")
    run = run_page(history, Diagnosis((finding,), {}, {}), all_rules())
    several = {"first": history, "second": history}
    comparison = comparison_page(several, {name: diagnose(each) for name, each in several.items()})
    written = {}
    for name, page in (("run", run), ("comparison", comparison)):
        written[name] = directory / f"{name}.html"
        written[name].write_text(page, encoding="utf-8")
    return written


@pytest.fixture
def opened(chromium, pages, request):
    """The page, drawn, and what its console and its errors said."""
    name, width, scheme = request.param
    size = WIDTHS[width]
    context = chromium.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, offline=True, has_touch=width == "phone"
    )
    context.set_default_timeout(300_000)  # milliseconds: a machine may be busy
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda made: said.append(made.url) if not made.url.startswith(("file:", "data:")) else None)
    page.goto(pages[name].as_uri())
    wait_until_drawn(page)
    yield page, said
    context.close()


def wait_until_drawn(page) -> None:
    page.locator("html[data-drawn]").wait_for(state="attached")  # no evaluated script: the page's policy refuses it


ALL = [(name, width, scheme) for name in ("run", "comparison") for width in WIDTHS for scheme in SCHEMES]


@pytest.mark.parametrize("opened", ALL, indirect=True, ids="-".join)
def test_every_figure_is_drawn_and_fits_and_nothing_is_said(opened):
    page, said = opened
    figures = page.evaluate("Object.keys(JSON.parse(document.getElementById('charts').textContent))")
    places = page.locator("[data-chart]")
    assert len(figures) > 20 and places.count() == len(figures)
    screen = page.viewport_size["width"]
    for i in range(places.count()):
        place = places.nth(i)
        figure = place.get_attribute("data-chart")
        drawing = place.locator("svg")
        box, marks = drawing.bounding_box(), drawing.locator(".mark-line path, .mark-area path, .mark-rect path")
        assert box["width"] > 200 and box["height"] > 150, figure
        assert box["x"] >= 0 and box["x"] + box["width"] <= screen + 1, figure
        assert marks.count() >= 1 and drawing.locator(".role-axis-label text").count() >= 4, figure
    sections = [section.bounding_box() for section in page.locator("main > section").all()]
    assert len({section["x"] for section in sections}) == 1, "below each other"
    assert page.evaluate("document.documentElement.scrollWidth") <= screen
    assert page.evaluate("window.broken") is None  # the hostile samples did not run
    assert said == []


@pytest.mark.parametrize("opened", [("run", "desktop", "light")], indirect=True, ids="-".join)
def test_the_first_break_is_on_every_figure_of_rl_and_the_colors_follow_the_readers_scheme(opened):
    page, said = opened
    marked = page.locator("[data-chart]:not([data-chart^=supervised]) svg .mark-rule.role-mark line")
    unmarked = page.locator("[data-chart^=supervised] svg .mark-rule.role-mark line")
    assert marked.count() == page.locator("[data-chart]:not([data-chart^=supervised])").count() and unmarked.count() == 0
    light = marked.first.get_attribute("stroke")
    page.emulate_media(color_scheme="dark")
    sync_api.expect(marked.first).not_to_have_attribute("stroke", light, timeout=300_000)
    wait_until_drawn(page)
    assert marked.count() == page.locator("[data-chart]:not([data-chart^=supervised])").count()
    assert said == []


@pytest.mark.parametrize("opened", [("run", "desktop", "light")], indirect=True, ids="-".join)
def test_tokens_are_colored_by_what_the_reader_chooses(opened):
    page, said = opened
    background = "getComputedStyle(document.querySelector('.transcript s:is(.a4, .a-4)')).backgroundColor"
    seen = {}
    for choice in ("advantage", "version", "nothing"):
        page.locator(f"input[value={choice}]").check()
        seen[choice] = page.evaluate(background)
    assert len(set(seen.values())) == 3 and seen["nothing"] == "rgba(0, 0, 0, 0)"
    assert said == []
