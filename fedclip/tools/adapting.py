# SPDX-License-Identifier: Apache-2.0
"""Finds settings under which a limit that should follow the norms never can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedclip.privacy.maps import Plugin
from fedclip.tools.findings import Section

# Longer warm-ups are not played through.
_PLAYED = 3000


class Steps(NamedTuple):
    """The most steps in a run, of one node and of all nodes together; None if not known."""

    own: int | None
    together: int | None


def steps_of(side: str, run: Section, clients: int | None) -> Steps:
    """Return how many steps a client, or the server, takes in a run at most."""
    rounds, training = run.get("rounds"), run.get("training")
    each: object = 1
    if side == "client_opt":
        # An epoch, or a time, may end a round before that.
        each = training.get("n_steps") if isinstance(training, dict) else None
    if not (type(rounds) is int and type(each) is int and rounds > 0 and each > 0):
        return Steps(None, None)
    # The first round of a shared clipper is always warm-up.
    shared = 0 if rounds == 1 else None if clients is None else rounds * each * clients
    return Steps(rounds * each, shared)


def stuck(plugins: Sequence[Plugin], most: Steps) -> Iterator[str]:
    """Yield why a limit of these plug-ins can not adapt in a run of so many steps."""
    same = ""
    for plugin in plugins:
        low, high = (getattr(plugin, key, None) for key in ("min_norm", "max_norm"))
        if low is not None and low == high:
            yield f"{plugin.name}: min_norm = max_norm = {low:g} fixes the limit: it never adapts"
        elif plugin.name == "update-clip-server" and plugin.learning_rate == 0:
            yield f"{plugin.name}: learning_rate = 0 fixes the bound: it never adapts"
        shared = getattr(plugin, "shared", False)
        steps = most.together if shared else most.own
        whose = "steps of all clients" if shared else "steps"
        if hasattr(plugin, "warmup"):
            if same:
                yield (
                    f"{plugin.name} comes after {same}, which makes all norms the same: its limit "
                    "has nothing to follow, and never clips"
                )
            elif steps == 0:
                yield (
                    f"{plugin.name} is still warming up when this run ends: with shared = true "
                    "the first round always is, and there is no other"
                )
            elif steps is not None and not _gets_ready(plugin, steps):
                yield (
                    f"{plugin.name} is still warming up when this run ends, after {steps} "
                    f"{whose}: it never judges by its own statistics; lower warmup "
                    f"({plugin.warmup}), or set a fixed limit"
                )
        elif steps is not None and getattr(plugin, "every", 1) > steps:
            yield (
                f"{plugin.name}: every = {plugin.every}, and the run has {steps} {whose}: its "
                "limit never moves"
            )
        if plugin.name == "normalize" and plugin.scope == "global":
            same = plugin.name


def _gets_ready(plugin: Plugin, steps: int) -> bool:
    """Whether a clipper like this one has a limit of its own after so many equal gradients."""
    twin = type(plugin)(**{**plugin.get_config(), "scope": "global", "exclude": None})
    gradient = {"w": np.ones(1)}
    for _ in range(min(steps, _PLAYED)):
        twin.clip(gradient)
    return steps > _PLAYED or any(record.learnt or record.fixed for record in twin.rounds)
