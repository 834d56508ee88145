# SPDX-License-Identifier: Apache-2.0
"""The names of parameters, which statistics are kept by: the same in every wrapping.

==========================  ===============================================================
given                       names
==========================  ===============================================================
a module                    those of ``named_parameters()``
pairs, or a mapping         as they are; a name that comes again is numbered: ``w``, ``w#1``
parameters                  ``0``, ``1``, ... by position, whether they have a gradient or not
==========================  ===============================================================

Prefixes of wrappers are taken off: ``module.`` (DistributedDataParallel) where all names have it,
``_orig_mod.`` (torch.compile) and ``_checkpoint_wrapped_module.`` anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeAlias

import torch

from fedclip.adapters.shared import unique
from fedclip.modules import AGC, Clipper

__all__ = ["Parameters", "check_sharding", "named"]

Parameters: TypeAlias = (
    "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | "
    "Iterable[torch.Tensor] | torch.Tensor"
)
"""A model, ``model.named_parameters()``, a dict, or ``model.parameters()``."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def named(parameters: Parameters, clipper: Clipper | AGC) -> dict[str, torch.Tensor]:
    """Return parameters by name, each once: tied ones under the first of their names.

    Raises
    ------
    TypeError
        If the clipper tells parameters apart by name, and they have none.
    """
    if isinstance(parameters, torch.nn.Module):
        return _plain(dict(parameters.named_parameters()))
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    pairs = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    if pairs and isinstance(pairs[0], torch.Tensor):
        _check_names_unneeded(clipper)
        pairs = list(zip(_numbers(len(pairs)), pairs, strict=True))
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "give a model, model.named_parameters() or model.parameters(); "
                f"got {type(pair).__name__} among {type(parameters).__name__}"
            )
    # Tied parameters have one gradient, under the first of their names.
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for pair in pairs:
        first.setdefault(id(pair[1]), pair)
    names = unique(name for name, _ in first.values())
    return _plain(dict(zip(names, (p for _, p in first.values()), strict=True)))


@lru_cache(maxsize=16)
def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _check_names_unneeded(clipper: Clipper | AGC) -> None:
    scope = getattr(clipper, "scope", "tensor")
    if scope not in ("global", "tensor") or clipper.exclude:
        raise TypeError(
            f"{clipper.name} tells parameters apart by name (scope={scope!r}, "
            f"exclude={clipper.exclude!r}): give the model, or model.named_parameters(), "
            "not model.parameters()"
        )


def _plain(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters by names without the prefixes of wrappers."""
    names = list(parameters)
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    for wrapper in _WRAPPERS:
        names = [name.replace(wrapper, "") if wrapper in name else name for name in names]
    # Keep names that are different only with their prefixes.
    if len(set(names)) < len(parameters):
        return parameters
    return dict(zip(names, parameters.values(), strict=True))


def check_sharding(parameters: Iterable[torch.Tensor]) -> None:
    """Raise a TypeError for pieces of flat parameters, which do not say whose pieces they are."""
    for parameter in parameters:
        if getattr(parameter, "_fsdp_flattened", False):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) gives each process an unmarked piece of its "
                "parameters, whose norm is not the norm: shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead, which fedclip clips right"
            )
