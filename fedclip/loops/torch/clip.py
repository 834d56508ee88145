# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients in place, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import pairwise
from operator import attrgetter, le, methodcaller
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_ as _torchs_own

from fedclip.arrays.torch import TorchInPlace
from fedclip.clippers.agc import AGC, Outputs
from fedclip.clippers.base import Clipper
from fedclip.clippers.norm_clip import NormClip
from fedclip.core.records import StepRecord
from fedclip.loops.clippers import skipped, skips
from fedclip.loops.torch.names import Parameters, selected

P = ParamSpec("P")
T = TypeVar("T")
_IN_PLACE, _PLAIN = TorchInPlace(), {torch.Tensor}


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which stays outside of the graphs of ``torch.compile``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Used as a decorator, it would import the compiler with this module.
            disable: Any = torch.compiler.disable
            outside: Callable[P, T] = disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def clip_(parameters: Parameters, clipper: Clipper | AGC | float) -> StepRecord:
    """Clip the gradients of parameters in place, and return a record of the step.

    Parameters
    ----------
    parameters
        A model, ``model.named_parameters()``, or a dict. Parameters without a gradient are skipped.
        Tied weights count once, under their first name. ``model.parameters()`` is enough for a
        clipper with the scope "global" or "tensor" and no `exclude`; the names are then "0", "1",
        and so on.
    clipper
        Any clipper of fedclip; it keeps its statistics between calls. `AGC` also measures the
        parameters. A number is a fixed limit, as ``NormClip(number)``.

    Returns
    -------
    StepRecord
        Norms before clipping, limits, and which groups were clipped; as a ``float()`` the norm of
        the whole gradient. The numbers stay on the device until you read them. Without gradients,
        the record has no groups, and the norm is 0.

    Raises
    ------
    TypeError
        If the clipper needs names and there are none, if a gradient is not floating-point, or if
        the parameters are pieces of FSDP1.
    ValueError
        If the clipper is attached to an optimizer or a Trainer, which already clips; or if its
        statistics belong to other parameters, such as those of a second model.

    Examples
    --------
    >>> import torch
    >>> from fedclip import NormClip
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> float(clip_(layer, NormClip(1.0)))
    5.0
    >>> layer.weight.grad.norm() <= 1.0
    tensor(True)
    """
    if isinstance(clipper, int | float):
        clipper = _fixed(clipper, 2.0, False)
    named, outputs = selected(parameters, clipper)
    return clip_named(named, clipper, outputs) or StepRecord(())


# The clipper measures through NumPy, and counts in Python.
@uncompiled
def clip_named(
    parameters: Mapping[str, torch.Tensor],
    clipper: Clipper | AGC,
    outputs: Outputs | None = None,
) -> StepRecord | None:
    """Clip the gradients of parameters that have been checked, each under one name."""
    gradients = {name: g for name, p in parameters.items() if (g := p.grad) is not None}
    if not gradients:
        return None
    if next(iter(gradients.values())).is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{clipper.name} learns and counts in Python, which a CUDA graph does not replay: clip "
            "outside of the graph, or use PureClipping, whose state is tensors"
        )
    if share_memory([*gradients.values()]):
        unalias(parameters, gradients)
    backend = _IN_PLACE
    if {*map(type, gradients.values())} != _PLAIN and _are_sharded(gradients.values()):
        backend = _sharded(parameters, gradients)
    # A gradient of ``backward(create_graph=True)`` is changed without a trace in the graph.
    with torch.no_grad(), clipper.lock:
        if isinstance(clipper, AGC):
            weights = {name: parameters[name].detach() for name in gradients}
            after = clipper.clip(gradients, weights, backend=backend, outputs=outputs)
        else:
            after = clipper.clip_arrays(gradients, backend)
        # Of this step: another thread may have the same clipper.
        record = clipper.last
    if after is not gradients:
        for (name, gradient), output in zip(gradients.items(), after.values(), strict=True):
            # A sparse gradient that becomes dense is a new tensor.
            if output is not gradient:
                parameters[name].grad = output
    # The host names the tensors of a step that is not finite; a device does not wait.
    on_host = record is None or isinstance(record.norms, np.ndarray)
    if not on_host or getattr(clipper, "on_spike", "clip") == "skip":
        _unset_skipped(parameters, gradients, clipper, record)
    return record


def _unset_skipped(
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    clipper: Clipper | AGC,
    record: StepRecord | None,
) -> None:
    """Remove the gradients of a step that the clipper skips.

    With a gradient of zero an optimizer would still decay, count, and move by its momentum.
    """
    if record is None or not skips(clipper):
        return
    if isinstance(record.norms, torch.Tensor) and record.norms.is_meta:
        return
    for name in skipped(clipper, record, {n: tuple(g.shape) for n, g in gradients.items()}):
        parameters[name].grad = None


