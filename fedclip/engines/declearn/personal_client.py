# SPDX-License-Identifier: Apache-2.0
"""The client of a federation whose model has personal layers: it trains all, and shares the rest.

::

    Start:   refuse a server that shares what this client keeps; take up the layers kept before
    Round:   weights = the server's, and this client's own layers
             steps on all of them, by the model as it is
             keep the layers in a file; share the update without them
             refuse to send what names one of them

While it trains, the model is one of declearn's own: optimizers, weight decay, FedProx and DP-SGD
see all of its weights.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from declearn import messaging
from declearn.aggregator import Aggregator, ModelUpdates
from declearn.main import FederatedClient
from declearn.messaging import Error, EvaluationReply, Message, StopTraining, TrainReply
from declearn.model.api import Vector
from declearn.training import TrainingManager
from declearn.utils.serialize import msgpack_dump, msgpack_load

from fedclip.arrays.frozen import unused
from fedclip.core.parameters import Config
from fedclip.core.scopes import check_exclude, resolve
from fedclip.engines.declearn import personal as models
from fedclip.engines.declearn.aggregator import RAISES, ClippedAveraging
from fedclip.engines.declearn.context import SHARED
from fedclip.engines.declearn.evaluation import clipped
from fedclip.engines.declearn.generics import AnyModel, AnyVector
from fedclip.engines.declearn.personal import PersonalModel, chosen, listed, merged, part
from fedclip.engines.declearn.quorum import untold
from fedclip.engines.declearn.site import GatedNetwork
from fedclip.engines.declearn.update_client import UpdateClipClient
from fedclip.engines.declearn.update_norms import UpdateNorms
from fedclip.errors import StateError
from fedclip.privacy.guarantees import Plugin
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy
from fedclip.updates.client_noise import UNENCRYPTED, SiteNoise

Request: TypeAlias = messaging.TrainRequest | messaging.EvaluationRequest

FILE = "personal_layers.mpk"
"""The file of a client's own layers, in its folder of checkpoints."""


