# SPDX-License-Identifier: Apache-2.0
"""NVFlare: what leaves a site whose privacy.json has its policy, by NVFlare's own types."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.fuel.utils import fobs
from nvflare.private.privacy_manager import Scope
from nvflare_rounds import Federation, contexts, result, task, wire

from fedclip.engines.nvflare import ClipUpdate, ReceiveBound, SitePolicy
from fedclip.engines.nvflare.clipping import KEY
from fedclip.site.gate import spent
from fedclip.site.policy import Policy

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
        self.folder, self.scope, self.job = folder, scope, {"byoc": False}
        self.tables = {"train" + FilterKey.DELIMITER + FilterKey.OUT: list(filters)}
        self.executor = Returns()
        self.arrived = Shareable()
        self._fresh()

    def _fresh(self) -> None:
        """Begin a task, as NVFlare does: with a context of its own."""
        self.context = contexts("site-1").new_context()
        tables = self.tables if any(self.tables.values()) else {}
        runner = SimpleNamespace(task_result_filters=tables, find_executor=lambda _: self.executor)
        for name, value in (
            (FLContextKey.RUNNER, runner),
            (FLContextKey.WORKSPACE_ROOT, str(self.folder)),
            (FLContextKey.SCOPE_OBJECT, self.scope),
            (FLContextKey.JOB_META, self.job),
            (FLContextKey.TASK_NAME, "train"),
        ):
            self.context.set_prop(name, value)

    def receives(self, sent: Shareable) -> Shareable:
        self._fresh()
        kind = "task_data_filters"
        self.arrived = apply_filters(kind, sent, self.context, {}, "train", FilterKey.IN)
        return self.arrived

    def sends(self, reply: Any) -> Shareable:
        """Return what leaves if the executor returns or raises this."""
        self.executor.reply, signal = reply, Signal()
        reply = self.executor.execute("train", self.arrived, self.context, signal)
        assert not signal.triggered
        return self.leaves(reply)

    def leaves(self, reply: Shareable) -> Shareable:
        """Return what leaves of a result; it must not hold the secret, in any place."""
        kind = "task_result_filters"
        left = apply_filters(kind, reply, self.context, self.tables, "train", FilterKey.OUT)
        # As NVFlare's runner does: the task's cookies go back with the reply.
        left.set_cookie_jar(self.arrived.get_cookie_jar())
        assert SECRET.encode() not in fobs.dumps(left)
        return wire(left)

    def trained(self, reply: Any) -> Shareable:
        sent = task(MODEL)
        sent.add_cookie("round", {"number": 3})
        self.receives(sent)
        return self.sends(reply)


class Returns(Executor):
    """An executor that puts the secret where it can, and returns or raises what it is given."""

    reply: Any
    runs = 0

    def execute(self, name: str, task: Shareable, fl_ctx: FLContext, signal: Signal) -> Any:
        self.runs += 1
        signal.trigger(SECRET)
        task.add_cookie("round", SECRET)
        task.add_cookie(SECRET, 1)
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply


def moved(by: float) -> dict[str, Any]:
    return {name: np.full_like(array, by) for name, array in MODEL.items()}


def norm(arrays: dict[str, Any]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a, dtype="f8"))) for a in arrays.values()))


def everything(kind: str, data: Any) -> Shareable:
    meta: Any = {MetaKey.NUM_STEPS_CURRENT_ROUND: 7, SECRET: 3, "accuracy": SECRET}
    meta[MetaKey.INITIAL_METRICS] = {"accuracy": 0.5, SECRET: 1.0, "note": SECRET}
    reply = DXO(kind, data=data, meta=meta).to_shareable()
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
    steps = {MetaKey.NUM_STEPS_CURRENT_ROUND: 7}
    assert dxo.meta == {**steps, MetaKey.INITIAL_METRICS: {"accuracy": 0.5}}
    fresh = DXO(DataKind.WEIGHT_DIFF, data=dxo.data, meta=dxo.meta).to_shareable()
    fresh.set_cookie_jar({"round": {"number": 3}})
    assert fobs.dumps(left) == fobs.dumps(wire(fresh))


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


OTHERS: dict[str, dict[str, Any]] = {
    "names": {SECRET: MODEL["a"], "b": MODEL["b"]},
    "one missing": {"a": MODEL["a"]},
    "one more": {**MODEL, SECRET: MODEL["b"]},
    "a text": {"a": np.array([SECRET]), "b": MODEL["b"]},
    "objects": {"a": MODEL["a"].astype(object), "b": MODEL["b"]},
    "a shape": {"a": MODEL["a"][0], "b": MODEL["b"]},
    "dtypes": {name: array.astype("i8") for name, array in MODEL.items()},
    "no arrays": {"a": SECRET, "b": [SECRET]},
}


def failed(code: str) -> Shareable:
    reply = everything(DataKind.WEIGHT_DIFF, moved(1.0))
    reply.set_return_code(code)
    return reply


UPDATES = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
REPLIES = {
    **{f"{kind}: {name}": result(data, kind) for kind in UPDATES for name, data in OTHERS.items()},
    **{
        kind: everything(kind, {"accuracy": 0.5, "x": SECRET})
        for kind in set(DataKind) - {*UPDATES, DataKind.METRICS}
    },
    "empty": Shareable(),
    "raw": Shareable({"data": SECRET}),
    "no reply": SECRET,
    **{code: failed(code) for code in (ReturnCode.ERROR, ReturnCode.UNSAFE_JOB, SECRET)},
    **{
        type(one).__name__: one
        for one in (ValueError(SECRET), RuntimeError(SECRET), UnsafeJobError(SECRET))
    },
}


@pytest.mark.parametrize("name", sorted(REPLIES))
def test_any_two_refusals_are_the_same_bytes(name: str, tmp_path: Path) -> None:
    """The law: whatever is refused, and why, and whatever the app has done to its task."""
    budget = f"noise_multiplier = 9.0\nmax_epsilon = 2.0\ndelta = 1e-5\nledger = '{tmp_path}/x'\n"
    left = Site(tmp_path, POLICY + budget).trained(REPLIES[name])
    refused = make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    refused.set_cookie_jar({"round": {"number": 3}})
    assert fobs.dumps(left) == fobs.dumps(wire(refused))
    # Form before charge.
    assert spent(Policy.read(tmp_path / "site.toml")).rounds == 0


@pytest.mark.parametrize("sees", [True, False])
def test_an_update_of_no_known_model_is_refused(sees: bool, tmp_path: Path, caplog: Any) -> None:
    site = Site(tmp_path, sees=sees)
    site.receives(Shareable())
    assert site.leaves(result(MODEL)).get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert "put SitePolicy into the task_data_filters" in caplog.text


def test_beyond_max_replies_no_executor_runs(tmp_path: Path, caplog: Any) -> None:
    site = Site(tmp_path, f"{POLICY}max_replies_per_run = 2\n")
    codes = [site.trained(result(moved(0.1))).get_return_code() for _ in range(2)]
    site.executor.reply = None
    refused = site.trained(result(moved(0.1)))
    assert [*codes, refused.get_return_code()] == ["OK", "OK", "TASK_RESULT_FILTER_ERROR"]
    assert "max_replies_per_run = 2" in caplog.text
    assert site.executor.runs == 2


@pytest.mark.parametrize("kind", UPDATES)
def test_counters_stay_as_the_server_has_them(kind: str, tmp_path: Path) -> None:
    model = {**MODEL, "bn.num_batches_tracked": np.array(5), "used": np.array([True, False])}
    site = Site(tmp_path)
    site.receives(task(model))
    # NVFlare's own differences of arrays without dimensions are scalars.
    reply = {k: x + (kind == "WEIGHTS") * 1 if x.dtype == int else x for k, x in model.items()}
    left = from_shareable(site.sends(result(reply, kind))).data
    assert int(left["bn.num_batches_tracked"]) == (5 if kind == "WEIGHTS" else 0)
    assert left["used"].tolist() == [kind == "WEIGHTS", False]
    assert {k: x.dtype for k, x in left.items()} == {k: x.dtype for k, x in model.items()}


@pytest.mark.parametrize("how", ["filters", "byoc", "no meta", "logs", "no logs", "no JSON"])
def test_a_job_that_could_get_around_the_policy_ends(how: str, tmp_path: Path) -> None:
    filters = [ClipUpdate({}), ExcludeVars(["a"])] if how == "filters" else []
    site = Site(tmp_path, filters=filters)
    site.job = {"byoc": {"byoc": True}, "no meta": None}.get(how, site.job)
    said = {"logs": '{"allow_log_streaming": true}', "no logs": "{}", "no JSON": "no JSON"}
    if how in said:
        (tmp_path / "local" / "resources.json").write_text(said[how])
    why = {"filters": r"filters \(ExcludeVars\)", "byoc": "byoc", "no meta": "byoc"}
    with pytest.raises(UnsafeJobError, match=why.get(how, '"allow_log_streaming": false')):
        site.receives(task(MODEL))
    # What comes about while an executor runs is refused as all else.
    code = site.leaves(result(moved(0.1))).get_return_code()
    assert code == ReturnCode.TASK_RESULT_FILTER_ERROR


def test_an_operator_may_let_jobs_bring_code_that_can_not_play_the_site(tmp_path: Path) -> None:
    site = Site(tmp_path, f"{POLICY}allow_job_code = true\n")
    site.job = {"byoc": True}
    assert site.trained(result(moved(0.1))).get_return_code() == ReturnCode.OK
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
    replies = [sites[n % 2].trained(result(moved(10.0))) for n in range(9)]
    sent = [from_shareable(one).data for one in replies if one.get_return_code() == "OK"]
    assert len(sent) == 4
    assert len({fobs.dumps(one) for one in replies[4:]}) == 1
    # 8 normal numbers of deviation 1 beside an update of norm 0.5.
    assert all(0.01 < norm(one) < 20 for one in sent)
    assert len({norm(one) for one in sent}) == len(sent)
