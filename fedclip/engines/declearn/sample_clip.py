# SPDX-License-Identifier: Apache-2.0
"""`sample-clip`: where in an optimizer records are clipped, how, and what may stand before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import AuxVar, OptiModule

from fedclip.core import parameters
from fedclip.core.docstrings import Documented
from fedclip.core.parameters import parameter
from fedclip.core.scopes import Groups, check_scope
from fedclip.dpsgd.persample.base import Arrays
from fedclip.dpsgd.step import MODES, SampleClipping
from fedclip.engines.declearn.context import AnyModule, AnyVector
from fedclip.engines.declearn.stages import analyse
from fedclip.errors import Problem
from fedclip.privacy import Context, Guarantee
from fedclip.privacy.accounting import check_evaluation
from fedclip.privacy.guarantees import Shapes

Modules: TypeAlias = Sequence[AnyModule]


def problems_before(before: Modules, shapes: Shapes | None = None) -> Iterator[Problem]:
    """Yield why modules cannot precede `sample-clip`."""
    for module in before:
        (known,) = analyse(module, shapes).guarantees
        if why := known.shared or ("it adds noise" if known.noise else ""):
            text = f"{module.name} cannot stand before sample-clip, where each record goes through "
            yield Problem(f"{text}it alone: {why}. Put it after sample-clip")


def _mode(mode: str | Sequence[str]) -> str | Sequence[str] | Mapping[str, float]:
    if isinstance(mode, str):
        return parameters.choice(MODES, mode=mode)
    return check_scope(scope=mode)


class SampleClip(Documented, OptiModule[AuxVar]):
    """Set how DP-SGD clips records, for `PrivateFederatedClient`.

    ::

        Step(batch):
            for each record of the batch:
                g = gradient of the record
                g = the modules before sample-clip, applied to g
                g *= factor(norm(g))                       (fedclip.dpsgd.step)
            grads = (sum of g + noise) / expected batch size
            apply the modules after sample-clip to grads

    Raises
    ------
    TypeError, ValueError
        At construction, if a parameter is out of range.
    RuntimeError
        If a gradient reaches it outside of `PrivateFederatedClient`, where nothing clips records or
        adds noise.

    Notes
    -----
    The state is the adaptive bound, from noised counts; None in other modes.

    References
    ----------
    DP-SGD: Abadi et al., 2016, arXiv:1607.00133. "automatic": Bu et al., 2022, arXiv:2206.07136.
    "adaptive": Andrew et al., 2021, arXiv:1905.03871.

    Examples
    --------
    >>> import numpy as np
    >>> from declearn.model.sklearn import NumpyVector
    >>> SampleClip(max_norm=0.5, mode="layer").get_config()["mode"]
    'layer'
    """

    name: ClassVar[str] = "sample-clip"

    max_norm: float | None = parameter(parameters.positive, default=None, kw_only=False)
    """Bound C on the norm of a record's gradient, > 0, or first bound of "adaptive". None: the
    server's ``sclip_norm``, which must not differ."""
    mode: str | Sequence[str] = parameter(
        _mode,
        default="flat",
        kw_only=False,
        kind='{"flat", "tensor", "layer", "automatic", "adaptive"} or list of patterns',
    )
    """One norm over all tensors ("flat"), or by "tensor", "layer" or patterns, with bounds C / √k
    for k groups. "automatic" and "adaptive" divide the update by C."""
    micro_batch: int = parameter(parameters.integer, 1, default=128)
    """Records in memory at once, >= 1; fewer if gradients are large."""
    gamma: float = parameter(parameters.positive, default=0.01)
    """Stability constant of "automatic", > 0."""
    quantile: float = parameter(parameters.unit_interval, default=0.5)
    """Share of records that the adaptive bound does not clip, in (0, 1)."""
    rate: float = parameter(parameters.positive, default=0.2)
    """Step size of the adaptive bound, in logarithms, > 0."""

    evaluation_share: float = parameter(parameters.share, default=0.0)
    """Share of epsilon for noise on evaluations, in [0.001, 1). 0: no noise."""
    loss_bound: float | None = parameter(parameters.limit, default=None)
    """Largest loss of a record in a noised evaluation, > 0; goes with `evaluation_share`."""

    # The adaptive bound, after the first step.
    bound: float | None = None

    def __post_init__(self) -> None:
        """Check what goes together."""
        check_evaluation(self.evaluation_share, self.loss_bound, "record")
        # Below, the accountants of samples take minutes for noise so large.
        if 0.0 < (share := self.evaluation_share) < 1e-3:
            raise ValueError(f"evaluation_share must be 0, or 0.001 and more, got {share!r}")

    @property
    def clipping(self) -> SampleClipping:
        """What becomes of each record, given its norms."""
        return SampleClipping(self.mode, self.gamma, self.quantile, self.rate)

    def guarantee(self, context: Context) -> Guarantee:
        """Return what becomes of each record; the bound is known if it is written here."""
        why = "it clips single records, and no whole gradient comes to it"
        if self.max_norm is None or self.mode == "adaptive":
            unknown = "its bound is the server's sclip_norm, or follows the norms with noise"
            return Guarantee(self.name, finite=True, unbounded=unknown, expands=why)
        return Guarantee(self.name, self.max_norm, f"{self.max_norm:g}", finite=True, expands=why)

    def in_words(self, limit: str, unit: str = "record") -> str:
        """Return what becomes of records, or persons, and of their sum, with a bound of `limit`."""
        each = "tensors" if self.mode == "tensor" else "groups of tensors"
        how = {
            "flat": f"each {unit} is clipped to {limit}, by one norm over all its tensors",
            "automatic": f"each {unit} is brought to almost C, and the step divided by C",
            "adaptive": f"each {unit} is clipped to C, which starts at {limit} and follows the "
            f"{self.quantile:g} quantile of the norms; the step is divided by C",
        }.get(str(self.mode), f"each of the k {each} of a {unit} is clipped to {limit}/√k")
        bound = "C" if self.mode in ("automatic", "adaptive") else limit
        how += f". To zero out a {unit} moves the sum of a batch by at most {bound}, to replace one"
        how += f" by twice that; noise of z·{bound} is added to the sum, which is divided by the "
        return f"{how}expected size of a batch."

    def run(self, gradients: AnyVector) -> AnyVector:
        """Refuse: what comes here is a whole batch, unclipped and without noise."""
        private = "fedclip.PrivateFederatedClient, and set [run.privacy] on the server"
        raise RuntimeError(f"this client clips no record, and adds no noise. Use {private}")

    def get_state(self) -> dict[str, object]:
        """Return the adaptive bound."""
        return {"bound": self.bound}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over the adaptive bound.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the state has none, or no number above 0.
        """
        if "bound" not in state:
            raise KeyError(f"the state of sample-clip lacks 'bound'; it has {sorted(state)}")
        self.bound = parameters.optional(parameters.positive, bound=state["bound"])


class Place(NamedTuple):
    """How records are processed, and how their noisy sum is.

    Attributes
    ----------
    settings
        The optimizer's own `sample-clip`, or a new one if it has none.
    before, after
        The modules for each record, and those for the update.
    groups
        Which tensors share a norm.
    """

    settings: SampleClip
    before: Modules
    after: list[AnyModule]
    groups: Groups

    def each(self) -> Callable[[Arrays], Arrays] | None:
        """Return what stands before `sample-clip`, for single records; None if nothing does.

        What runs is a copy that nobody else has: the optimizer's own modules, whose state is
        written to checkpoints, never see a record, nor what was recorded of it.
        """
        modules = copy.deepcopy(self.before)

        def run(arrays: Arrays) -> Arrays:
            gradient: AnyVector = NumpyVector(dict(arrays))
            for module in modules:
                gradient = module.run(gradient)
            return gradient.coefs

        return run if modules else None


def place_of(modules: Modules, shapes: Shapes, max_norm: float) -> Place:
    """Return the place of `sample-clip`; refuse modules that cannot precede it, or another bound.

    Raises
    ------
    ValueError
        If there are two, or what stands before is not safe for single records, or its max_norm
        is another one.
    """
    marked = [(i, module) for i, module in enumerate(modules) if isinstance(module, SampleClip)]
    if len(marked) > 1:
        raise ValueError("sample-clip stands in client_opt more than once: leave one")
    place, settings = marked[0] if marked else (-1, SampleClip())
    if settings.max_norm not in (None, max_norm):
        text = f"sample-clip has max_norm {settings.max_norm!r}, and the server's sclip_norm is "
        raise ValueError(f"{text}{max_norm!r}: leave max_norm out")
    before = modules[: max(place, 0)]
    if why := "; ".join(map(str, problems_before(before, shapes))):
        raise ValueError(why)
    return Place(settings, before, [*modules[place + 1 :]], settings.clipping.groups([*shapes]))
