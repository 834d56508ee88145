# SPDX-License-Identifier: Apache-2.0
"""`update-clip-client` and `update-clip-server`: a bound that follows the update norms."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from declearn.model.api import Vector
from declearn.optimizer.modules import AuxVar, OptiModule

from fedclip import parameters
from fedclip.errors import StateError
from fedclip.federation.senders import faulty_senders
from fedclip.federation.update.coupling import CLIENT, OPENED, SERVER, ClientRound, ServerRound
from fedclip.federation.update.messages import zeros_like
from fedclip.privacy import kinds
from fedclip.privacy.accounting import Accountant, default_bits_noise, split_noise
from fedclip.privacy.noise import Normals, add_noise, insecure_normals, secure_normals
from fedclip.records import Recorder, RoundRecord, read_rounds

__all__ = [
    "UpdateClipBound",
    "UpdateClipClient",
    "UpdateClipServer",
    "UpdateClipVotes",
    "next_bound",
]

AUX_NAME = "update-clip"

_LOGGER = logging.getLogger("declearn.server.fedclip")
_MANY_ROUNDS = 10**6


def next_bound(bound: float, share: float, quantile: float, learning_rate: float) -> float:
    """Return the bound after a round in which a `share` of the updates was within it.

    The share is of those that were *not* clipped: more of them than `quantile`, and the bound
    comes down.
    """
    return bound * math.exp(-learning_rate * (min(max(share, 0.0), 1.0) - quantile))


@dataclass
class UpdateClipBound(AuxVar):
    """What the server tells each client at the start of a round.

    Attributes
    ----------
    bound
        Largest norm of this round's update.
    adaptive
        Whether the server wants to know which updates were within it.
    private
        Whether noise is added.
    stop
        Why training has to end, as a sentence; empty as long as it need not.
    """

    bound: float
    adaptive: bool = True
    private: bool = False
    stop: str = ""

    def prepare_for_secagg(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Refuse: the server sends this to everybody, and clients do not send it at all."""
        raise NotImplementedError("UpdateClipBound goes from the server to its clients only")


@dataclass
class UpdateClipVotes(AuxVar):
    """What a client tells the server of its update, or the sum over clients.

    Four ints >= 0 each round, whatever happened: a secure sum takes no less.

    Attributes
    ----------
    n_clients
        1 for each client.
    n_votes
        1 if the client has an update to speak of: it took a step, and the update is finite.
    n_within
        1 if that update was within the bound.
    n_faults
        Replies that made no sense; set where they arrive, not by clients.
    """

    n_clients: int = 1
    n_votes: int = 0
    n_within: int = 0
    n_faults: int = 0

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> UpdateClipVotes:
        """Return a client's votes; an abstention, counted, if they are not one client's.

        An exception here would be one in the server's loop, which would never end.
        """
        votes = [data.get(key) for key in ("n_clients", "n_votes", "n_within")]
        if all(type(n) is int for n in votes) and votes in ([1, 0, 0], [1, 1, 0], [1, 1, 1]):
            return cls(*votes)
        return cls(n_faults=1)

    def aggregate(self, other: Any) -> UpdateClipVotes:
        """Return the sum; what is of another type is an abstention, counted."""
        if not isinstance(other, UpdateClipVotes):
            other = UpdateClipVotes(n_faults=1)
        mine, others = asdict(self), asdict(other)
        return UpdateClipVotes(**{key: mine[key] + others[key] for key in mine})

    def __radd__(self, other: Any) -> UpdateClipVotes:
        """Add to 0, as declearn does, or to what a client sent of another type."""
        return self if isinstance(other, int) and not other else self.aggregate(other)


