"""What every clipper promises of every gradient; exact sums in float64 are the judge."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from declearn.utils.serialize import msgpack_deserialize, msgpack_serialize

from benchmarks.search.gradients import RANGES, Gradient, build, merged, parts
from fedclip.arrays import backend_named
from fedclip.core.scopes import resolve
from fedclip.errors import FedclipWarning
from fedclip.testing import apply, differences

# No measure in float64 is surer than this; the limit itself is a float64 number.
ROUNDING = 1.0 + 2.0**-50
# How far below its limit the norm of what is clipped may be.
BELOW = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-12}
ORDERS = (2, 1, 3, 0.5, "inf", "rms", "mad")

Broken = tuple[str, str]
"""The name of a promise, and what was seen."""


def size(arrays: list[np.ndarray], ord: Any = 2) -> float:
    """Return the measure of some arrays together; sums are exact before they are rounded."""
    values = np.concatenate([np.abs(a).ravel() for a in arrays]) if arrays else np.zeros(0)
    peak = float(values.max(initial=0.0))
    if ord == "inf" or peak == 0.0 or not math.isfinite(peak):
        return peak
    # By a power of two, which is exact but for what is far too small to count.
    scale = math.ldexp(1.0, max(-1021, min(1021, math.frexp(peak)[1])))
    values = values / scale
    power = {"rms": 2.0, "mad": 1.0}.get(ord, ord)
    total = math.fsum(values**power if power not in (1, 2) else values ** int(power))
    if ord in ("rms", "mad"):
        total /= values.size
    return scale * (math.sqrt(total) if power == 2 else total ** (1.0 / power))


class Trial:
    """A clipper and the gradients that it is given one after the other.

    Attributes
    ----------
    name, config
        The clipper, as in a TOML file.
    framework
        Of all gradients.
    device
        Whether to take the steps for arrays on a device, which the host can not see. They return
        new arrays always, and leave out norms near the largest float64.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        framework: str,
        clipper: Any,
        device: bool = False,
    ) -> None:
        self.name, self.config, self.framework = name, config, framework
        self.clipper, self.device = clipper, device
        self._nothing = "" if clipper is None else self._statistics()
        self.weights: Any = None
        self.output: dict[str, Any] = {}
        self._bound: float | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def step(self, gradient: Gradient) -> Iterator[Broken]:
        """Give the clipper a gradient, and yield each promise that it breaks."""
        vector = build(gradient, self.framework)
        before = {name: parts(value) for name, value in vector.coefs.items()}
        inputs = {name: merged(value) for name, value in vector.coefs.items()}
        finite = all(np.isfinite(value).all() for value in inputs.values())
        state = self._statistics() if not finite else ""
        # What is empty is not measured, and leaves no record.
        empty = not any(tensor.values.size for tensor in gradient.values())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", FedclipWarning)
                output = self._apply(self.clipper, vector)
        except Exception as error:
            yield "no error", f"{type(error).__name__}: {error}"[:300]
            return
        if {name: parts(value) for name, value in vector.coefs.items()} != before:
            yield "input untouched", "a tensor has changed"
        self.output = {name: parts(value) for name, value in output.coefs.items()}
        unlike = list(differences(vector, output))
        if unlike:
            yield from unlike
            return
        outputs = {name: merged(value) for name, value in output.coefs.items()}
        if not finite:
            if self.name != "no-op" and not self._skipped(inputs, outputs):
                yield "NaN is skipped", f"the output is {_short(outputs)}"
            if state != self._nothing and self._statistics() != state:
                yield "NaN teaches nothing", "a statistic has changed"
            return
        if not all(np.isfinite(value).all() for value in outputs.values()):
            yield "finite output", f"the output is {_short(outputs)}"
            return
        skipped = bool(self.clipper.last and self.clipper.last.nonfinite)
        skipped |= self.device and size([*inputs.values()], "inf") > 1e300
        if not skipped and not empty:
            yield from self._groups(gradient, vector, inputs, output, outputs)
        yield from self._whole(gradient, outputs)

    def _skipped(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> bool:
        """Whether all is zero; a finite tensor that is excluded may come back as it is."""
        names = list(inputs)
        excluded = resolve("global", self.clipper.exclude, names).excluded
        return not any(
            value.any() and not (name in excluded and np.array_equal(value, inputs[name]))
            for name, value in outputs.items()
        ) and all(np.isfinite(value).all() for value in outputs.values())

    def _statistics(self) -> str:
        """Return the statistics in full, so that they can be compared."""
        if not hasattr(self.clipper, "get_state"):
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # On a device, arrays take the dtype of a step even if they learn nothing from it.
            return (
                repr(self.clipper.get_state()["groups"])
                if self.device
                else statistics(self.clipper)
            )

    # -- limits of groups ---------------------------------------------------------------------
    def _groups(
        self, gradient: Gradient, vector: Any, inputs: Any, output: Any, outputs: Any
    ) -> Iterator[Broken]:
        last, config = self.clipper.last, self.config
        if last is None or not last.limit or self._kind() == "other":
            return
        scope = getattr(self.clipper, "scope", "tensor")
        if self.name == "agc":
            scope = {"global": "global"}.get(config.get("unit", "output"), "tensor")
        groups = resolve(scope, self.clipper.exclude, list(gradient))
        if groups.labels != last.groups:
            yield "groups", f"{last.groups} are not {groups.labels}"
            return
        ord = getattr(self.clipper, "ord", 2) if self._kind() == "norm" else "inf"
        for label, members, limit, clipped in zip(
            groups.labels, groups.members, last.limit, last.clipped, strict=True
        ):
            names = [groups.names[i] for i in members]
            left = not clipped and self._keeps() and not self._raised(names, inputs, ord)
            if (
                left
                and not self.device
                and any(output.coefs[n] is not vector.coefs[n] for n in names)
            ):
                yield "same object", f"group {label!r} is not over its limit"
            if ord not in ORDERS or self._by_slice():
                continue
            given, found = (size([v[n] for n in names], ord) for v in (inputs, outputs))
            # An average that everything is brought to is no bound.
            if found > limit * ROUNDING and self.name != "ema-normalize":
                yield (
                    "limit",
                    f"group {label!r}: {found!r} is {(found - limit) / limit:.2g} above {limit!r}"
                    if limit
                    else f"group {label!r}: {found!r} is above 0",
                )
            # A device makes no subnormal numbers, as they differ in what they do with them.
            normal = not self.device or min(given, limit) > 2.0**-90
            wrong = clipped != (given > limit) and abs(given - limit) > 1e-9 * limit
            if self._keeps() and normal and wrong:
                yield "clipped if over", f"{given!r}, limit {limit!r}, and clipped is {clipped}"
            # A factor of fewer digits than products have gives zeros.
            normal &= given < limit * 2.0**125
            if clipped and self._exact() and ord == 2 and normal:
                yield from self._not_far_below(gradient, names, found, limit)
        if self.device:
            return
        raised = any(self._raised([n], inputs, ord) for n in gradient)
        if not any(last.clipped) and self._keeps() and not raised and output is not vector:
            yield "same object", "nothing is clipped, and the Vector is another"
        if self._exact():
            again = apply(self.clipper, output, self.weights)
            if again is not output:
                yield "once is enough", "the second time changes the output of the first"

    def _not_far_below(
        self, gradient: Gradient, names: list[str], found: float, limit: float
    ) -> Iterator[Broken]:
        tensors = [gradient[n] for n in names if gradient[n].values.size]
        # Where rounding to subnormals is a large part of the norm, it may fall further.
        lost = max(RANGES[t.dtype][1] * math.sqrt(t.values.size) for t in tensors)
        allowed = max(BELOW[t.dtype] for t in tensors)
        if limit * allowed > lost and found < limit * (1 - allowed):
            yield "not far below", f"{found!r} is {1 - found / limit:.2g} below {limit!r}"

    def _kind(self) -> str:
        if self.name in ("value-clip", "percentile-clip"):
            return "value"
        if self.name in (
            "no-op",
            "standardize",
            "centralize",
            "ema-value-clip",
            "growth-value-clip",
        ):
            return "other"
        return "norm"

    def _by_slice(self) -> bool:
        unit = self.config.get("unit", "output")
        return "dims" in self.config or (self.name == "agc" and unit == "output")

    def _keeps(self) -> bool:
        """Whether what is not over its limit is left alone."""
        moving = ("normalize", "ema-normalize", "ema-norm-clip")
        return self.name not in moving and self._kind() != "other"

    def _raised(self, names: list[str], inputs: Any, ord: Any) -> bool:
        """Whether a group may be scaled up."""
        low = self.config.get("min_norm") if self.name == "norm-clip" else None
        return low is not None and size([inputs[n] for n in names], ord) < 2 * low

    def _exact(self) -> bool:
        """Whether the limit is fixed, so that to clip twice is to clip once."""
        fixed = self.name in ("norm-clip", "value-clip", "agc")
        return fixed and not {"min_norm", "eps"} & self.config.keys()

    # -- the bound that the clipper states ----------------------------------------------------
    def _whole(self, gradient: Gradient, outputs: dict[str, np.ndarray]) -> Iterator[Broken]:
        if self.name == "agc":
            return
        shapes = {name: tensor.shape for name, tensor in gradient.items()}
        if self._shapes != shapes:
            self._shapes, self._bound = shapes, self.clipper.l2_bound(shapes)
        if self._bound is not None:
            found = size(list(outputs.values()))
            if found > self._bound * ROUNDING:
                above = found / self._bound - 1
                yield "stated bound", f"{found!r} is {above:.2g} above {self._bound!r}"

    # -- state --------------------------------------------------------------------------------
    def moved(self, make: Any) -> tuple[Any, list[Broken]]:
        """Return a clipper with the state of this one, and what went wrong on the way."""
        if not hasattr(self.clipper, "get_state"):
            return None, []
        other = make(self.name, self.config)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                state = self.clipper.get_state()
                other.set_state(msgpack_deserialize(msgpack_serialize(state)))
        except Exception as error:
            return None, [("state comes back", f"{type(error).__name__}: {error}"[:300])]
        if msgpack_serialize(other.get_state()) != msgpack_serialize(state):
            return None, [("state comes back", "the state is another after it was loaded")]
        return other, []

    def _apply(self, clipper: Any, vector: Any) -> Any:
        with unseen(self.framework) if self.device else nullcontext():
            return apply(clipper, vector, self.weights)

    def parted(self, other: Any, gradient: Gradient) -> str:
        """Return how a clipper with the loaded state differs after the gradient, if it does."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", FedclipWarning)
                output = self._apply(other, build(gradient, self.framework))
                wanted, found = statistics(self.clipper), statistics(other)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        if {n: parts(v) for n, v in output.coefs.items()} != self.output:
            return "the outputs differ"
        return "" if wanted == found else "the states differ"


@contextmanager
def unseen(framework: str) -> Iterator[None]:
    """Hide the memory of arrays from the clippers, as that of a GPU is."""
    cls = type(backend_named(framework))
    views, dense_views = cls.views, cls.dense_views
    cls.views = lambda self, arrays: [None] * len(arrays)  # type: ignore[method-assign]
    cls.dense_views = lambda self, arrays: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.views, cls.dense_views = views, dense_views  # type: ignore[method-assign]


def statistics(clipper: Any) -> str:
    """Return the statistics of a clipper in full, arrays by their bytes."""
    state = clipper.get_state()
    arrays = {
        name: {field: parts(np.asarray(value)) for field, value in fields.items()}
        for name, fields in state["arrays"].items()
    }
    return repr((state["groups"], arrays))


def _short(arrays: dict[str, np.ndarray]) -> str:
    return str({name: value.ravel()[:4].tolist() for name, value in arrays.items()})
