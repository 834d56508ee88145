# SPDX-License-Identifier: Apache-2.0
"""`fedclip check` warns of limits that should follow the norms, and never can."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclip.tools.check import check_config

CONFIG = """
[network]
[data]
[optim]
aggregator = "{aggregator}"
[optim.client_opt]
lrate = 0.1
modules = {client}
[optim.server_opt]
lrate = 1.0
modules = {server}
[run]
rounds = 5
[run.register]
min_clients = 1
max_clients = 3
[run.training]
batch_size = 8
{training}
"""


def notes(
    folder: Path,
    client: str = "[]",
    server: str = "[]",
    training: str = "n_steps = 10",
    aggregator: str = "averaging",
) -> str:
    file = folder / "config.toml"
    parts = {"client": client, "server": server, "training": training, "aggregator": aggregator}
    file.write_text(CONFIG.format(**parts))
    return "\n".join(f"{f.where} {f.message}" for f in check_config(file).findings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"client": '[["zscore-clip", {warmup = 200}]]'}, "zscore-clip is still warming up"),
        ({"server": '["auto-clip"]'}, "auto-clip is still warming up when this run ends, after 5"),
        ({"client": '[["adaptive-clip", {every = 51}]]'}, "every = 51, and the run has 50 steps"),
        (
            {"client": '[["adaptive-clip", {min_norm = 2.0, max_norm = 2.0}]]'},
            "min_norm = max_norm = 2 fixes the limit",
        ),
        # 3 clients of 50 steps each.
        (
            {
                "client": '[["zscore-clip", {shared = true, warmup = 151}]]',
                "server": '[["zscore-clip-server", {warmup = 151}]]',
            },
            "still warming up when this run ends, after 150 steps of all clients",
        ),
        (
            {
                "client": '[["adaptive-clip", {shared = true, every = 151}]]',
                "server": '[["adaptive-clip-server", {every = 151}]]',
            },
            "every = 151, and the run has 150 steps of all clients",
        ),
        ({"client": '["normalize", "mad-clip"]'}, "mad-clip comes after normalize"),
        (
            {
                "client": '["update-clip-client"]',
                "server": '[["update-clip-server", {start_norm = 1.0, learning_rate = 0.0}]]',
                "aggregator": "clipped-averaging",
            },
            "learning_rate = 0 fixes the bound",
        ),
    ],
)
def test_a_setting_that_never_adapts_is_noted(
    tmp_path: Path, given: dict[str, str], said: str
) -> None:
    assert said in notes(tmp_path, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"client": '["zscore-clip", "norm-clip", ["adaptive-clip", {every = 50}]]'},
        # As many steps as the data give.
        {"client": '[["zscore-clip", {warmup = 200}]]', "training": "n_epoch = 1"},
        # All clients' norms count.
        {"client": '[["auto-clip", {shared = true}]]', "server": '["auto-clip-server"]'},
        {
            "client": '[["adaptive-clip", {shared = true, every = 150}]]',
            "server": '[["adaptive-clip-server", {every = 150}]]',
        },
    ],
)
def test_others_are_not(tmp_path: Path, given: dict[str, str]) -> None:
    said = notes(tmp_path, **given)
    assert not any(words in said for words in ("warming up", "never", "fixes"))


def test_the_first_round_of_a_shared_clipper_is_always_warm_up(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    given = {"client": '[["mad-clip", {shared = true}]]', "server": '["mad-clip-server"]'}
    assert "warming up" not in notes(tmp_path, **given, training="n_steps = 99")
    file.write_text(file.read_text().replace("rounds = 5", "rounds = 1"))
    assert any("mad-clip is still warming up" in f.message for f in check_config(file).findings)
