# SPDX-License-Identifier: Apache-2.0
"""A client of NVFlare: receives the bound with the model, and clips the update that it sends.

::

    ReceiveBound, on what arrives   take the bound out of the task, for this task only
    ClipUpdate, on what leaves      clip the difference to the bound; add the votes
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping

from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedclip.updates.protocol import bound_from, reply_to
from fedclip.updates.store import client_of

__all__ = ["KEY", "ClipUpdate", "ReceiveBound"]

KEY = "fedclip"
"""The name of bound and votes in a message, and of the bound in the context of a task."""


class ReceiveBound(Filter):
    """Takes the bound of a round out of the task; neither script nor job sees it.

    Raises
    ------
    ValueError
        Of a task without a bound; NVFlare then answers TASK_DATA_FILTER_ERROR.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task without the bound, which the context keeps for `ClipUpdate`."""
        dxo = from_shareable(shareable)
        message = dxo.meta.pop(KEY, None)
        if message is None:
            raise ValueError(
                "the server sends no bound: make the job by add_update_clipping(recipe), which "
                "gives server and clients their parts"
            )
        # Of this task only: a bound of an earlier round must not be found later.
        fl_ctx.set_prop(KEY, bound_from(message), private=True, sticky=False)
        return dxo.update_shareable(shareable)


class ClipUpdate(Filter):
    """Clips the update that a client sends, and adds its votes.

    Parameters
    ----------
    settings
        Those of `add_update_clipping`.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong. Of an update that is no difference, or without a bound;
        NVFlare then answers TASK_RESULT_FILTER_ERROR, and nothing is sent.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        super().__init__()
        self.settings = dict(settings)
        self._client = client_of(settings)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the clipped update; the reply of a client that failed stays unchanged."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        sent = fl_ctx.get_prop(KEY)
        if sent is None:
            raise ValueError("no bound has arrived with this task: ReceiveBound is missing")
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHT_DIFF:
            raise ValueError(
                f"update clipping needs differences, got {dxo.data_kind}: give the recipe "
                "params_transfer_type=TransferType.DIFF, and let the script send "
                "FLModel(params_type=ParamsType.FULL), or differences as ParamsType.DIFF"
            )
        steps = dxo.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)
        # Torch and NumPy count steps as their own integers; the server takes plain ones.
        plain = int(steps) if isinstance(steps, numbers.Integral) else None
        reply = self._client.clip(dxo.data, sent, steps=plain)
        dxo.data = dict(reply.arrays)
        dxo.meta[KEY] = reply_to(reply)
        return dxo.update_shareable(shareable)
