# SPDX-License-Identifier: Apache-2.0
"""Model cards: what a run was, as far as its folder knows, whatever its names are."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import ended, free_port
from markdown_it import MarkdownIt
from quickruns import SITES, write_config, write_sites
from report_runs import Node, call, large_run
from test_served import NOISE, rounds

from fedclip import NormClip, UpdateClipServer
from fedclip.federation.update.served import Served
from fedclip.report import number
from fedclip.tools.card import ABOUT
from fedclip.tools.exposure import RELEASED

pytest.importorskip("jinja2")

NOISY = '[["update-clip-server", {noise_multiplier = 3.0, expected_clients = 3, delta = 1e-3}]]'
PRIVACY = "[run.privacy]\nbudget = [3.0, 1e-3]\nsclip_norm = 0.5\n"
HOSTILE = (
    *("<script>alert(1)<", "<!-- x", "&lt;b&gt;", "{{ 7*7 }}", "\x1b[31mred", "a\nb\n# head"),
    *(
        "[x](javascript:1)",
        "![i](x)",
        "`code`",
        "*b* _i_ ~~s~~",
        "a|b\\|c\\",
        "www.evil.org",
        "---",
    ),
    *("# head", "> quote", "http:\\\\evil.org", "1. one", "$x$"),
)


def card_of(folder: Path) -> str:
    done = call("report", folder, "--card", "-")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def simulated(folder: Path, **changes: Any) -> Path:
    write_sites(folder)
    done = call("simulate", write_config(folder / "config.toml", **changes), "--seed", 3)
    assert done.exit_code == 0, done.stderr
    return folder / "out" / "simulated"


def test_a_card_says_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    out = simulated(tmp_path)
    said = card_of(out)
    report = json.loads(call("report", out, "--json").stdout)
    for site, records in SITES.items():
        assert f"| {site} | {records} |" in said
    for row in report["rows"]:
        if row["module"] == "update-clip-client":
            share = f"{row['clipped_share']:.0%}"
            line = f"| update-clip-client | {row['round']} | {number(row['limit'])} | {share} |"
            assert line in said
    last = {c["metric"]: number(c["points"][-1][1]) for c in report["curves"] if c["node"] == "a"}
    assert f"| a | {' | '.join(last.values())} |" in said
    assert "- Model: sklearn\\_sgd, 5 values\n- Rounds recorded: 3\n- Rounds planned: 3" in said
    assert (
        f"- Command: fedclip simulate {tmp_path / 'config.toml'} --seed 3".replace("_", "\\_")
        in said
    )
    assert f"declearn {call('doctor').stdout.split('declearn')[1].split()[0]}," in said
    assert "None: no noise with a budget was added." in said
    assert "update: clipped-averaging: the L2 norm is at most the bound C" in said


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("noisy"), server=NOISY)


def test_with_noise_the_budget_is_there_and_what_it_does_not_cover(noisy: Path) -> None:
    out = noisy
    (found,) = json.loads(call("privacy", "spent", out, "--json").stdout)
    epsilon = found["epsilons"]["closed form"]
    said = card_of(out)
    line = f"| server | client | {epsilon:.4g} | closed form | 0.001 | add-remove | - |"
    assert line in said
    for text in RELEASED:
        assert f"- {text}" in said
    # Of norms and counts nothing is shown, and of the bounds all.
    assert "%" not in said
    assert "not shown: no noise covers norms" in said
    exported = call("privacy", "spent", out, "--csv", "-").stdout
    rows = [*csv.DictReader(io.StringIO(exported))]
    assert [row["steps"] for row in rows] == ["1"] * 3
    assert float(rows[-1]["epsilon"]) == epsilon
    for row in rows:
        bound = number(float(row["bound"]))
        assert f"| update-clip-client | {row['turn']} | {bound} | not shown |" in said


@pytest.mark.parametrize("spoil", ["none", "other", "damaged", "old"])
def test_what_is_not_known_is_not_guessed(spoil: str, noisy: Path, tmp_path: Path) -> None:
    out = shutil.copytree(noisy, tmp_path / "out")
    file = out / ABOUT
    match spoil:
        case "none":
            file.unlink()
        case "other":
            file.write_text(json.dumps({**json.loads(file.read_text()), "places": 3}))
        case "damaged":
            file.write_text("[" * 90_000)
        case "old":
            os.utime(file, (1, 1))
    said = card_of(out)
    for text in ("Command: not known", "Versions: fedclip not known", "| a | not known |"):
        assert text in said
    assert "- aggregator: not known" in said
    assert f"- {RELEASED[0]}" in said


def test_what_evaluations_with_central_noise_cover_is_not_shown_site_by_site(
    noisy: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(noisy, tmp_path / "out")
    (out / ABOUT).unlink()
    file = out / "server" / "optimizer_config.json"
    kept = json.loads(file.read_text())
    kept["modules"][0][1] |= {"evaluation_share": 0.2, "loss_bound": 3.0}
    file.write_text(json.dumps(kept))
    said = card_of(out)
    assert "are covered for each client" in said
    assert "and their metrics" not in said
    metrics = said.partition("## Metrics by site")[2]
    assert "| server |" in metrics
    assert not [site for site in SITES if f"| {site} |" in metrics]
    assert "noise covers their mean alone" in metrics


@pytest.mark.slow
def test_a_card_of_dp_sgd_tells_nothing_of_records(tmp_path: Path) -> None:
    write_sites(tmp_path)
    changes = {"aggregator": '"averaging"', "client": '["sample-clip"]', "server": "[]"}
    file = write_config(
        tmp_path / "config.toml", **changes, training="n_epoch = 1", more=PRIVACY, port=free_port()
    )
    ended("-m", "fedclip", "quickrun", str(file))
    said = card_of(tmp_path / "out")
    for site, records in SITES.items():
        assert f"| {site} | not shown |" in said
        assert f"{records} records" not in said + (tmp_path / "out" / ABOUT).read_text()
        assert f"| {site}/privacy\\_spent.json | record |" in said
    assert "each record is clipped to 0.5" in said
    (tmp_path / "out" / "b" / "privacy_spent.json").unlink()
    assert "b trains by DP-SGD, and what it has spent is not known" in card_of(tmp_path / "out")


def test_a_server_on_another_engine_has_a_card(tmp_path: Path) -> None:
    served = Served(NOISE, tmp_path / "server")
    rounds(served, 3)
    said = card_of(tmp_path)
    assert f"| server | client | {served.rounds[-1]['epsilon']:.4g} | closed form |" in said
    assert "- update-clip-server draws its noise from a generator that can be predicted" in said
    assert "what else the engine sends, is not known" in said
    exported = call("privacy", "spent", tmp_path, "--csv", "-").stdout
    rows = [*csv.DictReader(io.StringIO(exported))]
    assert [float(row["bound"]) for row in rows] == [r["bound"] for r in served.rounds]
    assert [float(row["epsilon"]) for row in rows] == [r["epsilon"] for r in served.rounds]


def test_noise_of_clients_protects_against_the_server_in_secure_sums(tmp_path: Path) -> None:
    noise = {"noise_multiplier": 3.0, "expected_clients": 3, "honest": 1.0, "max_norm": 1.0}
    server = Node(tmp_path / "server", [UpdateClipServer(0.5, noise_at="clients", **noise)])
    server.optimizer.modules[0].open()
    server.optimizer.modules[0].count(0, 0, 3)
    server.checkpointer.save_optimizer(server.optimizer, timestamp="01")
    Node(tmp_path / "a", [NormClip()]).round([1.0])
    said = card_of(tmp_path)
    assert "without secure aggregation, it has seen each update with the noise of one" in said
    assert "The server is trusted" not in said


def test_names_do_nothing_to_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "<b>[x](y)`|"
    large_run(folder, 2, len(HOSTILE), name=HOSTILE.__getitem__)
    facts = dict.fromkeys(("command", "rounds"), HOSTILE[0])
    facts |= {"places": [*HOSTILE], "exposed": [*HOSTILE], "versions": {n: n for n in HOSTILE}}
    (folder / ABOUT).write_text(json.dumps({**facts, "records": dict.fromkeys(HOSTILE, 1)}))
    plain = card_of(large_run(tmp_path / "plain", 2, len(HOSTILE), name="s{}".format))
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    said = card_of(folder)
    tokens, usual = ([*flat(parser.parse(text))] for text in (said, plain))
    known = {token.type for token in usual}
    assert {token.type for token in tokens} <= known
    heads = [[t.type for t in found].count("heading_open") for found in (tokens, usual)]
    assert heads[0] == heads[1] == 8
    shown = "".join(t.content for t in tokens if t.type == "text")
    for name in HOSTILE:
        assert "".join(c if c.isprintable() else repr(c)[1:-1] for c in name) in shown
    widths = {line.count("|") - line.count("\\|") for line in said.splitlines() if "| " in line}
    assert widths <= {3, 5, 4}


def flat(tokens: Any) -> Any:
    for token in tokens:
        yield token
        yield from token.children or ()


def test_a_card_is_of_one_run(tmp_path: Path) -> None:
    for name in "ab":
        large_run(tmp_path / name, 2, 2)
    done = call("report", tmp_path, "--card", "-")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "a card is of one run, and these are 2: name one" in done.stderr
    assert call("report", tmp_path / "a", "--card", "-", "--json").exit_code == 2
    assert call("report", tmp_path / "a", "--card", tmp_path / "card.md").exit_code == 0
    assert (tmp_path / "card.md").read_text().startswith("# Model card: a\n")


@pytest.mark.slow
def test_the_page_of_another_engine_has_its_budget(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    rounds(Served(NOISE, tmp_path / "server"), 1)
    page = tmp_path / "page.html"
    assert call("report", tmp_path, "--html", page).exit_code == 0
    assert "what adding or removing one client may change" in page.read_text(encoding="utf-8")