class PersonalFederatedClient(FederatedClient):
    """declearn's `FederatedClient`, for models with personal layers and without.

    Parameters
    ----------
    *args, **settings
        As `FederatedClient` takes them.
    personal : pattern, list of patterns or None, default=None
        Tensors that this client never sends, whatever the server's model says, as in
        `PersonalModel`. A server that shares one of them is refused before the first step.
    layers : path or None, default=None
        File in which this client's own layers are kept over restarts. None:
        ``personal_layers.mpk`` in the folder of `checkpoint`; without either, they are lost when
        the process ends, and a warning says so.
    policy : path or None, default=None
        File of what may leave this site, whatever the server asks for: `Policy` in
        `fedclip.site.policy`. It takes no secure aggregation beside it.
    noise : table or None, default=None
        The noise with which this client shares updates: the table `noise` of `update-clip-client`.
        It takes `secagg`: without secure aggregation, a client with noise is refused.
        A server that sets up another noise, or none, or modules that share more, is refused before
        the first step.

    Notes
    -----
    Guarantee: no update and no auxiliary variable that leaves this client has a tensor that
    `personal` names, here or in the server's model. Its values go into what else is sent: the
    update of the other layers, losses and metrics, counts of gradients' norms.

    The norm of each update is noted by `update-norms`, among the modules of the client's own
    optimizer, and stays in its folder of checkpoints.
    """

    measures = True
    """Whether the norms of updates may be noted."""

    def __init__(
        self,
        *args: Any,
        personal: str | Sequence[str] | None = None,
        layers: str | Path | None = None,
        policy: str | Path | None = None,
        noise: Config | None = None,
        **settings: Any,
    ) -> None:
        self.noise = None if noise is None else SiteNoise(**noise).get_config()
        self.personal = check_exclude(personal, "personal") or []
        self._manager: TrainingManager | None = None
        # The server's model, if it has personal layers.
        self._kept: PersonalModel | None = None
        # Its layers at the start of the round.
        self._before: AnyVector | None = None
        # Read before anything could be sent.
        gate = None if policy is None else Gate(Policy.read(policy))
        super().__init__(*args, **settings)
        if self.noise is not None and self.secagg is None:
            raise ValueError(UNENCRYPTED)
        self._gated: GatedNetwork | None = None
        if gate is not None:
            if self.secagg is not None:
                raise ValueError(
                    "secagg hides what leaves from the site's policy: leave one of them out"
                )
            self.netwk = self._gated = GatedNetwork(self.netwk, gate)
        self.layers = None if layers is None else Path(layers)
        if self.layers is None and self.ckptr is not None:
            self.layers = Path(self.ckptr.folder) / FILE

    @property
    def trainmanager(self) -> TrainingManager | None:
        """What trains and evaluates; None before the server has sent a model."""
        return self._manager

    @trainmanager.setter
    def trainmanager(self, manager: TrainingManager | None) -> None:
        # declearn reports to the server what is raised where this is set.
        if manager is not None:
            self._adapt(manager)
        self._manager = manager

    def _adapt(self, manager: TrainingManager) -> None:
        """Let a manager train the model within, and share what is shared."""
        aggregator, modules = _aggregator_of(manager), manager.optim.modules
        if self.noise is not None:
            self._demand(self.noise, aggregator, modules)
        if self._gated is not None:
            self._gated.check(aggregator, modules)
        if self.measures:
            self._measure(manager)
        if self._kept is None or manager.model is not self._kept.model:
            self._kept = self._agreed(manager.model)
            if wrong := models.astray(self._kept or manager.model):
                self.logger.warning("%s.", wrong)
            if self._kept is not None:
                self._refuse_counts(self._kept, modules)
                self._restore(self._kept)
                sharing: Any = _Sharing(manager.aggrg, self._kept, self._store)
                manager.model, manager.aggrg = self._kept.model, sharing
        # Of its own errors, DP-SGD keeps back what may tell of records.
        if _adds_noise(modules) and not hasattr(manager, "make_private"):
            for name, work in (("train", "training"), ("evaluate", "evaluation")):
                name += "_under_constraints"
                hidden = untold(self.logger, f"the {work}")
                setattr(manager, name, hidden(getattr(manager, name)))
        for name in ("training_round", "evaluation_round"):
            setattr(manager, name, partial(self._round, manager.model, getattr(manager, name)))

    @staticmethod
    def _demand(noise: Config, aggregator: object, modules: Sequence[Plugin]) -> None:
        """Refuse a server that has other noise set up than this site wants."""
        found = [module.noise for module in modules if isinstance(module, UpdateClipClient)]
        if found != [noise] or not isinstance(aggregator, ClippedAveraging):
            raise ValueError(
                f"this site shares updates with noise = {noise} only, by 'clipped-averaging' and "
                f"one update-clip-client; the server sets up {found}"
            )
        for module in modules:
            if module.aux_name not in (None, UpdateClipClient.aux_name):
                raise ValueError(
                    f"this site shares updates with noise, and {module.name!r} would share "
                    "statistics without: leave it out of client_opt"
                )

    def _refused(self, why: str) -> Error:
        """Log why a round is refused, and return what the server is told."""
        self.logger.error("Refused: %s.", why)
        return Error(f"refused by fedclip: {why}")

    def _uncovered(self) -> str:
        """Return why this client's own noise does not cover what it would share; "" if it does."""
        assert self._manager is not None
        aggregator = _aggregator_of(self._manager)
        if not _adds_noise(self._manager.optim.modules):
            return ""
        if not isinstance(aggregator, ClippedAveraging):
            return "noise from the clients goes with the aggregator 'clipped-averaging'"
        return RAISES if aggregator.on_nonfinite == "raise" else aggregator.closing.beside_noise()

    def _measure(self, manager: TrainingManager) -> None:
        """Have the norms of updates noted, unless somebody does."""
        if any(isinstance(module, UpdateNorms) for module in manager.optim.modules):
            return
        aggregator: Any = manager.aggrg
        norms, within = UpdateNorms(), aggregator.prepare_for_sharing
        of = isinstance(aggregator, ClippedAveraging) and aggregator.scope == "global"
        bound = aggregator.max_norm if of and not aggregator.exclude else None
        manager.optim.modules.append(norms)

        def prepare(updates: AnyVector, n_steps: int) -> object:
            # Under DP-SGD, nothing is written that was not noised.
            if n_steps and not hasattr(self._manager, "make_private"):
                norms.measure(updates, bound)
            return within(updates=updates, n_steps=n_steps)

        aggregator.prepare_for_sharing = prepare

    def _agreed(self, model: AnyModel) -> PersonalModel | None:
        """Return the model, if it has personal layers; refuse one that shares this client's."""
        if lacking := models.unsent(model):
            raise ValueError(lacking)
        own = chosen(self.personal, model.get_weights().coefs)
        within: AnyModel = model.model if isinstance(model, PersonalModel) else model
        if self.personal and not own & within.get_weights(trainable=True).coefs.keys():
            why = f"the server's model trains none of {listed(own)}, which this client keeps"
            raise ValueError(f"{why}: has what is meant another name there?")
        if asked := own & model.get_weights(trainable=True).coefs.keys():
            raise ValueError(
                f"the server's model shares {listed(asked)}, which this client keeps for itself: "
                f"the server has to wrap it, fedclip.PersonalModel(model, {self.personal})"
            )
        if not isinstance(model, PersonalModel):
            return None
        names = [*dict.fromkeys([*model.personal, *self.personal])]
        kept = PersonalModel(model.model, names, frozen_batchnorm=model.frozen_batchnorm)
        kept.check()
        if kept.own:
            self.logger.info("Personal layers, which stay on this client: %s.", listed(kept.own))
        if kept.own and self.layers is None:
            why = "neither layers nor checkpoint is given"
            self.logger.warning("Its own layers are lost when the process ends: %s.", why)
        return kept

    @staticmethod
    def _refuse_counts(kept: PersonalModel, modules: Sequence[Plugin]) -> None:
        """Refuse to count, for the server, the norms of groups of which it knows nothing."""
        names = [*kept.model.get_weights(trainable=True).coefs]
        for module in (m for m in modules if getattr(m, "shared", False)):
            groups = resolve(module.scope, module.exclude, names)
            for label, members in zip(groups.labels, groups.members, strict=True):
                if kept.own.issuperset(groups.names[i] for i in members):
                    raise ValueError(
                        f"{module.name} has shared = true and a group {label!r}, which stays on "
                        'each client: give it scope = "global", or exclude that group'
                    )

    def _restore(self, kept: PersonalModel) -> None:
        """Take up the layers that were kept before, if there are any."""
        if not kept.own or self.layers is None or not self.layers.exists():
            return
        weights, wanted = kept.get_weights(), _own(kept).shapes()
        try:
            found = msgpack_load(str(self.layers))
            shapes = found.shapes()
        except Exception as exc:  # a damaged file may hold anything
            raise StateError(f"{self.layers} can not be read as layers: {exc!r:.200}") from None
        if not isinstance(found, type(weights)) or shapes != wanted:
            raise StateError(
                f"{self.layers} holds {shapes}, and this model's own layers are {wanted}: is it "
                "of another model? Give another file as layers"
            )
        kept.set_weights(type(weights)({**weights.coefs, **found.coefs}))
        self.logger.info("Going on with this client's own layers of %s.", self.layers)

    def _store(self, kept: PersonalModel) -> None:
        """Keep the layers, so that a crash leaves those of this round or of the last one."""
        own, before = _own(kept), self._before
        if before is not None and _is_finite(before) and not _is_finite(own):
            kept.set_weights(type(own)({**kept.get_weights().coefs, **before.coefs}))
            self.logger.warning("Its own layers came to NaN or infinity: the last ones are kept.")
        elif kept.own and self.layers is not None:
            self.layers.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.layers.with_name(f"{self.layers.name}.new")
            msgpack_dump(own, str(fresh))
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(self.layers)

    def _round(
        self, model: AnyModel, run: Callable[[Request], Message], message: Request
    ) -> Message:
        """Run a round with the server's weights and this client's own layers."""
        own = frozenset() if self._kept is None else self._kept.own
        why = self._uncovered() if isinstance(message, messaging.TrainRequest) else ""
        if message.weights is not None:
            try:
                message.weights = merged(model, own, message.weights)
            except (TypeError, ValueError) as exc:
                why = str(exc)
        if why:
            return self._refused(why)
        self._before = None if self._kept is None else _own(self._kept)
        token = SHARED.set((model if self._kept is None else self._kept, self._encrypter))
        try:
            reply = run(message)
        finally:
            SHARED.reset(token)
        if isinstance(reply, EvaluationReply) and self._encrypter is not None:
            shown = reply if self.share_metrics else dataclasses.replace(reply, metrics={})
            beyond, why = clipped(shown, limit := self._encrypter.quantizer.val_range)
            if why:
                return self._refused(why)
            if beyond:
                text = "Sums over records of %s are clipped to the range ±%g of secure aggregation."
                self.logger.warning(text, listed(beyond), limit)
        if isinstance(reply, Error):
            if idle := unused(model.get_wrapped_model()):
                what = f"{listed(idle)} of the model are trained, and not used by it: freeze them"
                reply = Error(f"{what}, requires_grad_(False), before the run ({reply.message})")
            if any(re.search(rf"(?<![\w.]){re.escape(n)}(?![\w.])", reply.message) for n in own):
                return Error("an error that names layers which stay on this client; its log has it")
            return reply
        sent = [reply.updates, reply.aux_var] if isinstance(reply, TrainReply) else []
        if told := _named(sent, own):
            self.logger.error("Not sent, as it names %s, which stay here.", listed(told))
            why = "modules that share gradients, such as scaffold, do not go with personal layers"
            return Error(f"refused by fedclip: {why}")
        return reply

    async def stop_training(self, message: StopTraining) -> None:
        """Take the final weights, and leave this client's own layers as they are."""
        if self._kept is not None:
            last = self._kept.get_weights(trainable=True)
            if self._kept.own and message.weights != last:
                why = "are of declearn's best round, and this client's own layers of the last one"
                self.logger.warning("The final weights %s: not evaluated together.", why)
            message.weights = self._kept.whole(message.weights)
        await super().stop_training(message)

    async def _initialize_fairness(self) -> None:
        if self._kept is not None:
            why = "fairness replaces what keeps personal layers back: leave [run.fairness] out"
            await self.netwk.send_message(self._refused(why))
            raise RuntimeError(why)
        await super()._initialize_fairness()


