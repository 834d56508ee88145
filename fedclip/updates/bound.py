# SPDX-License-Identifier: Apache-2.0
"""The server's part of the bound of a round: its cost, its votes, and the noise on its average.

::

    open       charge the round, and say to which bound the clients clip
    count      set the next bound by the votes
    release    the average with noise, scaled to the bound that was sent; zeros if it is withheld
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedclip.arrays import Float64
from fedclip.core import parameters
from fedclip.core.docstrings import Documented
from fedclip.core.parameters import integer, limit, non_negative, parameter, unit_interval
from fedclip.errors import StateError
from fedclip.privacy.accounting import RELATIONS, Accountant, check_evaluation, state_of
from fedclip.privacy.correlated import coefficients
from fedclip.updates.client_noise import SiteNoise
from fedclip.updates.limits import zeros
from fedclip.updates.noise import MANY_ROUNDS, Budget, draws_of
from fedclip.updates.protocol import Arrays, Participation, SentBound
from fedclip.updates.votes import FIRST_VARIANCE, BoundRule, projected

FIRST = 0.1
"""First bound, if `start_norm` is not given."""


def _names(unnoised: str | Sequence[str]) -> list[str]:
    names = [unnoised] if isinstance(unnoised, str) else unnoised
    return [parameters.name(unnoised=name) for name in names]


def _path(ledger: str | PathLike[str]) -> str:
    return parameters.name(ledger=fspath(ledger) if isinstance(ledger, PathLike) else ledger)


_UNNOISED = "list of names or None"
_FIXED = "0, which fixes the bound, or left out, as votes say how far to move it"


class AdaptiveBound(Documented):
    """Adapt the bound of the clients' updates round by round; see `update-clip-server`.

    An evaluation with `evaluation_share` s and k numbers of each client, in [0, 1], is::

        v    = sum(clip(number / bound) - 1/2) + noise_multiplier / s * sqrt(k) / 2 * normal
        mean = bound * (1/2 + v / expected_clients), clamped

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range or settings contradict each other; the
        message says which settings are possible.
    """

    name: ClassVar[str] = "update clipping"
    logger: ClassVar[logging.Logger] = logging.getLogger("fedclip.server")
    takes_turns: ClassVar[str] = "use a Schedule with per_round={}"

    start_norm: float | None = parameter(limit, default=None, kw_only=False)
    """Bound of the first round, > 0; None finds it from 0.1, by up to a factor of 8 a round. From
    300 times too low or too high, it is within a factor of 1.5 of the quantile after 4 rounds. With
    noise, the first round then only counts votes."""
    quantile: float = parameter(unit_interval, default=0.5)
    """Share of updates that the bound should not clip, in (0, 1)."""
    learning_rate: float | None = parameter(
        parameters.number, _FIXED, 0.0, 0.0, default=None, kind="0 or None"
    )
    """0 fixes the bound at `start_norm`; None adapts it. With 0, clients do not vote."""
    min_norm: float = parameter(limit, default=1e-6)
    """Smallest bound, > 0."""
    max_norm: float = parameter(limit, default=1e4)
    """Largest bound, > 0. The default is within the range of declearn's secure aggregation."""
    noise_multiplier: float = parameter(non_negative, default=0.0)
    """Standard deviation of a round's noise, in sensitivities, >= 0."""
    bits_noise: float | None = parameter(non_negative, default=None)
    """Noise on votes, > ``noise_multiplier / 2``; None for ``max(expected_clients / 20,
    noise_multiplier)``. Each bin gets twice that, or ``sqrt(2)`` times for replace-one. With
    evaluations, the multiplier is that of a round without one."""
    expected_clients: int | None = parameter(integer, 1, default=None)
    """Number of clients in a round, for noise. The server divides by it, however many reply."""
    delta: float = parameter(unit_interval, default=1e-5)
    """Probability that the guarantee fails, below 1 / number of clients."""
    max_epsilon: float | None = parameter(parameters.positive, default=None)
    """Stop before a round that would exceed this epsilon, > 0."""
    ledger: str | None = parameter(_path, default=None)
    """File with all rounds, over restarts and runs; resuming needs it. Use one for a set of
    clients. A round is written before it begins. None: what was spent is forgotten with the
    process, and no server resumes from a checkpoint."""
    relation: str = parameter(parameters.choice, RELATIONS, default="add-remove")
    """Neighbours lack one client ("add-remove"), or replace one ("replace-one", with twice the
    noise)."""
    separation: int = parameter(integer, 1, default=1)
    """Minimum separation of a client's rounds, >= 1. A client is charged once in this many rounds.
    Above 1 it needs the client sampler `round-robin`, and more than ``(separation - 1) *
    expected_clients`` clients."""
    noise: str = parameter(parameters.choice, ("independent", "banded"), default="independent")
    """"independent", or "banded": correlated over `separation` rounds. Banded noise partly cancels
    in the model, at the same epsilon."""
    rounds: int | None = parameter(integer, 1, default=None)
    """Planned number of rounds; "banded" needs it."""
    momentum: float = parameter(parameters.share, default=0.0)
    """Momentum of the server's optimizer, in [0, 1), for "banded"."""
    noise_at: str = parameter(parameters.choice, ("server", "clients"), default="server")
    """Who adds noise: the "server", or "clients", so that nobody sees a sum without it. With
    "clients", `update-clip-client` needs the table `noise`."""
    honest: float | None = parameter(parameters.fraction, default=None)
    """Share of clients that surely add noise, in (0, 1], for "clients". The others may collude with
    the server."""
    evaluation_share: float = parameter(parameters.share, default=0.0)
    """Share of a round's noise budget for an evaluation, in [0, 1). 0: evaluations have no noise.
    The evaluation's multiplier is ``noise_multiplier / evaluation_share``, and the round costs no
    more. It needs `fedclip-websockets`."""
    loss_bound: float | None = parameter(limit, default=None)
    """Largest loss of a client in a noised evaluation, > 0; goes with `evaluation_share`."""
    generator: str = parameter(parameters.choice, ("secure", "insecure"), default="secure")
    """Source of the noise: "secure", or "insecure" for experiments."""
    seed: int | None = parameter(integer, 0, default=None)
    """Seed of "insecure" noise."""
    unnoised: str | Sequence[str] | None = parameter(_names, default=None, kind=_UNNOISED)
    """Server modules with statistics that leave without noise, such as ``["zscore-clip-server"]``.
    Epsilon does not cover them; others are refused."""

    def __post_init__(self) -> None:
        """Check what must go together, and begin without a round."""
        first = FIRST if self.start_norm is None else self.start_norm
        least, most = self.min_norm, self.max_norm
        if least > most or not (self.start_norm is None or least <= first <= most):
            got = f"{self.start_norm!r} and {[least, most]}"
            raise ValueError(f"start_norm must be within [min_norm, max_norm], got {got}")
        self.follows = self.learning_rate is None
        if self.start_norm is None and not self.follows:
            raise ValueError("learning_rate=0 fixes the bound: give start_norm a number")
        self.check_goes_with("seed", "generator", "insecure")
        self.rule = BoundRule(self.quantile, least, most)
        self.bound, self.variance = self.rule.within(first), FIRST_VARIANCE
        self.round = 0
        self.budget = self._budget()
        self.site = self._site()
        # The message of the round that is open.
        self.sent: SentBound | None = None
        # Whether the average of this round is not released.
        self.withheld = False
        # Why training has to end; the next message tells the clients.
        self.stop = ""

    def _budget(self) -> Budget | None:
        """Return noise and cost of a round; None without noise."""
        check_evaluation(self.evaluation_share, self.loss_bound, "client")
        turns, banded = self.separation > 1, self.noise == "banded"
        if self.noise_multiplier == 0:
            names = ("bits_noise", "max_epsilon", "ledger", "unnoised", "evaluation_share")
            needing = [name for name in names if getattr(self, name)]
            needing += ["separation"] * turns + ["noise='banded'"] * banded
            if needing:
                raise ValueError(f"{needing[0]} goes with noise_multiplier > 0: set that, too")
            return None
        if turns and self.evaluation_share:
            why = "evaluation_share does not go with separation > 1: leave one of them out"
            raise ValueError(why)
        if self.expected_clients is None:
            why = "noise_multiplier needs expected_clients, the number of clients in a round"
            raise ValueError(why)
        self.check_goes_with("rounds", "noise", "banded")
        self.check_goes_with("momentum", "noise", "banded")
        if banded and not (turns and self.rounds):
            raise ValueError("noise='banded' needs separation > 1, and rounds, the planned number")
        band = self.separation if banded else 1
        return Budget(
            self.noise_multiplier,
            self.expected_clients,
            Accountant(self.delta, self.relation),
            draws_of(self.generator, self.seed),
            bits_noise=self.bits_noise if self.follows else 0.0,
            votes_first=self.start_norm is None,
            max_epsilon=self.max_epsilon,
            separation=self.separation,
            coefficients=coefficients(self.rounds or 1, band, self.momentum),
            evaluation_share=self.evaluation_share,
            path=self.ledger,
        )

    def charge_to(self, ledger: str | Path | None) -> None:
        """Charge the rounds to another ledger, if there is noise: before the first of them."""
        if self.budget is not None:
            self.ledger = None if ledger is None else str(ledger)
            self.budget = self._budget()

    def _site(self) -> SiteNoise | None:
        """Return the noise that clients add; None if the server adds it."""
        self.check_goes_with("honest", "noise_at", "clients")
        if self.noise_at == "server":
            return None
        if self.budget is None or self.expected_clients is None or self.honest is None:
            raise ValueError("noise_at='clients' needs noise_multiplier and honest, such as 0.75")
        required = {"separation": 1, "noise": "independent", "generator": "secure"}
        for name, only in {**required, "evaluation_share": 0.0}.items():
            if (value := getattr(self, name)) != only:
                raise ValueError(f"noise_at='clients' goes with {name}={only!r}, got {value!r}")
        if not self.follows and self.bound != self.max_norm:
            raise ValueError("noise_at='clients' with a fixed bound needs max_norm = start_norm")
        agreed = {name: getattr(self, name) for name in SiteNoise.parameters}
        return SiteNoise(**agreed | {"bits_noise": self.budget.bits_noise})

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far, at `delta`."""
        return 0.0 if self.budget is None else self.budget.epsilon

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        return most if self.budget is None else self.budget.rounds_left(most)

    # -- a round --------------------------------------------------------------------------------
    def open(self, due: Participation | None = None) -> SentBound:
        """Charge the next round, and return its bound; or why no round begins.

        `due` is what a schedule says of the round, if clients take turns. A round that does not
        follow the one before, in the same schedule, is charged as the first of another schedule.
        """
        budget = self.budget
        if self.separation > 1 and budget is not None:
            why = self.takes_turns.format(budget.clients)
            why = f"separation={self.separation} is for clients that take turns: {why}"
            self.halt(due.refusal(self.separation, budget.clients) if due else why)
        only_votes = budget is not None and budget.votes_first
        if budget is not None and not self.stop:
            self.halt(budget.reserve(self.round + 1, due))
        if self.stop:
            self.logger.error("%s stops the training: %s", self.name, self.stop)
        self.withheld = False
        self.sent = SentBound(
            self.bound,
            adaptive=self.follows,
            private=budget is not None,
            only_votes=only_votes,
            round=self.round + 1,
            stop=self.stop,
            schedule=budget.schedule if budget else "",
        )
        return self.sent

    def count(
        self, counts: Float64, clients: int, noised: Sequence[Sequence[int]] = ()
    ) -> dict[str, Any]:
        """Count a round and its votes, and set the next bound; return the record of the round.

        `counts` has a number for each bin; votes with the noise of the clients are `noised`.
        """
        assert self.sent is not None
        self.round += 1
        if self.budget is not None:
            self.budget.unevaluated = True
        share, votes = None, clients
        if self.follows:
            counts, votes, divisor, noise = self._counted(counts, clients, noised)
            after = self.rule.after(self.sent.bound, self.variance, counts, divisor, noise)
            self.bound, self.variance, share = after
        self.withheld = self.sent.only_votes
        if self.site is not None and (why := self.site.void(clients, counted=False)):
            self.withheld = True
            self.halt(why)
        self._report(self.sent.bound, share, clients - votes, clients)
        return {
            "round": self.round,
            "bound": self.sent.bound,
            "share": share,
            "next_bound": self.bound,
            "withheld": self.withheld,
            "epsilon": self.epsilon,
        }

    def release(
        self, average: Mapping[str, object], exact: Mapping[str, Float64] | None = None
    ) -> Arrays:
        """Close the round; return its average with noise, the same object without noise.

        `exact` is the average before it was rounded to the dtypes of the model.
        """
        sent, self.sent = self.sent, None
        assert sent is not None
        if self.withheld:
            if self.budget is not None and not sent.only_votes:
                # Later rounds count a round that is not released as one.
                self.budget.next_noise(average, self.round)
            return zeros(average)
        if self.budget is None or self.site is not None:
            return average
        return self.budget.noised(average, sent.bound, self.round, exact)

    def evaluated(self, rows: Float64) -> Float64 | None:
        """Return the means of the clients' losses, and other numbers in [0, 1], with noise.

        `rows` has a row for each client, the loss first; NaN abstains. None if there was an
        evaluation after this round.
        """
        assert self.budget is not None
        assert self.loss_bound is not None
        bounds = np.array([self.loss_bound, *[1.0] * (rows.shape[1] - 1)])
        clipped = np.clip(np.nan_to_num(rows / bounds, nan=0.5), 0.0, 1.0)
        means = self.budget.evaluated(clipped, self.round)
        return None if means is None else means * bounds

    def warn(self, what: str) -> None:
        """Log a warning."""
        self.logger.warning("%s: %s", self.name, what)

    def halt(self, why: str) -> None:
        """Remember why to stop, if there is no reason yet."""
        self.stop = self.stop or why

    def unheard(self, void: str) -> str:
        """Return why noise must not go on after its first round; "" if it may.

        `void` says why no reply of it can be used. Later rounds go on with noise alone: whether a
        single client replies is not to be seen.
        """
        first = self.sent is not None and self.sent.round == 1
        return void if self.budget is not None and first else ""

    def admit(self, name: str) -> bool:
        """Return whether other statistics may go out without noise.

        They may if no noise is added, or if `unnoised` names them. If not, the run ends.
        """
        if self.budget is None or name in (self.unnoised or ()):
            return True
        self.halt(self.refusal_of(name))
        self.logger.error("%s stops the training: %s", self.name, self.stop)
        return False

    def refusal_of(self, name: str) -> str:
        """Return why other statistics may not go out together with averages that have noise."""
        text = f"{name} sends statistics without noise, next to averages with noise: remove it"
        return f"{text}, or allow it in {self.name} with unnoised = [{name!r}]"

    def _counted(
        self, counts: Float64, clients: int, noised: Sequence[Sequence[int]]
    ) -> tuple[Float64, int, int | None, float]:
        """Return counts with their noise, how many voted, the divisor, and the noise."""
        if self.budget is None:
            possible = projected(counts, max(clients, 0))
            if not np.array_equal(possible, counts):
                self.warn(f"no {clients} clients vote like that: the nearest possible votes count")
            return possible, round(float(possible.sum())), None, 0.0
        # The server does not know who has voted.
        expected, noise = self.budget.clients, self.budget.noise_of_bins
        if self.site is not None:
            return self.site.counts(noised, clients), clients, expected, noise
        noisy = self.budget.noised_counts(projected(counts, expected), self.round)
        return noisy, clients, expected, noise

    def _report(self, bound: float, share: float | None, silent: int, clients: int) -> None:
        parts = [f"round {self.round}, bound {bound:.4g}"]
        if share is not None:
            parts.append(f"{share:.0%} of the updates within it, next bound {self.bound:.4g}")
        if self.withheld:
            parts.append("it has only counted votes: the average is not released")
        if self.budget is not None:
            parts.append(f"epsilon {self.epsilon:.4g} at delta {self.delta:g}")
        elif share is not None and silent:
            parts.append(f"{silent} of {clients} clients abstained")
        self.logger.info("%s: %s", self.name, "; ".join(parts))

    # -- state ----------------------------------------------------------------------------------
    def get_state(self) -> dict[str, object]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        state = {"bound": self.bound, "round": self.round, "spent": []}
        if self.budget is not None:
            state["ledger"] = self.budget.identity()
            state["spent"] = state_of(self.budget.accountant.spent)
        return state | {"variance": self.variance}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over a state that `get_state` returned; what was spent here stays spent.

        Raises
        ------
        StateError
            If anything is missing or not valid. The old state then stays in place.
        """
        if not isinstance(state, Mapping) or not {"bound", "round", "spent"} <= set(state):
            raise StateError(f"the state must have bound, round and spent, got {state!r:.200}")
        try:
            bound = parameters.positive(bound=state["bound"])
            round_ = parameters.integer(0, round=state["round"])
            # A state of an earlier version has none.
            variance = parameters.positive(variance=state.get("variance", FIRST_VARIANCE))
        except (TypeError, ValueError) as exc:
            raise StateError(str(exc)) from exc
        spent = Accountant.check_state(state["spent"])
        if spent and self.budget is None:
            why = "the state has spent a privacy budget: set its noise_multiplier here, too"
            raise StateError(why)
        self.bound, self.round, self.variance = self.rule.within(bound), round_, variance
        if self.budget is not None:
            self.budget.votes_first = self.start_norm is None and round_ == 0
            self.budget.resume(spent, state)
        self.stop = ""
