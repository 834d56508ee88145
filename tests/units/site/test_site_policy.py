# SPDX-License-Identifier: Apache-2.0
"""A site's policy and its gate, on any engine: what they refuse, let out and say."""

import math
import os
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclip.errors import FedclipWarning
from fedclip.site import gate as gates
from fedclip.site.gate import Gate, Refused
from fedclip.site.policy import Policy

C = 0.5
MODEL = {"w": np.zeros((2, 2), "float32"), "b": np.zeros(2, "float32")}


def with_budget(folder: Path, **settings: Any) -> Policy:
    """Return a policy with a budget for four updates."""
    given = {"noise_multiplier": 2.0, "max_epsilon": 10.0, "delta": 1e-5, **settings}
    return Policy(max_norm=C, ledger=str(folder / "spent.json"), **given)


NEEDS = "[update]\nmax_norm = 0.5\n"
LEDGER = "delta = 1e-5\nledger = '/x/y'"


def written(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "needs max_norm, such as max_norm = 0.5"),
        ("update = 3", "needs max_norm"),
        ("[updates]\nmax_norm = 1", "got 'updates'; did you mean 'update'?"),
        (f"{NEEDS}[model]", "the section [update] only, got 'model'"),
        ("[update]\nmax_norm = 0", "max_norm must be a finite number > 0"),
        (f"{NEEDS}max_nrom = 1", "did you mean 'max_norm'?"),
        (f"{NEEDS}noise_multiplier = nan", "noise_multiplier must be"),
        (f"{NEEDS}allow_metrics = 'loss'", "must be a list of names of scalars, got 'loss'"),
        (f"{NEEDS}allow_metrics = ['']", "each of allow_metrics must be a string that is not"),
        (f"{NEEDS}max_epsilon = 3", "give all of them or none; delta and ledger is missing"),
        (f"{NEEDS}max_epsilon = 3\n{LEDGER}", "max_epsilon needs noise"),
        (f"{NEEDS}ledger = 'spent.json'", "ledger must be an absolute path"),
        (f"{NEEDS}max_replies = 9", "give ledger an absolute path"),
        (f"{NEEDS}max_replies_per_run = 0", "max_replies_per_run must be"),
        (f"{NEEDS}noise_multiplier = 2\nmax_epsilon = 4\n{LEDGER}", "= 2 costs 4.377"),
        ("[update", "site.toml: "),
        ("\udcff", "site.toml: "),
    ],
)
def test_what_is_no_policy_is_refused_in_words(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Policy.read(written(tmp_path, text))


@pytest.mark.skipif(sys.platform == "win32", reason="modes say nothing there")
@pytest.mark.parametrize("wrong", [0o020, 0o002, -1])
@pytest.mark.parametrize(
    "name",
    [
        *("folder", "folder/inner", "folder/inner/site.toml", "folder/inner/site.toml.lock"),
        *("links", "links/last", "link"),
    ],
)
def test_what_others_may_change_on_the_way_to_a_file_is_refused(
    name: str, wrong: int, tmp_path: Path
) -> None:
    """The law: each file, folder and link that decides what is read belongs to the site alone."""
    for folder in ("folder/inner", "links"):
        (tmp_path / folder).mkdir(parents=True)
    written(tmp_path / "folder" / "inner", NEEDS).with_name("site.toml.lock").touch(0o600)
    # A link to a link to the folder, so that neither name nor real path has all of the way.
    (tmp_path / "link").symlink_to(tmp_path / "links" / "last")
    (tmp_path / "links" / "last").symlink_to(tmp_path / "folder" / "inner")
    named, one = tmp_path / "link" / "site.toml", tmp_path / name
    assert Policy.read(named).max_norm == C
    if wrong == -1 and os.geteuid():
        pytest.skip("only root can give files away")
    if wrong == -1:
        os.chown(one, 65534, 65534, follow_symlinks=False)
    elif not one.is_symlink():
        one.chmod(one.stat().st_mode | wrong)
    if not one.is_symlink() or wrong == -1:
        with pytest.raises(ValueError, match=f"{named} is not this site's alone: .*{one.name}[;,]"):
            Policy.read(named)
    if one.is_dir() and wrong > 0 and not one.is_symlink():
        # In one like /tmp, others can not replace what is not theirs.
        one.chmod(0o1777)
        assert Policy.read(named).max_norm == C


def test_without_a_word_a_run_gets_a_thousand_replies(tmp_path: Path) -> None:
    assert Policy.read(written(tmp_path, NEEDS)).max_replies_per_run == 1000


def test_a_ledger_that_begins_is_told(tmp_path: Path, caplog: Any) -> None:
    Gate(with_budget(tmp_path)).admit("run")
    assert caplog.text.count("there is no ledger") == 1
    Gate(with_budget(tmp_path)).admit("run")
    assert caplog.text.count("there is no ledger") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="modes say nothing there")
