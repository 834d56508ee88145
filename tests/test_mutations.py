# SPDX-License-Identifier: Apache-2.0
"""What would break a promise makes a test fail that is named here: one fault a row."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


# By file of fedclip, and by test that fails: faults, each with the texts that it replaces.
Room = dict[str, dict[str, dict[str, dict[str, str]]]]

UPDATE: Room = {
    "federation/update/bound.py": {
        "test_update_clip.py::test_shares_with_noise": {
            "votes that outvote the noise": {
                "min(max(within - votes / 2, -clients / 2), clients / 2)": "within - votes / 2"
            },
            "a share above 1": {"+ 0.5, 0.0), 1.0)": "+ 0.5, -9.0), 9.0)"},
        },
        "test_update_clip.py::test_client_without_a_step_abstains": {
            "no votes as none within": {"votes else None": "votes else 0.0"},
        },
        "test_update_clip.py::test_bounds_on_the_bound": {
            "a bound beyond its limits": {"self.within(moved)": "moved"},
        },
        "test_update_clip.py::test_a_search_by_hand": {
            "a search that ends only at a limit": {"_FOUND or": "_FOUND and"},
            "a search that never turns": {"= turned or": "= turned and"},
            "full steps until the turn": {"or abs(pull": "and abs(pull"},
            "too high where a few more are within": {"pull == 1.0": "pull > 0.0"},
        },
        "test_update_clip.py::test_a_search_at_the_limits_of_the_bound_by_hand": {
            "a search that ends where the bound is right": {
                "(moved == bound and abs(pull) == 1.0)": "moved == bound"
            },
        },
    },
    "federation/update/adaptive.py": {
        "test_update_clip.py::test_a_noised_average_of_whoever_replies_is_the_sum_by_hand": {
            "a share of those that reply": {"within, self.expected_clients": "within, clients"},
        },
        "test_update_clip.py::test_a_secure_sum_of_votes_that_can_not_be_moves_the_bound_by_one_step_at_most": {  # noqa: E501
            "a sum of votes below 0": {"0 <= within": "within"},
        },
        "test_secagg.py::test_lie_in_a_secure_sum_of_votes": {
            "more votes than clients": {"votes <= clients": "votes"},
        },
        "test_pace.py::test_steps_depend_on_noised_votes_only": {
            "steps that follow the number of replies": {
                "spread(self.quantile, self.budget.clients, ": "spread(self.quantile, votes or 1, "
            },
        },
        "test_pace.py::test_a_restart_mid_run_makes_no_difference": {
            "a restart without evidence": {
                "self.search, self.evidence = search, evidence": "self.search = search"
            },
        },
        "test_bound_search.py::test_no_update_is_released_where_the_bound_is_too_high": {
            "a release of what is too high": {
                "            return zeros(average)\n": "            pass\n"
            },
        },
        "test_update_clip.py::test_insecure_noise_can_be_repeated_and_resumed": {
            "the noise of the first round in all": {"        self.round += 1\n": ""},
            "a budget that a restart renews": {"self.budget.resume(spent)": "pass"},
        },
        "test_update_clip.py::test_noise_is_sized_on_the_bound_that_was_sent": {
            "noise for the next bound": {
                "average, sent.bound, self.round": "average, self.bound, self.round"
            },
        },
        "test_update_clip.py::test_fixed_bound_from_the_server_asks_for_no_votes": {
            "votes are paid and not asked for": {
                "if self.learning_rate == 0:\n            bits = 0.0\n        elif": "if"
            },
            "votes without noise": {
                "        if self.learning_rate == 0:\n            return None\n": ""
            },
        },
        "test_exposure.py::test_a_server_refuses_them_before_its_first_message": {
            "statistics of another name allowed": {
                "name in (self.unnoised or ()": "self.unnoised is not None or name in ("
            },
        },
        "test_update_clip.py::test_the_budget_ends_the_training_before_it_is_passed": {
            "a round that is not charged": {
                "            self.budget.spend()\n": "            pass\n"
            },
            "a round beyond the budget": {"self.halt(self.budget.refusal())": "pass"},
        },
        "test_update_clip.py::test_replace_one_costs_what_half_the_noise_costs": {
            "a charge for other neighbours": {
                "Accountant(self.delta, self.relation)": "Accountant(self.delta)"
            },
        },
    },
    "federation/update/exchange.py": {
        "test_update_clip.py::test_hostile_votes": {
            "within the bound without a vote": {"(1, 1))": "(1, 1), (0, 1))"},
        },
    },
    "federation/update/messages.py": {
        "test_update_clip.py::test_hostile_votes": {
            "a broken vote of nobody": {
                "        return cls(n_faults=1)\n": "        return cls(0, n_faults=1)\n"
            },
        },
        "test_update_clip.py::test_hostile_update": {
            "a broken reply for as many as it says": {
                "fault else cls(vector, 1, 1, *": "0 else cls(vector, 1, data.get('n_clients'), *"
            },
        },
    },
    "federation/update/clipping.py": {
        "test_update_clip.py::test_norm_equal_to_the_bound_is_within_it": {
            "a vote the other way round": {"votes and not self.clipped": "votes and self.clipped"},
            "a norm equal to the bound as above it": {
                "votes and not self.clipped": "votes and (self.norm or 0.0) < sent.bound"
            },
        },
        "test_update_clip.py::test_the_vote_on_groups_is_about_the_longest_of_them": {
            "a vote by the shortest group": {"clipped).any()": "clipped).all()"},
        },
        "test_update_clip.py::test_client_without_a_step_abstains": {
            "the vote of a client that took no step": {" and self.norm is not None": ""},
        },
        "test_update_clip.py::test_under_noise_nothing_else_is_counted": {
            "counts without noise": {"not sent.private": "True"},
        },
        "test_update_core.py::test_a_client_refuses_what_is_not_for_it": {
            "a bound for other groups": {"if sent.scope != self.scope": "if False"},
        },
        "test_update_core.py::test_all_zeros_abstain_where_steps_are_not_known": {
            "zeros that vote": {"times == 0.0 if steps is None else steps == 0": "steps == 0"},
        },
    },
    "federation/update/pace.py": {
        "test_pace.py::test_steps_by_hand": {
            "evidence that outlasts a turn": {
                "lead = abs(evidence) if evidence * off > 0 else 0.0": "lead = abs(evidence)"
            },
            "faster though a share is as it may be": {
                "off, sure = share - quantile, _SURE * spread": "off, sure = share - quantile, 0.0"
            },
            "more than twice as fast at once": {"max(before, sure) + _DOUBLES, most)": "most)"},
            "evidence in what is beside the quantile": {
                "max(abs(total) - slack, 0.0)": "abs(total)"
            },
        },
    },
    "federation/update/budget.py": {
        "test_update_clip.py::test_votes_and_average_have_noise_of_their_own": {
            "the noise of the votes on the average": {"round_, 1": "round_, 0"},
            "the noise of the average on the votes": {", 0))[0]": ", 1))[0]"},
            "the same noise each round": {"(seed, round_, use)": "(seed, use)"},
            "the noise of the update on the votes": {"self.bits_noise,": "self.update_noise,"},
        },
        "test_update_clip.py::test_noise_is_sized_on_the_bound_that_was_sent": {
            "noise that the votes have not been taken from": {
                "= self.update_noise": "= self.noise_multiplier"
            },
            "noise on the sum": {"bound / self.clients": "bound"},
        },
        "test_update_clip.py::test_noise_is_added_before_the_average_is_rounded": {
            "noise on what was rounded": {"std, normals, exact": "std, normals"},
        },
        "test_update_clip.py::test_the_budget_ends_the_training_before_it_is_passed": {
            "a charge for the update alone": {"add(self.noise_multiplier": "add(self.update_noise"},
        },
        "test_update_clip.py::test_a_budget_is_spent_to_its_very_end": {
            "no first round at the budget": {"if first >": "if first >="},
            "no last round at the budget": {"after <=": "after <"},
        },
        "test_update_clip.py::test_state_that_can_not_be": {
            "a spent budget without noise": {"found and": "found is None and"},
        },
    },
    "federation/update/closing.py": {
        "test_update_clip.py::test_one_client_moves_the_noised_average_by_its_share_at_most": {
            "an average over the replies, with noise": {"(clients or there)": "there"},
        },
        "test_update_clip.py::test_server_voids_a_round_whose_bound_does_not_hold": {
            "tensors without a bound under noise": {
                "        if self.limits.exclude:\n": "        if False:\n"
            },
        },
        "test_update_clip.py::test_groups_that_reach_the_bound_each_by_itself_are_refused": {
            "the whole bound for each group, on the server": {
                "bound, whole, share.mass)": "bound, False, share.mass)"
            },
        },
        "test_update_clip.py::test_sum_that_honest_clients_could_not_have_made": {
            "a secure sum as one reply": {
                "sum(reply.clients for reply in replies)": "len(replies)"
            },
        },
    },
    "federation/update/averaging.py": {
        "test_update_clip.py::test_one_client_moves_the_noised_average_by_its_share_at_most": {
            "an average over the sound updates": {"total / clients)": "total / len(updates))"},
        },
    },
    "federation/update/server.py": {
        "test_update_clip.py::test_server_voids_a_round_whose_bound_does_not_hold": {
            "noise on what another module changed": {
                "gradients is not round_.average": "round_.average is None"
            },
        },
        "test_update_clip.py::test_a_round_ends_with_its_update": {
            "the bound of a round that is over": {
                "        SERVER.set(None)\n        trouble": "        trouble"
            },
        },
    },
    "federation/update/client.py": {
        "test_update_clip.py::test_a_client_goes_by_the_bound_of_its_round_only": {
            "the bound of an older message": {
                "self._round = None\n        CLIENT.set(None)\n        if not": "if not"
            },
            "the bound of an older round": {
                "round_, self._round = self._round, None": "round_ = self._round"
            },
            "the bound of one client for another": {
                "self._round, None\n        CLIENT.set(None)": "self._round, None"
            },
        },
    },
    "federation/update/limits.py": {
        "test_update_clip.py::test_groups_of_a_bound_from_the_server_stay_within_it_together": {
            "a table does not split the bound": {
                "in_table(table, label, 0.0) if table else 1.0": "1.0"
            },
            "the whole bound for each group": {"bound / (length / part) if part else 0.0": "bound"},
        },
        "test_update_clip.py::test_hostile_update": {
            "twice the limit of one client": {
                "_SLACK if clients == 1 else _SUM_SLACK": "_SUM_SLACK"
            },
            "NaN in an update": {"it holds NaN or infinity": ""},
        },
        "test_update_clip.py::test_sum_that_honest_clients_could_not_have_made": {
            "the limit of one for a sum": {"mass * slack": "slack"},
        },
    },
    "federation/update/engine.py": {
        "test_update_core.py::test_what_no_honest_client_replies_counts_as_zeros": {
            "a vote that can not be, counted": {
                "r.clients > 1 or is_one_of(VOTES, (r.votes, r.within))": "True"
            },
        },
        "test_update_core.py::test_the_core_and_the_plugins_give_the_same": {
            "the noise of those that reply": {
                "bound.budget.clients if bound.budget else None": "None"
            },
        },
    },
    "federation/update/secagg.py": {
        "test_secagg.py::test_values_at_the_edge_of_the_range_keep_their_sign": {
            "a value at the edge of the range": {"clipval * _EDGE:": "clipval:"},
        },
    },
    "federation/update/arc.py": {
        "test_combine.py::test_they_are_what_their_papers_say": {
            "ARC for one less": {
                "[brought(len(norms), n_hostile)]": "[brought(len(norms), n_hostile) - 1]"
            },
        },
    },
    "federation/update/combining.py": {
        "test_combine.py::test_a_refused_reply_counts_as_zeros": {
            "ARC without those that were refused": {
                "norms = [0.0] * clients": "norms = [0.0] * len(updates)"
            },
        },
        "test_combine.py::test_a_round_of_too_few_says_so": {
            "as many hostile replies as others": {"clients > 2 * self": "clients > self"},
        },
    },
    "federation/update/trimmed.py": {
        "test_combine.py::test_no_coordinate_of_a_trimmed_mean_is_beyond_those_of_the_others": {
            "a trimmed mean of the largest too": {"n_hostile : clients - n_hostile": "n_hostile:"},
        },
        "test_combine.py::test_arrays_of_each_framework_and_dtype": {
            "a trimmed mean in float32": {"axis=1, dtype=np.float64": "axis=1"},
        },
    },
    "tools/simulate.py": {
        "test_simulate.py::test_each_setting_of_the_aggregator_moves_the_model": {
            "a simulation in which nobody has taken a step": {", steps=steps)": ")"},
        },
    },
}
STATISTICS: Room = {
    "federation/statistics/counts.py": {
        "test_shared.py::test_max_steps_bounds_what_a_client_counts_and_may_claim": {
            "a norm more than may be counted": {"state.new <": "state.new <="},
            "a mean of norms that are not counted": {
                "            seen = xp.where(weight > 0, seen, state.new_mean)\n": ""
            },
        },
        "test_shared.py::test_counts_that_can_not_be": {
            "the limit of one for a secure sum": {"> members * most": "> most"},
            "a digit too many": {"= members": " members"},
            "buckets that overflow to the right sum": {"buckets > totals).any() or (": ""},
            "buckets that do not add up": {" or (buckets.sum(axis=0) != totals).any()": ""},
        },
        "test_shared.py::test_the_first_norm_of_a_client_is_not_counted_and_spikes_are_as_what_is_learnt": {  # noqa: E501
            "norms counted before anything is known": {"judged.learns & (seen": "(seen"},
        },
        "test_shared.py::test_moments_of_the_warm_up_are_those_of_all_norms": {
            "the sign of a sum": {"- _number": "+ _number"},
            "squares in the place of deviations": {"self.n - shift * shift": "self.n"},
        },
        "test_shared.py::test_rounding_makes_no_mean_and_no_variance_negative": {
            "a mean below 0": {
                "max(float(Fraction(centre) + shift), 0.0": "float(Fraction(centre) + shift"
            },
        },
        "test_shared.py::test_the_highest_bucket_is_that_of_the_highest_norm": {
            "buckets above the highest norm": {"buckets[bounds.above].any()": "False"},
            "no rounding to single precision": {"highest * _SINGLE": "highest"},
            "a bucket above the highest": {"] > last": "] > last + 1"},
        },
        "test_shared.py::test_sums_that_no_norms_have": {
            "a negative variance": {'return "a negative variance"': "pass"},
            "parts of a sum that cancel": {
                "(up + down > _SLACK * reach) | (squares > most)": "squares > most"
            },
            "a sum of no norms": {
                "(up + down > _SLACK * reach) | (squares > most)": "up + down > _SLACK * reach"
            },
        },
        "test_shared.py::test_what_is_no_message": {
            "counts of nobody": {"< members": "<= members"},
            "counts that overflow": {"if counts.max(initial=0) >= 2**48:": "if False:"},
        },
        "test_shared.py::test_levels_are_those_of_the_last_rounds": {
            "a quantile beyond the last norm": {"(total - 1)": "total"},
        },
    },
    "federation/statistics/client.py": {
        "test_shared.py::test_the_first_norm_of_a_client_is_not_counted_and_spikes_are_as_what_is_learnt": {  # noqa: E501
            "the first five norms of a client not counted": {
                "replace(own, least=min(own.least, 1))": "own"
            },
        },
        "test_shared.py::test_no_norm_is_sent_twice_nor_with_another_state": {
            "counts sent twice": {", **nothing": ""},
            "counts by an older state": {
                "statistics if self.version == message.version else {}": "statistics"
            },
        },
        "test_shared.py::test_scopes": {
            "counts lost before groups are known": {
                "statistics if self.version == message.version else {": "{"
            },
        },
    },
    "federation/statistics/messages.py": {
        "test_shared.py::test_what_is_no_message": {
            "a client that speaks for many": {"1, data.get": "data.get('members', 1), data.get"},
        },
    },
    "federation/statistics/server.py": {
        "test_shared.py::test_levels_are_those_of_the_last_rounds": {
            "a round that is not forgotten": {"= self.size": " self.size"},
        },
        "test_shared.py::test_each_group_has_its_own_bounds_and_its_own_norms": {
            "one history for all groups": {") for _ in labels]": ")] * len(labels)"},
            "the bounds of another group": {
                "np.repeat(known, len(messages), axis=-1": "np.tile(known, len(messages)"
            },
        },
        "test_shared.py::test_a_group_without_norms_stands_still": {
            "empty rounds remembered": {"None and round_.n": "None"},
            "groups without norms that move": {"(counted.n > 0) & np.all": "np.all"},
            "a newer version after a restart": {
                "        self.version = version\n": "        self.version = max(self.version, version)\n"  # noqa: E501
            },
        },
        "test_shared.py::test_members_speak_for_no_more_than_there_are": {
            "the members of another message": {"if len(sizes) > 1:": "if False:"},
        },
        "test_shared.py::test_many_clients_are_checked_together_and_lies_are_left_out_alone": {
            "only the last of many clients": {"total +=": "total ="},
            "a liar that costs others their counts": {"self._fault([(n, c)], bounds)": '"spoilt"'},
            "counts that are impossible": {"not fault and counts": "counts"},
        },
        "test_shared.py::test_a_variance_that_no_norms_of_that_mean_have_is_refused": {
            "norms of any size": {
                "self.rule.ceiling(self.state": "np.full(len(self.labels), np.inf"
            },
        },
    },
    "federation/statistics/counterpart.py": {
        "test_exposure.py::test_a_server_refuses_them_before_its_first_message": {
            "statistics sent without noise": {") if admitted else {}": ")"},
        },
        "test_exposure.py::test_a_server_refuses_statistics_that_stand_before_its_noise": {
            "statistics before the noise": {"not None:": "None and False:"},
        },
    },
}
PRIVACY: Room = {
    "privacy/accounting.py": {
        "test_noise.py::test_split_costs_what_the_accountant_is_told": {
            "half of the noise on bits": {
                "(2 * sigma)) * (1 + z / (2 * sigma)": "sigma) * (1 + z / sigma"
            },
        },
        "test_noise.py::test_budget_adds_up_and_is_restored": {
            "a charge that forgets the last": {
                "more._replace(steps=last.steps + more.steps)": "more"
            },
        },
        "test_noise.py::test_samples_are_kept_apart_and_restored": {
            "rounds of another rate as the same": {
                "(steps=more.steps) == more:": "(steps=more.steps)[0] == more[0]:"
            },
            "an accountant of the largest sample": {"= tightest(min": "= tightest(max"},
            "a restart without sampling": {"] if sampling == 1.0 else [z, steps, sampling]": "]"},
            "a step that is not sampled": {"more, sampling": "more"},
        },
        "test_noise.py::test_releases_of_all_kinds_add_up": {
            "releases that are not added up": {"merged.get((z, sampling), 0) + steps": "steps"},
            "another in one's place for half": {"= (2.0 if": "= (1.0 if"},
        },
        "test_update_clip.py::test_a_budget_is_spent_to_its_very_end": {
            "no step at the budget": {"high, sampling) <=": "high, sampling) <"},
        },
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism": {
            "a step beyond the budget": {
                "        return low\n\n    def _with": "        return high\n\n    def _with"
            },
            "steps that add up without a root": {"math.sqrt(r.steps)": "r.steps"},
        },
        "test_noise.py::test_delta_is_left_to_what_transforms_may_round": {
            "delta that rounding has used": {"        delta -= rounding\n": ""},
            "most of delta to rounding": {
                "rounding > min(delta, _SLOWEST) / 2.0": "rounding > min(delta, _SLOWEST)"
            },
            "the rounding of one step for all": {
                "sum(release.steps for release in spent": "len(spent"
            },
        },
        "test_planning.py::test_a_plan_is_worth_its_rounds_and_no_more": {
            "noise for other neighbours": {') / (2.0 if relation == "replace-one" else 1.0)': ")"},
        },
        "test_update_clip.py::test_defaults_work_for_three_clients_as_for_a_thousand": {
            "bits that have too little noise for few": {
                "max(clients / 20, noise_multiplier)": "clients / 20"
            },
        },
        "test_noise.py::test_accountants_agree_without_samples": {
            "samples of other neighbours": {"[relation": "['add-remove'"},
            "one step for all": {"event, steps": "event"},
        },
    },
    "privacy/planning.py": {
        "test_planning.py::test_a_plan_is_worth_its_rounds_and_no_more": {
            "a plan that is rounded down": {"math.ceil(round": "math.floor(round"},
            "a plan for other neighbours": {"turns, relation=relation": "turns"},
        },
    },
    "privacy/sensitivity.py": {
        "test_privacy.py::test_a_clipper_answers_for_itself": {
            "a record replaced for one removed": {
                'self.l2_bound * (2.0 if relation == "replace-one" else 1.0)': "self.l2_bound"
            },
            "a bound that others can move": {
                "not self.per_record_safe or self.l2_bound": "self.l2_bound"
            },
        },
        "test_sensitivity.py::test_only_the_diameter_bounds_an_aggregate_that_is_normalised": {
            "the radius of a ball for its diameter": {
                "2.0 * bound)\n        return None": "bound)\n        return None"
            },
        },
        "test_privacy.py::test_noise_first_makes_all_that_follows_free": {
            "a sensitivity after noise": {
                "        if self.noised:\n            return None\n        found": "        found"
            },
            "noise within a record": {"shared and not noised": "shared"},
        },
        "test_privacy.py::test_what_a_round_needs": {
            "a bound on weights that decay": {"None or self.w_decay != 0.0": "None"},
        },
        "test_privacy.py::test_no_bound_of_a_round_is_rounded_below_it": {
            "a bound of a round rounded below it": {
                "outwards(rate * steps * self.l2_bound)": "rate * steps * self.l2_bound"
            },
        },
        "test_privacy.py::test_without_shapes": {
            "the bound of the last map only": {
                "min(map_.bound, bound if map_.growth == 1.0 else bound * map_.growth)": "map_.bound"  # noqa: E501
            },
            "a bound that what follows outgrows": {
                "bound * map_.growth)\n        found": "bound)\n        found"
            },
        },
        "test_privacy.py::test_a_plugin_that_is_not_known_bounds_nothing": {
            "the slope of the steepest map only": {
                "math.prod(m.lipschitz for m in maps": "max((m.lipschitz for m in maps), default=1.0"  # noqa: E501
            },
        },
    },
    "privacy/bounds.py": {
        "test_sensitivity.py::test_divisions_that_nothing_bounds": {
            "Adam's bound where it has none": {"* a < b)": "* a <= b)"},
        },
        "test_sensitivity.py::test_what_comes_after_a_clip_exceeds_its_bound": {
            "RMSProp without its memory": {"1.0 / math.sqrt(1.0 - beta)": "1.0"},
        },
        "test_privacy.py::test_without_shapes": {
            "momentum that adds nothing up": {
                '1.0 if module.name == "ewma" else 1.0 / (1.0 - beta)': "1.0"
            },
        },
        "test_privacy.py::test_what_comes_before_noise_is_what_noise_is_sized_on": {
            "a bound for NaN": {
                "if not context.finite:\n        return": "if False:\n        return"
            },
        },
    },
    "privacy/gaussian.py": {
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism": {
            "an epsilon below the truth": {") * (1.0 + _ROUNDING)": ")"},
            "a delta below the truth": {"a - (epsilon / mu + mu / 2.0) * 2.0**-52": "a"},
        },
    },
    "privacy/noise.py": {
        "test_noise.py::test_the_extreme_draws_are_finite": {
            "the logarithm of 0": {"(bits.astype(np.float64) + 1.0": "bits.astype(np.float64"},
        },
        "test_noise.py::test_secure_noise_is_normal": {
            "an angle that follows from the radius": {"pairs:] >": ":pairs] >"},
            "half of the circle": {"2.0 * math.pi": "math.pi"},
        },
        "test_noise.py::test_float64_models_that_start_at_zero_reach_what_others_do": {
            "last bits that tell values apart": {"[1] - 31": "[1] - 60"},
        },
        "test_noise.py::test_pairs_are_as_fine_in_their_tail_and_near_zero": {
            "a tail that is as coarse as the rest": {"1 << 32)": "1)"},
        },
    },
}
DPSGD: Room = {
    "dpsgd/clipping.py": {
        "test_dpsgd_core.py::test_no_record_adds_more_than_the_bound": {
            "a bound for each tensor": {
                'resolve("global" if whole else': 'resolve("tensor" if whole else',
                "limit = bound / math.sqrt(norms.shape[1])": "limit = bound",
            },
            "no clip": {"np.where(norms > limit, limit /": "np.where(norms > 1e9, limit /"},
        },
        "test_dpsgd_core.py::test_factors_and_scales_by_hand": {
            "factors without end": {"(norms + self.gamma)": "norms"},
        },
        "test_dpsgd_core.py::test_the_budget_is_split_over_groups": {
            "a bound over groups, and not their root": {
                "math.sqrt(norms.shape[1])": "norms.shape[1]"
            },
        },
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand": {
            "bits that cost nothing": {"split_noise(noise_multiplier, bits)": "noise_multiplier"},
            "a norm equal to the bound as above it": {"<= bound": "< bound"},
            "bits without noise": {") * draw": ") * 0.0"},
            "a share of the batch": {"noisy / expected": "noisy / max(len(seen), 1)"},
            "a share above 1": {
                "min(max(0.5 + noisy / expected, 0.0), 1.0)": "0.5 + noisy / expected"
            },
            "the bits of records with NaN": {"[~np.isnan(norms)]": ""},
        },
    },
    "dpsgd/manager.py": {
        "test_dpsgd_manager.py::test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip": {  # noqa: E501
            "a mean over the actual batch": {
                "clipping.scale(bound) / expected": "clipping.scale(bound) / max(len(norms), 1)"
            },
        },
        "test_dpsgd_manager.py::test_noise_is_for_the_bound_that_records_were_clipped_to": {
            "noise for the next bound": {
                "clipping.noise_multiplier(z, expected) * bound": (
                    "clipping.noise_multiplier(z, expected) * clipping.next_bound(bound, norms, "
                    "z, expected, 0.0)"
                )
            },
        },
        "test_dpsgd_manager.py::test_an_empty_batch_is_a_step_that_adds_noise_and_costs": {
            "no step for an empty batch": {
                "        z, expected = self.calibration.noise_multiplier, float": (
                    "        if not batches:\n"
                    "            return\n"
                    "        z, expected = self.calibration.noise_multiplier, float"
                )
            },
        },
        "test_dpsgd_manager.py::test_the_servers_seed_is_ignored": {
            "the seed of the server": {
                "self.noise = IndependentNoise()": "self.noise = IndependentNoise(__import__('fedclip.privacy.noise').privacy.noise.insecure_normals(message.seed))"  # noqa: E501
            },
        },
        "test_dpsgd_manager.py::test_noise_on_the_weights_is_what_the_budget_says": {
            "noise over the batch size twice": {
                "clipping.noise_multiplier(z, expected) * bound": "z * bound / expected"
            },
        },
        "test_dpsgd_manager.py::test_a_round_that_breaks_off_is_paid_for": {
            "the text of what a step raises": {
                'RuntimeError(f"{what} failed on this client; its log says why") from None': "exc"
            },
        },
        "test_dpsgd_leaks.py::test_a_reply_tells_no_time": {
            "the time of a round": {
                '"t_spent": 0.0}': '"t_spent": __import__("time").monotonic()}'
            },
        },
        "test_dpsgd_leaks.py::test_a_record_that_raises_counts_as_zero_and_the_others_as_ever": {
            "a round that one record ends": {"**settings, failed=self._fail": "**settings"},
            "a model tried on record 0": {
                "try_out(self.model, tried,": "try_out(self.model, self.records.take([0]),"
            },
        },
    },
    "dpsgd/persample/__init__.py": {
        "test_dpsgd_manager.py::test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip": {  # noqa: E501
            "weights after the clip": {
                "    whole = each is not None\n": (
                    "    whole = each is not None\n"
                    "    if batches and batches[0][2] is not None:\n"
                    "        inner, weights = factors, np.nan_to_num(np.asarray(batches[0][2]))\n"
                    "        factors = lambda norms: inner(norms) * weights[: len(norms), None]\n"
                    "        batches = [(*batches[0][:2], None)]\n"
                )
            },
            "NaN passed on": {
                "sound = np.isfinite(norms).all(axis=1)": "sound = np.ones(len(norms), dtype=bool)"
            },
        },
    },
    "dpsgd/sampling.py": {
        "test_dpsgd_core.py::test_each_record_is_drawn_at_the_rate_independently_over_steps": {
            "shuffled batches": {
                "np.flatnonzero(self._bits(self.records) < threshold)": "np.sort(np.random.default_rng().permutation(self.records)[: self.expected])"  # noqa: E501
            },
        },
        "test_dpsgd_core.py::test_the_rate_in_use_is_never_above_the_one_accounted_for": {
            "a rate above the one accounted for": {"math.floor": "math.ceil"},
            "a record drawn at the rate": {"< threshold": "<= threshold"},
            "all records at half of the rate": {"self.rate == 1.0": "self.rate >= 0.5"},
        },
    },
    "privacy/ledger.py": {
        "test_dpsgd_manager.py::test_a_restart_goes_on_with_what_was_spent": {
            "a budget that a restart renews": {
                "if path.exists() else {}": "if False else {}",
                "_OF_THIS_PROCESS.setdefault(self.path, self._entries)": "self._entries",
            },
        },
        "test_dpsgd_core.py::test_what_becomes_of_the_file_takes_nothing_from_this_process": {
            "a file that is put back wins": {
                "        lost = [line for line in self._entries if line not in found]\n": "        self._entries.clear()\n        lost: list[str] = []\n"  # noqa: E501
            },
            "a charge that is not written again": {
                "        elif lost:\n            self._add(lost)\n": ""
            },
        },
        "test_dpsgd_core.py::test_nothing_is_given_back": {
            "steps that were not taken, given back": {
                "_line([paid], ": "_line([paid._replace(steps=paid.steps - unused)], ",
                "        self._paid = paid\n        with": (
                    "        unused, self._paid = min(self._paid.steps, steps - 1), paid\n"
                    "        with"
                ),
            },
        },
        "test_dpsgd_core.py::test_the_ledger_stops_before_the_budget_would_be_passed": {
            "a step too few": {
                "steps=self._paid.steps - 1": "steps=self._paid.steps - (self._paid.steps > 1)"
            },
            "one step over the budget": {"steps=min(steps, left))": "steps=min(steps, left + 1))"},
        },
        "test_dpsgd_core.py::test_other_data_is_counted_and_named": {
            "other data without a word": {'if others := others - {self.data, ""}:': "if False:"},
        },
        "test_dpsgd_core.py::test_what_others_charge_is_seen_before_the_next_step": {
            "what others have charged, unseen": {
                "        if len(self._entries) != self._seen:\n": "        if False:\n"
            },
        },
        "test_dpsgd_core.py::test_each_line_that_is_cut_off_is_told_from_damage": {
            "a line added behind half a line": {'.get(end, f"{CUT}\\n")': '.get(end, "")'},
        },
        "test_dpsgd_core.py::test_a_broken_ledger_is_refused_and_kept": {
            "a relation that is not looked at": {
                'parameters.choice(RELATIONS, relation=content.get("relation"))': "RELATIONS[0]"
            },
        },
        "test_dpsgd_core.py::test_a_ledger_is_spent_to_its_very_end": {
            "steps taken twice for one charge": {
                "self._paid = self._paid._replace(steps=self._paid.steps - 1)": "pass"
            },
            "a step paid at another noise": {
                "paid = self._paid.steps and _alike(": "paid = self._paid.steps or _alike("
            },
        },
    },
    "dpsgd/place.py": {
        "test_dpsgd_leaks.py::test_nothing_is_recorded_before_sample_clip": {
            "norms of records in the state": {"copy.deepcopy(self.before)": "self.before"},
        },
    },
    "dpsgd/client.py": {
        "test_dpsgd_leaks.py::test_metadata_is_told_of_the_validation_records": {
            "classes of the training records": {
                "asdict(self.valid_data.get_data_specs())": "asdict(self.train_data.get_data_specs())"  # noqa: E501
            },
        },
    },
    "dpsgd/persample/torch.py": {
        "test_dpsgd_leaks.py::test_a_model_that_remembers_is_refused": {
            "a model that remembers": {"if changed or any(": "if any("},
        },
    },
    "dpsgd/persample/torch_plan.py": {
        "test_dpsgd_ghost.py::test_norms_and_sums_are_those_of_gradients": {
            "a layer called twice, once": {"if len(calls) == 1 and": "if calls and"},
            "shared parameters by layer": {"owners[id(p)] == 1": "owners[id(p)] > 0"},
        },
    },
    "dpsgd/calibrate.py": {
        "test_dpsgd_core.py::test_a_calibrated_run_costs_its_budget_and_no_more": {
            "batches of more records than there are": {
                "batch_size=batch_size), records)": "batch_size=batch_size), 10**9)"
            },
            "noise that does not average out": {"values / self.steps": "values"},
            "the noise of a sum on a mean": {
                "self.noise_multiplier / self.expected": "self.noise_multiplier"
            },
        },
        "test_dpsgd_core.py::test_steps_of_a_round": {
            "steps that are not counted": {
                '(rest > 0 and not batches.get("drop_remainder", True))': "0"
            },
        },
    },
}
RULES: Room = {
    "rules/history.py": {
        "test_rules_history.py::test_a_norm_at_the_limit_is_learnt_as_it_is": {
            "a spike at the very threshold": {
                "self.compared(norms) > threshold": "self.compared(norms) >= threshold"
            },
        },
        "test_rules_history.py::test_percentile_of_past_norms_only": {
            "norms judged by themselves": {
                "if self.include_current:\n            state": "if True:\n            state"
            },
        },
        "test_rules_history.py::test_auto_clip_judges_nobody_before_the_fifth_norm": {
            "statistics that judge from the first norm on": {
                "max(self.warmup, self.least)) & (threshold": "1) & (threshold"
            },
        },
        "test_rules_history.py::test_without_feedback_the_warm_up_learns_spikes_too": {
            "nothing learnt of a spike before there are statistics": {"~(ready & spike)": "~spike"},
        },
        "test_rules_history.py::test_a_burst_of_spikes": {
            "spikes learnt as they are": {"xp.where(spike, learnt, norms)": "norms"},
        },
        "test_rules_history.py::test_the_statistics_learn_nothing_before_the_fifth_norm": {
            "the first norms learnt at once": {'"raw" else 5': '"raw" else 1'},
        },
    },
    "rules/protection.py": {
        "test_defaults.py::test_the_first_norms_are_judged_by_their_lower_median": {
            "the upper median of an even number": {"[2]": "[3]"},
        },
        "test_rules_history.py::test_the_median_ignores_norms_of_0": {
            "norms of 0 in the median": {"return norms > 0, dict": "return norms >= 0, dict"},
        },
    },
    "rules/zclip.py": {
        "test_golden.py::test_reproduced": {
            "the distance from the old mean": {"keep * keep": "1.0"},
        },
    },
    "rules/drytorch.py": {
        "test_golden.py::test_reproduced": {
            "the distance from the new mean": {"1.0 + 0.0 * keep": "keep * keep"},
            "a population variance for a sample variance": {
                "after.variance * (after.count": "after.variance * (after.count - 1.0"
            },
        },
    },
    "rules/moments.py": {
        "test_golden.py::test_reproduced": {
            "a warm-up of unequal weights": {"max(self.warmup, 1)": "1"},
        },
        "test_shared.py::test_moving_averages_are_moved_by_each_norm_once": {
            "a round as one norm": {"self.decay**counted.n": "self.decay"},
        },
    },
    "rules/adagc.py": {
        "test_golden.py::test_gamma_of_adagc": {
            "the mean of the warm-up for the smallest": {
                "xp.where(first, smallest, after.mean)": "xp.where(mean == 0, smallest, after.mean)"
            },
        },
    },
    "rules/ema.py": {
        "test_golden.py::test_gamma_of_adagc": {
            "a mean that a fixed limit does not hold": {
                "return xp.minimum(judged.seen, judged.limits)": "return judged.seen"
            },
        },
    },
    "rules/percentile.py": {
        "test_rules_history.py::test_a_percentile_follows_norms_that_have_grown_for_good": {
            "a quantile that can not rise": {"2.0 * target": "target"},
        },
    },
    "rules/adaptive.py": {
        "test_rules_history.py::test_fraction_of_unclipped_norms_is_the_quantile": {
            "a limit that moves the other way": {"xp.exp(-rate": "xp.exp(rate"},
        },
    },
    "rules/growth.py": {
        "test_rules_history.py::test_past_norm_falls_by_max_decay": {
            "a past norm that falls at once": {"previous / self.max_decay": "0.0 * previous"},
        },
    },
}
ENGINE: Room = {
    "transforms/action.py": {
        "test_bound.py::test_float32_never_above_the_limit": {
            "no margin for float32": {'"float32": 15 * 2.0**-24,': '"float32": 0.0,'},
        },
        "test_ends_of_dtypes.py::test_half_precision_keeps_to_any_limit": {
            "no margin for the rounding of half precision": {" + 2.0**-11,": ","},
        },
        "test_ends_of_dtypes.py::test_a_learnt_limit_below_the_range_gives_zeros": {
            "a learnt limit below the range": {"self.target < LEAST": "self.target < 0.0"},
        },
        "test_ends_of_dtypes.py::test_what_is_scaled_up_stays_finite_and_keeps_its_direction": {
            "raised beyond the dtype": {
                "        if peaks is not None:": "        if peaks is None and False:"
            },
        },
        "test_bound.py::test_norm_equal_to_the_limit_is_not_clipped": {
            "at the limit counts as over": {"norms, norms > limits": "norms, norms >= limits"},
        },
    },
    "arrays/numpy.py": {
        "test_bound.py::test_a_long_array_at_its_very_limit_is_not_clipped": {
            "not measured again near the limit": {"<= _CLOSE * norms": "< 0 * norms"},
        },
        "test_extremes.py::test_a_long_array_whose_squares_underflow_is_measured": {
            "squares that underflow": {
                "if UNDERFLOW <= total < math.inf": "if 0.0 <= total < math.inf"
            },
        },
        "test_ends_of_dtypes.py::test_no_output_that_becomes_subnormal_is_above_its_limit": {
            "subnormal products rounded up": {
                "np.trunc(product * 2.0**24)": "np.ceil(product * 2.0**24)"
            },
        },
    },
    "arrays/blocks.py": {
        "test_digits.py::test_on_the_host": {
            "blocks too long": {"_BLOCK = 16 * lanes()": "_BLOCK = 1 << 26"},
        },
    },
    "transforms/base.py": {
        "test_nonfinite.py::test_skip_gives_zero": {
            "NaN taken for finite": {"norms, total < math.inf": "norms, total > -math.inf"},
        },
    },
    "transforms/value.py": {
        "test_elementwise.py::test_percentile_position_is_that_of_integers": {
            "a percentile one element too high": {
                "low = steps // whole": "low = -(-steps // whole)"
            },
        },
        "test_bound.py::test_no_element_above_the_bound": {
            "a box rounded outwards": {
                "math.ceil(limit / unit) if up else math.floor(limit / unit)": "round(limit / unit)"
            },
        },
    },
    "transforms/average.py": {
        "test_elementwise.py::test_the_first_gradient_is_the_whole_of_its_average": {
            "the first average counts for less": {
                "weights = xp.where(counts == 0, 1.0, weights)": "pass"
            },
        },
        "test_elementwise.py::test_average_grows_by_max_growth_at_most": {
            "growth without an end": {"sizes = xp.minimum(sizes, allowed)": "pass"},
        },
    },
    "transforms/moment.py": {
        "test_elementwise.py::test_standardized_mean_and_deviation": {
            "a deviation over n": {"xp.maximum(sizes - 1.0, 1.0)": "xp.maximum(sizes, 1.0)"},
        },
    },
}
SITE: Room = {
    "federation/site/gate.py": {
        "test_site_policy.py::test_each_call_is_charged_and_none_is_refunded": {
            "an update that is not charged": {
                "            self._charge()\n        try:": "            pass\n        try:"
            },
            "half of the cost": {"reserve(policy.noise": "reserve(1.5 * policy.noise"},
        },
        "test_site_policy.py::test_what_has_not_the_models_form_stays": {
            "other dtypes than the model's": {"if found != wanted:": "if False:"},
        },
        "test_site_policy.py::test_noise_is_on_every_value_and_never_twice_the_same": {
            "noise for another bound": {
                "self.policy.noise_multiplier * self.policy.max_norm": "self.policy.noise_multiplier"  # noqa: E501
            },
        },
        "test_site_policy.py::test_numbers_leave_if_they_are_named_and_plain": {
            "numbers that can hold a text": {"if abs(whole) < _LARGEST": "if True"},
        },
        "test_site_policy.py::test_votes_are_the_bits_that_are_known": {
            "votes beside noise": {"if self.policy.noise_multiplier:": "if False:"},
        },
        "test_site_policy.py::test_what_leaves_is_in_this_machines_order_of_bytes": {
            "bytes as they lie": {'array.dtype.newbyteorder("=")': "array.dtype"},
        },
    },
    "federation/site/sending.py": {
        "test_site_attacks.py::test_whatever_a_client_would_send_the_policy_holds[1000]": {
            "what is not known passes": {
                "            if kind not in self._known:\n": "            if kind not in self._known:\n                return await self._inner.send_message(message)\n            if False:\n"  # noqa: E501
            },
        },
        "test_site_attacks.py::test_what_leaves_is_within_the_policy": {
            "an error's own words": {
                "lambda message: messaging.Error(self._why)": "lambda message: message"
            },
            "auxiliary variables pass": {
                "if reply.aux_var.keys() - {AUX_NAME} or type(votes) not": "if type(votes) not",
                "aux: dict[str, Any] = {}": "aux: dict[str, Any] = dict(reply.aux_var)",
                "if module.aux_name not in (None, AUX_NAME):": "if False:",
            },
            "weights by steps": {
                "or shared.weights != 1": "",
                "not aggregator.steps_weighted": "True",
                "ModelUpdates(sent, 1)": "ModelUpdates(sent, shared.weights)",
            },
            "metrics and losses by any name": {
                'if not {"loss", "n_steps"} <= {*named} or': "if",
                "found.get(name, 0)": "getattr(reply, name)",
            },
        },
    },
}

PERSONAL: Room = {
    "federation/personal_client.py": {
        "test_personal.py::test_the_client_and_the_server_both_say_what_stays": {
            "the whole update is shared": {
                "prepare_for_sharing(updates=shared": "prepare_for_sharing(updates=updates"
            },
        },
        "test_personal.py::test_modules_that_share_gradients_are_refused": {
            "what is sent is not looked through": {
                "if told := _named(sent, own)": "if told := _named([], own)"
            },
        },
        "test_personal.py::test_a_server_that_shares_what_a_client_keeps_is_refused_before_any_step": {  # noqa: E501
            "a server may share what a client keeps": {
                "if asked := own & model": "if asked := own - own & model"
            },
        },
        "test_personal.py::test_own_layers_survive_a_restart_bit_for_bit": {
            "layers are kept and not taken up": {"self._restore(self._kept)": "self._kept.check()"},
        },
        "test_personal.py::test_an_update_of_nan_leaves_own_layers_as_they_were": {
            "NaN is kept for ever": {"and not _is_finite(own)": "and not own"},
        },
    },
    "federation/personal.py": {
        "test_personal.py::test_own_layers_survive_rounds_evaluation_and_stop": {
            "the final weights replace own layers": {
                "{**mine.coefs, **shared.coefs}": "{n: a * 0 for n, a in mine.coefs.items()}"
            },
        },
        "test_personal.py::test_batchnorm_stands_for_layers_with_running_statistics": {
            "statistics stay without their layer": {
                "[-1])] in layers}": "[-1])] in layers and STATISTICS.match(n)}"
            },
        },
        "test_personal.py::test_patterns_that_match_nothing_everything_or_half_are_refused": {
            "a tied tensor is shared under its other name": {
                "if (name in self.own) != (other in self.own)": "if False"
            },
        },
    },
    "arrays/frozen.py": {
        "test_frozen.py::test_frozen_batchnorm_keeps_its_statistics_and_uses_them": {
            "frozen BatchNorm is in training": {"layer.training = False": "layer.training = True"},
        },
    },
}
TURNS: Room = {
    "federation/update/turns.py": {
        "test_turns.py::test_each_client_has_one_turn_in_as_many_rounds": {
            "a client that is due twice": {"round_ % apart :: apart": "round_ % apart ::"},
        },
        "test_turns.py::test_the_server_stops_where_turns_are_closer_than_it_charges_for": {
            "turns that are closer than charged": {
                "if self.separation >= separation": "if self.separation + 1 >= separation"
            },
        },
    },
    "federation/round_robin.py": {
        "test_turns.py::test_nobody_takes_the_place_of_a_client_that_has_left": {
            "everybody where nobody is left": {
                "return set(found)\n": "return set(found)\n        return set()\n"
            },
        },
        "test_turns.py::test_a_reply_out_of_turn_ends_the_run": {
            "a reply out of turn": {"client_to_reply.keys() - self._due": "self._due - self._due"},
        },
    },
    "federation/update/budget.py": {
        "test_turns.py::test_a_short_audit_finds_the_faults_and_no_others": {
            "noise for one coefficient": {
                "self.update_noise *= math.hypot(*coefficients)": "self.update_noise *= 1.0"
            },
        },
        "test_turns.py::test_a_restart_begins_a_schedule_and_pays_for_rounds_that_may_be_lost": {
            "lost rounds for nothing": {"1 + self._owed": "1"},
        },
        "test_turns.py::test_a_client_is_charged_for_its_turns": {
            "a turn that is charged late": {
                "% self.separation == 0": "% self.separation == self.separation - 1"
            },
        },
        "test_turns.py::test_what_is_released_is_the_stream_in_units_of_the_bound": {
            "values in the order of names": {"names = sorted(average)": "names = list(average)"},
        },
    },
    "federation/update/adaptive.py": {
        "test_turns.py::test_the_server_stops_where_turns_are_closer_than_it_charges_for": {
            "no turns at all": {"if self.separation > 1 and": "if self.separation > 99 and"},
        },
        "test_turns.py::test_a_round_that_is_withheld_is_one_of_the_stream": {
            "a round that is withheld is none": {"self.budget.skip(average, self.round)": "pass"},
        },
    },
    "privacy/banded.py": {
        "test_turns.py::test_a_stream_is_the_inverse_of_its_matrix": {
            "noise of the wrong age": {"np.arange(kept) - 1": "np.arange(kept)"},
        },
        "test_turns.py::test_no_other_coefficients_have_less_error": {
            "coefficients for another length": {"+ 2.0 * found / length": "+ 1.9 * found / length"},
        },
    },
    "dpsgd/manager.py": {
        "test_dpsgd_manager.py::test_other_batches_than_announced_are_refused": {
            "another rate than announced": {
                "if asked.rate != self._sampler.rate": "if asked.rate > 1.0"
            },
        },
    },
}

ROOMS = {
    "update": UPDATE,
    "statistics": STATISTICS,
    "privacy": PRIVACY,
    "dpsgd": DPSGD,
    "site": SITE,
    "personal": PERSONAL,
    "engine": ENGINE,
    "rules": RULES,
    "turns": TURNS,
}


def faults(room: str) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Yield each fault: its name, the file, texts that are there once and new ones, the test."""
    for file, tests in ROOMS[room].items():
        for test, named in tests.items():
            for name, texts in named.items():
                yield name, file, texts, test


