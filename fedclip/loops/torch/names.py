# SPDX-License-Identifier: Apache-2.0
"""The names of parameters, by which statistics are kept: the same under every wrapper.

==========================  ===============================================================
parameters are given as     names
==========================  ===============================================================
a module                    those of ``named_parameters()``
pairs, or a mapping         those names; repeated ones are numbered: ``w``, ``w#1``
parameters                  ``0``, ``1``, ... by position, whether they have a gradient or not
==========================  ===============================================================

Prefixes of wrappers are taken off: ``module.`` (DistributedDataParallel) and ``_forward_module.``
(Lightning's Fabric) where all names have it, ``_orig_mod.`` (torch.compile) and
``_checkpoint_wrapped_module.`` anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch

from fedclip.clippers.agc import AGC, Axes, Outputs
from fedclip.clippers.base import Clipper
from fedclip.loops.clippers import check_clipper, unique
from fedclip.loops.owner import check_free, check_members, shapes_of, use_of

Parameters: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | "
    "Iterable[torch.Tensor] | torch.Tensor"
)
"""A model, ``model.named_parameters()``, a dict, or ``model.parameters()``."""

_TRANSPOSED = torch.nn.modules.conv._ConvTransposeNd
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_FIRST = ("module.", "_forward_module.")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def named(parameters: Parameters, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    """Return parameters by name, each once: tied ones under the first of their names.

    Raises
    ------
    TypeError
        If the clipper distinguishes parameters by name, and they have no names.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = dict(parameters.named_parameters())
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    pairs: Iterable[Any]
    if isinstance(parameters, Mapping):
        pairs = parameters.items()
    else:
        pairs = list(parameters) if isinstance(parameters, Iterable) else [parameters]
        _check_items(parameters, pairs)
        if pairs and isinstance(pairs[0], torch.Tensor):
            _check_names_unneeded(clipper)
            pairs = [(str(place), tensor) for place, tensor in enumerate(pairs)]
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in pairs:
        first.setdefault(id(tensor), (name, tensor))
    names = _plain(tuple(name for name, _ in first.values()))
    return dict(zip(names, (tensor for _, tensor in first.values()), strict=True))


class _Selection(NamedTuple):
    """The parameters of the last call: with the user's names, and those of the clipper."""

    user_names: list[object] | None
    ids: list[int]
    names: tuple[str, ...]


def selected(
    source: Parameters, clipper: Clipper | AGC
) -> tuple[dict[str, torch.Tensor], Outputs | None]:
    """Return the parameters of a call by name, and the axes of their outputs, checked.

    The same parameters as at the last call are not checked again.
    """
    names: list[object] | None = None
    tensors: Any = []
    if isinstance(source, torch.nn.Module):
        pairs = dict(source.named_parameters())
        names, tensors = [*pairs], [*pairs.values()]
    elif type(source) is dict:
        names, tensors = [*source], [*source.values()]
    else:
        if isinstance(source, Iterator):
            # One that is used up stays, and is refused below.
            source = [*source] or source
        tensors = source if _is_list_of_tensors(source) else tensors
    use, ids = getattr(clipper, "use", None), [*map(id, tensors)]
    last = None if use is None else use.selection
    if ids and last is not None and ids == last.ids and names == last.user_names:
        return dict(zip(last.names, tensors, strict=True)), None
    clipper = check_clipper(clipper)
    parameters = named(source, clipper)
    check_free(clipper)
    check_sharding(parameters.values())
    outputs = outputs_of(source, parameters, clipper)
    # Loops that make their tensors at each step have no Parameters.
    a_model = isinstance(next(iter(parameters.values()), None), torch.nn.Parameter)
    check_members(clipper, parameters, fixed=False, new_model=a_model)
    # Of AGC the layers of the model count too, and one parameter may have several names.
    if len(parameters) == len(ids) and not isinstance(clipper, AGC):
        use_of(clipper).selection = _Selection(names, ids, tuple(parameters))
    return parameters, outputs


