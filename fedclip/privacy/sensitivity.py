# SPDX-License-Identifier: Apache-2.0
r"""Bound and sensitivity of a clipper, or of a whole optimizer, as values.

Each map of a pipeline updates the bound and the Lipschitz constant::

    bound     <- min(own bound of the map, growth of the map * bound)
    lipschitz <- lipschitz of the map * lipschitz

There are two cases. *Per record*: each record passes the pipeline separately, and the outputs
are added up. Only the bound B of an output counts: the sum has a sensitivity of B if a record is
added or removed, and 2 B if one is replaced. *On an aggregate*: a sum or mean of records goes
through. Its own sensitivity s becomes ``lipschitz * s``, at most ``2 B``. Maps after the noise cost
no privacy, and bound nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedclip.core import parameters
from fedclip.privacy import guarantees
from fedclip.privacy.accounting import RELATIONS
from fedclip.privacy.guarantees import Context, Guarantee, GuaranteeFunction, Plugin, Shapes, number


@dataclass(frozen=True)
class Analysis:
    """Bound and sensitivity of a pipeline; `fedclip.analyse` returns it, and `print` explains it.

    Attributes
    ----------
    maps
        The guarantee of each map, in the order in which they act.
    lrate, w_decay
        Learning rate and weight decay; None without an optimizer, or if they change over time.
    """

    guarantees: tuple[Guarantee, ...]
    lrate: float | None = None
    w_decay: float | None = 0.0

    @property
    def l2_bound(self) -> float | None:
        """Largest L2 norm of the last map's output, before the learning rate.

        None if there is no bound, or if it needs shapes.
        """
        bound = _bounds(self.guarantees)[-1] if self.guarantees else math.inf
        return None if math.isinf(bound) else bound

    @property
    def formula(self) -> str:
        """The bound in words; empty without a bound."""
        return _formula(self.guarantees)

    @property
    def per_record_safe(self) -> bool:
        """Whether the output is bounded, and depends only on the input record and public values."""
        return bool(self.formula) and not _named(self.guarantees, "shared") and not self.noised

    @property
    def lipschitz(self) -> float:
        """Largest factor on distances; infinity if unbounded."""
        return math.prod(m.lipschitz for m in self.guarantees)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why there is no bound, records are not safe, or distances increase: sentences."""
        maps = self.guarantees
        return tuple(dict.fromkeys([*_unbounded(maps), *_named(maps, "shared"), *_expands(maps)]))

    @property
    def name(self) -> str:
        """The registered names of the maps, in order."""
        return ", ".join(m.name for m in self.guarantees) or "no module"

    @property
    def non_expansive(self) -> bool:
        """Whether no two outputs are farther apart than their inputs."""
        return self.lipschitz <= 1.0

    @property
    def noised(self) -> bool:
        """Whether a map adds noise."""
        return any(m.noise for m in self.guarantees)

    def sensitivity(
        self, relation: str, on: str = "record", incoming: float | None = None
    ) -> float | None:
        """Return the L2 sensitivity; None if unbounded, for reasons that `print` gives.

        Parameters
        ----------
        relation : {"add-remove", "replace-one"}
            Which data sets are neighbours.
        on : {"record", "aggregate"}, default="record"
            Input of the pipeline: each record separately, and the result is the sensitivity of the
            sum of outputs; or an aggregate of records.
        incoming : float or None, default=None
            With "aggregate": the sensitivity of the input, for the same relation.

        Raises
        ------
        TypeError, ValueError
            If a parameter is invalid.
        """
        parameters.choice(RELATIONS, relation=relation)
        if parameters.choice(("record", "aggregate"), on=on) == "record":
            if incoming is not None:
                raise ValueError(f"incoming goes with on='aggregate', got incoming={incoming!r}")
            if not self.per_record_safe or self.l2_bound is None:
                return None
            return self.l2_bound * (2.0 if relation == "replace-one" else 1.0)
        if self.noised:
            return None
        distance = math.inf if incoming is None else parameters.non_negative(incoming=incoming)
        for map_, bound in zip(self.guarantees, _bounds(self.guarantees), strict=True):
            # Two outputs lie in a ball, and so are at most its diameter apart.
            distance = min(distance * map_.lipschitz if distance else 0.0, 2.0 * bound)
        return None if math.isinf(distance) else distance

    @property
    def before_noise(self) -> Analysis:
        """The analysis of the maps before the first noise, which covers their sensitivity."""
        first = next((i for i, m in enumerate(self.guarantees) if m.noise), len(self.guarantees))
        return replace(self, guarantees=self.guarantees[:first])

    def _noise_in_words(self) -> str:
        before = self.before_noise
        if not before.guarantees:
            return "The noise comes first: what follows it is free, and bounds no sensitivity."
        return f"Before the noise: {before} What follows the noise is free."

    def round_bound(self, steps: int) -> float | None:
        """Return the largest L2 norm of the sum of `steps` local steps; None without a bound.

        Parameters
        ----------
        steps : int
            Number of steps, >= 1.

        Raises
        ------
        TypeError, ValueError
            If `steps` is invalid, or the learning rate is unknown.
        """
        parameters.integer(1, steps=steps)
        if self.lrate is None:
            needed = "an optimizer with a learning rate that does not change"
            raise ValueError(f"round_bound needs {needed}")
        # Weight decay adds a share of the weights, which may be of any size.
        if self.l2_bound is None or self.w_decay != 0.0:
            return None
        return guarantees.outwards(abs(self.lrate) * steps * self.l2_bound)

    @property
    def bound_in_words(self) -> str:
        """The L2 bound, or the reasons why no bound exists, in a sentence."""
        if self.l2_bound is None and not self.formula:
            return f"{self.name}: no L2 bound ({'; '.join(_unbounded(self.guarantees))})."
        shown = self.formula if self.l2_bound is None else number(self.l2_bound)
        how = "" if self.formula in ("", shown) else f" ({self.formula})"
        return f"{self.name}: the L2 norm is at most {shown}{how}."

    @property
    def record_in_words(self) -> str:
        """A sentence on records that pass separately; empty if nothing is guaranteed."""
        if self.noised:
            return self._noise_in_words()
        if self.per_record_safe:
            shown = "that bound" if self.l2_bound is None else number(self.l2_bound)
            added = f"the sensitivity of a sum is {shown} if a record is added or removed"
            return f"Per record: {added}, and twice that if one is replaced."
        why = "; ".join(_named(self.guarantees, "shared"))
        return f"Not safe per record ({why})." if self.formula else ""

    @property
    def aggregate_in_words(self) -> str:
        """A sentence on a sum or mean of records that passes."""
        if self.noised:
            return self._noise_in_words()
        if self.non_expansive:
            return "On an aggregate: it does not increase a sensitivity (it is non-expansive)."
        limits = []
        if not math.isinf(self.lipschitz):
            limits.append(f"at most {number(self.lipschitz)} times the one before")
        if self.formula:
            twice = "twice that bound" if self.l2_bound is None else number(2 * self.l2_bound)
            limits.append(f"at most {twice}")
        why, most = "; ".join(_expands(self.guarantees)), " and ".join(limits) or "not bounded"
        return f"On an aggregate: it can make a sensitivity larger ({why}); that is then {most}."

    def __str__(self) -> str:
        sentences = [self.bound_in_words, self.record_in_words, self.aggregate_in_words]
        return " ".join(dict.fromkeys(sentence for sentence in sentences if sentence))


