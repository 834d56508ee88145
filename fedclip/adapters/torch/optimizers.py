# SPDX-License-Identifier: Apache-2.0
"""What can be asked of an optimizer, or of what holds one: what steps, and with which weights."""

from __future__ import annotations

import inspect

import torch

__all__ = ["called", "check_step", "has_stepped", "held", "is_hooked", "levels_of"]


def called(optimizer: object) -> str:
    """Return what an optimizer is called in errors."""
    return f"an optimizer ({type(optimizer).__name__})"


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of an optimizer is that after a step."""
    return any(
        isinstance(state, dict)
        and (state.get("momentum_buffer") is not None or float(state.get("step", 0)) > 0)
        for state in optimizer.state.values()
    )


def levels_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, the one that it holds, and so on; the last one takes the steps.

    Wrappers, as Accelerate's or SAM, call one that they hold.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"the first argument must be a torch optimizer, got {optimizer!r:.80}")
    inside = {id(o): o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)}
    hooked, own = is_hooked(optimizer), {*map(id, held(optimizer))}
    # One that holds other parameters has a part of them (ZeRO), or copies.
    for inner in inside.values() if len(inside) == 1 else ():
        if not hooked or {*map(id, held(inner))} == own:
            return [optimizer, *levels_of(inner)]
    if not hooked:
        raise TypeError(
            f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer: attach to each "
            "optimizer that it holds"
        )
    return [optimizer]


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is an optimizer, and no wrapper, which may have some of the hooks."""
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise a TypeError for an optimizer that has no step of its own: LOMO steps in backward."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    if code is not None and code.co_names == ("NotImplementedError",):
        raise TypeError(
            f"{type(optimizer).__name__} has no step() in which a clipper could act: it uses up "
            "each gradient as it is computed; take its own clipping, or another optimizer"
        )