def test_a_ledger_or_a_count_that_others_may_change_stops_the_start(tmp_path: Path) -> None:
    Gate(with_budget(tmp_path)).admit("run")
    lock, count = tmp_path / "spent.json.lock", tmp_path / "spent.json.replies"
    assert lock.stat().st_mode & 0o777 == 0o600
    for one, mode in ((lock, 0o644), (count, 0o622), (tmp_path / "spent.json", 0o666)):
        one.chmod(mode)
        with pytest.raises(ValueError, match=f"others than its owner may .* {one};"):
            Gate(with_budget(tmp_path))
        one.chmod(0o600)
    tmp_path.chmod(0o707)
    with pytest.raises(ValueError, match=f"others than its owner may change {tmp_path};"):
        Gate(with_budget(tmp_path))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ">f8"])
@pytest.mark.parametrize("size", [1e-2, 0.4, 3.0, 6e4])
def test_what_leaves_is_within_the_norm(size: float, dtype: str) -> None:
    update = {"w": np.full((3, 3), size, dtype), "b": np.array(-size, dtype)}
    sent = Gate(Policy(max_norm=C)).update(update, like=update)
    norm = math.sqrt(sum(float(np.sum(np.square(a.astype(float)))) for a in sent.values()))
    assert norm <= C
    assert norm == pytest.approx(min(C, math.sqrt(10.0) * size), rel=2e-3)
    # declearn's messages keep the bytes, and not in which order they lie.
    native = np.dtype(dtype).newbyteorder("=")
    for ours, theirs in zip(sent.items(), update.items(), strict=True):
        assert (ours[0], ours[1].dtype, ours[1].shape) == (theirs[0], native, theirs[1].shape)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_leaves_as_zeros(bad: float) -> None:
    gate = Gate(policy := Policy(max_norm=C))
    with pytest.warns(FedclipWarning, match="zeros are shared"):
        sent = gate.update({"w": np.array([1.0, bad])})
    assert not np.any(sent["w"])
    for unfit in ({"w": np.array(["a"])}, {"w": np.arange(3)}, [1.0]):
        with pytest.raises(Refused):
            gate.update(unfit)
    # Names leave in the model's order, and nobody changes a policy.
    assert [*gate.update(dict(reversed(MODEL.items())), like=MODEL)] == ["w", "b"]
    with pytest.raises(AttributeError, match="cannot be changed"):
        policy.max_norm = 9.0


STATISTICS = [
    {"bn.running_var": np.ones(3)},
    {"bn/moving_mean:0": np.ones(3)},
    {str(i): np.full(3, v) for i, v in enumerate([1.0, 0.0, 0.0, 1.0])},
]


@pytest.mark.parametrize(
    ("update", "more"),
    [
        ({"w": MODEL["w"]}, {}),
        ({**MODEL, "patient 17": np.zeros(1, "float32")}, {}),
        ({"w": MODEL["w"], "B": MODEL["b"]}, {}),
        ({"w": np.zeros(4, "float32"), "b": MODEL["b"]}, {}),
        *(
            ({**MODEL, "b": b}, {})
            for b in (np.zeros(2), np.zeros(2, "int64"), "a text of the data")
        ),
        ({}, {}),
        (None, {}),
        *(({**MODEL, **more}, more) for more in STATISTICS),
    ],
)
def test_what_has_not_the_models_form_stays_and_statistics_get_no_noise(
    update: Any, more: Any, tmp_path: Path
) -> None:
    model, gate = {**MODEL, **more}, Gate(with_budget(tmp_path))
    for let in (gate.update, gate.model):
        with pytest.raises(Refused, match="running statistics" if more else "no update of the mod"):
            let(update, model)
    # Form before charge: whatever is refused costs nothing.
    assert gate._ledger.spent == 0.0
    assert not more or Gate(Policy(max_norm=C)).update(model, model).keys() == model.keys()


def test_noise_is_on_every_value_and_never_twice_the_same() -> None:
    gate = Gate(Policy(max_norm=C, noise_multiplier=2.0))
    found = [gate.update({"w": np.full(2000, 1e6)})["w"] - C / math.sqrt(2000) for _ in range(2)]
    for noise in found:
        # Six standard deviations of the mean square, and of the mean.
        assert abs(np.mean(np.square(noise)) - 1.0) < 6 * math.sqrt(2 / 2000)
        assert abs(np.mean(noise)) < 6 / math.sqrt(2000)
    assert not np.any(found[0] == found[1])


