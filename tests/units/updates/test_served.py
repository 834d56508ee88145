# SPDX-License-Identifier: Apache-2.0
"""Update clipping for any engine: flat messages, and a server whose state is in a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedclip.cli.privacy import read_spent
from fedclip.core.records import SERVED
from fedclip.errors import StateError
from fedclip.report import read_report
from fedclip.updates.client import UpdateClient
from fedclip.updates.protocol import (
    Participation,
    Reply,
    SentBound,
    bound_from,
    bound_to,
    reply_from,
    reply_to,
)
from fedclip.updates.store import PersistentServer, client_of, read, server_of
from fedclip.updates.votes import is_vote, one_hot

MODEL, DEEP = {"w": np.zeros(3)}, "[" * 10**5
NOISE: dict[str, Any] = {
    "start_norm": 1.0,
    "noise_multiplier": 2.0,
    "expected_clients": 2,
    "generator": "insecure",
    "seed": 1,
}


def rounds(served: PersistentServer, count: int) -> list[Any]:
    replies = [Reply({"w": np.full(3, 0.1)}, votes=1, within=1)] * 2
    return [
        served.close(replies, MODEL).average["w"].tolist()
        for _ in range(count)
        if not served.open(Participation(3, 9)).stop
    ]


def test_a_reply_comes_through_and_one_that_can_not_be_counts_as_zeros() -> None:
    reply = Reply(MODEL, 1, 0, clipped=1, steps=5, sender="a", bins=one_hot(3.0, clipped=True))
    said = json.loads(json.dumps(reply_to(reply)))
    assert said["bin"] == 7
    assert reply_from(MODEL, said, "a") == reply
    # An older server names no bins, and gets none; an older client's vote has none.
    older = {k: v for k, v in bound_to(SentBound(1.0)).items() if k not in ("bins", "only_votes")}
    plain = reply_to(UpdateClient().clip({"w": np.array([3.0])}, bound_from(older), steps=1))
    assert "bin" not in plain
    assert is_vote(1, 0, reply_from({}, plain).bins)
    for wrong in (None, {}, 3, {**said, "votes": True}, {**said, "votes": 1.0}, {**said, "x": 1}):
        assert "the client has no update clipping" in reply_from(MODEL, wrong, "a").fault
    served = PersistentServer({"start_norm": 1.0})
    served.open()
    closed = served.close([reply_from(MODEL, {**said, "votes": 10**9}, "a")], MODEL)
    assert closed.record["share"] is None


@pytest.mark.parametrize("more", [{}, {"separation": 3, "noise": "banded", "rounds": 9}])
def test_a_server_that_was_killed_goes_on(more: dict[str, Any], tmp_path: Path) -> None:
    whole = PersistentServer({**NOISE, **more}, tmp_path / "whole")
    told = rounds(whole, 6)
    for part in (2, 2, 2):
        served = PersistentServer({**NOISE, **more}, tmp_path / "parts")
        now = rounds(served, part)
        served.open(Participation(3, 9))  # a bound that was sent, and no replies
        del served
    kept = read(tmp_path / "parts" / SERVED)
    assert kept.rounds[-1]["round"] == 6
    assert (now == told[4:]) != bool(more)
    # Each of three has sent a bound that nobody answered, or begun a schedule.
    assert kept.rounds[-1]["epsilon"] > whole.rounds[-1]["epsilon"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"settings": 1, "state": {}, "rounds": []}', "\0", DEEP]
)
def test_a_file_that_is_damaged_is_not_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / SERVED).write_text(text)
    with pytest.raises(StateError, match="damaged"):
        PersistentServer(NOISE, tmp_path)
    assert (tmp_path / SERVED).read_text() == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("bound", x) for x in (0.0, -1.0, float("nan"), float("inf"), "1", None, True)],
        *[("scope", x) for x in ("layers", "{}", "[", 3, None)],
        *[("adaptive", 1), ("private", None), ("steps", "no"), ("round", 0), ("round", 1.5)],
        *[("stop", None), ("stop", 0), ("fedclip", 1)],
    ],
)
def test_a_message_comes_through_and_one_that_can_not_be_is_refused(name: str, value: Any) -> None:
    for scope in ("global", ["a.*", "*"], {"head": 0.5, "*": 1.0}):
        sent = SentBound(0.25, False, True, scope, 7, "why", True)
        assert bound_from(json.loads(json.dumps(bound_to(sent)))) == sent
        assert all(isinstance(value, str | int | float | bool) for value in bound_to(sent).values())
    with pytest.raises(ValueError, match="not that of update clipping"):
        bound_from(bound_to(SentBound(1.0)) | {name: value})


def test_one_server_uses_a_folder_and_writes_before_it_releases(tmp_path: Path) -> None:
    served = PersistentServer(NOISE, tmp_path)
    with pytest.raises(OSError, match="give another federation another folder"):
        PersistentServer(NOISE, tmp_path)
    rounds(served, 1)
    (tmp_path / f"{SERVED}.new").mkdir()
    with pytest.raises(OSError, match=SERVED):
        rounds(served, 1)
    served.leave()
    # What was spent is not forgotten by settings without noise.
    with pytest.raises(StateError, match="has spent a privacy budget"):
        PersistentServer({"start_norm": 1.0}, tmp_path)


@pytest.mark.parametrize("settings", [NOISE, {"start_norm": 1.0}, {**NOISE, "learning_rate": 0.0}])
def test_reports_and_accounts_read_the_file(settings: dict[str, Any], tmp_path: Path) -> None:
    served = PersistentServer(settings, tmp_path / "server")
    rounds(served, 3)
    report = read_report(tmp_path)
    assert report.servers == {"server"}
    shown = [row.record for row in report.rows]
    assert [(r.limit, r.steps) for r in shown] == [(r["bound"], 2) for r in served.rounds]
    if settings.get("noise_multiplier"):
        (found,) = read_spent(tmp_path / "server" / SERVED)
        assert found.accountant.epsilon() == served.rounds[-1]["epsilon"] > 0
    else:
        assert "the last limit was" in report.in_words()[0]
        with pytest.raises(ValueError, match="shows no spent"):
            [*read_spent(tmp_path)]


@pytest.mark.parametrize("make", [server_of, client_of, PersistentServer])
def test_settings_and_folders_that_are_refused(make: Any, caplog: Any) -> None:
    with pytest.raises(TypeError, match="did you mean 'noise_multiplier'"):
        make({"noise_multiplyer": 1.0})
    for folder in ("result", "", "../result"):
        # Where a server starts would decide which ledger it reads.
        with pytest.raises(ValueError, match="folder must be an absolute path"):
            PersistentServer({}, folder)
    for settings in ({}, NOISE):
        assert "noise without a folder" not in caplog.text
        PersistentServer(settings)
    assert "noise without a folder" in caplog.text
