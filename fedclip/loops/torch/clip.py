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
from fedclip.loops.clippers import check_clipper, clipped, skipped, skips
from fedclip.loops.owner import check_free, check_members
from fedclip.loops.torch.guards import uncompiled
from fedclip.loops.torch.names import Parameters, check_sharding, named, outputs_of

_IN_PLACE = TorchInPlace()


def clip_(parameters: Parameters, clipper: Clipper | AGC | float) -> StepRecord:
    """Clip the gradients of parameters, in place on ``.grad``.

    Parameters
    ----------
    parameters
        A model, ``model.named_parameters()``, or a dict. Parameters without a gradient are left
        out; a parameter with two names (tied weights) counts once, under its first name.
        ``model.parameters()`` will do for a clipper with the scope "global" or "tensor" and no
        `exclude`: the parameters are then called "0", "1", ... in their order.
    clipper
        Any clipper of fedclip, made once; it keeps its statistics from call to call. `AGC` also
        measures the parameters. A number is a fixed limit of the norm, as ``NormClip(number)``.

    Returns
    -------
    StepRecord
        What the step did: norms before clipping, limits, and which groups were clipped; as a
        ``float()`` the norm of the whole gradient. The numbers stay on the device until you look
        at them. If there was no gradient, the record has no groups, and the norm is 0.

    Raises
    ------
    TypeError
        If the clipper needs names and there are none, if a gradient is not of a floating type, or
        if the parameters are pieces of FSDP1.
    ValueError
        If the clipper is attached to an optimizer, or in a Trainer, which clips already; or if it
        keeps statistics that are of other parameters: a list without names whose members change,
        or one clipper for two models in turn.

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
        # Loops that make their tensors at each step have no Parameters.
        a_model = isinstance(next(iter(parameters.values()), None), torch.nn.Parameter)
        check_members(clipper, parameters, fixed=False, new_model=a_model)
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
    """Clip, and return the norm from before, as `torch.nn.utils.clip_grad_norm_` does.

    Parameters
    ----------
    parameters
        As in `clip_`. An iterator without parameters clips nothing, with torch's own warning.
    max_norm
        The largest norm, > 0; or any clipper, which keeps its statistics from call to call.
    norm_type
        With a number as `max_norm`: the order of the norm, > 0 or "inf".
    error_if_nonfinite
        With a number as `max_norm`: raise a `NonFiniteError` for NaN or infinity, instead of
        setting the gradients to zero.
    foreach
        Without effect, for calls that were written for torch: tensors are always treated
        together.

    Returns
    -------
    Tensor
        The norm of the whole gradient before clipping, of shape (), on the gradients' device and
        in the dtype of the first one, of half precision in float32; NaN if it was not finite, and
        0 if there was no gradient. Of DTensors it is one, the same on each process.

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
    """Give each parameter a gradient of its own."""
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
