# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients in place, once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise

import torch
from torch.nn.utils import clip_grad_norm_ as _torchs_own

from fedclip.arrays.torch import TorchInPlace
from fedclip.clippers.agc import AGC, Outputs
from fedclip.clippers.base import Clipper
from fedclip.clippers.norm_clip import NormClip
from fedclip.core.records import StepRecord
from fedclip.loops.clippers import check_clipper, check_free, clipped, skipped, skips
from fedclip.loops.torch.guards import uncompiled
from fedclip.loops.torch.names import (
    Parameters,
    check_remembered,
    check_sharding,
    named,
    outputs_of,
)

_IN_PLACE = TorchInPlace()


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
        If the clipper is attached to an optimizer or a Trainer, which already clips. Also if its
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
    clipper = check_clipper(clipper)
    found = _checked(parameters, clipper)
    outputs = outputs_of(parameters, found, clipper)
    return clip_named(found, clipper, outputs, given=True) or StepRecord(())


def _checked(parameters: Parameters, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    found = named(parameters, clipper)
    check_free(clipper)
    check_sharding(found.values())
    return found


# The clipper measures through NumPy, and counts in Python.
@uncompiled
def clip_named(
    parameters: Mapping[str, torch.Tensor],
    clipper: Clipper | AGC,
    outputs: Outputs | None = None,
    given: bool = False,
) -> StepRecord | None:
    """Clip the gradients of parameters that have been checked, each under one name.

    They may be others at each call if they are `given` by the user.
    """
    if given:
        check_remembered(parameters, clipper)
    gradients = {name: g for name, p in parameters.items() if (g := p.grad) is not None}
    if not gradients:
        return None
    if next(iter(gradients.values())).is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{clipper.name} learns and counts in Python, which a CUDA graph does not replay: clip "
            "outside of the graph, or use PureClipping, whose state is tensors"
        )
    if not are_apart(gradients.values()):
        separate(parameters, gradients)
    backend = _IN_PLACE
    if _are_sharded(gradients.values()):
        backend = _sharded(parameters, gradients)
    # A gradient of ``backward(create_graph=True)`` is changed without a trace in the graph.
    with torch.no_grad(), clipper.lock:
        after = clipped(
            clipper,
            gradients,
            lambda: {n: parameters[n].detach() for n in gradients},
            backend,
            outputs,
        )
        # Of this step: another thread may have the same clipper.
        record = clipper.last
    if after is not gradients:
        for (name, gradient), output in zip(gradients.items(), after.values(), strict=True):
            # A sparse gradient that becomes dense is a new tensor.
            if output is not gradient:
                parameters[name].grad = output
    # With a gradient of zero an optimizer would still decay, count, and move by its momentum.
    if record is not None and skips(clipper) and not _has_no_data(record.norms):
        for name in skipped(clipper, record, {n: tuple(g.shape) for n, g in gradients.items()}):
            parameters[name].grad = None
    return record


def _has_no_data(norms: object) -> bool:
    return isinstance(norms, torch.Tensor) and norms.is_meta


def _are_sharded(gradients: Iterable[torch.Tensor]) -> bool:
    return any(cls.__name__ == "DTensor" for cls in {*map(type, gradients)})


def _sharded(
    parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> TorchInPlace:
    # Who shards nothing need not import this, which takes a while.
    from fedclip.arrays.sharded import ShardedInPlace, summed

    for name, gradient in gradients.items():
        if (whole := summed(gradient)) is not gradient:
            parameters[name].grad = gradients[name] = whole
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
        # What is no number may not be hashable, and gets a sentence.
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
    found = _checked(parameters, clipper)
    gradients = [g for p in found.values() if (g := p.grad) is not None]
    record = clip_named(found, clipper, outputs_of(parameters, found, clipper), given=True)
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
def are_apart(gradients: Collection[torch.Tensor]) -> bool:
    """Return whether no two are one or may share memory, and no element is there twice."""
    # Meta tensors, DTensors and empty ones are at 0.
    spans = sorted(span for span in map(_span, gradients) if span[0])
    return (
        len({*map(id, gradients)}) == len(gradients)
        and all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        and not any(map(_folds, gradients))
    )


def separate(parameters: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
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
