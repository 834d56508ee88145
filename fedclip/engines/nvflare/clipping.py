# SPDX-License-Identifier: Apache-2.0
"""Update clipping in NVFlare's recipes: the parts of clients and server, and what adds them.

::

    CloseRound.reset_stats       a round begins: open it, or end the job if it must not
    SendBound, on what leaves    the bound goes with the model
    ReceiveBound, at a client    take the bound out of the task, for this task only
    ClipUpdate, on what leaves   clip the difference to the bound; add the votes
    CloseRound.accept_model      add a reply, under the name that NVFlare knows its sender by
    CloseRound.aggregate_model   close the round
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.recipe.spec import Recipe

from fedclip.updates.protocol import Arrays, SentBound, bound_from, bound_to, reply_from, reply_to
from fedclip.updates.store import PersistentServer, absolute, client_of, server_of

# The name of bound and votes in a message, and of the bound in the context of a task.
KEY = "fedclip"


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
            raise ValueError("leave separation out: NVFlare's FedAvg draws clients at random")
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
        served = self._served
        sent = served and served.server.bound.sent
        if not served or not sent or sent.stop:
            raise RuntimeError(sent.stop if sent else "no round is open")
        try:
            served.server.check_model(model)
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
            noise = f"noise is for expected_clients={budget.clients}: connect as many"
            raise RuntimeError(f"{len(self._asked)} clients were asked, and {noise}")
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
        if KEY not in dxo.meta:
            raise ValueError("the task has no bound: make the job by add_update_clipping(recipe)")
        # Of this task only: a bound of an earlier round must not be used later.
        fl_ctx.set_prop(KEY, bound_from(dxo.meta.pop(KEY)), private=True, sticky=False)
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
        if (sent := fl_ctx.get_prop(KEY)) is None:
            raise ValueError("no bound has arrived with this task: ReceiveBound is missing")
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHT_DIFF:
            hint = "give the recipe params_transfer_type=TransferType.DIFF"
            raise ValueError(f"update clipping needs differences, got {dxo.data_kind}: {hint}")
        steps = dxo.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)
        # Torch and NumPy count steps as their own integers; the server takes plain ones.
        plain = int(steps) if isinstance(steps, numbers.Integral) else None
        reply = self._client.clip(dxo.data, sent, steps=plain)
        dxo.data, dxo.meta[KEY] = dict(reply.arrays), reply_to(reply)
        return dxo.update_shareable(shareable)


def add_update_clipping(recipe: Recipe, *, folder: str | None = None, **settings: Any) -> None:
    """Clip the updates of a recipe's clients, with a bound that follows them.

    ::

        server   sends the bound C with the model
        client   difference *= min(1, C / norm(difference)); votes whether it was within C
        server   model += average, with noise if any is asked for; the votes move C

    Parameters
    ----------
    recipe
        Any whose workflow is NVFlare's `FedAvg` and whose clients send differences, such as
        ``NumpyFedAvgRecipe(..., params_transfer_type=TransferType.DIFF)``. Call this after
        other filters were added, as they are applied in this order.
    folder
        Where the server keeps its state, so that budget and bound outlive the job: an absolute
        path on the server. None for the job's own folder, which ends with it.
    settings
        The parameters of `update-clip-server` and `clipped-averaging`, in one table: such as
        ``start_norm=1.0``, ``weights="steps"``, ``noise_multiplier=1.0``.

    Raises
    ------
    TypeError, ValueError
        If a setting is unknown or wrong, or the recipe cannot be clipped; the message says what to
        do.

    Examples
    --------
    >>> import fedclip
    >>> from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    >>> from nvflare.client.config import TransferType
    >>> recipe = NumpyFedAvgRecipe(
    ...     model=[0.0, 0.0],
    ...     min_clients=2,
    ...     train_script=fedclip.__file__,  # here is yours
    ...     params_transfer_type=TransferType.DIFF,
    ... )
    >>> add_update_clipping(recipe, start_norm=1.0)
    """
    closing, workflow = CloseRound(settings, folder), _workflow(recipe)
    budget = server_of(settings).bound.budget
    if budget and workflow.num_clients != budget.clients:
        advice = f"the recipe asks {workflow.num_clients} clients: give it min_clients"
        raise ValueError(f"noise is for expected_clients, and {advice}={budget.clients}")
    tasks = [workflow.task_name]
    recipe.add_server_output_filter(SendBound(), tasks=tasks)
    recipe.add_client_input_filter(ReceiveBound(), tasks=tasks)
    recipe.add_client_output_filter(ClipUpdate(settings), tasks=tasks)
    workflow.aggregator = closing
    # Otherwise a copy of these files would travel in the job, as its code.
    recipe._job.set_app_packages([*recipe._job.job.app_packages, "fedclip"])


def _workflow(recipe: Recipe) -> FedAvg:
    """Return the workflow of a recipe that can be clipped; refuse any other."""
    server = recipe._job._deploy_map.get("server")
    controllers = [item.controller for item in server.app_config.workflows] if server else []
    workflow = next((control for control in controllers if type(control) is FedAvg), None)
    if workflow is None:
        names = ", ".join(type(controller).__name__ for controller in controllers) or "none"
        raise ValueError(f"the workflow of this recipe is {names}: take one of NVFlare's FedAvg")
    sites = (getattr(recipe, "per_site_config", None) or {}).values()
    needed = {
        "params_transfer_type": TransferType.DIFF,
        "server_expected_format": ExchangeFormat.NUMPY,
    }
    for name, value in needed.items():
        of_all = getattr(recipe, name, None)
        for setting in [of_all, *(site.get(name) or of_all for site in sites)]:
            if setting != value:
                raise ValueError(f"give the recipe {name}={value!s}, got {setting!s}")
    replaced = ("aggregator", "exclude_vars", "aggregation_weights", "stop_cond")
    for name in (*replaced, "enable_tensor_disk_offload"):
        if getattr(workflow, name):
            raise ValueError(f"leave {name} out: update clipping has exclude, weights and combine")
    return workflow
