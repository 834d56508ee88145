# SPDX-License-Identifier: Apache-2.0
r"""Privacy accounting: epsilon of releases, noise for a budget, the share of the noise for bits.

=============================  ==================================================================
releases                       accountant
=============================  ==================================================================
all records, or clients,       the closed form (`epsilon_of`): exact, and needs no
each time                      other package
Poisson samples                "pld": privacy loss distributions of dp-accounting
=============================  ==================================================================

T releases with noise multipliers z_i together equal one Gaussian mechanism with
``mu = sqrt(sum of 1 / z_i^2)`` (Balle & Wang, 2018; Dong et al., 2022), which is
(epsilon, delta)-private for exactly::

    delta = Q(a) - exp(epsilon) Q(a + mu)        with a = epsilon / mu - mu / 2
          = phi(a) (R(a) - R(a + mu))            as exp(epsilon) = phi(a) / phi(a + mu)

where Q is the upper tail of the standard normal distribution, phi its density and R = Q / phi.
The second form neither overflows nor cancels. All numbers are rounded so that no epsilon is
too low.

Each accountant gives an upper bound. Privacy loss distributions are rounded in each step; where
delta is so small that this counts, Rényi's accountant of dp-accounting ("rdp") counts instead.

They are right for releases that are planned before the first of them. If a later plan follows from
what was released, they may be too low. Rényi's accountant is right at one order, if that was fixed
before (Feldman & Zrnic, 2021, "Individual privacy accounting via a Rényi filter",
arXiv:2008.11193).

With the accountant's noise multiplier z, and the standard deviation ``sigma_b`` of the noise on the
sum of the bits, each recentred to ±1/2 (Andrew et al., 2021, theorem 1)::

    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)

is the multiplier of the noise on the update: both releases together cost as much as one Gaussian
mechanism of multiplier z. It exists only for ``z < 2 sigma_b``.

Examples
--------
>>> round(epsilon([Release(1.0)], 1e-5), 3), round(epsilon_of(1.0, 1e-5), 3)
(4.377, 4.377)
>>> round(mu_of(8.0, 1e-5), 3)
1.666
>>> round(noise_multiplier(8.0, 1e-5, steps=100), 3)
6.002
"""

from __future__ import annotations

import importlib.util
import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fedclip.core import parameters
from fedclip.errors import StateError

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

RELATIONS = ("add-remove", "replace-one")
"""Which data sets are neighbours: one has a record more; or one record differs."""

ZERO_OUT = "zero-out"
"""The relation of DP-SGD: one record is replaced by one whose gradient is zero.

The number of records is public, because sampling rate and number of steps follow from it; adding
or removing a record would change it. Epsilon is that of "add-remove": with and without the
record's gradient, the sums have the same two distributions (dp-accounting calls it
``REPLACE_SPECIAL``)."""


def relation_of(relation: str, protects: str) -> str:
    """Return the relation that protects a record, a person or a client.

    >>> relation_of("add-remove", "record"), relation_of("add-remove", "client")
    ('zero-out', 'add-remove')
    """
    return ZERO_OUT if relation == "add-remove" and protects in ("record", "person") else relation


# The orders of dp-accounting leave gaps where budgets are small.
_ORDERS = [1.01, 1.03, *(1 + x / 10 for x in range(1, 100)), *range(11, 64)]
_ORDERS += [2**k for k in range(6, 13)]
# Privacy losses are rounded up to a grid within these ends, which follows from `_spread`. A finer
# grid is tighter and slower: there are about this many points at most.
_FINEST, _COARSEST, _POINTS = 1e-5, 1e-3, 1e6
# With losses beyond this nothing is private, and they would not fit into memory on any grid that
# the steps call for: sampling is left out of account, which is an upper bound.
_LARGEST = 1e3
# Transforms round the chances of each step: in all, by at most a sixth of this for each step. So
# much of delta is left to it; if that is most of delta, Rényi's accountant counts, without them.
_ROUNDING = 2.0**-49
# So many steps, some 10^8, would not fit into memory, either.
_SLOWEST = 1e-6
# With noise or rates beyond these, other packages meet squares or differences that are no numbers:
# there, too, sampling is left out of account.
_LEAST_NOISE, _MOST_NOISE, _HIGHEST_RATE = 1e-150, 1e6, 1.0 - 1e-6


