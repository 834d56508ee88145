# SPDX-License-Identifier: Apache-2.0
"""A site's policy on Flower, attacked by an app: what has left is looked at on the wire."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from flower_site import federation, leaks, norm, policy
from hostile.hostile.client_app import ATTACKS
from hostile.hostile.server_app import MODEL

from fedclip.federation.site.policy import Policy

ALL = [*ATTACKS, "code", "metadata", "twice"]
FAILED = (2, "the app of this site has failed; nothing else leaves it")


def test_what_a_hostile_app_sends_stays_in_the_site(tmp_path: Path) -> None:
    with federation(tmp_path) as running:
        running.node(policy(tmp_path))
        huge, twice, failed = running.run("huge", "twice", "error")()
        assert not leaks(running.left())
    assert norm(huge["arrays"]) == pytest.approx(0.5, rel=1e-5)
    assert huge["metrics"] == {"num-examples": 8}
    assert norm(twice["arrays"]) <= 0.5 * (1 + 1e-6)
    assert failed == FAILED


def judge(name: str, reply: Any) -> None:
    """Check what a server has received."""
    if isinstance(reply, tuple):
        assert name not in ("honest", "huge"), reply
        assert reply[0] in (2, 6)
        return
    assert set(reply) <= {"arrays", "metrics", "fedclip"}, name
    assert set(reply.get("metrics", {})) <= {"num-examples"}, name
    assert reply.get("metrics") != {"num-examples": 666}, "a model on the web was called"
    if name == "mod":
        assert reply["fedclip"] == {"votes": 0, "within": 0, "clipped": 1, "zeroed": 0}
        assert sum((a.astype(float) ** 2).sum() for a in reply["arrays"].values()) <= 0.25
    elif "arrays" in reply:
        assert norm(reply["arrays"]) <= 0.5 * (1 + 1e-6), name
        assert reply["arrays"]["steps"] == MODEL["steps"], name


@pytest.mark.soak
@pytest.mark.parametrize("isolation", ["subprocess", "process"])
def test_every_attack(tmp_path: Path, isolation: str) -> None:
    with federation(tmp_path) as running:
        _, address = running.node(policy(tmp_path), "--isolation", isolation)
        if isolation == "process":
            running.start(
                "apps", "flower-superexec", "--insecure", "--runtime-api-address", address
            )
        got = running.run(*ALL)()
        assert not leaks(running.left())
    for name, reply in zip(ALL, got, strict=True):
        judge(name, reply)


@pytest.mark.soak
def test_without_the_policy_it_leaves(tmp_path: Path) -> None:
    with federation(tmp_path) as running:
        running.node(None)
        huge, *_ = running.run("huge", "error", "twice")()
        assert len(leaks(running.left())) >= 3
    assert norm(huge["arrays"]) > 1e6


def budget(folder: Path, updates: int) -> Path:
    """Write a policy with a budget for so many updates."""
    one = {"noise_multiplier": 20.0, "delta": 1e-5, "ledger": str(folder / "ledger.json")}
    cost = Policy(max_norm=0.5, max_epsilon=100.0, **one).cost
    return policy(folder, max_epsilon=(cost(updates) + cost(updates + 1)) / 2, **one)


def paid(replies: list[Any]) -> int:
    """Return how many updates were let out; check that the others say why they were not."""
    refused = [reply for reply in replies if isinstance(reply, tuple)]
    assert all(said.startswith("this site's budget is spent") for _, said in refused)
    return len(replies) - len(refused)


@pytest.mark.soak
def test_two_runs_on_two_nodes_spend_one_budget(tmp_path: Path) -> None:
    rules = budget(tmp_path, 5)
    ledger = tmp_path / "ledger.json"
    with federation(tmp_path) as running:
        nodes = [running.node(rules, name=name)[0] for name in ("first", "second")]
        begun = tmp_path / "begun.json"
        shutil.copy(ledger, begun)
        runs = [running.run(*["huge"] * 4, name=name) for name in ("one", "two")]
        replies = [reply for received in runs for reply in received()]
        assert paid(replies) == 5
        # Noise of 20 * 0.5 on each of ten numbers.
        assert all(norm(reply["arrays"]) > 1 for reply in replies if isinstance(reply, dict))
        # Put back while the nodes run: they know what they have spent.
        shutil.copy(begun, ledger)
        assert paid(running.run("honest", "honest", name="three")()) == 0
        for node in nodes:
            node.kill()
            node.wait()
    with federation(tmp_path / "again") as running:
        running.node(rules)
        assert paid(running.run("honest", name="four")()) == 0
        assert not leaks(running.left())
