"""What voids a guarantee is found by `check`, and refused where fedclip itself would do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer

from fedclip import UpdateClipServer
from fedclip.cli.check.configuration import check_config
from fedclip.cli.check.findings import Check
from fedclip.engines.declearn.statistics_server import ZScoreClipServer

# The noise of each file that is checked is accounted for.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_round_left_open"),
]


NOISE = '["update-clip-server", {{noise_multiplier = 5.0, expected_clients = 10{}}}]'
RUN = """
[network]
protocol = "websockets"
host = "127.0.0.1"
port = 8765
[data]
[run]
rounds = 10
[run.register]
min_clients = 1
max_clients = 5
[run.training]
batch_size = 8
"""


Changes = tuple[str, str]


@pytest.fixture
def check(checked: Any) -> Any:
    def check(
        client: str = "",
        server: str = "",
        run: str = "",
        aggregator: str = '"averaging"',
        change: Changes = ("", ""),
    ) -> Check:
        """Check a quickrun file: a line each in the two optimizers, and what else is in it."""
        text = f"""{RUN}{run}
        [optim]
        aggregator = {aggregator}
        [optim.client_opt]
        lrate = 0.5
        {client}
        [optim.server_opt]
        lrate = 1.0
        {server}
        """
        assert change[0] in text
        found: Check = checked(text.replace(*change) if change[0] else text)
        return found

    return check


def said(found: Check, level: str = "note") -> str:
    return "\n".join(f"{f.where} {f.message}" for f in found.findings if f.level == level)


def central(
    check: Any, more: str = "", server: str = "", client: str = "", noise: str = NOISE, **file: Any
) -> Any:
    return check(
        client=f'modules = ["update-clip-client"{client}]',
        server=f"modules = [{noise.format(more)}{server}]",
        **{"aggregator": '"clipped-averaging"', **file},
    )


PRIVATE = "[run.privacy]\nbudget = [3.0, 1e-5]\nsclip_norm = 0.5\nuse_csprng = true\n"
FAIR = '"averaging"\nfairness = {algorithm = "fairgrad", f_type = "accuracy_parity"}'
NOISY = '["gaussian-noise", {std = 5.0}]'
TURNS = '[client_sampler]\nstrategy = "round-robin"\nper_round = 4\n'
RAISES = '{name = "clipped-averaging", on_nonfinite = "raise"}'


def sized(settings: str) -> str:
    return NOISE.replace("noise_multiplier = 5.0", settings)


def private(old: str, new: str) -> dict[str, str]:
    return {"run": PRIVATE.replace(old, new)}


# What is added to a configuration, the level of the finding, and its words.
CENTRAL: list[tuple[dict[str, str], str, str]] = [
    (
        {"server": ', "scaffold-server"', "client": ', "scaffold-client"'},
        *("problem", "scaffold-server sends statistics without noise"),
    ),
    ({"more": ', unnoised = "z"'}, "note", "unnoised names 'z', which is not in server_opt"),
    ({"more": ', generator = "insecure"'}, "problem", "from a generator that can be predicted"),
    ({"more": ", delta = 0.1"}, "problem", "delta = 0.1 is not below 1 / 10 clients"),
    # All clients count, not those of a round.
    (
        {
            "more": ", delta = 0.03",
            "change": ("max_clients = 5", "max_clients = 40"),
            "run": "[client_sampler]\nstrategy = 'uniform'\nn_samples = 10\n",
        },
        *("problem", "1 / 40 clients"),
    ),
    (
        {
            "noise": NOISE.replace("10{}", "4, separation = 2{}"),
            "run": TURNS,
            "change": ("max_clients = 5", "max_clients = 4"),
        },
        *("problem", "takes more than 4 clients"),
    ),
    ({"noise": sized("noise_multiplier = 0.5")}, "problem", "for 10 rounds is a guarantee in name"),
    ({"noise": sized("noise_multiplier = 1e-300")}, "problem", "is a guarantee in name only"),
    ({"aggregator": RAISES}, "leak", "reveals that client without noise: take 'skip'"),
]
OTHERS: list[tuple[dict[str, str], str, str]] = [
    ({"run": "poisson = false\n" + PRIVATE}, "problem", "epsilon is for Poisson sampling"),
    (
        private("use_csprng = true", ""),
        "problem",
        "noise is predictable: set use_csprng = true",
    ),
    (
        private("use_csprng = true", "seed = 3"),
        "problem",
        "and the server knows its seed",
    ),
    (private("[3.0, 1e-5]", "[180.0, 1e-5]"), "problem", "epsilon = 180 for each client's budget"),
    (private("[3.0, 1e-5]", "[3.0, 0.5]"), "problem", "delta = 0.5 is not below 1 / 8 of a batch"),
    (
        private("use_", 'accountant = "gdp"\nuse_'),
        "problem",
        "'gdp' gives no upper bound on epsilon",
    ),
    *((private("1e-5", delta), "problem", "delta") for delta in ("0.0", "1.0", "2")),
    ({"client": 'modules = ["sample-clip"]'}, "problem", "sample-clip needs [run.privacy] on"),
    *(
        ({"client": f"modules = {modules}", "run": PRIVATE}, "problem", words)
        for modules, words in (
            ('["sample-clip", "sample-clip"]', "more than once: keep one"),
            ('["zscore-clip", "sample-clip"]', "zscore-clip cannot stand before sample-clip"),
            ('["gaussian-noise", "sample-clip"]', "it adds noise. Put it after sample-clip"),
            ('[["sample-clip", {max_norm = 0.1}]]', "sample-clip has max_norm = 0.1"),
        )
    ),
    (
        {"server": 'modules = ["sample-clip"]', "run": PRIVATE},
        *("problem", "of a client: move it to client_opt"),
    ),
    (
        {"client": 'modules = ["sample-clip"]', "run": PRIVATE, "aggregator": FAIR},
        *("problem", "private clients refuse rounds of fairness"),
    ),
    (
        {"client": 'modules = ["norm-clip", ["gaussian-noise", {std = 0.1}]]'},
        *("leak", "std = 0.1 is too small for a sensitivity of 1: one step costs epsilon = 9"),
    ),
    (
        {"client": 'modules = ["norm-clip", ["gaussian-noise", {std = 5.0, safe_mode = false}]]'},
        *("leak", "gaussian-noise is predictable: set safe_mode = true"),
    ),
    (
        {
            "client": f'modules = ["norm-clip", ["zscore-clip", {{shared = true}}], {NOISY}]',
            "server": 'modules = ["zscore-clip-server"]',
        },
        *("leak", "zscore-clip sends statistics without the noise of gaussian-noise"),
    ),
]


@pytest.mark.parametrize(("added", "level", "words"), [*CENTRAL, *OTHERS])
def test_what_voids_a_promise_is_said(
    check: Any, added: dict[str, str], level: str, words: str
) -> None:
    whole = (added, level, words) in CENTRAL
    assert words in said(central(check, **added) if whole else check(**added), level)


def test_where_nothing_is_wrong_none_of_it_is_said(check: Any) -> None:
    for found in (
        central(check, client=', "zscore-clip"'),
        central(check, noise=sized("noise_multiplier = 1e308")),
        central(check, noise=sized("noise_multiplier = 2.0, max_epsilon = 8.0")),
        check(run=PRIVATE),
        check('modules = ["norm-clip", "adam"]'),
        check('regularizers = ["agc"]'),
        check(f'modules = ["norm-clip", {NOISY}]'),
    ):
        assert found.ok
        for _, level, words in (*CENTRAL, *OTHERS):
            assert words not in said(found, level)
    assert "without noise" not in said(check('modules = ["norm-clip", "adam"]'))


# -- statistics beside central noise ----------------------------------------------------------
SHARED = ', ["zscore-clip", {shared = true}]'


def test_shared_statistics_unfit_for_noise_are_refused_unless_it_is_written(check: Any) -> None:
    found = central(check, server=', "zscore-clip-server"', client=SHARED)
    assert not found.ok
    assert "zscore-clip-server sends statistics without noise" in said(found, "problem")
    assert "unnoised = ['zscore-clip-server']" in said(found, "problem")
    found = central(
        check, ', unnoised = ["zscore-clip-server"]', ', "zscore-clip-server"', client=SHARED
    )
    assert found.ok
    assert "zscore-clip-server is sent without noise, as unnoised allows" in said(found, "leak")


def test_a_server_refuses_them_before_its_first_message() -> None:
    """One client's norm of 40 would give all others a mean of 14."""
    config = {"noise_multiplier": 1.0, "expected_clients": 3}
    server = Optimizer(lrate=1.0, modules=[UpdateClipServer(**config), ZScoreClipServer()])
    # What a server learnt in another life does not go out, either.
    aux: Any = server.collect_aux_var()
    assert "zscore-clip-server sends statistics" in aux["update-clip"].stop
    assert (aux["zscore-clip-shared"].labels, aux["zscore-clip-shared"].state) == ([], {})
    client = Optimizer(lrate=1.0, modules=["update-clip-client"])
    with pytest.raises(RuntimeError, match="zscore-clip-server sends statistics"):
        client.process_aux_var({"update-clip": aux["update-clip"]})
    assert "zscore-clip-server" in server.collect_aux_var()["update-clip"].stop  # type: ignore[attr-defined]
    may = UpdateClipServer(**config, unnoised=["zscore-clip-server"])
    server = Optimizer(lrate=1.0, modules=[may, ZScoreClipServer()])
    assert set(server.collect_aux_var()) == {"update-clip", "zscore-clip-shared"}
    # It is allowed by name.
    may = UpdateClipServer(**config, unnoised=["other"])
    server = Optimizer(lrate=1.0, modules=[may, ZScoreClipServer()])
    assert "zscore-clip-server" in server.collect_aux_var()["update-clip"].stop  # type: ignore[attr-defined]
    # Nothing is refused without noise.
    server = Optimizer(lrate=1.0, modules=[UpdateClipServer(), ZScoreClipServer()])
    server.collect_aux_var()