class Cost(NamedTuple):
    """The cost of releases, and the accountant that computed it.

    Attributes
    ----------
    epsilon
        An upper bound.
    accountant
        "closed form", "pld" or "rdp".
    """

    epsilon: float
    accountant: str


class Release(NamedTuple):
    """A number of steps of the Gaussian mechanism.

    Attributes
    ----------
    noise_multiplier
        Standard deviation of the noise over the sensitivity to adding or removing one record,
        above 0.
    steps
        Number of steps, at least 1.
    sampling
        Probability with which each record, independently, takes part in a step (Poisson
        sampling), in (0, 1].
    """

    noise_multiplier: float
    steps: int = 1
    sampling: float = 1.0

    @property
    def kind(self) -> Release:
        """One step like these."""
        return self._replace(steps=1)


def epsilon(releases: Iterable[Release], delta: float, relation: str = "add-remove") -> float:
    """Return an upper bound on the epsilon of all releases together, as `account` does."""
    return account(releases, delta, relation).epsilon


def account(
    releases: Iterable[Release],
    delta: float,
    relation: str = "add-remove",
    order: float | None = None,
) -> Cost:
    """Return an upper bound on the epsilon of all releases together, and the accountant used.

    Parameters
    ----------
    releases
        The releases, in any order.
    delta
        Probability that the guarantee fails, in (0, 1).
    relation
        "add-remove" of one record, or "replace-one", for which noise counts half.
    order
        Rényi order, > 1, for releases of several plans. None: all were planned before the first.

    Raises
    ------
    ModuleNotFoundError
        If records are sampled, and dp-accounting is not installed.
    TypeError, ValueError
        If a parameter is invalid.
    """
    delta = parameters.unit_interval(delta=delta)
    parameters.choice(RELATIONS, relation=relation)
    spent = tuple(sorted(merged(_checked(release) for release in releases if release.steps)))
    if not spent:
        return Cost(0.0, "closed form")
    if order is not None and planned_anew(spent):
        return _at_one_order(spent, delta, relation, order)
    return _epsilon(spent, delta, relation)


def merged(releases: Iterable[Release]) -> list[Release]:
    """Return one release for those that differ in their number of steps only.

    >>> merged([Release(2.0, 3), Release(1.0), Release(2.0, 4)])[0].steps
    7
    """
    counts = Counter[Release]()
    for release in releases:
        counts[release.kind] += release.steps
    return [kind._replace(steps=steps) for kind, steps in counts.items()]


def covers(spent: Iterable[Release], others: Iterable[Release]) -> bool:
    """Whether other releases are among those that were spent, each as often.

    >>> covers([Release(2.0, 3), Release(1.0)], [Release(2.0, 4)])
    False
    """
    most = {release.kind: release.steps for release in merged(spent)}
    return all(release.steps <= most.get(release.kind, 0) for release in merged(others))


def _checked(release: Release) -> Release:
    z = parameters.positive(noise_multiplier=release.noise_multiplier)
    steps = parameters.integer(1, steps=release.steps)
    return Release(z, steps, parameters.fraction(sampling=release.sampling))


@lru_cache(maxsize=4096)
def _epsilon(spent: tuple[Release, ...], delta: float, relation: str) -> Cost:
    if all(release.sampling == 1.0 for release in spent):
        return _closed_form(spent, delta, relation)
    _require_dp_accounting()
    # A record that is in no batch, which has this probability at least, gives nothing away.
    if (1.0 + 1e-9) * sum(n * q for _, n, q in spent) <= delta:
        return Cost(0.0, "closed form")
    if _loss(spent) > _LARGEST or not all(map(_countable, spent)):
        return _closed_form(spent, delta, relation)
    rounding = _ROUNDING * sum(release.steps for release in spent)
    if rounding > min(delta, _SLOWEST) / 2.0:
        return _renyi(spent, delta, relation)
    return _pld(spent, delta - rounding, relation)


