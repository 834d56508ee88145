# SPDX-License-Identifier: Apache-2.0
"""Records in TensorBoard, W&B, MLflow, and loggers that speak like one of them."""

from __future__ import annotations

import re

from fedclip.core.records import RoundRecord, StepRecord
from fedclip.errors import public_names

__all__ = ["log"]

__dir__ = public_names(__name__)


def log(
    record: StepRecord | RoundRecord | None, to: object, step: int, prefix: str = "clip/"
) -> None:
    """Send the numbers of a record to TensorBoard, W&B, MLflow or a Lightning logger.

    Parameters
    ----------
    record
        ``clipper.last``, the result of ``clip_``, or one of ``clipper.rounds``. Nothing is sent for
        None, which ``last`` is before the first step.
    to
        A ``SummaryWriter`` of TensorBoard; a W&B run, or the module `wandb`; the module `mlflow`;
        or any Lightning logger.
    step
        Number of the step, or of the round.
    prefix
        Prefix of each name.

    Raises
    ------
    TypeError
        If `record` is not a record, or `to` has none of the methods ``add_scalar``, ``log_metrics``
        and ``log``.

    Examples
    --------
    >>> import numpy as np
    >>> from fedclip import NormClip
    >>> class Run:
    ...     def log(self, numbers, step):
    ...         print(step, numbers["clip/norm"])
    >>> clipper = NormClip(1.0)
    >>> clipped = clipper.clip({"w": np.array([3.0, 4.0])})
    >>> log(clipper.last, Run(), step=1)
    1 5.0
    """
    if record is None:
        return
    if not isinstance(record, StepRecord | RoundRecord):
        raise TypeError(f"log takes a record, such as clipper.last, got {type(record).__name__}")
    numbers = record.as_dict(prefix)
    if hasattr(to, "add_scalar"):
        for name, number in numbers.items():
            to.add_scalar(name, number, step)
    elif hasattr(to, "log_metrics"):
        # MLflow refuses other characters, which patterns such as ``head.*`` have.
        to.log_metrics({re.sub(r"[^\w\-. :/]", "_", k): x for k, x in numbers.items()}, step=step)
    elif hasattr(to, "log"):
        to.log(numbers, step=step)
    else:
        raise TypeError(
            f"a logger must have add_scalar, log_metrics or log; got {type(to).__name__}"
        )
