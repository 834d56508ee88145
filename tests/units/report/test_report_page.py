# SPDX-License-Identifier: Apache-2.0
"""The page for a browser: one file, safe with other people's names, readable at each width."""

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from declearn.main.utils import Checkpointer
from declearn.optimizer import Optimizer
from report_runs import Node, call, large_run

from fedclip.privacy.ledger import FILE, Ledger
from fedclip.report import page_of, read_report
from fedclip.report.findings import Advice, Proposal
from fedclip.report.reading import LEDGER

pytest.importorskip("vl_convert")
pytest.importorskip("jinja2")

NAMES = ("<script>alert(3)", "[red]", "\x1b[31mred", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}")


def page(folder: Path, **options: Any) -> str:
    return page_of(read_report(folder), **{"spent": {}, **options})


@pytest.fixture(autouse=True)
def _without_the_code_of_charts(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundle it, which takes a second, only where it is read or run."""
    if "slow" not in request.keywords:
        monkeypatch.setattr("fedclip.report.page._vega", str)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run(tmp_path_factory.mktemp("small") / "run", 12, 5)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


@pytest.mark.slow
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
    for name in NAMES:
        Node(tmp_path / name, ["no-op"]).round([1.0, 2.0])
    metrics = {"<img src=x onerror=alert(2)>": 1.0, "__proto__": 2.0, "loss": 0.5}
    Node(tmp_path / "server", ["no-op"]).round([1.0], metrics=metrics)
    text = page(tmp_path, spent={"server": ["<b>epsilon</b>"]})
    html = text.partition('<script type="application/json"')[0]
    assert not re.search("<(b|img|i)[ >]", html)
    assert "\x1b" not in text
    assert "&lt;b&gt;epsilon" in html
    assert "{{ 7*7 }}" in html
    assert text.count("</script>") == 3
    data_of(text)


def sites(folder: Path, count: int, module: Any = "no-op", rounds: int = 3) -> Path:
    """Write a run of so many clients, the last of which has norms a hundred times as large."""
    for i in range(count):
        node = Node(folder / f"site-{i}", [module])
        for _ in range(rounds):
            node.round([(1.0 + 0.01 * i) * (100.0 if i == count - 1 else 1.0)] * 3)
    return folder


def test_of_many_clients_the_ends_have_names_and_are_not_in_the_band(tmp_path: Path) -> None:
    (experiment,) = data_of(page(sites(tmp_path, 12)))["experiments"]
    clipper = experiment["clippers"][0]
    assert [name for name, _ in clipper["lines"]] == ["highest: site-11", "lowest: site-0"]
    assert clipper["band"] == [[r, 1.01, 1.1] for r in (1, 2, 3)]


def test_a_report_of_many_clients_and_rounds_is_one_screen(tmp_path: Path) -> None:
    large_run(tmp_path, 60, 40)
    lines = call("report", tmp_path).stdout.splitlines()
    assert len(lines) < 30
    assert lines[0].startswith("The norms of the steps of client-039 are")
    assert lines[1].startswith("After round 60: accuracy ")
    assert any("client-039" in line for line in lines[8:])
    assert "12 of 40 nodes are shown" in "".join(lines)
    assert len(call("report", tmp_path, "--summary").stdout.splitlines()) > 40


def test_what_is_advised_comes_first_and_its_limits_are_drawn(tmp_path: Path) -> None:
    sites(tmp_path, 3)
    Node(tmp_path / "server", ["norm-clip"]).round([0.5])
    proposals = [
        Proposal(
            *("step.fixed", {}, {}, 1.2, "no-op", "one limit", "<best>"),
            toml=['modules = ["norm-clip"]'],
            clipped="100 % of site-2",
        ),
        Proposal("step.learnt", {}),
        Proposal("aggregate.fixed", {}, {}, 0.7, "norm-clip on the server"),
    ]
    (odd,) = [f.text for f in read_report(tmp_path).findings() if f.kind == "unlike"]
    assert odd.startswith("site-2: ")
    text = page(tmp_path, advice=Advice("Start with step.fixed.", [odd], proposals, "step.fixed"))
    (experiment,) = data_of(text)["experiments"]
    rules = {clipper["name"]: clipper["rules"] for clipper in experiment["clippers"]}
    assert rules["no-op"] == [["step.fixed", 1.2, True]]
    assert rules["norm-clip on the server"] == [["aggregate.fixed", 0.7, False]]
    said = ["Start with step.fixed.", "check its units", "start here", "modules = [", "&lt;best"]
    places = [text.index(part) for part in [*said, "100 % of site-2", 'class="chart"']]
    assert places == sorted(places)
    assert text.count("start here") == 1
    assert text.count("check its units") == 1


@pytest.mark.slow
def test_a_private_run_shows_its_budget_and_nothing_of_records(tmp_path: Path) -> None:
    """Of two clients with DP-SGD, one has the module that says so, and both have a ledger."""
    assert FILE == LEDGER
    folder, file = tmp_path / "run", tmp_path / "r.html"
    for name, modules in (("a", [["sample-clip", {}]]), ("b", [])):
        (folder / name).mkdir(parents=True)
        (folder / name / "optimizer_state_1.mpk").write_bytes(msgpack.packb({"modules": modules}))
        ledger = Ledger(8.0, 1e-5, folder / name / LEDGER, data="7654321 records, features (64,)")
        for _ in range(3):
            ledger.reserve(2.0, 0.125, 6)
    server = Checkpointer(str(folder / "server"))
    for i in (1, 2):
        server.save_metrics({"loss": 1.0 / i}, timestamp=f"{i}")
    server.save_optimizer(Optimizer(1.0), timestamp="2")
    shown = call("report", folder, "--html", file)
    assert shown.exit_code == 0, shown.stderr
    text = file.read_text()
    for part in (shown.stdout, text):
        assert "DP-SGD on a, b: norms of records" in part
        assert "b/privacy_spent.json: privacy loss for zeroing out one record" in part
        assert "18 steps at noise multiplier 2, Poisson samples at rate 0.125" in part
        assert not re.search("7654321|features", re.sub("<script.*", "", part, flags=re.S))
    assert shown.stdout.startswith("The run adds noise and records no norms")
    assert "After the last evaluation: loss 0.5." in shown.stdout
    assert call("compare", folder).exit_code == 0
    assert "data-norms" not in re.sub("<script.*", "", text, flags=re.S)
