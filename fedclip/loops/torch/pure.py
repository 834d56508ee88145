# SPDX-License-Identifier: Apache-2.0
"""Pure functions of tensors: clippers for compiled code, and the gradients of DP-SGD."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from fedclip.arrays.torch import TorchBackend, TorchRecorded, recorded
from fedclip.core.scopes import Groups
from fedclip.loops import compiled
from fedclip.loops.clippers import Spec, check_owner, clipper_of, shapes_of
from fedclip.loops.compiled import ClipState, Kind
from fedclip.loops.torch.clip import are_sharded
from fedclip.transforms import clip_on_device

if TYPE_CHECKING:
    from fedclip.dpsgd.step import PrivateMean

Named: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by name."""
_PLAIN, _RECORDED = TorchBackend(), TorchRecorded()
# Modules whose gradients were compared with those of a plain backward.
_TRIED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class PureClipping:
    """A clipper as two pure functions of tensors, for ``torch.compile`` and `torch.func`.

    ::

        pure = PureClipping(clipper)
        state = pure.init(gradients)
        gradients, state = torch.compile(pure.update, fullgraph=True)(gradients, state)
        pure.metrics(state, gradients)

    The state is a `ClipState` of tensors: a few numbers for each group; for clippers with arrays,
    as much as the model. Save it with the model. It starts from the clipper's statistics. Steps do
    not change the clipper; `set_state` writes the statistics back.

    Parameters
    ----------
    clipper
        A clipper with ``on_nonfinite`` "skip" or "propagate". DTensors need a clipper of norms or
        values; for others use `clip_`, which gathers the arrays. `AGC` needs the weights:
        ``update(gradients, state, weights)``.
    """

    def __init__(self, clipper: Spec) -> None:
        self.clipper = clipper_of(clipper)
        compiled.check_compilable(self.clipper)
        # torch.compile can read a table, but cannot trace the matching of patterns.
        self._kinds: dict[tuple[str, ...], tuple[Groups, Kind]] = {}

    def init(self, gradients: Named) -> ClipState:
        """Return the state before the first step, on the device of the gradients."""
        groups, _ = self._looked_up(gradients)
        check_owner(self.clipper, gradients)
        first = compiled.first_state(self.clipper, groups, gradients, _PLAIN)
        norm = _PLAIN.asarray(np.zeros(len(groups)), like=next(iter(gradients.values()), None))
        counts = (norm.new_zeros((), dtype=torch.int64) for _ in range(3))
        return ClipState(first, norm, norm + np.inf, norm > 0, *counts)

    def update(
        self, gradients: Named, state: ClipState, weights: Named | None = None
    ) -> tuple[dict[str, torch.Tensor], ClipState]:
        """Return the clipped gradients by name, and the state after the step."""
        known = self._kinds.get(tuple(gradients))
        if known is None and not torch.compiler.is_compiling():
            known = self._looked_up(gradients)
        # torch.compile cannot trace how a first state, and with it its kind, is made.
        groups, kind = known or (self._groups(gradients), None)
        compiled.check_state(state, len(groups), kind, self.clipper.name)
        backend, clipper = _backend(gradients, state, weights or {}), self.clipper
        transform = compiled.transform_of(clipper, groups, weights, backend)
        if backend.partial and not transform.runs_on_parts:
            raise NotImplementedError(f"{clipper.name} needs whole arrays, not DTensors: use clip_")
        statistics, policy = state.statistics, clipper.on_nonfinite
        clipped, step = clip_on_device(transform, gradients, groups, backend, statistics, policy)
        return clipped, compiled.after(state, step)

    def metrics(self, state: ClipState, gradients: Named, prefix: str = "") -> dict[str, float]:
        """Return plain numbers for a logger, of the last step and of all steps (``round/...``).

        Only the names of the gradients count, and for `AGC` their shapes.
        """
        return compiled.of_state(state, self._groups(gradients).labels, prefix)

    def on_round_start(self, state: ClipState) -> ClipState:
        """Return the state at the start of a round: counts are 0, statistics continue."""
        return compiled.on_round_start(state)

    def set_state(self, state: ClipState, gradients: Named) -> None:
        """Write the statistics of a state to the clipper; `init` then starts from them."""
        labels = self._groups(gradients).labels
        compiled.load(self.clipper, state.statistics, labels, gradients)

    def _looked_up(self, gradients: Named) -> tuple[Groups, Kind]:
        groups = self._groups(gradients)
        known = self._kinds[tuple(gradients)] = groups, compiled.kind_of(self.clipper, groups)
        return known

    def _groups(self, gradients: Named) -> Groups:
        # A state has no names: the order of its groups must not depend on the gradients'.
        return self.clipper.groups({name: gradients[name].shape for name in sorted(gradients)})


