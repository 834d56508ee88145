# SPDX-License-Identifier: Apache-2.0
"""The base of clippers: what declearn sees, and what users ask them; `core.py` clips.

A concrete clipper chooses its parts in `build` (see `norm_clip.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np

from fedclip import privacy
from fedclip.arrays import NUMPY, Array, Backend, on_host
from fedclip.clippers.core import Core
from fedclip.core import states
from fedclip.core.measures import MEANS
from fedclip.core.parameters import boolean, parameter
from fedclip.core.plugins import OptiModule, V
from fedclip.core.records import ALL, StepRecord, read_rounds
from fedclip.core.scopes import Groups, Scope, check_scope
from fedclip.errors import StateError, nearest, shown
from fedclip.rules import Rule, known
from fedclip.transforms import NormClipping, Transform

if TYPE_CHECKING:
    from fedclip.clippers.sharing import SharedState


class Clipper(Core, OptiModule, register=False):
    """Base of fedclip's clippers: each turns a gradient into a clipped one, and keeps records.

    Use a subclass such as `fedclip.NormClip`, as a module of a declearn optimizer or in a training
    loop (`fedclip.loops`).

    A gradient with NaN or infinity is treated as `on_nonfinite` says:

    - "skip": the output is zero, the step is counted, and you get one warning a round. Loops of
      torch and Keras, and `as_optax` with `inner`, then skip the optimizer's step; declearn's
      optimizer steps with zeros.
    - "raise": a `NonFiniteError` names the tensors.
    - "propagate": each group that holds NaN or infinity becomes NaN.

    No statistic ever learns from such a step.

    With `keep_memory`, large outputs reuse memory between the steps of a round: at most the size of
    one gradient, and only arrays that nothing else refers to.

    To write a clipper, declare its parameters as fields, and return its transform from `build`.
    """

    _common_order: ClassVar[Sequence[str]] = (
        *("dims", "inverse_dims", "min_size"),
        *("include_current", "warmup", "warmup_norm", "warmup_factor", "max_norm", "on_spike"),
        *("scope", "ord", "eps", "exclude", "on_nonfinite", "keep_memory", "shared", "shared_name"),
    )

    scope: Scope = parameter(
        check_scope, default="global", kind='{"global", "tensor", "layer"} or list of patterns'
    )
    """Tensors that share norm and statistics: all, each one, those of a layer, or of a pattern."""
    keep_memory: bool = parameter(boolean, default=True)
    """Reuse the memory of large outputs between steps."""

    def __init_subclass__(cls, register: bool = True, **kwargs: object) -> None:
        """Register the class with declearn: now, or as soon as declearn is imported."""
        if register and cls.__module__.split(".")[0] != __name__.split(".")[0]:
            # So that a name of fedclip's own is refused here, and not when that is imported.
            from fedclip.clippers import by_name

            by_name()
        super().__init_subclass__(register=register, **kwargs)

    def __post_init__(self) -> None:
        """Build the transform, and what is shared of it."""
        super().__post_init__()
        self._sharing = self._shared_state(self._transform)

    def _shared_state(self, transform: Transform) -> SharedState | None:
        """Return the client's side of a state that all clients share, if there is one."""
        return None

    # -- declearn's interface -----------------------------------------------------------------
    def run(self, gradients: V) -> V:
        """Return the clipped gradients; the same object if nothing is clipped."""
        coefs: Any = getattr(gradients, "coefs", None)
        if type(coefs) is not dict:
            coefs = self._coefs(gradients)
        outputs = self.clip(coefs)
        make: Callable[[dict[str, Array]], V] = type(gradients)
        return gradients if outputs is coefs else make(dict(outputs))

    def collect_aux_var(self) -> object | None:
        """Return the counts, if they are shared; on a server, start a round."""
        with self.lock:
            self._memory.release()
            # declearn calls `on_round_start` only on clients, and this before a server's step.
            if not self._on_client:
                self._recorder.start_round()
                # A clipper on the server shares nothing; the clients' counts are for its module.
                vars(self)["aux_name"] = None
            elif self._sharing is not None and self._sharing.heard():
                message, statistics = self._sharing.message(self._statistics())
                self._install(statistics)
                return message
        return None

    def process_aux_var(self, aux_var: object) -> None:
        """Take over the state that the server has sent, if it is shared.

        Raises
        ------
        ValueError
            If clipper and server module do not match, or the message is not valid.
        """
        if self._sharing is None or not self._sharing.reads(aux_var):
            super().process_aux_var(aux_var)
            return
        with self.lock:
            statistics = self._sharing.receive(aux_var, self._statistics())
            self._transform = self._sharing.transform(self._sharing.version)
            self._install(statistics)

    def get_state(self) -> dict[str, Any]:
        """Return the statistics by group, and the records, as plain numbers, strings and lists."""
        with self.lock:
            return {
                "clipper": self.name,
                "groups": self._statistics(),
                "arrays": states.fetched(self._arrays),
                **self._recorder.get_state(),
                **({"owner": dict(self.owner)} if self.owner else {}),
                **({} if self._sharing is None else {"shared": self._sharing.get_state()}),
            }

    def reset(self) -> None:
        super().reset()
        if self._sharing is not None:
            self._sharing.version, self._transform = None, self._sharing.transform(None)

    def set_state(self, state: Mapping[str, object]) -> None:
        """Restore a state that `get_state` of the same clipper returned, on any framework.

        Raises
        ------
        StateError
            (a `KeyError` and a `ValueError`) If an entry is missing, of a wrong type, not finite,
            negative, or from another clipper. The clipper then keeps its old state.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"a state must be a dict, got {type(state).__name__}")
        version, transform = None, self._transform
        if self._sharing is not None:
            version = self._sharing.check_state(state.get("shared"))
            transform = self._sharing.transform(version)
        for key in ("clipper", "groups", "arrays", "round", "rounds"):
            if key not in state:
                raise StateError(f"the state lacks {key!r}; it has {sorted(map(str, state))}")
        if state["clipper"] != self.name:
            raise StateError(f"the state is of {state['clipper']!r}, not of {self.name!r}")
        single = transform.init(Groups(("x",), ("x",), ((0,),)))
        statistics = states.check_groups(state["groups"], single)
        arrays = states.check_arrays(state["arrays"], transform.array_fields)
        round_, rounds = states.check_count("round", state["round"]), read_rounds(state)
        owner = states.check_owner(state.get("owner"))
        with self.lock:
            self._transform = transform
            self._install(statistics)
            self.owner, self.model, self._last, self._arrays = owner, None, None, arrays
            # The server decides which groups there are, and may know more of them.
            self._loaded = bool(statistics or arrays) and version is None
            if self._sharing is not None:
                self._sharing.version = version
            self._recorder.set_state(round_, rounds)
            self._warned = -1

    # -- what it guarantees -------------------------------------------------------------------
    def guarantee(self, context: privacy.Context) -> privacy.Guarantee:
        """Return what this clipper guarantees (see `fedclip.privacy.guarantees`)."""
        return privacy.guarantees.unknown(self, context)

    def l2_bound(self, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
        """Return the largest L2 norm of an output for tensors of these shapes; None if unbounded.

        `fedclip.analyse` also says why there is no bound, and analyses whole optimizers.
        """
        return privacy.analyse_plugins([self], shapes).l2_bound

    def sensitivity(self, relation: str, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
        """Return the L2 sensitivity of a sum of outputs, one per record; None if unbounded.

        `relation` is "add-remove" or "replace-one".
        """
        return privacy.analyse_plugins([self], shapes).sensitivity(relation)

    # -- the way of a gradient ----------------------------------------------------------------
    def clip(
        self, arrays: Mapping[str, Array], *, backend: Backend | None = None
    ) -> Mapping[str, Array]:
        """Return the clipped arrays by name; the same mapping if nothing is clipped.

        Parameters
        ----------
        arrays
            Arrays of one framework by name, on any device. They change in place only if the
            `backend` works in place, as that of the torch loop does.
        backend
            The framework of the arrays. None: derived from their type.
        """
        return self.clip_arrays(arrays, backend)

    # -- numbers instead of tensors -----------------------------------------------------------
    def observe(self, norms: float | Mapping[str, float]) -> StepRecord:
        """Learn from norms that are given as numbers, as a step would, and return its record.

        Parameters
        ----------
        norms
            A number >= 0 is the norm of the whole gradient. A dict holds the norms of tensors by
            name, which `scope` groups. NaN and infinity are treated as `on_nonfinite` says.

        Raises
        ------
        TypeError
            If the clipper needs more than norms: values, slices, or means of elements.
        ValueError
            If a norm is negative or not a number, or if `scope` needs the norm of each tensor.
        """
        transform = self._transform
        if not isinstance(transform, NormClipping) or transform.ord in MEANS:
            why = f"{self.name} goes by the elements of tensors"
            raise TypeError(f"{why}: call clip with the arrays")
        if not isinstance(norms, Mapping):
            if self.scope != "global":
                several = f"scope={self.scope!r} has several groups"
                raise ValueError(f"got one norm, and {several}: give a dict of norms by tensor")
            norms = {"norm": norms}
        numbers = {name: np.array([_norm(name, norm)]) for name, norm in norms.items()}
        with self.lock:
            self.clip(numbers)
            record = self.last
        return StepRecord(()) if record is None else record

    def _expect(self, norms: float | Mapping[str, float]) -> StepRecord:
        """Return what `observe` would return, and learn nothing."""
        with self.lock:
            other = copy.deepcopy(self, {id(self._memory): self._memory})
        other.on_record = None
        return other.observe(norms)

    def should_clip(self, norms: float | Mapping[str, float]) -> bool:
        """Return whether a step with these norms would be clipped; see `observe`."""
        return any(self._expect(norms).clipped)

    @overload
    def get_limit(self, norms: float) -> float: ...
    @overload
    def get_limit(self, norms: Mapping[str, float]) -> dict[str, float]: ...
    def get_limit(self, norms: float | Mapping[str, float]) -> float | dict[str, float]:
        """Return the limit that a step with these norms would have; nothing is learnt.

        Parameters
        ----------
        norms
            As for `observe`.

        Returns
        -------
        float or dict
            The limit, > 0, infinity for none; for a dict, the limits by group.

        Examples
        --------
        >>> from fedclip import NormClip
        >>> NormClip(2.0).get_limit(5.0)
        2.0
        """
        record = self._expect(norms)
        limits = dict(zip(record.groups, record.limit or repeat(math.nan), strict=False))
        return limits if isinstance(norms, Mapping) else limits[ALL]

    def statistics(self, group: str = ALL) -> dict[str, Any]:
        """Return the statistics of a group's norms: mean, count, and so on.

        Parameters
        ----------
        group
            Label of a group. By default the whole gradient, or the only group.

        Returns
        -------
        dict
            The statistics by name. Clippers with a limit on norms add ``threshold`` and ``ready``.
            A norm above the threshold is clipped or a spike; it is infinity until there is one.
            ``ready`` says whether the clipper judges by it yet. Empty if this group is unknown but
            others are known.
        """
        with self.lock:
            learnt = self._statistics()
        if group == ALL and len(learnt) == 1:
            (group,) = learnt
        if learnt and group not in learnt:
            return {}
        groups = Groups((group,), (group,), ((0,),))
        transform = self.transform(groups)
        state = states.load(transform.init(groups), learnt, (group,))
        columns = known(_rule_of(transform), state, NUMPY)
        numbers = {field: on_host(column)[..., 0].tolist() for field, column in columns.items()}
        return numbers | ({"count": int(numbers["count"])} if "count" in numbers else {})

    def set_statistics(self, group: str = ALL, **statistics: float) -> None:
        """Set statistics of a group, such as its mean; others do not change.

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
                rule = _rule_of(self._transform)
                least = max(getattr(rule, "warmup", 0), getattr(rule, "least", 1))
                known["count"] = max(known["count"], least)
            groups = {**held, group: {**known, **statistics}}
            self.set_state({**self.get_state(), "groups": groups})

    @property
    def runs_on_device(self) -> bool:
        """Whether its step runs on devices and in compiled code; all clippers of fedclip do."""
        return self._transform.runs_on_device

    def transform(self, groups: Groups) -> Transform:
        """Return the transform that clips these groups."""
        return self._transform

    def _made(self, groups: Groups, backend: Backend | None) -> Transform:
        return self.transform(groups)


def _rule_of(transform: Transform) -> Rule | None:
    """Return the rule that keeps the statistics of a transform, if there is one."""
    rule = getattr(transform, "rule", None)
    return getattr(rule, "past", None) or getattr(rule, "rule", rule)


def _norm(name: str, norm: Any) -> float:
    """Return a norm that is given as a number, of Python or of a framework."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(norm, str) and not float(norm) < 0:
            return float(norm)
    raise ValueError(f"a norm must be a number >= 0, got {shown(norm)} for {name!r}")
