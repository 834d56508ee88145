# SPDX-License-Identifier: Apache-2.0
"""The page for a browser: one file, safe with other people's names, readable at each width."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE
from report_runs import Node, call, large_run

from fedclip.report import Run, page_of, read_report

pytest.importorskip("vl_convert")
pytest.importorskip("jinja2")

NAMES = ("<script>alert(3)", "[red]", "\x1b[31mred", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}")


def of_others(folder: Path) -> Path:
    """Write a run whose names are markup."""
    for name in NAMES:
        Node(folder / name, ["no-op"]).round([1.0, 2.0])
    metrics = {"<img src=x onerror=alert(2)>": 1.0, "__proto__": 2.0, "loss": 0.5}
    Node(folder / "server", ["no-op"]).round([1.0], metrics=metrics)
    return folder


def page(folder: Path, **options: Any) -> str:
    return page_of([Run("", read_report(folder), **options)], f"Clipping in {folder.name}")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run(tmp_path_factory.mktemp("small") / "run", 12, 5)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_one_file_without_links(small: Path) -> None:
    text = page(small)
    assert text.count("<script") == text.count("</script>") == 3
    html = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"""(src|href)=["'](?!#)""", html)
    assert "@import" not in html
    assert "url(" not in html
    for part in ('<html lang="en">', 'class="skip"', "<main", "<caption>", 'scope="row"', "<h2"):
        assert part in html
    (experiment,) = data_of(text)["experiments"]
    assert experiment["metrics"]["loss"]["server"][0][0] == 1
    assert [point[0] for point in experiment["clippers"][0]["all"]] == list(range(1, 13))
    assert len(experiment["clippers"][0]["nodes"]) == 5


def test_other_peoples_names_are_shown_as_they_are(tmp_path: Path) -> None:
    text = page(of_others(tmp_path), spent=[("server", ["<b>epsilon</b>"])])
    html = text.partition('<script type="application/json"')[0]
    assert not re.search("<(b|img|i)[ >]", html)
    assert "\x1b" not in text
    assert "&lt;b&gt;epsilon" in html
    assert "{{ 7*7 }}" in html
    assert text.count("</script>") == 3
    data_of(text)


@pytest.mark.slow
def test_what_was_spent_is_on_the_page(tmp_path: Path) -> None:
    from fedclip.privacy.ledger import FILE, Ledger

    Node(tmp_path / "c0", ["no-op"]).round([1.0])
    Ledger(8.0, 1e-5, tmp_path / "c0" / FILE).reserve(2.0, 1.0, 3)
    file = tmp_path / "r.html"
    result = call("report", tmp_path, "--html", file)
    assert result.exit_code == 0, result.stderr
    assert "Privacy spent" in file.read_text()
    assert "3 steps at noise multiplier 2" in file.read_text()


# -- in a browser -------------------------------------------------------------------------------
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")
def new_tab() -> Iterator[Callable[..., Any]]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=ARGUMENTS)

        def new_tab(**options: Any) -> Any:
            tab = browser.new_page(**options)
            tab.set_default_timeout(1000 * PATIENCE)
            return tab

        yield new_tab


OVERLAPS = """() => [...document.querySelectorAll(".chart svg")].flatMap((svg) => {
  const seen = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim()
    && getComputedStyle(t).opacity !== "0" && t.getAttribute("opacity") !== "0")
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  const frame = svg.getBoundingClientRect();
  return seen.flatMap(([a, r], i) => [
    ...(r.left < frame.left - 1 || r.right > frame.right + 1 ? [`${a} is cut off`] : []),
    ...seen.slice(i + 1).filter(([b, s]) => r.left < s.right && s.left < r.right
      && r.top < s.bottom && s.top < r.bottom).map(([b]) => `${a} on ${b}`)]);
})"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1400])
def test_a_large_run_in_a_browser(new_tab: Any, tmp_path: Path, width: int) -> None:
    folder = large_run(tmp_path / "run", 300, 100 if width == 1400 else 6)
    file = tmp_path / "r.html"
    file.write_text(page(folder), encoding="utf-8")
    assert file.stat().st_size < 5e6
    asked: list[str] = []
    wrong: list[str] = []
    tab = new_tab(viewport={"width": width, "height": 900}, color_scheme="dark")
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(file.as_uri())
    tab.wait_for_function("document.querySelectorAll('.chart svg').length === 4")
    assert asked == [file.as_uri()]
    assert not wrong
    # Nothing is wider than the window, and no text in a chart is on another.
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERLAPS) == []
    titles = tab.evaluate(
        "[...document.querySelectorAll('.chart svg text')].map(t => t.textContent)"
    )
    assert {"round", "loss", "accuracy", "norm before clipping", "steps clipped"} <= set(titles)
    # By keyboard: first the link past the head, then a client.
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    before = tab.locator("[data-norms] svg").inner_html()
    tab.locator("select").focus()
    tab.keyboard.press("ArrowDown")
    tab.wait_for_function("document.querySelector('select').value === '0'")
    tab.wait_for_function(
        "(before) => document.querySelector('[data-norms] svg')?.innerHTML !== before", arg=before
    )
    assert not wrong


@pytest.mark.slow
def test_names_run_nothing_in_a_browser(new_tab: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    file.write_text(page(of_others(tmp_path)), encoding="utf-8")
    alerts: list[str] = []
    tab = new_tab()
    tab.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    tab.on("pageerror", lambda error: alerts.append(str(error)))
    tab.goto(file.as_uri())
    tab.wait_for_function("document.querySelectorAll('.chart svg').length > 3")
    assert alerts == []
    assert tab.locator("img").count() == 0