def _countable(release: Release) -> bool:
    z, _, q = release
    return _LEAST_NOISE <= z <= _MOST_NOISE and (q <= _HIGHEST_RATE or q == 1.0)


def _loss(spent: tuple[Release, ...]) -> float:
    """Return about the largest loss of privacy that has to be kept in memory."""
    losses = []
    for z, n, q in spent:
        log_ratio = 0.5 / z / z
        mean = min(q * log_ratio, 0.5 * q * q * math.expm1(min(2.0 * log_ratio, 99.0)))
        losses.append(max(log_ratio, n * mean))
    return max(losses)


@lru_cache(maxsize=256)
def noise_multiplier(
    epsilon: float,
    delta: float,
    steps: int,
    sampling: float = 1.0,
    relation: str = "add-remove",
    besides: tuple[Release, ...] = (),
) -> float:
    """Return the smallest noise multiplier that keeps a number of steps within a budget.

    Parameters
    ----------
    epsilon, delta
        The budget: epsilon > 0, delta in (0, 1).
    steps, sampling, relation
        As in `Release` and `epsilon`.
    besides
        Unsampled releases with known noise that the same budget pays for.

    Raises
    ------
    TypeError, ValueError
        If a parameter is invalid, or `besides` uses up the budget.
    ModuleNotFoundError
        If records are sampled, and dp-accounting is not installed.
    """
    epsilon = parameters.positive(epsilon=epsilon)
    delta = parameters.unit_interval(delta=delta)
    parameters.choice(RELATIONS, relation=relation)
    _, steps, sampling = _checked(Release(1.0, steps, sampling))
    mu = mu_of(epsilon, delta) / (2.0 if relation == "replace-one" else 1.0)
    if besides:
        mu = math.sqrt(max(mu * mu - sum(n / z / z for z, n, _ in besides), 0.0))
    # Round up: the closed form is exact to 13 digits. This much noise is enough with sampling too.
    high = math.sqrt(steps) / mu * (1.0 + 1e-9) if mu else math.inf
    if math.isinf(high):
        budget = f"epsilon={epsilon!r} at delta={delta!r}"
        raise ValueError(f"no noise is enough for {budget}: take larger ones")
    if sampling == 1.0:
        return high

    def cost(z: float) -> float:
        return _epsilon((Release(z, steps, sampling), *besides), delta, relation).epsilon

    while (least := cost(high)) > epsilon:
        # The accountant may be looser than the closed form.
        high *= 1.25
    low = high / 2.0
    while (most := cost(low)) <= epsilon:
        low, high, least = low / 2.0, low, most
    while high / low > 1.0 + 5e-4:
        # The cost is about a power of the noise; each of these calls may take seconds.
        share = math.log(most / epsilon) / math.log(most / max(least, 1e-300))
        middle = low * (high / low) ** min(max(share, 0.1), 0.9)
        if (here := cost(middle)) <= epsilon:
            high, least = middle, here
        else:
            low, most = middle, here
    return high


# -- the accountants --------------------------------------------------------------------------
def _require_dp_accounting() -> None:
    if importlib.util.find_spec("dp_accounting") is None:
        text = "accounting for samples needs dp-accounting: pip install dp-accounting"
        raise ModuleNotFoundError(text)


def _closed_form(spent: tuple[Release, ...], delta: float, relation: str) -> Cost:
    """Return the cost if every record takes part in each step: an upper bound for samples."""
    mu = math.hypot(*(math.sqrt(r.steps) / r.noise_multiplier for r in spent))
    mu *= (2.0 if relation == "replace-one" else 1.0) * (1.0 + 1e-15)
    return Cost(epsilon_of(mu, delta), "closed form")


