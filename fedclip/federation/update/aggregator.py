# SPDX-License-Identifier: Apache-2.0
"""`clipped-averaging`: each client's round update is clipped before it is shared."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from declearn.aggregator import Aggregator
from declearn.model.api import Vector

from fedclip import parameters
from fedclip.arrays import backend_of
from fedclip.federation.replies import UPDATES, blank, sender_of
from fedclip.federation.update.averaging import UpdateClipping, averaged, peaks, rounded, signature
from fedclip.federation.update.coupling import CLIENT, SERVER, ClientRound
from fedclip.federation.update.messages import ClippedUpdates, zeros_like
from fedclip.federation.version import VERSION, Versioned
from fedclip.measures import Order, check_order
from fedclip.scopes import Scope, check_exclude, check_scope

_LOGGER = logging.getLogger("declearn.server.fedclip")
_CLIENT_LOGGER = logging.getLogger("declearn.client.fedclip")


class ClippedAveraging(Versioned, Aggregator[ClippedUpdates]):
    """Clip each client's round update before it is shared; average with equal weights.

    ::

        Client(updates, C):
            if any value is not finite, or norm(updates) is far out of range:
                updates = 0
            for each group of tensors:
                group *= min(1, limit / norm(group))
            share updates, 1, clipped?, zeroed?
        Server(replies, C):
            if a reply (in cleartext) is not finite, above the limit, or malformed:
                its update = 0
            average = sum of updates / number of replies

    Parameters
    ----------
    max_norm : float or None, default=None
        Largest norm of a group of the update, > 0. None: the bound comes from
        `update-clip-server`, each round, through `update-clip-client`.
    scope : {"global", "tensor", "layer"}, list of patterns or table, default="global"
        Which tensors share a norm. `max_norm` is the limit of each group (k groups together may
        reach ``max_norm * sqrt(k)``), and a table ``{"head.*" = 0.1}`` gives groups their own
        limits. A bound C from the server is for the whole update: each of k groups gets
        ``C / sqrt(k)``.
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
    in TFF, and pulls the average towards 0. Weights are equal: with weights that depend on the
    number of steps, the shared norm would be ``n_steps * max_norm``. A client that took no step
    shares zeros.

    In cleartext the server measures each reply again. A malformed reply, or one beyond the limit,
    counts as a zeroed one, so that a client that does not clip moves the average no more than one
    that sends nothing. Under secure aggregation the server sees only the sum, and refuses a sum
    that honest clients could not have made.

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
    (`tff.aggregators.zeroing_factory`).

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
        fedclip: str = VERSION,
    ) -> None:
        self.max_norm = parameters.optional(parameters.positive, max_norm=max_norm)
        self.on_nonfinite = parameters.choice(("skip", "raise"), on_nonfinite=on_nonfinite)
        self.scope = check_scope(scope, limits=True)
        self.exclude = check_exclude(exclude)
        if isinstance(self.scope, Mapping) and self.max_norm is None:
            raise ValueError(
                "a table in scope gives fixed limits, and the tensors that it does not name need "
                f"max_norm; for a bound from update-clip-server, write scope={list(self.scope)!r}"
            )
        self.zeroing_norm = parameters.optional(parameters.positive, zeroing_norm=zeroing_norm)
        self.zeroing_factor = parameters.optional(
            parameters.number,
            "a finite number > 1",
            1.0,
            open_low=True,
            zeroing_factor=zeroing_factor,
        )
        self.zeroing_ord = check_order(zeroing_ord)
        self.secagg_range = parameters.optional(parameters.positive, secagg_range=secagg_range)
        self._clipping = UpdateClipping(
            self.scope,
            self.exclude,
            zeroing_norm=self.zeroing_norm,
            zeroing_ord=self.zeroing_ord,
            zeroing_factor=self.zeroing_factor,
            on_nonfinite=self.on_nonfinite,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the name and the parameters, as they would be written in a TOML file."""
        return {"name": self.name, **super().get_config()}

    # -- on a client ----------------------------------------------------------------------------
    def prepare_for_sharing(self, updates: Vector[Any], n_steps: int) -> ClippedUpdates:
        """Clip the update of a round, or zero it, and count it."""
        sent = CLIENT.get()
        if sent is not None and self.max_norm is not None:
            raise ValueError(
                f"clipped-averaging has max_norm={self.max_norm!r}, and update-clip-client brings "
                "another bound from the server: leave max_norm out, or the modules"
            )
        round_ = sent or ClientRound(self._fixed_bound())
        shared, far = self._clipping.prepare(updates.coefs, round_, whole=sent is not None)
        round_.zeroed = bool(far)
        if n_steps == 0:
            # These zeros say nothing about the norm of an update.
            round_.norm = None
        if far:
            _CLIENT_LOGGER.warning("clipped-averaging shares zeros for the update: %s", far)
        same = shared is updates.coefs
        vector = updates if same else type(updates)(dict(shared))
        self._check_range(vector)
        round_.done = True
        result = ClippedUpdates(vector, 1)
        if not round_.private:
            result.n_zeroed = int(round_.zeroed)
            result.n_clipped = int(round_.clipped and not round_.zeroed)
        result.secagg_range = self.secagg_range
        return result

    def _fixed_bound(self) -> float:
        if self.max_norm is None:
            raise ValueError(
                "clipped-averaging has no bound: give it max_norm, or put update-clip-client into "
                "client_opt and update-clip-server into server_opt"
            )
        return self.max_norm

    def _check_range(self, vector: Vector[Any]) -> None:
        if self.secagg_range is None:
            return
        if found := peaks(vector.coefs, self.secagg_range):
            named = ", ".join(f"{name!r} ({peak:.4g})" for name, peak in found.items())
            raise ValueError(
                f"values beyond secagg_range=±{self.secagg_range:g} in {named}: lower the bound "
                "of clipped-averaging, or raise clipval on the server and secagg_range with it"
            )

    # -- on the server --------------------------------------------------------------------------
    def finalize_updates(self, updates: Any) -> Vector[Any]:
        """Return the average of the replies; those that are not valid count as zeros."""
        if not isinstance(updates, ClippedUpdates):
            raise TypeError(
                f"clipped-averaging averages ClippedUpdates, got {type(updates).__name__}: "
                "no client has replied, or clients have another aggregator"
            )
        round_ = SERVER.get()
        parts = updates.parts
        model: Any = blank()
        faults = self._faults(parts, model)
        sound = [part.updates for part, fault in zip(parts, faults, strict=True) if not fault]
        replies = sum(max(1, part.n_clients) for part in parts)
        self._report(updates, replies, faults)
        clients = replies
        if round_ is not None and round_.clients is not None:
            clients = round_.clients
        exact = None
        if sound:
            exact = averaged([vector.coefs for vector in sound], clients)
            like = model if model is not None else _usual(sound)
            average = type(like)(rounded(exact, like.coefs))
        else:
            average = model if model is not None else self._nothing(parts, faults)
        if round_ is not None:
            round_.average, round_.exact = average, exact
            if self.exclude:
                round_.trouble = f"clipped-averaging excludes {self.exclude} from the bound"
        return average

    @staticmethod
    def _nothing(parts: Sequence[ClippedUpdates], faults: Sequence[str]) -> Vector[Any]:
        """Return zeros like those of a reply, for a round without a sound one."""
        for part in parts:
            if isinstance(part.updates, Vector) and _kind(part.updates):
                return zeros_like(part.updates)
        raise ValueError(f"clipped-averaging: no reply holds an update ({'; '.join(faults)})")

    def _faults(self, parts: Sequence[ClippedUpdates], model: Any) -> list[str]:
        """Return why no honest client can have sent each reply; "" if one can."""
        kinds = [None if part.fault else _kind(part.updates) for part in parts]
        wanted = None if model is None else _kind(model)
        if wanted is None:
            # Assume that most replies have the tensors of the model.
            wanted = next(iter(Counter(kind for kind in kinds if kind).most_common(1)), (None,))[0]
        faults = []
        for part, kind in zip(parts, kinds, strict=True):
            if not part.fault and (kind is None or kind != wanted):
                part.fault = "it has other tensors than most"
            faults.append(part.fault or self._excess(part))
        return faults

    def _excess(self, part: ClippedUpdates) -> str:
        round_ = SERVER.get()
        bound = round_.bound if round_ is not None else (self.max_norm or math.inf)
        clients = max(1, part.n_clients)
        try:
            return self._clipping.excess(part.updates.coefs, bound, round_ is not None, clients)
        except Exception as exc:  # what clients send may be anything, and must not end the run
            return f"it can not be measured ({exc!r:.200})"

    @staticmethod
    def _report(updates: ClippedUpdates, replies: int, faults: Sequence[str]) -> None:
        round_ = SERVER.get()
        counts = f"{updates.n_clipped} clipped, {updates.n_zeroed} zeroed by their clients, "
        if round_ is not None and round_.clients is not None:
            # With noise, clients do not send these counts.
            counts = ""
        refused = sum(map(bool, faults))
        _LOGGER.info("clipped-averaging: %d updates, %s%d refused", replies, counts, refused)
        for position, fault in enumerate(faults):
            if fault:
                sender = sender_of(UPDATES, position, len(faults))
                _LOGGER.warning(
                    "clipped-averaging: the update of %s counts as zero: %s",
                    repr(sender) if sender else f"one of {replies} replies",
                    fault,
                )


def _usual(vectors: Sequence[Vector[Any]]) -> Vector[Any]:
    """Return one of the vectors, of the dtypes that most of them have."""
    dtypes = [
        tuple((name, backend_of(a).dtype(a)) for name, a in vector.coefs.items())
        for vector in vectors
    ]
    return vectors[dtypes.index(Counter(dtypes).most_common(1)[0][0])]


def _kind(vector: Vector[Any]) -> tuple[Any, ...] | None:
    """Return types, names and shapes of a client's update; None if it has none."""
    try:
        return (type(vector), signature(vector.coefs))
    except Exception:  # it may be anything, and must not end the run
        return None