class _Sharing(NamedTuple):
    """The aggregator of a client, to which only what is shared of an update is given."""

    aggregator: Aggregator[ModelUpdates]
    kept: PersonalModel
    store: Callable[[PersonalModel], None]

    def prepare_for_sharing(self, updates: AnyVector, n_steps: int) -> ModelUpdates:
        """Keep the layers before anything is sent, and prepare the rest."""
        self.store(self.kept)
        shared = self.kept.shared(updates)
        return self.aggregator.prepare_for_sharing(updates=shared, n_steps=n_steps)


def _aggregator_of(manager: TrainingManager) -> object:
    within = manager.aggrg
    return within.aggregator if isinstance(within, _Sharing) else within


def _adds_noise(modules: Sequence[Plugin]) -> bool:
    return any(isinstance(module, UpdateClipClient) and module.site for module in modules)


def _own(kept: PersonalModel) -> AnyVector:
    return part(kept.get_weights(), sorted(kept.own))


def _is_finite(vector: AnyVector) -> bool:
    # NaN, as of infinity times 0, is not equal to itself, in any framework.
    return bool(vector * 0 == vector * 0)


def _named(value: object, names: frozenset[str]) -> set[str]:
    """Return the names that occur in a part of a message."""
    if isinstance(value, str):
        return {value} & names
    if isinstance(value, Vector):
        return value.coefs.keys() & names
    if dataclasses.is_dataclass(value):
        value = [*vars(value).values()]
    elif isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        return {name for one in value for name in _named(one, names)}
    return set()