def _pld(spent: tuple[Release, ...], delta: float, relation: str) -> Cost:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    names = {"add-remove": "ADD_OR_REMOVE_ONE", "replace-one": "REPLACE_ONE"}
    finest = max(_FINEST, _loss(spent) / _POINTS)
    grid = min(max(min(_spread(z, q) for z, _, q in spent) / 16.0, finest), _COARSEST)
    neighbours = NeighboringRelation[names[relation]]
    accountant = PLDAccountant(neighbours, value_discretization_interval=grid)
    return Cost(_composed(accountant, spent, delta), "pld")


def _renyi(
    spent: tuple[Release, ...], delta: float, relation: str, orders: Sequence[float] = _ORDERS
) -> Cost:
    from dp_accounting.rdp import RdpAccountant

    if relation == "replace-one":
        # It knows samples for "add-remove" only.
        return _closed_form(spent, delta, relation)
    return Cost(_composed(RdpAccountant([*orders]), spent, delta), "rdp")


def planned_anew(spent: Iterable[Release]) -> bool:
    """Whether releases are of several plans, samples among them."""
    plans = {release.kind for release in spent}
    return len(plans) > 1 and any(release.sampling < 1.0 for release in plans)


@lru_cache(maxsize=256)
def order_for(plan: Release, delta: float) -> float:
    """Return Rényi's order at which a plan is best counted, one of a fixed list.

    >>> order_for(Release(1.0, 120, 0.05), 1e-5)
    4.5
    """
    costs = [_at_one_order((plan,), delta, RELATIONS[0], order) for order in _ORDERS]
    return float(_ORDERS[costs.index(min(costs))])


@lru_cache(maxsize=4096)
def _at_one_order(spent: tuple[Release, ...], delta: float, relation: str, order: float) -> Cost:
    _require_dp_accounting()
    if not all(map(_countable, spent)):
        return _closed_form(spent, delta, relation)
    return _renyi(spent, delta, relation, (order,))


def _composed(accountant: PrivacyAccountant, spent: tuple[Release, ...], delta: float) -> float:
    """Return epsilon by an accountant of dp-accounting."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    logging.getLogger("absl").addFilter(_of_note)
    for z, steps, sampling in spent:
        noise = GaussianDpEvent(z)
        event = noise if sampling == 1.0 else PoissonSampledDpEvent(sampling, noise)
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def _of_note(record: logging.LogRecord) -> bool:
    # Orders that do not converge are left out, and the bound holds by those that do.
    return "Excluding this order" not in str(record.msg)


def _spread(z: float, sampling: float) -> float:
    """Return the variance of the loss of one step over its mean absolute value.

    Losses that are rounded to a grid have at most a variance of grid times that mean more.
    """
    variance = sampling * sampling * math.expm1(min(1.0 / z**2, 9.0))
    return variance / (2.0 * sampling * math.erf(1.0 / (z * math.sqrt(8.0))))


# -- update clipping --------------------------------------------------------------------------
def default_bits_noise(noise_multiplier: float, clients: int) -> float:
    """Return the default standard deviation of the noise on the sum of the bits.

    The paper takes a twentieth of the clients. With few clients that is less than ``z / 2``,
    which is impossible; then z itself gives the update ``sqrt(4 / 3)`` = 1.155 times the noise.
    """
    return max(clients / 20, noise_multiplier)


def split_noise(noise_multiplier: float, bits_noise: float) -> float:
    """Return z_delta: the noise multiplier of the update, after the cost of the bits.

    Raises
    ------
    ValueError
        If the bits have too little noise; the message says which values are possible.
    """
    z, sigma = noise_multiplier, bits_noise
    if z == 0:
        return 0.0
    if not z < 2 * sigma:
        text = f"noise_multiplier must be below twice bits_noise, got {z!r} and {sigma!r}"
        advice = f"take bits_noise > {z / 2:.4g}, or noise_multiplier < {2 * sigma:.4g}"
        raise ValueError(f"{text}: {advice}")
    # 1 / sqrt(z^-2 - (2 sigma)^-2), written so that no square overflows.
    return z / math.sqrt((1 - z / (2 * sigma)) * (1 + z / (2 * sigma)))


def check_evaluation(share: float, loss_bound: float | None, unit: str) -> None:
    """Refuse a share for evaluations without a bound on the loss of a unit, or the other way."""
    if bool(share) != (loss_bound is not None):
        got = f"got {share!r} and {loss_bound!r}"
        raise ValueError(f"evaluation_share and loss_bound (of a {unit}) go together, {got}")


def split_evaluation(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Return the noise multipliers of a round without its evaluation, and of the evaluation.

    >>> [round(z, 3) for z in split_evaluation(6.0, 0.2)]
    [6.124, 30.0]
    """
    return noise_multiplier / math.sqrt(1.0 - share**2), noise_multiplier / (share or math.nan)


