# SPDX-License-Identifier: Apache-2.0
"""Clippers in plain PyTorch loops.

Clip once for each optimizer step: after ``backward()`` (the last one, if you accumulate
gradients), after ``scaler.unscale_(optimizer)`` under AMP, and before ``optimizer.step()``.
`attach` clips at the right moment by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

try:
    import torch
except ImportError as error:
    raise ImportError(
        "fedclip.adapters.torch needs PyTorch: pip install 'fedclip[torch]'"
    ) from error

import numpy as np

from fedclip.adapters.shared import check_compilable, start
from fedclip.arrays.torch import TorchBackend, TorchInPlace
from fedclip.dpsgd.persample import torch_records
from fedclip.dpsgd.step import private_mean
from fedclip.errors import FedclipWarning
from fedclip.modules import AGC, Clipper
from fedclip.records import StepRecord
from fedclip.scopes import resolve
from fedclip.transforms import clip_on_device

__all__ = [
    "ClipHandle",
    "NamedParameters",
    "PureClipping",
    "attach",
    "clip_",
    "private_gradients",
]

NamedParameters: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
"""What ``model.named_parameters()`` gives, or a dict."""

_IN_PLACE = TorchInPlace()


def clip_(named_parameters: NamedParameters, clipper: Clipper | AGC) -> StepRecord | None:
    """Clip the gradients of named parameters, in place on ``.grad``.

    Parameters
    ----------
    named_parameters
        ``model.named_parameters()``, or a dict. Parameters without a gradient are left out; a
        parameter with two names (tied weights) counts once, under its first name.
    clipper
        Any clipper of fedclip; it keeps its statistics from call to call. `AGC` also measures
        the parameters.

    Returns
    -------
    StepRecord or None
        What the step did: norms before clipping, limits, and which groups were clipped. The
        numbers stay on the device until you look at them. None if there was no gradient.

    Raises
    ------
    TypeError
        If the parameters have no names, or a gradient is a DTensor or not of a floating type.

    Examples
    --------
    >>> import torch
    >>> from fedclip import NormClip
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> clip_(layer.named_parameters(), NormClip(1.0)).norm_before
    (5.0,)
    >>> layer.weight.grad.norm() <= 1.0
    tensor(True)
    """
    parameters, gradients = _with_gradient(named_parameters)
    if not parameters:
        return None
    if isinstance(clipper, AGC):
        weights = {name: p.detach() for name, p in parameters.items()}
        outputs = clipper.clip(gradients, weights, backend=_IN_PLACE)
    else:
        outputs = clipper.clip(gradients, backend=_IN_PLACE)
    if outputs is not gradients:
        for name, gradient in gradients.items():
            # A sparse gradient that becomes dense is a new tensor.
            if outputs[name] is not gradient:
                parameters[name].grad = outputs[name]
    return clipper.last


def _with_gradient(
    named_parameters: NamedParameters,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters that have a gradient, each once, and their gradients."""
    if isinstance(named_parameters, Mapping):
        pairs = list(named_parameters.items())
    else:
        pairs = [_checked(pair) for pair in named_parameters]
    # Tied parameters have one gradient, under the first of their names.
    first: dict[int, tuple[str, torch.Tensor, torch.Tensor | None]] = {}
    for name, parameter in pairs:
        first.setdefault(id(parameter), (name, parameter, parameter.grad))
    found = [(name, p, g) for name, p, g in first.values() if g is not None]
    return {name: p for name, p, _ in found}, {name: g for name, _, g in found}


def _checked(pair: Any) -> tuple[str, torch.Tensor]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
        raise TypeError(
            "clip_ needs names, which statistics are kept by: give model.named_parameters(), "
            f"not model.parameters(); got {type(pair).__name__}"
        )
    return pair


