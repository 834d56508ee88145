# SPDX-License-Identifier: Apache-2.0
"""The client of a federation whose model has personal layers: it trains all, and shares the others.

::

    Start:   refuse a server that shares a personal layer; load the layers of the last run
    Round:   weights = the server's, and this client's personal layers
             steps on all of them
             save the layers to a file; share the update without them
             refuse to send a message that names one of them

While it trains, the model is the one that `PersonalModel` wraps: optimizers, weight decay, FedProx
and DP-SGD see all of its weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from declearn import messaging
from declearn.main import FederatedClient
from declearn.messaging import Error, EvaluationReply, Message, StopTraining, TrainReply
from declearn.model.api import Vector
from declearn.training import TrainingManager
from declearn.utils.serialize import msgpack_dump, msgpack_load

from fedclip.core.parameters import Config
from fedclip.core.scopes import check_exclude, resolve
from fedclip.engines.declearn import personal as personal_layers
from fedclip.engines.declearn.aggregator import RAISES, ClippedAveraging
from fedclip.engines.declearn.context import AnyModel, AnyVector, change
from fedclip.engines.declearn.evaluation import beyond_range
from fedclip.engines.declearn.members import untold
from fedclip.engines.declearn.personal import PersonalModel, listed
from fedclip.engines.declearn.site import GatedNetwork
from fedclip.engines.declearn.update_modules import UpdateClipClient, UpdateNorms
from fedclip.errors import StateError
from fedclip.privacy.guarantees import Plugin
from fedclip.site.gate import Gate
from fedclip.site.policy import Policy
from fedclip.updates.client_noise import UNENCRYPTED, SiteNoise

Request: TypeAlias = messaging.TrainRequest | messaging.EvaluationRequest
Round: TypeAlias = Callable[[Request], Message]

FILE = "personal_layers.mpk"
"""The file of a client's personal layers, in its folder of checkpoints."""


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
        File that keeps this client's personal layers over restarts. None:
        ``personal_layers.mpk`` in the folder of `checkpoint`. Without either, the layers are lost
        when the process ends, and you get a warning.
    policy : path or None, default=None
        File of what may leave this site, whatever the server asks for: `Policy` in
        `fedclip.site.policy`. It does not go with secure aggregation.
    noise : table or None, default=None
        The noise with which this client shares updates: the table `noise` of `update-clip-client`.
        It needs `secagg`: without secure aggregation, a client with noise is refused.
        A server that sets up another noise, or none, or modules that share more, is refused before
        the first step.

    Notes
    -----
    Guarantee: no update and no auxiliary variable that leaves this client has a tensor that
    `personal` names, here or in the server's model. Its values influence the other values that are
    sent: the update of the other layers, losses and metrics, counts of gradients' norms.

    The module `update-norms` in the client's optimizer records the norm of each update, which
    stays in the client's folder of checkpoints.
    """

    measures = True
    """Whether the norms of updates may be recorded."""

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
        self._model: PersonalModel | None = None
        # Its layers at the start of the round.
        self._before: AnyVector | None = None
        # Read before anything could be sent.
        gate = None if policy is None else Gate(Policy.read(policy))
        super().__init__(*args, **settings)
        if self.noise is not None and self.secagg is None:
            raise ValueError(UNENCRYPTED)
        if gate is not None:
            if self.secagg is not None:
                raise ValueError("secagg hides what leaves from a policy: leave one of them out")
            self.netwk = GatedNetwork(self.netwk, gate)
        self.layers = None if layers is None else Path(layers)
        if self.layers is None and self.ckptr is not None:
            self.layers = Path(self.ckptr.folder) / FILE

    @property
    def trainmanager(self) -> TrainingManager | None:
        """The object that trains and evaluates; None before the server has sent a model."""
        return self._manager

    @trainmanager.setter
    def trainmanager(self, manager: TrainingManager | None) -> None:
        # declearn reports to the server what is raised where this is set.
        if manager is not None:
            self._adapt(manager)
        self._manager = manager

    def _adapt(self, manager: TrainingManager) -> None:
        """Make a manager train the wrapped model, and share only what may leave."""
        aggregator, modules = manager.aggrg, manager.optim.modules
        if self.noise is not None:
            _demand(self.noise, aggregator, modules)
        if isinstance(self.netwk, GatedNetwork):
            self.netwk.check(aggregator, modules)
        if self._model is None or manager.model is not self._model.model:
            self._model = self._agreed(manager.model)
            for problem in personal_layers.statistics_problems(self._model or manager.model):
                self.logger.warning("%s.", problem)
            if self._model is not None:
                _refuse_counts(self._model, modules)
                self._restore(self._model)
                manager.model = self._model.model
        if self.measures and not any(isinstance(module, UpdateNorms) for module in modules):
            modules.append(UpdateNorms())
        vars(aggregator)["prepare_for_sharing"] = partial(self._share, manager)
        methods: Any = vars(manager)
        # DP-SGD hides its errors, which may reveal records, itself.
        if _adds_noise(modules) and not hasattr(manager, "make_private"):
            for verb, work in (("train", "training"), ("evaluate", "evaluation")):
                name = f"{verb}_under_constraints"
                methods[name] = untold(self.logger, f"the {work}")(getattr(manager, name))
        for name in ("training_round", "evaluation_round"):
            methods[name] = partial(self._round, manager, getattr(manager, name))

    def _refused(self, why: str) -> Error:
        """Log why a round is refused, and return the message for the server."""
        self.logger.error("Refused: %s.", why)
        return Error(f"refused by fedclip: {why}")

    def _share(self, manager: TrainingManager, updates: AnyVector, n_steps: int) -> object:
        """Save the layers before anything is sent; record and share the update without them."""
        of: Any = manager.aggrg
        if self._model is not None:
            self._store(self._model)
            updates = self._model.shared(updates)
        # Under DP-SGD, only noised values are written.
        if n_steps and not hasattr(manager, "make_private"):
            bounded = isinstance(of, ClippedAveraging) and of.scope == "global" and not of.exclude
            for module in manager.optim.modules:
                if type(module) is UpdateNorms:
                    module.measure(updates, (bounded and of.max_norm) or math.inf)
        return type(of).prepare_for_sharing(of, updates=updates, n_steps=n_steps)

    def _agreed(self, model: AnyModel) -> PersonalModel | None:
        """Return the model, if it has personal layers; refuse one that shares this client's."""
        for problem in personal_layers.frozen_problems(model):
            raise ValueError(problem.text)
        names = personal_layers.chosen(self.personal, model.get_weights().coefs)
        inner: AnyModel = model.model if isinstance(model, PersonalModel) else model
        if self.personal and not names & inner.get_weights(trainable=True).coefs.keys():
            text = f"the server's model trains none of {listed(names)}"
            raise ValueError(f"{text}: give personal the names of tensors that it trains")
        if shared := names & model.get_weights(trainable=True).coefs.keys():
            text = f"the server's model shares {listed(shared)}, which this client keeps: there,"
            raise ValueError(f"{text} write fedclip.PersonalModel(model, {self.personal})")
        if not isinstance(model, PersonalModel):
            return None
        patterns = [*dict.fromkeys([*model.personal, *self.personal])]
        agreed = PersonalModel(model.model, patterns, frozen_batchnorm=model.frozen_batchnorm)
        agreed.check()
        if agreed.own:
            self.logger.info("Personal layers, which stay on this client: %s.", listed(agreed.own))
        if agreed.own and self.layers is None:
            text = "The personal layers are lost when the process ends: give layers or checkpoint."
            self.logger.warning(text)
        return agreed

    def _restore(self, model: PersonalModel) -> None:
        """Load the personal layers of an earlier run, if there are any."""
        if not model.own or self.layers is None or not self.layers.exists():
            return
        weights, expected = model.get_weights(), _layers_of(model).shapes()
        try:
            saved = msgpack_load(str(self.layers))
            shapes = saved.shapes()
        except Exception as exc:  # a damaged file may hold anything
            raise StateError(f"{self.layers} cannot be read as layers: {exc!r:.200}") from None
        if not isinstance(saved, type(weights)) or shapes != expected:
            text = f"{self.layers} holds {shapes}, and this model has {expected}"
            raise StateError(f"{text}: if it belongs to another model, give another file as layers")
        model.set_weights(type(weights)({**weights.coefs, **saved.coefs}))
        self.logger.info("Going on with the personal layers of %s.", self.layers)

    def _store(self, model: PersonalModel) -> None:
        """Save the layers; a crash leaves the file of this round or of the last one."""
        layers, before = _layers_of(model), self._before
        if before is not None and _is_finite(before) and not _is_finite(layers):
            model.set_weights(type(layers)({**model.get_weights().coefs, **before.coefs}))
            self.logger.warning("Personal layers came to NaN or infinity: the last ones stay.")
        elif model.own and self.layers is not None:
            self.layers.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.layers.with_name(f"{self.layers.name}.new")
            msgpack_dump(layers, str(fresh))
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(self.layers)

    def _round(self, manager: TrainingManager, run: Round, message: Request) -> Message:
        """Run a round with the server's weights and this client's personal layers."""
        model = manager.model
        personal = frozenset() if self._model is None else self._model.own
        try:
            if isinstance(message, messaging.TrainRequest) and _adds_noise(manager.optim.modules):
                _check_covered(manager.aggrg)
            if message.weights is not None:
                message.weights = personal_layers.merged(model, personal, message.weights)
            self._before = None if self._model is None else _layers_of(self._model)
            change(sharing=(self._model or model, self._encrypter))
            reply = run(message)
            if isinstance(reply, EvaluationReply) and self._encrypter is not None:
                limit = self._encrypter.quantizer.val_range
                shared = reply if self.share_metrics else dataclasses.replace(reply, metrics={})
                if beyond := listed(beyond_range(shared, limit)):
                    text = "Sums over records of %s are clipped to the range ±%g of secure sums."
                    self.logger.warning(text, beyond, limit)
        except (NotImplementedError, TypeError, ValueError) as exc:
            return self._refused(str(exc))
        finally:
            change(sharing=None)
        if isinstance(reply, Error):
            if idle := personal_layers.unused(model.get_wrapped_model()):
                what = f"{listed(idle)} of the model are trained, and not used by it: freeze them"
                reply = Error(f"{what}, requires_grad_(False), before the run ({reply.message})")
            names = (rf"(?<![\w.]){re.escape(name)}(?![\w.])" for name in personal)
            if any(re.search(name, reply.message) for name in names):
                return Error("an error that names layers which stay on this client; its log has it")
        if isinstance(reply, TrainReply) and (leaks := _named(reply, personal)):
            self.logger.error("Not sent, as it names %s, which stay here.", listed(leaks))
            why = "modules that share gradients, such as scaffold"
            return Error(f"refused by fedclip: {why}, do not go with personal layers")
        return reply

    async def stop_training(self, message: StopTraining) -> None:
        """Take the final weights, and leave the personal layers unchanged."""
        if self._model is not None:
            if self._model.own and message.weights != self._model.get_weights(trainable=True):
                text = "the best round, and layers of the last one: not evaluated together"
                self.logger.warning("Final weights of %s.", text)
            message.weights = self._model.whole(message.weights)
        await super().stop_training(message)

    async def _initialize_fairness(self) -> None:
        if self._model is not None:
            why = "fairness would share the personal layers: leave [run.fairness] out"
            raise await self._refuse(why)
        await super()._initialize_fairness()

    async def _refuse(self, why: str) -> RuntimeError:
        """Send the server the reason; return the error that ends this client."""
        await self.netwk.send_message(self._refused(why))
        return RuntimeError(why)