def _are_sharded(gradients: Iterable[torch.Tensor]) -> bool:
    return any(cls.__name__ == "DTensor" for cls in {*map(type, gradients)})


def _sharded(
    parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> TorchInPlace:
    # Slow to import, and needed for sharded models only.
    from fedclip.arrays.sharded import ShardedInPlace, summed

    for name, gradient in gradients.items():
        if (total := summed(gradient)) is not gradient:
            parameters[name].grad = gradients[name] = total
    return ShardedInPlace(gradients.values())


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Clipper | AGC,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip, and return the norm before clipping, as `torch.nn.utils.clip_grad_norm_` does.

    Parameters
    ----------
    parameters
        As in `clip_`. An empty iterator clips nothing, with torch's own warning.
    max_norm
        The largest norm, > 0; or any clipper, which keeps its statistics between calls.
    norm_type
        If `max_norm` is a number: the order of the norm, > 0 or "inf".
    error_if_nonfinite
        If `max_norm` is a number: raise a `NonFiniteError` for NaN or infinity. By default, the
        gradients become zero.
    foreach
        Has no effect; tensors are always processed together.

    Returns
    -------
    Tensor
        The norm of the whole gradient before clipping, of shape (), on the gradients' device. Its
        dtype is that of the first gradient, float32 for half precision. It is NaN if the gradient
        was not finite, and 0 without gradients. For DTensors it is a DTensor, equal on all
        processes.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> clip_grad_norm_(layer.parameters(), 1.0)
    tensor(5.)
    """
    clipper = max_norm
    if not isinstance(clipper, Clipper | AGC):
        # Anything but a number may not be hashable, and is refused.
        make = _fixed if isinstance(clipper, int | float) else _fixed.__wrapped__
        clipper = make(clipper, norm_type, error_if_nonfinite)
    elif norm_type != 2.0 or error_if_nonfinite:
        raise TypeError(
            f"norm_type and error_if_nonfinite go with a number: give {clipper.name} its own "
            "parameters ord and on_nonfinite"
        )
    if isinstance(parameters, Iterator):
        parameters = [*parameters]
        if not parameters:
            return _torchs_own((p for p in parameters), 1.0)
    named, outputs = selected(parameters, clipper)
    gradients = [g for p in named.values() if (g := p.grad) is not None]
    record = clip_named(named, clipper, outputs)
    if record is None:
        return torch.zeros(())
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if not isinstance(record.norms, torch.Tensor):
        return torch.scalar_tensor(float(record), dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(record.norms).to(dtype)
    if not _are_sharded(gradients):
        return norm
    from fedclip.arrays.sharded import replicated

    return replicated(norm, gradients)


# Typed, as True is equal to 1.
@lru_cache(maxsize=16, typed=True)
def _fixed(max_norm: float, norm_type: float | str, error_if_nonfinite: bool) -> NormClip:
    policy = "raise" if error_if_nonfinite else "skip"
    return NormClip(max_norm, ord=norm_type, on_nonfinite=policy)


# -- gradients that share memory -----------------------------------------------------------------
# A change in place would change them twice. Views of one flat buffer, as DistributedDataParallel
# makes them, lie side by side: these may stay.
_start, _is_contiguous = methodcaller("data_ptr"), methodcaller("is_contiguous")
_nbytes = attrgetter("nbytes")


def share_memory(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether two are one or may share memory, or an element is there twice."""
    try:
        spans = sorted(zip(map(_start, gradients), map(_nbytes, gradients), strict=True))
        if all(map(_is_contiguous, gradients)):
            starts = [start for start, _ in spans]
            if all(map(le, map(sum, spans[:-1]), starts[1:])):
                return False
    except RuntimeError:
        # Some are sparse, or on a device that shows no address.
        pass
    # Meta tensors, DTensors and empty ones are at 0.
    spans = sorted(span for span in map(_span, gradients) if span[0])
    return (
        len({*map(id, gradients)}) < len(gradients)
        or any(start + size > after for (start, size), (after, _) in pairwise(spans))
        or any(map(_folds, gradients))
    )


def unalias(parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    """Give each parameter a separate gradient."""
    for name, gradient in gradients.items():
        parameters[name].grad = gradients[name] = gradient.clone()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins, and its bytes up to the end of its last element.

    It begins at 0 if it is sparse, or on a device that shows no address.
    """
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        return 0, 0
    if tensor.is_contiguous():
        return start, tensor.nbytes
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return start, (1 + sum((number - 1) * step for step, number in pairs)) * tensor.itemsize


def _folds(tensor: torch.Tensor) -> bool:
    """Return whether an element of memory may be there twice, as after ``expand``."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    reach = 1
    for step, number in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if number > 1 and step < reach:
            return True
        reach += (number - 1) * step
    return False