def _held(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> dict[str, torch.Tensor]:
    """Return the parameters that an optimizer holds, by name."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in dict(named_parameters).items() if id(p) in held}


class ClipHandle:
    """A clipper that acts before every step of an optimizer; made by `attach`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipper: Clipper | AGC,
        named_parameters: NamedParameters,
    ) -> None:
        self.clipper = clipper
        self._parameters = _held(optimizer, named_parameters)
        if not self._parameters:
            raise ValueError("none of the named parameters is in the optimizer")
        self._key = f"fedclip:{clipper.name}"
        self._hooks = [optimizer.register_step_pre_hook(self._before_step)]
        # AGC has no state to save.
        if isinstance(clipper, Clipper):
            self._stateful = clipper
            self._hooks.append(optimizer.register_state_dict_post_hook(self._save))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._load))

    def remove(self) -> None:
        """Stop clipping, and leave the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def last(self) -> StepRecord | None:
        """What the last step did."""
        return self.clipper.last

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A GradScaler sets `grad_scale` on optimizers that unscale the gradients in their step.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "the gradients are still scaled by the GradScaler, and would be clipped at the "
                "wrong size: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        clip_(self._parameters, self.clipper)

    def _save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = self._stateful.get_state()
        # Save tensors: torch.load(weights_only=True) does not read NumPy arrays.
        state["arrays"] = {
            name: {field: torch.from_numpy(value) for field, value in fields.items()}
            for name, fields in state["arrays"].items()
        }
        return {**state_dict, self._key: state}

    def _load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest = dict(state_dict)
        state = rest.pop(self._key, None)
        if state is None:
            warnings.warn(
                f"the optimizer state holds nothing for {self.clipper.name}, which starts anew",
                FedclipWarning,
                stacklevel=3,
            )
            return rest
        arrays = {
            name: {field: value.cpu().numpy() for field, value in fields.items()}
            for name, fields in state["arrays"].items()
        }
        self._stateful.set_state({**state, "arrays": arrays})
        return rest


def attach(
    optimizer: torch.optim.Optimizer, clipper: Clipper | AGC, named_parameters: NamedParameters
) -> ClipHandle:
    """Clip before every ``optimizer.step()``, until the handle's ``remove()`` is called.

    It uses torch's own hooks and patches nothing. The clipper's state is saved and loaded with
    ``optimizer.state_dict()``. With gradient accumulation it clips once a step; under AMP it
    clips after the GradScaler has unscaled the gradients.

    Parameters
    ----------
    optimizer
        Any torch optimizer.
    clipper
        Any clipper of fedclip.
    named_parameters
        ``model.named_parameters()``. It clips the gradients of those that the optimizer holds.

    Raises
    ------
    ValueError
        If the optimizer holds none of the parameters.
    RuntimeError
        At a step, if the gradients are still scaled by a GradScaler.

    Examples
    --------
    >>> import torch
    >>> from fedclip import ZScoreClip
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = attach(optimizer, ZScoreClip(), model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> round(handle.last.norm_before[0], 3)
    1.732
    >>> handle.remove()
    """
    return ClipHandle(optimizer, clipper, named_parameters)


class PureClipping:
    """A clipper as two pure functions of tensors, for ``torch.compile`` and `torch.func`.

    ::

        pure = PureClipping(clipper)
        state = pure.init(gradients)
        gradients, state = torch.compile(pure.update, fullgraph=True)(gradients, state)

    The state is a NamedTuple of small tensors; save it with the model. It starts from the
    clipper's statistics, and never changes the clipper.

    Parameters
    ----------
    clipper
        A clipper by L2 norms or values, with ``on_nonfinite`` "skip" or "propagate".
    """

    def __init__(self, clipper: Clipper) -> None:
        check_compilable(clipper)
        self.clipper = clipper
        self._backend = TorchBackend()

    def init(self, gradients: Mapping[str, torch.Tensor]) -> Any:
        """Return the state before the first step, on the device of the gradients."""
        groups = resolve(self.clipper.scope, self.clipper.exclude, list(gradients))
        first = start(self.clipper, groups)
        like = next(iter(gradients.values()))
        columns = (self._backend.asarray(np.atleast_1d(column), like=like) for column in first)
        return type(first)(*columns)

    def update(
        self, gradients: Mapping[str, torch.Tensor], state: Any
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return the clipped gradients, by name, and the state after the step."""
        groups = resolve(self.clipper.scope, self.clipper.exclude, list(gradients))
        clipped, step = clip_on_device(
            self.clipper.transform(groups),
            gradients,
            groups,
            self._backend,
            state,
            self.clipper.on_nonfinite,
        )
        return clipped, step.state


def private_gradients(
    module: torch.nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    *,
    max_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    micro_batch: int = 128,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Return the gradients of one step of DP-SGD, by the names of the trained parameters.

    ::

        (Σ min(1, max_norm / n_i) g_i  +  noise_multiplier max_norm normal) / expected_batch_size

    Each record goes through the module alone; what it remembers of records is refused. Give it
    Poisson samples (`fedclip.dpsgd.sampling.PoissonSampler`), also those without a record, and
    account for each with the same `noise_multiplier` (``fedclip privacy calibrate``).

    Parameters
    ----------
    module
        In training mode, on the device of the records.
    loss
        From what the module puts out and the targets, of one record in a batch of its own, to a
        tensor whose mean is the loss. Parameters that it uses besides have no part in the
        gradients: add those of penalties afterwards.
    inputs, targets
        Tensors whose first axis is the records; there may be none.
    max_norm, noise_multiplier, expected_batch_size
        As above: > 0, >= 0, > 0.
    micro_batch
        How many records are in memory at once, at most.
    **settings
        ``mode`` ("flat", "tensor", "layer", "automatic" or a list of patterns) and ``noise``, an
        object that adds it; see `fedclip.dpsgd.step.private_mean`.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above, or a layer, which is named, mixes records.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> step = {"max_norm": 1.0, "noise_multiplier": 1.1, "expected_batch_size": 3}
    >>> found = private_gradients(
    ...     layer, torch.nn.MSELoss(), torch.randn(3, 2), torch.zeros(3, 1), **step
    ... )
    >>> layer.weight.grad = found["weight"]
    """
    torch_records.check(module)
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)

    def of(run: Any, record: Any) -> torch.Tensor:
        *own, target = (x.unsqueeze(0) for x in record)
        return loss(run(tuple(own)), target).mean()

    weights = torch_records.trained(module)
    found = private_mean(
        torch_records.record_stacks(module, of, (*given, targets), micro_batch),
        {name: tuple(weight.shape) for name, weight in weights.items()},
        *(max_norm, noise_multiplier, expected_batch_size),
        **settings,
    )
    return torch_records.restored(found, weights)