def _backend(gradients: Named, state: ClipState, weights: Named) -> TorchBackend:
    numbers, arrays = compiled.parts(state.statistics)
    past = [value for fields in arrays.values() for value in fields.values()]
    records = recorded([*gradients.values(), *weights.values(), *numbers, *past])
    if not are_sharded(gradients.values()):
        return _RECORDED if records else _PLAIN
    if records:
        raise NotImplementedError("DTensors are clipped without derivatives: use torch.no_grad()")
    from fedclip.arrays.sharded import ShardedBackend

    return ShardedBackend(gradients.values())


def _like(record: torch.Tensor) -> torch.Tensor:
    """Return a record that nobody protects."""
    if not record.is_floating_point():
        return torch.zeros_like(record)
    return torch.linspace(0.1, 1.0, record.numel()).reshape(record.shape).to(record)


def private_gradients(
    module: torch.nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    mean: PrivateMean,
    *,
    micro_batch: int = 128,
) -> dict[str, torch.Tensor]:
    """Return the gradients of one DP-SGD step, by the names of the trained parameters.

    ::

        (Σ min(1, max_norm / n_i) g_i  +  noise_multiplier max_norm normal) / expected_batch_size

    Each record passes the module separately; layers that remember records are refused. Draw Poisson
    samples (`fedclip.dpsgd.step.PoissonSampler`), call it for empty samples too, and account
    for each call with the mean's `noise_multiplier` (``fedclip privacy calibrate``).

    Parameters
    ----------
    module
        In training mode, on the device of the records.
    loss
        A function of the module's output and the targets, for one record in a batch of size 1. It
        returns a tensor; its mean is the loss. Parameters that the loss uses directly get no
        gradient: add the gradients of penalties afterwards.
    inputs, targets
        Tensors with the records along the first axis; there may be no record.
    mean
        How records are clipped, the noise, and the divisor. Use one for all steps.
    micro_batch
        Largest number of records in memory at once.

    Raises
    ------
    TypeError, ValueError
        If a parameter is invalid, or a layer mixes records (its name is in the message). Also if
        the gradient of a parameter differs from that of a plain backward pass.

    Examples
    --------
    >>> import torch
    >>> from fedclip.dpsgd.step import PrivateMean
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> mean = PrivateMean(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=3)
    >>> found = private_gradients(
    ...     layer, torch.nn.MSELoss(), torch.randn(3, 2), torch.zeros(3, 1), mean
    ... )
    >>> layer.weight.grad = found["weight"]
    """
    # DP-SGD, which most loops have no use for.
    from fedclip.dpsgd.persample import torch_check, torch_records

    torch_check.check(module)
    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)

    def of(run: Any, record: Sequence[torch.Tensor]) -> torch.Tensor:
        *batch_of_one, target = (x.unsqueeze(0) for x in record)
        return loss(run(tuple(batch_of_one)), target).mean()

    if module not in _TRIED and len(targets):
        torch_records.check_tracked(module, of, [_like(x[:1]) for x in (*arguments, targets)])
        _TRIED.add(module)
    weights = torch_records.trained(module)
    stacks = torch_records.record_stacks(module, of, (*arguments, targets), micro_batch)
    return torch_records.restored(mean(stacks, shapes_of(weights)), weights)
