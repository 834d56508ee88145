# SPDX-License-Identifier: Apache-2.0
"""Running statistics, idle tensors and tied tensors of torch's networks."""

from __future__ import annotations

from typing import Any


def hold_statistics(network: Any) -> list[str]:
    """Make frozen BatchNorm normalise by its statistics, and keep them, in training too.

    A layer is frozen if it has weights and none of them is trained. The network may be pickled.

    Returns
    -------
    names
        The layers for which this is so from now on.
    """
    names = []
    for name, layer in network.named_modules():
        weights = [*layer.parameters(recurse=False)]
        keeps = getattr(layer, "running_mean", None) is not None
        if keeps and weights and not any(weight.requires_grad for weight in weights):
            names.append(name)
            if _evaluate not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_evaluate)
    return names


def _evaluate(layer: Any, inputs: Any) -> None:
    # declearn sets all layers to training before each step.
    layer.training = False


def unused(network: Any) -> list[str]:
    """Return the names of trained weights that the last step gave no gradient, if others have one.

    Networks of other frameworks have none.
    """
    weights: Any = getattr(network, "named_parameters", tuple)()
    grads = {name: weight.grad for name, weight in weights if weight.requires_grad}
    lacking = [name for name, grad in grads.items() if grad is None]
    return lacking if len(lacking) < len(grads) else []


def tied(network: Any) -> list[tuple[str, str]]:
    """Return the pairs of names of weights that have two; trained is the first one."""
    if not hasattr(network, "named_modules"):
        return []
    first: dict[int, str] = {}
    names = (
        (first.setdefault(id(w), n), n) for n, w in network.named_parameters(remove_duplicate=False)
    )
    return [(trained, other) for trained, other in names if trained != other]