def _demand(noise: Config, aggregator: object, modules: Sequence[Plugin]) -> None:
    """Refuse a server that sets up other noise than this site's."""
    set_up = [module.noise for module in modules if isinstance(module, UpdateClipClient)]
    if set_up != [noise] or not isinstance(aggregator, ClippedAveraging):
        needed = f"noise = {noise} only, by 'clipped-averaging' and one update-clip-client"
        raise ValueError(f"this site shares updates with {needed}; the server has {set_up}")
    for module in modules:
        if module.aux_name not in (None, UpdateClipClient.aux_name):
            raise ValueError(f"{module.name!r} would share statistics without noise: remove it")


def _check_covered(of: object) -> None:
    """Refuse an aggregator with which noise would not cover all that a client shares."""
    if not isinstance(of, ClippedAveraging):
        raise ValueError("noise from the clients needs the aggregator 'clipped-averaging'")
    if why := RAISES if of.on_nonfinite == "raise" else of.aggregation.unfit_for_noise():
        raise ValueError(why)


def _refuse_counts(model: PersonalModel, modules: Sequence[Plugin]) -> None:
    """Refuse to count, for the server, the norms of groups that it does not have."""
    names = [*model.model.get_weights(trainable=True).coefs]
    for module in (m for m in modules if getattr(m, "shared", False)):
        groups = resolve(module.scope, module.exclude, names)
        for label, members in zip(groups.labels, groups.members, strict=True):
            if model.own.issuperset(groups.names[i] for i in members):
                text = f"{module.name} is shared, and its group {label!r} stays on each client"
                raise ValueError(f'{text}: give it scope = "global", or exclude that group')


def _adds_noise(modules: Sequence[Plugin]) -> bool:
    return any(isinstance(module, UpdateClipClient) and module.site for module in modules)


def _layers_of(model: PersonalModel) -> AnyVector:
    return personal_layers.part(model.get_weights(), sorted(model.own))


def _is_finite(vector: AnyVector) -> bool:
    # NaN, as of infinity times 0, is not equal to itself, in any framework.
    return bool(vector * 0 == vector * 0)


def _named(value: object, names: frozenset[str]) -> set[str]:
    """Return the names that occur in a part of a message."""
    if isinstance(value, Vector):
        value = [*value.coefs]
    elif dataclasses.is_dataclass(value):
        value = [*vars(value).values()]
    elif isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        return {name for item in value for name in _named(item, names)}
    return {value} & names if isinstance(value, str) else set()
