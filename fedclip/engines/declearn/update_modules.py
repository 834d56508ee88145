# SPDX-License-Identifier: Apache-2.0
"""The modules of update clipping: bound and votes travel between them as auxiliary variables.

::

    update-clip-server    sends the bound of a round; counts the votes; adds noise to the average
    update-clip-client    receives the bound; returns the client's vote
    update-norms          measures the update of each round, where it stays on the client
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from declearn.optimizer.modules import OptiModule

from fedclip.core import parameters
from fedclip.core.messages import SideBySide
from fedclip.core.parameters import Config, parameter
from fedclip.core.plugins import Versioned
from fedclip.core.records import Recorder, RoundRecord, read_rounds
from fedclip.core.states import check_count
from fedclip.engines.declearn import context
from fedclip.engines.declearn.context import ROUND, AnyVector, change
from fedclip.engines.declearn.messages import AUX_NAME, UpdateClipBound, UpdateClipVotes, zeros_like
from fedclip.errors import Unchecked
from fedclip.privacy import guarantees as kinds
from fedclip.rules import FIXED, LEARNT
from fedclip.updates.bound import AdaptiveBound
from fedclip.updates.client_noise import UNENCRYPTED, SiteNoise
from fedclip.updates.limits import norm_of
from fedclip.updates.protocol import SentBound
from fedclip.updates.votes import WITHOUT_BINS, counts_of


class UpdateNorms(OptiModule[Any]):
    """Record the norm of each round's update; records stay on the client.

    ::

        Steps:             nothing; gradients pass unchanged
        End of the round:  the client records norm(update), before sharing it

    You do not configure it. `PersonalFederatedClient`, `fedclip quickrun` and `fedclip simulate`
    add it to a client without `update-clip-client`, which records the same.
    `PrivateFederatedClient` does not.

    Notes
    -----
    A record has the norm, a fixed bound if there is one, and whether the update was clipped. Rounds
    without a step and updates with integer tensors are not recorded.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> norms = UpdateNorms()
    >>> norms.on_round_start()
    >>> norms.measure(NumpyVector({"w": np.array([3.0, 4.0])}))
    >>> norms.rounds[0].norm_max
    5.0
    """

    name: ClassVar[str] = "update-norms"
    guarantee = kinds.unchanged

    def __init__(self) -> None:
        self.recorder = Recorder()

    def run(self, gradients: AnyVector) -> AnyVector:
        """Return the gradients unchanged."""
        return gradients

    def on_round_start(self) -> None:
        """Begin a round."""
        self.recorder.start_round()

    def measure(self, updates: AnyVector, bound: float = math.inf) -> None:
        """Note the norm of an update, and whether it is above a fixed bound."""
        try:
            norm = norm_of(updates.coefs, self.name)
        except TypeError:  # integers, which are reported where they are clipped
            return
        if norm is None:
            self.recorder.add_nonfinite()
        else:
            self.note(norm, SentBound(bound, adaptive=False), norm > bound)

    def note(self, norm: float, sent: SentBound, clipped: bool) -> None:
        """Record the norm of an update, and whether it was above the bound."""
        basis = LEARNT if sent.adaptive else FIXED
        self.recorder.add(("all",), norm, sent.bound, clipped, basis=basis)

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened to the updates of the last rounds."""
        return self.recorder.rounds()

    def get_state(self) -> dict[str, object]:
        """Return the records of the rounds."""
        return self.recorder.get_state()

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over the records of the rounds."""
        round_ = check_count("round", state.get("round") if isinstance(state, Mapping) else None)
        self.recorder.set_state(round_, read_rounds(state))


def _noise(noise: object) -> Config:
    if not isinstance(noise, Mapping):
        raise TypeError(f"noise must be a table, got {noise!r:.200}")
    return SiteNoise(**noise).get_config()


class UpdateClipClient(Versioned, UpdateNorms):
    """Receive the round's bound for `clipped-averaging`, and return a vote.

    ::

        Start of a round:  receive C
        Steps:             nothing; gradients pass unchanged
        End of the round:  after the aggregator has clipped the update to C,
                           vote for the bin of log2(norm(update) / C); no vote without an update

    It needs `update-clip-server` on the server, and the aggregator `clipped-averaging` without
    `max_norm`.

    Parameters
    ----------
    noise : table or None, default=None
        Noise that this client adds, if the server has ``noise_at="clients"``: the server's
        `noise_multiplier`, `expected_clients`, `honest`, `max_norm`, and `bits_noise` if set (0 for
        a fixed bound). A server with other noise or a larger bound is refused.
    fedclip : str, default=the version of this fedclip
        Version that wrote the configuration; a server sets it.

    Raises
    ------
    RuntimeError
        If the server sends no bound or has decided to stop, or if there is another aggregator;
        raised where declearn reports it to the server.

    Notes
    -----
    A client without a step, or with an update that is not finite, does not vote. An update that is
    zeroed as out of range votes as above the bound. The server learns the bin and, without noise,
    whether the update was clipped or zeroed. Near the bound, a bin reveals the norm within a factor
    of 1.4, in a secure sum of few clients nearly so. Records of norms stay on the client.

    With `noise`, update and vote leave as integers with discrete Gaussian noise. That needs a
    `PersonalFederatedClient` and secure aggregation; otherwise, or with too few clients in the sum,
    nothing is sent. Under Joye-Libert, clients cannot count each other.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, arXiv:1905.03871.

    Examples
    --------
    >>> from declearn.optimizer import Optimizer
    >>> client = Optimizer(lrate=0.1, modules=["update-clip-client"])
    >>> try:
    ...     client.start_round()
    ... except RuntimeError as error:
    ...     print(str(error).partition(":")[0])
    update-clip-client has received no bound
    """

    name: ClassVar[str] = "update-clip-client"
    aux_name: ClassVar[str] = AUX_NAME
    auxvar_cls: Any = UpdateClipVotes

    noise: Config | None = parameter(_noise, default=None)
    _round: context.ClientPart | None = None

    def __post_init__(self) -> None:
        """Begin without a round."""
        UpdateNorms.__init__(self)
        self.site = None if self.noise is None else SiteNoise(**self.noise)

    def process_aux_var(self, aux_var: object) -> None:
        """Receive the bound of this round; an error leaves no round."""
        self._round = None
        try:
            if not isinstance(aux_var, UpdateClipBound):
                got = f"got {type(aux_var).__name__}: another module uses the name {AUX_NAME!r}"
                raise TypeError(f"update-clip-client needs a bound of update-clip-server, {got}")
            if aux_var.lacking:
                raise ValueError(f"update-clip-client: {aux_var.lacking}")
            if aux_var.stop:
                raise RuntimeError(f"update-clip-server stops the training: {aux_var.stop}")
            bins = aux_var.bins if type(aux_var.bins) is int else 0
            bound, only_votes = parameters.limit(bound=aux_var.bound), aux_var.only_votes is True
            adaptive, private = aux_var.adaptive, aux_var.private
            sent = SentBound(bound, adaptive, private, only_votes=only_votes, bins=bins)
            noised = self.site is not None or aux_var.noise
            self._round = self._noised(sent, aux_var.noise) if noised else context.ClientPart(sent)
        finally:
            change(client=self._round)

    def _noised(self, sent: SentBound, announced: Unchecked) -> context.ClientPart:
        """Return a round with noise, if what is shared can hold it: before the first step."""
        known = ROUND.get().sharing
        try:
            if (site := self.site) is None:
                text = f"adds no noise, and the server expects noise = {announced!r:.300}"
                raise ValueError(f"this client {text}")
            if why := site.refusal(announced, sent):
                raise ValueError(why)
            if known is None:
                text = "noise needs encryption, which only a PersonalFederatedClient knows of"
                raise ValueError(text)
            model, encrypter = known
            if encrypter is None:
                raise ValueError(UNENCRYPTED)
            step = site.step(model.get_weights(trainable=True).coefs, sent.bound, encrypter)
            add_noise = partial(site.shared, bound=sent.bound, step=step, encrypter=encrypter)
            return context.ClientPart(sent, add_noise)
        except ValueError as exc:
            raise ValueError(f"update-clip-client: {exc}; nothing is shared") from exc

    def on_round_start(self) -> None:
        """Begin a round; the server must have sent a bound."""
        if self._round is None:
            advice = "put update-clip-server into server_opt, and this into client_opt, once each"
            raise RuntimeError(f"update-clip-client has received no bound: {advice}")
        super().on_round_start()

    def collect_aux_var(self) -> UpdateClipVotes | None:
        """Return this client's vote; None outside of a round, which begins with a bound."""
        round_, self._round = self._round, None
        try:
            if round_ is None:
                return None
            sent, outcome, reply = round_.sent, round_.outcome, round_.reply
            if outcome is None or reply is None:
                text = "the update was not clipped: set aggregator = 'clipped-averaging'"
                raise RuntimeError(text)
            if outcome.norm is not None:
                self.note(outcome.norm, sent, outcome.clipped)
            if self.site is not None and sent.adaptive:
                return UpdateClipVotes(n_noised=self.site.vote(reply.bins))
            bins = [*reply.bins] or None
            return UpdateClipVotes(n_votes=reply.votes, n_within=reply.within, n_bins=bins)
        finally:
            change(client=None)