def test_each_call_is_charged_and_none_is_refunded(tmp_path: Path) -> None:
    gate = Gate(with_budget(tmp_path))
    gate.update(MODEL)
    with pytest.raises(Refused, match="no update"):
        gate.update({"w": "no array"})
    assert [gate.update(MODEL) is not None for _ in range(3)] == [True] * 3
    for again in (gate, Gate(with_budget(tmp_path))):
        with pytest.raises(Refused, match=r"would make epsilon 11\.48, above"):
            again.update(MODEL)
    (tmp_path / "spent.json").write_text("of another program\n")
    with pytest.raises(Refused, match="ledger cannot be used"):
        gate.update(MODEL)


MIXED = {"w": np.zeros(2, "float16"), "steps": np.array(7), "mask": np.array([True, False])}


def test_whole_numbers_are_the_models(tmp_path: Path) -> None:
    gate = Gate(with_budget(tmp_path))
    trained = {"mask": ~MIXED["mask"], "steps": np.array(9), "w": np.full(2, 30.0, "float16")}
    for sent, steps in ((gate.model(trained, MIXED), 7), (gate.update(trained, MIXED), 0)):
        assert [*sent] == [*MIXED]
        assert (sent["steps"], sent["steps"].dtype) == (steps, MIXED["steps"].dtype)
        assert sent["mask"].tolist() == [bool(steps), False]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_replies_are_at_most_as_many_as_the_policy_says(data: st.DataObject) -> None:
    """The law: over any order of runs, processes, cut and restored files, no limit is passed."""
    per_run, most = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    with TemporaryDirectory() as folder:
        limits = {"max_replies_per_run": per_run, "max_replies": most}
        policy = Policy(max_norm=C, ledger=str(Path(folder, "spent")), **limits)
        file, let = Path(folder, "spent.replies"), Counter[str]()
        gate = Gate(policy)
        for step in data.draw(st.lists(st.sampled_from(["a", "b", "c", "new", "gone", "cut"]))):
            if step == "new":
                # A file that is deleted between two processes is not noticed: it reads at once.
                gates._OF_THIS_PROCESS.clear()
                refused(Gate(policy), "d")
            elif step == "gone":
                # While a process runs, it knows; one line more is counted then, or as many.
                file.unlink(missing_ok=True)
                refused(gate, "d")
            elif step == "cut" and file.exists():
                file.write_bytes(file.read_bytes()[:-5])
            if step in ("new", "gone", "cut"):
                gate = Gate(policy)
            elif not refused(gate, step):
                let[step] += 1
        assert max(let.values(), default=0) <= per_run
        assert let.total() <= most


def refused(gate: Gate, run: str) -> bool:
    try:
        gate.admit(run)
    except Refused:
        return True
    return False


def test_without_a_file_a_process_counts_its_own_runs() -> None:
    gate = Gate(Policy(max_norm=C, max_replies_per_run=2))
    assert [refused(gate, run) for run in "aaabb"] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        *((number, number) for number in (3, 0.25)),
        *((number, 0.25) for number in (np.float32(0.25), Fraction(1, 4))),
        (np.int64(7), 7),
        *((number, None) for number in (2**64, -(2**64), math.nan, math.inf, True, 1j)),
        *((other, None) for other in ("3", [3], np.zeros(1), None)),
    ],
)
def test_numbers_leave_if_they_are_named_and_plain(value: Any, sent: Any, caplog: Any) -> None:
    gate = Gate(Policy(max_norm=C, allow_metrics=["a"]))
    with caplog.at_level("INFO", "fedclip.site"):
        found = gate.metrics({"a": value, "patients": 1.0, 7: 2.0})
    assert found == ({} if sent is None else {"a": sent})
    assert {type(number) for number in found.values()} <= {int, float}
    assert "'patients'" in caplog.text


NONE = {"votes": 0, "within": 0, "clipped": 0, "zeroed": 0}


@pytest.mark.parametrize(
    ("found", "sent"),
    [
        ({"votes": 1, "within": 1}, {**NONE, "votes": 1, "within": 1}),
        ({"votes": 1, "clipped": 1}, {**NONE, "votes": 1, "clipped": 1}),
        ({"zeroed": 1, "more": 5}, {**NONE, "zeroed": 1}),
        ({"within": 1}, NONE),
        ({"votes": 17, "within": 1}, NONE),
        ({"votes": True, "within": 1.0}, NONE),
        ({"clipped": 1, "zeroed": 1}, NONE),
        ({}, NONE),
    ],
)
def test_votes_are_the_bits_that_are_known(found: Any, sent: Any) -> None:
    assert Gate(Policy(max_norm=C)).votes(found) == sent
    # Of the update before noise, they would say what the budget does not count.
    assert Gate(Policy(max_norm=C, noise_multiplier=1.0)).votes(found) == NONE
