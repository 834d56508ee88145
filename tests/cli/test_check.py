# SPDX-License-Identifier: Apache-2.0
"""What `fedclip check` finds in declearn's own settings; no file ends in a traceback."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from quickruns import write_config, write_sites

from fedclip.cli.check.configuration import check_config

GOOD = """
[network]
protocol = "websockets"
host = "127.0.0.1"
port = 8765
[data]
[experiment]
checkpoint = "result"
[optim]
aggregator = "averaging"
[optim.client_opt]
lrate = 0.1
modules = ["norm-clip"]
[optim.server_opt]
lrate = 1.0
[run]
rounds = 2
[run.register]
min_clients = 2
max_clients = 3
timeout = 10
[run.training]
batch_size = 8
n_epoch = 1
[run.evaluate]
batch_size = 32
"""


EARLY = "batch_size = 32\nfrequency = 2\n[run.early_stop]\ntolerance = 0.1\npatience = 2"


@pytest.fixture
def problems(checked: Any) -> Any:
    return lambda text: [f"{f.where} {f.message}" for f in checked(text).problems]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('checkpoint = "', 'checkpont = "', "[experiment] declearn knows no 'checkpont' here; did"),
        ("port = 8765", "prt = 8765", "[network] port is missing"),
        ("[optim.server_opt]", "[optim.servr_opt]", "did you mean 'server_opt'?"),
        ("[optim.client_opt]", "[client_opt]", "[client_opt] write it in [optim]"),
        ("[optim]", "[optim]\nmodules = ['no-op']", "[optim.modules] write it in [optim.client_op"),
        ("batch_size = 8", 'batch_size = "8"', "batch_size must be an int, got '8'"),
        ("[data]", "[data]\nclient_names = 'a'", "client_names must be a list, each item a strin"),
        ('"result"', '"/dev/null/result"', "checkpoint: cannot write to the folder"),
        ("batch_size = 32", EARLY, "[run.early_stop] each round must be evaluated: remove frequen"),
        ("rounds = 2", "rounds = 0", "rounds must be at least 1, got 0"),
        ("max_clients = 3", "max_clients = 1", "max_clients = 1 is below min_clients = 2"),
        ('"websockets"', '"websocket"', "unknown protocol 'websocket'; did you mean 'websockets'"),
        ("lrate = 0.1", "lrate = -0.5", "lrate must be a finite number > 0, got -0.5"),
        ("lrate = 0.1", "lrate = ['linear', {}]", "unknown schedule 'linear'"),
        ("lrate = 0.1", "lrate = 1", "lrate = 1 must be a float: write 1.0"),
        ("modules =", "module =", "unknown parameter 'module'; did you mean"),
        ("batch_size = 8", "", "[run.training] batch_size is missing"),
        ('["norm-clip"]', '["zscor-clip"]', "unknown module 'zscor-clip'; did you mean 'zscore-"),
        ('["norm-clip"]', '[["norm-clip", {maxnorm = 1.0}]]', "'maxnorm'; did you mean 'max_norm'"),
        ('["norm-clip"]', '[["norm-clip", {max_norm = -1.0}]]', "norm-clip: max_norm must be"),
        ('["norm-clip"]', '["lasso"]', "'lasso' is a regularizer, not a module: move it to"),
        ('"averaging"', "{nam = 'sum'}", "unknown aggregator 'None'"),
    ],
)
def test_a_mistake_is_found_where_it_is(problems: Any, old: str, new: str, message: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new))
    assert any(message in line for line in found), found


def test_a_quickrun_file_of_the_optimizer_alone_is_told(checked: Any) -> None:
    found = checked("client_opt = 0.1")
    assert found.ok
    problems = check_config(found.path, quickrun=True).problems
    said = "\n".join(f"{problem.where} {problem.message}" for problem in problems)
    assert "[optim] this section is missing" in said
    assert "[client_opt] write it in [optim]" in said


PAIR = "[client_opt]\nlrate = 0.1\nmodules = [{}]\n[server_opt]\nlrate = 1.0\nmodules = [{}]\n"
CLIENT, SERVER = "'scaffold-client'", "'scaffold-server'"


@pytest.mark.parametrize(
    ("client", "server", "said"),
    [
        (CLIENT, "", f"[client_opt] scaffold-client needs {SERVER} in [server_opt]: add it"),
        ("", SERVER, f"[server_opt] scaffold-server needs {CLIENT} in [client_opt]: add it"),
        ("'update-clip-client'", "['update-clip-server', {noise_multiplier = -1.0}]", "["),
        ("['zscore-clip', {shared = true, z_max = -1.0}]", "'zscore-clip-server'", "["),
        ("'scafold-client'", SERVER, "["),
    ],
)
def test_half_a_pair_is_the_only_error(problems: Any, client: str, server: str, said: str) -> None:
    assert problems(PAIR.format(CLIENT, SERVER)) == []
    (found,) = problems(PAIR.format(client, server))
    assert found.startswith(said)


def test_the_data_folder_is_looked_at_where_there_is_one(problems: Any, tmp_path: Path) -> None:
    write_sites(tmp_path, {"a": 8})
    assert problems(GOOD) == ["[data] the folder has 1 clients, fewer than min_clients = 2"]
    write_sites(tmp_path, dict.fromkeys("bcd", 8))
    assert problems(GOOD) == ["[data] the folder has 4 clients, more than max_clients = 3"]
    shutil.rmtree(tmp_path / "data" / "d")
    assert problems(GOOD) == []
    (tmp_path / "data" / "b" / "train_target.npy").unlink()
    assert problems(GOOD) == ["[data] Could not find a 'train_target.*' file for client 'b'."]
    names = "{train_data = 'x', valid_data = 'y', valid_target = 'z'}"
    assert "train_target" in problems(GOOD.replace("[data]", f"[data]\ndataset_names = {names}"))[0]


OURS = GOOD.replace('"averaging"', '"clipped-averaging"\nmax_norm = 1.0').replace(
    "[optim]\naggregator", "[optim]\n[optim.aggregator]\nname"
)
QUORUM = OURS.replace("[data]", "[network.kwargs]\nmin_replies = 2\n[data]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_replies = 2", ""),
        ("patience = 60.0", ""),
        ("min_replies = 4", "a round has at most 3 clients: lower it"),
        ("min_replies = 0", "min_replies must be an int >= 1, got 0"),
        ("patience = 0", "patience must be a finite number > 0, got 0"),
        ("min_reply = 2", "unknown parameter 'min_reply' in kwargs; did you"),
        (OURS.replace("[data]", "patience = 9\n[data]"), "write it in [network.kwargs]"),
        (QUORUM.replace("websockets", "grpc"), "goes with protocol = 'fedclip-websoc"),
        (QUORUM + "[secagg]\nsecagg_type = 'masking'\n", "does not go with secure agg"),
        (QUORUM.replace('clipped-averaging"\nmax_norm = 1.0', 'sum"'), "with the aggregator 'sum'"),
        (QUORUM + "[client_sampler]\nstrategy = 'uniform'\nn_samples = 1\n", "at most 1 clients"),
    ],
)
def test_a_quorum_is_checked(problems: Any, text: str, said: str) -> None:
    text = text if "[data]" in text else QUORUM.replace("min_replies = 2", text)
    found = [message for message in problems(text) if message.startswith("[network")]
    assert bool(found) == bool(said)
    assert not said or said in found[0]


def test_a_quorum_in_a_file_for_a_script(problems: Any) -> None:
    network = "[network]\nprotocol = 'fedclip-websockets'\n[network.kwargs]\nmin_replies = 5\n"
    text = "client_opt = 0.5\naggregator = 'sum'\n[run]\nrounds = 2\nregister = 3\n"
    found = "\n".join(problems(text + network))
    assert "does not go with the aggregator 'sum'" in found
    assert "a round has at most" in found
    plain = "\n".join(problems(text + network.replace("fedclip-", "")))
    assert "min_replies needs protocol = 'fedclip-websockets'" in plain


@pytest.mark.parametrize(
    ("training", "more", "said"),
    [
        ("n_epoch = 1", "", "[run.training] b has 24"),
        ("n_epoch = 1\ndrop_remainder = false", "", ""),
        ("", "[run.evaluate]\nbatch_size = 99\ndrop_remainder = true", "[run.evaluate] a has"),
        ("", "[optim.fairness]\nalgorithm = 'fairgrad'", "[optim.fairness] fairness needs"),
    ],
)
def test_tracebacks_are_foreseen(training: str, more: str, said: str, tmp_path: Path) -> None:
    write_sites(tmp_path)
    changes = {"training": training, "batch_size": 30} if training else {"more": more}
    found = check_config(write_config(tmp_path / "config.toml", **changes)).problems
    texts = [f"{problem.where} {problem.message}" for problem in found]
    assert any(text.startswith(said) for text in texts) if said else not texts, texts
