# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients in place, once, under the names of parameters.

==========================  ===============================================================
parameters are given as     names
==========================  ===============================================================
a module                    those of ``named_parameters()``
pairs, or a mapping         those names; repeated ones are numbered: ``w``, ``w#1``
parameters                  ``0``, ``1``, ... by position, whether they have a gradient or not
==========================  ===============================================================

Statistics are kept by name, the same under every wrapper. Prefixes of wrappers are taken off:
``module.`` (DistributedDataParallel) and ``_forward_module.`` (Lightning's Fabric) where all names
have it, ``_orig_mod.`` (torch.compile) and ``_checkpoint_wrapped_module.`` anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from operator import attrgetter, le
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_ as _torchs_own

from fedclip.arrays.torch import TorchInPlace
from fedclip.clippers.agc import AGC, Axes, Outputs
from fedclip.clippers.base import Clipper
from fedclip.clippers.norm_clip import NormClip
from fedclip.core.records import StepRecord
from fedclip.loops import clippers
from fedclip.loops.clippers import Use, shapes_of, skipped, skips, use_of

P = ParamSpec("P")
T = TypeVar("T")
Parameters: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | "
    "Iterable[torch.Tensor] | torch.Tensor"
)
"""A model, ``model.named_parameters()``, a dict, or ``model.parameters()``."""

_IN_PLACE, _PLAIN = TorchInPlace(), {torch.Tensor}
_FIRST = ("module.", "_forward_module.")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


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
    named, outputs = selected(parameters, clipper)
    return clip_named(named, clipper, outputs) or StepRecord(())


# The clipper measures through NumPy, and counts in Python.
@uncompiled
def clip_named(
    parameters: Mapping[str, torch.Tensor], clipper: Clipper | AGC, outputs: Outputs | None
) -> StepRecord | None:
    """Clip the gradients of parameters that have been checked, each under one name."""
    gradients = {name: g for name, p in parameters.items() if (g := p.grad) is not None}
    if not gradients:
        return None
    if next(iter(gradients.values())).is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{clipper.name} counts in Python, which a CUDA graph does not replay: clip outside it"
        )
    if share_memory([*gradients.values()], use_of(clipper)):
        for name, gradient in gradients.items():
            parameters[name].grad = gradients[name] = gradient.clone()
    backend = _IN_PLACE
    if {*map(type, gradients.values())} != _PLAIN and are_sharded(gradients.values()):
        backend = _sharded(parameters, gradients)
    # A gradient of ``backward(create_graph=True)`` is changed without a trace in the graph.
    with torch.set_grad_enabled(False), clipper.lock:
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
    # On the host, the norms of a step that is not finite are no array; a device does not wait.
    norms = None if record is None else record.norms
    if isinstance(norms, np.ndarray):
        may_skip = getattr(clipper, "on_spike", "clip") == "skip"
    else:
        may_skip = skips(clipper) and not getattr(norms, "is_meta", False)
    if record is not None and may_skip:
        # With a gradient of zero an optimizer would still decay, count, and move by its momentum.
        for name in skipped(clipper, record, shapes_of(gradients)):
            parameters[name].grad = None
    return record


