# SPDX-License-Identifier: Apache-2.0
"""`clipped-averaging`: `UpdateClient` and the average of its replies, as declearn's aggregator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

from declearn.aggregator import Aggregator
from declearn.model.api import Vector

from fedclip.arrays import rounded
from fedclip.core import parameters
from fedclip.core.messages import SideBySide
from fedclip.core.parameters import parameter
from fedclip.core.plugins import Versioned
from fedclip.engines.declearn import context
from fedclip.engines.declearn.messages import ClippedUpdates, zeros_like
from fedclip.updates.aggregation import Aggregation, Combining, RunningAverage
from fedclip.updates.client import UpdateClient
from fedclip.updates.limits import OTHER_TENSORS, check_whole, refuse_statistics
from fedclip.updates.protocol import Reply, SentBound
from fedclip.updates.weights import Shares, Weights

RAISES = (
    "on_nonfinite = 'raise' stops the run, which reveals that client without noise: take 'skip'"
)
"""Why noise does not cover what that setting reveals."""


class ClippedAveraging(Versioned, UpdateClient, Aggregator[ClippedUpdates]):
    """Clip each client's update before it is shared, then average them.

    ::

        Client(update, C):
            if it has NaN or infinity, or norm(update) is far out of range:
                update = 0
            for each group of tensors:
                group *= min(1, limit / norm(group))
            share update, weight, clipped?, zeroed?
        Server(replies, C):
            if a reply (in clear text) is not finite, above the limit, or malformed:
                its update = 0
            average = sum of weight / sum of weights * update

    Parameters
    ----------
    max_norm : float or None, default=None
        Largest norm of a group of the update, > 0; None takes the bound from `update-clip-server`.
    scope : {"global", "tensor", "layer"}, list of patterns or table, default="global"
        Which tensors share a norm: "global", "tensor", "layer", patterns, or a table of limits,
        ``{"head.*" = 0.1}``. Of a bound C from the server, a group with number t in a table, which
        then needs ``"*"``, gets ``C * t / sqrt(sum of t^2)``.
    exclude : pattern, list of patterns or None, default=None
        Tensors that are shared unclipped, so that the update has no bound.
    zeroing_norm : float or None, default=None
        Zero the whole update above this norm of order `zeroing_ord`, > 0.
    zeroing_factor : float or None, default=None
        Zero the whole update above this multiple of the bound, > 1.
    zeroing_ord : float or "inf", default="inf"
        Order of the norm for `zeroing_norm`.
    secagg_range : float or None, default=None
        Refuse updates with values beyond ± this before encryption: the `clipval` of secure
        aggregation. None: updates beyond 1e5, declearn's default, are zeroed.
    on_nonfinite : {"skip", "raise"}, default="skip"
        Zero and count an update with NaN or infinity ("skip"), or raise an error, which ends the
        training of all clients ("raise").
    weights : {"equal", "steps"} or table, default="equal"
        A client's weight: 1 ("equal"), its reported number of steps ("steps"), or a number > 0 by
        client name, ``{"client_0" = 120.0}``. Not together with noise.
    max_share : float or None, default=None
        Largest share of one client, in (0, 1]; the others get the excess, in proportion.
    max_steps : int or None, default=None
        Largest number of steps that counts; secure aggregation with "steps" needs it. It then takes
        no `max_share`.
    combine : {"mean", "arc", "trimmed"}, default="mean"
        "mean" of updates; their mean after "arc" shortens the longest; or, by coordinate, without
        the `n_hostile` smallest and largest values ("trimmed"). The last two need clear text and
        equal weights, and no noise.
    n_hostile : int or None, default=None
        Number of clients that may be malicious, >= 1, for "arc" and "trimmed". A round with at most
        twice as many replies counts as zeros.
    client : str or None, default=None
        Name of this client in the table; `fedclip-websockets` sets it.
    fedclip : str, default=the version of this fedclip
        Version that wrote the configuration; a server sets it.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range; when an update is prepared, if there is no
        bound, or two. The client reports that to the server, and training ends.

    Notes
    -----
    The update that leaves a client is finite and within its limit, in float64; the same object, if
    it was before. With k groups, each has the limit `max_norm`, or ``C / sqrt(k)`` of a bound C
    from the server. Updates are clipped before they are weighted, so no client moves the average by
    more than its share of the bound. Clients without a step share zeros. A zeroed update keeps its
    weight, and pulls the average to 0. Votes do not depend on weights.

    In clear text, the server measures each reply, and zeroes invalid ones. Under secure aggregation
    it projects the sum onto the norm that the clients can reach together.

    Compared with zeros, one of n clients moves the "mean" by at most ``C / n``. With f =
    `n_hostile`, that is ``2 f C / n`` ("arc") or ``C / (n - 2 f)`` ("trimmed"). After "arc", no
    update is longer than the longest honest one; its paper's proof needs a robust mean. "trimmed"
    stays within honest values in each coordinate, and may reach the norm ``sqrt(n / (n - f)) C``.

    References
    ----------
    McMahan, Ramage, Talwar & Zhang, 2018, arXiv:1710.06963. Zeroing:
    `tff.aggregators.zeroing_factory`. "arc": Allouah et al., 2024, arXiv:2405.14432. "trimmed": Yin
    et al., 2018, arXiv:1803.01498.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> aggregator = ClippedAveraging(max_norm=1.0)
    >>> shared = [
    ...     aggregator.prepare_for_sharing(updates=NumpyVector({"w": np.array(w)}), n_steps=5)
    ...     for w in ([0.3, 0.4], [30.0, 40.0])
    ... ]
    >>> aggregator.finalize_updates(sum(shared)).coefs["w"].round(6)
    array([0.45, 0.6 ])
    """

    name: ClassVar[str] = "clipped-averaging"
    logger = context.CLIENT_LOGGER
    updates_cls = ClippedUpdates

    max_norm: float | None = parameter(parameters.limit, default=None, kw_only=False)
    secagg_range: float | None = parameter(parameters.positive, default=None)
    weights: Weights = parameter(default="equal")
    max_share: float | None = parameter(default=None)
    max_steps: int | None = parameter(default=None)
    combine: str = parameter(default="mean")
    n_hostile: int | None = parameter(default=None)
    client: str | None = parameter(parameters.name, default=None)

    def __post_init__(self) -> None:
        """Check what must go together."""
        super().__post_init__()
        if self.max_norm is None:
            check_whole(self.scope)
        self.shares = Shares(self.weights, self.max_share, self.max_steps)
        self.weights = self.shares.table or self.weights
        self.combining = Combining(self.combine, self.n_hostile)
        self.aggregation = Aggregation(self.limits, self.shares, self.combining)

    def get_config(self) -> dict[str, Any]:
        """Return the name and the parameters, as they would be written in a TOML file."""
        return {"name": self.name, **super().get_config()}

    def addressed(self, client: str) -> Self:
        """Return this aggregator for a client whose name the server knows."""
        return type(self)(**{**super().get_config(), "client": client})

    def unfit(self, modules: bool) -> str:
        """Return why there is no bound, or two, with `modules` that bring one; "" if there is."""
        if modules == (self.max_norm is None):
            return ""
        if modules:
            return "max_norm is set, and update-clip-server sends another bound: remove one"
        return "clipped-averaging has no bound: give it max_norm, or set up update-clip-client"

    # -- on a client ----------------------------------------------------------------------------
    def prepare_for_sharing(self, updates: Vector[Any], n_steps: int) -> ClippedUpdates:
        """Clip the update of a round, or zero it, and count it."""
        whole = (part := context.ROUND.get().client) is not None
        round_ = part or context.ClientPart(SentBound(self.max_norm or 0.0))
        sent, add_noise = round_.sent, round_.add_noise
        if why := self.unfit(whole) or (self.aggregation.unfit_for_noise() if sent.private else ""):
            raise ValueError(why)
        if sent.private:
            refuse_statistics(updates.coefs)
        outcome = round_.outcome = self.outcome(updates.coefs, sent.bound, n_steps, whole)
        reply = round_.reply = outcome.reply(sent)
        arrays = add_noise(reply.arrays) if add_noise is not None else reply.arrays
        vector = updates if arrays is updates.coefs else type(updates)(dict(arrays))
        weight = self.shares.counted(n_steps) if self.shares.kind == "steps" else 1
        result = ClippedUpdates(vector, weight, 1, reply.clipped, reply.zeroed)
        result.secagg_range, result.noised = self.secagg_range, bool(add_noise)
        if self.shares.kind != "equal":
            result.factor = self.shares.factor(self.client, n_steps)
        if not add_noise and self.secagg_range and (why := result.beyond(self.secagg_range)):
            raise ValueError(why)
        return result

    # -- on the server --------------------------------------------------------------------------
    def finalize_updates(self, updates: Any) -> Vector[Any]:
        """Return the average of the replies; those that are not valid count as zeros."""
        if not isinstance(updates, (ClippedUpdates, SideBySide)):
            raise TypeError(f"got {type(updates).__name__}: give clients clipped-averaging")
        sent = updates.messages if isinstance(updates, SideBySide) else [updates]
        parts = [p if isinstance(p, ClippedUpdates) else ClippedUpdates.stranger(p) for p in sent]
        round_, module = context.under_way(counted=True) or (None, None)
        model, names = context.blank(), context.names_of(context.UPDATES, len(parts))
        bound = round_.sent.bound if round_ else (self.max_norm or float("inf"))
        # Without the sampler, assume that most replies have the tensors of the model.
        senders = context.senders_of(context.SUM)
        like = _most([p.updates for p in parts], "shape") if model is None else model
        if self.shares.table and parts[0].n_clients == 1 and not any(names):
            text = "clipped-averaging has a table of weights, and does not know who has sent which"
            raise ValueError(f"{text} reply: set client_sampler = {{'strategy': 'named-clients'}}")
        site, budget = (module.site, module.budget) if module else (None, None)
        if module and (why := self.combining.unfit(secure=any(p.n_clients > 1 for p in parts))):
            # Not an error: declearn's server would wait for its clients for ever.
            module.halt(why)
        self.limits.noise = site.std(1.0) if site else 0.0
        warn = partial(context.LOGGER.warning, f"{self.name}: %s")
        divisor = budget.clients if budget else None
        terms = self.aggregation, getattr(like, "coefs", {}), bound, warn
        running = RunningAverage(*terms, whole=round_ is not None, clients=divisor)
        for part, name in zip(parts, names, strict=True):
            arrays: Any = getattr(part.updates, "coefs", None)
            fault = part.fault or (OTHER_TENSORS if type(part.updates) is not type(like) else "")
            of: dict[str, Any] = {"clients": max(1, part.n_clients), "steps": part.weights}
            of |= {"clipped": part.n_clipped, "zeroed": part.n_zeroed}
            running.add(Reply(arrays, sender=name, senders=senders, fault=fault, **of))
        exact = running.finish()
        # With noise, clients do not send these counts.
        counts = f"{running.clipped} clipped, {running.zeroed} zeroed by their clients, "
        text = f"{running.clients} updates, {'' if budget else counts}"
        context.LOGGER.info("clipped-averaging: %s%d refused", text, sum(map(bool, running.faults)))
        if like is None:
            faults = "; ".join(running.faults)
            raise ValueError(f"clipped-averaging: no reply holds an update ({faults})")
        if exact is not None and model is None:
            pairs = zip(parts, running.faults, strict=True)
            like = _most([part.updates for part, fault in pairs if not fault], "dtype")
        average = zeros_like(like) if exact is None else type(like)(rounded(exact, like.coefs))
        if round_ and module:
            round_.average, round_.exact = average, exact
        if round_ and module and budget:
            trouble = self.aggregation.unfit_for_noise() or module.unheard(running.void)
            counted = len(parts) == 1 and running.clipped + running.zeroed > 0
            round_.trouble = trouble or (site.void(running.valid, counted) if site else "")
        return average


def _most(vectors: Sequence[Any], what: str) -> Any:
    """Return one of the vectors with the most common "shape" or "dtype"; None if none has any."""
    keys = [_forms(vector, what) for vector in vectors]
    common = Counter(filter(None, keys)).most_common(1)
    return vectors[keys.index(common[0][0])] if common else None


def _forms(vector: Any, what: str) -> Any:
    """Return type, names, and shapes or dtypes of a client's update; None if it has none."""
    try:
        return type(vector), frozenset([(n, getattr(x, what)) for n, x in vector.coefs.items()])
    except Exception:  # it may be anything, and must not end the run
        return None
