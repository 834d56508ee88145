# SPDX-License-Identifier: Apache-2.0
"""A server of NVFlare: sends the bound with the model, and averages the replies of a round.

::

    CloseRound.reset_stats       a round begins: open it, or end the job if it must not
    SendBound, on what leaves    the bound goes with the model
    CloseRound.accept_model      add a reply, under the name that NVFlare knows its sender by
    CloseRound.aggregate_model   close the round
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedclip.engines.nvflare.client import KEY
from fedclip.updates.protocol import Arrays, SentBound, bound_to, reply_from
from fedclip.updates.store import PersistentServer, absolute, server_of

__all__ = ["CloseRound", "SendBound"]


class CloseRound(ModelAggregator):
    """Opens and closes rounds; the aggregator of NVFlare's `FedAvg`.

    Parameters
    ----------
    settings
        Those of `add_update_clipping`.
    folder
        Where the server keeps its state and the records of its rounds, an absolute path; None for
        `fedclip` in the folder of the job's run, whose budget ends with the job.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong, or needs clients that take turns; if the path is relative.
    RuntimeError
        With noise, from a round that fewer clients were asked in than `expected_clients`: the
        job ends, and nothing of the round is released.

    Notes
    -----
    `SendBound` sees the model of a round. The server publishes the average, without votes and
    without the clients' metrics.
    """

    def __init__(self, settings: Mapping[str, object], folder: str | None = None) -> None:
        super().__init__()
        if server_of(settings).bound.separation > 1:
            raise ValueError(
                "separation > 1 needs clients that take turns, and NVFlare's FedAvg draws them at "
                "random: leave it out"
            )
        absolute(folder)
        self.settings = dict(settings)
        self.folder = folder
        self._served: PersistentServer | None = None
        self._model: Arrays | None = None
        self._asked: set[str] = set()

    def reset_stats(self) -> None:
        """Open a round; if there is no next one, end the job in good order, with the reason."""
        if self._served is None:
            fallback = None if self.folder else self._run()
            self._served = PersistentServer(self.settings, self.folder, fallback=fallback)
        self._model, self._asked = None, set()
        sent = self._served.open()
        self.fl_ctx.set_prop(KEY, self, private=True, sticky=True)
        if sent.stop:
            # The workflow returns at its next look; the model of the last round is kept.
            self.fl_ctx.get_prop(FLContextKey.RUN_ABORT_SIGNAL).trigger(True)

    def sent_to(self, client: str, model: Arrays) -> SentBound:
        """Return the message to a client, which gets this model.

        Raises
        ------
        RuntimeError
            If no round is open; if noise must not be added to this model, which ends the job.
        """
        sent = self._served and self._served.server.bound.sent
        if self._served is None or not sent or sent.stop:
            raise RuntimeError(sent.stop if sent else "no round is open")
        try:
            self._served.server.check_model(model)
        except ValueError as exc:
            # NVFlare would offer the task again and again.
            self.fl_ctx.get_prop(FLContextKey.RUN_ABORT_SIGNAL).trigger(True)
            raise RuntimeError(f"the job ends: {exc}") from exc
        self._model = model
        self._asked.add(client)
        return sent

    def accept_model(self, model: FLModel) -> None:
        """Add the reply of a client to the round; a late one, or a second one, changes nothing."""
        # NVFlare writes the name, whatever the client has put there.
        sender = model.meta["client_name"]
        if self._served is None or self._model is None or sender not in self._asked:
            self.log_warning(self.fl_ctx, f"{sender!r} was not asked in this round")
            return
        self._served.add(reply_from(model.params, model.meta.get(KEY), sender), self._model)

    def aggregate_model(self) -> FLModel:
        """Close the round, and return its average as a difference."""
        served, model = self._served, self._model
        if served is None or model is None:  # nobody was asked
            return FLModel(params_type=ParamsType.DIFF, params={})
        budget = served.server.bound.budget
        if budget and len(self._asked) != budget.clients:
            raise RuntimeError(
                f"{len(self._asked)} clients were asked in a round whose noise is for "
                f"expected_clients={budget.clients}: connect as many, and give the recipe "
                f"min_clients={budget.clients}"
            )
        average = served.close(like=model).average
        # A late reply does not belong to this round.
        self._model = None
        # NVFlare adds it to the model, whose whole numbers have to stay whole.
        integers = {k: v.dtype for k, v in model.items() if v.dtype.kind in "iu"}
        average |= {k: np.rint(average[k]).astype(dtype) for k, dtype in integers.items()}
        return FLModel(params_type=ParamsType.DIFF, params=average)

    def _run(self) -> Path:
        workspace = self.fl_ctx.get_engine().get_workspace()
        return Path(workspace.get_run_dir(self.fl_ctx.get_job_id()), KEY)


class SendBound(Filter):
    """Adds the bound of the round to the model that a client gets.

    Raises
    ------
    RuntimeError
        If no round is open; NVFlare then sends nothing.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task with the bound."""
        aggregator = fl_ctx.get_prop(KEY)
        if aggregator is None:
            raise RuntimeError("no round is open: CloseRound is not the aggregator of this job")
        dxo = from_shareable(shareable)
        client = fl_ctx.get_peer_context().get_identity_name()
        sent = aggregator.sent_to(client, dxo.data)
        if sent.private:
            dxo.meta.pop("nr_aggregated", None)  # who replies is not covered by epsilon
        dxo.meta[KEY] = bound_to(sent)
        return dxo.update_shareable(shareable)
