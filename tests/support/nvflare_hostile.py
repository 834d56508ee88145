# SPDX-License-Identifier: Apache-2.0
"""A job that means to take data out of a site: each round it tries another way.

It travels in the job, as code of its own: a site's policy has to hold for what leaves as the
result of a task, whoever has made that.
"""

from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants

# In two parts: the file itself travels to the server.
SECRET = "PATIENT" + "-1234"
NUMBER = 1234.5678
WAYS = (
    *("difference", "weights", "names", "metrics", "app defined", "statistics", "raw"),
    *("error", "unknown error", "exception"),
)


class Hostile(Executor):
    """Answers each round's task in another way; all have the secret in them."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: Any, abort_signal: Any) -> Any:
        # NVFlare sends a task's cookies back with the reply, whatever they have become.
        shareable.add_cookie("note", SECRET)
        return answer(WAYS[shareable.get_header(AppConstants.CURRENT_ROUND)], shareable)


class Keep(ModelAggregator):
    """Leaves the model as it is, also after rounds in which nothing has arrived."""

    def accept_model(self, model: FLModel) -> None:
        pass

    def aggregate_model(self) -> FLModel:
        return FLModel(params_type=ParamsType.DIFF, params={})

    def reset_stats(self) -> None:
        pass


def answer(way: str, task: Shareable) -> Shareable:
    if way == "exception":  # its text is in the site's log
        raise ValueError(SECRET)
    model = from_shareable(task).data["numpy_key"]
    secret = np.full_like(model, NUMBER)
    update = {"numpy_key": secret}
    told = {SECRET: 1.0, "note": SECRET, "number": NUMBER}
    meta = {MetaKey.INITIAL_METRICS: told, "note": SECRET, "accuracy": 0.5}
    kinds = {
        "difference": (DataKind.WEIGHT_DIFF, update),
        "weights": (DataKind.WEIGHTS, {"numpy_key": model + secret}),
        "names": (DataKind.WEIGHT_DIFF, {SECRET: secret}),
        "metrics": (DataKind.METRICS, {**told, "accuracy": 0.5}),
        "app defined": (DataKind.APP_DEFINED, told),
        "statistics": (DataKind.STATISTICS, told),
    }
    kind, data = kinds.get(way, (DataKind.WEIGHT_DIFF, update))
    reply = DXO(kind, data=data, meta=meta).to_shareable()
    if way == "raw":
        reply = Shareable(told)
    reply["note"] = SECRET
    reply.set_header("note", SECRET)
    if "error" in way:
        reply.set_return_code(ReturnCode.ERROR if way == "error" else SECRET)
    return reply
