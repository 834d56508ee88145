# SPDX-License-Identifier: Apache-2.0
"""NVFlare: what leaves a site whose privacy.json has its policy, by NVFlare's own types."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.fuel.utils import fobs
from nvflare.private.privacy_manager import Scope
from nvflare_rounds import Federation, contexts, result, task, wire

from fedclip.adapters.nvflare import ClipUpdate, ReceiveBound, SitePolicy
from fedclip.adapters.nvflare.client import KEY
from fedclip.federation.site.gate import Refused

SECRET = "PATIENT-1234"
POLICY = "max_norm = 0.5\nallow_metrics = ['NUM_STEPS_CURRENT_ROUND', 'accuracy']\n"
MODEL = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)}

pytestmark = pytest.mark.filterwarnings("ignore::fedclip.errors.FedclipWarning")


class Site:
    """A site, as NVFlare makes it of a privacy.json and a job's configuration."""

    def __init__(
        self, folder: Path, policy: str = POLICY, filters: Sequence[Filter] = (), sees: bool = True
    ) -> None:
        file = folder / "site.toml"
        file.write_text(f"[update]\n{policy}")
        file.chmod(0o600)
        for name in ("startup", "local"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "local" / "resources.json").write_text('{"allow_log_streaming": false}')
        scope = Scope()
        if sees:
            scope.add_task_data_filter(SitePolicy(str(file)), FilterKey.IN)
        scope.add_task_result_filter(SitePolicy(str(file)), FilterKey.OUT)
        self.context = contexts("site-1").new_context()
        self.tables = {"train" + FilterKey.DELIMITER + FilterKey.OUT: list(filters)}
        runner = SimpleNamespace(task_result_filters=self.tables if filters else {})
        self.context.set_prop(FLContextKey.RUNNER, runner)
        self.context.set_prop(FLContextKey.WORKSPACE_ROOT, str(folder))
        self.context.set_prop(FLContextKey.SCOPE_OBJECT, scope)

    def receives(self, sent: Shareable) -> Shareable:
        return apply_filters("task_data_filters", sent, self.context, {}, "train", FilterKey.IN)

    def sends(self, reply: Shareable) -> Shareable:
        """Return what leaves; it must not hold the secret, in any place."""
        kind = "task_result_filters"
        left = apply_filters(kind, reply, self.context, self.tables, "train", FilterKey.OUT)
        assert SECRET.encode() not in fobs.dumps(left)
        return wire(left)

    def trained(self, reply: Shareable) -> Shareable:
        self.receives(task(MODEL))
        return self.sends(reply)


def moved(by: float) -> dict[str, Any]:
    return {name: np.full_like(array, by) for name, array in MODEL.items()}


def norm(arrays: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a, dtype="f8"))) for a in arrays.values()))


def everything(kind: str, data: Any) -> Shareable:
    """Return a result that has the secret in every place."""
    reply = DXO(
        kind,
        data=data,
        meta={
            MetaKey.NUM_STEPS_CURRENT_ROUND: 7,
            MetaKey.INITIAL_METRICS: {"accuracy": 0.5, SECRET: 1.0, "note": SECRET},
            SECRET: 3,
            "accuracy": SECRET,
        },
    ).to_shareable()
    reply[SECRET] = reply["more"] = SECRET
    reply.set_header("more", SECRET)
    reply.set_header(SECRET, 1)
    reply.add_cookie("more", SECRET)
    return reply


def test_a_difference_is_clipped_and_the_rest_stays(tmp_path: Path) -> None:
    left = Site(tmp_path).trained(everything(DataKind.WEIGHT_DIFF, moved(10.0)))
    dxo = from_shareable(left)
    assert norm(dxo.data) == pytest.approx(0.5, rel=1e-6)
    assert norm(dxo.data) <= 0.5
    assert dxo.data_kind == DataKind.WEIGHT_DIFF
    assert dxo.meta == {
        MetaKey.NUM_STEPS_CURRENT_ROUND: 7,
        MetaKey.INITIAL_METRICS: {"accuracy": 0.5},
    }
    fresh = DXO(DataKind.WEIGHT_DIFF, data=dxo.data, meta=dxo.meta).to_shareable()
    assert sorted(left) == sorted(wire(fresh))
    assert set(left["__headers__"]) == {"__content_type__"}


