# SPDX-License-Identifier: Apache-2.0
r"""From a budget to a noise multiplier, and to what that noise does.

For n records, T steps, batches of B and a model of d values::

    rate   = min(1, B / n)
    T      = rounds * min(n_steps, n_epoch * (n // B))                  (rounded up, if kept)
    z      = least noise multiplier with which T Poisson samples cost at most epsilon
    noise  = z / B          on each value of a mean gradient, over the bound C of one record
    length = noise sqrt(d)  of a step's noise, relative to C, the longest that the gradient can be
    drift  = length / sqrt(T)    of the noise of all steps, relative to T C, the longest way

If evaluations have a share s of the budget, there is one for each round, on all records::

    z_e    = least noise multiplier with which the evaluations alone cost s epsilon
    z      = as above, with those evaluations: all together cost at most epsilon

With twice the records, at the same rate and steps, each of the last three is half as large.
Data sets are neighbours by zero-out: one record, or one person with all of its records, is
replaced by one whose gradient is zero. Their number n is public, as rate and T follow from it; for
persons, n counts persons. Accountants are those of
`fedclip.privacy.accounting`; z is worked out once for the same numbers, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedclip.core import parameters
from fedclip.privacy.accounting import Cost, Release, account, noise_multiplier
from fedclip.privacy.planning import ASK_VALUES, in_words, verdict


@dataclass(frozen=True)
class Calibration:
    """Noise and sampling for a budget; made by `calibrate`.

    Attributes
    ----------
    epsilon, delta, records, steps
        The budget, how many records there are, and for how many steps it is.
    noise_multiplier
        Standard deviation of the noise on a sum, over the bound of one record.
    rate
        Probability with which a record is in a batch.
    expected
        Expected size of a batch, by which each sum is divided.
    unit
        The unit that is protected, and counted here: a "record", or a "person" with several.
    evaluations
        The evaluations that the budget pays for besides; none, if they have no share of it.
    """

    epsilon: float
    delta: float
    records: int
    steps: int
    noise_multiplier: float
    rate: float
    expected: float
    unit: str = "record"
    evaluations: tuple[Release, ...] = ()

    @property
    def accountant(self) -> str:
        """Name of the accountant that has counted, as in `accounting.Cost`."""
        return self._cost.accountant

    @property
    def spent(self) -> float:
        """The epsilon of all steps, at most the budget's."""
        return self._cost.epsilon

    @property
    def sampling(self) -> str:
        """What decides which records a step is on: "Poisson", or "none" if it is on all."""
        return "Poisson" if self.rate < 1 else "none"

    @property
    def _cost(self) -> Cost:
        return account(self.releases, self.delta)

    @property
    def releases(self) -> tuple[Release, ...]:
        """All that the budget pays for."""
        return (Release(self.noise_multiplier, self.steps, self.rate), *self.evaluations)

    def evaluating(self, share: float, times: int) -> Calibration:
        """Return what is left for the steps if evaluations have a share of the budget.

        Parameters
        ----------
        share
            Of epsilon, in [0, 1): what the evaluations alone cost. As costs do not add up, the
            steps lose less than that.
        times
            Number of evaluations, at least 1.

        Examples
        --------
        >>> found = calibrate(3.0, 1e-5, records=400, batch_size=64, steps=60)
        >>> round(found.evaluating(0.2, 10).noise_multiplier / found.noise_multiplier, 2)
        1.02
        """
        if parameters.share(evaluation_share=share) == 0.0:
            return self
        paid = (Release(noise_multiplier(share * self.epsilon, self.delta, times), times),)
        z = noise_multiplier(self.epsilon, self.delta, self.steps, self.rate, besides=paid)
        return replace(self, noise_multiplier=z, evaluations=paid)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on a mean gradient, over the bound of one record."""
        return self.noise_multiplier / self.expected

    def drift(self, values: int) -> float:
        """Return the length of all noise, relative to the longest way that a model can go."""
        return self.noise * math.sqrt(values / self.steps)

    def in_words(self, values: int | None = None) -> str:
        """Return the effect of the noise on a model with this number of values, as text."""
        paid = "steps and evaluations" if self.evaluations else "steps"
        batches = f"each batch has all {self.records:,} {self.unit}s: smaller ones need less noise"
        if self.rate < 1:
            batches = f"each {self.unit} is in a batch with probability {self.rate:.4g} (Poisson "
            batches += f"sampling): {self.expected:g} {self.unit}s on average"
        lines = [
            f"epsilon {self.epsilon:g} at delta {self.delta:g}, {self.records:,} {self.unit}s, "
            f"{self.steps:,} steps:",
            f"  {batches}",
            f"  noise multiplier {self.noise_multiplier:.4g}; all {paid} cost "
            f"{in_words(self.spent)} by {self.accountant}, for zeroing out one {self.unit} (the "
            f"number of {self.unit}s is public)",
            f"  standard deviation of the noise, where C is the bound on a {self.unit}:",
            f"    mean gradient: {self.noise:.3g} C on each value; the mean has norm at most C",
        ]
        for z, times, _ in self.evaluations:
            lines.append(
                f"  this includes {times:,} evaluations at noise multiplier {z:.4g}: with n "
                f"validation {self.unit}s, the noise on the mean loss is about "
                f"{evaluation_noise(z):.3g} / n times loss_bound"
            )
        if why := too_few(self.records, self.delta, self.unit):
            lines.append(f"  {why}")
        count = values or 1
        drift = self.drift(count)
        if values is None and drift <= 1:
            return "\n".join([*lines, f"  {ASK_VALUES}"])
        lines.append(
            f"  with {count:,} value{'s' * (count > 1)}, the noise of a step has norm "
            f"{self.noise * math.sqrt(count):.3g} C; the total noise is {100 * drift:.3g} % of the "
            "largest possible change of the model"
        )
        if drift > 1:
            lines.append(f"  {self.records:,} {self.unit}s are too few for this epsilon")
        return "\n".join([*lines, f"  {verdict(drift, self.records, f'{self.unit}s')}"])


def steps_of_a_round(
    records: int,
    batches: Mapping[str, object],
    n_epoch: int | None = None,
    n_steps: int | None = None,
) -> int | None:
    """Return how many steps a round has; None if neither epochs nor steps limit it."""
    size = parameters.integer(1, batch_size=batches["batch_size"])
    batches_of_all, remainder = divmod(records, min(size, records))
    epoch = batches_of_all + (remainder > 0 and not batches.get("drop_remainder", True))
    limits = [] if n_epoch is None else [parameters.integer(1, n_epoch=n_epoch) * epoch]
    if n_steps is not None:
        limits.append(parameters.integer(1, n_steps=n_steps))
    return min(limits, default=None)


def calibrate(
    epsilon_: float, delta: float, records: int, batch_size: int, steps: int, unit: str = "record"
) -> Calibration:
    """Return noise and sampling with which the steps stay within a budget.

    Parameters
    ----------
    epsilon_, delta
        The budget: epsilon above 0, delta in (0, 1).
    records
        How many the client has, or how many persons, at least 1.
    batch_size
        Expected size of a batch, at least 1.
    steps
        Of all rounds together, at least 1.
    unit
        "record", or "person".

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.
    ModuleNotFoundError
        If records are sampled, and dp-accounting is not installed.

    Examples
    --------
    >>> found = calibrate(3.0, 1e-5, records=400, batch_size=64, steps=60)
    >>> round(found.noise_multiplier, 2), found.rate
    (2.0, 0.16)
    """
    records = parameters.integer(1, records=records)
    expected = min(parameters.integer(1, batch_size=batch_size), records)
    rate = expected / records
    z = noise_multiplier(epsilon_, delta, steps, rate)
    return Calibration(epsilon_, delta, records, steps, z, rate, float(expected), unit)


def evaluation_noise(noise_multiplier: float, numbers: int = 1) -> float:
    """Return the standard deviation on each sum of an evaluation, in bounds of its number.

    >>> round(evaluation_noise(18.8) / 1000, 4)  # of the mean loss of 1,000 records
    0.0133
    """
    return noise_multiplier * math.sqrt(numbers + 1.0) / 2.0


def too_few(records: int, delta: float, unit: str = "record") -> str:
    """Return a sentence if delta allows a unit to be given away whole; "" if not."""
    why = f"delta {delta:.3g} is not below 1 / {records} {unit}s: publishing one {unit} by chance"
    return f"{why} would pass; take a smaller delta" if records * delta >= 1.0 else ""
