# SPDX-License-Identifier: Apache-2.0
"""A server's rounds and state, kept in a file over restarts, for any engine.

::

    Served(settings, folder):
        lock the file; take over the state that it holds
        write the file                       one that can not be written is found out now
    Open a round:
        charge it to the ledger in the same folder, if there is noise
    Close a round:
        write the file                       then its average may leave
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fedclip.core.records import SERVED, RoundRecord
from fedclip.core.version import VERSION
from fedclip.errors import StateError
from fedclip.privacy.ledger import FILE
from fedclip.privacy.locks import locked
from fedclip.updates.protocol import Arrays, Closed, Reply, SentBound
from fedclip.updates.schedule import Due
from fedclip.updates.server import UpdateServer
from fedclip.updates.tables import server_of


class Kept(NamedTuple):
    """What a file holds: settings, the server's state, and the record of each round."""

    settings: Mapping[str, object]
    state: Mapping[str, object]
    rounds: list[dict[str, Any]]


def read(path: Path) -> Kept:
    """Return what a file holds.

    Raises
    ------
    StateError
        If it is not a file of `Served`, or is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = Kept(found["settings"], found["state"], found["rounds"])
        if not all(isinstance(table, dict) for table in (kept.settings, *kept.rounds)):
            raise TypeError("settings must be a table, and rounds tables")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise StateError(
            f"{path} is not a server's file of update clipping, or is damaged ({exc!r:.200}): "
            "name the folder of this federation, or another one if nothing was spent in it"
        ) from exc
    return kept


def server_in(folder: Path | None, settings: Mapping[str, object]) -> UpdateServer:
    """Return the server that settings describe; its ledger is in the folder, unless they say."""
    if folder is None or not settings.get("noise_multiplier"):
        return server_of(settings)
    return server_of({"ledger": str(folder / FILE), **settings})


def absolute(folder: str | Path | None) -> Path | None:
    """Return the path of a server's folder, if there is one.

    Raises
    ------
    ValueError
        If the path is relative.
    """
    path = None if folder is None else Path(folder)
    if path is not None and not path.is_absolute():
        raise ValueError(
            f"folder must be an absolute path on the server, got {str(folder)!r}: a relative one "
            "would be a new budget in each folder that a server is started in"
        )
    return path


class Served:
    """An `UpdateServer` whose state is in a file before anything of a round is released.

    Parameters
    ----------
    settings
        Those of `server_of`.
    folder
        Absolute path of the folder for the file, and for the ledger if the settings name none. It
        is made if needed. None: no state outlasts the process; with noise, you get a warning.
    fallback
        The folder without `folder`, which ends with the job: with noise, you get the warning, too.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong, or `folder` is a relative path.
    StateError
        If the file is damaged, or was made with noise and these settings add none.
    OSError
        If the file can not be written, or another process serves from it.

    Notes
    -----
    Guarantee: epsilon in the ledger is never less than that of the rounds that `open` has begun.
    A ledger that is put back to an earlier one can not be seen, unless the state is later.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> folder, model = tempfile.mkdtemp(), {"w": np.zeros(2)}
    >>> served = Served({"start_norm": 1.0}, folder)
    >>> served.open().bound
    1.0
    >>> _ = served.close([Reply({"w": np.array([0.3, 0.4])}, votes=1, within=1)], model)
    >>> served.leave()
    >>> again = Served({"start_norm": 1.0}, folder)
    >>> again.open().round, again.rounds[0]["share"]
    (2, 1.0)
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        folder: str | Path | None = None,
        *,
        fallback: Path | None = None,
    ) -> None:
        place = absolute(folder) or fallback
        self.server: UpdateServer = server_in(place, settings)
        self.settings = dict(settings)
        self.rounds: list[dict[str, Any]] = []
        self.path = None if place is None else place / SERVED
        self.leave: Callable[[], object] = lambda: None
        """Let others serve from the file; the end of this object does so, too."""
        if folder is None and self.server.bound.budget is not None:
            text = "noise without a folder: a restart spends the budget again; give folder"
            self.server.bound.logger.warning(text)
        if self.path is None:
            return
        try:
            lock = locked(self.path.with_name(f"{SERVED}.lock"), wait=False)
        except OSError as exc:
            raise OSError(
                f"no state can be kept in {place} ({exc}): a server is running there, or this "
                "process may not write; give each federation a folder of its own"
            ) from exc
        self.leave = weakref.finalize(self, lock.close)
        if self.path.exists():
            kept = read(self.path)
            self.server.set_state(dict(kept.state))
            self.rounds = kept.rounds
        self._write()

    def open(self, due: Due | None = None) -> SentBound:
        """Return the message to each client; see `UpdateServer.open`."""
        return self.server.open(due)

    def close(self, replies: Sequence[Reply], like: Arrays) -> Closed:
        """Return the average of the replies; see `UpdateServer.close`.

        Raises
        ------
        OSError
            If the file can not be written. Then nothing of the round is released.
        """
        closed = self.server.close(replies, like)
        self.rounds.append(closed.record)
        self._write()
        return closed

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the rounds as reports read them, with one step for each vote.

        Norms stay on the clients, and with noise so does what was clipped: then the share tells.
        """
        adaptive = self.server.bound.learning_rate > 0
        for round_ in self.rounds:
            bound, share, steps = round_["bound"], round_["share"], round_["replies"]
            limit = {"limit": bound, "limit_min": bound, "limit_max": bound}
            by = {"learnt" if adaptive else "fixed": steps}
            over = round_["clipped"] if share is None else round((1.0 - share) * steps)
            yield asdict(RoundRecord(round_["round"], steps=steps, clipped=over, **limit, **by))

    def _write(self) -> None:
        if self.path is None:
            return
        content = {
            "fedclip": VERSION,
            "settings": self.settings,
            "state": self.server.get_state(),
            "rounds": self.rounds,
            "modules": [("update-clip-server", {"rounds": [*self._records()]})],
        }
        fresh = self.path.with_name(f"{SERVED}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, default=list))
            file.flush()
            os.fsync(file.fileno())
        # A crash leaves the old file or the new one.
        fresh.replace(self.path)