def test_weights_are_clipped_as_a_difference(tmp_path: Path) -> None:
    site = Site(tmp_path)
    inside = from_shareable(site.receives(wire(task(MODEL)))).data
    for array in inside.values():
        array += 10.0  # a script that trains in place
    left = from_shareable(site.sends(everything(DataKind.WEIGHTS, inside)))
    assert left.data_kind == DataKind.WEIGHTS
    difference = {name: left.data[name] - MODEL[name] for name in MODEL}
    assert norm(difference) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_large_weights_let_no_more_out(dtype: str, tmp_path: Path) -> None:
    # Of numbers that large, the next ones are 0.5 away.
    weights = np.full(4, 2 ** (np.finfo(dtype).nmant - 1), dtype)
    site = Site(tmp_path)
    site.receives(task({"w": weights}))
    reply = {"w": weights + np.array([-0.5, 0.0, 0.5, 0.0], dtype)}
    left = from_shareable(site.sends(result(reply, DataKind.WEIGHTS))).data["w"]
    assert left.dtype == dtype
    assert norm({"w": left - weights}) <= 0.5


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize(
    "data",
    [
        {SECRET: MODEL["a"], "b": MODEL["b"]},
        {"a": MODEL["a"]},
        {**MODEL, SECRET: MODEL["b"]},
        {"a": np.array([SECRET]), "b": MODEL["b"]},
        {"a": MODEL["a"].astype(object), "b": MODEL["b"]},
        {"a": MODEL["a"][0], "b": MODEL["b"]},
        {"a": SECRET, "b": [SECRET]},
    ],
    ids=str,
)
def test_what_is_not_like_the_model_does_not_leave(
    kind: str, data: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(Refused) as caught:
        Site(tmp_path).trained(result(data, kind))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_difference_of_another_dtype_does_not_leave(tmp_path: Path) -> None:
    data = {name: array.astype("i8") for name, array in MODEL.items()}
    with pytest.raises(Refused, match="arrays of floats with names, shapes and dtypes"):
        Site(tmp_path).trained(result(data))


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_an_update_of_no_known_model_does_not_leave(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no model has arrived with this task"):
        Site(tmp_path).sends(result(MODEL, kind))
    # Another instance, that sees what arrives, is needed.
    with pytest.raises(Refused, match="among the task_data_filters"):
        Site(tmp_path, sees=False).trained(result(MODEL, kind))


@pytest.mark.parametrize("kind", sorted(set(DataKind) - {"WEIGHTS", "WEIGHT_DIFF", "METRICS"}))
def test_other_kinds_do_not_leave(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="of a kind that the site's policy does not let out"):
        Site(tmp_path).trained(everything(kind, {"accuracy": 0.5, "x": SECRET}))


@pytest.mark.parametrize("reply", [Shareable(), Shareable({"data": SECRET})], ids=["empty", "raw"])
def test_what_is_no_dxo_does_not_leave(reply: Shareable, tmp_path: Path) -> None:
    reply.set_header("content_type", SECRET)
    with pytest.raises(Refused, match="none that the site's policy knows"):
        Site(tmp_path).trained(reply)


def test_metrics_leave_if_they_are_named(tmp_path: Path) -> None:
    found = {"accuracy": np.float32(0.5), "loss": 0.1, SECRET: 1.0, "note": SECRET, "x": [1.0]}
    left = from_shareable(Site(tmp_path).trained(everything(DataKind.METRICS, found)))
    assert left.data == {"accuracy": 0.5}
    assert type(left.data["accuracy"]) is float


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (ReturnCode.EXECUTION_EXCEPTION, ReturnCode.EXECUTION_EXCEPTION),
        (SECRET, ReturnCode.EXECUTION_EXCEPTION),
    ],
)
def test_an_error_leaves_without_data(code: str, sent: str, tmp_path: Path) -> None:
    reply = everything(DataKind.WEIGHT_DIFF, moved(1.0))
    reply.set_return_code(code)
    left = Site(tmp_path).trained(reply)
    assert left == wire(make_reply(sent))


def test_a_job_with_filters_of_its_own_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, filters=[ClipUpdate({}), ExcludeVars(["a"])])
    with pytest.raises(UnsafeJobError, match=r"filters of its own \(ExcludeVars\)"):
        site.receives(task(MODEL))
    with pytest.raises(UnsafeJobError, match="runs after the site's"):
        site.sends(result(moved(0.1)))


