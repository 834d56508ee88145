# SPDX-License-Identifier: Apache-2.0
"""The policy of a site on NVFlare: a filter of its privacy.json.

::

    task arrives     end a job that could get around the filter: with result filters, with code, or
                     on a site that sends its logs to the server
                     count it; keep a copy of the model
    executor runs    not at all beyond max_replies; an exception becomes an error reply
                     the cookies of the task are put back, which NVFlare sends with the reply
    result leaves    a difference, or weights minus the model: clipped, with noise, charged
                     numbers that the policy names
                     anything else: one error code, always the same
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey, FilterSource
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.logging.constants import is_log_streaming_allowed

from fedclip.engines.nvflare.clipping import ClipUpdate
from fedclip.errors import shown
from fedclip.site.gate import Gate, Refused
from fedclip.site.policy import Policy

_LOGGER = logging.getLogger("fedclip.site")

# The name of a task's model in its context, and of the reason why the task gets no answer.
_SEEN = "fedclip.site"


class SitePolicy(Filter):
    """Passes on what the policy of a site allows of the results of all tasks.

    It belongs to each scope of the site's privacy.json, twice: in ``task_data_filters``, where it
    sees the model, and as the last of ``task_result_filters``.

    Parameters
    ----------
    policy
        Path of the site's policy.

    Raises
    ------
    OSError, ValueError
        If the policy or its ledger cannot be used; then no job starts.
    UnsafeJobError
        If a job has result filters, or code that the policy does not allow; if the site sends its
        logs to the server.

    Notes
    -----
    A result that must not leave, and each error, leaves as the same error code.

    It acts on results of tasks, and not on data that a job's code sends by other ways;
    docs/nvflare-site.md has the table.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy
        self._gate = Gate(Policy.read(policy))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a task unchanged, or what may leave of a result."""
        if self.get_prop(FilterContextKey.SOURCE) != FilterSource.SITE:
            raise UnsafeJobError("SitePolicy is a filter of a site's privacy.json, not of a job")
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_RESULT_CHAIN:
            return self._leaving(shareable, fl_ctx)
        self._check(fl_ctx)
        # A copy: scripts may train in place.
        model, why = copy.deepcopy(_model(shareable)), ""
        try:
            self._gate.admit(fl_ctx.get_job_id())
        except Refused as exc:
            why = str(exc)
        fl_ctx.set_prop(_SEEN, (model, why), private=True, sticky=False)
        runner, name = fl_ctx.get_prop(FLContextKey.RUNNER), fl_ctx.get_prop(FLContextKey.TASK_NAME)
        executor = runner.find_executor(name)
        executor.execute = partial(_executed, type(executor).execute, executor)
        return shareable

    def _leaving(self, result: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a new reply of what the policy allows, or an error."""
        try:
            self._check(fl_ctx)
            return self._passed(result, *(fl_ctx.get_prop(_SEEN) or (None, "")))
        except Exception as exc:  # its text may hold data
            _LOGGER.error("not sent: %s", exc)
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)

    def _passed(self, result: Shareable, model: Any, why: str) -> Shareable:
        if why or result.get_return_code() != ReturnCode.OK:
            raise Refused(why or f"the job has failed: {shown(result.get_return_code())}")
        dxo = from_shareable(result)
        kind, meta = dxo.data_kind, dict(dxo.meta)
        inner = meta.pop(MetaKey.INITIAL_METRICS, None)
        sent: dict[str, Any] = self._gate.metrics(meta)
        if isinstance(inner, Mapping) and (metrics := self._gate.metrics(inner)):
            sent[MetaKey.INITIAL_METRICS] = metrics
        if kind == DataKind.METRICS:
            return DXO(kind, self._gate.metrics(dxo.data), sent).to_shareable()
        if kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise Refused("the site's policy does not allow results of this kind")
        if model is None:
            raise Refused("no model has come: put SitePolicy into the task_data_filters, too")
        # Differences of counters are NumPy's scalars.
        arrays = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in dxo.data.items()}
        passed = self._gate.update if kind == DataKind.WEIGHT_DIFF else self._gate.model
        return DXO(kind, passed(arrays, model), sent).to_shareable()

    def _check(self, fl_ctx: FLContext) -> None:
        """Refuse a job whose results the policy would not see last, and a site that sends its logs.

        `ClipUpdate` may act after the policy, as it only makes updates smaller.
        """
        tables = fl_ctx.get_prop(FLContextKey.RUNNER).task_result_filters.values()
        others = {type(f).__name__ for table in tables for f in table if type(f) is not ClipUpdate}
        meta, why = fl_ctx.get_prop(FLContextKey.JOB_META), ""
        if others:
            why = f"result filters ({', '.join(sorted(others)):.200}) would run after the site's"
        # Without the job's description, it may have anything.
        elif not self._gate.policy.allow_job_code and (
            not isinstance(meta, Mapping) or meta.get(AppValidationKey.BYOC)
        ):
            why = "code in the job (byoc) can send anything: set allow_job_code = true to allow it"
        elif is_log_streaming_allowed(fl_ctx):
            why = 'logs can hold data: write "allow_log_streaming": false into local/resources.json'
        if why:
            raise UnsafeJobError(f"nothing of this job is shared: {why}")


def _executed(
    execute: Any, executor: Any, name: str, task: Shareable, fl_ctx: FLContext, signal: Any
) -> Any:
    """Run an executor, if its task gets an answer; an exception goes to the log only."""
    (_, why), jar = fl_ctx.get_prop(_SEEN), copy.deepcopy(task.get_cookie_jar())
    reply = None
    try:
        if not why:
            # A new signal: an executor that aborts its task would cause another error code.
            reply = execute(executor, name, task, fl_ctx, Signal(parent=signal))
    except Exception as exc:
        _LOGGER.error("the job has failed: %s", exc)
    task.set_cookie_jar(jar)
    return reply if isinstance(reply, Shareable) else make_reply(ReturnCode.EXECUTION_EXCEPTION)


def _model(shareable: Shareable) -> Any:
    """Return the weights that a task brings; None if it brings none."""
    try:
        dxo = from_shareable(shareable)
    except ValueError:
        return None
    return dxo.data if dxo.data_kind == DataKind.WEIGHTS else None
