# SPDX-License-Identifier: Apache-2.0
"""`update-clip-server`: sends the bound of each round, counts the votes, and adds the noise."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from declearn.model.api import Vector
from declearn.optimizer.modules import OptiModule

from fedclip import parameters
from fedclip.errors import StateError
from fedclip.federation.replies import expect, faulty_senders
from fedclip.federation.update.bound import FIRST, BoundRule, Search, share_within
from fedclip.federation.update.budget import MANY_ROUNDS, Budget
from fedclip.federation.update.coupling import OPENED, SERVER, ServerRound
from fedclip.federation.update.messages import (
    AUX_NAME,
    UpdateClipBound,
    UpdateClipVotes,
    zeros_like,
)
from fedclip.privacy import kinds

_LOGGER = logging.getLogger("declearn.server.fedclip")


class UpdateClipServer(parameters.Configured, OptiModule):  # type: ignore[type-arg]
    """A bound of the clients' updates that follows a quantile of their norms; central noise.

    ::

        Init(start_norm):
            C = start_norm, or 0.1 and search
        Round:
            send C                             clients clip to C and vote: b = (norm <= C)
            u    = sum of the updates / m
            b    = sum(b - 1/2) / m + 1/2      clamped to [0, 1]
            if noise_multiplier = z > 0:       m is fixed: expected_clients
                u += z_delta * C / m * normal,   z_delta = (z^-2 - (2 bits_noise)^-2)^(-1/2)
                b += bits_noise / m * normal   (before it is clamped)
            C    = C * exp(-learning_rate * (b - quantile)),   within [min_norm, max_norm]
            while C is searched for:
                if nearly all were within it:  u = 0
                C = C * 4 if nearly none were within it, C / 4 if nearly all;
                    smaller steps after it was passed

    Its counterpart is `update-clip-client`; both need the aggregator `clipped-averaging`
    without `max_norm`. With noise it must be the first of the server's modules.

    Parameters
    ----------
    start_norm : float or "search", default="search"
        Bound of the first round, > 0. With "search" that is 0.1, and the bound moves by a factor
        of 4 a round as long as nearly all or nearly none of the updates are within it. From
        100 times too low or too high, it is within a factor of 2 after 10 rounds in 95 % of
        searches, where the noise on the votes is at most a tenth of the clients; `fedclip check`
        says how many rounds it takes with more.
    quantile : float, default=0.5
        Share of the updates that the bound should leave alone, in (0, 1).
    learning_rate : float, default=0.2
        How fast the bound moves: by a factor of at most ``exp(± learning_rate)`` a round. From a
        tenth of the median it takes 23 rounds. 0 fixes the bound; then clients do not vote.
    min_norm, max_norm : float, default=1e-6 and 1e4
        Limits of the bound, > 0. The upper one is well within the range of declearn's secure
        aggregation.
    noise_multiplier : float, default=0.0
        Standard deviation of the noise, as a multiple of the sensitivity, with which a round is
        accounted; 0 for no noise.
    bits_noise : float or None, default=None
        Standard deviation of the noise on the sum of the votes, > ``noise_multiplier / 2``.
        None: ``max(expected_clients / 20, noise_multiplier)``, which suits 3 clients as well as
        1,000.
    expected_clients : int or None, default=None
        Number of clients in a round, by which averages are divided, however many reply. Noise
        needs it, because the true number must not be used.
    delta : float, default=1e-5
        Probability with which the guarantee may fail; below 1 / number of clients.
    max_epsilon : float or None, default=None
        Stop before a round that would exceed this epsilon.
    relation : {"add-remove", "replace-one"}, default="add-remove"
        Which federations are neighbours: those with and without one client (whose reply is
        empty), or those with another client in its place, which needs twice the noise.
    generator : {"secure", "insecure"}, default="secure"
        Source of the noise. The insecure one is for experiments.
    seed : int or None, default=None
        Seed that makes the insecure noise repeatable.
    unnoised : list of names or None, default=None
        Other modules of the server whose statistics may go out without noise beside the noised
        average, such as ``["zscore-clip-server"]``; epsilon does not cover what they reveal.
        All others are refused.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or settings are impossible; the message
        says which are possible.

    Notes
    -----
    Guarantees: the noise is scaled to the bound that was *sent out*, to which the clients clipped,
    not to the next one; a vote says that the update was not clipped, and a norm equal to the bound
    is within it; the spent budget and the bound are part of the state, so that a server restarted
    from a checkpoint continues with both; no round runs that would exceed `max_epsilon`.

    A round of a search costs as much as any round. If its votes say that the bound is too high,
    its average is not released (the model does not change), because the noise would be scaled to
    that bound. More than ``quantile / 2`` of the clients can end a search early by their votes.

    Without noise, the share is that of the clients that voted; if none did, the bound stays.
    With noise, an abstention counts as half a vote for either side.

    The server raises nothing, because declearn would then wait for its clients for ever. If the
    bound does not hold (another aggregator, a module before this one), the round's average
    becomes zero, the error is logged, and the next round ends at its start with that error on
    every client and on the server.

    If a share r of the clients always lies, the bound settles, among the others, not on the
    quantile q but on one between ``(q - r) / (1 - r)`` and ``q / (1 - r)``. In a round they move
    the bound by a factor of at most ``exp(learning_rate * r)``.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

    Examples
    --------
    >>> from fedclip.federation.update.messages import UpdateClipVotes
    >>> server = UpdateClipServer(start_norm=1.0)
    >>> server.collect_aux_var().bound
    1.0
    >>> server.process_aux_var(UpdateClipVotes(n_clients=4, n_votes=4, n_within=1))
    >>> round(server.bound, 4)  # a quarter within: up, by exp(0.2 * 0.25)
    1.0513
    """

    name: ClassVar[str] = "update-clip-server"
    guarantee = kinds.unchanged_or_noise
    aux_name: ClassVar[str] = AUX_NAME
    auxvar_cls = UpdateClipBound

    def __init__(
        self,
        start_norm: float | str = "search",
        *,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        min_norm: float = 1e-6,
        max_norm: float = 1e4,
        noise_multiplier: float = 0.0,
        bits_noise: float | None = None,
        expected_clients: int | None = None,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        relation: str = "add-remove",
        generator: str = "secure",
        seed: int | None = None,
        unnoised: str | Sequence[str] | None = None,
    ) -> None:
        self.start_norm: float | str
        if isinstance(start_norm, str):
            self.start_norm = parameters.choice(("search",), start_norm=start_norm)
        else:
            self.start_norm = parameters.positive(start_norm=start_norm)
        self.quantile = parameters.unit_interval(quantile=quantile)
        self.learning_rate = parameters.non_negative(learning_rate=learning_rate)
        self.min_norm = parameters.positive(min_norm=min_norm)
        self.max_norm = parameters.positive(max_norm=max_norm)
        first = FIRST if isinstance(self.start_norm, str) else self.start_norm
        searching = first is not self.start_norm
        if self.min_norm > self.max_norm or not (
            searching or self.min_norm <= first <= self.max_norm
        ):
            raise ValueError(
                f"start_norm must be within [min_norm, max_norm], got {start_norm!r} and "
                f"[{min_norm!r}, {max_norm!r}]"
            )
        if searching and self.learning_rate == 0:
            raise ValueError(
                "learning_rate=0 fixes the bound, and clients do not vote: give start_norm a "
                "number, because a search needs their votes"
            )
        self.noise_multiplier = parameters.non_negative(noise_multiplier=noise_multiplier)
        self.bits_noise = parameters.optional(parameters.non_negative, bits_noise=bits_noise)
        self.expected_clients = parameters.optional(
            parameters.integer, 1, expected_clients=expected_clients
        )
        self.delta = parameters.unit_interval(delta=delta)
        self.max_epsilon = parameters.optional(parameters.positive, max_epsilon=max_epsilon)
        self.relation = parameters.choice(("add-remove", "replace-one"), relation=relation)
        self.generator = parameters.choice(("secure", "insecure"), generator=generator)
        self.seed = parameters.optional(parameters.integer, 0, seed=seed)
        if self.seed is not None and self.generator == "secure":
            raise ValueError(
                f"a seed goes with generator='insecure' only, got seed={seed!r}: noise that can "
                "be repeated can be subtracted"
            )
        names = [unnoised] if isinstance(unnoised, str) else unnoised
        self.unnoised = None if names is None else [parameters.name(unnoised=n) for n in names]
        self.rule = BoundRule(self.quantile, self.learning_rate, self.min_norm, self.max_norm)
        self.bound = self.rule.within(first)
        self.search = Search() if searching else None
        self.round = 0
        self.budget = self._budget()
        self._round: ServerRound | None = None
        self._voted = self._withheld = False
        self._stop = ""
        # A later module may write into this message why the run has to end, until it is sent.
        self._message: UpdateClipBound | None = None

    def _budget(self) -> Budget | None:
        if self.noise_multiplier == 0:
            given = {
                "bits_noise": self.bits_noise,
                "max_epsilon": self.max_epsilon,
                "unnoised": self.unnoised,
            }
            for name, value in given.items():
                if value:
                    raise ValueError(f"{name} goes with noise_multiplier > 0, got {value!r} with 0")
            return None
        if self.expected_clients is None:
            raise ValueError(
                "noise_multiplier needs expected_clients, the number of clients in a round: the "
                "noise is sized on it, and the number of replies would itself reveal something"
            )
        return Budget(
            self.noise_multiplier,
            self.expected_clients,
            votes=self.learning_rate > 0,
            bits_noise=self.bits_noise,
            delta=self.delta,
            relation=self.relation,
            max_epsilon=self.max_epsilon,
            generator=self.generator,
            seed=self.seed,
        )

    @property
    def noise(self) -> float:
        """Noise multiplier of the update: z_delta."""
        return 0.0 if self.budget is None else self.budget.update_noise

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far, at `delta`."""
        return 0.0 if self.budget is None else self.budget.epsilon

    def rounds_left(self, most: int = MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        return most if self.budget is None else self.budget.rounds_left(most)

    def admit(self, name: str) -> bool:
        """Return whether a module may send statistics without noise.

        It may if no noise is added, or if `unnoised` names it. If not, the message that is about to
        be sent ends the run on every client.
        """
        if self.budget is None or name in (self.unnoised or ()):
            return True
        self._halt(self.refusal_of(name))
        _LOGGER.error("update-clip-server stops the training: %s", self._stop)
        if self._message is not None:
            self._message.stop = self._stop
        return False

    @staticmethod
    def refusal_of(name: str) -> str:
        """Return why a module may not send statistics beside averages with noise."""
        return (
            f"{name} sends what it has learnt from the clients without noise, while the averages "
            "have noise: it may reveal a single client, whatever epsilon is; remove it, or allow "
            f"it in update-clip-server with unnoised = [{name!r}]"
        )

    # -- the round, in declearn's order ---------------------------------------------------------
    def collect_aux_var(self) -> UpdateClipBound:
        """Return the bound of the next round, or why there is none."""
        if self.budget is not None and not self._stop:
            self._halt(self.budget.refusal())
        opened = OPENED.get()
        # declearn has just called another module, in the same loop. A module of an earlier run may
        # have left its reference, which is None if that module is gone.
        if opened is not None and opened() not in (None, self):
            self._halt("there are two update-clip-server modules in server_opt: keep one")
        if self._stop:
            _LOGGER.error("update-clip-server stops the training: %s", self._stop)
        self._round = ServerRound(self.bound)
        self._voted = self._withheld = False
        if self.budget is not None:
            self._round.clients = self.expected_clients
        OPENED.set(weakref.ref(self))
        expect(self.aux_name, UpdateClipVotes, lambda: UpdateClipVotes(n_faults=1))
        self._message = UpdateClipBound(
            self.bound, self.learning_rate > 0, self.budget is not None, self._stop
        )
        return self._message

    def process_aux_var(self, aux_var: Any) -> None:
        """Count the votes and set the next bound; this round's noise still uses the one sent."""
        OPENED.set(None)
        self._message = None
        if self._round is None:
            self._halt("votes have come, but no bound was sent")
            return
        if not isinstance(aux_var, UpdateClipVotes):
            aux_var = UpdateClipVotes.among(getattr(aux_var, "parts", None) or [aux_var])
        self._voted = True
        SERVER.set(self._round)
        self.round += 1
        if self.budget is not None:
            self.budget.spend()
        votes, share = self._count(aux_var)
        if share is not None:
            self.bound, self.search, self._withheld = self.rule.after(
                self._round.bound, share, self.search
            )
        self._report(aux_var, votes, share)

    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        """Return the average with noise; zeros if the bound does not hold."""
        round_, self._round = self._round, None
        SERVER.set(None)
        trouble = self._trouble(round_, gradients)
        if trouble or round_ is None:
            self._halt(trouble)
            _LOGGER.error("update-clip-server: the round is void, %s", self._stop)
            return zeros_like(gradients)
        if self._withheld:
            return zeros_like(gradients)
        if self.budget is None:
            return gradients
        noised = self.budget.noised(gradients.coefs, round_.bound, self.round, round_.exact)
        return type(gradients)(noised)

    def _trouble(self, round_: ServerRound | None, gradients: Vector[Any]) -> str:
        if round_ is None:
            return "no bound was sent in this round"
        if not self._voted:
            return "no votes have come: put update-clip-client into client_opt, as last module"
        if round_.average is None:
            return (
                "the updates were not averaged by 'clipped-averaging': set aggregator = "
                "'clipped-averaging', and no fairness, which brings an aggregator of its own"
            )
        if self.budget is not None:
            if round_.trouble:
                return f"{round_.trouble}, and noise can not be sized on the rest"
            if gradients is not round_.average:
                return (
                    "another module or regularizer changes the average before noise is added: "
                    "put update-clip-server first"
                )
        return ""

    # -- its parts ----------------------------------------------------------------------------
    def _halt(self, sentence: str) -> None:
        """Remember why to stop; the next message tells the clients, which report it."""
        self._stop = self._stop or sentence

    def _count(self, aux_var: UpdateClipVotes) -> tuple[int, float | None]:
        """Return the number of votes, and the share of updates within the bound."""
        votes, within, clients = aux_var.n_votes, aux_var.n_within, aux_var.n_clients
        if self.learning_rate == 0:
            return 0, None
        if self.budget is not None:
            noise = self.budget.noise_on_votes(self.round)
            return votes, share_within(votes, within, self.expected_clients, noise)
        if not 0 <= within <= votes <= clients:
            _LOGGER.warning(
                "update-clip-server: %d of %d votes from %d clients can not be right, and are not "
                "counted",
                within,
                votes,
                clients,
            )
            return 0, None
        return votes, share_within(votes, within, None, 0.0)

    def _report(self, aux_var: UpdateClipVotes, votes: int, share: float | None) -> None:
        assert self._round is not None
        parts = [f"update-clip-server: round {self.round}, bound {self._round.bound:.4g}"]
        if share is not None:
            parts.append(f"{share:.0%} of the updates within it, next bound {self.bound:.4g}")
        if self._withheld:
            parts.append("the search has found it too high: the average is not released")
        elif self.search is not None:
            parts.append("the search goes on")
        if self.budget is not None:
            parts.append(f"epsilon {self.epsilon:.4g} at delta {self.delta:g}")
        elif share is not None and votes < aux_var.n_clients:
            parts.append(f"{aux_var.n_clients - votes} of {aux_var.n_clients} clients abstained")
        _LOGGER.info("%s", "; ".join(parts))
        if 0 < aux_var.n_faults <= aux_var.n_clients:
            senders = ", ".join(map(repr, faulty_senders(self.aux_name)[:5]))
            _LOGGER.warning(
                "update-clip-server: no proper vote in %d of %d replies%s; taken as abstention",
                aux_var.n_faults,
                aux_var.n_clients,
                f" (of {senders})" if senders else "",
            )

    # -- configuration and state ----------------------------------------------------------------
    def get_state(self) -> dict[str, Any]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        spent = [] if self.budget is None else self.budget.accountant.get_state()
        search = None if self.search is None else list(self.search)
        return {"bound": self.bound, "round": self.round, "spent": spent, "search": search}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` returned; what this module has spent stays spent.

        Raises
        ------
        StateError
            If anything is missing or not valid. The module then keeps its old state.
        """
        if not isinstance(state, Mapping) or not {"bound", "round", "spent"} <= set(state):
            raise StateError(f"the state must have bound, round and spent, got {state!r:.200}")
        try:
            bound = parameters.positive(bound=state["bound"])
            round_ = parameters.integer(0, round=state["round"])
        except (TypeError, ValueError) as exc:
            raise StateError(str(exc)) from exc
        search = _search_of(state.get("search"))
        spent = Budget.check_state(state["spent"], self.budget)
        self.search = search
        self.bound, self.round = self.rule.within(bound), round_
        if self.budget is not None:
            self.budget.accountant.set_state(spent)
        self._stop = ""


def _search_of(state: Any) -> Search | None:
    """Return the state of a search; None if there is none."""
    match state:
        case None:
            return None
        case [float() as step, int() as direction, bool() as turned] if (
            0 < step <= Search().step and direction in (-1, 0, 1)
        ):
            return Search(step, direction, turned)
    raise StateError(f"'search' must be None or [step, direction, turned], got {state!r:.100}")
