# SPDX-License-Identifier: Apache-2.0
r"""From a budget to a noise multiplier, and the ledger of what was spent.

::

    rate  = min(1, batch_size / records)
    steps = rounds * min(n_steps, n_epoch * (records // batch_size))     (rounded up, if kept)
    z     = least noise multiplier with which `steps` Poisson samples cost at most epsilon

Records are neighbours by adding or removing one. Accountants are those of
`fedclip.privacy.accounting`; z is worked out once for the same numbers, and kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclip import parameters
from fedclip.privacy.accounting import Accountant, noise_multiplier

__all__ = ["Calibration", "Ledger", "calibrate", "steps_of_a_round"]


@dataclass(frozen=True)
class Calibration:
    """What a budget comes to.

    Attributes
    ----------
    noise_multiplier
        Standard deviation of the noise on a sum, over the bound of one record.
    rate
        Probability with which a record is in a batch.
    steps
        How many the budget is for.
    expected
        Expected size of a batch, by which each sum is divided.
    """

    noise_multiplier: float
    rate: float
    steps: int
    expected: float

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on a mean gradient, over the bound of one record."""
        return self.noise_multiplier / self.expected


def steps_of_a_round(
    records: int,
    batches: Mapping[str, Any],
    n_epoch: int | None = None,
    n_steps: int | None = None,
) -> int | None:
    """Return how many steps a round has; None if neither epochs nor steps limit it."""
    size = parameters.integer(1, batch_size=batches["batch_size"])
    whole, rest = divmod(records, min(size, records))
    epoch = whole + (rest > 0 and not batches.get("drop_remainder", True))
    limits = [] if n_epoch is None else [parameters.integer(1, n_epoch=n_epoch) * epoch]
    if n_steps is not None:
        limits.append(parameters.integer(1, n_steps=n_steps))
    return min(limits, default=None)


def calibrate(
    epsilon: float, delta: float, records: int, batch_size: int, steps: int
) -> Calibration:
    """Return noise and sampling with which so many steps stay within a budget.

    Parameters
    ----------
    epsilon, delta
        The budget: epsilon above 0, delta in (0, 1).
    records
        How many the client has, at least 1.
    batch_size
        Expected size of a batch, at least 1.
    steps
        Of all rounds together, at least 1.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above.
    ModuleNotFoundError
        If no accountant for samples is installed.

    Examples
    --------
    >>> found = calibrate(3.0, 1e-5, records=400, batch_size=64, steps=60)
    >>> round(found.noise_multiplier, 2), found.rate
    (2.0, 0.16)
    """
    records = parameters.integer(1, records=records)
    expected = min(parameters.integer(1, batch_size=batch_size), records)
    rate = expected / records
    return Calibration(noise_multiplier(epsilon, delta, steps, rate), rate, steps, float(expected))


class Ledger:
    """What was spent of a budget, and whether another step fits; kept in a file over restarts.

    Parameters
    ----------
    epsilon, delta
        The budget.
    path
        A file of JSON, read at the start if it is there; None: the ledger ends with the process.

    Raises
    ------
    ValueError
        If the file is not a ledger. (It is not overwritten: what it says was spent, was.)
    """

    def __init__(self, epsilon: float, delta: float, path: Path | None = None) -> None:
        self.epsilon = parameters.positive(epsilon=epsilon)
        self.accountant = Accountant(parameters.unit_interval(delta=delta))
        self.path = path
        self._free: tuple[float, float, int] = (0.0, 0.0, 0)
        if path is not None and path.exists():
            try:
                self.accountant.set_state(json.loads(path.read_text(encoding="utf-8"))["spent"])
            except (KeyError, TypeError, ValueError) as exc:
                raise ValueError(
                    f"{path} is not a ledger of privacy spent ({exc}): give the file that belongs "
                    "to these records, or another name if they were never used"
                ) from exc

    @property
    def spent(self) -> float:
        """Epsilon of all steps so far, at the budget's delta."""
        return self.accountant.epsilon()

    def allow(self, noise_multiplier: float, rate: float, steps: int, planned: int = 0) -> int:
        """Return how many of so many steps still fit.

        To account takes long: what is found out for the `planned` steps of the whole run holds
        until noise or rate change.
        """
        z, q, free = self._free
        if (z, q) != (noise_multiplier, rate) or steps > free:
            most = max(steps, planned)
            if self.accountant.epsilon(noise_multiplier, most, rate) > self.epsilon:
                most = self.accountant.affordable(noise_multiplier, self.epsilon, most, rate)
            self._free = (noise_multiplier, rate, most)
        return min(steps, self._free[2])

    def charge(self, noise_multiplier: float, rate: float) -> None:
        """Count one step, before it is taken.

        Raises
        ------
        StopIteration
            If it does not fit; nothing is counted then.
        """
        if not self.allow(noise_multiplier, rate, 1):
            raise StopIteration(
                f"the privacy budget is spent: epsilon {self.spent:.4g} of {self.epsilon:.4g} at "
                f"delta {self.accountant.delta:.3g}; another step would pass it"
            )
        self.accountant.add(noise_multiplier, 1, rate)
        self._free = (noise_multiplier, rate, self._free[2] - 1)

    def save(self) -> None:
        """Write the file, if there is one, so that a crash leaves the old one or the new one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {
                "spent": self.accountant.get_state(),
                "delta": self.accountant.delta,
                "relation": self.accountant.relation,
                "sampling": "Poisson",
            }
        )
        fresh = self.path.with_name(f"{self.path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)


def too_few(records: int, delta: float) -> str:
    """Return a sentence if delta allows a record to be given away whole; "" if not."""
    if records * delta < 1.0 or math.isnan(delta):
        return ""
    return (
        f"delta {delta:.3g} is not below 1 / {records} records: a mechanism that publishes one "
        "record by chance would pass; take a smaller delta"
    )