# -- numbers that guarantee nothing -----------------------------------------------------------


@pytest.mark.parametrize("most", [50, 8])
def test_a_budget_above_ten_is_a_problem_where_no_rounds_are_known(checked: Any, most: int) -> None:
    found = checked(
        "aggregator = 'clipped-averaging'\n[client_opt]\nlrate = 0.5\n"
        "modules = ['update-clip-client']\n[server_opt]\nlrate = 1.0\n"
        f"modules = [{NOISE.format(f', max_epsilon = {most}.0')}]\n"
    )
    assert found.ok == (most == 8)
    assert found.ok or "epsilon = 50 for max_epsilon is" in said(found, "problem")


# -- what declearn releases -------------------------------------------------------------------
def test_what_declearn_itself_releases_is_named(check: Any) -> None:
    stop = "[run.early_stop]\ntolerance = 0.1\npatience = 3\n"
    found = said(central(check, run=stop), "leak")
    assert "evaluation loss and metrics without noise: set evaluation_share" in found
    assert "the best weights are chosen by losses or metrics without noise" in found
    assert "[run.early_stop] losses without noise decide when training stops" in found
    assert "early_stop" not in said(central(check), "leak")
    every = "[run.evaluate]\nbatch_size = 8\nfrequency = 11\n"
    # A quickrun keeps checkpoints, and evaluates the last one.
    assert "evaluation loss and metrics" in said(central(check, run=every), "leak")
    assert not check().leaks


