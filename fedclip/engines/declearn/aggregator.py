# SPDX-License-Identifier: Apache-2.0
"""`clipped-averaging`: `UpdateClient` and the average of its replies, as declearn's aggregator."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from declearn.aggregator import Aggregator
from declearn.model.api import Vector

from fedclip.arrays import backend_of
from fedclip.core import parameters
from fedclip.core.measures import Order
from fedclip.core.plugins import VERSION, Versioned
from fedclip.core.scopes import Scope
from fedclip.engines.declearn.context import CLIENT, under_way
from fedclip.engines.declearn.messages import ClippedUpdates, zeros_like
from fedclip.engines.declearn.replies import UPDATES, blank, sender_of, senders_of
from fedclip.updates.aggregation import Closing, Vetted
from fedclip.updates.averaging import rounded
from fedclip.updates.client import UpdateClient
from fedclip.updates.combining import Combining
from fedclip.updates.limits import check_whole, signature
from fedclip.updates.protocol import Reply, SentBound
from fedclip.updates.running import refuse_statistics
from fedclip.updates.weights import Shares, Weights

_LOGGER = logging.getLogger("declearn.server.fedclip")

RAISES = (
    "on_nonfinite = 'raise' ends the run for everybody where one client's update is not finite, "
    "which tells of that client without noise: take 'skip'"
)
"""Why noise does not cover what that setting reveals."""


class ClippedAveraging(Versioned, UpdateClient, Aggregator[ClippedUpdates]):
    """Clip each client's update before it is shared, then average them.

    ::

        Client(updates, C):
            if any value is not finite, or norm(updates) is far out of range:
                updates = 0
            for each group of tensors:
                group *= min(1, limit / norm(group))
            share updates, steps (if these are the weights) or 1, clipped?, zeroed?
        Server(replies, C):
            if a reply (in cleartext) is not finite, above the limit, or malformed:
                its update = 0
            average = sum of updates / number of replies
            with weights: sum of share * update,  share = weight / sum of weights <= max_share
            with combine: the longest updates shortened before (ARC), or a trimmed mean

    Parameters
    ----------
    max_norm : float or None, default=None
        Largest norm of a group of the update, > 0. None: the bound comes from
        `update-clip-server`, each round, through `update-clip-client`.
    scope : {"global", "tensor", "layer"}, list of patterns or table, default="global"
        Which tensors share a norm. `max_norm` is the limit of each group (k groups together may
        reach ``max_norm * sqrt(k)``), and a table ``{"head.*" = 0.1}`` gives groups their own
        limits. A bound C from the server is for the whole update: each of k groups gets
        ``C / sqrt(k)``. With a table, which then has ``"*"`` for the other tensors, a group gets
        ``C * t / sqrt(sum of t^2)`` for its number t: with ``{"head.*" = 3.0, "*" = 4.0}`` that
        is 0.6 C and 0.8 C. Noise is scaled to C.
    exclude : pattern, list of patterns or None, default=None
        Tensors that are shared unchanged. With them, the update has no bound.
    zeroing_norm : float or None, default=None
        Replace the whole update by zeros if its norm of order `zeroing_ord` is above this.
    zeroing_factor : float or None, default=None
        Replace the whole update by zeros if it is beyond this multiple of the current bound, > 1.
    zeroing_ord : float or "inf", default="inf"
        Order of the norm for `zeroing_norm`; TFF offers 1, 2 and "inf".
    secagg_range : float or None, default=None
        Refuse updates with values beyond ± this before they are encrypted, with an error that
        names the tensor; set it to the `clipval` of the server's secure aggregation. None: under
        secure aggregation, updates beyond 1e5, declearn's default, are replaced by zeros.
    on_nonfinite : {"skip", "raise"}, default="skip"
        What happens to an update with NaN or infinity: it is replaced by zeros and counted; or it
        raises an error, which in declearn ends the training of all clients.
    weights : {"equal", "steps"} or table, default="equal"
        What a client's share in the average is in proportion to: 1; the number of steps that it
        says it took; or a number > 0 for each client in a public table, ``{"client_0" = 120.0}``,
        by the name that the server's connection has for it. Not beside noise.
    max_share : float or None, default=None
        Largest share that one client may have, in (0, 1]; the rest is spread over the others in
        proportion.
    max_steps : int or None, default=None
        Count no more steps than that, for ``weights="steps"``. Under secure aggregation, "steps"
        needs it, and takes no `max_share`.
    combine : {"mean", "arc", "trimmed"}, default="mean"
        How the clipped updates become one: their mean; the mean after ARC has brought the longest
        to the length of the next longest; or, of each coordinate, the mean of all but the
        `n_hostile` smallest and largest values. In cleartext only, with equal weights, and not
        beside noise.
    n_hostile : int or None, default=None
        Number of clients that may be hostile, >= 1, for "arc" and "trimmed", which need more than
        twice as many replies. A round with fewer counts as zeros, with a warning.
    client : str or None, default=None
        The name of this client in the table; a server over `fedclip-websockets` sets it for its
        clients, who need it under secure aggregation.
    fedclip : str, default=the version of this fedclip
        The version that wrote the configuration; a server sets it for its clients.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above; when an update is prepared, if there
        is no bound, or two (the client reports this to the server, and training ends).

    Notes
    -----
    Guarantees: the update that leaves a client is finite and within its limit, in float64; an
    update below the limit is shared as the very same object. A zeroed update keeps its weight, as
    in TFF, and pulls the average towards 0. Updates are clipped before they are weighed, so that
    no client moves the average by more than its share of the bound, whatever it claims. A client
    that took no step shares zeros. Votes on the bound count alike, whatever the weights are.

    With f = `n_hostile` of n replies, and against zeros in its place, one client moves the average
    by at most ``2 f C / n`` with "arc", and ``C / (n - 2 f)`` with "trimmed", where the mean has
    C / n. "arc" leaves no update longer than the longest of those that are not hostile; what its
    paper proves needs a robust mean to follow, and not the plain one here. "trimmed" goes beyond
    their values in no coordinate, and may be as long as ``sqrt(n / (n - f)) C``.

    In cleartext the server measures each reply again. A malformed reply, or one beyond the limit,
    counts as a zeroed one, so that a client that does not clip moves the average no more than one
    that sends nothing. Under secure aggregation the server sees only the sum, and projects it
    onto the norm that the clients can reach together.

    ====================  ================================================================
    update                shared
    ====================  ================================================================
    zero, empty tensors   the same object
    norm equal to limit   the same object
    NaN or infinity       zeros, and 1 more in ``n_zeroed``
    far out of range      zeros, and 1 more in ``n_zeroed``
    ====================  ================================================================

    References
    ----------
    McMahan, Ramage, Talwar & Zhang, 2018, "Learning differentially private recurrent language
    models", arXiv:1710.06963. The zeroing is that of TensorFlow Federated
    (`tff.aggregators.zeroing_factory`). "arc" is of Allouah et al., 2024, "Adaptive gradient
    clipping for robust federated learning", arXiv:2405.14432; "trimmed" of Yin et al., 2018,
    "Byzantine-robust distributed learning", arXiv:1803.01498.

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
    called: ClassVar[str] = name
    logger: ClassVar[logging.Logger] = logging.getLogger("declearn.client.fedclip")
    updates_cls = ClippedUpdates

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        scope: Scope = "global",
        exclude: str | Sequence[str] | None = None,
        zeroing_norm: float | None = None,
        zeroing_factor: float | None = None,
        zeroing_ord: Order = "inf",
        secagg_range: float | None = None,
        on_nonfinite: str = "skip",
        weights: Weights = "equal",
        max_share: float | None = None,
        max_steps: int | None = None,
        combine: str = "mean",
        n_hostile: int | None = None,
        client: str | None = None,
        fedclip: str = VERSION,
    ) -> None:
        self.max_norm = parameters.optional(parameters.limit, max_norm=max_norm)
        UpdateClient.__init__(
            self,
            scope,
            exclude,
            zeroing_norm=zeroing_norm,
            zeroing_factor=zeroing_factor,
            zeroing_ord=zeroing_ord,
            on_nonfinite=on_nonfinite,
        )
        if self.max_norm is None:
            check_whole(self.scope)
        self.secagg_range = parameters.optional(parameters.positive, secagg_range=secagg_range)
        self.shares = Shares(weights, max_share, max_steps)
        self.weights = self.shares.table or weights
        self.max_share, self.max_steps = self.shares.max_share, self.shares.max_steps
        self.combining = Combining(combine, n_hostile)
        self.combine, self.n_hostile = combine, n_hostile
        self.closing = Closing(self.limits, self.shares, self.combining)
        self.client = parameters.optional(parameters.name, client=client)

    def get_config(self) -> dict[str, Any]:
        """Return the name and the parameters, as they would be written in a TOML file."""
        return {"name": self.name, **super().get_config()}

    def addressed(self, client: str) -> Self:
        """Return this aggregator for a client whose name the server knows."""
        return type(self)(**{**super().get_config(), "client": client})

    def unfit(self, modules: bool) -> str:
        """Return why there is no bound, or two, with `modules` that bring one; "" if there is."""
        if self.max_norm is None and not modules:
            return (
                "clipped-averaging has no bound: give it max_norm, or put update-clip-client into "
                "client_opt and update-clip-server into server_opt"
            )
        if self.max_norm is not None and modules:
            return (
                f"clipped-averaging has max_norm={self.max_norm!r}, and update-clip-client brings "
                "another bound from the server: leave max_norm out, or the modules"
            )
        return ""

    # -- on a client ----------------------------------------------------------------------------
    def prepare_for_sharing(self, updates: Vector[Any], n_steps: int) -> ClippedUpdates:
        """Clip the update of a round, or zero it, and count it."""
        round_ = CLIENT.get()
        why = self.unfit(modules=round_ is not None)
        sent = round_.sent if round_ else SentBound(self.max_norm or 0.0)
        if why := why or (self.closing.beside_noise() if sent.private else ""):
            raise ValueError(why)
        if sent.private:
            refuse_statistics(updates.coefs)
        outcome = self.outcome(updates.coefs, sent.bound, n_steps, whole=round_ is not None)
        same = outcome.arrays is updates.coefs
        vector = updates if same else type(updates)(dict(outcome.arrays))
        site = round_.site if round_ else None
        if round_ is not None:
            round_.outcome = outcome
            if site is not None:
                shared = site.shared(vector.coefs, sent.bound, round_.step, round_.encrypter)
                vector = type(vector)(shared)
        reply = outcome.reply(sent)
        weight = self.shares.counted(n_steps) if self.shares.kind == "steps" else 1
        result = ClippedUpdates(vector, weight, 1, reply.clipped, reply.zeroed)
        result.secagg_range = self.secagg_range
        result.noised = bool(site)
        result.factor = self.shares.factor(self.client, n_steps)
        limit = None if site else self.secagg_range
        if limit is not None and (why := result.beyond(limit)):
            raise ValueError(why)
        return result

    # -- on the server --------------------------------------------------------------------------
    def finalize_updates(self, updates: Any) -> Vector[Any]:
        """Return the average of the replies; those that are not valid count as zeros."""
        if not isinstance(updates, ClippedUpdates):
            raise TypeError(
                f"clipped-averaging averages ClippedUpdates, got {type(updates).__name__}: "
                "no client has replied, or clients have another aggregator"
            )
        round_, module = under_way(counted=True) or (None, None)
        parts, model = updates.parts, blank()
        bound = round_.sent.bound if round_ else (self.max_norm or float("inf"))
        # Without the sampler, assume that most replies have the tensors of the model.
        like = _most([p.updates for p in parts], _kind) if model is None else model
        replies = self._replies(parts, like)
        if module is not None:
            # Not an error: declearn's server would wait for its clients for ever.
            module.halt(self.closing.of_sums(replies))
        budget = None if module is None else module.budget
        site, closing = None if module is None else module.site, self.closing
        if site is not None:
            closing = replace(closing, limits=replace(closing.limits, noise=site.std(1.0)))
        whole, clients = round_ is not None, budget.clients if budget else None
        tensors: Any = getattr(like, "coefs", {})
        vetted = closing.of(replies, tensors, bound, self._warn, whole=whole, clients=clients)
        self._report(updates, vetted, counted=budget is None)
        if like is None:
            named = "; ".join(vetted.faults)
            raise ValueError(f"clipped-averaging: no reply holds an update ({named})")
        if vetted.exact is None:
            average = zeros_like(like)
        else:
            sound = [p.updates for p, fault in zip(parts, vetted.faults, strict=True) if not fault]
            like = _most(sound, _dtypes) if model is None else model
            average = type(like)(rounded(vetted.exact, like.coefs))
        if round_ is not None and module is not None:
            round_.average, round_.exact = average, vetted.exact
            round_.trouble = self.closing.beside_noise() or module.unheard(vetted.void)
            if site is not None:
                there = sum(reply.clients for reply in vetted.sound)
                counted = len(parts) == 1 and updates.n_clipped + updates.n_zeroed
                round_.trouble = round_.trouble or site.void(there, bool(counted))
        return average

    def _replies(self, parts: Sequence[ClippedUpdates], like: Any) -> list[Reply]:
        """Return the replies and who has sent them, which a table of weights needs."""
        names = [sender_of(UPDATES, i, len(parts)) for i in range(len(parts))]
        if self.shares.table and parts[0].n_clients == 1 and not any(names):
            raise ValueError(
                "clipped-averaging has a table of weights, and does not know who has sent which "
                "reply: set client_sampler = {'strategy': 'named-clients'}"
            )
        senders = senders_of(UPDATES)
        return [
            replace(part.reply(type(like)), sender=name, senders=senders)
            for part, name in zip(parts, names, strict=True)
        ]

    @staticmethod
    def _warn(what: str) -> None:
        _LOGGER.warning("clipped-averaging: %s", what)

    @staticmethod
    def _report(updates: ClippedUpdates, vetted: Vetted, counted: bool) -> None:
        counts = f"{updates.n_clipped} clipped, {updates.n_zeroed} zeroed by their clients, "
        # With noise, clients do not send these counts.
        text = f"{updates.n_clients} updates, {counts if counted else ''}"
        _LOGGER.info("clipped-averaging: %s%d refused", text, sum(map(bool, vetted.faults)))


def _most(vectors: Sequence[Any], key: Callable[[Any], Any]) -> Any:
    """Return one of the vectors whose key is the most common one; None if none has a key."""
    keys = [key(vector) for vector in vectors]
    common = Counter(k for k in keys if k is not None).most_common(1)
    return vectors[keys.index(common[0][0])] if common else None


def _kind(vector: Any) -> Any:
    """Return types, names and shapes of a client's update; None if it has none."""
    try:
        return (type(vector), signature(vector.coefs)) if isinstance(vector, Vector) else None
    except Exception:  # it may be anything, and must not end the run
        return None


def _dtypes(vector: Vector[Any]) -> Any:
    return tuple((name, backend_of(a).dtype(a)) for name, a in vector.coefs.items())
