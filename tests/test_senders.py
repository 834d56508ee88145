# SPDX-License-Identifier: Apache-2.0
"""The server's log names whose reply was left out, where declearn lets it know."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import numpy as np
import pytest
from declearn.client_sampler import UniformClientSampler, instantiate_client_sampler
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from federation_helpers import Server

import fedclip
from fedclip.federation.update.messages import ClippedUpdates, UpdateClipVotes

BOUND = [("update-clip-server", {"start_norm": 1.0})]


def reply(value: float, votes: Any = None) -> TrainReply:
    updates = ClippedUpdates.from_dict(
        {
            "updates": NumpyVector({"w": np.array([value])}),
            "n_clients": 1,
            "n_clipped": 0,
            "n_zeroed": 0,
        }
    )
    sent = votes or {"n_clients": 1, "n_votes": 1, "n_within": 1}
    aux = {"update-clip": UpdateClipVotes.from_dict(sent)}
    return TrainReply(n_epoch=1, n_steps=1, t_spent=0.0, updates=updates, aux_var=aux)


def finish(replies: dict[str, TrainReply], sampler: fedclip.NamedClients | None) -> NumpyVector:
    server = Server(BOUND, {"name": "clipped-averaging"})
    server.start()
    if sampler is not None:
        sampler.update(replies, None)  # type: ignore[arg-type]
    return server.finish(list(replies.values()))


def test_whose_update_and_whose_vote(caplog: pytest.LogCaptureFixture) -> None:
    replies = {"a": reply(0.5), "b": reply(math.nan), "c": reply(0.5, {"n_votes": -1})}
    with caplog.at_level(logging.WARNING):
        out = finish(replies, fedclip.NamedClients())
    assert "the update of 'b' counts as zero" in caplog.text
    assert "no proper vote in 1 of 3 replies (of 'c')" in caplog.text
    np.testing.assert_allclose(out.coefs["w"], [1.0 / 3])


def test_without_it_nobody_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        finish({"a": reply(0.5), "b": reply(math.nan)}, None)
    assert "the update of one of 2 replies counts as zero" in caplog.text


def test_names_do_not_outlive_their_round(caplog: pytest.LogCaptureFixture) -> None:
    finish({"a": reply(0.5), "b": reply(0.5)}, fedclip.NamedClients())
    gc.collect()
    with caplog.at_level(logging.WARNING):
        finish({"x": reply(0.5), "y": reply(math.nan)}, None)
    assert "one of 2 replies" in caplog.text


def test_of_a_secure_sum_nobody_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sampler, total = fedclip.NamedClients(), reply(math.nan)
    sampler.update({"a": total, "b": total}, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        server = Server(BOUND, {"name": "clipped-averaging"})
        server.start()
        server.finish([total, reply(0.5)])
    assert "the update of one of" in caplog.text


def test_it_samples_as_the_other_does() -> None:
    specs = {"strategy": "uniform", "n_samples": 2, "seed": 3}
    named = instantiate_client_sampler("named-clients", sampler=specs)
    plain = instantiate_client_sampler(**specs)
    assert isinstance(named.sampler, UniformClientSampler)  # type: ignore[attr-defined]
    for sampler in (named, plain):
        sampler.init_clients({"a", "b", "c", "d"})
    assert [named.run() for _ in range(5)] == [plain.run() for _ in range(5)]
    assert named.secagg_compatible == plain.secagg_compatible
    everyone = fedclip.NamedClients()
    everyone.init_clients({"a", "b"})
    assert everyone.run() == {"a", "b"}


@pytest.mark.parametrize("sampler", [3, "uniform", ["uniform"]])
def test_what_is_no_sampler(sampler: Any) -> None:
    with pytest.raises(TypeError, match="sampler must be a ClientSampler, or a dict"):
        fedclip.NamedClients(sampler)