class Accountant:
    """Add up releases; report their cost, and how many more a budget allows.

    Random sampling of clients gets no credit: amplification needs Poisson sampling, which declearn
    does not do. The epsilon of rounds is that of a client in every round, an upper bound for all
    clients. Steps on Poisson samples of records have a `sampling`.

    Parameters
    ----------
    delta
        Probability that the guarantee fails, in (0, 1).
    relation
        "add-remove" of one client, or "replace-one", for which noise counts half.
    order
        Rényi order, if plans may depend on earlier releases, as in `account`.

    Attributes
    ----------
    plan
        Largest number of each release in the first plan, if it has more than one kind. Within it,
        no release depends on earlier ones.
    """

    plan: Sequence[Release] = ()

    def __init__(
        self, delta: float, relation: str = "add-remove", order: float | None = None
    ) -> None:
        self.delta, self.relation, self.order = delta, relation, order
        self.spent: list[Release] = []

    def add(self, noise_multiplier: float, steps: int = 1, sampling: float = 1.0) -> None:
        """Count one round, or a number of steps."""
        self.spent = self._with(Release(noise_multiplier, steps, sampling))

    @property
    def rounds(self) -> int:
        """Number of rounds, or steps, so far."""
        return sum(release.steps for release in self.spent)

    def epsilon(self, noise_multiplier: float = 0.0, more: int = 0, sampling: float = 1.0) -> float:
        """Return the epsilon of all rounds so far, plus `more` rounds."""
        return self.cost(noise_multiplier, more, sampling).epsilon

    def cost(self, noise_multiplier: float = 0.0, more: int = 0, sampling: float = 1.0) -> Cost:
        """Return the epsilon of `epsilon`, and the accountant used."""
        history = self._with(Release(noise_multiplier, more, sampling))
        return account(history, self.delta, self.relation, order=self.order_of(history))

    def order_of(self, history: Iterable[Release]) -> float | None:
        """Return the order at which these releases count; None if they are of one plan."""
        releases = merged(history)
        return None if covers(self.plan, releases) or not planned_anew(releases) else self.order

    def affordable(
        self, noise_multiplier: float, budget: float, most: int, sampling: float = 1.0
    ) -> int:
        """Return how many more rounds stay within an epsilon of `budget`, up to `most`."""

        def cost(rounds: int) -> float:
            return self.epsilon(noise_multiplier, rounds, sampling)

        high = 1
        # Search from below: computing an epsilon far beyond the budget takes long.
        while high <= most and cost(high) <= budget:
            high *= 2
        # All before this place are within the budget.
        known = high // 2 + 1
        return bisect_right(range(min(high, most + 1)), budget, known, key=cost) - 1

    def _with(self, more: Release) -> list[Release]:
        if not more.steps:
            return self.spent
        last = self.spent[-1] if self.spent else None
        if last is not None and last._replace(steps=more.steps) == more:
            return [*self.spent[:-1], more._replace(steps=last.steps + more.steps)]
        return [*self.spent, more]

    def set_state(self, spent: object) -> None:
        """Take over what `state_of` returned; what was counted here before stays counted.

        Of two histories of which one begins like the other, that one is a part of it. Others are
        added up.
        """
        releases = self.check_state(spent)
        if not _begins(releases, self.spent):
            self.spent = releases if _begins(self.spent, releases) else [*self.spent, *releases]

    @staticmethod
    def check_state(spent: object) -> list[Release]:
        """Return the releases of a state if it is well formed.

        Raises
        ------
        StateError
            If it is not.
        """
        if isinstance(spent, (str, bytes, Mapping)) or not isinstance(spent, Sequence):
            raise StateError(f"'spent' must be a list of [noise, rounds], got {spent!r:.200}")
        result = []
        for entry in spent:
            try:
                z, steps, *sampling = entry
                result.append(_checked(Release(z, steps, *sampling)))
            except (TypeError, ValueError) as exc:
                allowed = "a list of [noise, rounds]"
                raise StateError(f"'spent' must be {allowed}, got {entry!r:.100} in it") from exc
        return result


