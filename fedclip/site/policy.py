# SPDX-License-Identifier: Apache-2.0
"""The policy of a site, read from a file that belongs to its operator."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from fedclip.core import parameters
from fedclip.core.parameters import Configured, integer, limit, parameter
from fedclip.errors import nearest
from fedclip.privacy.accounting import Release, epsilon


def _names(allow_metrics: Any) -> tuple[str, ...]:
    """Return the names of scalars."""
    if isinstance(allow_metrics, str) or not isinstance(allow_metrics, Sequence):
        raise TypeError(f"allow_metrics must be a list of names of scalars, got {allow_metrics!r}")
    return tuple(parameters.name(**{"each of allow_metrics": name}) for name in allow_metrics)


def _absolute(ledger: str) -> str:
    """Return the path, if it means the same file in each folder."""
    path = parameters.name(ledger=ledger)
    if not Path(path).is_absolute():
        why = "each folder would have a new budget"
        raise ValueError(f"ledger must be an absolute path, got {path!r}: {why}")
    return path


class Policy(Configured):
    """What may leave a site, in all jobs and on all engines together; it cannot be changed.

    ::

        leaves:   update, with norm <= max_norm, + normal(0, noise_multiplier * max_norm)
                  each of the scalars in allow_metrics
                  without noise: the bits of fedclip's vote
        budget:   epsilon(all updates that have left) <= max_epsilon, at delta
        replies:  of any kind, refusals included: at most max_replies_per_run in a run,
                  max_replies in all runs

    Parameters
    ----------
    max_norm
        Largest L2 norm of a whole update, > 0; a smaller bound of the server's stays in force.
    noise_multiplier
        Standard deviation of the noise that the site adds itself, in units of `max_norm`, >= 0.
    max_epsilon
        What all updates together may cost, > 0; None for no budget. The relation is
        "replace-one", for which the noise counts half.
    delta
        Probability with which that may fail, in (0, 1).
    ledger
        Absolute path of the file of what was spent, one for each site. A second file of that name
        with ``.replies`` counts the replies.
    allow_metrics
        Names of the only other numbers that may leave.
    max_replies_per_run
        Largest number of messages of one run that are answered, >= 1.
    max_replies
        The same for all runs together, >= 1; it needs `ledger`. None: 10,000 if there is a
        `ledger`; without one, each process counts only the replies of its runs.
    allow_job_code
        Whether NVFlare jobs may bring code (``byoc``), which can send anything by other ways than
        the results of tasks.

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
    noise_multiplier: float = parameter(parameters.non_negative, default=0.0)
    max_epsilon: float | None = parameter(parameters.positive, default=None)
    delta: float | None = parameter(parameters.unit_interval, default=None)
    ledger: str | None = parameter(_absolute, default=None)
    allow_metrics: Sequence[str] = parameter(_names, default=())
    max_replies_per_run: int = parameter(integer, 1, default=1_000)
    max_replies: int | None = parameter(integer, 1, default=None)
    allow_job_code: bool = parameter(parameters.boolean, default=False)

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        budget = ("max_epsilon", "delta", "ledger")
        missing = [name for name in budget if getattr(self, name) is None]
        # A ledger without a budget counts replies.
        if missing and missing not in ([*budget], [*budget[:2]]):
            lacking = f"{' and '.join(missing)} is missing"
            raise ValueError(f"max_epsilon, delta, ledger: give all of them or none; {lacking}")
        if self.max_replies is not None and self.ledger is None:
            raise ValueError("max_replies counts in a file: give ledger an absolute path")
        if self.max_epsilon is None or self.delta is None:
            return
        if not self.noise_multiplier:
            raise ValueError("max_epsilon needs noise: give noise_multiplier > 0")
        cost = epsilon([Release(self.noise_multiplier)], self.delta, self.relation)
        if cost > self.max_epsilon:
            update = f"one with noise_multiplier = {self.noise_multiplier:g} costs {cost:.4g}"
            text = f"max_epsilon = {self.max_epsilon:g} allows no update: {update}"
            raise ValueError(f"{text}; raise either")

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(f"a site's policy cannot be changed: {name}={vars(self)[name]!r}")
        super().__setattr__(name, value)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the policy in the section [update] of a file.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it holds anything else, or if others than this process's user and root may change it.
        """
        path = Path(path)
        check_owned(path)
        try:
            config = tomllib.loads(path.read_bytes().decode())
            for section in config.keys() - {"update"}:
                got = f"got {section!r}{nearest(section, ['update'])}"
                raise ValueError(f"a policy has the section [update] only, {got}")
            update = config.get("update")
            if not isinstance(update, dict) or "max_norm" not in update:
                raise ValueError("[update] needs max_norm, such as max_norm = 0.5")
            return cls(**update)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{path}: {exc}") from exc


def check_owned(path: Path) -> None:
    """Refuse a file that others than root and the user of this process may change or replace.

    It checks the file, its lock, and each folder above them, of its name and of the target of each
    link. On Windows, where modes do not say who may change a file, it refuses nothing.

    Raises
    ------
    ValueError
        With the first of them, and the command that corrects its mode or owner.
    """
    if os.name == "nt":
        return
    for name in dict.fromkeys([*_steps(path.absolute()), Path(os.path.realpath(path))]):
        lock = name.with_name(f"{name.name}.lock")
        for file in filter(Path.exists, (*name.parents, name, lock)):
            try:
                _check_mode(file, 0o077 if file == lock else 0o022)
            except ValueError as exc:
                raise ValueError(f"{path} is not this site's alone: {exc}") from None


def _steps(path: Path) -> Iterator[Path]:
    """Yield a path, and the path after each link on the way is followed."""
    yield path
    for folder in (*reversed(path.parents), path):
        if folder.is_symlink() and folder.exists():
            yield from _steps(folder.parent / folder.readlink() / path.relative_to(folder))
            return


def _check_mode(path: Path, bits: int) -> None:
    # Of a link itself: its owner decides where it leads.
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise ValueError(f"user {status.st_uid} owns {path}, and not root; run: chown root {path}")
    # In a folder with the sticky bit, such as /tmp, only owners replace files; links have no mode.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & bits and not sticky and not stat.S_ISLNK(status.st_mode):
        may, mode = ("change", "go-w") if bits == 0o022 else ("lock", "go=")
        raise ValueError(f"others than its owner may {may} {path}; run: chmod {mode} {path}")
