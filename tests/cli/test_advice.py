# SPDX-License-Identifier: Apache-2.0
"""Which limit is advised, and why: by the norms and the metrics of each site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from declearn.optimizer import Optimizer
from report_runs import Node

from fedclip.cli.suggest import advised
from fedclip.report import norms, read_report
from fedclip.report.findings import Advice
from fedclip.report.norms import FEW


def advice_of(folder: Path) -> Advice:
    return advised(read_report(folder), "")


CLIENTS = [f"site-{letter}" for letter in "abcde"]


Scale = Callable[[int, int], float]


def a_run(folder: Path, steps: Scale, updates: Scale | None) -> Advice:
    """Return the advice after ten rounds of eight steps, given the scale of norms.

    It depends on the round and on the client, of which the last one is the odd one.
    """
    rng, looks = np.random.default_rng(0), ["no-op", *(["update-norms"] if updates else [])]
    nodes = [Node(folder / name, looks) for name in CLIENTS]
    for round_ in range(1, 11):
        for place, node in enumerate(nodes):
            norms = steps(round_, place) * rng.lognormal(0, 0.3, 8)
            update = updates(round_, place) * rng.lognormal(0, 0.2) if updates else 0.0
            node.round(norms, update=update, save=round_ == 10)
    return advice_of(folder)


def odd(times: float) -> Scale:
    return lambda round_, place: times if place == 4 else 1.0


def in_round(chosen: int, times: float) -> Scale:
    return lambda round_, place: times if (round_, place) == (chosen, 2) else 1.0


@pytest.mark.parametrize(
    ("steps", "updates", "start", "said"),
    [
        (odd(1.0), odd(1.0), "", "is unlikely to help"),
        (odd(2.5), odd(1.4), "", "is unlikely to help"),
        (odd(100.0), odd(20.0), "step.fixed", "site-e: the norms of its steps are"),
        (odd(1.0), odd(3.0), "update.adaptive", "The norms of the updates of site-e are"),
        (odd(100.0), odd(1.0), "step.fixed", "check its units"),
        (lambda _, place: {4: 100.0, 3: 50.0}.get(place, 1.0), None, "step.fixed", "d are up to"),
        (odd(100.0), None, "step.fixed", "the norms of updates were not measured"),
        (odd(0.01), odd(1.0), "", "times smaller than those of"),
        (in_round(7, 1000.0), odd(1.0), "step.fixed", "site-c: a norm of up to"),
    ],
)
def test_what_comes_first_and_why(
    tmp_path: Path, steps: Scale, updates: Scale | None, start: str, said: str
) -> None:
    advice = a_run(tmp_path, steps, updates)
    assert advice.start == start
    assert said in " ".join([advice.answer, *advice.findings])
    first = advice.proposals[0]
    assert first.name == (start or "step.fixed")
    if first.limit is not None:
        # By the median client, whatever the odd one does.
        assert 1.0 < first.limit < 3.0
    else:
        assert 0.5 < first.plugins["server_opt"][1]["start_norm"] < 2.0


def saturated(round_: int, step: int) -> float:
    """Return the scale of a step where a model saturates: one of eight has a gradient at all."""
    return 25.0 if step == round_ % 8 else 1e-3


def spoilt(round_: int, place: int) -> float:
    """Return the scale of steps where a spike at the third client spoils the model for all."""
    return 3e3 if (round_, place) == (5, 2) else 500.0 if round_ > 5 else 1.0


def a_run_of(folder: Path, scale: Callable[[int, int, int], float], clients: int = 5) -> Advice:
    """Return the advice after ten rounds, given the scale of each step by round, client, step."""
    rng, nodes = np.random.default_rng(1), [Node(folder / name, ["no-op"]) for name in CLIENTS]
    for round_ in range(1, 11):
        for place, node in enumerate(nodes[:clients]):
            scales = [scale(round_, place, step) for step in range(8)]
            node.round(np.array(scales) * rng.lognormal(0, 0.3, 8), save=round_ == 10)
    return advice_of(folder)


def test_an_outlier_whose_gradients_saturate_is_found_by_its_largest_norms(tmp_path: Path) -> None:
    advice = a_run_of(tmp_path, lambda r, place, s: saturated(r, s) if place > 2 else 1.0)
    assert advice.odd == ["site-d", "site-e"] or advice.odd == ["site-e", "site-d"]
    assert not any("smaller" in text for text in advice.findings)
    first = advice.proposals[0]
    assert (advice.start, first.limit and first.limit > 1.0) == ("step.fixed", True)
    others = [first.shares[name] for name in CLIENTS[:3]]
    assert max(others) <= min(first.shares["site-d"], first.shares["site-e"])


def test_a_limit_against_a_spike_is_that_of_the_rounds_before_it(tmp_path: Path) -> None:
    advice = a_run_of(tmp_path, lambda r, place, s: spoilt(r, place))
    first = advice.proposals[0]
    assert (advice.start, 1.0 < (first.limit or 0.0) < 5.0) == ("step.fixed", True)
    assert "site-c" in advice.answer
    assert max(share for name, share in first.shares.items() if name != "site-c") < 0.1


@pytest.mark.parametrize(
    ("own", "matrix", "said"),
    [
        ({"loss": 0.4, "accuracy": 0.9}, [[5, 5], [5, 5]], "Clipping is unlikely to help here"),
        ({"loss": 8.47, "accuracy": 0.9}, [[5, 5], [5, 5]], "To see whether a limit helps"),
        ({"loss": 0.4, "accuracy": 0.0}, [[0, 5], [5, 0]], "site-c far worse than other clients"),
        (
            {"loss": 0.4, "accuracy": 0.9},
            [[9, 1], [0, 0]],
            "The validation data of site-c has only one class",
        ),
    ],
)
def test_the_metric_of_each_site_is_looked_at(
    tmp_path: Path, own: dict[str, float], matrix: list[list[int]], said: str
) -> None:
    a_run(tmp_path, odd(1.0), odd(1.0))
    server = Node(tmp_path / "server", []).checkpointer
    for name in CLIENTS:
        found = own if name == "site-c" else {"loss": 0.4, "accuracy": 0.9}
        cells = np.array(matrix if name == "site-c" else [[9, 1], [1, 9]])
        server.save_metrics({**found, "confusion": cells}, f"metrics_{name}", timestamp="1")
    server.save_metrics({"loss": 0.5}, timestamp="1")
    server.save_optimizer(Optimizer(lrate=1.0), timestamp="1")
    advice = advice_of(tmp_path)
    assert said in " ".join([advice.answer, *advice.findings])
    assert advice.start == ""


def test_the_page_has_the_thresholds() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "suggest.md").read_text(encoding="utf-8")
    for text in (
        f"by steps is {norms._ODD['step']:g} or more",
        f"by updates is {norms._ODD['update']:g} or more",
        f"(without the number of steps: {norms._ODD_ALONE:g};",
        f"when another is an outlier by steps: {norms._ODD['step']:g})",
        f"at least {norms._SMALL:g} times smaller",
        f"largest norm is {norms._SPIKE:g} times",
        f"fewer than {FEW['step']} norms, or by fewer than {FEW['update']} updates",
    ):
        assert text in page


def test_a_model_that_has_diverged(tmp_path: Path) -> None:
    a_run(tmp_path, lambda round_, place: 2.0**round_, None)
    Node(tmp_path / "server", []).round([], metrics={"loss": float("nan")})
    advice = advice_of(tmp_path)
    assert advice.start == "step.fixed"
    assert "has diverged" in advice.answer
    # By the first round: what came later is of no use.
    assert 1.5 < (advice.proposals[0].limit or 0.0) < 3.0
