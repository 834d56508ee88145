# SPDX-License-Identifier: Apache-2.0
"""The shell that declearn sees: configuration, state, non-finite policy, records.

A concrete clipper chooses its parts in its constructor (see `norm_clip.py`); everything else is
here.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np

from fedclip import privacy, states
from fedclip.arrays import NUMPY, Array, Backend, Memory
from fedclip.errors import FedclipWarning, NonFiniteError, StateError, nearest, shown
from fedclip.measures import MEANS
from fedclip.parameters import boolean, choice, parameter
from fedclip.parameters.docstring import Documented
from fedclip.privacy import kinds
from fedclip.records import ALL, Recorder, RoundRecord, StepRecord, read_rounds
from fedclip.registration import OptiModule
from fedclip.rules import Rule
from fedclip.rules.history import History
from fedclip.scopes import Groups, Scope, check_exclude, check_scope, resolve
from fedclip.states import Statistics
from fedclip.transforms import (
    Gradient,
    NormClipping,
    NotFiniteError,
    Outcome,
    SliceClipping,
    Transform,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from declearn.model.api import Vector
    from declearn.optimizer.modules import AuxVar

_Clipped: TypeAlias = tuple[Sequence[Array], Mapping[str, Array]]
"""New arrays of the groups, and the excluded tensors; the very same where nothing changes."""

# Number of absent names whose statistics are kept, in case the names come back.
_MOST_ABSENT = 1000


# The attributes that steps change in place.
_CHANGING = ("_absent", "_arrays", "_recorder", "_transform")


class Clipper(Documented, OptiModule, register=False):
    """Base of fedclip's clippers: a subclass says in `build` which transform it is made of.

    It declares its parameters as fields, and has those of its bases, besides.

    A gradient with NaN or infinity is treated as `on_nonfinite` says. "skip": the output is zero,
    the step is counted, one warning a round. "raise": a `NonFiniteError` that names the tensors.
    "propagate": each group that holds one becomes NaN. No statistic ever sees such a step.

    With `keep_memory`, large outputs are written to memory that is kept between the steps of a
    round: at most one gradient's size, and only what nobody holds any more.
    """

    common_order: ClassVar[Sequence[str]] = (
        *("dims", "inverse_dims", "min_size"),
        *("include_current", "warmup", "warmup_norm", "warmup_factor", "max_norm", "on_spike"),
        *("scope", "ord", "eps", "exclude", "on_nonfinite", "keep_memory", "shared", "shared_name"),
    )

    scope: Scope = parameter(
        check_scope,
        default="global",
        kind='{"global", "tensor", "layer"} or list of patterns',
    )
    """Which tensors share a norm, and statistics: all of them, each by itself, those of a layer, or
    those whose names match a pattern."""
    exclude: str | Sequence[str] | None = parameter(
        check_exclude, default=None, kind="pattern, list of patterns or None"
    )
    """Names, or patterns of names, of the tensors that are left alone."""
    on_nonfinite: str = parameter(choice, ("skip", "raise", "propagate"), default="skip")
    """What becomes of a gradient with NaN or infinity: it is set to zero and counted, it raises an
    error, or it passes (see `fedclip.Clipper`)."""
    keep_memory: bool = parameter(boolean, default=True)
    """Whether to keep the memory of an output for the next one (see `fedclip.Clipper`)."""

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Register the class with declearn: now, or as soon as declearn is imported."""
        if register and cls.__module__.split(".")[0] != __name__.split(".")[0]:
            # So that a name of fedclip's own is refused here, and not when that is imported.
            from fedclip.modules import by_name

            by_name()
        super().__init_subclass__(register=register, **kwargs)

    def __post_init__(self) -> None:
        """Build the transform, and begin without statistics."""
        self._transform = self.build()
        # Called after each step with its record, if set; not in compiled code.
        self.on_record: Callable[[StepRecord], object] | None = None
        self._recorder = Recorder()
        # Names, groups, and the statistics of each group; known from the first gradient on.
        self._names: tuple[str, ...] = ()
        self._groups: Groups | None = None
        self._state: Any = None
        self._on_device = False
        # Statistics of groups that are missing in the current gradient, by label.
        self._absent: Statistics = {}
        # The transform's arrays, by tensor and field, in host memory.
        self._arrays: Statistics = {}
        self._loaded = False
        # What the record of the last step is made of: groups, norms, limits, clipped groups. Not
        # the arrays: a record must not keep them alive.
        self._last: tuple[Any, ...] | None = None
        self._on_client = False
        self._warned = -1
        self._memory = Memory()
        # If several threads share a clipper, only one clips, or reads what it keeps, at a time.
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the lock, for a copy or a pickle.

        What steps change in place is copied here, while none is under way.
        """
        with self.lock:
            changing = {key: copy.deepcopy(vars(self)[key]) for key in _CHANGING}
            return {k: v for k, v in vars(self).items() if k != "lock"} | changing

    def __setstate__(self, state: Mapping[str, object]) -> None:
        """Take over the result of `__getstate__`, and make a new lock."""
        vars(self).update({"on_record": None, **state}, lock=threading.RLock())

    @classmethod
    def preset(cls, name: str, **config: object) -> Self:
        """Return the clipper with the published defaults of a paper or package.

        ``fedclip translate`` prints the same as a line of TOML.

        Parameters
        ----------
        name : str
            One of those in `fedclip.compat.presets`.
        **config
            Parameters that replace the published ones.
        """
        # Imported here: hardly any program needs other packages' defaults.
        from fedclip.compat import translate
        from fedclip.compat.presets import PRESETS

        known = PRESETS.get(cls.name, {})
        return cls(**{**translate(*known[choice(tuple(known), preset=name)])[2], **config})

    def build(self) -> Transform:
        """Return the transform of the clipper, whose parameters are all set."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method build, which returns its transform"
        )

    # -- declearn's interface -----------------------------------------------------------------
    def run(self, gradients: Vector[Any]) -> Vector[Any]:
        """Return the clipped gradients; the very same object if nothing is clipped."""
        coefs = gradients.coefs
        outputs = self.clip(coefs)
        return gradients if outputs is coefs else type(gradients)(dict(outputs))

    def on_round_start(self) -> None:
        """Begin the records of a new round; the statistics stay."""
        self._on_client = True
        with self.lock:
            self._memory.release()
            self._recorder.start_round()

    def collect_aux_var(self) -> AuxVar | None:
        """Return nothing; on a server, begin a round."""
        with self.lock:
            self._memory.release()
            # declearn calls `on_round_start` only on clients, and this before a server's step.
            if not self._on_client:
                self._recorder.start_round()
        return None

    def get_state(self) -> dict[str, Any]:
        """Return the statistics by group, and the records, as plain numbers, strings and lists."""
        with self.lock:
            return {
                "clipper": self.name,
                "groups": self._statistics(),
                "arrays": states.fetched(self._arrays),
                **self._recorder.get_state(),
            }

    def set_state(self, state: Mapping[str, object]) -> None:
        """Take over a state that `get_state` of the same clipper returned, on any framework.

        Raises
        ------
        StateError
            (a `KeyError` and a `ValueError`) If anything is missing, of a wrong type, not finite,
            negative, or another clipper's. The clipper then keeps its old state.
        """
        self._take_over(state, self._transform)

    def _take_over(self, state: object, transform: Transform) -> None:
        statistics, arrays, round_, rounds = self._check_state(state, transform)
        with self.lock:
            self._transform = transform
            self._install(statistics)
            self._last = None
            self._arrays = arrays
            self._loaded = bool(statistics or arrays)
            self._recorder.set_state(round_, rounds)
            self._warned = -1

    # -- what it guarantees -------------------------------------------------------------------
    def guarantee(self, context: privacy.Context) -> privacy.Map:
        """Return what this clipper guarantees (see `fedclip.privacy.kinds`)."""
        return kinds.unknown(self, context)

    def l2_bound(self, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
        """Return the largest L2 norm of an output for tensors of these shapes; None: no bound.

        `fedclip.privacy.analyse` also says why there is none, and analyses whole optimizers.
        """
        return privacy.analyse(self, shapes).l2_bound

    def sensitivity(self, relation: str, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
        """Return the L2 sensitivity of a sum of outputs, one for each record; None: there is none.

        `relation` is "add-remove" or "replace-one".
        """
        return privacy.analyse(self, shapes).sensitivity(relation)

    # -- the way of a gradient ----------------------------------------------------------------
    def clip(
        self, arrays: Mapping[str, Array], *, backend: Backend | None = None
    ) -> Mapping[str, Array]:
        """Return the arrays, clipped, by name; the very same mapping if nothing is clipped.

        Parameters
        ----------
        arrays
            Arrays of one framework, on any device. Only a `backend` that works in place, such as
            that of the torch adapter, changes them.
        backend
            The framework of the arrays; None to find it from their type.
        """
        with self.lock:
            groups = self._resolve(arrays)
            if not arrays:
                self._last = (groups.labels,)
                return arrays
            memory = self._memory if self.keep_memory else None
            transform = self.transform(groups)
            gradient = Gradient.of(self.name, arrays, groups, transform, backend, memory)
            if not gradient.on_host and any(map(gradient.backend.traced, gradient.arrays)):
                raise TypeError(
                    f"{self.name}: what a clipper learns and records can not leave code that is "
                    "compiled, batched or differentiated (jit, vmap, tf.function, a watching tape, "
                    "create_graph=True). There, use as_optax of fedclip.adapters.jax, clip of "
                    "fedclip.adapters.tensorflow within a tf.function, or PureClipping of "
                    "fedclip.adapters.torch; who needs no derivatives can detach the arrays first"
                )
            try:
                outputs, rest = self._clip(transform, gradient)
            except NotFiniteError:
                self._report_nonfinite(gradient)
                outputs, rest = self._replaced(gradient)
            return gradient.result(arrays, outputs, rest)

    def _clip(self, transform: Transform, gradient: Gradient) -> _Clipped:
        groups = gradient.groups
        if gradient.on_host and not any(view.size for view in gradient.arrays):
            # There is nothing to measure, and nothing to learn from.
            self._last = (groups.labels,)
            if not gradient.rest_is_finite():
                raise NotFiniteError
            return gradient.unchanged()
        self._state = self._moved(transform, gradient)
        gradient.kept = self._arrays
        outcome = gradient.clipped(transform, self._state, self.on_nonfinite)
        self._note(transform, outcome, groups)
        return outcome.outputs, gradient.rest_after(outcome, self.on_nonfinite)

    def _moved(self, transform: Transform, gradient: Gradient) -> Any:
        """Return the state where the gradient is: on the host, or on its device."""
        if self._on_device == (not gradient.on_host):
            return self._state
        self._on_device, labels = not gradient.on_host, gradient.groups.labels
        if not self._on_device:
            self._arrays.update(states.fetched(self._arrays))
            return states.load(
                transform.init(gradient.groups), states.dump(self._state, labels), labels
            )
        like, xp = gradient.arrays[0], gradient.xp
        columns = (xp.asarray(np.atleast_1d(column), like=like) for column in self._state)
        return type(self._state)(*columns)

    def _note(self, transform: Transform, outcome: Outcome, groups: Groups) -> None:
        basis = transform.basis
        warm = getattr(self._state, basis.field) if basis.field else 0.0
        _, self._state, norms, limits, clipped, _ = outcome
        self._last = (groups.labels, norms, limits, clipped)
        self._recorder.add(groups.labels, norms, limits, clipped, warm=warm, basis=basis)
        if self.on_record is not None:
            self._tell()

    def _tell(self) -> None:
        if self.on_record is not None and (record := self.last) is not None:
            self.on_record(record)

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened in the last rounds, one record a round, and one for each group."""
        with self.lock:
            return self._recorder.rounds()

    @property
    def last(self) -> StepRecord | None:
        """What the last step did, in any round; None before the first."""
        with self.lock:
            return None if self._last is None else StepRecord(*self._last)

    # -- numbers in the place of tensors --------------------------------------------------------
    def update(self, norms: float | Mapping[str, float]) -> StepRecord:
        """Learn norms that are given as numbers, as a step would, and return its record.

        A number is the norm of the whole gradient; a dict holds the norms of tensors by name,
        which the scope puts together. NaN and infinity are treated as `on_nonfinite` says.

        Raises
        ------
        TypeError
            If the clipper does not go by norms alone: by values, slices, or means of elements.
        ValueError
            If a norm is negative or no number, or is one though the scope tells tensors apart.
        """
        transform = self._transform
        if not isinstance(transform, NormClipping) or transform.ord in MEANS:
            raise TypeError(f"{self.name} needs the elements of tensors, not their norms alone")
        if not isinstance(norms, Mapping):
            if self.scope != "global":
                raise ValueError(f"with scope={self.scope!r}, give a dict of norms by tensor")
            norms = {"norm": norms}
        numbers = {name: np.array([_norm(name, norm)]) for name, norm in norms.items()}
        with self.lock:
            self.clip(numbers)
            record = self.last
        return StepRecord(()) if record is None else record

    def peek(self, norms: float | Mapping[str, float]) -> StepRecord:
        """Return what `update` would return, and learn nothing."""
        with self.lock:
            other = copy.deepcopy(self, {id(self._memory): self._memory})
        other.on_record = None
        return other.update(norms)

    def should_clip(self, norms: float | Mapping[str, float]) -> bool:
        """Whether a step with these norms would be clipped."""
        return any(self.peek(norms).clipped)

    def statistics(self, group: str = ALL) -> dict[str, Any]:
        """Return what is known about the norms of a group: mean, count, ...; {} before the first.

        Without a name, of the whole gradient, or of the only group that there is. Rules on past
        norms add ``threshold``, the norm above which a norm is a spike, and ``ready``, whether they
        judge by it yet.
        """
        with self.lock:
            known = self._statistics()
        if group == ALL and len(known) == 1:
            (group,) = known
        found = dict(known.get(group, {}))
        rule = self._learning
        if found and isinstance(rule, History):
            one = self._transform.init(Groups((group,), (group,), ((0,),)))
            state = states.load(one, {group: found}, (group,))
            threshold = rule.threshold(state, NUMPY)
            ready = rule.ready(state, threshold)
            found |= {"threshold": float(threshold[0]), "ready": bool(ready[0])}
        return found

    def set_statistics(self, group: str = ALL, **statistics: float) -> None:
        """Set statistics of a group, such as its mean; the others stay as they are.

        Without a ``count``, the warm-up is over.
        """
        fresh = self._transform.init(Groups((group,), (group,), ((0,),)))
        with self.lock:
            held = self._statistics()
            known = {**states.dump(fresh, (group,)).get(group, {}), **held.get(group, {})}
            for name in statistics:
                if name not in known:
                    raise TypeError(f"{self.name} has no statistic {name!r}{nearest(name, known)}")
            if "count" in known:
                rule = self._learning
                least = max(getattr(rule, "warmup", 0), getattr(rule, "least", 1))
                known["count"] = max(known["count"], least)
            groups = {**held, group: {**known, **statistics}}
            self.set_state({**self.get_state(), "groups": groups})

    @property
    def _learning(self) -> Rule | None:
        """The rule that keeps the statistics, if there is one."""
        rule = getattr(self._transform, "rule", None)
        return getattr(rule, "past", None) or rule

    def reset(self) -> None:
        """Forget all statistics and records."""
        nothing = {"groups": {}, "arrays": {}, "round": 0, "rounds": []}
        self.set_state({"clipper": self.name, **nothing})

    def groups(self, shapes: Mapping[str, Sequence[int]]) -> Groups:
        """Return which tensors of these names and shapes share a norm."""
        return resolve(self.scope, self.exclude, list(shapes))

    @property
    def runs_on_device(self) -> bool:
        """Whether its step runs on devices and in compiled code, as those of all clippers here."""
        return self._transform.runs_on_device

    def transform(self, groups: Groups) -> Transform:
        """Return what the clipper is made of, for these groups."""
        return self._transform

    def _resolve(self, arrays: Mapping[str, Array]) -> Groups:
        names = tuple(arrays)
        if self._groups is not None and self._names == names:
            return self._groups
        found = resolve(self.scope, self.exclude, names)
        fresh, statistics = self._transform.init(found), self.known(found)
        self._state, self._on_device = states.load(fresh, statistics, found.labels), False
        # Keep the statistics of a tensor that has no gradient for some steps.
        self._absent = {k: v for k, v in statistics.items() if k not in found.labels}
        self._groups, self._names, self._loaded = found, names, False
        self._forget(found)
        if isinstance(self._transform, SliceClipping):
            self._check_slices(self._transform, [tuple(arrays[n].shape) for n in found.names])
        return found

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
            raise ValueError(
                f"the state loaded into {self.name} is of {sorted({*statistics, *self._arrays})}, "
                f"and the gradient has {missing} besides: load the state of this model, or none"
            )
        return statistics

    def _check_slices(self, transform: SliceClipping, shapes: Sequence[tuple[int, ...]]) -> None:
        """Warn if no tensor has slices that are limited."""
        # Sparse arrays may not know their shape.
        if any(None in shape or transform.axes(shape) for shape in shapes):
            return
        # Single numbers, and what is empty, are often left alone.
        shapes = [shape for shape in shapes if math.prod(shape) > 1]
        if shapes:
            dims = None if transform.dims is None else list(transform.dims)
            warnings.warn(
                f"{self.name} leaves all tensors alone: none has slices along dims = "
                f"{dims} of at least min_size = {transform.min_size} elements; their shapes are "
                f"{', '.join(map(str, shapes[:5]))}{', …' if shapes[5:] else ''}",
                FedclipWarning,
                stacklevel=5,
            )

    def _forget(self, present: Groups) -> None:
        """Drop the statistics of the names that were absent longest, if there are too many."""
        for kept, now in ((self._absent, present.labels), (self._arrays, present.names)):
            old = [name for name in kept if name not in set(now)]
            if len(old) > _MOST_ABSENT:
                for name in old[:-_MOST_ABSENT]:
                    del kept[name]
                warnings.warn(
                    f"{self.name}: statistics of more than {_MOST_ABSENT:,} names that this "
                    "gradient does not have, the oldest are dropped; give tensors the same names "
                    "at each step",
                    FedclipWarning,
                    stacklevel=5,
                )

    def _install(self, statistics: Statistics) -> None:
        """Take over statistics, to be matched with the names of the next gradient."""
        self._groups, self._names, self._state = None, (), None
        self._absent, self._loaded = statistics, False

    def _statistics(self) -> Statistics:
        """Return the statistics of all known groups, also of those that are absent now."""
        present = {} if self._groups is None else states.dump(self._state, self._groups.labels)
        return {**self._absent, **present}

    def _check_state(
        self, state: object, transform: Transform
    ) -> tuple[Statistics, Statistics, int, list[RoundRecord]]:
        if not isinstance(state, Mapping):
            raise StateError(f"a state must be a dict, got {type(state).__name__}")
        for key in ("clipper", "groups", "arrays", "round", "rounds"):
            if key not in state:
                raise StateError(f"the state lacks {key!r}; it has {sorted(map(str, state))}")
        if state["clipper"] != self.name:
            raise StateError(f"the state is of {state['clipper']!r}, and this is {self.name!r}")
        round_ = states.check_count("round", state["round"])
        one = transform.init(Groups(("x",), ("x",), ((0,),)))
        groups = states.check_groups(state["groups"], one)
        arrays = states.check_arrays(state["arrays"], transform.array_fields)
        return groups, arrays, round_, read_rounds(state)

    def _report_nonfinite(self, gradient: Gradient) -> None:
        """Count the step, and warn or raise."""
        bad = gradient.nonfinite()
        blamed = tuple(gradient.names[i] for i in bad) or ("a norm beyond float64",)
        self._last = (gradient.groups.labels, (), (), (), blamed)
        told = ", ".join(map(repr, blamed))
        told = f"NaN or infinity in {told}" if bad else blamed[0]
        if self.on_nonfinite == "raise":
            raise NonFiniteError(f"{self.name}: {told}") from None
        self._recorder.add_nonfinite()
        self._tell()
        if self._warned != self._recorder.round:
            self._warned = self._recorder.round
            done = "skipped" if self.on_nonfinite == "skip" else "passed on"
            warnings.warn(
                f"{self.name}: {told}; the step is {done} "
                f"(round {self._recorder.round}; more of them are counted without a warning)",
                FedclipWarning,
                # Point to the caller of `run`.
                stacklevel=4,
            )

    def _replaced(self, gradient: Gradient) -> _Clipped:
        """Return what comes out of a step that is not finite."""
        return gradient.replaced(self.on_nonfinite)


def _norm(name: str, norm: Any) -> float:
    """Return a norm that is given as a number, of Python or of a framework."""
    try:
        result = math.nan if isinstance(norm, str) else float(norm)
        if isinstance(norm, str) or result < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"a norm must be a number >= 0, got {shown(norm)} for {name!r}") from None
    return result
