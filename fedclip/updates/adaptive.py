# SPDX-License-Identifier: Apache-2.0
"""A bound that follows the clients' votes, and the noise that goes with it, round by round.

::

    open       charge the round, and say which bound the clients clip to
    count      set the next bound by the votes
    release    the average with noise, scaled to the bound that was sent; zeros if that was too high
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
from fedclip.privacy.accounting import Accountant, check_evaluation
from fedclip.privacy.correlated import coefficients
from fedclip.updates.averaging import zeros
from fedclip.updates.bound import FIRST, BoundRule, Search, share_within
from fedclip.updates.client_noise import SiteNoise, share_of_clients
from fedclip.updates.noise import MANY_ROUNDS, Budget, draws_of
from fedclip.updates.pace import spread
from fedclip.updates.protocol import Arrays, SentBound
from fedclip.updates.schedule import Due


def _start(start_norm: float | str) -> float | str:
    if isinstance(start_norm, str):
        return parameters.choice(("search",), start_norm=start_norm)
    return limit(start_norm=start_norm)


def _names(unnoised: str | Sequence[str]) -> list[str]:
    names = [unnoised] if isinstance(unnoised, str) else unnoised
    return [parameters.name(unnoised=name) for name in names]


def _path(ledger: str | PathLike[str]) -> str:
    return parameters.name(ledger=fspath(ledger) if isinstance(ledger, PathLike) else ledger)


_START, _UNNOISED = 'float or "search"', "list of names or None"


class AdaptiveBound(Documented):
    """The bound of the clients' updates, round by round; see `update-clip-server`.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or settings are impossible; the message
        says which are possible.
    """

    name: ClassVar[str] = "update clipping"
    logger: ClassVar[logging.Logger] = logging.getLogger("fedclip.server")
    takes_turns: ClassVar[str] = "let a Schedule with per_round={} say who is due"

    start_norm: float | str = parameter(_start, default="search", kw_only=False, kind=_START)
    """Bound of the first round, > 0. With "search" that is 0.1, and the bound moves by a factor
    of 4 a round as long as nearly all or nearly none of the updates are within it. From 100 times
    too low or too high, it is within a factor of 2 after 10 rounds in 95 % of searches, where the
    noise on the votes is at most a tenth of the clients."""
    quantile: float = parameter(unit_interval, default=0.5)
    """Share of the updates that the bound should leave alone, in (0, 1)."""
    learning_rate: float = parameter(non_negative, default=0.2)
    """How fast the bound moves, as long as votes turn: by a factor of at most
    ``exp(± learning_rate)`` a round. If they stay on one side, it moves faster, up to about a
    factor of 2 a round: a tenth of the median is left behind within 8 rounds. 0 fixes the bound;
    then clients do not vote."""
    min_norm: float = parameter(limit, default=1e-6)
    """The bound never falls below this, > 0."""
    max_norm: float = parameter(limit, default=1e4)
    """The bound never rises above this, which is well within the range of declearn's secure
    aggregation."""
    noise_multiplier: float = parameter(non_negative, default=0.0)
    """Standard deviation of the noise, as a multiple of the sensitivity, with which a round is
    accounted; 0 for no noise."""
    bits_noise: float | None = parameter(non_negative, default=None)
    """Standard deviation of the noise on the sum of the votes, > ``noise_multiplier / 2``. None:
    ``max(expected_clients / 20, noise_multiplier)``, which suits 3 clients as well as 1,000; with
    `evaluation_share`, the multiplier is that of a round without its evaluation."""
    expected_clients: int | None = parameter(integer, 1, default=None)
    """Number of clients in a round, by which averages are divided, however many reply. Noise
    needs it, because the true number must not be used."""
    delta: float = parameter(unit_interval, default=1e-5)
    """Probability with which the guarantee may fail; below 1 / number of clients."""
    max_epsilon: float | None = parameter(parameters.positive, default=None)
    """Stop before a round that would exceed this epsilon."""
    ledger: str | None = parameter(_path, default=None)
    """A file to which each round is charged before it begins, made if needed: one for a set of
    clients, whatever they are used for. A restart, a second server and another run read it first.
    None: what was spent ends with the process, and no server goes on from a checkpoint."""
    relation: str = parameter(
        parameters.choice, ("add-remove", "replace-one"), default="add-remove"
    )
    """Which federations are neighbours: those with and without one client (whose reply is empty),
    or those with another client in its place, which needs twice the noise."""
    separation: int = parameter(integer, 1, default=1)
    """Least number of rounds from one turn of a client to its next; a client is charged for one
    round in so many. It takes the client sampler `round-robin`, and more than
    ``(separation - 1) * expected_clients`` clients."""
    noise: str = parameter(parameters.choice, ("independent", "banded"), default="independent")
    """"banded": each round takes back a part of the noise of the ``separation - 1`` rounds before
    it, so that the model has less noise at the same epsilon."""
    rounds: int | None = parameter(integer, 1, default=None)
    """Number of rounds that are planned; "banded" noise needs it."""
    momentum: float = parameter(parameters.share, default=0.0)
    """Momentum of the server's optimizer, in [0, 1), for which "banded" noise is made."""
    noise_at: str = parameter(parameters.choice, ("server", "clients"), default="server")
    """"clients": each client adds its share of the noise, so that nobody, the server included, sees
    a secure sum without it; `update-clip-client` then has the table `noise`."""
    honest: float | None = parameter(share_of_clients, default=None)
    """Share of `expected_clients` that surely add their noise, in (0, 1], such as 0.75; the others
    may collude with the server, or send none. ``noise_at="clients"`` needs it."""
    evaluation_share: float = parameter(parameters.share, default=0.0)
    """Share of a round's noise budget for an evaluation after it, in [0, 1): its noise multiplier
    is ``noise_multiplier / evaluation_share``, and the round costs what it costs without. 0:
    evaluations have no noise. It takes the server's protocol ``fedclip-websockets``."""
    loss_bound: float | None = parameter(limit, default=None)
    """So much of a client's loss counts at most in an evaluation with noise, > 0; required with
    `evaluation_share`, as is the other way round."""
    generator: str = parameter(parameters.choice, ("secure", "insecure"), default="secure")
    """Source of the noise. The insecure one is for experiments."""
    seed: int | None = parameter(integer, 0, default=None)
    """Seed that makes the insecure noise repeatable."""
    unnoised: str | Sequence[str] | None = parameter(_names, default=None, kind=_UNNOISED)
    """Other modules of the server whose statistics may go out without noise beside the noised
    average, such as ``["zscore-clip-server"]``; epsilon does not cover what they reveal. All
    others are refused."""

    def __post_init__(self) -> None:
        """Check what must go together, and begin without a round."""
        searching = isinstance(self.start_norm, str)
        first = FIRST if isinstance(self.start_norm, str) else self.start_norm
        least, most = self.min_norm, self.max_norm
        if least > most or not (searching or least <= first <= most):
            got = f"{self.start_norm!r} and {[least, most]}"
            raise ValueError(f"start_norm must be within [min_norm, max_norm], got {got}")
        if searching and self.learning_rate == 0:
            raise ValueError(
                "learning_rate=0 fixes the bound, and clients do not vote: give start_norm a "
                "number, because a search needs their votes"
            )
        if self.seed is not None and self.generator == "secure":
            raise ValueError(
                f"a seed goes with generator='insecure' only, got seed={self.seed!r}: noise that "
                "can be repeated can be subtracted"
            )
        self.rule = BoundRule(self.quantile, self.learning_rate, least, most)
        self.bound = self.rule.within(first)
        self.search = Search() if searching else None
        self.evidence = 0.0
        self.round = 0
        self.budget = self._budget()
        self.site = self._site()
        # The message of the round that is open.
        self.sent: SentBound | None = None
        # Whether a search has found the bound too high for the noise of this round.
        self.withheld = False
        # Why training has to end; the next message tells the clients.
        self.stop = ""

    def _coefficients(self) -> tuple[float, ...]:
        """Return the coefficients of the noise."""
        if self.noise == "independent":
            for name in ("rounds", "momentum"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} goes with noise='banded', got {name}={value!r}")
            return (1.0,)
        if self.separation == 1 or self.rounds is None:
            raise ValueError(
                "noise='banded' needs separation > 1, the number of rounds from one turn of a "
                "client to its next, and rounds, the number of rounds that are planned"
            )
        return coefficients(self.rounds, self.separation, self.momentum)

    def _budget(self) -> Budget | None:
        check_evaluation(self.evaluation_share, self.loss_bound, "client")
        if self.evaluation_share and self.separation > 1:
            raise ValueError(
                "evaluations ask all clients, and separation > 1 charges each for its own turns: "
                "leave evaluation_share or separation out"
            )
        if self.noise_multiplier == 0:
            for name in ("bits_noise", "max_epsilon", "ledger", "unnoised", "evaluation_share"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} goes with noise_multiplier > 0, got {value!r} with 0")
            if self.separation > 1 or self.noise == "banded":
                raise ValueError("separation and noise='banded' go with noise_multiplier > 0")
            return None
        if self.expected_clients is None:
            raise ValueError(
                "noise_multiplier needs expected_clients, the number of clients in a round: the "
                "noise is sized on it, and the number of replies would itself reveal something"
            )
        return Budget(
            self.noise_multiplier,
            self.expected_clients,
            Accountant(self.delta, self.relation),
            draws_of(self.generator, self.seed),
            bits_noise=0.0 if self.learning_rate == 0 else self.bits_noise,
            max_epsilon=self.max_epsilon,
            separation=self.separation,
            coefficients=self._coefficients(),
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
        if self.noise_at == "server":
            if self.honest is not None:
                raise ValueError("honest goes with noise_at='clients'")
            return None
        if self.budget is None or self.expected_clients is None or self.honest is None:
            raise ValueError(
                "noise_at='clients' needs noise_multiplier, and honest, the share of the clients "
                "that surely add their noise, such as honest = 0.75"
            )
        alone = {"separation": 1, "noise": "independent", "generator": "secure"}
        for name, only in {**alone, "evaluation_share": 0.0}.items():
            if (value := getattr(self, name)) != only:
                raise ValueError(f"noise_at='clients' goes with {name}={only!r}, got {value!r}")
        if self.learning_rate == 0 and self.bound != self.max_norm:
            raise ValueError("noise_at='clients' with a fixed bound needs max_norm = start_norm")
        return SiteNoise(
            noise_multiplier=self.noise_multiplier,
            expected_clients=self.expected_clients,
            honest=self.honest,
            max_norm=self.max_norm,
            bits_noise=self.budget.bits_noise,
        )

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far, at `delta`."""
        return 0.0 if self.budget is None else self.budget.epsilon

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        return most if self.budget is None else self.budget.rounds_left(most)

    # -- a round --------------------------------------------------------------------------------
    def open(self, due: Due | None = None) -> SentBound:
        """Charge the next round, and return its bound; or why there is none.

        `due` is what a schedule says of the round, if clients take turns. A round that does not
        follow the one before, in the same schedule, is charged as the first of another schedule.
        """
        if self.separation > 1 and self.expected_clients is not None:
            why = self.takes_turns.format(self.expected_clients)
            why = f"separation={self.separation} is for clients that take turns: {why}"
            self.halt(due.refusal(self.separation, self.expected_clients) if due else why)
        if self.budget is not None and not self.stop:
            self.halt(self.budget.reserve(self.round + 1, due))
        if self.stop:
            self.logger.error("%s stops the training: %s", self.name, self.stop)
        self.withheld = False
        self.sent = SentBound(
            self.bound,
            adaptive=self.learning_rate > 0,
            private=self.budget is not None,
            round=self.round + 1,
            stop=self.stop,
            schedule=self.budget.schedule if self.budget else "",
        )
        return self.sent

    def count(
        self, votes: int, within: int, clients: int, noised: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Count a round and its votes, and set the next bound; return the record of the round.

        Votes with the noise of the clients are `noised`.
        """
        assert self.sent is not None
        self.round += 1
        if self.budget is not None:
            self.budget.unevaluated = True
        share = self._share(votes, within, clients, noised)
        if share is not None:
            self.bound, self.search, too_high, self.evidence = self.rule.after(
                self.sent.bound, share, self.search, self.evidence, self._spread(votes)
            )
            # The noise would have the size of that bound.
            self.withheld = too_high and self.budget is not None
        if self.site is not None and (why := self.site.void(clients, counted=False)):
            self.withheld = True
            self.halt(why)
        record = {"round": self.round, "bound": self.sent.bound, "share": share}
        record |= {"next_bound": self.bound, "withheld": self.withheld, "epsilon": self.epsilon}
        self._report(record, clients - votes, clients)
        return record

    def release(
        self, average: Mapping[str, object], exact: Mapping[str, Float64] | None = None
    ) -> Arrays:
        """Close the round; return its average with noise, the same object if there is none.

        `exact` is the average before it was rounded to the dtypes of the model.
        """
        sent, self.sent = self.sent, None
        assert sent is not None
        if self.withheld:
            if self.budget is not None:
                self.budget.skip(average, self.round)
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
        found = self.budget.evaluated(clipped, self.round)
        return None if found is None else found * bounds

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
        """Return why other statistics may not go out beside averages with noise."""
        return (
            f"{name} sends what it has learnt from the clients without noise, beside averages with "
            f"noise: remove it, or allow it in {self.name} with unnoised = [{name!r}]"
        )

    def _share(self, votes: int, within: int, clients: int, noised: Sequence[int]) -> float | None:
        """Return the share of updates within the bound; None if it is not known."""
        if self.learning_rate == 0:
            return None
        if self.site is not None:
            centred = self.site.centred(noised, clients)
            return share_within(0, 0, self.expected_clients, centred)
        if self.budget is not None:
            noise = self.budget.noise_on_votes(self.round)
            return share_within(votes, within, self.expected_clients, noise)
        if not 0 <= within <= votes <= clients:
            text = f"{within} of {votes} votes from {clients} clients can not be right"
            self.warn(f"{text}, and are not counted")
            return None
        return share_within(votes, within, None, 0.0)

    def _spread(self, votes: int) -> float:
        """Return the standard deviation of the share at its quantile; public, if there is noise."""
        if self.budget is None:
            return spread(self.quantile, votes, 0.0)
        return spread(self.quantile, self.budget.clients, self.budget.bits_noise)

    def _report(self, record: Mapping[str, object], silent: int, clients: int) -> None:
        share, parts = record["share"], [f"round {self.round}, bound {record['bound']:.4g}"]
        if share is not None:
            parts.append(f"{share:.0%} of the updates within it, next bound {self.bound:.4g}")
        if self.withheld:
            parts.append("it is too high for its noise: the average is not released")
        elif self.search is not None:
            parts.append("the search goes on")
        if self.budget is not None:
            parts.append(f"epsilon {self.epsilon:.4g} at delta {self.delta:g}")
        elif share is not None and silent:
            parts.append(f"{silent} of {clients} clients abstained")
        self.logger.info("%s: %s", self.name, "; ".join(parts))

    # -- state ----------------------------------------------------------------------------------
    def get_state(self) -> dict[str, object]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        search = None if self.search is None else list(self.search)
        state = {"bound": self.bound, "round": self.round, "spent": [], "search": search}
        if self.budget is not None:
            state |= {"ledger": self.budget.identity(), "spent": self.budget.accountant.get_state()}
        return state | {"evidence": self.evidence}

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
            evidence = parameters.number("a finite number", evidence=state.get("evidence", 0.0))
        except (TypeError, ValueError) as exc:
            raise StateError(str(exc)) from exc
        search = Search.of(state.get("search"))
        spent = Accountant.check_state(state["spent"])
        if spent and self.budget is None:
            raise StateError(
                f"the state has spent a privacy budget, and this {self.name} adds no noise: its "
                "averages would void the guarantee; set the noise_multiplier of that state"
            )
        self.search, self.evidence = search, evidence
        self.bound, self.round = self.rule.within(bound), round_
        if self.budget is not None:
            self.budget.resume(spent, state)
        self.stop = ""
