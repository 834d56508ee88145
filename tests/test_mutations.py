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
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Replaces texts of a file of fedclip, each of which is there once; then a test fails."""

    file: str
    texts: dict[str, str]
    test: str


UPDATE = {
    "votes that outvote the noise": Mutation(
        "federation/update/bound.py",
        {"min(max(within - votes / 2, -clients / 2), clients / 2)": "within - votes / 2"},
        "test_update_clip.py::test_shares_with_noise",
    ),
    "a share above 1": Mutation(
        "federation/update/bound.py",
        {"+ 0.5, 0.0), 1.0)": "+ 0.5, -9.0), 9.0)"},
        "test_update_clip.py::test_shares_with_noise",
    ),
    "no votes as none within": Mutation(
        "federation/update/bound.py",
        {"votes else None": "votes else 0.0"},
        "test_update_clip.py::test_client_without_a_step_abstains",
    ),
    "a share of those that reply": Mutation(
        "federation/update/adaptive.py",
        {"within, self.expected_clients": "within, clients"},
        "test_update_clip.py::test_a_noised_average_of_whoever_replies_is_the_sum_by_hand",
    ),
    "a sum of votes below 0": Mutation(
        "federation/update/adaptive.py",
        {"0 <= within": "within"},
        "test_update_clip.py::test_a_secure_sum_of_votes_that_can_not_be_moves_the_bound_by_one_step_at_most",
    ),
    "more votes than clients": Mutation(
        "federation/update/adaptive.py",
        {"votes <= clients": "votes"},
        "test_secagg.py::test_lie_in_a_secure_sum_of_votes",
    ),
    "within the bound without a vote": Mutation(
        "federation/update/exchange.py",
        {"(1, 1))": "(1, 1), (0, 1))"},
        "test_update_clip.py::test_hostile_votes",
    ),
    "a broken vote of nobody": Mutation(
        "federation/update/messages.py",
        {"        return cls(n_faults=1)\n": "        return cls(0, n_faults=1)\n"},
        "test_update_clip.py::test_hostile_votes",
    ),
    "a vote the other way round": Mutation(
        "federation/update/clipping.py",
        {"votes and not self.clipped": "votes and self.clipped"},
        "test_update_clip.py::test_norm_equal_to_the_bound_is_within_it",
    ),
    "a norm equal to the bound as above it": Mutation(
        "federation/update/clipping.py",
        {"votes and not self.clipped": "votes and (self.norm or 0.0) < sent.bound"},
        "test_update_clip.py::test_norm_equal_to_the_bound_is_within_it",
    ),
    "a vote by the shortest group": Mutation(
        "federation/update/clipping.py",
        {"clipped).any()": "clipped).all()"},
        "test_update_clip.py::test_the_vote_on_groups_is_about_the_longest_of_them",
    ),
    "the vote of a client that took no step": Mutation(
        "federation/update/clipping.py",
        {" and self.norm is not None": ""},
        "test_update_clip.py::test_client_without_a_step_abstains",
    ),
    "a bound beyond its limits": Mutation(
        "federation/update/bound.py",
        {"self.within(moved)": "moved"},
        "test_update_clip.py::test_bounds_on_the_bound",
    ),
    "evidence that outlasts a turn": Mutation(
        "federation/update/pace.py",
        {"lead = abs(evidence) if evidence * off > 0 else 0.0": "lead = abs(evidence)"},
        "test_pace.py::test_steps_by_hand",
    ),
    "faster though a share is as it may be": Mutation(
        "federation/update/pace.py",
        {"off, sure = share - quantile, _SURE * spread": "off, sure = share - quantile, 0.0"},
        "test_pace.py::test_steps_by_hand",
    ),
    "more than twice as fast at once": Mutation(
        "federation/update/pace.py",
        {"max(before, sure) + _DOUBLES, most)": "most)"},
        "test_pace.py::test_steps_by_hand",
    ),
    "evidence in what is beside the quantile": Mutation(
        "federation/update/pace.py",
        {"max(abs(total) - slack, 0.0)": "abs(total)"},
        "test_pace.py::test_steps_by_hand",
    ),
    "steps that follow the number of replies": Mutation(
        "federation/update/adaptive.py",
        {"spread(self.quantile, self.budget.clients, ": "spread(self.quantile, votes or 1, "},
        "test_pace.py::test_steps_depend_on_noised_votes_only",
    ),
    "a restart without evidence": Mutation(
        "federation/update/adaptive.py",
        {"self.search, self.evidence = search, evidence": "self.search = search"},
        "test_pace.py::test_a_restart_mid_run_makes_no_difference",
    ),
    "a search that ends only at a limit": Mutation(
        "federation/update/bound.py",
        {"_FOUND or": "_FOUND and"},
        "test_update_clip.py::test_a_search_by_hand",
    ),
    "a search that ends where the bound is right": Mutation(
        "federation/update/bound.py",
        {"(moved == bound and abs(pull) == 1.0)": "moved == bound"},
        "test_update_clip.py::test_a_search_at_the_limits_of_the_bound_by_hand",
    ),
    "a search that never turns": Mutation(
        "federation/update/bound.py",
        {"= turned or": "= turned and"},
        "test_update_clip.py::test_a_search_by_hand",
    ),
    "full steps until the turn": Mutation(
        "federation/update/bound.py",
        {"or abs(pull": "and abs(pull"},
        "test_update_clip.py::test_a_search_by_hand",
    ),
    "too high where a few more are within": Mutation(
        "federation/update/bound.py",
        {"pull == 1.0": "pull > 0.0"},
        "test_update_clip.py::test_a_search_by_hand",
    ),
    "a release of what is too high": Mutation(
        "federation/update/adaptive.py",
        {"            return zeros(average)\n": "            pass\n"},
        "test_bound_search.py::test_no_update_is_released_where_the_bound_is_too_high",
    ),
    "the noise of the votes on the average": Mutation(
        "federation/update/budget.py",
        {"round_, 1": "round_, 0"},
        "test_update_clip.py::test_votes_and_average_have_noise_of_their_own",
    ),
    "the noise of the average on the votes": Mutation(
        "federation/update/budget.py",
        {", 0))[0]": ", 1))[0]"},
        "test_update_clip.py::test_votes_and_average_have_noise_of_their_own",
    ),
    "the same noise each round": Mutation(
        "federation/update/budget.py",
        {"(seed, round_, use)": "(seed, use)"},
        "test_update_clip.py::test_votes_and_average_have_noise_of_their_own",
    ),
    "the noise of the first round in all": Mutation(
        "federation/update/adaptive.py",
        {"        self.round += 1\n": ""},
        "test_update_clip.py::test_insecure_noise_can_be_repeated_and_resumed",
    ),
    "the noise of the update on the votes": Mutation(
        "federation/update/budget.py",
        {"self.bits_noise,": "self.update_noise,"},
        "test_update_clip.py::test_votes_and_average_have_noise_of_their_own",
    ),
    "noise that the votes have not been taken from": Mutation(
        "federation/update/budget.py",
        {"= self.update_noise": "= self.noise_multiplier"},
        "test_update_clip.py::test_noise_is_sized_on_the_bound_that_was_sent",
    ),
    "noise on the sum": Mutation(
        "federation/update/budget.py",
        {"bound / self.clients": "bound"},
        "test_update_clip.py::test_noise_is_sized_on_the_bound_that_was_sent",
    ),
    "noise for the next bound": Mutation(
        "federation/update/adaptive.py",
        {"average, sent.bound, self.round": "average, self.bound, self.round"},
        "test_update_clip.py::test_noise_is_sized_on_the_bound_that_was_sent",
    ),
    "noise on what was rounded": Mutation(
        "federation/update/budget.py",
        {"std, normals, exact": "std, normals"},
        "test_update_clip.py::test_noise_is_added_before_the_average_is_rounded",
    ),
    "an average over the replies, with noise": Mutation(
        "federation/update/aggregator.py",
        {"budget.clients if budget else clients": "clients"},
        "test_update_clip.py::test_one_client_moves_the_noised_average_by_its_share_at_most",
    ),
    "an average over the sound updates": Mutation(
        "federation/update/averaging.py",
        {"total / clients)": "total / len(updates))"},
        "test_update_clip.py::test_one_client_moves_the_noised_average_by_its_share_at_most",
    ),
    "votes are paid and not asked for": Mutation(
        "federation/update/adaptive.py",
        {"if self.learning_rate == 0:\n            bits = 0.0\n        elif": "if"},
        "test_update_clip.py::test_fixed_bound_from_the_server_asks_for_no_votes",
    ),
    "votes without noise": Mutation(
        "federation/update/adaptive.py",
        {"        if self.learning_rate == 0:\n            return None\n": ""},
        "test_update_clip.py::test_fixed_bound_from_the_server_asks_for_no_votes",
    ),
    "statistics of another name allowed": Mutation(
        "federation/update/adaptive.py",
        {"name in (self.unnoised or ()": "self.unnoised is not None or name in ("},
        "test_exposure.py::test_a_server_refuses_them_before_its_first_message",
    ),
    "noise on what another module changed": Mutation(
        "federation/update/server.py",
        {"gradients is not round_.average": "round_.average is None"},
        "test_update_clip.py::test_server_voids_a_round_whose_bound_does_not_hold",
    ),
    "tensors without a bound under noise": Mutation(
        "federation/update/aggregator.py",
        {"            if self.exclude:\n": "            if False:\n"},
        "test_update_clip.py::test_server_voids_a_round_whose_bound_does_not_hold",
    ),
    "counts without noise": Mutation(
        "federation/update/clipping.py",
        {"not sent.private": "True"},
        "test_update_clip.py::test_under_noise_nothing_else_is_counted",
    ),
    "a round that is not charged": Mutation(
        "federation/update/adaptive.py",
        {"            self.budget.spend()\n": "            pass\n"},
        "test_update_clip.py::test_the_budget_ends_the_training_before_it_is_passed",
    ),
    "a charge for the update alone": Mutation(
        "federation/update/budget.py",
        {"add(self.noise_multiplier": "add(self.update_noise"},
        "test_update_clip.py::test_the_budget_ends_the_training_before_it_is_passed",
    ),
    "a charge for other neighbours": Mutation(
        "federation/update/adaptive.py",
        {"Accountant(self.delta, self.relation)": "Accountant(self.delta)"},
        "test_update_clip.py::test_replace_one_costs_what_half_the_noise_costs",
    ),
    "no first round at the budget": Mutation(
        "federation/update/budget.py",
        {"if first >": "if first >="},
        "test_update_clip.py::test_a_budget_is_spent_to_its_very_end",
    ),
    "no last round at the budget": Mutation(
        "federation/update/budget.py",
        {"after <=": "after <"},
        "test_update_clip.py::test_a_budget_is_spent_to_its_very_end",
    ),
    "a round beyond the budget": Mutation(
        "federation/update/adaptive.py",
        {"self.halt(self.budget.refusal())": "pass"},
        "test_update_clip.py::test_the_budget_ends_the_training_before_it_is_passed",
    ),
    "a spent budget without noise": Mutation(
        "federation/update/budget.py",
        {"found and": "found is None and"},
        "test_update_clip.py::test_state_that_can_not_be",
    ),
    "a budget that a restart renews": Mutation(
        "federation/update/adaptive.py",
        {"self.budget.resume(spent)": "pass"},
        "test_update_clip.py::test_insecure_noise_can_be_repeated_and_resumed",
    ),
    "the bound of an older message": Mutation(
        "federation/update/client.py",
        {"self._round = None\n        CLIENT.set(None)\n        if not": "if not"},
        "test_update_clip.py::test_a_client_goes_by_the_bound_of_its_round_only",
    ),
    "the bound of an older round": Mutation(
        "federation/update/client.py",
        {"round_, self._round = self._round, None": "round_ = self._round"},
        "test_update_clip.py::test_a_client_goes_by_the_bound_of_its_round_only",
    ),
    "the bound of one client for another": Mutation(
        "federation/update/client.py",
        {"self._round, None\n        CLIENT.set(None)": "self._round, None"},
        "test_update_clip.py::test_a_client_goes_by_the_bound_of_its_round_only",
    ),
    "the bound of a round that is over": Mutation(
        "federation/update/server.py",
        {"        SERVER.set(None)\n        trouble": "        trouble"},
        "test_update_clip.py::test_a_round_ends_with_its_update",
    ),
    "a table does not split the bound": Mutation(
        "federation/update/limits.py",
        {"in_table(table, label, 0.0) if table else 1.0": "1.0"},
        "test_update_clip.py::test_groups_of_a_bound_from_the_server_stay_within_it_together",
    ),
    "the whole bound for each group": Mutation(
        "federation/update/limits.py",
        {"bound / (length / part) if part else 0.0": "bound"},
        "test_update_clip.py::test_groups_of_a_bound_from_the_server_stay_within_it_together",
    ),
    "the whole bound for each group, on the server": Mutation(
        "federation/update/aggregator.py",
        {"bound, round_ is not None, share.mass)": "bound, False, share.mass)"},
        "test_update_clip.py::test_groups_that_reach_the_bound_each_by_itself_are_refused",
    ),
    "twice the limit of one client": Mutation(
        "federation/update/limits.py",
        {"_SLACK if clients == 1 else _SUM_SLACK": "_SUM_SLACK"},
        "test_update_clip.py::test_hostile_update",
    ),
    "the limit of one for a sum": Mutation(
        "federation/update/limits.py",
        {"mass * slack": "slack"},
        "test_update_clip.py::test_sum_that_honest_clients_could_not_have_made",
    ),
    "NaN in an update": Mutation(
        "federation/update/limits.py",
        {"it holds NaN or infinity": ""},
        "test_update_clip.py::test_hostile_update",
    ),
    "a broken reply for as many as it says": Mutation(
        "federation/update/messages.py",
        {"fault else cls(vector, 1, 1, *": "0 else cls(vector, 1, data.get('n_clients'), *"},
        "test_update_clip.py::test_hostile_update",
    ),
    "a secure sum as one reply": Mutation(
        "federation/update/aggregator.py",
        {"sum(max(1, part.n_clients) for part in parts)": "len(parts)"},
        "test_update_clip.py::test_sum_that_honest_clients_could_not_have_made",
    ),
    "a bound for other groups": Mutation(
        "federation/update/clipping.py",
        {"if sent.scope != self.scope": "if False"},
        "test_update_core.py::test_a_client_refuses_what_is_not_for_it",
    ),
    "a vote that can not be, counted": Mutation(
        "federation/update/engine.py",
        {"r.clients > 1 or is_one_of(VOTES, v)": "True"},
        "test_update_core.py::test_what_no_honest_client_replies_counts_as_zeros",
    ),
    "the noise of those that reply": Mutation(
        "federation/update/engine.py",
        {"self.bound.budget.clients if self.bound.budget else clients": "clients"},
        "test_update_core.py::test_the_core_and_the_plugins_give_the_same",
    ),
    "zeros that vote": Mutation(
        "federation/update/clipping.py",
        {"times == 0.0 if steps is None else steps == 0": "steps == 0"},
        "test_update_core.py::test_all_zeros_abstain_where_steps_are_not_known",
    ),
    "a value at the edge of the range": Mutation(
        "federation/update/secagg.py",
        {"clipval * _EDGE:": "clipval:"},
        "test_secagg.py::test_values_at_the_edge_of_the_range_keep_their_sign",
    ),
    "ARC for one less": Mutation(
        "federation/update/arc.py",
        {"[brought(len(norms), n_hostile)]": "[brought(len(norms), n_hostile) - 1]"},
        "test_combine.py::test_they_are_what_their_papers_say",
    ),
    "ARC without those that were refused": Mutation(
        "federation/update/combining.py",
        {"norms = [0.0] * clients": "norms = [0.0] * len(updates)"},
        "test_combine.py::test_a_refused_reply_counts_as_zeros",
    ),
    "a trimmed mean of the largest too": Mutation(
        "federation/update/trimmed.py",
        {"n_hostile : clients - n_hostile": "n_hostile:"},
        "test_combine.py::test_no_coordinate_of_a_trimmed_mean_is_beyond_those_of_the_others",
    ),
    "a trimmed mean in float32": Mutation(
        "federation/update/trimmed.py",
        {"axis=1, dtype=np.float64": "axis=1"},
        "test_combine.py::test_arrays_of_each_framework_and_dtype",
    ),
    "as many hostile replies as others": Mutation(
        "federation/update/combining.py",
        {"clients > 2 * self": "clients > self"},
        "test_combine.py::test_a_round_of_too_few_says_so",
    ),
    "a simulation in which nobody has taken a step": Mutation(
        "tools/simulate.py",
        {", steps=steps)": ")"},
        "test_simulate.py::test_each_setting_of_the_aggregator_moves_the_model",
    ),
}
STATISTICS = {
    "a norm more than may be counted": Mutation(
        "federation/statistics/counts.py",
        {"state.new <": "state.new <="},
        "test_shared.py::test_max_steps_bounds_what_a_client_counts_and_may_claim",
    ),
    "the limit of one for a secure sum": Mutation(
        "federation/statistics/counts.py",
        {"> members * most": "> most"},
        "test_shared.py::test_counts_that_can_not_be",
    ),
    "norms counted before anything is known": Mutation(
        "federation/statistics/counts.py",
        {"judged.learns & (seen": "(seen"},
        "test_shared.py::test_the_first_norm_of_a_client_is_not_counted_and_spikes_are_as_what_is_learnt",
    ),
    "the first five norms of a client not counted": Mutation(
        "federation/statistics/client.py",
        {"replace(own, least=min(own.least, 1))": "own"},
        "test_shared.py::test_the_first_norm_of_a_client_is_not_counted_and_spikes_are_as_what_is_learnt",
    ),
    "a mean of norms that are not counted": Mutation(
        "federation/statistics/counts.py",
        {"            seen = xp.where(weight > 0, seen, state.new_mean)\n": ""},
        "test_shared.py::test_max_steps_bounds_what_a_client_counts_and_may_claim",
    ),
    "the sign of a sum": Mutation(
        "federation/statistics/counts.py",
        {"- _number": "+ _number"},
        "test_shared.py::test_moments_of_the_warm_up_are_those_of_all_norms",
    ),
    "squares in the place of deviations": Mutation(
        "federation/statistics/counts.py",
        {"self.n - shift * shift": "self.n"},
        "test_shared.py::test_moments_of_the_warm_up_are_those_of_all_norms",
    ),
    "a mean below 0": Mutation(
        "federation/statistics/counts.py",
        {"max(float(Fraction(centre) + shift), 0.0": "float(Fraction(centre) + shift"},
        "test_shared.py::test_rounding_makes_no_mean_and_no_variance_negative",
    ),
    "a digit too many": Mutation(
        "federation/statistics/counts.py",
        {"= members": " members"},
        "test_shared.py::test_counts_that_can_not_be",
    ),
    "buckets that overflow to the right sum": Mutation(
        "federation/statistics/counts.py",
        {"buckets > totals).any() or (": ""},
        "test_shared.py::test_counts_that_can_not_be",
    ),
    "buckets that do not add up": Mutation(
        "federation/statistics/counts.py",
        {" or (buckets.sum(axis=0) != totals).any()": ""},
        "test_shared.py::test_counts_that_can_not_be",
    ),
    "buckets above the highest norm": Mutation(
        "federation/statistics/counts.py",
        {"buckets[bounds.above].any()": "False"},
        "test_shared.py::test_the_highest_bucket_is_that_of_the_highest_norm",
    ),
    "no rounding to single precision": Mutation(
        "federation/statistics/counts.py",
        {"highest * _SINGLE": "highest"},
        "test_shared.py::test_the_highest_bucket_is_that_of_the_highest_norm",
    ),
    "a bucket above the highest": Mutation(
        "federation/statistics/counts.py",
        {"] > last": "] > last + 1"},
        "test_shared.py::test_the_highest_bucket_is_that_of_the_highest_norm",
    ),
    "a negative variance": Mutation(
        "federation/statistics/counts.py",
        {'return "a negative variance"': "pass"},
        "test_shared.py::test_sums_that_no_norms_have",
    ),
    "parts of a sum that cancel": Mutation(
        "federation/statistics/counts.py",
        {"(up + down > _SLACK * reach) | (squares > most)": "squares > most"},
        "test_shared.py::test_sums_that_no_norms_have",
    ),
    "a sum of no norms": Mutation(
        "federation/statistics/counts.py",
        {"(up + down > _SLACK * reach) | (squares > most)": "up + down > _SLACK * reach"},
        "test_shared.py::test_sums_that_no_norms_have",
    ),
    "counts of nobody": Mutation(
        "federation/statistics/counts.py",
        {"< members": "<= members"},
        "test_shared.py::test_what_is_no_message",
    ),
    "a client that speaks for many": Mutation(
        "federation/statistics/messages.py",
        {"1, data.get": "data.get('members', 1), data.get"},
        "test_shared.py::test_what_is_no_message",
    ),
    "counts that overflow": Mutation(
        "federation/statistics/counts.py",
        {"if counts.max(initial=0) >= 2**48:": "if False:"},
        "test_shared.py::test_what_is_no_message",
    ),
    "a quantile beyond the last norm": Mutation(
        "federation/statistics/counts.py",
        {"(total - 1)": "total"},
        "test_shared.py::test_levels_are_those_of_the_last_rounds",
    ),
    "counts sent twice": Mutation(
        "federation/statistics/client.py",
        {", **nothing": ""},
        "test_shared.py::test_no_norm_is_sent_twice_nor_with_another_state",
    ),
    "counts by an older state": Mutation(
        "federation/statistics/client.py",
        {"statistics if self.version == message.version else {}": "statistics"},
        "test_shared.py::test_no_norm_is_sent_twice_nor_with_another_state",
    ),
    "counts lost before groups are known": Mutation(
        "federation/statistics/client.py",
        {"statistics if self.version == message.version else {": "{"},
        "test_shared.py::test_scopes",
    ),
    "a round that is not forgotten": Mutation(
        "federation/statistics/server.py",
        {"= self.size": " self.size"},
        "test_shared.py::test_levels_are_those_of_the_last_rounds",
    ),
    "one history for all groups": Mutation(
        "federation/statistics/server.py",
        {") for _ in labels]": ")] * len(labels)"},
        "test_shared.py::test_each_group_has_its_own_bounds_and_its_own_norms",
    ),
    "empty rounds remembered": Mutation(
        "federation/statistics/server.py",
        {"None and round_.n": "None"},
        "test_shared.py::test_a_group_without_norms_stands_still",
    ),
    "groups without norms that move": Mutation(
        "federation/statistics/server.py",
        {"(counted.n > 0) & np.all": "np.all"},
        "test_shared.py::test_a_group_without_norms_stands_still",
    ),
    "the bounds of another group": Mutation(
        "federation/statistics/server.py",
        {"np.repeat(known, len(messages), axis=-1": "np.tile(known, len(messages)"},
        "test_shared.py::test_each_group_has_its_own_bounds_and_its_own_norms",
    ),
    "the members of another message": Mutation(
        "federation/statistics/server.py",
        {"if len(sizes) > 1:": "if False:"},
        "test_shared.py::test_members_speak_for_no_more_than_there_are",
    ),
    "only the last of many clients": Mutation(
        "federation/statistics/server.py",
        {"total +=": "total ="},
        "test_shared.py::test_many_clients_are_checked_together_and_lies_are_left_out_alone",
    ),
    "a liar that costs others their counts": Mutation(
        "federation/statistics/server.py",
        {"self._fault([(n, c)], bounds)": '"spoilt"'},
        "test_shared.py::test_many_clients_are_checked_together_and_lies_are_left_out_alone",
    ),
    "counts that are impossible": Mutation(
        "federation/statistics/server.py",
        {"not fault and counts": "counts"},
        "test_shared.py::test_many_clients_are_checked_together_and_lies_are_left_out_alone",
    ),
    "norms of any size": Mutation(
        "federation/statistics/server.py",
        {"self.rule.ceiling(self.state": "np.full(len(self.labels), np.inf"},
        "test_shared.py::test_a_variance_that_no_norms_of_that_mean_have_is_refused",
    ),
    "a newer version after a restart": Mutation(
        "federation/statistics/server.py",
        {"        self.version = version\n": "        self.version = max(self.version, version)\n"},
        "test_shared.py::test_a_group_without_norms_stands_still",
    ),
    "statistics sent without noise": Mutation(
        "federation/statistics/counterpart.py",
        {") if admitted else {}": ")"},
        "test_exposure.py::test_a_server_refuses_them_before_its_first_message",
    ),
    "statistics before the noise": Mutation(
        "federation/statistics/counterpart.py",
        {"not None:": "None and False:"},
        "test_exposure.py::test_a_server_refuses_statistics_that_stand_before_its_noise",
    ),
}
PRIVACY = {
    "half of the noise on bits": Mutation(
        "privacy/accounting.py",
        {"(2 * sigma)) * (1 + z / (2 * sigma)": "sigma) * (1 + z / sigma"},
        "test_noise.py::test_split_costs_what_the_accountant_is_told",
    ),
    "a charge that forgets the last": Mutation(
        "privacy/accounting.py",
        {"more._replace(steps=last.steps + more.steps)": "more"},
        "test_noise.py::test_budget_adds_up_and_is_restored",
    ),
    "rounds of another rate as the same": Mutation(
        "privacy/accounting.py",
        {"(steps=more.steps) == more:": "(steps=more.steps)[0] == more[0]:"},
        "test_noise.py::test_samples_are_kept_apart_and_restored",
    ),
    "releases that are not added up": Mutation(
        "privacy/accounting.py",
        {"merged.get((z, sampling), 0) + steps": "steps"},
        "test_noise.py::test_releases_of_all_kinds_add_up",
    ),
    "no step at the budget": Mutation(
        "privacy/accounting.py",
        {"high, sampling) <=": "high, sampling) <"},
        "test_update_clip.py::test_a_budget_is_spent_to_its_very_end",
    ),
    "a step beyond the budget": Mutation(
        "privacy/accounting.py",
        {"        return low\n\n    def _with": "        return high\n\n    def _with"},
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism",
    ),
    "steps that add up without a root": Mutation(
        "privacy/accounting.py",
        {"math.sqrt(r.steps)": "r.steps"},
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism",
    ),
    "another in one's place for half": Mutation(
        "privacy/accounting.py",
        {"= (2.0 if": "= (1.0 if"},
        "test_noise.py::test_releases_of_all_kinds_add_up",
    ),
    "delta that rounding has used": Mutation(
        "privacy/accounting.py",
        {"        delta -= rounding\n": ""},
        "test_noise.py::test_delta_is_left_to_what_transforms_may_round",
    ),
    "most of delta to rounding": Mutation(
        "privacy/accounting.py",
        {"rounding > min(delta, _SLOWEST) / 2.0": "rounding > min(delta, _SLOWEST)"},
        "test_noise.py::test_delta_is_left_to_what_transforms_may_round",
    ),
    "the rounding of one step for all": Mutation(
        "privacy/accounting.py",
        {"sum(release.steps for release in spent": "len(spent"},
        "test_noise.py::test_delta_is_left_to_what_transforms_may_round",
    ),
    "an accountant of the largest sample": Mutation(
        "privacy/accounting.py",
        {"tightest(min": "tightest(max"},
        "test_noise.py::test_samples_are_kept_apart_and_restored",
    ),
    "a plan that is rounded down": Mutation(
        "privacy/planning.py",
        {"math.ceil(round": "math.floor(round"},
        "test_planning.py::test_a_plan_is_worth_its_rounds_and_no_more",
    ),
    "a plan for other neighbours": Mutation(
        "privacy/planning.py",
        {"turns, relation=relation": "turns"},
        "test_planning.py::test_a_plan_is_worth_its_rounds_and_no_more",
    ),
    "a record replaced for one removed": Mutation(
        "privacy/sensitivity.py",
        {'self.l2_bound * (2.0 if relation == "replace-one" else 1.0)': "self.l2_bound"},
        "test_privacy.py::test_a_clipper_answers_for_itself",
    ),
    "the radius of a ball for its diameter": Mutation(
        "privacy/sensitivity.py",
        {"2.0 * bound)\n        return None": "bound)\n        return None"},
        "test_sensitivity.py::test_only_the_diameter_bounds_an_aggregate_that_is_normalised",
    ),
    "a bound that others can move": Mutation(
        "privacy/sensitivity.py",
        {"not self.per_record_safe or self.l2_bound": "self.l2_bound"},
        "test_privacy.py::test_a_clipper_answers_for_itself",
    ),
    "a sensitivity after noise": Mutation(
        "privacy/sensitivity.py",
        {"        if self.noised:\n            return None\n        found": "        found"},
        "test_privacy.py::test_noise_first_makes_all_that_follows_free",
    ),
    "a bound on weights that decay": Mutation(
        "privacy/sensitivity.py",
        {"None or self.w_decay != 0.0": "None"},
        "test_privacy.py::test_what_a_round_needs",
    ),
    "a bound of a round rounded below it": Mutation(
        "privacy/sensitivity.py",
        {"outwards(rate * steps * self.l2_bound)": "rate * steps * self.l2_bound"},
        "test_privacy.py::test_no_bound_of_a_round_is_rounded_below_it",
    ),
    "the bound of the last map only": Mutation(
        "privacy/sensitivity.py",
        {"min(map_.bound, bound if map_.growth == 1.0 else bound * map_.growth)": "map_.bound"},
        "test_privacy.py::test_without_shapes",
    ),
    "a bound that what follows outgrows": Mutation(
        "privacy/sensitivity.py",
        {"bound * map_.growth)\n        found": "bound)\n        found"},
        "test_privacy.py::test_without_shapes",
    ),
    "noise within a record": Mutation(
        "privacy/sensitivity.py",
        {"shared and not noised": "shared"},
        "test_privacy.py::test_noise_first_makes_all_that_follows_free",
    ),
    "the slope of the steepest map only": Mutation(
        "privacy/sensitivity.py",
        {"math.prod(m.lipschitz for m in maps": "max((m.lipschitz for m in maps), default=1.0"},
        "test_privacy.py::test_a_plugin_that_is_not_known_bounds_nothing",
    ),
    "Adam's bound where it has none": Mutation(
        "privacy/bounds.py",
        {"* a < b)": "* a <= b)"},
        "test_sensitivity.py::test_divisions_that_nothing_bounds",
    ),
    "RMSProp without its memory": Mutation(
        "privacy/bounds.py",
        {"1.0 / math.sqrt(1.0 - beta)": "1.0"},
        "test_sensitivity.py::test_what_comes_after_a_clip_exceeds_its_bound",
    ),
    "momentum that adds nothing up": Mutation(
        "privacy/bounds.py",
        {'1.0 if module.name == "ewma" else 1.0 / (1.0 - beta)': "1.0"},
        "test_privacy.py::test_without_shapes",
    ),
    "a bound for NaN": Mutation(
        "privacy/bounds.py",
        {"if not context.finite:\n        return": "if False:\n        return"},
        "test_privacy.py::test_what_comes_before_noise_is_what_noise_is_sized_on",
    ),
    "an epsilon below the truth": Mutation(
        "privacy/gaussian.py",
        {") * (1.0 + _ROUNDING)": ")"},
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism",
    ),
    "a delta below the truth": Mutation(
        "privacy/gaussian.py",
        {"a - (epsilon / mu + mu / 2.0) * 2.0**-52": "a"},
        "test_noise.py::test_epsilon_is_that_of_the_gaussian_mechanism",
    ),
    "the logarithm of 0": Mutation(
        "privacy/noise.py",
        {"(bits.astype(np.float64) + 1.0": "bits.astype(np.float64"},
        "test_noise.py::test_the_extreme_draws_are_finite",
    ),
    "an angle that follows from the radius": Mutation(
        "privacy/noise.py", {"pairs:] >": ":pairs] >"}, "test_noise.py::test_secure_noise_is_normal"
    ),
    "half of the circle": Mutation(
        "privacy/noise.py",
        {"2.0 * math.pi": "math.pi"},
        "test_noise.py::test_secure_noise_is_normal",
    ),
    "last bits that tell values apart": Mutation(
        "privacy/noise.py",
        {"[1] - 31": "[1] - 60"},
        "test_noise.py::test_float64_models_that_start_at_zero_reach_what_others_do",
    ),
    "a tail that is as coarse as the rest": Mutation(
        "privacy/noise.py",
        {"1 << 32)": "1)"},
        "test_noise.py::test_pairs_are_as_fine_in_their_tail_and_near_zero",
    ),
    "noise for other neighbours": Mutation(
        "privacy/accounting.py",
        {') / (2.0 if relation == "replace-one" else 1.0)': ")"},
        "test_planning.py::test_a_plan_is_worth_its_rounds_and_no_more",
    ),
    "a restart without sampling": Mutation(
        "privacy/accounting.py",
        {"] if sampling == 1.0 else [z, steps, sampling]": "]"},
        "test_noise.py::test_samples_are_kept_apart_and_restored",
    ),
    "a step that is not sampled": Mutation(
        "privacy/accounting.py",
        {"more, sampling": "more"},
        "test_noise.py::test_samples_are_kept_apart_and_restored",
    ),
    "bits that have too little noise for few": Mutation(
        "privacy/accounting.py",
        {"max(clients / 20, noise_multiplier)": "clients / 20"},
        "test_update_clip.py::test_defaults_work_for_three_clients_as_for_a_thousand",
    ),
    "samples of other neighbours": Mutation(
        "privacy/accounting.py",
        {"[relation": "['add-remove'"},
        "test_noise.py::test_accountants_agree_without_samples",
    ),
    "one step for all": Mutation(
        "privacy/accounting.py",
        {"event, steps": "event"},
        "test_noise.py::test_accountants_agree_without_samples",
    ),
}
DPSGD = {
    "a bound for each tensor": Mutation(
        "dpsgd/clipping.py",
        {
            'resolve("global" if whole else': 'resolve("tensor" if whole else',
            "limit = bound / math.sqrt(norms.shape[1])": "limit = bound",
        },
        "test_dpsgd_core.py::test_no_record_adds_more_than_the_bound",
    ),
    "a mean over the actual batch": Mutation(
        "dpsgd/manager.py",
        {"clipping.scale(bound) / expected": "clipping.scale(bound) / max(len(norms), 1)"},
        "test_dpsgd_manager.py::"
        "test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip",
    ),
    "weights after the clip": Mutation(
        "dpsgd/persample/__init__.py",
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
        "dpsgd/manager.py",
        {
            "clipping.noise_multiplier(z, expected) * bound": (
                "clipping.noise_multiplier(z, expected)"
                " * clipping.next_bound(bound, norms, z, expected, 0.0)"
            )
        },
        "test_dpsgd_manager.py::test_noise_is_for_the_bound_that_records_were_clipped_to",
    ),
    "no step for an empty batch": Mutation(
        "dpsgd/manager.py",
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
        "dpsgd/manager.py",
        {
            "self.noise = IndependentNoise()": (
                "self.noise = IndependentNoise("
                "__import__('fedclip.privacy.noise').privacy.noise.insecure_normals(message.seed))"
            )
        },
        "test_dpsgd_manager.py::test_the_servers_seed_is_ignored",
    ),
    "shuffled batches": Mutation(
        "dpsgd/sampling.py",
        {
            "np.flatnonzero(self._bits(self.records) < threshold)": (
                "np.sort(np.random.default_rng().permutation(self.records)[: self.expected])"
            )
        },
        "test_dpsgd_core.py::test_each_record_is_drawn_at_the_rate_independently_over_steps",
    ),
    "a budget that a restart renews": Mutation(
        "dpsgd/ledger.py",
        {
            "if path.exists() else {}": "if False else {}",
            "_OF_THIS_PROCESS.setdefault(self.path, self._entries)": "self._entries",
        },
        "test_dpsgd_manager.py::test_a_restart_goes_on_with_what_was_spent",
    ),
    "NaN passed on": Mutation(
        "dpsgd/persample/__init__.py",
        {"sound = np.isfinite(norms).all(axis=1)": "sound = np.ones(len(norms), dtype=bool)"},
        "test_dpsgd_manager.py::"
        "test_a_sum_is_divided_by_the_expected_size_and_weights_are_inside_the_clip",
    ),
    "noise over the batch size twice": Mutation(
        "dpsgd/manager.py",
        {"clipping.noise_multiplier(z, expected) * bound": "z * bound / expected"},
        "test_dpsgd_manager.py::test_noise_on_the_weights_is_what_the_budget_says",
    ),
    "no clip": Mutation(
        "dpsgd/clipping.py",
        {"np.where(norms > limit, limit /": "np.where(norms > 1e9, limit /"},
        "test_dpsgd_core.py::test_no_record_adds_more_than_the_bound",
    ),
    "the text of what a step raises": Mutation(
        "dpsgd/manager.py",
        {'RuntimeError(f"{what} failed on this client; its log says why") from None': "exc"},
        "test_dpsgd_manager.py::test_a_round_that_breaks_off_is_paid_for",
    ),
    "the time of a round": Mutation(
        "dpsgd/manager.py",
        {'"t_spent": 0.0}': '"t_spent": __import__("time").monotonic()}'},
        "test_dpsgd_leaks.py::test_a_reply_tells_no_time",
    ),
    "a round that one record ends": Mutation(
        "dpsgd/manager.py",
        {"**settings, failed=self._fail": "**settings"},
        "test_dpsgd_leaks.py::test_a_record_that_raises_counts_as_zero_and_the_others_as_ever",
    ),
    "a model tried on record 0": Mutation(
        "dpsgd/manager.py",
        {"try_out(self.model, tried,": "try_out(self.model, self.records.take([0]),"},
        "test_dpsgd_leaks.py::test_a_record_that_raises_counts_as_zero_and_the_others_as_ever",
    ),
    "norms of records in the state": Mutation(
        "dpsgd/place.py",
        {"copy.deepcopy(self.before)": "self.before"},
        "test_dpsgd_leaks.py::test_nothing_is_recorded_before_sample_clip",
    ),
    "classes of the training records": Mutation(
        "dpsgd/client.py",
        {"asdict(self.valid_data.get_data_specs())": "asdict(self.train_data.get_data_specs())"},
        "test_dpsgd_leaks.py::test_metadata_is_told_of_the_validation_records",
    ),
    "a model that remembers": Mutation(
        "dpsgd/persample/torch.py",
        {"if changed or any(": "if any("},
        "test_dpsgd_leaks.py::test_a_model_that_remembers_is_refused",
    ),
    "a file that is put back wins": Mutation(
        "dpsgd/ledger.py",
        {
            "        lost = [line for line in self._entries if line not in found]\n": (
                "        self._entries.clear()\n        lost: list[str] = []\n"
            )
        },
        "test_dpsgd_core.py::test_what_becomes_of_the_file_takes_nothing_from_this_process",
    ),
    "a charge that is not written again": Mutation(
        "dpsgd/ledger.py",
        {"        elif lost:\n            self._add(lost)\n": ""},
        "test_dpsgd_core.py::test_what_becomes_of_the_file_takes_nothing_from_this_process",
    ),
    "steps that were not taken, given back": Mutation(
        "dpsgd/ledger.py",
        {"self._line([paid])": "self._line([paid._replace(steps=paid.steps - unused)])"}
        | {
            "        self._paid = paid\n        with": (
                "        unused, self._paid = min(self._paid.steps, steps - 1), paid\n        with"
            )
        },
        "test_dpsgd_core.py::test_nothing_is_given_back",
    ),
    "a step too few": Mutation(
        "dpsgd/ledger.py",
        {"steps=self._paid.steps - 1": "steps=self._paid.steps - (self._paid.steps > 1)"},
        "test_dpsgd_core.py::test_the_ledger_stops_before_the_budget_would_be_passed",
    ),
    "one step over the budget": Mutation(
        "dpsgd/ledger.py",
        {"steps=min(steps, left))": "steps=min(steps, left + 1))"},
        "test_dpsgd_core.py::test_the_ledger_stops_before_the_budget_would_be_passed",
    ),
    "other data without a word": Mutation(
        "dpsgd/ledger.py",
        {'if others := others - {self.data, ""}:': "if False:"},
        "test_dpsgd_core.py::test_other_data_is_counted_and_named",
    ),
    "what others have charged, unseen": Mutation(
        "dpsgd/ledger.py",
        {"        if len(self._entries) != self._seen:\n": "        if False:\n"},
        "test_dpsgd_core.py::test_what_others_charge_is_seen_before_the_next_step",
    ),
    "a line added behind half a line": Mutation(
        "dpsgd/ledger.py",
        {'.get(end, f"{CUT}\\n")': '.get(end, "")'},
        "test_dpsgd_core.py::test_each_line_that_is_cut_off_is_told_from_damage",
    ),
    "a relation that is not looked at": Mutation(
        "dpsgd/ledger.py",
        {'parameters.choice(RELATIONS, relation=content.get("relation"))': "RELATIONS[0]"},
        "test_dpsgd_core.py::test_a_broken_ledger_is_refused_and_kept",
    ),
    "a layer called twice, once": Mutation(
        "dpsgd/persample/torch_plan.py",
        {"if len(calls) == 1 and": "if calls and"},
        "test_dpsgd_ghost.py::test_norms_and_sums_are_those_of_gradients",
    ),
    "shared parameters by layer": Mutation(
        "dpsgd/persample/torch_plan.py",
        {"owners[id(p)] == 1": "owners[id(p)] > 0"},
        "test_dpsgd_ghost.py::test_norms_and_sums_are_those_of_gradients",
    ),
    "a rate above the one accounted for": Mutation(
        "dpsgd/sampling.py",
        {"math.floor": "math.ceil"},
        "test_dpsgd_core.py::test_the_rate_in_use_is_never_above_the_one_accounted_for",
    ),
    "a record drawn at the rate": Mutation(
        "dpsgd/sampling.py",
        {"< threshold": "<= threshold"},
        "test_dpsgd_core.py::test_the_rate_in_use_is_never_above_the_one_accounted_for",
    ),
    "all records at half of the rate": Mutation(
        "dpsgd/sampling.py",
        {"self.rate == 1.0": "self.rate >= 0.5"},
        "test_dpsgd_core.py::test_the_rate_in_use_is_never_above_the_one_accounted_for",
    ),
    "batches of more records than there are": Mutation(
        "dpsgd/calibrate.py",
        {"batch_size=batch_size), records)": "batch_size=batch_size), 10**9)"},
        "test_dpsgd_core.py::test_a_calibrated_run_costs_its_budget_and_no_more",
    ),
    "noise that does not average out": Mutation(
        "dpsgd/calibrate.py",
        {"values / self.steps": "values"},
        "test_dpsgd_core.py::test_a_calibrated_run_costs_its_budget_and_no_more",
    ),
    "steps that are not counted": Mutation(
        "dpsgd/calibrate.py",
        {'(rest > 0 and not batches.get("drop_remainder", True))': "0"},
        "test_dpsgd_core.py::test_steps_of_a_round",
    ),
    "the noise of a sum on a mean": Mutation(
        "dpsgd/calibrate.py",
        {"self.noise_multiplier / self.expected": "self.noise_multiplier"},
        "test_dpsgd_core.py::test_a_calibrated_run_costs_its_budget_and_no_more",
    ),
    "factors without end": Mutation(
        "dpsgd/clipping.py",
        {"(norms + self.gamma)": "norms"},
        "test_dpsgd_core.py::test_factors_and_scales_by_hand",
    ),
    "a bound over groups, and not their root": Mutation(
        "dpsgd/clipping.py",
        {"math.sqrt(norms.shape[1])": "norms.shape[1]"},
        "test_dpsgd_core.py::test_the_budget_is_split_over_groups",
    ),
    "bits that cost nothing": Mutation(
        "dpsgd/clipping.py",
        {"split_noise(noise_multiplier, bits)": "noise_multiplier"},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "a norm equal to the bound as above it": Mutation(
        "dpsgd/clipping.py",
        {"<= bound": "< bound"},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "bits without noise": Mutation(
        "dpsgd/clipping.py",
        {") * draw": ") * 0.0"},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "a share of the batch": Mutation(
        "dpsgd/clipping.py",
        {"noisy / expected": "noisy / max(len(seen), 1)"},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "a share above 1": Mutation(
        "dpsgd/clipping.py",
        {"min(max(0.5 + noisy / expected, 0.0), 1.0)": "0.5 + noisy / expected"},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "the bits of records with NaN": Mutation(
        "dpsgd/clipping.py",
        {"[~np.isnan(norms)]": ""},
        "test_dpsgd_core.py::test_the_adaptive_bound_by_hand",
    ),
    "steps taken twice for one charge": Mutation(
        "dpsgd/ledger.py",
        {"self._paid = self._paid._replace(steps=self._paid.steps - 1)": "pass"},
        "test_dpsgd_core.py::test_a_ledger_is_spent_to_its_very_end",
    ),
    "a step paid at another noise": Mutation(
        "dpsgd/ledger.py",
        {"paid = self._paid.steps and _alike(": "paid = self._paid.steps or _alike("},
        "test_dpsgd_core.py::test_a_ledger_is_spent_to_its_very_end",
    ),
}
RULES = {
    "a spike at the very threshold": Mutation(
        "rules/history.py",
        {"self.compared(norms) > threshold": "self.compared(norms) >= threshold"},
        "test_rules_history.py::test_a_norm_at_the_limit_is_learnt_as_it_is",
    ),
    "norms judged by themselves": Mutation(
        "rules/history.py",
        {"if self.include_current:\n            state": "if True:\n            state"},
        "test_rules_history.py::test_percentile_of_past_norms_only",
    ),
    "statistics that judge from the first norm on": Mutation(
        "rules/history.py",
        {"max(self.warmup, self.least)) & (threshold": "1) & (threshold"},
        "test_rules_history.py::test_auto_clip_judges_nobody_before_the_fifth_norm",
    ),
    "nothing learnt of a spike before there are statistics": Mutation(
        "rules/history.py",
        {"~(ready & spike)": "~spike"},
        "test_rules_history.py::test_without_feedback_the_warm_up_learns_spikes_too",
    ),
    "spikes learnt as they are": Mutation(
        "rules/history.py",
        {"xp.where(spike, learnt, norms)": "norms"},
        "test_rules_history.py::test_a_burst_of_spikes",
    ),
    "the upper median of an even number": Mutation(
        "rules/protection.py",
        {"[2]": "[3]"},
        "test_defaults.py::test_the_first_norms_are_judged_by_their_lower_median",
    ),
    "norms of 0 in the median": Mutation(
        "rules/protection.py",
        {"return norms > 0, dict": "return norms >= 0, dict"},
        "test_rules_history.py::test_the_median_ignores_norms_of_0",
    ),
    "the first norms learnt at once": Mutation(
        "rules/history.py",
        {'"raw" else 5': '"raw" else 1'},
        "test_rules_history.py::test_the_statistics_learn_nothing_before_the_fifth_norm",
    ),
    "the distance from the old mean": Mutation(
        "rules/zclip.py",
        {"keep * keep": "1.0"},
        "test_golden.py::test_reproduced",
    ),
    "the distance from the new mean": Mutation(
        "rules/drytorch.py",
        {"1.0 + 0.0 * keep": "keep * keep"},
        "test_golden.py::test_reproduced",
    ),
    "a population variance for a sample variance": Mutation(
        "rules/drytorch.py",
        {"after.variance * (after.count": "after.variance * (after.count - 1.0"},
        "test_golden.py::test_reproduced",
    ),
    "a warm-up of unequal weights": Mutation(
        "rules/moments.py",
        {"max(self.warmup, 1)": "1"},
        "test_golden.py::test_reproduced",
    ),
    "a round as one norm": Mutation(
        "rules/moments.py",
        {"self.decay**counted.n": "self.decay"},
        "test_shared.py::test_moving_averages_are_moved_by_each_norm_once",
    ),
    "the mean of the warm-up for the smallest": Mutation(
        "rules/adagc.py",
        {"xp.where(first, smallest, after.mean)": "xp.where(mean == 0, smallest, after.mean)"},
        "test_golden.py::test_gamma_of_adagc",
    ),
    "a mean that a fixed limit does not hold": Mutation(
        "rules/ema.py",
        {"return xp.minimum(judged.seen, judged.limits)": "return judged.seen"},
        "test_golden.py::test_gamma_of_adagc",
    ),
    "a quantile that can not rise": Mutation(
        "rules/percentile.py",
        {"2.0 * target": "target"},
        "test_rules_history.py::test_a_percentile_follows_norms_that_have_grown_for_good",
    ),
    "a limit that moves the other way": Mutation(
        "rules/adaptive.py",
        {"xp.exp(-rate": "xp.exp(rate"},
        "test_rules_history.py::test_fraction_of_unclipped_norms_is_the_quantile",
    ),
    "a past norm that falls at once": Mutation(
        "rules/growth.py",
        {"previous / self.max_decay": "0.0 * previous"},
        "test_rules_history.py::test_past_norm_falls_by_max_decay",
    ),
}
ENGINE = {
    "no margin for float32": Mutation(
        "transforms/action.py",
        {'"float32": 15 * 2.0**-24,': '"float32": 0.0,'},
        "test_bound.py::test_float32_never_above_the_limit",
    ),
    "no margin for the rounding of half precision": Mutation(
        "transforms/action.py",
        {" + 2.0**-11,": ","},
        "test_ends_of_dtypes.py::test_half_precision_keeps_to_any_limit",
    ),
    "a learnt limit below the range": Mutation(
        "transforms/action.py",
        {"self.target < LEAST": "self.target < 0.0"},
        "test_ends_of_dtypes.py::test_a_learnt_limit_below_the_range_gives_zeros",
    ),
    "raised beyond the dtype": Mutation(
        "transforms/action.py",
        {"        if peaks is not None:": "        if peaks is None and False:"},
        "test_ends_of_dtypes.py::test_what_is_scaled_up_stays_finite_and_keeps_its_direction",
    ),
    "at the limit counts as over": Mutation(
        "transforms/action.py",
        {"norms, norms > limits": "norms, norms >= limits"},
        "test_bound.py::test_norm_equal_to_the_limit_is_not_clipped",
    ),
    "not measured again near the limit": Mutation(
        "arrays/numpy.py",
        {"<= _CLOSE * norms": "< 0 * norms"},
        "test_bound.py::test_a_long_array_at_its_very_limit_is_not_clipped",
    ),
    "squares that underflow": Mutation(
        "arrays/numpy.py",
        {"if UNDERFLOW <= total < math.inf": "if 0.0 <= total < math.inf"},
        "test_extremes.py::test_a_long_array_whose_squares_underflow_is_measured",
    ),
    "subnormal products rounded up": Mutation(
        "arrays/numpy.py",
        {"np.trunc(product * 2.0**24)": "np.ceil(product * 2.0**24)"},
        "test_ends_of_dtypes.py::test_no_output_that_becomes_subnormal_is_above_its_limit",
    ),
    "blocks too long": Mutation(
        "arrays/blocks.py",
        {"_BLOCK = 16 * lanes()": "_BLOCK = 1 << 26"},
        "test_digits.py::test_on_the_host",
    ),
    "NaN taken for finite": Mutation(
        "transforms/base.py",
        {"norms, total < math.inf": "norms, total > -math.inf"},
        "test_nonfinite.py::test_skip_gives_zero",
    ),
    "a percentile one element too high": Mutation(
        "transforms/value.py",
        {"low = steps // whole": "low = -(-steps // whole)"},
        "test_elementwise.py::test_percentile_position_is_that_of_integers",
    ),
    "a box rounded outwards": Mutation(
        "transforms/value.py",
        {"math.ceil(limit / unit) if up else math.floor(limit / unit)": "round(limit / unit)"},
        "test_bound.py::test_no_element_above_the_bound",
    ),
    "the first average counts for less": Mutation(
        "transforms/average.py",
        {"weights = xp.where(counts == 0, 1.0, weights)": "pass"},
        "test_elementwise.py::test_the_first_gradient_is_the_whole_of_its_average",
    ),
    "a deviation over n": Mutation(
        "transforms/moment.py",
        {"xp.maximum(sizes - 1.0, 1.0)": "xp.maximum(sizes, 1.0)"},
        "test_elementwise.py::test_standardized_mean_and_deviation",
    ),
    "growth without an end": Mutation(
        "transforms/average.py",
        {"sizes = xp.minimum(sizes, allowed)": "pass"},
        "test_elementwise.py::test_average_grows_by_max_growth_at_most",
    ),
}
PERSONAL = {
    "the whole update is shared": Mutation(
        "federation/personal_client.py",
        {"prepare_for_sharing(updates=shared": "prepare_for_sharing(updates=updates"},
        "test_personal.py::test_the_client_and_the_server_both_say_what_stays",
    ),
    "what is sent is not looked through": Mutation(
        "federation/personal_client.py",
        {"if told := _named(sent, own)": "if told := _named([], own)"},
        "test_personal.py::test_modules_that_share_gradients_are_refused",
    ),
    "a server may share what a client keeps": Mutation(
        "federation/personal_client.py",
        {"if asked := own & model": "if asked := own - own & model"},
        "test_personal.py::test_a_server_that_shares_what_a_client_keeps_is_refused_before_any_step",
    ),
    "layers are kept and not taken up": Mutation(
        "federation/personal_client.py",
        {"self._restore(self._kept)": "self._kept.check()"},
        "test_personal.py::test_own_layers_survive_a_restart_bit_for_bit",
    ),
    "the final weights replace own layers": Mutation(
        "federation/personal.py",
        {"{**mine.coefs, **shared.coefs}": "{n: a * 0 for n, a in mine.coefs.items()}"},
        "test_personal.py::test_own_layers_survive_rounds_evaluation_and_stop",
    ),
    "statistics stay without their layer": Mutation(
        "federation/personal.py",
        {"[-1])] in layers}": "[-1])] in layers and STATISTICS.match(n)}"},
        "test_personal.py::test_batchnorm_stands_for_layers_with_running_statistics",
    ),
    "frozen BatchNorm is in training": Mutation(
        "arrays/frozen.py",
        {"layer.training = False": "layer.training = True"},
        "test_frozen.py::test_frozen_batchnorm_keeps_its_statistics_and_uses_them",
    ),
    "a tied tensor is shared under its other name": Mutation(
        "federation/personal.py",
        {"if (name in self.own) != (other in self.own)": "if False"},
        "test_personal.py::test_patterns_that_match_nothing_everything_or_half_are_refused",
    ),
    "NaN is kept for ever": Mutation(
        "federation/personal_client.py",
        {"and not _is_finite(own)": "and not own"},
        "test_personal.py::test_an_update_of_nan_leaves_own_layers_as_they_were",
    ),
}

TURNS = {
    "a client that is due twice": Mutation(
        "federation/update/turns.py",
        {"round_ % self.separation :: self.separation": "round_ % self.separation ::"},
        "test_turns.py::test_each_client_has_one_turn_in_as_many_rounds",
    ),
    "turns that are closer than charged": Mutation(
        "federation/update/turns.py",
        {"if self.separation >= separation": "if self.separation + 1 >= separation"},
        "test_turns.py::test_the_server_stops_where_turns_are_closer_than_it_charges_for",
    ),
    "no turns at all": Mutation(
        "federation/update/server.py",
        {"if self.separation > 1 and": "if self.separation > 99 and"},
        "test_turns.py::test_the_server_stops_where_turns_are_closer_than_it_charges_for",
    ),
    "everybody where nobody is left": Mutation(
        "federation/round_robin.py",
        {
            "return set(found)\n": "return set(found)\n        return set()\n",
        },
        "test_turns.py::test_nobody_takes_the_place_of_a_client_that_has_left",
    ),
    "a reply out of turn": Mutation(
        "federation/round_robin.py",
        {"client_to_reply.keys() - self._due": "self._due - self._due"},
        "test_turns.py::test_a_reply_out_of_turn_ends_the_run",
    ),
    "noise for one coefficient": Mutation(
        "federation/update/budget.py",
        {"self.update_noise *= math.hypot(*coefficients)": "self.update_noise *= 1.0"},
        "test_turns.py::test_a_short_audit_finds_the_faults_and_no_others",
    ),
    "a round that is withheld is none": Mutation(
        "federation/update/adaptive.py",
        {"self.budget.skip(average, self.round)": "pass"},
        "test_turns.py::test_a_round_that_is_withheld_is_one_of_the_stream",
    ),
    "lost rounds for nothing": Mutation(
        "federation/update/budget.py",
        {"1 + self._owed": "1"},
        "test_turns.py::test_a_restart_begins_a_schedule_and_pays_for_rounds_that_may_be_lost",
    ),
    "a turn that is charged late": Mutation(
        "federation/update/budget.py",
        {"% self.separation == 0": "% self.separation == self.separation - 1"},
        "test_turns.py::test_a_client_is_charged_for_its_turns",
    ),
    "values in the order of names": Mutation(
        "federation/update/budget.py",
        {"names = sorted(average)": "names = list(average)"},
        "test_turns.py::test_what_is_released_is_the_stream_in_units_of_the_bound",
    ),
    "noise of the wrong age": Mutation(
        "privacy/banded.py",
        {"np.arange(kept) - 1": "np.arange(kept)"},
        "test_turns.py::test_a_stream_is_the_inverse_of_its_matrix",
    ),
    "coefficients for another length": Mutation(
        "privacy/banded.py",
        {"+ 2.0 * found / length": "+ 1.9 * found / length"},
        "test_turns.py::test_no_other_coefficients_have_less_error",
    ),
    "another rate than announced": Mutation(
        "dpsgd/manager.py",
        {"if asked.rate != self._sampler.rate": "if asked.rate > 1.0"},
        "test_dpsgd_manager.py::test_other_batches_than_announced_are_refused",
    ),
}

ROOMS = {
    "update": UPDATE,
    "statistics": STATISTICS,
    "privacy": PRIVACY,
    "dpsgd": DPSGD,
    "personal": PERSONAL,
    "engine": ENGINE,
    "rules": RULES,
    "turns": TURNS,
}


@pytest.mark.parametrize("room", ROOMS)
def test_each_mutation_is_of_a_text_that_is_there(room: str) -> None:
    wrong = {}
    for name, (file, texts, test) in ROOMS[room].items():
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
@pytest.mark.parametrize(("room", "name"), [(room, name) for room in ROOMS for name in ROOMS[room]])
def test_each_mutation_fails_its_test(
    room: str, name: str, run: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    file, texts, test = ROOMS[room][name]
    shutil.copytree(ROOT / "fedclip", tmp_path / "fedclip")
    mutant = tmp_path / "fedclip" / file
    source = mutant.read_text(encoding="utf-8")
    for old, new in texts.items():
        source = source.replace(old, new)
    mutant.write_text(source, encoding="utf-8")
    status, said = run(tmp_path, test)
    # 1: a test has failed; more: there was none, or it could not be run.
    assert status == 1, said[-2000:]
    assert re.search(r"^1 failed", said, re.MULTILINE), said[-2000:]
