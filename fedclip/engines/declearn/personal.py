# SPDX-License-Identifier: Apache-2.0
"""Models of which a part never leaves the clients: a local head, BatchNorm (FedPer, FedBN).

::

    server:  shares the trained weights that no pattern of `personal` matches, and never changes
             its values of the others
    client:  trains all weights (`PersonalFederatedClient`), and shares the same ones

`trained` counts the values that a model trains and shares; only these get noise. `label` writes a
file next to a server's checkpoints about values that no client uses.
"""

from __future__ import annotations

import math
import re
import runpy
import warnings
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from declearn.model.api import Model
from declearn.typing import Batch

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.core.scopes import check_exclude, matched, within
from fedclip.engines.declearn.context import AnyModel, AnyVector
from fedclip.errors import Problem

BATCHNORM = "batchnorm"
"""Stands for all tensors of the layers that keep running statistics."""

STATISTICS = re.compile(
    r"^(.*[./])?(?:(?:running|moving)_(?:mean|var(?:iance)?)|num_batches_tracked)(?::\d+)?$"
)
"""The name of running statistics; its group is the layer."""

BARE = ("tensorflow", "haiku")
"""declearn's models that go to the clients without their weights."""


def chosen(personal: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """Return the names that patterns match, of which one may be ``batchnorm``.

    Raises
    ------
    ValueError
        If one of them matches no name.

    >>> names = ["conv.weight", "bn.weight", "bn.running_mean", "head.weight"]
    >>> sorted(chosen(["batchnorm", "head"], names))
    ['bn.running_mean', 'bn.weight', 'head.weight']
    """
    matches: set[str] = set()
    if BATCHNORM in personal:
        layers = {match[1] or "" for name in names if (match := STATISTICS.match(name))}
        if not layers:
            why = "personal has 'batchnorm', and no layer of the model keeps running statistics"
            raise ValueError(f"{why}; the names are {listed(names)}")
        matches = {n for n in names if n[: len(n) - len(re.split(r"[./]", n)[-1])] in layers}
    patterns = [pattern for pattern in personal if pattern != BATCHNORM]
    matches |= matched("personal", patterns, [*names]).keys()
    # A wildcard may match one name in full, and another without its wrappers: both stay.
    wild = [pattern for pattern in patterns if pattern not in names]
    return frozenset(matches.union(*(within(pattern, [*names]) for pattern in wild)))


def statistics_problems(model: AnyModel) -> list[Problem]:
    """Return what goes wrong with running statistics, which declearn never sends."""
    net = model.model if isinstance(model, PersonalModel) else model
    names, bare = net.get_weights().coefs, net.typekey in BARE
    personal, held = frozenset[str](), set[str]()
    if isinstance(model, PersonalModel):
        personal, held = model.own, {f"{layer}." for layer in model.held}
        if bare:
            # Keras' frozen layers keep their statistics, and the wrapper has sent them.
            frozen = names.keys() - net.get_weights(trainable=True).coefs.keys()
            held = {re.split(r"[^./]*$", n)[0] for n in frozen if not STATISTICS.match(n)}
    layers = {m[1] or "" for n in names if n not in personal and (m := STATISTICS.match(n))} - held
    advice = "PersonalModel(model) keeps them" if bare else "give it frozen_batchnorm='eval'"
    text = f"running statistics are never sent ({listed([layer[:-1] for layer in layers])})"
    text = f"{text}: keep the layers at each site, PersonalModel(model, 'batchnorm')"
    return [Problem(f"{text}; for frozen ones, {advice}")] if layers else []


def frozen_problems(model: AnyModel) -> list[Problem]:
    """Return which frozen weights a client would not get from the server."""
    if model.typekey not in BARE:
        return []
    names, trained = (model.get_weights(trainable=only).coefs for only in (False, True))
    frozen = [n for n in names if n not in trained and not STATISTICS.match(n)]
    text = f"{listed(frozen)} are frozen, and Keras' and Haiku's models are sent without weights"
    return [Problem(f"{text}: wrap the model, PersonalModel(model)")] if frozen else []


def part(vector: AnyVector, names: Iterable[str]) -> AnyVector:
    """Return some of the arrays of a vector, as a vector."""
    return type(vector)({name: vector.coefs[name] for name in names})


def merged(model: AnyModel, own: Collection[str], shared: AnyVector) -> AnyVector:
    """Return all trained weights of a model: the shared ones as given, the others unchanged.

    Raises
    ------
    TypeError, ValueError
        If these are not all but the model's `own`.
    """
    weights: AnyVector = model.get_weights(trainable=True)
    if not isinstance(shared, type(weights)):
        raise TypeError(f"weights must be a {type(weights).__name__}, got {type(shared).__name__}")
    if personal := shared.coefs.keys() & own:
        raise ValueError(f"weights for {listed(personal)} were sent, which stay on each client")
    if differing := shared.coefs.keys() ^ (weights.coefs.keys() - own):
        what = f"what is shared and what was sent differ in {listed(differing)}"
        raise ValueError(f"{what}: freeze and name layers alike on both sides")
    return type(weights)({**weights.coefs, **shared.coefs})


def listed(names: Collection[str]) -> str:
    """Return names in quotes, at most ten of them."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, sorted(names)[:10])) + more


class PersonalModel(AnyModel):
    """A declearn model with tensors that stay on each client: they are trained, and not shared.

    Give it to the server instead of the model that it wraps. Clients take part with
    `PersonalFederatedClient`, or with `PrivateFederatedClient`.

    Parameters
    ----------
    model : Model
        A model of declearn.
    personal : pattern or list of patterns
        Names of the tensors that stay, as in `fedclip.core.scopes`: ``"head"`` or ``["head.*"]``;
        the word ``"batchnorm"`` stands for all tensors of layers that keep running statistics.
        None, if the wrapper is for `frozen_batchnorm`, or for frozen layers of Keras or Haiku.
    frozen_batchnorm : {"eval"} or None, default=None
        In networks of torch: with "eval", frozen BatchNorm normalises by its statistics and does
        not change them, as in evaluation. None: they move with each step, though the layer is
        frozen. (Keras' frozen layers always behave as with "eval".)

    Raises
    ------
    TypeError, ValueError
        If a pattern matches no tensor, or the patterns match no trained tensor, or all of them. A
        model that learns its shapes from the clients' data raises it then.

    Notes
    -----
    Clients start with the server's values of their personal layers. In the server's model these
    never change, so the server's model fits no client: each site's model is in the site's
    checkpoints, and its metrics are those that the site reports.

    declearn's configurations of Keras' and Haiku's models have no weights. This one brings those
    that are never sent afterwards: personal and frozen ones, and running statistics; and which
    ones of Haiku are frozen.
    """

    typekey: ClassVar[str] = "fedclip-personal"

    def __init__(
        self,
        model: AnyModel,
        personal: str | Sequence[str] | None = None,
        *,
        frozen_batchnorm: str | None = None,
    ) -> None:
        if not isinstance(model, Model) or isinstance(model, PersonalModel):
            raise TypeError(f"model must be a model of declearn, got {type(model).__name__}")
        self.personal = check_exclude(personal, "personal") or []
        self.frozen_batchnorm = parameters.optional(
            parameters.choice, ("eval",), frozen_batchnorm=frozen_batchnorm
        )
        self.bare = model.typekey in BARE
        if not self.personal and self.frozen_batchnorm is None and not self.bare:
            raise ValueError("personal names no tensor: use the model without this wrapper")
        if model.typekey == "tensorflow" and model.required_data_info:
            raise ValueError("the Keras model has no shapes yet: begin it with keras.Input(shape)")
        super().__init__(model.get_wrapped_model())
        self.model = model
        self.held = hold_statistics(self.get_wrapped_model()) if frozen_batchnorm else []
        if frozen_batchnorm and not self.held:
            text = "frozen_batchnorm='eval' needs frozen BatchNorm of torch: freeze it first"
            raise ValueError(text)
        if not model.required_data_info:
            self.check()

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of the tensors that stay, whether they are trained or not."""
        return chosen(self.personal, self.model.get_weights().coefs)

    def check(self) -> None:
        """Refuse patterns that leave nothing to share, or keep nothing that would be shared."""
        if not self.personal:
            return
        trained = self.model.get_weights(trainable=True).coefs.keys()
        personal = trained & self.own
        if not personal or personal == trained:
            how = "nothing would be shared" if personal else "what it matches is never shared"
            text = f"matches {'all' if personal else 'none'} of what is trained, {listed(trained)}"
            raise ValueError(f"personal={self.personal} {text}: {how}")
        for name, other in tied(self.get_wrapped_model()):
            if (name in self.own) != (other in self.own):
                text = f"{name!r} and {other!r} are one tensor, and personal={self.personal}"
                raise ValueError(f"{text} matches one name only: name both, or neither")

    def shared(self, vector: AnyVector) -> AnyVector:
        """Return the arrays of a vector that do not stay."""
        return part(vector, [name for name in vector.coefs if name not in self.own])

    def whole(self, shared: AnyVector) -> AnyVector:
        """Return all trained weights, as `merged` does."""
        return merged(self.model, self.own, shared)

    # -- what declearn's server asks for --------------------------------------------------------
    def get_weights(self, trainable: bool = False) -> AnyVector:
        """Return all weights; with `trainable`, those that are trained and shared."""
        weights: AnyVector = self.model.get_weights(trainable)
        return self.shared(weights) if trainable else weights

    def set_weights(self, weights: AnyVector, trainable: bool = False) -> None:
        """Set all weights; with `trainable`, those that are trained and shared."""
        self.model.set_weights(self.whole(weights) if trainable else weights, trainable)

    def apply_updates(self, updates: AnyVector) -> None:
        """Add updates to the shared weights."""
        self.set_weights(self.get_weights(trainable=True) + updates, trainable=True)

    def initialize(self, data_info: Config) -> None:
        """Initialise the model, and find out which tensors stay."""
        self.model.initialize(data_info)
        self.check()

    def get_config(self, allow_bin: bool = False) -> Config:
        """Return the model and the patterns; declearn encodes a model that is within another."""
        model = self.model if allow_bin else self.model.get_config()
        config: Config = {**super().get_config(), "model": model, "personal": self.personal}
        config |= {"frozen_batchnorm": self.frozen_batchnorm, "unsent": None}
        if self.bare and not self.required_data_info:
            trained, weights = self.model.get_weights(trainable=True), self.get_weights()
            unsent = [n for n in weights.coefs if n in self.own or n not in trained.coefs]
            config |= {"trained": [*trained.coefs], "unsent": part(weights, unsent)}
        return config

    @classmethod
    def from_config(cls, config: Config, allow_bin: bool = False) -> Self:
        """Make a model from what `get_config` has returned."""
        model = config["model"]
        if not isinstance(model, Model):
            model = Model.from_config(model, allow_bin)
        if config["unsent"] is not None:
            if hasattr(model, "set_trainable_weights"):
                model.set_trainable_weights(config["trained"])
            weights = model.get_weights()
            model.set_weights(type(weights)({**weights.coefs, **config["unsent"].coefs}))
        return cls(model, config["personal"], frozen_batchnorm=config["frozen_batchnorm"])

    # -- what is done on a client, by the model within ------------------------------------------
    def compute_batch_gradients(self, batch: Batch, max_norm: float | None = None) -> AnyVector:
        """Refuse: all weights are trained, and declearn would share what it trains."""
        raise RuntimeError("personal layers are trained by fedclip.PersonalFederatedClient only")

    compute_batch_predictions: Any = property(attrgetter("model.compute_batch_predictions"))
    loss_function: Any = property(attrgetter("model.loss_function"))
    required_data_info: Any = property(attrgetter("model.required_data_info"))
    device_policy: Any = property(attrgetter("model.device_policy"))
    update_device_policy: Any = property(attrgetter("model.update_device_policy"))


LABEL = "about_these_models.txt"
"""A file next to a server's checkpoints, about values in them that no client uses."""


class Trained(NamedTuple):
    """The values of a model; made by `trained`.

    Attributes
    ----------
    shared
        How many are trained and shared.
    values
        How many it holds, with running statistics.
    wrong
        The problem with running statistics; "" without one.
    lacking
        Which weights clients would not have; "" if they have all.
    """

    shared: int
    values: int
    wrong: str
    lacking: str

    def __str__(self) -> str:
        return f"{self.shared:,} of the model's {self.values:,} values are trained and shared"


def trained(file: Path, name: str = "model") -> Trained:
    """Return what the model of a file trains and shares; the file is run.

    Raises
    ------
    ValueError
        If there is no such model, or its shapes come from the clients' data.
    Exception
        Whatever the file raises.
    """
    from declearn.utils import make_importable  # declearn 2.8 has none

    with make_importable(str(file.resolve().parent)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether there is a GPU here is of no interest
        model: object = runpy.run_path(str(file)).get(name)
    if not isinstance(model, Model) or model.required_data_info:
        why = "or one that takes its shapes from the clients' data"
        raise ValueError(f"{str(file)!r} has no model of declearn called {name!r}, {why}")
    sizes = [model.get_weights(trainable=trainable).shapes() for trainable in (True, False)]
    shared, values = (sum(map(math.prod, shapes.values())) for shapes in sizes)
    wrong, lacking = statistics_problems(model), frozen_problems(model)
    return Trained(shared, values, "".join(map(str, wrong)), "".join(map(str, lacking)))


def label(folder: str | Path, model: AnyModel) -> str:
    """Write which values of a server's checkpoints no client uses, and return the text."""
    sentences = [*map(str, statistics_problems(model))]
    if isinstance(model, PersonalModel) and model.own:
        text = f"{listed(model.own)} have the values with which all sites began"
        sentences.append(f"{text}: each site trains its own, which are in the site's checkpoints")
    text, file = "; ".join(sentences), Path(folder, LABEL)
    file.unlink(missing_ok=True)
    if text:
        file.write_text(f"The server's models: {text}.\n", encoding="utf-8")
    return text


# -- networks of torch ---------------------------------------------------------------------------
def hold_statistics(network: Any) -> list[str]:
    """Make frozen BatchNorm normalise by its statistics, and keep them, in training too.

    A layer is frozen if it has weights and none of them is trained. The network may be pickled.

    Returns
    -------
    names
        The layers for which this is so from now on.
    """
    names = []
    layers: Any = getattr(network, "named_modules", tuple)()
    for name, layer in layers:
        weights = [*layer.parameters(recurse=False)]
        keeps = getattr(layer, "running_mean", None) is not None
        if keeps and weights and not any(weight.requires_grad for weight in weights):
            names.append(name)
            if _evaluate not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_evaluate)
    return names


def _evaluate(layer: Any, inputs: Any) -> None:
    # declearn sets all layers to training before each step.
    layer.training = False


def unused(network: Any) -> list[str]:
    """Return the names of trained weights that the last step gave no gradient, if others have one.

    Networks of other frameworks have none.
    """
    weights: Any = getattr(network, "named_parameters", tuple)()
    grads = {name: weight.grad for name, weight in weights if weight.requires_grad}
    lacking = [name for name, grad in grads.items() if grad is None]
    return lacking if len(lacking) < len(grads) else []


def tied(network: Any) -> list[tuple[str, str]]:
    """Return the pairs of names of weights that have two; trained is the first one."""
    first: dict[int, str] = {}
    is_torch = hasattr(network, "named_modules")
    named = network.named_parameters(remove_duplicate=False) if is_torch else ()
    names = ((first.setdefault(id(weight), name), name) for name, weight in named)
    return [(trained, other) for trained, other in names if trained != other]