class UpdateClipClient(OptiModule):  # type: ignore[type-arg]
    """Bring the bound of this round to `clipped-averaging`, and the vote back.

    ::

        Start of a round:  receive C
        Steps:             nothing; gradients pass as they are
        End of the round:  the aggregator has clipped the update to C
                           vote 1 if norm(update) <= C, else 0; none without an update

    It has no parameters: all of them are the server's. Its counterpart is `update-clip-server`,
    and it needs the aggregator `clipped-averaging` without `max_norm`.

    Raises
    ------
    RuntimeError
        Where it can be reported to the server: if the server sends no bound, or has decided to
        stop; if the aggregator is another.

    Notes
    -----
    A client that took no step, or whose update is not finite, abstains: its zeros would count
    as "within the bound" and drag it down, round by round. An update that is zeroed because it
    is out of range counts as above the bound: otherwise a bound that is far too low, and has
    everything zeroed, would stay there. Of the update, the server learns that one bit and,
    without noise, whether it was clipped or zeroed.

    Reports of the rounds (norm before, bound, clipped or not) stay on the client.

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
    guarantee = kinds.unchanged
    aux_name: ClassVar[str] = AUX_NAME
    auxvar_cls = UpdateClipVotes

    def __init__(self) -> None:
        self._round: ClientRound | None = None
        self._adaptive = True
        self._recorder = Recorder()

    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        """Return the gradients: it is the round's update that is clipped."""
        return gradients

    def process_aux_var(self, aux_var: Any) -> None:
        """Receive the bound of this round."""
        self._round = None
        CLIENT.set(None)
        if not isinstance(aux_var, UpdateClipBound):
            raise TypeError(
                f"update-clip-client takes its bound from update-clip-server, got "
                f"{type(aux_var).__name__}: another module uses the name {AUX_NAME!r}"
            )
        if aux_var.stop:
            raise RuntimeError(f"update-clip-server stops the training: {aux_var.stop}")
        bound = parameters.positive(bound=aux_var.bound)
        self._round = ClientRound(bound, private=bool(aux_var.private))
        self._adaptive = bool(aux_var.adaptive)
        CLIENT.set(self._round)

    def on_round_start(self) -> None:
        """Begin a round, for which there must be a bound."""
        if self._round is None:
            raise RuntimeError(
                "update-clip-client has received no bound: put update-clip-server into "
                "server_opt, and update-clip-client into client_opt once only"
            )
        self._recorder.start_round()

    def collect_aux_var(self) -> UpdateClipVotes | None:
        """Return this client's vote; None outside of a round, which begins with a bound."""
        round_, self._round = self._round, None
        CLIENT.set(None)
        if round_ is None:
            return None
        if not round_.done:
            raise RuntimeError(
                "update-clip-client goes with the aggregator 'clipped-averaging', and the update "
                "of this round went past it, unclipped: set aggregator = 'clipped-averaging'"
            )
        if round_.norm is None:
            return UpdateClipVotes()
        self._recorder.add(("all",), round_.norm, round_.bound, round_.clipped)
        if not self._adaptive:
            # A bit that nobody needs is not sent.
            return UpdateClipVotes()
        return UpdateClipVotes(n_votes=1, n_within=int(not round_.clipped))

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened to the updates of the last rounds."""
        return self._recorder.rounds()

    def get_config(self) -> dict[str, Any]:
        """Return no parameters."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Return the records of the rounds."""
        return self._recorder.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over the records of the rounds."""
        round_ = state.get("round") if isinstance(state, Mapping) else None
        if isinstance(round_, bool) or not isinstance(round_, int) or round_ < 0:
            raise StateError(f"'round' must be an int >= 0, got {round_!r}")
        self._recorder.set_state(round_, read_rounds(state))


class UpdateClipServer(OptiModule):  # type: ignore[type-arg]
    """A bound of the clients' updates that follows a quantile of their norms; central noise.

    ::

        Init(start_norm):
            C = start_norm
        Round:
            send C                             clients clip to C and vote: b = (norm <= C)
            u    = sum of the updates / m
            b    = sum(b - 1/2) / m + 1/2      clamped to [0, 1]
            if noise_multiplier = z > 0:       m is fixed: expected_clients
                u += z_delta * C / m * normal,   z_delta = (z^-2 - (2 bits_noise)^-2)^(-1/2)
                b += bits_noise / m * normal   (before it is clamped)
            C    = C * exp(-learning_rate * (b - quantile)),   within [min_norm, max_norm]

    Its counterpart is `update-clip-client`; both need the aggregator `clipped-averaging`
    without `max_norm`. With noise it has to come first in the server's modules.

    Parameters
    ----------
    start_norm : float, default=0.1
        Bound of the first round, > 0.
    quantile : float, default=0.5
        Share of the updates that the bound should leave alone, in (0, 1).
    learning_rate : float, default=0.2
        How fast the bound moves: by a factor of at most ``exp(± learning_rate)`` a round; from
        10 times below, 23 rounds at the median. 0 fixes the bound, and clients do not vote.
    min_norm, max_norm : float, default=1e-6 and 1e4
        Bounds on the bound, > 0. The upper one is well within the range of declearn's secure
        aggregation.
    noise_multiplier : float, default=0.0
        Standard deviation of the noise, as a multiple of the sensitivity, that a round is
        accounted with; 0 for no noise.
    bits_noise : float or None, default=None
        Standard deviation of the noise on the sum of the votes, > ``noise_multiplier / 2``.
        None: ``max(expected_clients / 20, noise_multiplier)``, which serves 3 clients as well
        as 1,000.
    expected_clients : int or None, default=None
        Number of clients a round that averages are divided by, whoever replies: needed with
        noise, where the true number must not be used.
    delta : float, default=1e-5
        Probability with which the guarantee may fail; below 1 / number of clients.
    max_epsilon : float or None, default=None
        Stop before a round that would exceed this.
    relation : {"add-remove", "replace-one"}, default="add-remove"
        Which federations the guarantee makes hard to tell apart: with and without one client
        (whose reply is empty), or with another in its place, which costs twice the noise.
    generator : {"secure", "insecure"}, default="secure"
        Where the noise comes from. The insecure one is for experiments.
    seed : int or None, default=None
        Makes the insecure noise repeatable.

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is not as above or settings are impossible; the message
        says which would do.
    ModuleNotFoundError
        If there is noise to account for, and no Opacus.

    Notes
    -----
    Guarantees: the noise is sized on the bound that was *sent out*, which the clients clipped
    to, not on the next one; votes are those of the unclipped, and norm equal to the bound is
    within it; the spent budget and the bound are part of the state, so that a server restarted
    from a checkpoint goes on with both; no round is run that would exceed `max_epsilon`.

    Without noise, the share is that of the clients that voted; if none did, the bound stays.
    With noise, an abstention counts as half a vote for either side.

    Nothing is raised on the server, where declearn would wait for its clients for ever. When
    the bound does not hold (another aggregator, a module before this one), the round's average
    becomes zero, the error is logged, and the next round ends at its start with that sentence
    on every client, and on the server.

    A share r of the clients that always lies moves the quantile that the bound settles on
    among the others from q to something between ``(q - r) / (1 - r)`` and ``q / (1 - r)``, and
    the bound by a factor of at most ``exp(learning_rate * r)`` a round.

    References
    ----------
    Andrew, Thakkar, McMahan & Ramaswamy, 2021, "Differentially private learning with adaptive
    clipping", arXiv:1905.03871.

    Examples
    --------
    >>> from fedclip.federation.update.bound import UpdateClipVotes
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

    def __new__(cls, *args: Any, **config: Any) -> Self:
        """Refuse unknown parameters, with the nearest name."""
        parameters.refuse_unknown(cls, config)
        return super().__new__(cls)

    def __init__(
        self,
        start_norm: float = 0.1,
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
    ) -> None:
        self.start_norm = parameters.positive(start_norm=start_norm)
        self.quantile = parameters.unit_interval(quantile=quantile)
        self.learning_rate = parameters.non_negative(learning_rate=learning_rate)
        self.min_norm = parameters.positive(min_norm=min_norm)
        self.max_norm = parameters.positive(max_norm=max_norm)
        if not self.min_norm <= self.start_norm <= self.max_norm:
            raise ValueError(
                f"start_norm must be within [min_norm, max_norm], got {start_norm!r} and "
                f"[{min_norm!r}, {max_norm!r}]"
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
        self.bound = self.start_norm
        self.round = 0
        self._round: ServerRound | None = None
        self._voted = False
        self._stop = ""
        self._accountant: Accountant | None = None
        self._set_up_noise()

    def _set_up_noise(self) -> None:
        z, clients = self.noise_multiplier, self.expected_clients
        if z == 0:
            given = {"bits_noise": self.bits_noise, "max_epsilon": self.max_epsilon}
            for name, value in given.items():
                if value:
                    raise ValueError(f"{name} goes with noise_multiplier > 0, got {value!r} with 0")
            self._update_noise = self._bits_noise = 0.0
            return
        if clients is None:
            raise ValueError(
                "noise_multiplier needs expected_clients, the number of clients in a round: the "
                "noise is sized on it, and the number that reply would itself tell something"
            )
        if self.learning_rate == 0:
            # No votes, so nothing to pay for them.
            self._update_noise, self._bits_noise = z, 0.0
        else:
            self._bits_noise = (
                default_bits_noise(z, clients) if self.bits_noise is None else self.bits_noise
            )
            self._update_noise = split_noise(z, self._bits_noise)
        self._accountant = Accountant(self.delta, self.relation)
        if self.max_epsilon is not None:
            first = self._accountant.epsilon(z, 1)
            if first > self.max_epsilon:
                raise ValueError(
                    f"one round with noise_multiplier={z!r} costs epsilon = {first:.4g} at "
                    f"delta={self.delta!r}, above max_epsilon={self.max_epsilon!r}: take "
                    f"noise_multiplier >= {self._enough_noise():g}"
                )

    def _enough_noise(self) -> float:
        """Return a noise multiplier with which one round is within the budget."""
        assert self._accountant is not None
        assert self.max_epsilon is not None
        z = self.noise_multiplier
        while self._accountant.epsilon(z, 1) > self.max_epsilon:
            z *= 1.01
        return math.ceil(100 * z) / 100

    @property
    def noise(self) -> float:
        """Noise multiplier of the update: z_delta."""
        return self._update_noise

    @property
    def epsilon(self) -> float:
        """What has been spent so far, at `delta`."""
        return 0.0 if self._accountant is None else self._accountant.epsilon()

    def rounds_left(self, most: int = _MANY_ROUNDS) -> int:
        """Return how many more rounds the budget allows, up to `most`."""
        if self._accountant is None or self.max_epsilon is None:
            return most
        return self._accountant.affordable(self.noise_multiplier, self.max_epsilon, most)

    # -- the round, in declearn's order ---------------------------------------------------------
    def collect_aux_var(self) -> UpdateClipBound:
        """Return the bound of the next round, or why there is none."""
        self._check_budget()
        opened = OPENED.get()
        # In the loop over modules that is one call before; None if it was in another life.
        if opened is not None and opened() not in (None, self):
            self._halt("there are two update-clip-server modules in server_opt: keep one")
        if self._stop:
            _LOGGER.error("update-clip-server stops the training: %s", self._stop)
        self._round = ServerRound(self.bound)
        self._voted = False
        if self._accountant is not None:
            self._round.clients = self.expected_clients
        OPENED.set(weakref.ref(self))
        return UpdateClipBound(
            self.bound, self.learning_rate > 0, self._accountant is not None, self._stop
        )

    def process_aux_var(self, aux_var: Any) -> None:
        """Count the votes: the next bound; the noise of this round stays with the one sent."""
        OPENED.set(None)
        if self._round is None:
            self._halt("votes have come without a bound having been sent")
            return
        if not isinstance(aux_var, UpdateClipVotes):
            self._halt(f"{type(aux_var).__name__} has come instead of votes")
            return
        self._voted = True
        SERVER.set(self._round)
        self.round += 1
        votes, within = self._plausible(aux_var)
        if self._accountant is not None:
            # Before anything is released.
            self._accountant.add(self.noise_multiplier)
        share = self._share(votes, within)
        if share is not None:
            moved = next_bound(self._round.bound, share, self.quantile, self.learning_rate)
            self.bound = min(max(moved, self.min_norm), self.max_norm)
        self._report(aux_var, votes, share)

    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        """Return the average with noise on it; zeros if the bound does not hold."""
        round_, self._round = self._round, None
        SERVER.set(None)
        trouble = self._trouble(round_, gradients)
        if trouble or round_ is None:
            self._halt(trouble)
            _LOGGER.error("update-clip-server: the round is void, %s", self._stop)
            return zeros_like(gradients)
        if self._accountant is None:
            return gradients
        std = self._update_noise * round_.bound / (self.expected_clients or 1)
        return type(gradients)(add_noise(gradients.coefs, std, self._normals(1)))

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
        if self._accountant is not None:
            if round_.trouble:
                return f"{round_.trouble}, and noise can not be sized on the rest"
            if gradients is not round_.average:
                return (
                    "another module or regularizer changes the average before noise is added: "
                    "put update-clip-server first"
                )
        return ""

    # -- parts of it ----------------------------------------------------------------------------
    def _check_budget(self) -> None:
        if self._accountant is None or self.max_epsilon is None or self._stop:
            return
        after = self._accountant.epsilon(self.noise_multiplier, 1)
        if after > self.max_epsilon:
            self._halt(
                f"the privacy budget is spent; epsilon is {self.epsilon:.4g} after "
                f"{self._accountant.rounds} rounds, and one more would make it {after:.4g}, above "
                f"max_epsilon = {self.max_epsilon:g}"
            )

    def _halt(self, sentence: str) -> None:
        """Remember why to stop; the clients are told, and report it, in the next round."""
        self._stop = self._stop or sentence

    def _plausible(self, aux_var: UpdateClipVotes) -> tuple[int, int]:
        """Return the votes, and those within the bound, as far as they can be true."""
        votes, within = aux_var.n_votes, aux_var.n_within
        most = aux_var.n_clients if self.expected_clients is None else self.expected_clients
        if type(votes) is int and type(within) is int and 0 <= within <= votes <= most:
            return votes, within
        _LOGGER.warning(
            "update-clip-server: %.30r of %.30r votes from %.30r clients can not be; they are "
            "not counted",
            within,
            votes,
            most,
        )
        return 0, 0

    def _share(self, votes: int, within: int) -> float | None:
        """Return the share of updates within the bound; None if nothing follows from it."""
        if self.learning_rate == 0:
            return None
        if self._accountant is None:
            return within / votes if votes else None
        noise = self._bits_noise * float(self._normals(0)(1)[0])
        share = (within - votes / 2 + noise) / (self.expected_clients or 1) + 0.5
        return min(max(share, 0.0), 1.0)

    def _normals(self, use: int) -> Normals:
        if self.generator == "secure":
            return secure_normals
        # By round, so that a run that is resumed continues as if it had not been interrupted.
        return insecure_normals(*(() if self.seed is None else (self.seed, self.round, use)))

    def _report(self, aux_var: UpdateClipVotes, votes: int, share: float | None) -> None:
        assert self._round is not None
        parts = [f"update-clip-server: round {self.round}, bound {self._round.bound:.4g}"]
        if share is not None:
            parts.append(f"{share:.0%} of the updates within it, next bound {self.bound:.4g}")
        if self._accountant is not None:
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
    def get_config(self) -> dict[str, Any]:
        """Return the parameters, as they would be written in a TOML file."""
        return parameters.config_of(self)

    def get_state(self) -> dict[str, Any]:
        """Return the bound, the number of rounds, and what was spent of the budget."""
        spent = [] if self._accountant is None else self._accountant.get_state()
        return {"bound": self.bound, "round": self.round, "spent": spent}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that `get_state` returned.

        Raises
        ------
        StateError
            If anything is missing or can not be. The state is then what it was before.
        """
        if not isinstance(state, Mapping) or not {"bound", "round", "spent"} <= set(state):
            raise StateError(f"the state must have bound, round and spent, got {state!r:.200}")
        try:
            bound = parameters.positive(bound=state["bound"])
            round_ = parameters.integer(0, round=state["round"])
        except (TypeError, ValueError) as exc:
            raise StateError(str(exc)) from exc
        spent = Accountant.check_state(state["spent"])
        if spent and self._accountant is None:
            raise StateError(
                "the state has spent a privacy budget, and this update-clip-server adds no noise: "
                "what it releases would void the guarantee; give it its noise_multiplier"
            )
        self.bound, self.round = min(max(bound, self.min_norm), self.max_norm), round_
        if self._accountant is not None:
            self._accountant.spent = spent
        self._stop = ""