def are_sharded(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether some are DTensors."""
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
    if not isinstance(clipper, (Clipper, AGC)):
        # Anything but a number may not be hashable, and is refused.
        make = _fixed if isinstance(clipper, int | float) else _fixed.__wrapped__
        clipper = make(clipper, norm_type, error_if_nonfinite)
    elif norm_type != 2.0 or error_if_nonfinite:
        raise TypeError(
            f"norm_type and error_if_nonfinite go with a number: set them in {clipper.name} instead"
        )
    if isinstance(parameters, Iterator):
        parameters = [*parameters]
        if not parameters:
            return _torchs_own((p for p in parameters), 1.0)
    named, outputs = selected(parameters, clipper)
    first = next((g for p in named.values() if (g := p.grad) is not None), None)
    record = clip_named(named, clipper, outputs)
    if first is None or record is None:
        return torch.zeros(())
    dtype = first.dtype if first.dtype.itemsize > 2 else torch.float32
    if not isinstance(record.norms, torch.Tensor):
        return torch.scalar_tensor(float(record), dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(record.norms).to(dtype)
    if not are_sharded(named.values()):
        return norm
    from fedclip.arrays.sharded import replicated

    return replicated(norm, named.values())


# Typed, as True is equal to 1.
@lru_cache(maxsize=16, typed=True)
def _fixed(max_norm: float, norm_type: float | str, error_if_nonfinite: bool) -> NormClip:
    policy = "raise" if error_if_nonfinite else "skip"
    return NormClip(max_norm, ord=norm_type, on_nonfinite=policy)


# -- names ---------------------------------------------------------------------------------------
def named(parameters: Parameters, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    """Return parameters by name, each once: tied ones under the first of their names.

    Raises
    ------
    TypeError
        If the clipper distinguishes parameters by name, and they have no names.
    """
    items: Any = parameters
    if isinstance(parameters, torch.nn.Module):
        items = parameters.named_parameters()
    elif isinstance(parameters, Mapping):
        items = parameters.items()
    elif isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        items = [parameters]
    pairs = [*items]
    if not pairs and isinstance(parameters, Iterator):
        raise ValueError("no parameters: an iterator has none the second time, so give the model")
    if pairs and isinstance(pairs[0], torch.Tensor):
        if getattr(clipper, "scope", "tensor") not in ("global", "tensor") or clipper.exclude:
            raise TypeError(
                f"{clipper.name} distinguishes parameters by name: give model.named_parameters()"
            )
        pairs = [(str(place), tensor) for place, tensor in enumerate(pairs)]
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise TypeError(
                f"got {type(pair).__name__} among {type(parameters).__name__}: give a model"
            )
        first.setdefault(id(pair[1]), pair)
    names = _plain(tuple(name for name, _ in first.values()))
    return dict(zip(names, (tensor for _, tensor in first.values()), strict=True))


def selected(
    source: Parameters, clipper: Clipper | AGC
) -> tuple[dict[str, torch.Tensor], Outputs | None]:
    """Return the parameters of a call by name, and the axes of their outputs, checked.

    The same parameters as at the last call are not checked again.
    """
    names: list[object] | None = None
    tensors: list[Any] = []
    # An iterator that is used up stays, and is refused below.
    source = ([*source] or source) if isinstance(source, Iterator) else source
    pairs = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else source
    if type(pairs) is dict:
        names, tensors = [*pairs], [*pairs.values()]
    elif type(pairs) is list and pairs and isinstance(pairs[0], torch.Tensor):
        tensors = pairs
    use: Any = getattr(clipper, "use", None)
    ids, is_agc = [*map(id, tensors)], isinstance(clipper, AGC)
    # Of AGC the layers of the model count too.
    model = source if is_agc and isinstance(source, torch.nn.Module) else None
    key = ids, names, None if model is None else [*map(type, model.modules())]
    # Freed tensors give their ids to others, which the clipper notes if it learns.
    if ids and use is not None and (is_agc or ids == use.members.last):
        last, known, outputs = use.selection
        if key == last:
            return dict(zip(known, tensors, strict=True)), outputs
    clipper = clippers.check_clipper(clipper)
    parameters = named(source, clipper)
    clippers.check_free(clipper)
    outputs = outputs_of(source, parameters, clipper)
    # Loops that make their tensors at each step have no Parameters.
    a_model = isinstance(next(iter(parameters.values()), None), torch.nn.Parameter)
    clippers.check_members(clipper, parameters, fixed=False, new_model=a_model)
    # One parameter may have several names.
    if len(parameters) == len(ids):
        use_of(clipper).selection = key, tuple(parameters), outputs
    return parameters, outputs


# A loop has the same names at each step.
@lru_cache(maxsize=64)
def _plain(wrapped: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without the prefixes of wrappers, all different."""
    if not all(isinstance(name, str) for name in wrapped):
        raise TypeError(f"names of parameters must be strings, got {list(wrapped)!r:.200}")
    names = clippers.unique(wrapped)
    while names and any(all(n.startswith(prefix) for n in names) for prefix in _FIRST):
        names = [name.partition(".")[2] for name in names]
    for wrapper in _WRAPPERS:
        names = [name.replace(wrapper, "") for name in names]
    # Keep names that are different only with their prefixes.
    return tuple(names) if len(set(names)) == len(wrapped) else tuple(clippers.unique(wrapped))


def outputs_of(
    source: Parameters | None, parameters: Mapping[str, torch.Tensor], clipper: Clipper | AGC
) -> Outputs | None:
    """Return the axes of the outputs of parameters, by name; None if the clipper needs none.

    ==========================================  ====================================================
    layer                                       axis
    ==========================================  ====================================================
    linear, convolution (grouped or not),       0
    attention, recurrent, bilinear
    embedding                                   1
    transposed convolution                      1; of several groups refused
    ``Conv1D`` of Transformers                  1
    any other module                            0
    ==========================================  ====================================================

    A parameter of two layers (tied weights) is that of the first.

    Raises
    ------
    TypeError
        If a parameter is a piece of a flat one, which hides whose piece it is.
    ValueError
        If the clipper asks for them, and `source` is not the model; or if one output of a layer
        is not along an axis.
    """
    if any(getattr(p, "_fsdp_flattened", False) for p in parameters.values()):
        why = "FullyShardedDataParallel (FSDP1) gives each process a piece of the model"
        hint = "use torch.distributed.fsdp.fully_shard (FSDP2)"
        raise TypeError(f"{why}, with another norm: {hint}")
    if not isinstance(clipper, AGC) or not clipper.asks_layers:
        return None
    shapes = shapes_of(parameters)
    names = [name for name in clipper.groups(shapes).names if len(shapes[name]) > 1]
    if not names:
        return None
    if not isinstance(source, torch.nn.Module):
        raise ValueError("agc needs the outputs of layers: give the model, or an axis: AGC(axis=0)")
    layers: dict[int, torch.nn.Module] = {}
    for path, module in source.named_modules():
        # A parametrization's tensors are its layer's.
        layer = source.get_submodule(path.split(".parametrizations.")[0])
        for parameter in module.parameters(recurse=False):
            layers.setdefault(id(parameter), layer)
    return {name: _axes(name, layers.get(id(parameters[name]))) for name in names}


def _axes(name: str, layer: Any) -> Axes:
    transposed = isinstance(layer, torch.nn.modules.conv._ConvTransposeNd)
    if transposed and layer.groups > 1:
        raise ValueError(
            f"agc: {name!r} belongs to a {type(layer).__name__} with groups={layer.groups}, whose "
            'outputs are along no axis: put it in exclude, or use unit="tensor"'
        )
    of_transformers = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
    is_embedding = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    return (1,) if transposed or of_transformers or is_embedding else (0,)


# -- gradients that share memory -----------------------------------------------------------------
# A change in place would change them twice. Views of one flat buffer, as DistributedDataParallel
# makes them, lie side by side: these may stay.
_start, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_nbytes = attrgetter("nbytes")


def share_memory(gradients: Sequence[torch.Tensor], use: Use) -> bool:
    """Return whether two are one or may share memory, or an element is there twice.

    Those that lie where the last ones of this use lay are not compared again.
    """
    placed = gradients
    try:
        now = [*map(_start, placed)], [*map(_nbytes, placed)]
        if now == use.apart and all(map(_is_contiguous, placed)):
            return False
        spans = sorted(zip(*now, strict=True))
    except RuntimeError:
        # Some are sparse, or on a device that shows no address.
        placed = [g for g in gradients if _has_address(g)]
        spans = sorted((g.data_ptr(), g.nbytes) for g in placed)
    if spans and not spans[0][0]:
        # Meta tensors, DTensors and empty ones are at 0.
        spans = [span for span in spans if span[0]]
    starts = [start for start, _ in spans]
    if not all(map(le, map(sum, spans[:-1]), starts[1:])):
        return True
    if len(spans) == len(gradients) and all(map(_is_contiguous, gradients)):
        use.apart = now
        return False
    return len({*map(id, gradients)}) < len(gradients) or not all(map(_is_dense, placed))


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return False


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie one after the other in memory, in any order."""
    reach = 1
    for step, number in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if number > 1 and step != reach:
            return False
        reach *= number
    return True
