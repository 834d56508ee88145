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
    """Limit by a function of your own, with the statistics of any clipper on past norms.

    ::

        Step(grads):
            for each group of tensors:
                n = norm(group)
                limit = function(n, past)
                group *= min(1, limit / n)

    It is made in Python only: declearn's messages and TOML do not carry functions.

    Raises
    ------
    TypeError, ValueError
        At construction, if `limit` is not such a function, or `past` does not go by norms; at a
        gradient, if it returns no limit.

    Notes
    -----
    No bound is claimed for the output.

    Examples
    --------
    >>> import math
    >>> import numpy as np
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
    """From the norm of a group and a dict of what is known before it to the limit, > 0;
    infinity for none. It runs on the host, and may branch on its numbers; compiled code can
    not."""
    past: Clipper | None = parameter(default=None, kw_only=False)
    """A clipper whose statistics are kept as it keeps them, and handed to `limit`: for
    `ZScoreClip` its ``mean``, ``variance`` and ``count``; for all that learn from norms also
    ``threshold`` and ``ready`` (see `Clipper.statistics`). What spikes teach them is decided by
    its `feedback`. None: the dict is empty."""

    def build(self) -> Transform:
        if not callable(self.limit):
            raise TypeError(
                f"limit must be a function of a norm and statistics, got {self.limit!r}"
            )
        try:
            inspect.signature(self.limit).bind(1.0, {})
        except TypeError as error:
            raise TypeError(f"limit must take a norm and a dict of statistics: {error}") from None
        if self.past is None:
            return NormClipping(Own(self.limit), self.ord, Action(self.eps))
        past = self.past._transform
        if not isinstance(past, NormClipping):
            raise TypeError(f"{self.past.name} keeps no statistics of norms: give another `past`")
        return NormClipping(Own(self.limit, past.rule), self.ord, Action(self.eps))

    def get_config(self) -> dict[str, Any]:
        """Refuse: a function can not be written down."""
        raise TypeError(
            "own-limit holds a function, which no configuration can: make it in Python on each "
            "node that uses it"
        )
