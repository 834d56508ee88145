# SPDX-License-Identifier: Apache-2.0
"""`update-clip-client`: receives the bound of a round, and returns the client's vote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.core.plugins import VERSION, Versioned
from fedclip.engines.declearn.context import ROUND, ClientPart, change
from fedclip.engines.declearn.messages import AUX_NAME, UpdateClipBound, UpdateClipVotes
from fedclip.engines.declearn.update_norms import UpdateNorms
from fedclip.updates.client_noise import UNENCRYPTED, SiteNoise
from fedclip.updates.protocol import SentBound


class UpdateClipClient(Versioned, UpdateNorms):
    """Receive this round's bound for `clipped-averaging`, and return the client's vote.

    ::

        Start of a round:  receive C
        Steps:             nothing; gradients pass unchanged
        End of the round:  the aggregator has clipped the update to C
                           vote for the bin of log2(norm(update) / C); none without an update

    Its counterpart is `update-clip-server`, which has all parameters but one, and it needs the
    aggregator `clipped-averaging` without `max_norm`.

    Parameters
    ----------
    noise : table or None, default=None
        The noise that this client adds itself, where the server has ``noise_at="clients"``: the
        server's `noise_multiplier`, `expected_clients`, `honest`, `max_norm`, and `bits_noise` if
        it has one (0 for a fixed bound). A server that expects another one, or sends a larger
        bound, is refused.
    fedclip : str, default=the version of this fedclip
        The version that wrote the configuration; a server sets it for its clients.

    Raises
    ------
    RuntimeError
        If the server sends no bound or has decided to stop, or if there is another aggregator;
        raised where declearn reports it to the server.

    Notes
    -----
    A client that took no step, or whose update is not finite, does not vote: its zeros would count
    as "within the bound" and pull the bound down, round by round. An update that is zeroed because
    it is out of range votes as above the bound: otherwise a bound so low that all updates are
    zeroed would stay there. The server learns the bin and, without noise, whether the update was
    clipped or zeroed. Bins are half an octave wide near the bound, so that without noise they
    reveal the norm within a factor of 1.4; in a secure sum of few clients, nearly so.

    The records of the rounds (norm before, bound, clipped or not) stay on the client.

    With `noise`, update and vote leave as integers with discrete Gaussian noise
    (`fedclip.updates.client_noise`). It takes a `PersonalFederatedClient` and secure
    aggregation: without it, or with fewer clients in the sum than expected, nothing is sent.
    With Joye-Libert's protocol, a client does not know how many there are.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

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

    def __init__(self, *, noise: Config | None = None, fedclip: str = VERSION) -> None:
        UpdateNorms.__init__(self)
        if not isinstance(noise, (Mapping, type(None))):
            raise TypeError(f"noise must be a table, got {noise!r:.200}")
        self.site = None if noise is None else SiteNoise(**noise)
        self.noise = None if self.site is None else self.site.get_config()
        self._round: ClientPart | None = None

    def process_aux_var(self, aux_var: object) -> None:
        """Receive the bound of this round."""
        self._round = None
        change(client=None)
        if not isinstance(aux_var, UpdateClipBound):
            got = f"got {type(aux_var).__name__}: another module uses the name {AUX_NAME!r}"
            raise TypeError(f"update-clip-client takes its bound from update-clip-server, {got}")
        if lacking := aux_var.missing():
            raise ValueError(f"update-clip-client: {lacking}")
        if aux_var.stop:
            raise RuntimeError(f"update-clip-server stops the training: {aux_var.stop}")
        bound = parameters.limit(bound=aux_var.bound)
        sent = SentBound(
            bound,
            aux_var.adaptive,
            aux_var.private,
            only_votes=aux_var.only_votes is True,
            bins=aux_var.bins if type(aux_var.bins) is int else 0,
        )
        why = f"this client adds no noise, and the server expects noise = {aux_var.noise!r:.300}"
        if self.site is not None:
            why = self.site.refusal(aux_var.noise, sent)
        if why and (self.site or aux_var.noise):
            raise ValueError(f"update-clip-client: {why}; nothing is shared")
        self._round = ClientPart(sent)
        if self.site is not None:
            self._round = self._noised(sent, self.site)
        change(client=self._round)

    @staticmethod
    def _noised(sent: SentBound, site: SiteNoise) -> ClientPart:
        """Return a round with noise, if what is shared can hold it: before the first step."""
        known = ROUND.get().sharing
        if known is None:
            raise ValueError(
                "update-clip-client: noise is for what encrypts the replies, which a "
                "fedclip.PersonalFederatedClient knows: use that; nothing is shared"
            )
        model, encrypter = known
        if encrypter is None:
            raise ValueError(f"update-clip-client: {UNENCRYPTED}; nothing is shared")
        weights = model.get_weights(trainable=True).coefs
        return ClientPart(sent, site, encrypter, site.step(weights, sent.bound, encrypter))

    def on_round_start(self) -> None:
        """Begin a round; the server must have sent a bound."""
        if self._round is None:
            raise RuntimeError(
                "update-clip-client has received no bound: put update-clip-server into "
                "server_opt, and update-clip-client into client_opt once only"
            )
        super().on_round_start()

    def collect_aux_var(self) -> UpdateClipVotes | None:
        """Return this client's vote; None outside of a round, which begins with a bound."""
        round_, self._round = self._round, None
        change(client=None)
        if round_ is None:
            return None
        sent, outcome = round_.sent, round_.outcome
        if outcome is None:
            raise RuntimeError(
                "this round's update was not clipped: set aggregator = 'clipped-averaging'"
            )
        if outcome.norm is not None:
            self.note(outcome.norm, sent, outcome.clipped)
        reply = outcome.reply(sent)
        if round_.site is not None and sent.adaptive:
            return UpdateClipVotes(n_noised=round_.site.vote(reply.bins))
        bins = list(reply.bins) if len(reply.bins) else None
        return UpdateClipVotes(n_votes=reply.votes, n_within=reply.within, n_bins=bins)