# -- maps in sequence -------------------------------------------------------------------------
def _bounds(maps: Sequence[Guarantee]) -> list[float]:
    """Return the bound of the output of each map; infinity if unbounded."""
    bounds, bound = [], math.inf
    for map_ in maps:
        bound = min(map_.bound, bound if map_.growth == 1.0 else bound * map_.growth)
        bounds.append(bound)
    return bounds


def _formula(maps: Sequence[Guarantee]) -> str:
    """Return the bound of the last map's output, in words; empty if unbounded."""
    formula, bound = "", math.inf
    for map_ in maps:
        if math.isinf(map_.growth):
            formula = ""
        elif formula and map_.growth > 1.0 + guarantees.COARSEST:
            formula = f"{number(map_.growth)} times {formula}"
        carried = bound if map_.growth == 1.0 else bound * map_.growth
        if map_.formula and formula and math.isinf(max(map_.bound, carried)):
            formula = f"the lesser of {formula} and {map_.formula}"
        elif map_.formula and (not formula or map_.bound < carried):
            formula = map_.formula
        bound = min(map_.bound, carried)
    return formula


def _named(maps: Sequence[Guarantee], kind: str) -> list[str]:
    """Return what each map says of this kind of fault, by name if there are several maps."""
    reasons = [(f"{m.name}: " * (len(maps) > 1), getattr(m, kind)) for m in maps]
    return [name + why for name, why in reasons if why]


