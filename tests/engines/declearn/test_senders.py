# SPDX-License-Identifier: Apache-2.0
"""Replies are vetted before they are added up, and the server's log says whose they were."""

import gc
import math
from typing import Any

import numpy as np
import pytest
from declearn.client_sampler import UniformClientSampler, instantiate_client_sampler
from declearn.messaging import TrainReply
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import AuxVar as _AuxVar
from federation_helpers import Server, model_of

import fedclip
from fedclip.engines.declearn import context as replies
from fedclip.engines.declearn.messages import ClippedUpdates, UpdateClipVotes
from fedclip.engines.declearn.statistics_server import ZScoreClipServer
from fedclip.statistics.counts import FedclipSharedCounts
from fedclip.updates.votes import FIRST_VARIANCE, BoundRule, counts_of


class AuxVar(_AuxVar, register=False):
    pass


MODEL = model_of(w=np.zeros(1))
BOUND = [("update-clip-server", {"start_norm": 1.0})]


def reply(value: float, votes: Any = None) -> TrainReply:
    counts = {"n_clients": 1, "n_clipped": 0, "n_zeroed": 0}
    updates = ClippedUpdates.from_dict({"updates": NumpyVector({"w": np.array([value])}), **counts})
    sent = votes or {"n_clients": 1, "n_votes": 1, "n_within": 1}
    aux = {"update-clip": UpdateClipVotes.from_dict(sent)}
    return TrainReply(n_epoch=1, n_steps=1, t_spent=0.0, updates=updates, aux_var=aux)


def finish(replies: dict[str, TrainReply], sampler: fedclip.NamedClients | None) -> NumpyVector:
    server = Server(BOUND, {"name": "clipped-averaging"})
    server.start()
    if sampler is not None:
        sampler.update(replies, MODEL)
    return server.finish(list(replies.values()))


def test_whose_update_and_whose_vote(caplog: pytest.LogCaptureFixture) -> None:
    replies = {"a": reply(0.5), "b": reply(math.nan), "c": reply(0.5, {"n_votes": -1})}
    out = finish(replies, fedclip.NamedClients())
    assert "the update of 'b' counts as zero" in caplog.text
    assert "no proper vote in 1 of 3 replies (of 'c')" in caplog.text
    np.testing.assert_allclose(out.coefs["w"], [1.0 / 3])


def test_whose_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever came first; and how many it were so far, over a restart, too."""
    server = ZScoreClipServer()
    rows = server.shared_state.tally.rows
    round_, key = reply(0.5), str(server.aux_name)
    replies.note(round_, {key: [*"abc"]})
    for place, total in enumerate(
        [
            "text" + FedclipSharedCounts(1, [0] * rows),
            FedclipSharedCounts(1, [0] * rows) + FedclipSharedCounts(1, [1] * rows),
        ]
    ):
        caplog.clear()
        server.process_aux_var(total + FedclipSharedCounts(1, [0] * rows))  # type: ignore[operator]
        assert f"1 of 3 messages say, round {place + 1}: " in caplog.text
        assert f"(1×: {'ab'[place]!r}) ({place + 1} so far)" in caplog.text
    again = ZScoreClipServer()
    again.set_state(server.get_state())
    assert again.refused == 2


def test_of_a_secure_sum_nobody_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sampler, total = fedclip.NamedClients(), reply(math.nan)
    sampler.update({"a": total, "b": total}, MODEL)
    server = Server(BOUND, {"name": "clipped-averaging"})
    server.start()
    server.finish([total, reply(0.5)])
    assert "the update of one of" in caplog.text


def votes(within: int = 1) -> UpdateClipVotes:
    return UpdateClipVotes(1, 1, within)


SENT: dict[str, tuple[Any, str]] = {
    "a string for votes": ({"update-clip": "votes"}, "no proper vote"),
    "counts for votes": ({"update-clip": FedclipSharedCounts(1, [0])}, "no proper vote"),
    "a name that is none": ({"update-clip": votes(), 3: votes()}, "receives 3"),
    "another module's": ({"update-clip": votes(), "other": AuxVar()}, "receives 'other'"),
    "nothing": ({}, ""),
}


@pytest.mark.parametrize(("kind", "place"), [(kind, i % 4) for i, kind in enumerate(SENT)])
def test_what_is_no_vote_is_an_abstention_in_any_order(kind: str, place: int, caplog: Any) -> None:
    """Two of the three others are within the bound; neither is lost, whoever replies first."""
    names = ["a", "b", "c"]
    replies = {name: reply(0.5) for name in names}
    replies["c"].aux_var["update-clip"] = votes(0)
    bad = reply(0.5)
    bad.aux_var, said = SENT[kind]
    items = list(replies.items())
    items.insert(place, ("liar", bad))
    server = Server(BOUND, {"name": "clipped-averaging"})
    server.start()
    fedclip.NamedClients().update(dict(items), MODEL)
    server.finish([sent for _, sent in items])
    within = 3 if "update-clip" in SENT[kind][0] and "for votes" not in kind else 2
    counts = within * counts_of((1, 1, ())) + counts_of((1, 0, ()))
    expected = BoundRule(0.5, 1e-6, 1e4).after(1.0, FIRST_VARIANCE, counts).bound
    assert server.module.bound == pytest.approx(expected)
    assert said in caplog.text
    assert "liar" in caplog.text
    assert server.start()["update-clip"].stop == ""


@pytest.mark.parametrize("vetted", [True, False])
@pytest.mark.parametrize(
    "dtypes", [["f4", "f4", "f8"], ["f8", "f4", "f4"], ["f8", "f2", ">f4"]], ids=str
)
def test_the_dtype_of_one_update_costs_nobody_else_a_reply(vetted: bool, dtypes: list[str]) -> None:
    """Were others refused for it, with noise, one client could move their whole sum."""
    replies = {str(i): reply(0.0) for i in range(len(dtypes))}
    for i, dtype in enumerate(dtypes):
        vector = NumpyVector({"w": np.ones(1, dtype)})
        replies[str(i)].updates = ClippedUpdates(vector, 1)
    out = finish(replies, fedclip.NamedClients() if vetted else None)
    np.testing.assert_array_equal(out.coefs["w"], [1.0])
    if vetted:
        # The model's, whoever replies.
        assert out.coefs["w"].dtype == np.float64
    elif dtypes.count("f4") == 2:
        # Of most replies, whoever comes first.
        assert out.coefs["w"].dtype == np.float32


def test_what_only_one_module_receives_is_kept_and_a_missing_module_is_still_told_of() -> None:
    """If nobody votes, in the first round, that is no lie: the module is not there."""
    server = Server(BOUND, {"name": "clipped-averaging"})
    replies = {"a": reply(0.5), "b": reply(0.5)}
    for sent in replies.values():
        sent.aux_var = {"other": AuxVar(), "another": AuxVar()}
    server.start()
    fedclip.NamedClients(receives=["other"]).update(replies, MODEL)
    assert [{*sent.aux_var} for sent in replies.values()] == [{"other"}] * 2
    for sent in replies.values():
        sent.aux_var = {}
    server.finish(list(replies.values()))
    assert "no votes have come" in server.start()["update-clip"].stop


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


def test_names_do_not_outlive_their_round(caplog: pytest.LogCaptureFixture) -> None:
    finish({"a": reply(0.5), "b": reply(0.5)}, fedclip.NamedClients())
    gc.collect()
    finish({"x": reply(0.5), "y": reply(math.nan)}, None)
    assert "one of the replies" in caplog.text