_SENT = ("bound", "adaptive", "private", "stop", "schedule", "round", "only_votes")


class UpdateClipServer(AdaptiveBound, OptiModule[Any]):
    """Adapt the bound of updates to a quantile of norms; add central noise.

    ::

        C = start_norm, or 0.1
        Round:
            write it to the ledger
            send C                         clients clip to C, vote for a bin of log2(norm / C)
            u  = sum of the updates / m    m: number of replies
            c  = counts of the votes
            if noise_multiplier = z > 0:   m = expected_clients
                u += z_delta * C / m * normal,   z_delta = (z^-2 - (2 bits_noise)^-2)^(-1/2)
                c += 2 bits_noise * normal       for each bin
            C *= 2^(K y)                   by 3 octaves at most, within [min_norm, max_norm]
                y = octaves from C to the quantile of the votes
                K = gain of a Kalman filter on log2(C)

    The clients need `update-clip-client`, and both sides the aggregator `clipped-averaging` without
    `max_norm`. With noise it must be the first of the server's modules.

    Notes
    -----
    Noise is scaled to the bound that was sent, not to the next one. No round runs that would exceed
    `max_epsilon`. The ledger holds a round before its first message leaves, so it covers what was
    released, whenever a server dies.

    Bins are half an octave wide near the bound, and open at both ends; in clear text, they reveal
    how far above the bound an update was. Without votes, the bound stays. With noise, a client
    without a vote counts for all bins equally. Moving the bound costs no privacy beyond the votes.
    If a bin's noise is more than a fifth of the clients (fewer than 10 clients at z = 1), fix the
    bound.

    If a share r of clients is malicious, the bound settles between two quantiles of the others:
    ``(q - r) / (1 - r)`` and ``q / (1 - r)``.

    With noise and without `start_norm`, the first round releases zeros, and costs only its votes.
    If another module breaks the bound, the average becomes zero, and the next round ends with an
    error.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, arXiv:1905.03871; bins and filter are ours.

    Examples
    --------
    >>> from fedclip.engines.declearn.messages import UpdateClipVotes
    >>> server = UpdateClipServer(start_norm=1.0)
    >>> server.collect_aux_var().bound
    1.0
    >>> bins = [0, 0, 0, 0, 1, 0, 0, 0, 3, 0]  # three of four are 4 to 8 times the bound
    >>> server.process_aux_var(UpdateClipVotes(4, n_votes=4, n_within=1, n_bins=bins))
    >>> round(server.bound, 2)
    4.94
    """

    name: ClassVar[str] = "update-clip-server"
    logger = context.LOGGER
    takes_turns: ClassVar[str] = (
        "give FederatedServer client_sampler = {{'strategy': 'round-robin', 'per_round': {}}}"
    )
    guarantee = kinds.unchanged_or_noise
    aux_name: ClassVar[str] = AUX_NAME
    auxvar_cls: Any = UpdateClipBound

    _round: context.ServerPart | None = None
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
        if (other := context.under_way(counted=False)) is not None and other[1] is not self:
            self.halt("there are two update-clip-server modules in server_opt: keep one")
        if self.evaluation_share:
            # Replace evaluations by means with noise.
            if (run := ROUND.get().evaluations) is None:
                self.halt("evaluation_share needs the server's protocol 'fedclip-websockets'")
            else:
                for problem in run.problems(self.expected_clients or 0):
                    self.halt(problem.text)
                run.noise = self.evaluated
        sent = self.open(ROUND.get().participation)
        self._round = context.ServerPart(weakref.ref(self), sent)
        change(server=self._round, participation=None)
        context.expect(self.aux_name, UpdateClipVotes(n_faults=1))
        noise = {} if self.site is None else self.site.get_config()
        self._message = UpdateClipBound(**{n: getattr(sent, n) for n in _SENT}, noise=noise)
        return self._message

    def process_aux_var(self, aux_var: object) -> None:
        """Count the votes and set the next bound; this round's noise still uses the one sent."""
        change(server=self._round)
        self._message = None
        if self._round is None:
            self.halt("votes have come, but no bound was sent")
            return
        self._round.counted = True
        sent = aux_var.messages if isinstance(aux_var, SideBySide) else [aux_var]
        votes = [v if isinstance(v, UpdateClipVotes) else UpdateClipVotes(n_faults=1) for v in sent]
        clients, faults = sum([v.n_clients for v in votes]), sum([v.n_faults for v in votes])
        known = [v for v in votes if self.budget is None or v.n_bins is not None or not v.n_votes]
        if len(known) < len(votes):
            self.warn(WITHOUT_BINS)
        with_noise = clients if self.site is None else clients - faults
        noised = [v.n_noised for v in votes if v.n_noised is not None]
        counts = [(v.n_votes, v.n_within, v.n_bins) for v in known]
        self.count(counts_of(*counts), with_noise, noised)
        if 0 < faults <= clients:
            pairs = zip(context.names_of(self.aux_name, len(votes)), votes, strict=True)
            faulty = [repr(name) for name, vote in pairs if name and vote.n_faults][:5]
            senders = f" (of {', '.join(faulty)})" if faulty else ""
            self.warn(f"no proper vote in {faults} of {clients} replies{senders}; they abstain")

    def run(self, gradients: AnyVector) -> AnyVector:
        """Return the average with noise; zeros if the bound does not hold."""
        round_, self._round = self._round, None
        trouble = self._trouble(round_, gradients)
        change(server=None)
        if trouble or round_ is None:
            self.halt(trouble)
            self.logger.error("update-clip-server: the round is void, %s", self.stop)
            return zeros_like(gradients)
        average = self.release(gradients.coefs, round_.exact)
        return gradients if average is gradients.coefs else type(gradients)(dict(average))

    def _trouble(self, round_: context.ServerPart | None, gradients: AnyVector) -> str:
        """Return why the bound does not hold; "" if it does."""
        if round_ is None:
            return "no bound was sent in this round"
        if not round_.counted:
            return "no votes have come: put update-clip-client into client_opt, as last module"
        if round_.average is None:
            return "the updates were not averaged by 'clipped-averaging': set that aggregator"
        if self.budget is None or round_.trouble or gradients is round_.average:
            return round_.trouble
        return "another module changes the average before its noise: put update-clip-server first"
