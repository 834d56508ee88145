# SPDX-License-Identifier: Apache-2.0
"""Base of all clippers: groups, state, treatment of NaN, and records.

`Clipper` and `AGC` stand on it, of which declearn calls one a module, and the other a regularizer.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from fedclip.arrays import Array, Backend, Memory
from fedclip.core import states
from fedclip.core.docstrings import Documented
from fedclip.core.parameters import choice, config_of, parameter
from fedclip.core.records import ALL, Recorder, RoundRecord, StepRecord
from fedclip.core.scopes import Groups, Scope, check_exclude, resolve
from fedclip.core.states import Statistics
from fedclip.errors import FedclipWarning, NonFiniteError
from fedclip.transforms.base import Gradient, NotFiniteError, Plan, Transform, prepare, take_step
from fedclip.transforms.slice import SliceClipping

# Number of absent names whose statistics are kept, in case the names come back.
_MOST_ABSENT = 1000

# The attributes that steps change in place.
_CHANGING = ("_absent", "_arrays", "_recorder", "_transform")


class Core(Documented):
    """Base of all clippers: a subclass says in `build` which transform it is made of."""

    # Whether each step has another transform.
    _follows_weights: ClassVar[bool] = False
    scope: Scope = "global"
    keep_memory: bool = True
    exclude: str | Sequence[str] | None = parameter(
        check_exclude, default=None, kind="pattern, list of patterns or None"
    )
    """Names or patterns of the tensors that are not clipped."""
    on_nonfinite: str = parameter(choice, ("skip", "raise", "propagate"), default="skip")
    """A gradient with NaN or infinity is set to zero and counted ("skip"), raises an error
    ("raise"), or passes ("propagate")."""

    def __post_init__(self) -> None:
        """Build the transform, and begin without statistics."""
        self._transform = self.build()
        # Called after each step with its record, if set; not in compiled code.
        self.on_record: Callable[[StepRecord], object] | None = None
        # What the statistics are of, for training loops (loops/clippers.py): a fingerprint; in this
        # process, a tensor of the model, and who uses the clipper.
        self.owner: dict[str, str] | None = None
        self.model: Callable[[], object] | None = None
        self.use: Any = None
        # What the last gradient has in common with others.
        self._plan: Plan | None = None
        self._on_device = self._on_client = False
        self._memory = Memory()
        # If several threads share a clipper, only one clips, or reads what it keeps, at a time.
        self.lock = threading.RLock()
        Core.reset(self)

    def _install(self, statistics: Statistics) -> None:
        """Take over statistics, to be matched with the names of the next gradient."""
        # Names, groups, and the statistics of each group; known from the first gradient on.
        self._names: tuple[str, ...] = ()
        self._groups: Groups | None = None
        self._state: Any = None
        # The transform for the groups.
        self._current: Transform | None = None
        # Statistics of groups that are missing in the current gradient, by label.
        self._absent, self._loaded = statistics, False

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the lock, for a copy or a pickle.

        Attributes that steps change in place are copied here, between two steps.
        """
        with self.lock:
            changing = {key: copy.deepcopy(vars(self)[key]) for key in _CHANGING}
            plain = {k: v for k, v in vars(self).items() if k not in ("lock", "model", "use")}
        return plain | changing | {"_current": None, "_plan": None}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        """Take over the result of `__getstate__`, and make a new lock."""
        vars(self).update(state, model=None, use=None, lock=threading.RLock())

    @classmethod
    def preset(cls, name: str, **config: object) -> Self:
        """Return the clipper with the published defaults of a paper or package.

        ``fedclip translate`` prints the same as a line of TOML.

        Parameters
        ----------
        name : str
            One of those in `fedclip.translate.PRESETS`.
        **config
            Parameters that replace the published ones.
        """
        # Imported here: hardly any program needs other packages' defaults.
        from fedclip.translate import PRESETS, translate

        known = PRESETS.get(cls.name, {})
        return cls(**translate(*known[choice(tuple(known), preset=name)])[2] | config)

    def build(self) -> Transform:
        """Return the transform of the clipper, whose parameters are all set."""
        raise NotImplementedError(f"{type(self).__name__} needs a method build: a transform")

    def reset(self) -> None:
        """Forget all statistics and records."""
        with self.lock:
            self._install({})
            # The transform's arrays, by tensor and field, in host memory.
            self._arrays: Statistics = {}
            # What the record of the last step is made of: groups, norms, limits, clipped groups.
            # Not the arrays: a record must not keep them alive.
            self._last: tuple[Any, ...] | None = None
            self._recorder, self._warned = Recorder(), -1

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger: of the last step, and of the round (``round/...``).

        They are those of `StepRecord.as_dict` and `RoundRecord.as_dict`, which leave out what is
        not known yet. Where nothing calls `on_round_start`, all steps are one round.

        Parameters
        ----------
        prefix
            Put before each name, such as ``"clip/"``.

        Examples
        --------
        >>> from fedclip import NormClip
        >>> clipper = NormClip(1.0)
        >>> record = clipper.observe(5.0)
        >>> clipper.metrics("clip/")["clip/norm"], clipper.metrics()["round/steps"]
        (5.0, 1)
        """
        with self.lock:
            numbers = {} if self.last is None else self.last.as_dict(prefix)
            rounds = [record for record in self.rounds if record.group == ALL]
        return numbers | (rounds[-1].as_dict(f"{prefix}round/") if rounds else {})

    def __eq__(self, other: object) -> bool:
        """Return whether the other has the same class and configuration; statistics do not matter.

        Clippers have no hash: two equal ones have different statistics.
        """
        same = type(self) is type(other)
        return config_of(self) == config_of(other) if same else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def on_round_start(self) -> None:
        """Start the records of a new round; statistics continue."""
        self._on_client = True
        with self.lock:
            self._memory.release()
            self._recorder.start_round()

    def _coefs(self, vector: object) -> dict[str, Array]:
        """Return the arrays of a Vector of declearn."""
        coefs = getattr(vector, "coefs", None)
        if not isinstance(coefs, dict):
            got = f"{type(vector).__name__}: give a dict of arrays to clip, or Vector.build(arrays)"
            raise TypeError(f"run takes a declearn Vector, got {got}")
        return coefs

    def groups(self, shapes: Mapping[str, Sequence[int]]) -> Groups:
        """Return which tensors of these names and shapes share a norm."""
        return resolve(self.scope, self.exclude, list(shapes))

    def _made(self, groups: Groups, backend: Backend | None) -> Transform:
        """Return the transform that clips these groups."""
        return self._transform

    def clip_arrays(
        self, arrays: Mapping[str, Array], backend: Backend | None
    ) -> Mapping[str, Array]:
        """Return the arrays, clipped, by name; the very same mapping if nothing is clipped."""
        # To ask for a Mapping takes longer, at each step.
        if type(arrays) is not dict:
            check_mapping(arrays)
        with self.lock:
            groups = self._groups
            if groups is None or self._names != tuple(arrays):
                groups = self._resolve(arrays)
            if not arrays:
                self._last = (groups.labels,)
                return arrays
            transform = self._current
            if transform is None:
                transform = self._made(groups, backend)
                self._current = None if self._follows_weights else transform
            memory = self._memory if self.keep_memory else None
            gradient = prepare(
                self.name, arrays, groups, transform, backend, memory=memory, plan=self._plan
            )
            self._plan = gradient.plan
            if not gradient.on_host:
                self._check_untraced(gradient)
            try:
                outputs = self._stepped(transform, gradient)
            except NotFiniteError:
                self._report_nonfinite(gradient)
                outputs = self._replaced(gradient)
            return gradient.result(arrays, outputs)

    def _check_untraced(self, gradient: Gradient) -> None:
        if any(map(gradient.plan.backend.traced, gradient.arrays)):
            raise TypeError(
                f"{self.name}: what a clipper learns and records cannot leave code that is "
                "compiled, batched or differentiated (jit, vmap, tf.function, create_graph=True): "
                "use as_optax of fedclip.loops.jax, clip of fedclip.loops.tensorflow, PureClipping "
                "of fedclip.loops.torch, or detach the arrays"
            )

    def _stepped(self, transform: Transform, gradient: Gradient) -> Sequence[Array]:
        labels = gradient.groups.labels
        if gradient.plan.is_empty:
            # There is nothing to measure, and nothing to learn from.
            self._last = (labels,)
            if not gradient.excluded_is_finite():
                raise NotFiniteError
            return gradient.inputs
        if self._on_device == gradient.on_host:
            self._state = self._moved(transform, gradient)
        gradient.cached = self._arrays
        outcome = take_step(transform, gradient, self._state, self.on_nonfinite)
        basis = transform.basis
        warm = getattr(self._state, basis.field) if basis.field else 0.0
        outputs, self._state, norms, limits, clipped, is_finite, _ = outcome
        if gradient.groups.excluded and not gradient.on_host:
            # The norms do not show NaN or infinity in excluded tensors.
            norms = gradient.xp.where(is_finite, norms, math.nan)
        self._last = (labels, norms, limits, clipped)
        self._recorder.add(labels, norms, limits, clipped, warm=warm, basis=basis)
        if self.on_record is not None:
            self._tell()
        return outputs

    def _moved(self, transform: Transform, gradient: Gradient) -> Any:
        """Return the state where the gradient is: on the host, or on its device."""
        self._on_device, labels = not gradient.on_host, gradient.groups.labels
        if not self._on_device:
            self._arrays.update(states.fetched(self._arrays))
            numbers = states.dump(self._state, labels)
            return states.load(transform.init(gradient.groups), numbers, labels)
        like, xp = gradient.arrays[0], gradient.xp
        return type(self._state)(*(xp.asarray(column, like=like) for column in self._state))

    def _tell(self) -> None:
        if self.on_record is not None and (record := self.last) is not None:
            self.on_record(record)

    @property
    def rounds(self) -> list[RoundRecord]:
        """Records of the last rounds: one a round, and one for each of its groups."""
        with self.lock:
            return self._recorder.rounds()

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step, in any round; None before the first."""
        with self.lock:
            return None if self._last is None else StepRecord(*self._last)

    def _resolve(self, arrays: Mapping[str, Array]) -> Groups:
        names = tuple(arrays)
        groups = self.groups({name: _shape(array) for name, array in arrays.items()})
        fresh, statistics = self._transform.init(groups), self.known(groups)
        self._state, self._on_device = states.load(fresh, statistics, groups.labels), False
        # Keep the statistics of a tensor that has no gradient for some steps.
        self._absent = {k: v for k, v in statistics.items() if k not in groups.labels}
        self._groups, self._names, self._loaded = groups, names, False
        self._current = None
        self._forget(groups)
        if isinstance(self._transform, SliceClipping):
            self._check_slices(self._transform, [tuple(arrays[n].shape) for n in groups.names])
        return groups

    def known(self, groups: Groups) -> Statistics:
        """Return the statistics of all known groups; a state that was loaded must have these.

        Raises
        ------
        ValueError
            If a state was loaded, and groups or tensors are missing there.
        """
        with self.lock:
            fields, statistics = self._transform.init(groups)._fields, self._statistics()
        missing = [label for label in groups.labels if fields and label not in statistics]
        if self._transform.array_fields and self._arrays:
            missing += [n for n in groups.names if n not in self._arrays and n not in missing]
        if self._loaded and missing:
            held = f"the state loaded into {self.name} is of {sorted({*statistics, *self._arrays})}"
            text = f"{held}, and the gradient also has {missing}"
            raise ValueError(f"{text}: load the state of this model, or none")
        return statistics

    def _check_slices(self, transform: SliceClipping, shapes: Sequence[tuple[int, ...]]) -> None:
        """Warn if no tensor has slices that are limited."""
        # Sparse arrays may not know their shape. Single numbers, and what is empty, are small.
        limited = any(None in shape or transform.axes(shape) for shape in shapes)
        large = [str(shape) for shape in shapes if limited or math.prod(shape) > 1]
        if not limited and large:
            which = f"slices along dims={transform.dims} of min_size={transform.min_size} elements"
            text = f"no tensor has {which}; the shapes are {', '.join(large[:5])}"
            warnings.warn(f"{self.name} clips nothing: {text}", FedclipWarning, stacklevel=6)

    def _forget(self, present: Groups) -> None:
        """Drop the statistics of the names that were absent longest, if there are too many."""
        for cached, now in ((self._absent, present.labels), (self._arrays, present.names)):
            old = [name for name in cached if name not in set(now)]
            if len(old) > _MOST_ABSENT:
                for name in old[:-_MOST_ABSENT]:
                    del cached[name]
                text = (
                    f"{self.name} drops its oldest statistics, of more than {_MOST_ABSENT:,} names"
                )
                text += " that are absent: give tensors the same names at each step"
                warnings.warn(text, FedclipWarning, stacklevel=6)

    def _statistics(self) -> Statistics:
        """Return the statistics of all known groups, also of those that are absent now."""
        present = {} if self._groups is None else states.dump(self._state, self._groups.labels)
        return {**self._absent, **present}

    def _report_nonfinite(self, gradient: Gradient) -> None:
        """Count the step, and warn or raise."""
        bad, reason = gradient.nonfinite(), "a norm beyond float64"
        self._last = (gradient.groups.labels, (), (), (), bad or (reason,))
        if bad:
            reason = f"NaN or infinity in {', '.join(map(repr, bad))}"
        if self.on_nonfinite == "raise":
            raise NonFiniteError(f"{self.name}: {reason}") from None
        self._recorder.add_nonfinite()
        self._tell()
        number = self._recorder.round
        if self._warned != number:
            self._warned = number
            done = "set to zero" if self.on_nonfinite == "skip" else "passed on"
            text = f"{self.name}: {reason}; the gradient is {done} (round {number})"
            # Point to the caller of `run`.
            warnings.warn(text, FedclipWarning, stacklevel=5)

    def _replaced(self, gradient: Gradient) -> Sequence[Array]:
        """Return the output of a step that is not finite."""
        return gradient.replaced(self.on_nonfinite)


def check_mapping(arrays: object) -> None:
    """Raise a TypeError for anything but a dict of arrays."""
    if not isinstance(arrays, Mapping):
        got = f'{type(arrays).__name__}: write clip({{"w": array}}), or run(vector) in declearn'
        raise TypeError(f"clip takes a dict of arrays by name, got {got}")


def _shape(array: Any) -> Sequence[int]:
    """Return the shape of an array; () of one without, which is then refused by name."""
    try:
        return cast("Sequence[int]", array.shape)
    except (AttributeError, RuntimeError):  # torch's nested tensors raise
        return ()