def _is_list_of_tensors(source: object) -> TypeGuard[list[torch.Tensor]]:
    return type(source) is list and bool(source) and isinstance(source[0], torch.Tensor)


def _check_items(parameters: Iterable[object], items: Sequence[object]) -> None:
    """Raise an error if the items are neither pairs nor tensors."""
    if not items and iter(parameters) is parameters:
        raise ValueError(
            "there are no parameters: an iterator such as model.parameters() has none the second "
            "time; give the model, or call model.parameters() at each step"
        )
    tensors = bool(items) and isinstance(items[0], torch.Tensor)
    for item in items:
        pair = isinstance(item, tuple) and len(item) == 2
        if not (isinstance(item, torch.Tensor) if tensors else pair):
            raise TypeError(
                f"got {type(item).__name__} among {type(parameters).__name__}: give a model, "
                "model.named_parameters() or model.parameters()"
            )


def _check_names_unneeded(clipper: Clipper | AGC) -> None:
    scope = getattr(clipper, "scope", "tensor")
    if scope not in ("global", "tensor") or clipper.exclude:
        raise TypeError(
            f"{clipper.name} distinguishes parameters by name (scope={scope!r}, "
            f"exclude={clipper.exclude!r}): give the model, or model.named_parameters(), "
            "not model.parameters()"
        )


# A loop has the same names at each step.
@lru_cache(maxsize=64)
def _plain(wrapped: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without the prefixes of wrappers, all different."""
    if not all(isinstance(name, str) for name in wrapped):
        raise TypeError(f"names of parameters must be strings, got {list(wrapped)!r:.200}")
    names = unique(wrapped)
    while names and any(all(n.startswith(prefix) for n in names) for prefix in _FIRST):
        names = [name.partition(".")[2] for name in names]
    for wrapper in _WRAPPERS:
        names = [name.replace(wrapper, "") for name in names]
    # Keep names that are different only with their prefixes.
    return tuple(names) if len(set(names)) == len(wrapped) else tuple(unique(wrapped))


def check_sharding(parameters: Iterable[torch.Tensor]) -> None:
    """Raise a TypeError for pieces of flat parameters, which hide whose pieces they are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for parameter in parameters:
        if getattr(parameter, "_fsdp_flattened", False):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) gives each process a piece of its parameters, "
                "whose norm is not that of the model: shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )


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
    ValueError
        If the clipper asks for them, and `source` is not the model; or if one output of a layer
        is not along an axis.
    """
    if not isinstance(clipper, AGC) or not clipper.asks_layers:
        return None
    shapes = shapes_of(parameters)
    names = [name for name in clipper.groups(shapes).names if len(shapes[name]) > 1]
    if not names:
        return None
    if not isinstance(source, torch.nn.Module):
        raise ValueError(
            "agc clips the weights of each output of a layer, and needs the model to know which "
            "these are: give the model, or set axis, such as AGC(axis=0) for linear layers and "
            "convolutions of torch"
        )
    layers: dict[int, torch.nn.Module] = {}
    for path, module in source.named_modules():
        # A parametrization's tensors are its layer's.
        layer = source.get_submodule(path.split(".parametrizations.")[0])
        for parameter in module.parameters(recurse=False):
            layers.setdefault(id(parameter), layer)
    return {name: _axes(name, layers.get(id(parameters[name]))) for name in names}


def _axes(name: str, layer: torch.nn.Module | None) -> Axes:
    if isinstance(layer, _TRANSPOSED):
        if layer.groups > 1:
            raise ValueError(
                f"agc: {name!r} belongs to a {type(layer).__name__} with groups={layer.groups}, "
                'where no axis holds the outputs: put it in exclude, or use unit="tensor"'
            )
        return (1,)
    of_transformers = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
    return (1,) if of_transformers or isinstance(layer, _EMBEDDINGS) else (0,)