# -- declearn's own noise ---------------------------------------------------------------------
def test_run_privacy_is_read_as_declearn_does_it(check: Any) -> None:
    step = check(run=PRIVATE).places[0]
    assert "each tensor of each sample to 0.5, a sample of k tensors to 0.5·√k" in step
    assert "nothing is clipped" not in step
    assert "which has no bound then" in step
    assert "gradient has norm up to 0.5·√k" in said(check(run=PRIVATE))


def test_declearn_clips_each_tensor_of_a_sample_by_itself() -> None:
    """What the sentence says: a sample's norm reaches C·√k."""
    from declearn.model.sklearn import SklearnSGDModel

    model = SklearnSGDModel.from_parameters(kind="regressor", penalty="none")
    model.initialize({"features_shape": (3,), "data_type": "float64"})
    batch = (np.full((1, 3), 100.0), np.array([1e4]), None)
    gradients = model.compute_batch_gradients(batch, max_norm=0.5)
    norms = [float(np.linalg.norm(value)) for value in gradients.coefs.values()]
    assert norms == pytest.approx([0.5, 0.5], rel=1e-6)


def test_agc_before_declearns_noise_promises_no_bound(check: Any) -> None:
    step = check('regularizers = [["agc", {ratio = 0.02}]]', run=PRIVATE).places[0]
    assert "Before the noise, agc: On an aggregate: it does not increase a sensitivity" in step
    assert "at most 0.02" not in step
    step = check('regularizers = ["ridge"]\nmodules = ["norm-clip"]', run=PRIVATE).places[0]
    assert "Before the noise, ridge" in step
    assert "After the noise, norm-clip: the L2 norm is at most 1. It acts on noise" in step