@pytest.mark.parametrize("room", ROOMS)
def test_each_mutation_is_of_a_text_that_is_there(room: str) -> None:
    wrong = {}
    for name, file, texts, test in faults(room):
        source = (ROOT / "fedclip" / file).read_text(encoding="utf-8")
        tests, _, function = test.partition("::")
        found = [text for text in texts if source.count(text) != 1]
        if f"def {function.partition('[')[0]}(" not in (ROOT / "tests" / tests).read_text("utf-8"):
            found.append(test)
        if found:
            wrong[name] = found
    assert not wrong


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], Any]]:
    """Return a function that runs a test of a copy of fedclip: its exit status and its output."""
    for package in ("torch", "dp_accounting"):
        pytest.importorskip(package)
    if not hasattr(os, "fork"):
        pytest.skip("processes can not be forked here")
    # Outside the checkout, whose fedclip must not be found.
    folder = tmp_path_factory.mktemp("runner")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "mutated.py")],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdin
        assert runner.stdout
        stdin, stdout = runner.stdin, runner.stdout

        def run(copy: Path, test: str) -> Any:
            print(json.dumps([str(copy), test]), file=stdin, flush=True)
            return json.loads(stdout.readline())

        yield run
        stdin.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "file", "texts", "test"),
    [pytest.param(*fault, id=f"{room}-{fault[0]}") for room in ROOMS for fault in faults(room)],
)
def test_each_mutation_fails_its_test(
    name: str,
    file: str,
    texts: dict[str, str],
    test: str,
    run: Callable[[Path, str], Any],
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "fedclip", tmp_path / "fedclip")
    # Opacus has a package of that name, too.
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    mutant = tmp_path / "fedclip" / file
    source = mutant.read_text(encoding="utf-8")
    for old, new in texts.items():
        source = source.replace(old, new)
    mutant.write_text(source, encoding="utf-8")
    status, said = run(tmp_path, test)
    # 1: a test has failed; more: there was none, or it could not be run.
    assert status == 1, said[-2000:]
    assert re.search(r"^1 failed", said, re.MULTILINE), said[-2000:]
