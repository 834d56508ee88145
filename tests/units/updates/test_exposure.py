"""What voids a promise is found by `check`, and refused where fedclip itself would do it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedclip.cli.check.configuration import check_config
from fedclip.cli.check.findings import Check
from fedclip.privacy.accounting import Release, epsilon

# The noise of each file that is checked is accounted for.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_round_left_open")]

NOISE = '["update-clip-server", {{noise_multiplier = 5.0, expected_clients = 10{}}}]'
RUN = """
[network]
protocol = "websockets"
host = "127.0.0.1"
port = 8765
[data]
[run]
rounds = 10
register = {min_clients = 1, max_clients = 5}
[run.training]
batch_size = 8
"""


@pytest.fixture
def check(checked: Any) -> Any:
    def check(
        client: str = "",
        server: str = "",
        run: str = "",
        aggregator: str = '"averaging"',
        change: tuple[str, str] = ("", ""),
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
TURNS = '[client_sampler]\nstrategy = "round-robin"\nper_round = 4\n'
RAISES = '{name = "clipped-averaging", on_nonfinite = "raise"}'


def sized(settings: str) -> str:
    return NOISE.replace("noise_multiplier = 5.0", settings)


def private(old: str, new: str) -> dict[str, str]:
    return {"run": PRIVATE.replace(old, new)}


UNIFORM = '[client_sampler]\nstrategy = "uniform"\nn_samples = 2\n'
TEN = UNIFORM.replace("= 2", "= 10")
CRITERION = UNIFORM.replace("uniform", "criterion") + 'criterion = {name = "gradient_norm"}\n'
SCAFFOLD = {"server": ', "scaffold-server"', "client": ', "scaffold-client"'}
SHARED = {"server": ', "zscore-clip-server"', "client": ', ["zscore-clip", {shared = true}]'}
VOTES = '["update-clip-server", {{{{{}}}}}]'
NOISE_ALONE = 'modules = [["gaussian-noise", {std = 5.0}]]'
ALONE = "nothing bounds the input of gaussian-noise: put a clipper first"
SIZE = "batch_size = 8\n"


def in_integers(bits: int) -> dict[str, str]:
    return {
        "run": f"[secagg]\nsecagg_type = 'masking'\nclipval = 1e5\nbitsize = {bits}\n",
        "aggregator": '{name = "clipped-averaging", max_norm = 1.0, secagg_range = 1e5}',
    }


def most(clients: int) -> tuple[str, str]:
    return ("max_clients = 5", f"max_clients = {clients}")


def clients(modules: str, run: str = "") -> dict[str, str]:
    return {"client": f"modules = {modules}", "run": run}


ARC, PAIR, STEPS = 'combine = "arc", n_hostile = 1', "weights = {a = 3, b = 1}", 'weights = "steps"'
BY, ELEVEN = '{{name = "clipped-averaging", {}}}', ("_clients = 10", "_clients = 11")
ALLOWED = ', unnoised = ["zscore-clip-server"]'
IN_TURN = NOISE.replace("10{}", "4, separation = 2{}")
# What is added to a configuration, the level of the finding, and its words.
CENTRAL: list[tuple[dict[str, Any], str, str]] = [
    (SCAFFOLD, "problem", "scaffold-server sends statistics without noise"),
    ({"more": ', unnoised = "z"'}, "note", "unnoised names 'z', which is not in server_opt"),
    ({"more": ', generator = "insecure"'}, "problem", "from a generator that can be predicted"),
    ({"more": ", delta = 0.1"}, "problem", "delta = 0.1 is not below 1 / 10 clients"),
    # All clients count, not those of a round.
    ({"more": ", delta = 0.03", "change": most(40), "run": TEN}, "problem", "1 / 40 clients"),
    ({"noise": IN_TURN, "run": TURNS, "change": most(4)}, "problem", "takes more than 4 clients"),
    ({"noise": sized("noise_multiplier = 0.5")}, "problem", "for 10 rounds is a guarantee in name"),
    ({"noise": sized("noise_multiplier = 1e-300")}, "problem", "is a guarantee in name only"),
    ({"aggregator": RAISES}, "leak", "reveals that client without noise: take 'skip'"),
    ({"run": CRITERION}, "problem", "a criterion chooses clients by what they sent"),
    ({"more": ", bits_noise = 9.0", "change": ELEVEN}, "note", "the update shrinks to 5 / 11"),
    (SHARED, "problem", "unnoised = ['zscore-clip-server']"),
    ({"aggregator": BY.format(ARC)}, "problem", "does not go with noise"),
    ({"aggregator": BY.format(STEPS)}, "problem", "weights do not go with noise"),
    ({**SHARED, "more": ALLOWED}, "leak", "is sent without noise, as unnoised allows"),
]
SAMPLE = {"client": 'modules = ["sample-clip"]'}


def of_steps(text: str) -> dict[str, Any]:
    return {**SAMPLE, "run": PRIVATE, "change": (SIZE, f"{SIZE}{text}\n")}


def noisy(settings: str, before: str = "") -> dict[str, str]:
    return clients(f'["norm-clip"{before}, ["gaussian-noise", {settings}]]')


BESIDE = noisy("{std = 5.0}", SHARED["client"]) | {"server": "modules = ['zscore-clip-server']"}
OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"run": "poisson = false\n" + PRIVATE}, "problem", "epsilon is for Poisson sampling"),
    (private("use_csprng = true", ""), "problem", "noise is predictable: set use_csprng = true"),
    (private("use_csprng = true", "seed = 3"), "problem", "and the server knows its seed"),
    (private("[3.0, 1e-5]", "[180.0, 1e-5]"), "problem", "epsilon = 180 for each client's budget"),
    (private("[3.0, 1e-5]", "[3.0, 0.5]"), "problem", "delta = 0.5 is not below 1 / 8 of a batch"),
    (private("use_", 'accountant = "gdp"\nuse_'), "problem", "'gdp' gives no upper bound"),
    *((private("1e-5", delta), "problem", "delta") for delta in ("0.0", "1.0", "2")),
    (SAMPLE, "problem", "sample-clip needs [run.privacy] on"),
    (clients('["sample-clip", "sample-clip"]', PRIVATE), "problem", "more than once: keep one"),
    (clients('["zscore-clip", "sample-clip"]', PRIVATE), "problem", "not stand before sample-clip"),
    (clients('["gaussian-noise", "sample-clip"]', PRIVATE), "problem", "Put it after sample-clip"),
    (clients('[["sample-clip", {max_norm = 0.1}]]', PRIVATE), "problem", "has max_norm = 0.1"),
    ({"server": SAMPLE["client"], "run": PRIVATE}, "problem", "of a client: move it to client_opt"),
    ({**SAMPLE, "run": PRIVATE, "aggregator": FAIR}, "problem", "refuse rounds of fairness"),
    (noisy("{std = 0.1}"), "leak", "std = 0.1 is too small for a sensitivity of 1: one step costs"),
    (noisy("{std = 5.0, safe_mode = false}"), "leak", "is predictable: set safe_mode = true"),
    (BESIDE, "leak", "zscore-clip sends statistics without the noise of gaussian-noise"),
    *(({place: NOISE_ALONE}, "leak", ALONE) for place in ("client", "server")),
    (of_steps("n_epoch = nan\ntimeout = 9"), "problem", "needs a number of steps: set n_epoch or"),
    (of_steps("timeout = 9"), "problem", "private clients refuse timeout: remove it"),
    (private("norm = 0.5", "norm = 0"), "problem", "norm must be a finite number > 0, got 0"),
    (private("[3.0", "[inf"), "problem", "must be a finite number > 0, got inf"),
    (private("[3.0", "[-2"), "problem", "epsilon must be a finite number > 0, got -2"),
    (in_integers(8), "problem", "a norm of 1 of a million values: lower"),
    (in_integers(32), "note", "lower clipval, or raise bitsize"),
]
FEW = "noise_multiplier = 1.0, expected_clients = 9"
EVALUATED = {"more": ", evaluation_share = 0.2, loss_bound = 3.0"}
EVALUATIONS: list[tuple[dict[str, Any], str, str]] = [
    (EVALUATED, "note", "for each client, against all but the server"),
    ({"noise": VOTES.format(FEW)}, "note", "hides where their norms are: fix"),
    ({"noise": VOTES.format("quantile = 0.5")}, "note", "vote tells the server the norm"),
    ({**EVALUATED, "change": ('"websockets"', '"grpc"')}, "problem", "'fedclip-websockets' on the"),
    ({**EVALUATED, "run": "[experiment]\nmetrics = ['mse']\n"}, "problem", "asks for mse too"),
    ({**EVALUATED, "change": most(11), "run": TEN}, "problem", "evaluations ask all 11 clients"),
]
MASKED = "[secagg]\nsecagg_type = 'masking'\n"
QUORUM = ('websockets"', 'fedclip-websockets"\nkwargs = {min_replies = 2}')


def averaged(keys: str, clients: int = 5, run: str = "") -> dict[str, Any]:
    aggregator = BY.format(f"max_norm = 1.0, {keys}")
    return {"aggregator": aggregator, "change": most(clients), "run": run}


AVERAGES: list[tuple[dict[str, Any], str, str]] = [
    (averaged(ARC), "note", "one client moves the average by at most 2 / n of the bound"),
    (averaged(ARC), "note", "The guarantee of ARC's paper is for robust means"),
    (averaged(ARC, run=MASKED), "problem", "does not go with secure aggregation"),
    (averaged(ARC, clients=2), "problem", "more than 2 replies in a round"),
    ({**averaged(ARC), "change": QUORUM}, "note", "there are 2 with min_replies, and such a"),
    (averaged(PAIR, 2), "note", "by at most 0.75 of the bound"),
    (averaged(PAIR, 2, MASKED), "note", "by up to 3 times"),
    (averaged(PAIR, 3), "problem", "3 clients, and weights names 2"),
    (averaged(f"{PAIR}, max_share = 0.6", 2), "note", "by at most 0.6 of the bound"),
    (averaged("weights = {a = 3}, max_share = 0.5", 1), "problem", "at least 1 / 1"),
    (averaged(STEPS), "note", "as its weight controls nearly the whole average"),
    (averaged(f"{STEPS}, max_steps = 9"), "note", "by at most 9 / (9 + the steps of the others)"),
    (averaged(STEPS, run=MASKED), "problem", "needs max_steps, and takes no max_share"),
]
CLIPS, SERVES = '"clipped-averaging"', '"update-clip-server"'
BOUNDED, RANGED = (f"{{name = {CLIPS}, {key}}}" for key in ("max_norm = 1.0", "secagg_range = 8.0"))


def updates(old: str = CLIPS, new: str = CLIPS, run: str = "") -> dict[str, Any]:
    modules = {"client": 'modules = ["update-clip-client"]', "server": f"modules = [{SERVES}]"}
    return {"aggregator": CLIPS, "change": (old, new), "run": run, **modules}


CLIPPED: list[tuple[dict[str, Any], str, str]] = [
    (updates(f"aggregator = {CLIPS}", ""), "problem", "needs aggregator = 'clipped-averaging'"),
    (updates(CLIPS, '"averaging"'), "problem", "which clips nothing"),
    (updates(f"[{SERVES}]", "[]"), "problem", "needs 'update-clip-server' in"),
    (updates(CLIPS, BOUNDED), "problem", "another bound"),
    (updates(CLIPS, RANGED), "problem", "norms up to 10000, above the range ±8"),
    (updates(SERVES, f'"momentum", {NOISE.format("")}'), "problem", "must be the first module"),
    (updates(SERVES, NOISE.format(", max_epsilon = 1")), "problem", "of 10 planned rounds"),
    (updates(run="[secagg]\nclipval = 10.0\n"), "problem", "above the range ±10"),
    ({"aggregator": CLIPS}, "problem", "has no bound"),
]
TABLE = "noise_multiplier = 2.0, expected_clients = 4, honest = 0.75, max_norm = 1.0"
COST = f"epsilon = {epsilon([Release(2.0, 10)], 1e-5):.4g}"


def by_sites(old: str = "", new: str = "") -> dict[str, Any]:
    settings = f'noise_at = "clients", {TABLE}, start_norm = 1.0, delta = 1e-5'
    return {
        "client": f'modules = [["update-clip-client", {{noise = {{{TABLE}}}}}]]',
        "server": f"modules = [[{SERVES}, {{{settings}}}]]",
        "aggregator": CLIPS,
        "change": (old, new),
        "run": "[secagg]\nbitsize = 34\nclipval = 32.0\n",
    }


NOISY_SITES: list[tuple[dict[str, Any], str, str]] = [
    (by_sites(), "note", f"If 1 of them add none, or reveal theirs to the server, {COST}"),
    (by_sites(), "note", "NumPy's PCG64, which is no cryptographic generator"),
    (by_sites("34", "64"), "problem", "integers of 62 bits for each client are not summed exactly"),
    (by_sites(*most(3)), "problem", "a round has at most 3 clients, and needs"),
    (by_sites(CLIPS, RAISES), "problem", "reveals"),
    (by_sites("0.75, max_norm = 1.0}", "0.5, max_norm = 1.0}"), "problem", "write the same table"),
    (by_sites("[secagg]", "[other]"), "problem", "sees updates with one client's noise: add"),
    (by_sites('noise_at = "clients"', 'noise_at = "server"'), "problem", "honest goes with"),
]


def sharing(settings: str, server: str = '"zscore-clip-server"') -> dict[str, str]:
    shared = clients(f'["zscore-clip", ["zscore-clip", {{shared = true{settings}}}]]')
    return {**shared, "server": f"modules = [{server}]"}


NAMED = '["{}-clip-server", {{shared_name = "a"}}]'
STATISTICS = [
    (sharing("", ""), "problem", "needs 'zscore-clip-server' in"),
    ({"server": sharing("")["server"]}, "problem", "needs 'zscore-clip' with shared = true"),
    (sharing(", decay = 0.5"), "problem", "has decay = 0.5, zscore-clip-server 0.97"),
    (sharing(', shared_name = "a"', NAMED.format("ema")), "problem", "'a' is zscore-clip's, and"),
    (sharing(', include_current = true, feedback = "raw"', ""), "problem", "not go with include_"),
    (sharing(', z_max = 2, shared_name = "a"', NAMED.format("zscore")), "problem", "z_max"),
]
NOISED = '["gaussian-noise", {std = 5.0}]'
PIPELINES = [
    (clients('["norm-clip", "adam"]'), "note", "adam comes after norm-clip and can exceed"),
    (clients('["l2-global-clipping", "momentum"]'), "note", "comes after l2-global-clipping"),
    (clients('["l2-clipping"]'), "note", "limits each tensor separately, all k together to 1·√k"),
    (clients(f'[["zscore-clip", {{max_norm = 1.0}}], {NOISED}]'), "leak", "is an adaptive rule"),
    (clients(f'[["norm-clip", {{scope = "tensor"}}], {NOISED}]'), "leak", "sized on 1·√k for k"),
]
STOP = "[run.early_stop]\ntolerance = 0.1\npatience = 3\n"
RELEASED = [
    ({"run": STOP}, "leak", "evaluation loss and metrics without noise: set evaluation_share"),
    ({"run": STOP}, "leak", "the best weights are chosen by losses or metrics without noise"),
    ({"run": STOP}, "leak", "[run.early_stop] losses without noise decide when training stops"),
    # A quickrun keeps checkpoints, and evaluates the last one.
    ({"run": "[run.evaluate]\nbatch_size = 8\nfrequency = 11\n"}, "leak", "evaluation loss and"),
]
WHOLE = [*CENTRAL, *RELEASED, *EVALUATIONS]
BARE = [*OTHERS, *AVERAGES, *CLIPPED, *NOISY_SITES, *STATISTICS, *PIPELINES]
SAMPLED = 'modules = ["value-clip", ["sample-clip", {{mode = "{}"}}], "adam"]'


@pytest.mark.parametrize(("added", "level", "words"), [*WHOLE, *BARE])
def test_what_voids_a_promise_is_said(check: Any, added: Any, level: str, words: str) -> None:
    whole = (added, level, words) in WHOLE
    assert words in said(central(check, **added) if whole else check(**added), level)


def test_where_nothing_is_wrong_none_of_it_is_said(check: Any) -> None:
    for found in (
        central(check, client=', "zscore-clip"'),
        central(check, noise=sized("noise_multiplier = 1e308")),
        central(check, noise=sized("noise_multiplier = 2.0, max_epsilon = 8.0")),
        # Noise after noise is free.
        central(check, server=', ["gaussian-noise", {std = 5.0}]'),
        central(check, run=UNIFORM),
        # Without noise nothing is promised.
        check(run=CRITERION),
        check(run=PRIVATE),
        check('modules = ["sample-clip"]', run=PRIVATE, change=(SIZE, f"{SIZE}n_steps = 4\n")),
        check('modules = ["norm-clip", "adam"]'),
        check('regularizers = ["agc"]'),
        check(**noisy("{std = 5.0}")),
        check(server=NOISE_ALONE, aggregator='{name = "clipped-averaging", max_norm = 1.0}'),
        check(**sharing(', shared_name = "a"', NAMED.format("zscore"))),
        check(**updates()),
        check(**in_integers(64)),
    ):
        assert found.ok
        for _, level, words in (*CENTRAL, *OTHERS):
            assert words not in said(found, level)
    for modules in ('"momentum", "norm-clip"', '"norm-clip", "gaussian-noise", "adam"'):
        found = check(f"modules = [{modules}]")
        assert not any(words in said(found, level) for _, level, words in PIPELINES)
    assert not check().of("leak")
    for votes in ("10", "9, start_norm = 1.0, learning_rate = 0"):
        noise = VOTES.format(f"noise_multiplier = 1.0, expected_clients = {votes}")
        assert "hides where their norms are" not in said(central(check, noise=noise))
    assert "early_stop" not in said(central(check), "leak")


@pytest.mark.parametrize(
    ("client", "texts"),
    [
        ("", ["each tensor of each sample to 0.5, a sample of k tensors to 0.5·√k"]),
        ('regularizers = [["agc", {ratio = 0.02}]]', ["Before the noise, agc: On an aggregate"]),
        ('regularizers = ["ridge"]', ["Before the noise, ridge"]),
        ('modules = ["norm-clip"]', ["After the noise, norm-clip: the L2 norm is at most 1."]),
        (SAMPLED.format("flat"), ["to 0.5, by one norm", "After the noise, adam"]),
        (SAMPLED.format("tensor"), ["each of the k tensors of a record is clipped to 0.5/√k"]),
        (SAMPLED.format("automatic"), ["brought to almost C", "the sum of a batch by at most C,"]),
        (SAMPLED.format("adaptive"), ["clipped to C, which starts at 0.5 and follows the 0.5"]),
    ],
)
def test_what_becomes_of_each_record(check: Any, client: str, texts: list[str]) -> None:
    found = check(client, run=PRIVATE)
    assert found.ok
    step = found.places[0]
    assert all(text in step for text in texts), step
    ours = "sample-clip" in client
    assert ("gradient has norm up to 0.5·√k" in said(found)) != ours
    assert ("max_budget=(epsilon, delta)" in said(found)) == ours
    assert "evaluation loss and metrics" in said(found, "leak")


@pytest.mark.parametrize("named", [False, True])
def test_privacy_may_be_in_a_file_of_its_own_or_beside_optimizers(
    check: Any, checked: Any, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PRIVATE.replace("[3.0", "[30.0")
    Path("p.toml").write_text(text.replace("run.", "") if named else text.partition("\n")[2])
    found = check('modules = ["norm-clip"]', change=("rounds", 'privacy = "p.toml"\nrounds'))
    assert "each tensor of each sample to 0.5" in found.places[0]
    assert "epsilon = 30 for each client's budget is" in said(found, "problem")
    Path("p.toml").write_text("budget = 3\n")
    assert "budget must be" in said(check_config(found.path), "problem")
    # A script of a server may keep all of its sections in one file, and others of its own.
    optim = 'aggregator = "averaging"\n[client_opt]\nlrate = 0.5\nmodules = ["norm-clip"]\n'
    found = checked(f"{optim}{RUN.partition('[data]')[2]}{PRIVATE}")
    assert "each tensor of each sample to 0.5" in found.places[0]
    assert checked(f"{optim}[run]\nspeed = 3\nprivacy = 'none'\n").ok


def test_delta_is_compared_with_the_records_that_are_there(check: Any, tmp_path: Path) -> None:
    private = PRIVATE.replace("1e-5", "0.01")
    text = "delta = 0.01 must be far below 1 / (number of all records)"
    assert text in said(check(run=private), "leak")
    for name, records in (("a", 300), ("b", 100)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for part in ("train_data", "train_target", "valid_data", "valid_target"):
            np.save(tmp_path / "data" / name / f"{part}.npy", np.zeros(records))
    found = check(run=private)
    assert "not below 1 / 100 records of the smallest client" in said(found, "problem")
    (tmp_path / "data" / "a" / "train_persons.csv").write_text("person\n" + "1\n2\n3\n" * 100)
    found = check(run=private.replace("0.01", "0.5"))
    assert "1 / 3 persons of the smallest client: a mechanism" in said(found, "problem")


def test_a_table_of_weights_needs_the_names_of_clients(checked: Any) -> None:
    """In a script: `fedclip run` knows who sends what."""
    for more, words in (("", "the server who sends which reply"), (MASKED, "clients their names")):
        table = f"name = 'clipped-averaging'\nmax_norm = 1.0\n{PAIR}\n"
        found = checked(f"[aggregator]\n{table}[client_opt]\nlrate = 0.5\n{more}")
        assert f"fedclip-websockets', which tells {words}" in said(found)