def _unbounded(maps: Sequence[Guarantee]) -> list[str]:
    """Return why nothing bounds the output of the last map."""
    if not maps:
        return ["nothing limits it"]
    if _formula(maps):
        return []
    # Maps before the last one that undoes all bounds do not matter.
    last = max((i for i, map_ in enumerate(maps) if math.isinf(map_.growth)), default=0)
    before = [replace(map_, unbounded="") for map_ in maps[:last]]
    return _named([*before, *maps[last:]], "unbounded")


def _expands(maps: Sequence[Guarantee]) -> list[str]:
    """Return why distances are stretched."""
    return _named([m if m.lipschitz > 1.0 else replace(m, expands="") for m in maps], "expands")


def _declearn_clip(module: Plugin, context: Context) -> Guarantee:
    result = Guarantee(module.name, lipschitz=1.0, growth=1.0, finite=context.finite)
    noun = "tensor" if module.name == "l2-clipping" else ""
    limit = float(module.max_norm)
    formula = guarantees.formula_of(limit, 2, noun)
    if not context.finite:
        why = "it passes on NaN and infinity, which have no norm; for finite gradients the bound is"
        instead = f"norm-clip with max_norm={limit!r}" + (" and scope='tensor'" if noun else "")
        return replace(result, unbounded=f"{why} {formula}; use {instead} for all gradients")
    if noun and context.shapes is None:
        return replace(result, formula=formula)
    count = sum(1 for shape in (context.shapes or {}).values() if math.prod(shape)) if noun else 1
    # declearn measures and scales in the dtype of the gradient.
    bound = guarantees.root_of_squares([(limit, count)]) * (1.0 + 16 * guarantees.SINGLE)
    return replace(result, bound=bound, formula=formula)


GUARANTEES: dict[str, GuaranteeFunction] = {
    "l2-clipping": _declearn_clip,
    "l2-global-clipping": _declearn_clip,
    "gaussian-noise": guarantees.noise,
}
"""Guarantees of plug-ins without a method ``guarantee``, by registered name.

fedclip's clippers have that method. An entry in this table comes before it; you may add one for a
plug-in of your own."""


def look_up(plugin: Plugin, context: Context) -> Guarantee:
    """Return the guarantee of a plug-in: no bound if neither the plug-in nor the table has one."""
    if (kind := GUARANTEES.get(plugin.name)) is not None:
        return kind(plugin, context)
    guarantee = getattr(plugin, "guarantee", None)
    return guarantee(context) if callable(guarantee) else guarantees.unknown(plugin, context)


def analyse_plugins(
    plugins: Sequence[Plugin], shapes: Shapes | None = None, *, finite: bool = False
) -> Analysis:
    """Return the joint guarantee of plug-ins, in the order in which they act.

    `fedclip.analyse` also takes names, configurations and optimizers, and documents the parameters.
    """
    parameters.boolean(finite=finite)
    known = _checked(shapes)
    known_of: list[Guarantee] = []
    for plugin in plugins:
        context = Context(known, finite or any(g.finite for g in known_of[-1:]))
        known_of.append(look_up(plugin, context))
    return Analysis(tuple(known_of))


def _checked(shapes: object) -> Shapes | None:
    if shapes is None:
        return None
    allowed = "shapes must be a dict of tuples of ints, such as {'w': (3, 2)}"
    if not isinstance(shapes, Mapping):
        raise TypeError(f"{allowed}, got {shapes!r}")
    checked = {}
    for name, shape in shapes.items():
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"{allowed}, got {shape!r} for {name!r}")
        label = f"shapes[{name!r}]"
        checked[name] = tuple([parameters.integer(0, **{label: length}) for length in shape])
    return checked