def state_of(spent: Iterable[Release]) -> list[list[float]]:
    """Return the noise multiplier of each release, its steps and, if sampled, the probability."""
    return [[z, n] if sampling == 1.0 else [z, n, sampling] for z, n, sampling in spent]


def _begins(history: Sequence[Release], other: Sequence[Release]) -> bool:
    """Whether all releases of one history are the first of another."""
    if len(history) > len(other):
        return False
    before, last = [*history[:-1]], history[-1:]
    pairs = zip(last, other[len(before) :], strict=False)
    as_long = all(a.kind == b.kind and a.steps <= b.steps for a, b in pairs)
    return as_long and before == [*other[: len(before)]]


# -- the Gaussian mechanism without sampling -------------------------------------------------------
_ROOT_2PI = math.sqrt(2.0 * math.pi)
# More than the rounding error of a tail that is exact to a few units in the last place.
_TAIL_ERROR = 1e-13


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon for this delta in (0, 1), rounded up; 0 without a release."""
    if mu == 0.0 or _delta(-mu / 2.0, mu) <= delta:
        return 0.0
    # Q(a) is at most exp(-a^2 / 2).
    a = _least(lambda a: _delta(a, mu) <= delta, -mu / 2.0, math.sqrt(-2.0 * math.log(delta)))
    return (mu * a + mu * mu / 2.0) * (1.0 + _TAIL_ERROR)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu for this epsilon > 0 and delta in (0, 1), rounded down."""
    high = 1.0
    while epsilon_of(high, delta) <= epsilon:
        high *= 2.0
    while epsilon_of(high / 2.0, delta) > epsilon:
        high /= 2.0
    return -_least(lambda minus: epsilon_of(-minus, delta) <= epsilon, -high, -high / 2.0)


def _delta(a: float, mu: float) -> float:
    density = math.exp(-a * a / 2.0) / _ROOT_2PI
    if a < 0.0:
        upper = 0.5 * math.erfc(a / math.sqrt(2.0))
        return upper * (1.0 + _TAIL_ERROR) - density * _mills(a + mu) * (1.0 - _TAIL_ERROR)
    larger = _mills(a)
    return density * (larger - _mills(a + mu) + larger * _TAIL_ERROR)


def _mills(x: float) -> float:
    """Return Q(x) / phi(x), for x >= 0."""
    if x < 5.0:
        return 0.5 * math.erfc(x / math.sqrt(2.0)) * _ROOT_2PI * math.exp(x * x / 2.0)
    # Laplace's continued fraction: from here on, its remainder is below the rounding error.
    fraction = x
    for k in range(60, 0, -1):
        fraction = x + k / fraction
    return 1.0 / fraction


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number for which `holds` is true, rounded up; it is true at `high`."""
    for _ in range(100):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