def test_delta_is_compared_with_the_records_that_are_there(check: Any, tmp_path: Path) -> None:
    private = PRIVATE.replace("1e-5", "0.01")
    text = "delta = 0.01 must be far below 1 / (number of all records)"
    assert check(run=private).ok
    assert text in said(check(run=private), "leak")
    for name, records in (("a", 300), ("b", 90)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for part in ("train_data", "train_target", "valid_data", "valid_target"):
            np.save(tmp_path / "data" / name / f"{part}.npy", np.zeros(records))
    assert check(run=private).ok
    np.save(tmp_path / "data" / "b" / "train_target.npy", np.zeros(100))
    found = check(run=private)
    assert "not below 1 / 100 records of the smallest client" in said(found, "problem")
    (tmp_path / "data" / "a" / "train_persons.csv").write_text("person\n" + "1\n2\n3\n" * 100)
    found = check(run=private.replace("0.01", "0.5"))
    assert "1 / 3 persons of the smallest client: a mechanism that publishes one person" in said(
        found, "problem"
    )
    (tmp_path / "data" / "a" / "train_persons.csv").unlink()
    np.savetxt(tmp_path / "data" / "b" / "train_target.csv", np.zeros(99), header="y")
    (tmp_path / "data" / "b" / "train_target.npy").unlink()
    assert text in said(check(run=private), "leak")


# -- fedclip's DP-SGD -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ('"flat"', "each record is clipped to 0.5, by one norm over all its tensors"),
        ('"tensor"', "each of the k tensors of a record is clipped to 0.5/√k"),
        ('"automatic"', "brought to almost C, and the step divided by C"),
        ('"adaptive"', "clipped to C, which starts at 0.5 and follows the 0.5 quantile"),
    ],
)
def test_what_becomes_of_each_record(check: Any, mode: str, text: str) -> None:
    found = check(
        f'modules = ["value-clip", ["sample-clip", {{mode = {mode}}}], "adam"]', run=PRIVATE
    )
    assert found.ok
    step = found.places[0]
    assert text in step
    bound = "C" if mode in ('"automatic"', '"adaptive"') else "0.5"
    assert f"moves the sum of a batch by at most {bound}," in step
    assert f"noise of z·{bound} is added to the sum" in step
    assert "Before that, each record goes through value-clip. After the noise, adam" in step
    words = said(found)
    assert "declearn clips" not in words + step
    assert "max_budget=(epsilon, delta)" in words
    assert "evaluation loss and metrics" in said(found, "leak")
    assert "can exceed its bound" not in words


# -- noise modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_privacy_may_be_in_a_file_of_its_own(
    check: Any, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PRIVATE.replace("[3.0", "[30.0")
    Path("p.toml").write_text(text.replace("run.", "") if named else text.partition("\n")[2])
    found = check('modules = ["norm-clip"]', change=("rounds", 'privacy = "p.toml"\nrounds'))
    assert "each tensor of each sample to 0.5" in found.places[0]
    assert "epsilon = 30 for each client's budget is" in said(found, "problem")
    Path("p.toml").write_text("budget = 3\n")
    assert "budget must be" in said(check_config(found.path), "problem")


def test_privacy_beside_optimizers_for_a_script(checked: Any) -> None:
    """A server's script may keep all of its sections in one file."""
    optim = 'aggregator = "averaging"\n[client_opt]\nlrate = 0.5\nmodules = ["norm-clip"]\n'
    run = RUN.partition("[data]")[2]
    found = checked(f"{optim}{run}{PRIVATE}")
    assert "each tensor of each sample to 0.5" in found.places[0]
    assert "gradient has norm up to 0.5·√k" in said(found)
    # A section of another's is left alone.
    found = checked(f"{optim}[run]\nspeed = 3\nprivacy = 'none'\n")
    assert found.ok
    assert "norm-clip: the L2 norm is at most 1" in found.places[0]


CRITERION = 'strategy = "criterion", n_samples = 2, criterion = {name = "gradient_norm"}'


