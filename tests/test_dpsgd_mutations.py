# SPDX-License-Identifier: Apache-2.0
"""What would break the privacy of DP-SGD makes a test fail that is named here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Replaces texts of a file, which then fails a test."""

    file: str
    texts: dict[str, str]
    test: str


MUTATIONS = {
    "a bound for each tensor": Mutation(
        "clipping.py",
        {
            'resolve("global" if whole else': 'resolve("tensor" if whole else',
            "limit = bound / math.sqrt(norms.shape[1])": "limit = bound",
        },
        "test_dpsgd_core.py::test_no_record_adds_more_than_the_bound",
    ),
    "a mean over the actual batch": Mutation(
        "manager.py",
        {"clipping.scale(bound) / expected": "clipping.scale(bound) / max(len(norms), 1)"},
        "test_dpsgd_manager.py::"
        "test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip",
    ),
    "weights after the clip": Mutation(
        "persample/__init__.py",
        {
            "    whole = each is not None\n": (
                "    whole = each is not None\n"
                "    if batches and batches[0][2] is not None:\n"
                "        inner, weights = factors, np.nan_to_num(np.asarray(batches[0][2]))\n"
                "        factors = lambda norms: inner(norms) * weights[: len(norms), None]\n"
                "        batches = [(*batches[0][:2], None)]\n"
            )
        },
        "test_dpsgd_manager.py::"
        "test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip",
    ),
    "noise for the next bound": Mutation(
        "manager.py",
        {
            "clipping.noise_multiplier(z, expected) * bound": (
                "clipping.noise_multiplier(z, expected)"
                " * clipping.next_bound(bound, norms, z, expected, 0.0)"
            )
        },
        "test_dpsgd_manager.py::test_noise_is_for_the_bound_that_records_were_clipped_to",
    ),
    "no step for an empty batch": Mutation(
        "manager.py",
        {
            "        z, expected = self.calibration.noise_multiplier, float": (
                "        if not batches:\n"
                "            return\n"
                "        z, expected = self.calibration.noise_multiplier, float"
            )
        },
        "test_dpsgd_manager.py::test_an_empty_batch_is_a_step_that_adds_noise_and_costs",
    ),
    "the seed of the server": Mutation(
        "manager.py",
        {
            "self.noise = IndependentNoise()": (
                "self.noise = IndependentNoise("
                "__import__('fedclip.privacy.noise').privacy.noise.insecure_normals(message.seed))"
            )
        },
        "test_dpsgd_manager.py::test_the_servers_seed_is_ignored",
    ),
    "shuffled batches": Mutation(
        "sampling.py",
        {
            "np.flatnonzero(self._bits(self.records) < threshold)": (
                "np.sort(np.random.default_rng().permutation(self.records)[: self.expected])"
            )
        },
        "test_dpsgd_core.py::test_each_record_is_drawn_at_the_rate_independently_over_steps",
    ),
    "a budget that a restart renews": Mutation(
        "ledger.py",
        {
            "if path.exists() else {}": "if False else {}",
            "_OF_THIS_PROCESS.setdefault(self.path, self._entries)": "self._entries",
        },
        "test_dpsgd_manager.py::test_a_restart_goes_on_with_what_was_spent",
    ),
    "a file that is put back wins": Mutation(
        "ledger.py",
        {
            "        lost = [line for line in self._entries if line not in found]\n": (
                "        self._entries.clear()\n        lost: list[str] = []\n"
            )
        },
        "test_dpsgd_core.py::test_what_becomes_of_the_file_takes_nothing_from_this_process",
    ),
    "a charge that is not written again": Mutation(
        "ledger.py",
        {"        elif lost:\n            self._add(lost)\n": ""},
        "test_dpsgd_core.py::test_what_becomes_of_the_file_takes_nothing_from_this_process",
    ),
    "steps that were not taken, given back": Mutation(
        "ledger.py",
        {"self._line([paid])": "self._line([paid._replace(steps=paid.steps - unused)])"}
        | {
            "        self._paid = paid\n        with": (
                "        unused, self._paid = min(self._paid.steps, steps - 1), paid\n        with"
            )
        },
        "test_dpsgd_core.py::test_nothing_is_given_back",
    ),
    "a step too few": Mutation(
        "ledger.py",
        {"steps=self._paid.steps - 1": "steps=self._paid.steps - (self._paid.steps > 1)"},
        "test_dpsgd_core.py::test_the_ledger_stops_before_the_budget_would_be_passed",
    ),
    "one step over the budget": Mutation(
        "ledger.py",
        {"steps=min(steps, left))": "steps=min(steps, left + 1))"},
        "test_dpsgd_core.py::test_the_ledger_stops_before_the_budget_would_be_passed",
    ),
    "other data without a word": Mutation(
        "ledger.py",
        {'if others := others - {self.data, ""}:': "if False:"},
        "test_dpsgd_core.py::test_other_data_is_counted_and_named",
    ),
    "what others have charged, unseen": Mutation(
        "ledger.py",
        {"        if len(self._entries) != self._seen:\n": "        if False:\n"},
        "test_dpsgd_core.py::test_what_others_charge_is_seen_before_the_next_step",
    ),
    "a line added behind half a line": Mutation(
        "ledger.py",
        {'.get(end, f"{CUT}\\n")': '.get(end, "")'},
        "test_dpsgd_core.py::test_each_line_that_is_cut_off_is_told_from_damage",
    ),
    "a relation that is not looked at": Mutation(
        "ledger.py",
        {'parameters.choice(RELATIONS, relation=content.get("relation"))': "RELATIONS[0]"},
        "test_dpsgd_core.py::test_a_broken_ledger_is_refused_and_kept",
    ),
    "NaN passed on": Mutation(
        "persample/__init__.py",
        {"sound = np.isfinite(norms).all(axis=1)": "sound = np.ones(len(norms), dtype=bool)"},
        "test_dpsgd_manager.py::"
        "test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip",
    ),
    "noise over the batch size twice": Mutation(
        "manager.py",
        {"clipping.noise_multiplier(z, expected) * bound": "z * bound / expected"},
        "test_dpsgd_manager.py::test_noise_on_the_weights_is_what_the_budget_says",
    ),
    "no clip": Mutation(
        "clipping.py",
        {"np.where(norms > limit, limit /": "np.where(norms > 1e9, limit /"},
        "test_dpsgd_core.py::test_no_record_adds_more_than_the_bound",
    ),
    "a layer called twice, once": Mutation(
        "persample/torch_plan.py",
        {"if len(calls) == 1 and": "if calls and"},
        "test_dpsgd_ghost.py::test_norms_and_sums_are_those_of_gradients",
    ),
    "shared parameters by layer": Mutation(
        "persample/torch_plan.py",
        {"owners[id(p)] == 1": "owners[id(p)] > 0"},
        "test_dpsgd_ghost.py::test_norms_and_sums_are_those_of_gradients",
    ),
}
each_mutation = pytest.mark.parametrize("name", MUTATIONS)


@each_mutation
def test_each_mutation_is_of_a_text_that_is_there(name: str) -> None:
    file, texts, test = MUTATIONS[name]
    source = (ROOT / "fedclip" / "dpsgd" / file).read_text(encoding="utf-8")
    assert all(source.count(old) == 1 for old in texts)
    tests, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / "tests" / tests).read_text(encoding="utf-8")


@pytest.mark.soak
@each_mutation
def test_each_mutation_fails_its_test(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file, texts, test = MUTATIONS[name]
    for part in ("fedclip", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    mutant = tmp_path / "fedclip" / "dpsgd" / file
    source = mutant.read_text(encoding="utf-8")
    for old, new in texts.items():
        source = source.replace(old, new)
    mutant.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/{test}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: a test failed; more: there was none, or it could not be run.
    assert done.returncode == 1, done.stdout[-2000:]
    assert "1 failed" in done.stdout
