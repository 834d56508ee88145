# SPDX-License-Identifier: Apache-2.0
"""Rounds of update clipping by NVFlare's own types: contexts, filters, and bytes on the way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fedclip.engines.nvflare import ClipUpdate, CloseRound, ReceiveBound, SendBound

common_decomposers.register()


def wire(message: Shareable) -> Shareable:
    """Return what arrives of a message: bytes, and made of them again."""
    return fobs.loads(fobs.dumps(message))


def contexts(name: str) -> FLContextManager:
    return FLContextManager(engine=None, identity_name=name, job_id="a-job")


def task(model: Mapping[str, Any], **meta: Any) -> Shareable:
    return DXO(DataKind.WEIGHTS, data=dict(model), meta=meta).to_shareable()


def result(update: Mapping[str, Any], kind: str = DataKind.WEIGHT_DIFF, **meta: Any) -> Shareable:
    return DXO(kind, data=dict(update), meta=meta).to_shareable()


class Federation:
    """A server and clients as `add_update_clipping` makes them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = settings
        self.server = contexts("server")
        self.aborted = Signal()
        self.closing = CloseRound(settings, str(folder))
        self.closing.fl_ctx = self.server.new_context()
        self.closing.fl_ctx.set_prop(FLContextKey.RUN_ABORT_SIGNAL, self.aborted)

    def asked(self, name: str, model: Mapping[str, Any], **meta: Any) -> Shareable:
        context = self.server.new_context()
        peer = FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, name)
        context.set_peer_context(peer)
        return wire(SendBound().process(task(model, **meta), context))

    def replied(self, name: str, update: Mapping[str, Any], sent: Shareable, **meta: Any) -> Any:
        context = contexts(name).new_context()
        ReceiveBound().process(sent, context)
        return ClipUpdate(self.settings).process(result(update, **meta), context)

    def arrives(self, name: str, reply: Shareable) -> None:
        """Hand a reply to the aggregator, as NVFlare's workflow does."""
        model = FLModelUtils.from_shareable(wire(reply))
        model.meta["client_name"] = name
        self.closing.accept_model(model)

    def round(self, updates: Mapping[str, Any], steps: Any = None) -> FLModel:
        self.closing.reset_stats()
        model = {k: np.zeros_like(v) for k, v in next(iter(updates.values())).items()}
        for name, update in updates.items():
            meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: (steps or {}).get(name, 5)}
            self.arrives(name, self.replied(name, update, self.asked(name, model), **meta))
        return self.closing.aggregate_model()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return self.closing._served.rounds