@pytest.mark.parametrize(
    ("section", "ok"),
    [
        (CRITERION.replace(", ", "\n", 2), False),
        (f'strategy = "named-clients"\nsampler = {{{CRITERION}}}', False),
        ('strategy = "uniform"\nn_samples = 2', True),
    ],
)
def test_clients_are_not_chosen_by_what_has_no_noise(check: Any, section: str, ok: bool) -> None:
    found = central(check, run=f"[client_sampler]\n{section}\n")
    assert found.ok == ok
    assert ("a criterion chooses clients by what they sent" in said(found, "problem")) != ok
    # Without noise nothing is promised.
    assert check(run=f"[client_sampler]\n{section}\n").ok


ALONE = "nothing bounds the input of gaussian-noise: put a clipper first"


def test_noise_on_what_nothing_bounds(check: Any) -> None:
    noise = 'modules = [["gaussian-noise", {std = 5.0}]]'
    assert ALONE in said(check(noise), "leak")
    assert ALONE in said(check(server=noise), "leak")
    bounded = '{name = "clipped-averaging", max_norm = 1.0}'
    assert ALONE not in said(check(server=noise, aggregator=bounded), "leak")
    assert ALONE not in said(check(noise, run=PRIVATE), "leak")
    # Noise after noise is free.
    assert ALONE not in said(central(check, server=', ["gaussian-noise", {std = 5.0}]'), "leak")


def test_fewer_clients_than_averages_are_divided_by(check: Any) -> None:
    few = "and expected_clients is"
    assert few not in said(central(check))
    more = ("expected_clients = 10", "expected_clients = 11")
    found = central(check, more=", bits_noise = 9.0", change=more)
    assert "the update shrinks to 5 / 11" in said(found)


def test_noise_for_a_budget_needs_a_number_of_steps(check: Any) -> None:
    modules, size = 'modules = ["sample-clip"]', "batch_size = 8\n"
    assert check(modules, run=PRIVATE).ok
    for steps, text in (
        ("n_epoch = nan\ntimeout = 9", "needs a number of steps: set n_epoch or n_steps"),
        ("n_epoch = nan\nn_steps = 4", ""),
        ("timeout = 9", "private clients refuse timeout: remove it"),
    ):
        found = check(modules, run=PRIVATE, change=(size, f"{size}{steps}\n"))
        assert found.ok == (not text)
        assert text in said(found, "problem")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("budget = [3.0, 1e-5], sclip_norm = 0", "sclip_norm must be a finite number > 0, got 0"),
        ("budget = [inf, 1e-5], sclip_norm = 0.5", "must be a finite number > 0, got inf"),
        ("budget = [-2, 1e-5], sclip_norm = 0.5", "epsilon must be a finite number > 0, got -2"),
    ],
)
def test_a_budget_and_a_bound_are_numbers_above_zero(check: Any, setting: str, text: str) -> None:
    problems = said(check(change=("rounds", f"privacy = {{{setting}}}\nrounds")), "problem")
    assert text in problems
    assert "type constructors" not in problems


# -- secure aggregation -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bits", "level", "text"),
    [
        (8, "problem", "a norm of 1 of a million values: lower"),
        (32, "note", "lower clipval, or raise bitsize"),
        (64, "", ""),
    ],
)
def test_integers_that_are_too_coarse(check: Any, bits: int, level: str, text: str) -> None:
    found = check(
        run=f"[secagg]\nsecagg_type = 'masking'\nclipval = 1e5\nbitsize = {bits}\n",
        aggregator='{name = "clipped-averaging", max_norm = 1.0, secagg_range = 1e5}',
    )
    lines = [f for f in found.findings if "bits" in f.message and f.where == "[secagg]"]
    assert [f.level for f in lines] == ([level] if level else [])
    assert all(text in f.message for f in lines)


def test_a_server_refuses_statistics_that_stand_before_its_noise() -> None:
    from fedclip.engines.declearn.messages import UpdateClipVotes

    config = {"noise_multiplier": 1.0, "expected_clients": 3}
    noise, shared = UpdateClipServer(**config), ZScoreClipServer()
    server = Optimizer(lrate=1.0, modules=[shared, noise])
    server.collect_aux_var()
    noise.process_aux_var(UpdateClipVotes(n_clients=3, n_votes=3, n_within=3))
    with pytest.raises(ValueError, match="stands before the noise: put update-clip-server first"):
        shared.run(NumpyVector({"w": np.ones(2)}))
    noise.run(NumpyVector({"w": np.ones(2)}))
