# SPDX-License-Identifier: Apache-2.0
"""The policy of a site on NVFlare: a filter of its privacy.json, which lets out what it allows.

::

    task arrives     a job with result filters of its own is refused, as these run after the site's;
                     so is any job on a site that sends its logs to the server
                     keep a copy of the model
    result leaves    an error: its code alone
                     a difference, or weights minus the model: clipped, with noise, charged
                     numbers that the policy names
                     anything else: nothing, and an error code in its place
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey, FilterSource
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.logging.constants import is_log_streaming_allowed

from fedclip.adapters.nvflare.client import ClipUpdate
from fedclip.federation.site.gate import Gate, Refused, beside
from fedclip.federation.site.policy import Policy
from fedclip.federation.update.limits import alike

__all__ = ["SitePolicy"]

_LOGGER = logging.getLogger("fedclip.site")

_CODES = {code for name, code in vars(ReturnCode).items() if name.isupper()}

_SEEN = "fedclip.site"
"""Under this name the model of a task is in its context."""


class SitePolicy(Filter):
    """Lets out of a site what its policy allows, of the results of all tasks.

    It belongs to each scope of the site's privacy.json, twice: in ``task_data_filters``, where it
    sees the model, and as the last of ``task_result_filters``.

    Parameters
    ----------
    policy
        Path of the site's policy.

    Raises
    ------
    OSError, ValueError
        If the policy or its ledger can not be used; then no job starts.
    UnsafeJobError
        Of a job that has result filters of its own, and if the site sends its logs to the server.
    Refused
        Of a result that must not leave; NVFlare then sends an error code, and nothing else.

    Notes
    -----
    It acts on results of tasks, and not on what a job's code sends otherwise; docs/nvflare.md has
    the table.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy
        self._gate = Gate(Policy.read(policy))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a task as it is, or what may leave of a result."""
        if self.get_prop(FilterContextKey.SOURCE) != FilterSource.SITE:
            raise UnsafeJobError("SitePolicy is a filter of a site's privacy.json, not of a job")
        _refuse(fl_ctx)
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_RESULT_CHAIN:
            try:
                return self._leaving(shareable, fl_ctx.get_prop(_SEEN))
            except Refused:
                raise
            except Exception as exc:  # its text may hold data, and NVFlare can send what it logs
                _LOGGER.error("a result that can not be read: %s", type(exc).__name__)
                raise Refused("the result is none that the site's policy knows") from None
        # A copy: scripts may train in place.
        fl_ctx.set_prop(_SEEN, copy.deepcopy(_model(shareable)), private=True, sticky=False)
        return shareable

    def _leaving(self, result: Shareable, model: Mapping[str, Any] | None) -> Shareable:
        """Return a reply that is made anew, of what the policy lets out."""
        code = result.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION)
        dxo = from_shareable(result)
        kind, meta = dxo.data_kind, dict(dxo.meta)
        inner = meta.pop(MetaKey.INITIAL_METRICS, None)
        told: dict[str, Any] = self._gate.metrics(meta)
        if isinstance(inner, Mapping) and (metrics := self._gate.metrics(inner)):
            told[MetaKey.INITIAL_METRICS] = metrics
        if kind == DataKind.METRICS:
            data: Any = self._gate.metrics(dxo.data)
        elif kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise Refused("the result is of a kind that the site's policy does not let out")
        elif model is None:
            raise Refused(
                "no model has arrived with this task, to which an update could be the difference: "
                "SitePolicy belongs among the task_data_filters of each scope of privacy.json, too"
            )
        elif kind == DataKind.WEIGHT_DIFF:
            data = self._gate.update(dxo.data, model)
        else:
            arrays = all(isinstance(one, np.ndarray | np.generic) for one in dxo.data.values())
            if not arrays or not alike(dxo.data, model):
                raise Refused("the weights are no NumPy arrays with the model's names and shapes")
            moved = {name: value - model[name] for name, value in dxo.data.items()}
            left = self._gate.update(moved, model)
            data = {name: beside(model[name], value) for name, value in left.items()}
        return DXO(kind, data, told).to_shareable()


def _refuse(fl_ctx: FLContext) -> None:
    """Refuse a job whose results the site's policy would not see last, and a site that tells all.

    `ClipUpdate` may act after the policy, as it only makes updates smaller.
    """
    tables = fl_ctx.get_prop(FLContextKey.RUNNER).task_result_filters.values()
    others = {type(f).__name__ for table in tables for f in table if type(f) is not ClipUpdate}
    if others:
        raise UnsafeJobError(
            f"this job has result filters of its own ({', '.join(sorted(others))!s:.200}), which "
            "NVFlare runs after the site's: nothing is shared"
        )
    if is_log_streaming_allowed(fl_ctx):
        raise UnsafeJobError(
            "this site sends its logs to the server, and errors can hold data: write "
            '"allow_log_streaming": false into local/resources.json; nothing is shared'
        )


def _model(shareable: Shareable) -> Any:
    """Return the weights that a task brings; None if it brings none."""
    try:
        dxo = from_shareable(shareable)
    except ValueError:
        return None
    return dxo.data if dxo.data_kind == DataKind.WEIGHTS else None
