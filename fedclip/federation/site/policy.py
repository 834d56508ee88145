# SPDX-License-Identifier: Apache-2.0
"""The policy of a site: what may leave it, read from a file that belongs to its operator."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from fedclip import parameters
from fedclip.errors import nearest
from fedclip.parameters import Configured, limit, non_negative, parameter, positive, unit_interval
from fedclip.privacy.accounting import Release, epsilon

__all__ = ["Policy", "open_to_others"]


def _names(**values: Any) -> tuple[str, ...]:
    """Return the one keyword value as a tuple of names."""
    ((name, found),) = values.items()
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{name} must be a list of names of scalars, got {found!r:.200}")
    return tuple(parameters.name(**{f"each of {name}": one}) for one in found)


def _absolute(**values: Any) -> str:
    """Return the one keyword value, if it is a path that no job can bend."""
    path = parameters.name(**values)
    if not Path(path).is_absolute():
        raise ValueError(
            f"ledger must be an absolute path, got {path!r}: another one would depend on the "
            "folder in which a process was started, and be a new budget in each"
        )
    return path


class Policy(Configured):
    """What may leave a site, in all jobs and on all engines together; it can not be changed.

    ::

        leaves:   update, with norm <= max_norm, + normal(0, noise_multiplier * max_norm)
                  each of the scalars in allow_metrics
                  without noise: the bits of fedclip's vote
        budget:   epsilon(all updates that have left) <= max_epsilon, at delta

    Parameters
    ----------
    max_norm
        Largest L2 norm of a whole update, > 0; a smaller bound of the server's stays in force.
    noise_multiplier
        Standard deviation of the noise that the site adds itself, in units of `max_norm`, >= 0.
    max_epsilon
        What all updates together may cost, > 0; None for no budget. It is counted as if another
        update could stand in the place of each ("replace-one"), so the noise counts half.
    delta
        Probability with which that may fail, in (0, 1).
    ledger
        Absolute path of the file that says what was spent, one for each site.
    allow_metrics
        Names of the only other numbers that may leave.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above; if one of budget, delta, ledger and noise is missing; if
        the budget is too small for one update.

    Examples
    --------
    >>> policy = Policy(max_norm=0.5, noise_multiplier=2.0, allow_metrics=["num-examples"])
    >>> policy.allow_metrics
    ('num-examples',)
    """

    name: ClassVar[str] = "[update] of a site's policy"
    relation: ClassVar[str] = "replace-one"

    max_norm: float = parameter(limit)
    noise_multiplier: float = parameter(non_negative, default=0.0)
    max_epsilon: float | None = parameter(positive, default=None)
    delta: float | None = parameter(unit_interval, default=None)
    ledger: str | None = parameter(_absolute, default=None)
    allow_metrics: Sequence[str] = parameter(_names, default=())

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        missing = [n for n in ("max_epsilon", "delta", "ledger") if getattr(self, n) is None]
        if missing and len(missing) < 3:
            raise ValueError(
                "max_epsilon, delta and ledger are one budget: give all of them or none; "
                f"{' and '.join(missing)} is missing"
            )
        if self.max_epsilon is None or self.delta is None:
            return
        if not self.noise_multiplier:
            raise ValueError("max_epsilon needs noise: give noise_multiplier > 0")
        one = epsilon([Release(self.noise_multiplier)], self.delta, self.relation)
        if one > self.max_epsilon:
            raise ValueError(
                f"max_epsilon = {self.max_epsilon:g} allows no update: one with noise_multiplier = "
                f"{self.noise_multiplier:g} costs {one:.4g}; raise either"
            )

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(
                f"a site's policy can not be changed: {name} is {vars(self)[name]!r}"
            )
        super().__setattr__(name, value)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the policy that a file says, in its section [update].

        Raises
        ------
        OSError
            If the file can not be read.
        ValueError
            If it says anything else, or if others than its owner may change it.
        """
        path = Path(path)
        with path.open("rb") as file:
            # Of the file that is read, whatever its name leads to a moment later.
            wrong = open_to_others(path, os.fstat(file.fileno()))
            text = file.read()
        folders = {path.absolute().parent, Path(os.path.realpath(path)).parent}
        for one in [wrong, *(open_to_others(folder) for folder in folders)]:
            if one:
                raise ValueError(f"{one}: then this policy is not the site's own word")
        try:
            found = tomllib.loads(text.decode())
            for section in found:
                if section != "update":
                    hint = nearest(section, ["update"])
                    raise ValueError(
                        f"a policy has the section [update] only, got {section!r}{hint}"
                    )
            update = found.get("update")
            if not isinstance(update, dict) or "max_norm" not in update:
                raise ValueError("[update] needs max_norm, such as max_norm = 0.5")
            return cls(**update)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{path}: {exc}") from exc


def open_to_others(path: Path, known: os.stat_result | None = None) -> str:
    """Return a sentence if others than the owner may change a file, or the names in a folder.

    On Windows, modes do not say who may change what: nothing is found out there.
    """
    mode = (known or path.stat()).st_mode
    # In a folder with the sticky bit, such as /tmp, others can not replace what is not theirs.
    if os.name == "nt" or not mode & 0o022 or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    return f"others than its owner may change {path}; run: chmod go-w {path}"
