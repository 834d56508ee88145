# SPDX-License-Identifier: Apache-2.0
"""Update clipping as flat tables of numbers and texts, which any engine can send and read.

::

    settings    one table for server and clients     server_of, client_of
                among those of an app                settings_in
    message     server -> client                     bound_to, bound_from
    vote        client -> server, beside the arrays  reply_to, reply_from
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from fedclip.core import parameters
from fedclip.core.scopes import check_scope
from fedclip.errors import nearest
from fedclip.updates.adaptive import AdaptiveBound
from fedclip.updates.client import UpdateClient
from fedclip.updates.client_noise import SITES_ELSEWHERE
from fedclip.updates.combining import Combining
from fedclip.updates.protocol import Arrays, Reply, SentBound
from fedclip.updates.server import UpdateServer
from fedclip.updates.weights import Shares

_PARTS: tuple[Callable[..., Any], ...] = (AdaptiveBound, UpdateClient, Shares, Combining)
# Those that an app may have for itself, too, outside of the table.
_ANYBODYS = {
    *("combine", "delta", "exclude", "generator", "learning_rate", "max_steps", "momentum"),
    *("noise", "quantile", "relation", "rounds", "scope", "seed", "weights"),
}
_COUNTS = ("votes", "within", "clipped", "zeroed")


def _known(part: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(part).parameters)


def _of(part: Callable[..., Any], settings: Mapping[str, object]) -> dict[str, Any]:
    """Return those of the settings that a part takes; refuse one that none takes."""
    known = set[str]().union(*map(_known, _PARTS))
    for name in settings.keys() - known:
        hint = nearest(name, known) or f"; its parameters are {', '.join(sorted(known))}"
        raise TypeError(f"update clipping has no parameter {name!r}{hint}")
    return {name: settings[name] for name in settings if name in _known(part)}


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
    found: dict[str, Any] = {}
    ours = set[str]().union(*map(_known, _PARTS)) - _ANYBODYS
    for name, value in run_config.items():
        table, dot, key = name.rpartition(".")
        if not name.startswith("update-clip."):
            meant = "clip" in table.lower() and nearest(table, ["update-clip", "updateclip"])
            if meant or get_close_matches(_snake(key), ours, n=1, cutoff=0.9):
                own = "" if dot else ", or give a setting of the app itself another name"
                raise ValueError(f"nobody reads {name!r}: write update-clip.{key}{own}")
            continue
        key, dot, inner = name.removeprefix("update-clip.").partition(".")
        key = _snake(key)
        if key in found and not (dot and isinstance(found[key], dict) and inner not in found[key]):
            raise ValueError(f"update-clip.{key.replace('_', '-')} is given twice: keep one")
        found[key] = {**found.get(key, {}), inner: value} if dot else value
    return found


def _snake(key: str) -> str:
    return key.lower().replace("-", "_")


def server_of(settings: Mapping[str, object]) -> UpdateServer:
    """Return the server that a table of settings describes.

    The table has the parameters of `update-clip-server` (whose `max_norm` is the largest bound)
    and of `clipped-averaging`, but for what is declearn's own.

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


def bound_to(sent: SentBound) -> dict[str, str | int | float | bool]:
    """Return a message to the clients as numbers and texts."""
    return {**asdict(sent), "scope": json.dumps(sent.scope)}


def bound_from(message: Mapping[str, object]) -> SentBound:
    """Return what a server has sent.

    Raises
    ------
    ValueError
        If it is not a message of `bound_to`.
    """
    try:
        return SentBound(
            parameters.positive(bound=message.get("bound")),
            scope=check_scope(json.loads(_text(message, "scope")), limits=True),
            round=parameters.integer(1, round=message.get("round")),
            adaptive=parameters.boolean(adaptive=message.get("adaptive")),
            private=parameters.boolean(private=message.get("private")),
            stop=_text(message, "stop"),
            steps=parameters.boolean(steps=message.get("steps")),
            fedclip=_text(message, "fedclip"),
            schedule=_text(message, "schedule"),
        )
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"the server's message is not that of update clipping ({exc!s:.200}): both need the "
            "same version of fedclip"
        ) from None


def _text(message: Mapping[str, object], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a text, got {type(text).__name__}")
    return text


def reply_to(reply: Reply) -> dict[str, int]:
    """Return what a client says beside its arrays."""
    said = {name: getattr(reply, name) for name in _COUNTS}
    return said if reply.steps is None else said | {"steps": reply.steps}


def reply_from(arrays: Arrays, said: object, sender: str = "") -> Reply:
    """Return a client's reply; with a fault if what it says is not of `reply_to`.

    `close` then counts it as zeros, and its votes as an abstention. The sender is for the engine
    to say.

    Examples
    --------
    >>> reply_from({}, {"votes": 1, "within": 1, "clipped": 0, "zeroed": 0}, "a").fault
    ''
    >>> reply_from({}, {"votes": 10}, "b").fault
    'it says nothing that update clipping does: the client has no update clipping, or another one'
    """
    said = dict[str, Any](said) if isinstance(said, Mapping) else {}
    counts: dict[str, Any] = {name: said.get(name) for name in _COUNTS}
    if not all(type(count) is int for count in counts.values()) or set(said) - {*counts, "steps"}:
        fault = "it says nothing that update clipping does: the client has no update clipping, "
        return Reply(arrays, sender=sender, fault=f"{fault}or another one")
    return Reply(arrays, **counts, sender=sender, steps=said.get("steps"))
