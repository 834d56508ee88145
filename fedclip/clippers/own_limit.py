# SPDX-License-Identifier: Apache-2.0
"""A limit by a function of the user's."""

from __future__ import annotations

import inspect
from typing import Any

from fedclip.clippers.base import Clipper
from fedclip.clippers.families import Exact
from fedclip.core.parameters import parameter
from fedclip.rules.own import Limit, Own
from fedclip.transforms import Action, NormClipping, Transform


class OwnLimit(Exact, Clipper, register=False):
    """Clip to a limit that your function computes, from any clipper's statistics of past norms.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = function(n, past)
                group *= min(1, limit / n)

    You can make it in Python only: declearn's messages and TOML cannot carry functions.

    Raises
    ------
    TypeError, ValueError
        At construction, if `limit` is not such a function, or `past` keeps no statistics of norms;
        at a gradient, if the function returns no limit.

    Notes
    -----
    The output has no guaranteed bound.

    Examples
    --------
    >>> import math
    >>> from fedclip import OwnLimit, ZScoreClip
    >>> def halve_spikes(norm, past):
    ...     return norm / 2 if past["ready"] and norm > past["threshold"] else math.inf
    >>> clip = OwnLimit(halve_spikes, ZScoreClip(warmup=3, warmup_factor=None))
    >>> for norm in (1.0, 1.1, 0.9, 1.0, 10.0):
    ...     record = clip.observe(norm)
    >>> record.limit
    (5.0,)
    """

    name = "own-limit"

    limit: Limit = parameter(kw_only=False)
    """A function of a group's norm and a dict of statistics before it. It returns the limit, > 0;
    infinity for none. It runs on the host, and can branch on numbers; compiled code cannot."""
    past: Clipper | None = parameter(default=None, kw_only=False)
    """A clipper that keeps the statistics for `limit`: for `ZScoreClip` ``mean``, ``variance`` and
    ``count``; with every clipper on norms also ``threshold`` and ``ready`` (see
    `Clipper.statistics`). Its `feedback` decides what spikes teach. None: an empty dict."""

    def build(self) -> Transform:
        if not callable(self.limit):
            raise TypeError(f"limit must be a function of norm and statistics, got {self.limit!r}")
        try:
            inspect.signature(self.limit).bind(1.0, {})
        except TypeError as error:
            raise TypeError(f"limit must take a norm and a dict of statistics: {error}") from None
        past = None if self.past is None else self.past._transform
        if self.past is not None and not isinstance(past, NormClipping):
            raise TypeError(f"{self.past.name} keeps no statistics of norms: give another `past`")
        rule = Own(self.limit, getattr(past, "rule", None))
        return NormClipping(rule, self.ord, Action(self.eps))

    def get_config(self) -> dict[str, Any]:
        """Raise an error: a function cannot be written to a configuration."""
        raise TypeError("own-limit holds a function: make it in Python on each node that uses it")