@pytest.mark.parametrize("said", ['{"allow_log_streaming": true}', "{}", "no JSON"])
def test_a_site_that_sends_its_logs_is_refused(said: str, tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "local" / "resources.json").write_text(said)
    with pytest.raises(UnsafeJobError, match='"allow_log_streaming": false'):
        site.receives(task(MODEL))
    with pytest.raises(UnsafeJobError, match="errors can hold data"):
        site.sends(result(moved(0.1)))


def test_a_job_can_not_play_the_site(tmp_path: Path) -> None:
    Site(tmp_path)
    with pytest.raises(UnsafeJobError, match=r"a filter of a site's privacy\.json, not of a job"):
        SitePolicy(str(tmp_path / "site.toml")).process(task(MODEL), FLContext())


def clipped_twice(site: Site, ours: Federation) -> Shareable:
    """Return what leaves of an update of norm 28 in a job with update clipping."""
    ours.closing.reset_stats()
    ReceiveBound().process(site.receives(ours.asked("site-1", MODEL)), site.context)
    return site.sends(result(moved(10.0)))


def test_an_update_with_noise_is_within_the_bound(tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=0.3)
    site = Site(tmp_path, f"{POLICY}noise_multiplier = 4.0\n", filters=[ClipUpdate({})])
    ours.arrives("site-1", clipped_twice(site, ours))
    # 8 normal numbers of deviation 2: their norm is above 0.3.
    assert norm(ours.closing.aggregate_model().params) == pytest.approx(0.3, rel=1e-6)
    assert ours.rounds[0]["refused"] == 0


@pytest.mark.parametrize("bound", [0.2, 2.0])
def test_the_smaller_bound_wins_beside_update_clipping(bound: float, tmp_path: Path) -> None:
    ours = Federation(tmp_path, start_norm=bound)
    left = clipped_twice(Site(tmp_path, filters=[ClipUpdate(ours.settings)]), ours)
    dxo = from_shareable(left)
    assert norm(dxo.data) == pytest.approx(min(bound, 0.5), rel=1e-6)
    # The vote is of what the site lets out: it tells nothing more.
    assert dxo.meta[KEY]["within"] == (bound > 0.5)
    ours.arrives("site-1", left)
    assert norm(ours.closing.aggregate_model().params) <= min(bound, 0.5)


def test_noise_is_added_and_the_budget_is_one_for_all_jobs(tmp_path: Path) -> None:
    ledger = tmp_path / "spent.json"
    policy = "max_norm = 0.5\nnoise_multiplier = 2.0\nmax_epsilon = 10.0\ndelta = 1e-5\n"
    policy += f"ledger = '{ledger}'\n"
    sites = [Site(tmp_path, policy), Site(tmp_path, policy)]
    sent: list[dict[str, Any]] = []

    def turn(n: int) -> None:
        sent.append(from_shareable(sites[n % 2].trained(result(moved(10.0)))).data)

    with pytest.raises(Refused, match=r"this site's budget is spent: one more update"):
        list(map(turn, range(100)))
    assert 1 < len(sent) < 100
    # 8 normal numbers of deviation 1 beside an update of norm 0.5.
    assert all(0.01 < norm(one) < 20 for one in sent)
    assert len({norm(one) for one in sent}) == len(sent)
    # An error costs nothing, and leaves.
    assert sites[0].trained(make_reply(ReturnCode.EXECUTION_EXCEPTION)).get_return_code()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([math.nan, 1.0]), 0.0),
        (np.array([math.inf, 1.0], "f2"), 0.0),
        (np.array([3.0, 4.0], "f2"), 0.5),
        (np.zeros(2, "f4"), 0.0),
    ],
    ids=str,
)
def test_what_is_not_finite_leaves_as_zeros(array: Any, expected: float, tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.receives(task({"w": np.zeros_like(array)}))
    left = from_shareable(site.sends(result({"w": array}))).data["w"]
    assert left.dtype == array.dtype
    assert expected * 0.99 <= norm({"w": left}) <= expected


def test_a_policy_that_is_none_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"site\.toml"):
        SitePolicy(str(tmp_path / "site.toml"))
    with pytest.raises(ValueError, match="max_norm"):
        Site(tmp_path, "max_nrom = 1.0")
