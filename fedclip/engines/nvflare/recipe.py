# SPDX-License-Identifier: Apache-2.0
"""`add_update_clipping`: one call that gives server and clients of a recipe their parts."""

from __future__ import annotations

from typing import Any

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.recipe.spec import Recipe

from fedclip.engines.nvflare.client import ClipUpdate, ReceiveBound
from fedclip.engines.nvflare.server import CloseRound, SendBound
from fedclip.updates.store import server_of

__all__ = ["add_update_clipping"]


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
    closing = CloseRound(settings, folder)
    workflow = _workflow(recipe)
    budget = server_of(settings).bound.budget
    if budget and workflow.num_clients != budget.clients:
        raise ValueError(
            f"the noise is for expected_clients={budget.clients}, and the recipe asks "
            f"{workflow.num_clients} clients a round: give it min_clients={budget.clients}"
        )
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
    workflows = [controller for controller in controllers if type(controller) is FedAvg]
    if len(workflows) != 1:
        names = ", ".join(type(controller).__name__ for controller in controllers) or "none"
        raise ValueError(
            f"update clipping runs in NVFlare's FedAvg, and the workflow of this recipe is {names}:"
            " take a FedAvg recipe, such as NumpyFedAvgRecipe"
        )
    (workflow,) = workflows
    sites = (getattr(recipe, "per_site_config", None) or {}).values()
    for name, value, needed in (
        ("params_transfer_type", TransferType.DIFF, "the clients must send differences"),
        ("server_expected_format", ExchangeFormat.NUMPY, "the server adds NumPy arrays up"),
    ):
        of_all = getattr(recipe, name, None)
        for setting in [of_all, *(site.get(name) or of_all for site in sites)]:
            if setting != value:
                raise ValueError(f"{needed}: give the recipe {name}={value!s}, got {setting!s}")
    for name, instead in (
        ("aggregator", "update clipping is the aggregator"),
        ("exclude_vars", "exclude=[...] says what is averaged without a bound"),
        ("aggregation_weights", "weights={...} is the table of weights"),
        ("stop_cond", "it reads an average of the clients' metrics, which has no bound"),
        ("enable_tensor_disk_offload", "replies are vetted in memory"),
    ):
        if getattr(workflow, name):
            raise ValueError(f"leave {name} out of the recipe: {instead}")
    return workflow
