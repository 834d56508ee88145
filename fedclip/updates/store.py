# SPDX-License-Identifier: Apache-2.0
"""A server from a table of settings, with its rounds and state in a file, for any engine.

The settings of server and clients are in one table: `server_of`, `client_of`; among those of an
app, `settings_in`.

::

    PersistentServer(settings, folder):
        lock the file; take over the state that it holds
        write the file                       a file that cannot be written is refused now
    Open a round:
        charge it to the ledger in the same folder, if there is noise
    Close a round:
        write the file                       then its average may leave
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from fedclip.core.plugins import VERSION
from fedclip.core.records import SERVED, RoundRecord
from fedclip.errors import StateError, nearest
from fedclip.privacy.ledger import FILE, locked, write_out
from fedclip.updates.aggregation import Combining
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.client_noise import SITES_ELSEWHERE
from fedclip.updates.protocol import Arrays, Participation, Reply, RoundResult, SentBound
from fedclip.updates.server import UpdateServer
from fedclip.updates.weights import Shares

_PARTS: tuple[Callable[..., Any], ...] = (AdaptiveBound, UpdateClient, Shares, Combining)
_OF_PART = {part: {*inspect.signature(part).parameters} for part in _PARTS}
_KNOWN = set[str]().union(*_OF_PART.values())
# Those that an app may have for itself, too, outside of the table.
_ANYBODYS = {
    *("combine", "delta", "exclude", "generator", "learning_rate", "max_steps", "momentum"),
    *("noise", "quantile", "relation", "rounds", "scope", "seed", "weights"),
}


def _of(part: Callable[..., Any], settings: Mapping[str, object]) -> dict[str, Any]:
    """Return those of the settings that a part takes; refuse one that none takes."""
    for name in settings.keys() - _KNOWN:
        hint = nearest(name, _KNOWN) or f"; its parameters are {', '.join(sorted(_KNOWN))}"
        raise TypeError(f"update clipping has no parameter {name!r}{hint}")
    return {name: settings[name] for name in settings if name in _OF_PART[part]}


def settings_in(run_config: Mapping[str, object]) -> dict[str, Any]:
    """Return what an app's run configuration has in its table ``update-clip``.

    Parameters
    ----------
    run_config
        Settings by name, such as ``"update-clip.start-norm"``; ``-`` and ``_`` are the same.

    Raises
    ------
    ValueError
        If a setting of update clipping is given twice, or elsewhere, where nobody would read it.

    Examples
    --------
    >>> settings_in({"rounds": 9, "update-clip.start-norm": 0.5, "update-clip.weights.7": 2.0})
    {'start_norm': 0.5, 'weights': {'7': 2.0}}
    >>> settings_in({"update_clip.noise-multiplier": 1.0})
    Traceback (most recent call last):
    ...
    ValueError: nobody reads 'update_clip.noise-multiplier': write update-clip.noise-multiplier
    """
    settings: dict[str, Any] = {}
    for name, value in run_config.items():
        table, dot, key = name.rpartition(".")
        if not name.startswith("update-clip."):
            meant = "clip" in table.lower() and nearest(table, ["update-clip", "updateclip"])
            if meant or get_close_matches(_snake(key), _KNOWN - _ANYBODYS, n=1, cutoff=0.9):
                advice = "" if dot else ", or give a setting of the app itself another name"
                raise ValueError(f"nobody reads {name!r}: write update-clip.{key}{advice}")
            continue
        key, dot, inner = name.removeprefix("update-clip.").partition(".")
        key = _snake(key)
        known = settings.get(key, {})
        if key in settings and not (dot and isinstance(known, dict) and inner not in known):
            raise ValueError(f"update-clip.{key.replace('_', '-')} is given twice: keep one")
        settings[key] = {**known, inner: value} if dot else value
    return settings


def _snake(key: str) -> str:
    return key.lower().replace("-", "_")


def server_of(settings: Mapping[str, object]) -> UpdateServer:
    """Return the server that a table of settings describes.

    The table has the parameters of `update-clip-server` (whose `max_norm` is the largest bound)
    and of `clipped-averaging`, except those of declearn alone.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong.

    Examples
    --------
    >>> server_of({"start_norm": 0.5, "scope": "layer", "weights": "steps"}).open().bound
    0.5
    >>> server_of({"start_nrom": 0.5})
    Traceback (most recent call last):
    ...
    TypeError: update clipping has no parameter 'start_nrom'; did you mean 'start_norm'?
    """
    client = client_of(settings)
    return UpdateServer(
        AdaptiveBound(**_of(AdaptiveBound, settings)),
        scope=client.scope,
        exclude=client.exclude,
        shares=Shares(**_of(Shares, settings)),
        combining=Combining(**_of(Combining, settings)),
    )


def client_of(settings: Mapping[str, object]) -> UpdateClient:
    """Return the client that the same table describes.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong.
    """
    if settings.get("noise_at", "server") != "server":
        raise ValueError(SITES_ELSEWHERE)
    return UpdateClient(**_of(UpdateClient, settings))


class StoredState(NamedTuple):
    """The content of a file: settings, the server's state, and the record of each round."""

    settings: Mapping[str, object]
    state: Mapping[str, object]
    rounds: list[dict[str, Any]]


