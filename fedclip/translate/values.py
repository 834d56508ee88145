# SPDX-License-Identifier: Apache-2.0
"""The functions by which `peers.toml` reads the parameters of other packages."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import TypeGuard

from fedclip.core.parameters import Config, boolean
from fedclip.errors import Unchecked, nearest, shown

REQUIRED: object = object()
"""The default of a parameter that the other package requires."""


def unknown(what: str, given: object, allowed: Mapping[str, object]) -> str:
    """Return a sentence about what is not allowed, with the nearest that is."""
    hint = nearest(str(given), allowed) or f"; it must be one of {', '.join(allowed) or 'none'}"
    return f"{what} {given!r}{hint}"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and not True or False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def signature(text: str) -> Config:
    """Return parameters with their defaults, written as in a call.

    Examples
    --------
    >>> signature("beta=0.99, init=None")
    {'beta': 0.99, 'init': None}
    >>> signature("max_norm")["max_norm"] is REQUIRED
    True
    """
    _, pairs = parsed("a signature", f"f({text})")
    required = {value: REQUIRED for key, value in pairs if isinstance(key, int)}
    return {**required, **{key: value for key, value in pairs if not isinstance(key, int)}}


def parsed(parameter: str, text: str) -> tuple[str, list[tuple[Unchecked, Unchecked]]]:
    """Return the name of a call, or a name alone, and arguments by number or by name."""
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        call = expression if isinstance(expression, ast.Call) else ast.Call(expression, [], [])
        name = ast.unparse(call.func).rpartition(".")[2]
        pairs = [*enumerate(call.args), *((k.arg, k.value) for k in call.keywords)]
        return name, [(key, _plain(node)) for key, node in pairs]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        allowed = "a name, or a call such as Name(0.9, x=2)"
        raise ValueError(f"{parameter} must be {allowed}, got {shown(text)}") from None


def _plain(node: ast.expr) -> object:
    """Return the value of an expression, or its text if it is not plain; of a name the last."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return text.rpartition(".")[2] if isinstance(node, ast.Attribute) else text


def checked(what: str, parameters: Mapping[str, object], given: Mapping[str, object]) -> Config:
    """Return the values of all parameters, those left out at their defaults.

    Raises
    ------
    ValueError
        If one is unknown or missing, or its default is of another type.
    """
    cls = what.partition(" ")[0]
    for key, value in given.items():
        if key not in parameters:
            raise ValueError(unknown(f"{what} has no parameter", key, parameters))
        default = parameters[key]
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{key} of {cls} must be True or False, got {shown(value)}")
        elif key not in _FREE and not isinstance(default, str) and not is_number(value):
            if value is None and (default is None or key in _MAY_BE_NONE):
                continue
            raise ValueError(f"{key} of {cls} must be a number, got {shown(value)}")
    values = {**parameters, **given}
    missing = [key for key, value in values.items() if value is REQUIRED]
    if missing:
        raise ValueError(f"{what} needs {', '.join(map(repr, missing))}")
    return values


# Parameters that take more than numbers although their default is none or a number: each row
# checks its own. Then those whose value may be None, which is not their default.
_FREE = {"ord", "norm_type", "dim", "axis", "axes", "init", "ema_init", "clipping_function"}
_FREE |= {"parameterwise", "gradient_clip_algorithm", "inner", "exp_avg_tfm", "ema_tfm"}
_MAY_BE_NONE = {"max_norm", "max_grad_norm", "max_ema_growth", "mul", "min_value", "max_decay"}
_MAY_BE_NONE |= {"max_clipbound"}


# -- what the rows call -----------------------------------------------------------------------
def word(parameter: str, given: object, words: Mapping[str, object] | str) -> object:
    """Return our value for a word of the other package, or the word if we have the same."""
    if isinstance(words, str):
        words = {word: word for word in words.split()}
    if not isinstance(given, str) or given not in words:
        raise ValueError(unknown(f"{parameter} cannot be", given, words))
    return words[given]


def order(value: object) -> float | str:
    """Return our `ord` for 2, 2.0, "2", "2.0", "l2", "inf", "linf", "mad", ..."""
    if is_number(value):
        return "inf" if value == math.inf else value
    try:
        number = float(str(value).removeprefix("l"))
    except ValueError:
        return str(word("ord", value, "mad std var sum l0 l1 l2 l3 l4 linf inf"))
    return "inf" if number == math.inf else int(number) if number.is_integer() else number


def dims(parameter: str, value: object) -> list[int] | None:
    """Return dimensions, given as an int or as ints, as a list; None for None."""
    values = [value] if isinstance(value, int) else value
    if value is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(type(d) is int for d in values):
        raise ValueError(f"{parameter} must be an int, a list of ints or None, got {shown(value)}")
    return list(values)


def only_one(what: str, least: int, **values: object) -> object:
    """Return the value of the one parameter that is not None; None if `least` is 0."""
    set_values = {key: value for key, value in values.items() if value is not None}
    if not least <= len(set_values) <= 1:
        names = ", ".join(set_values) or "none"
        raise ValueError(f"{what} takes one of {', '.join(values)}, got {names}")
    return next(iter(set_values.values()), None)


