# SPDX-License-Identifier: Apache-2.0
"""Analysis of a module of declearn, a list of them, an optimizer, or its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from declearn.optimizer import Optimizer, list_optim_modules, list_optim_regularizers
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer

from fedclip.errors import nearest
from fedclip.privacy.guarantees import Plugin, Shapes
from fedclip.privacy.sensitivity import Analysis, analyse_plugins

__all__ = ["analyse"]


def analyse(
    pipeline: object,
    shapes: Shapes | None = None,
    *,
    finite: bool = False,
) -> Analysis:
    """Return what a clipper, a list of them, or an optimizer guarantees.

    Parameters
    ----------
    pipeline
        A module or regularizer; its registered name; its name and configuration; a list of
        these, in the order in which they act; a declearn `Optimizer`, or its configuration.
    shapes : dict of tuples or None, default=None
        Shape of each tensor, by name. Without shapes, the result has formulas, and only the
        bounds that do not depend on them.
    finite : bool, default=False
        Assume that gradients hold no NaN and no infinity. declearn's own clippers, and those
        with ``on_nonfinite="propagate"``, bound nothing else.

    Raises
    ------
    TypeError, ValueError
        If `pipeline` or `shapes` is not as above, or a pattern of a scope matches no tensor.

    Examples
    --------
    >>> from fedclip import NormClip
    >>> shapes = {"w": (4, 3), "b": (4,)}
    >>> found = analyse(NormClip(max_norm=0.5), shapes)
    >>> found.l2_bound, found.per_record_safe, found.non_expansive
    (0.5, True, True)
    >>> found.sensitivity("replace-one"), found.sensitivity("add-remove", "aggregate", 0.01)
    (1.0, 0.01)
    >>> print(analyse(["norm-clip", "yogi"], shapes).reasons[0])
    yogi: no bound is known of it
    """
    plugins, lrate, w_decay = _plugins(pipeline)
    result = analyse_plugins(plugins, shapes, finite=finite)
    return replace(result, lrate=lrate, w_decay=w_decay)


def _plugins(pipeline: object) -> tuple[list[Plugin], float | None, float | None]:
    """Return the plug-ins in the order in which they act, the learning rate, the weight decay."""
    if isinstance(pipeline, Optimizer):
        config = pipeline.get_config()
        rates = (config[key] for key in ("lrate", "w_decay"))
        lrate, decay = (r if isinstance(r, float) else None for r in rates)
        return [*pipeline.regularizers, *pipeline.modules], lrate, decay
    if isinstance(pipeline, Mapping):
        return _plugins(Optimizer(**pipeline))
    if isinstance(pipeline, Sequence) and not isinstance(pipeline, str) and not _is_spec(pipeline):
        return [_plugin(one) for one in pipeline], None, 0.0
    return [_plugin(pipeline)], None, 0.0


def _is_spec(value: Sequence[object]) -> bool:
    return len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping)


def _plugin(value: object) -> Plugin:
    if isinstance(value, (OptiModule, Regularizer)):
        return value
    name, config = (value, {}) if isinstance(value, str) else ("", {})
    if isinstance(value, (list, tuple)) and _is_spec(value):
        name, config = value
    if not name:
        raise TypeError(
            "a pipeline is a module, a regularizer, a name, [name, {parameter = value}], a list "
            f"of these, an Optimizer or its configuration; got {value!r}"
        )
    known: dict[str, Plugin] = {**list_optim_regularizers(), **list_optim_modules()}
    if name not in known:
        raise ValueError(f"no module or regularizer is called {name!r}{nearest(name, known)}")
    return known[name].from_config(dict(config))
