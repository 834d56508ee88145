# SPDX-License-Identifier: Apache-2.0
r"""The bound of the next round, from how far the clients' norms are from this one's.

Each client votes for the bin of its update in octaves, ``log2(norm / bound)``. One count for each
bin is what the server needs::

    p   = nearest shares >= 0 to counts / m that add up to 1
    y   = where p reaches the quantile, interpolated within its bin
    R   = (quantile (1 - quantile) / m + bins (noise / m)^2 / 4) / density(y)^2
    P  += 0.15^2                       how far the norms may have moved since the last round
    if y^2 > 9 (P + R):  P = y^2 - R   a jump: trust this round more than those before
    K   = P / (P + R)
    log2(bound) += K y,                by at most 3 octaves
    P  *= 1 - K

That is a Kalman filter on the logarithm of the bound, with variance P (Kalman, 1960). The quantile
is that of Andrew et al., 2021, arXiv:1905.03871, whose clients send the sign of y only.

Privacy: a vote adds 1 to one count at most. Before the noise, `projected` moves counts that no m
clients can have sent to the nearest ones that they can have, which brings no two sums further
apart. Whatever follows the noise costs nothing.

`AdaptiveBound` has the round of a server around it::

    open       charge the round, and say to which bound the clients clip
    count      set the next bound by the votes
    release    the average with noise, scaled to the bound that was sent; zeros if it is withheld
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedclip.arrays import Float64
from fedclip.core import parameters
from fedclip.core.docstrings import Documented
from fedclip.core.parameters import integer, limit, non_negative, parameter, unit_interval
from fedclip.errors import StateError
from fedclip.privacy.accounting import Accountant, check_evaluation
from fedclip.privacy.correlated import coefficients
from fedclip.updates.client_noise import SiteNoise, share_of_clients
from fedclip.updates.limits import zeros
from fedclip.updates.noise import MANY_ROUNDS, Budget, draws_of
from fedclip.updates.protocol import BINS, EDGES, WITHIN, Arrays, SentBound
from fedclip.updates.schedule import Participation

FIRST = 0.1
"""First bound, if `start_norm` is not given."""

FIRST_VARIANCE = 9.0
"""Variance of log2 of the bound before the first vote."""

_DRIFT = 0.15**2
_JUMP = 9.0
# A density beyond these comes from too few votes, or from updates that are all alike.
_DENSITIES = 0.4, 2.0


def projected(counts: Float64, total: float, *, exactly: bool = False) -> Float64:
    """Return the nearest counts >= 0 that add up to at most `total`, or `exactly` to it.

    Examples
    --------
    >>> projected(np.array([3.0, -1.0, 1.0]), 2.0)
    array([2., 0., 0.])
    >>> projected(np.array([0.5, 0.0, 1.0]), 2.0)
    array([0.5, 0. , 1. ])
    """
    positive: Float64 = np.maximum(counts, 0.0)
    if not exactly and positive.sum() <= total:
        return positive
    # All lose the same, or are 0 (Held, Wolfe & Crowder, 1974).
    falling = np.sort(counts)[::-1]
    excess = (np.cumsum(falling) - total) / np.arange(1, counts.size + 1)
    return np.asarray(np.maximum(counts - excess[falling > excess][-1], 0.0))


class NextBound(NamedTuple):
    """The bound after a round.

    Attributes
    ----------
    variance
        That of its logarithm, in octaves squared.
    share
        Share of the updates within the bound of the round; None if nobody has voted.
    """

    bound: float
    variance: float
    share: float | None


@dataclass(frozen=True)
class BoundRule:
    """The rule by which a bound follows the votes, with parameters of `update-clip-server`.

    `lowest` and `highest` are its `min_norm` and `max_norm`.
    """

    quantile: float
    lowest: float
    highest: float

    def within(self, bound: float) -> float:
        """Return the nearest bound within the limits."""
        return min(max(bound, self.lowest), self.highest)

    def after(
        self,
        bound: float,
        variance: float,
        counts: Float64,
        clients: int | None = None,
        noise: float = 0.0,
    ) -> NextBound:
        """Return the bound after a round.

        Parameters
        ----------
        counts
            Of each bin, with noise of standard deviation `noise`.
        clients
            By how many to divide, if there is noise; None: by the number of votes.
        """
        votes = float(clients or counts.sum())
        variance += _DRIFT
        if votes == 0:
            return NextBound(bound, variance, None)
        shares = projected(counts / votes, 1.0, exactly=True)
        octaves, density = self._read(shares)
        of_votes = self.quantile * (1.0 - self.quantile) / votes
        of_noise = BINS * (noise / votes) ** 2 / 4.0
        error = (of_votes + of_noise) / density**2
        if octaves**2 > _JUMP * (variance + error):
            variance = octaves**2 - error
        gain = variance / (variance + error)
        following = self.within(bound * 2.0 ** (gain * octaves))
        return NextBound(following, (1.0 - gain) * variance, float(min(shares[:WITHIN].sum(), 1.0)))

    def _read(self, shares: Float64) -> tuple[float, float]:
        """Return how many octaves the quantile is above the bound, and the density there."""
        below = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
        # The last bin in which the quantile may be: those after it begin beyond it.
        place = int(np.searchsorted(below, self.quantile)) - 1
        if place in (0, BINS - 1):
            return EDGES[0 if place == 0 else -1], _DENSITIES[0]
        low, width = EDGES[place - 1], EDGES[place] - EDGES[place - 1]
        density = float(shares[place]) / width
        octaves = low + (self.quantile - float(below[place])) / density
        return octaves, min(max(density, _DENSITIES[0]), _DENSITIES[1])


def _start(start_norm: object) -> float | None:
    if start_norm == "search":
        raise ValueError("start_norm='search' is what happens without it: remove start_norm")
    return parameters.optional(limit, start_norm=start_norm)


def _fixed(learning_rate: object) -> float | None:
    if learning_rate not in (None, 0):
        raise ValueError(
            f"learning_rate={learning_rate!r} has no meaning any more, as the votes say how far to "
            "move the bound: remove learning_rate, or set it to 0 to fix the bound"
        )
    return None if learning_rate is None else 0.0


def _names(unnoised: str | Sequence[str]) -> list[str]:
    names = [unnoised] if isinstance(unnoised, str) else unnoised
    return [parameters.name(unnoised=name) for name in names]


def _path(ledger: str | PathLike[str]) -> str:
    return parameters.name(ledger=fspath(ledger) if isinstance(ledger, PathLike) else ledger)


_UNNOISED = "list of names or None"


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
    takes_turns: ClassVar[str] = "use a Schedule with per_round={}"

    start_norm: float | None = parameter(_start, default=None, kw_only=False, kind="float or None")
    """Bound of the first round, > 0. None: the bound starts at 0.1 and moves by up to a factor of 8
    a round; it is within a factor of 1.5 of the quantile after 4 rounds from 300 times too low or
    too high. With noise, the first round then only counts votes, and costs no more than these."""
    quantile: float = parameter(unit_interval, default=0.5)
    """Share of the updates that the bound should not clip, in (0, 1)."""
    learning_rate: float | None = parameter(_fixed, default=None, kind="0 or None")
    """0 fixes the bound at `start_norm`; then clients do not vote. None: it follows the votes."""
    min_norm: float = parameter(limit, default=1e-6)
    """The bound never falls below this, > 0."""
    max_norm: float = parameter(limit, default=1e4)
    """The bound never rises above this, which is well within the range of declearn's secure
    aggregation."""
    noise_multiplier: float = parameter(non_negative, default=0.0)
    """Standard deviation of the noise, as a multiple of the sensitivity, with which a round is
    accounted; 0 for no noise."""
    bits_noise: float | None = parameter(non_negative, default=None)
    """Noise on the votes, > ``noise_multiplier / 2``: the count of each bin gets a standard
    deviation of twice that, or ``sqrt(2)`` times for replace-one. None:
    ``max(expected_clients / 20, noise_multiplier)``; with `evaluation_share`, the multiplier is
    that of a round without its evaluation."""
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
    round in that many. It takes the client sampler `round-robin`, and more than
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
    """Other modules of the server whose statistics may go out without noise, next to the noised
    average, such as ``["zscore-clip-server"]``; epsilon does not cover what they reveal. All
    others are refused."""

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
        if self.seed is not None and self.generator == "secure":
            raise ValueError(
                f"a seed goes with generator='insecure' only, got seed={self.seed!r}: noise that "
                "can be repeated can be subtracted"
            )
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
            bits_noise=self.bits_noise if self.follows else 0.0,
            votes_first=self.start_norm is None,
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
        required = {"separation": 1, "noise": "independent", "generator": "secure"}
        for name, only in {**required, "evaluation_share": 0.0}.items():
            if (value := getattr(self, name)) != only:
                raise ValueError(f"noise_at='clients' goes with {name}={only!r}, got {value!r}")
        if not self.follows and self.bound != self.max_norm:
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
    def open(self, due: Participation | None = None) -> SentBound:
        """Charge the next round, and return its bound; or why no round begins.

        `due` is what a schedule says of the round, if clients take turns. A round that does not
        follow the one before, in the same schedule, is charged as the first of another schedule.
        """
        if self.separation > 1 and self.expected_clients is not None:
            why = self.takes_turns.format(self.expected_clients)
            why = f"separation={self.separation} is for clients that take turns: {why}"
            self.halt(due.refusal(self.separation, self.expected_clients) if due else why)
        only_votes = self.budget is not None and self.budget.votes_first
        if self.budget is not None and not self.stop:
            self.halt(self.budget.reserve(self.round + 1, due))
        if self.stop:
            self.logger.error("%s stops the training: %s", self.name, self.stop)
        self.withheld = False
        self.sent = SentBound(
            self.bound,
            adaptive=self.follows,
            private=self.budget is not None,
            only_votes=only_votes,
            round=self.round + 1,
            stop=self.stop,
            schedule=self.budget.schedule if self.budget else "",
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
        share = None
        votes = clients
        if self.follows:
            counts, votes, divisor, noise = self._counted(counts, clients, noised)
            self.bound, self.variance, share = self.rule.after(
                self.sent.bound, self.variance, counts, divisor, noise
            )
        self.withheld = self.sent.only_votes
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
        """Close the round; return its average with noise, the same object without noise.

        `exact` is the average before it was rounded to the dtypes of the model.
        """
        sent, self.sent = self.sent, None
        assert sent is not None
        if self.withheld:
            if self.budget is not None and not sent.only_votes:
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
        return (
            f"{name} sends statistics of the clients without noise, next to averages with noise: "
            f"remove it, or allow it in {self.name} with unnoised = [{name!r}]"
        )

    def _counted(
        self, counts: Float64, clients: int, noised: Sequence[Sequence[int]]
    ) -> tuple[Float64, int, int | None, float]:
        """Return counts with their noise, how many voted, the divisor, and the noise."""
        if self.budget is None:
            possible = projected(counts, max(clients, 0))
            if not np.array_equal(possible, counts):
                text = f"no {clients} clients vote like that: the nearest possible votes count"
                self.warn(text)
            return possible, round(float(possible.sum())), None, 0.0
        # The server does not know who has voted.
        expected, noise = self.budget.clients, self.budget.noise_of_bins
        if self.site is not None:
            return self.site.counts(noised, clients), clients, expected, noise
        noisy = self.budget.noised_counts(projected(counts, expected), self.round)
        return noisy, clients, expected, noise

    def _report(self, record: Mapping[str, object], silent: int, clients: int) -> None:
        share, parts = record["share"], [f"round {self.round}, bound {record['bound']:.4g}"]
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
            state |= {"ledger": self.budget.identity(), "spent": self.budget.accountant.get_state()}
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
            raise StateError(
                f"the state has spent a privacy budget, and this {self.name} adds no noise: its "
                "averages would void the guarantee; set the noise_multiplier of that state"
            )
        self.bound, self.round, self.variance = self.rule.within(bound), round_, variance
        if self.budget is not None:
            self.budget.votes_first = self.start_norm is None and round_ == 0
            self.budget.resume(spent, state)
        self.stop = ""