def read(path: Path) -> StoredState:
    """Return the content of a file.

    Raises
    ------
    StateError
        If it is not a file of `PersistentServer`, or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stored = StoredState(content["settings"], content["state"], content["rounds"])
        if not all(isinstance(table, dict) for table in (stored.settings, *stored.rounds)):
            raise TypeError("settings must be a table, and rounds tables")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as exc:
        text = f"{path} is not a server's file of update clipping, or is damaged ({exc!r:.200})"
        raise StateError(f"{text}: name the folder of this federation") from exc
    return stored


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
        text = f"folder must be an absolute path, got {str(folder)!r}"
        raise ValueError(f"{text}: a relative one is a new budget wherever the server starts")
    return path


class PersistentServer:
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
        If the file cannot be written, or another process serves from it.

    Notes
    -----
    Guarantee: epsilon in the ledger is never less than that of the rounds that `open` has begun.
    A ledger that is put back to an earlier one cannot be seen, unless the state is later.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> folder, model = tempfile.mkdtemp(), {"w": np.zeros(2)}
    >>> served = PersistentServer({"start_norm": 1.0}, folder)
    >>> served.open().bound
    1.0
    >>> _ = served.close([Reply({"w": np.array([0.3, 0.4])}, votes=1, within=1)], model)
    >>> served.leave()
    >>> again = PersistentServer({"start_norm": 1.0}, folder)
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
        """Release the file to others; the end of this object does so, too."""
        bound = self.server.bound
        if folder is None and bound.budget is not None:
            bound.logger.warning("noise without a folder: a restart spends the budget again")
        if self.path is None:
            return
        try:
            lock = locked(self.path.with_name(f"{SERVED}.lock"), wait=False)
        except OSError as exc:
            text = f"no state can be kept in {place} ({exc})"
            raise OSError(f"{text}: give another federation another folder") from exc
        self.leave = weakref.finalize(self, lock.close)
        if self.path.exists():
            stored = read(self.path)
            self.server.set_state(dict(stored.state))
            self.rounds = stored.rounds
        self._write()

    def open(self, due: Participation | None = None) -> SentBound:
        """Return the message to each client; see `UpdateServer.open`."""
        return self.server.open(due)

    def add(self, reply: Reply, like: Arrays) -> str:
        """Add a reply; see `UpdateServer.add`. The sum so far is in no file."""
        return self.server.add(reply, like)

    def close(self, replies: Iterable[Reply] = (), like: Arrays | None = None) -> RoundResult:
        """Return the average of the replies; see `UpdateServer.close`.

        Raises
        ------
        OSError
            If the file cannot be written. Then nothing of the round is released.
        """
        closed = self.server.close(replies, like)
        self.rounds.append(closed.record)
        self._write()
        return closed

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the rounds as reports read them, with one step for each vote.

        Norms stay on the clients. With noise the number of clipped ones does, too; the share
        replaces it.
        """
        kind = "learnt" if self.server.bound.follows else "fixed"
        for row in self.rounds:
            bound, share, steps = row["bound"], row["share"], row["replies"]
            clipped = row["clipped"] if share is None else round((1.0 - share) * steps)
            record = RoundRecord(row["round"], steps=steps, clipped=clipped, **{kind: steps})
            record.limit = record.limit_min = record.limit_max = bound
            yield asdict(record)

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
        fresh.unlink(missing_ok=True)
        write_out(fresh, json.dumps(content, default=list))
        # A crash leaves the old file or the new one.
        fresh.replace(self.path)
