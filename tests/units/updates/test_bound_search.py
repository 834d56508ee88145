# SPDX-License-Identifier: Apache-2.0
"""`update-clip-server` finds a bound where nobody knows how large updates are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from declearn.optimizer import Optimizer
from federation_helpers import Clients, Server, norm

import fedclip
from fedclip.errors import StateError
from fedclip.updates.bound import FIRST, BoundRule, Search, share_within

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_round_left_open")]

CLIPPED = {"name": "clipped-averaging"}
ADAPTIVE: list[Any] = ["update-clip-client"]
RULE = BoundRule(0.5, 0.2, 1e-6, 1e4)


def play(rng: Any, times: float, spread: float, m: int, noise: float, rounds: int) -> float:
    """Return how many times too high the bound is after so many rounds."""
    bound, search = FIRST, Search()
    median = FIRST / times
    after: Any = (bound, search, False)
    for _ in range(rounds):
        norms = median * np.exp(spread * rng.normal(size=m))
        within = int((norms <= after[0]).sum())
        drawn = noise * m * float(rng.normal())
        share = share_within(m, within, m if noise else None, drawn)
        after = RULE.after(after[0], share, after[1])
    return float(after[0] / median)


CROWDS = [(0.0, 10, 0.1), (0.25, 20, 0.1), (0.5, 100, 0.1), (0.25, 1000, 0.05), (0.25, 5, 0.0)]


@pytest.mark.parametrize(
    ("times", "crowd"),
    [
        (times, CROWDS[(i + j) % 5])
        for i, times in enumerate([0.01, 0.1, 1, 10, 100])
        for j in (0, 2)
    ],
)
def test_within_a_factor_of_two_after_ten_rounds(
    times: float, crowd: tuple[float, int, float]
) -> None:
    """In 95 % of 1,000 searches from up to 100 times too high or too low."""
    rng = np.random.default_rng(7)
    found = [play(rng, times, *crowd, 10) for _ in range(1000)]
    good = sum(0.5 <= ratio <= 2.0 for ratio in found)
    assert good >= 950, good


def server_of(**config: Any) -> Server:
    return Server([("update-clip-server", config)], CLIPPED)


NOISE: dict[str, Any] = {"noise_multiplier": 1e-6, "expected_clients": 4, "bits_noise": 1e-5}


@pytest.mark.parametrize(("noise", "first"), [({}, 1e-3), (NOISE, 0.0)], ids=["none", "noise"])
def test_no_noise_is_released_that_is_as_large_as_a_bound_that_is_too_high(
    noise: dict[str, Any], first: float
) -> None:
    server = server_of(**noise)
    module: Any = server.optim.modules[0]
    clients = Clients(4, ADAPTIVE, CLIPPED)
    released = []
    for _ in range(10):
        bound = module.bound
        aux = server.start()
        out = server.finish([clients.round(i, aux, np.array([1e-3, 0.0])) for i in range(4)])
        released.append((bound, norm(out)))
    assert [bound for bound, _ in released[:3]] == pytest.approx([0.1, 0.025, 0.00625])
    assert [size for _, size in released[:3]] == pytest.approx([first] * 3)
    # From there on, all are: the bound was too low once, and the updates are near it.
    assert sum(size > 5e-4 for _, size in released) >= 3
    assert 5e-4 <= module.bound <= 2e-3
    assert module.search is None


def test_rounds_of_a_search_are_charged() -> None:
    server = server_of(noise_multiplier=1.0, expected_clients=4, generator="insecure", seed=1)
    module: Any = server.optim.modules[0]
    clients = Clients(4, ADAPTIVE, CLIPPED)
    for i in range(3):
        aux = server.start()
        server.finish([clients.round(j, aux, np.array([1e-3])) for j in range(4)])
        assert module.budget.accountant.rounds == i + 1


def test_a_search_is_part_of_the_state() -> None:
    sizes = [2.0, 3.0, 5.0]

    def go(server: Server, rounds: int) -> list[float]:
        clients, bounds = Clients(3, ADAPTIVE, CLIPPED), []
        for _ in range(rounds):
            aux = server.start()
            server.finish([clients.round(i, aux, np.array([s])) for i, s in enumerate(sizes)])
            bounds.append(server.optim.modules[0].bound)
        return bounds

    whole = go(server_of(), 9)
    for cut in range(1, 9):
        first, second = server_of(), server_of()
        start = go(first, cut)
        second.optim.set_state(first.optim.get_state())
        assert start + go(second, 9 - cut) == whole
    # A state that says nothing of a search goes on without one.
    old = {"bound": 0.3, "round": 5, "spent": []}
    module = fedclip.UpdateClipServer()
    module.set_state(old)
    assert module.search is None
    assert module.get_state() == {**old, "search": None, "evidence": 0.0}


@pytest.mark.parametrize(
    "search", [0, "search", [], [1.0, 1], [9.0, 1, False], [-1.0, 1, False], [1.0, 3, True]]
)
def test_a_search_that_can_not_be(search: Any) -> None:
    module = fedclip.UpdateClipServer()
    before = module.get_state()
    with pytest.raises(StateError, match="'search' must be"):
        module.set_state({"bound": 1.0, "round": 1, "spent": [], "search": search})
    assert module.get_state() == before


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"start_norm": "serach"}, "start_norm must be one of 'search'.*did you mean 'search'"),
        ({"learning_rate": 0}, "learning_rate=0 fixes the bound"),
        ({"min_norm": 2.0, "max_norm": 1.0}, "within"),
    ],
)
def test_parameters(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fedclip.UpdateClipServer(**config)


def test_it_is_the_default_and_starts_within_its_bounds() -> None:
    assert fedclip.UpdateClipServer().start_norm == "search"
    assert fedclip.UpdateClipServer().bound == FIRST
    assert fedclip.UpdateClipServer(min_norm=0.5).bound == 0.5
    assert fedclip.UpdateClipServer(start_norm=0.1).search is None
    optim = Optimizer(lrate=1.0, modules=["update-clip-server"])
    assert optim.get_config()["modules"][0][1]["start_norm"] == "search"


TOML = """
aggregator = "clipped-averaging"
[client_opt]
lrate = 0.1
modules = ["update-clip-client"]
[server_opt]
lrate = 1.0
modules = [["update-clip-server", {noise_multiplier = 1.0, expected_clients = CLIENTS START}]]
"""


@pytest.mark.parametrize(
    ("clients", "start", "found"), [(5, "", True), (10, "", False), (5, ", start_norm = 1", False)]
)
def test_check_says_that_noise_makes_a_search_long(
    tmp_path: Any, clients: int, start: str, found: bool
) -> None:
    from fedclip.cli.check.configuration import check_config

    path = tmp_path / "optim.toml"
    path.write_text(TOML.replace("CLIENTS", str(clients)).replace("START", start))
    check = check_config(path)
    assert check.ok, [f.message for f in check.problems]
    said = [f.message for f in check.findings if "too much for a quick search" in f.message]
    assert bool(said) == found