def only_none(**values: object) -> None:
    """Refuse modules inside a clipper."""
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name} can only be None: modules inside a clipper have no bound")


def spanned(dim: object, inverse: bool, min_size: object) -> Config | None:
    """Return our parameters for torchzero's dims; None if they leave every tensor untouched."""
    if isinstance(dim, str):
        return {"scope": word("dim", dim, "global")}
    along = dims("dim", dim)
    if (along is None and inverse) or (along == [] and not inverse):
        return None
    spans = {"dims": along, "inverse_dims": inverse} if along else {}
    return {"scope": "tensor", **spans, "min_size": min_size}


def negative(dim: object) -> bool:
    """Whether one of torchzero's dims counts from the end."""
    return dim != "global" and any(d < 0 for d in dims("dim", dim) or ())


def grouped(ord: object, tensorwise: object, parameterwise: object) -> Config:
    """Return our order and scope for torchzero's, whose `tensorwise` had another name."""
    tensorwise = tensorwise if parameterwise is None else parameterwise
    scope = "tensor" if boolean(parameterwise=tensorwise) else "global"
    return {"ord": order(ord), "scope": scope}


def start(init: object, ema_init: object, first: float | str) -> object:
    """Return the start of an average of torchzero's; `first` means the first update."""
    words = {"zeros": 0.0, "update": first}
    if ema_init is not None:
        return word("ema_init", ema_init, words)
    # Some versions take words for `init` as well.
    return word("init", init, words) if isinstance(init, str) else init


_SHORT = {"zstat": "ZStatCriterion", "ema": "EMACriterion", "norm1": "GradNormClipper"}
_OWN = " (OwnLimit of fedclip takes a function that you write)"


def made(
    parameter: str, value: object, classes: Mapping[str, Config], hint: str
) -> tuple[str, Config]:
    """Return the class, and what it was given, of an object that is the value of a parameter.

    It may be the object, its class, or how either is written: ``"GradNormClipper(5)"``. The `hint`
    follows the error if there is no such class.
    """
    if isinstance(value, str):
        name, pairs = parsed(parameter, value)
    else:
        name = (value if isinstance(value, type) else type(value)).__name__
        pairs = [(k, getattr(value, k)) for k in classes.get(name, ()) if hasattr(value, k)]
    if name not in classes:
        raise ValueError(unknown(f"{parameter} cannot be", name, classes) + hint)
    names = dict(enumerate(classes[name]))
    arguments = {str(names.get(key, key)): value for key, value in pairs}
    if len(arguments) < len(pairs):
        raise ValueError(f"{parameter} gives a parameter twice: {shown(value)}")
    return name, arguments


def drytorch_criterion(given: object, classes: Mapping[str, Config], **more: object) -> Config:
    """Return the decay, threshold and action of a criterion, parts of which are in `more`."""
    names = ("ZStatCriterion", "EMACriterion", "zstat", "ema")
    known = {n: classes[_SHORT.get(n, n)] for n in names}
    name, options = made("criterion", given, known, _OWN)
    threshold = "z_thresh" if "z_thresh" in known[name] else "r_thresh"
    for key, value in more.items():
        key = threshold if key == "thresh" else key
        if value is not None:
            if key in options:
                raise ValueError(f"{key} of {name} is given twice")
            options[key] = value
    values = checked(f"{name} of drytorch", known[name], options)
    function = values.pop("clipping_function")
    function = getattr(function, "__name__", function)
    actions = {f"{a}{end}": a for a in ("max", "mean", "reciprocal") for end in ("", "_clipping")}
    if function not in actions:
        raise ValueError(unknown("clipping_function cannot be", function, actions) + _OWN)
    return {**values, "action": actions[function]}


def drytorch_warmup(given: object, classes: Mapping[str, Config]) -> object:
    """Return the limit that clips during a warm-up; None for no limit."""
    clip, none = classes["GradNormClipper"], classes["NoOp"]
    known = {"GradNormClipper": clip, "NoOp": none, "norm1": clip, "noop": none}
    hint = " (docs/coming-from.md shows how to warm up with any other operation)"
    name, options = made("warmup_clip_strategy", given, known, hint)
    return checked(f"{name} of drytorch", known[name], options).get("threshold")


def local_dp(clipping_norm: float, sensitivity: float, budget: float, delta: float) -> Config:
    """Return the noise of Flower's `LocalDpMod`, and what a round of it costs by our accountant.

    Its standard deviation is ``sensitivity * sqrt(2 log(1.25 / delta)) / epsilon``.
    """
    from fedclip.privacy.accounting import RELATIONS, Release, epsilon, noise_multiplier

    # Four digits of it are shown: those may be rounded down.
    needed = noise_multiplier(budget, delta, 1, relation="replace-one") * (1.0 + 5e-4)
    multiplier = sensitivity * math.sqrt(2.0 * math.log(1.25 / delta)) / budget / clipping_norm
    costs = {r.replace("-", "_"): epsilon([Release(multiplier)], delta, r) for r in RELATIONS}
    return {"multiplier": multiplier, "needed": needed, **costs}
