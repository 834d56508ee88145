# SPDX-License-Identifier: Apache-2.0
"""`update-clip-server`: `AdaptiveBound` as a module of declearn."""

from __future__ import annotations

import logging
import weakref
from typing import Any, ClassVar

from declearn.optimizer.modules import OptiModule

from fedclip.engines.declearn import messages
from fedclip.engines.declearn.context import ROUND, ServerPart, change, under_way
from fedclip.engines.declearn.generics import AnyVector
from fedclip.engines.declearn.members import expect, faulty_senders
from fedclip.engines.declearn.messages import AUX_NAME, UpdateClipBound, UpdateClipVotes
from fedclip.privacy import guarantees as kinds
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.protocol import WITHOUT_BINS


class UpdateClipServer(AdaptiveBound, OptiModule[Any]):
    """A bound of updates that follows a quantile of norms; central noise.

    ::

        Init(start_norm):
            C = start_norm, or 0.1
        Round:
            charge it to the ledger
            send C                             clients clip to C and vote for the bin of
            u    = sum of the updates / m          log2(norm / C)
            c    = sum of the votes            moved to the nearest counts of m clients
            if noise_multiplier = z > 0:       m is fixed: expected_clients
                u += z_delta * C / m * normal,   z_delta = (z^-2 - (2 bits_noise)^-2)^(-1/2)
                c += 2 bits_noise * normal     for each bin
                noise = "banded":              normal less c_1, c_2, ... times that of the rounds
                    before, and norm(c) times as large
                noise_at = "clients":          both have come with noise: `update-clip-client`
                evaluation_share = s:          1 - s^2 of z^-2 is for the above
                first round without start_norm:  u = 0, and it costs 1 / (2 bits_noise)
            C   *= 2^(K y)                     within [min_norm, max_norm], by 3 octaves at most
                y = octaves from C to the quantile of the votes
                K = gain of a Kalman filter on log2(C)
        Evaluation, if evaluation_share = s:   k numbers of each client, in [0, 1]
            v   = sum(clip(number / bound) - 1/2)
            v  += z / s * sqrt(k) / 2 * normal
            mean = bound * (1/2 + v / m)       clamped; it alone goes on from where replies arrive

    Its counterpart is `update-clip-client`; both need the aggregator `clipped-averaging`
    without `max_norm`. With noise it must be the first of the server's modules.

    Notes
    -----
    Guarantees: the noise is scaled to the bound that was *sent out*, to which the clients clipped,
    not to the next one; a norm equal to the bound is within it; no round runs that would exceed
    `max_epsilon`.

    A round is in the `ledger` before its first message leaves, and a charge is never taken back.
    Wherever and however often a server dies, the ledger holds at least what was released. A server
    that goes on from a checkpoint needs the ledger, and is refused without it. A checkpoint of an
    earlier version, which names no ledger, is charged to the new one with a turn more.

    Without noise, shares are those of the clients that voted; if none did, the bound stays. With
    noise, an abstention counts alike for all bins.

    With noise and without `start_norm`, the first round only counts votes: updates are zeros, the
    model does not change, and the round is charged for its votes.

    The server raises nothing, because declearn would then wait for its clients for ever. If the
    bound does not hold (another aggregator, a module before this one), the round's average
    becomes zero, the error is logged, and the next round ends at its start with that error on
    every client and on the server.

    If a share r of the clients always lies, the bound settles, among the others, not on the
    quantile q but on one between ``(q - r) / (1 - r)`` and ``q / (1 - r)``. No round moves the
    bound by more than a factor of 8, whatever the votes are.

    How far the bound moves depends only on the votes of this round and of earlier ones, with their
    noise. So it costs no privacy, and the accounting is that of the votes. Where the noise of a bin
    is more than a fifth of the clients (fewer than 10 clients at z = 1), the votes say too little:
    fix the bound with ``learning_rate = 0``.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

    Examples
    --------
    >>> from fedclip.engines.declearn.messages import UpdateClipVotes
    >>> server = UpdateClipServer(start_norm=1.0)
    >>> server.collect_aux_var().bound
    1.0
    >>> bins = [0, 0, 0, 0, 1, 0, 0, 0, 3, 0]  # three of four are 4 to 8 times the bound
    >>> server.process_aux_var(UpdateClipVotes(4, n_votes=4, n_within=1, n_bins=bins))
    >>> round(server.bound, 2)
    4.61
    """

    name: ClassVar[str] = "update-clip-server"
    logger: ClassVar[logging.Logger] = logging.getLogger("declearn.server.fedclip")
    takes_turns: ClassVar[str] = (
        "give FederatedServer client_sampler = {{'strategy': 'round-robin', 'per_round': {}}}"
    )
    guarantee = kinds.unchanged_or_noise
    aux_name: ClassVar[str] = AUX_NAME
    auxvar_cls: Any = UpdateClipBound

    _round: ServerPart | None = None
    _message: UpdateClipBound | None = None

    def halt(self, why: str) -> None:
        """Remember why to stop; a message that has not been sent yet says so at once."""
        super().halt(why)
        if self._message is not None:
            self._message.stop = self.stop

    # -- the round, in declearn's order ---------------------------------------------------------
    def collect_aux_var(self) -> UpdateClipBound:
        """Return the bound of the next round, or why no round begins."""
        # declearn has just called another module, in the same loop.
        if (other := under_way(counted=False)) is not None and other[1] is not self:
            self.halt("there are two update-clip-server modules in server_opt: keep one")
        due = ROUND.get().participation
        change(participation=None)
        if self.evaluation_share:
            self._take_evaluations()
        sent = self.open(due)
        self._round = ServerPart(weakref.ref(self), sent)
        change(server=self._round)
        expect(self.aux_name, UpdateClipVotes, lambda: UpdateClipVotes(n_faults=1))
        noise = {} if self.site is None else self.site.get_config()
        self._message = UpdateClipBound(
            sent.bound,
            sent.adaptive,
            sent.private,
            sent.stop,
            noise,
            sent.schedule,
            sent.round,
            sent.only_votes,
        )
        return self._message

    def _take_evaluations(self) -> None:
        """Replace evaluations by means with noise; halt if that is impossible."""
        if (run := ROUND.get().evaluations) is None:
            self.halt("evaluation_share needs the server's protocol 'fedclip-websockets'")
        else:
            for problem in run.problems(self.expected_clients or 0):
                self.halt(problem.text)
            run.noise = self.evaluated

    def process_aux_var(self, aux_var: object) -> None:
        """Count the votes and set the next bound; this round's noise still uses the one sent."""
        change(server=self._round)
        self._message = None
        if self._round is None:
            self.halt("votes have come, but no bound was sent")
            return
        if not isinstance(aux_var, UpdateClipVotes):
            aux_var = UpdateClipVotes.among(getattr(aux_var, "parts", None) or [aux_var])
        self._round.counted = True
        clients = aux_var.n_clients - (0 if self.site is None else aux_var.n_faults)
        if self.budget is not None and self.site is None and aux_var.coarse[0]:
            self.warn(WITHOUT_BINS)
            aux_var = aux_var.with_bins_only()
        self.count(aux_var.counts(), clients, aux_var.noised)
        if 0 < aux_var.n_faults <= aux_var.n_clients:
            senders = ", ".join(map(repr, faulty_senders(self.aux_name)[:5]))
            text = f"no proper vote in {aux_var.n_faults} of {aux_var.n_clients} replies"
            self.warn(f"{text}{f' (of {senders})' * bool(senders)}; taken as abstention")

    def run(self, gradients: AnyVector) -> AnyVector:
        """Return the average with noise; zeros if the bound does not hold."""
        round_, self._round = self._round, None
        change(server=None)
        trouble = self._trouble(round_, gradients)
        if trouble or round_ is None:
            self.halt(trouble)
            self.logger.error("update-clip-server: the round is void, %s", self.stop)
            return messages.zeros_like(gradients)
        average = self.release(gradients.coefs, round_.exact)
        return gradients if average is gradients.coefs else type(gradients)(dict(average))

    def _trouble(self, round_: ServerPart | None, gradients: AnyVector) -> str:
        if round_ is None:
            return "no bound was sent in this round"
        if not round_.counted:
            return "no votes have come: put update-clip-client into client_opt, as last module"
        if round_.average is None:
            return (
                "the updates were not averaged by 'clipped-averaging': set aggregator = "
                "'clipped-averaging', and no fairness, which brings its own aggregator"
            )
        if self.budget is None:
            return ""
        if round_.trouble:
            return round_.trouble
        if gradients is not round_.average:
            return (
                "another module or regularizer changes the average before noise is added: "
                "put update-clip-server first"
            )
        return ""
