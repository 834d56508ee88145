# SPDX-License-Identifier: Apache-2.0
"""A site's policy on Flower, attacked by an app: what has left is looked at on the wire."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flower_site import NODE, federation, leaks, norm, until
from helpers import policy
from hostile.hostile.server_app import MODEL

COUNTS = {"allow_metrics": ["num-examples"]}
REFUSED = (6, "refused by this site, whose log says why")
# All others are tried without a network, in test_flower_border.py.
ASKED = ["huge", "mod", "twice", "metadata", "error", "code", "task"]


@pytest.mark.parametrize(
    "isolation", ["subprocess", pytest.param("process", marks=pytest.mark.soak)]
)
def test_what_a_hostile_app_sends_stays_in_the_site(isolation: str, tmp_path: Path) -> None:
    with federation(tmp_path) as running:
        address = running.node(policy(tmp_path, **COUNTS), "--isolation", isolation)
        if isolation == "process":
            start = ("flower-superexec", "--insecure", "--runtime-api-address")
            running.start("apps", *start, address)
        got = dict(zip(ASKED, running.run(*ASKED), strict=True))
        assert b"num-examples" in running.sent
        assert not leaks(bytes(running.sent))
    assert norm(got["huge"]["arrays"]) == pytest.approx(0.5, rel=1e-5)
    assert got["huge"]["metrics"] == {"num-examples": 8}
    mod = got.pop("mod")
    assert mod["fedclip"] == {"votes": 0, "within": 0, "clipped": 1, "zeroed": 0}
    assert sum((a.astype(float) ** 2).sum() for a in mod["arrays"].values()) <= 0.25
    for name, reply in got.items():
        if isinstance(reply, tuple):
            assert (name != "huge", reply) == (True, REFUSED)
            continue
        assert set(reply) <= {"arrays", "metrics"}, name
        # A model on the web would have called.
        assert reply["metrics"] != {"num-examples": 666}
        assert norm(reply["arrays"]) <= 0.5 * (1 + 1e-6), name
        assert reply["arrays"]["steps"] == MODEL["steps"], name


def targets(outside: socket.socket, *files: Path) -> str:
    """Return where an app could take data, and what it could change: addresses and files."""
    hosts = subprocess.check_output(["hostname", "-I"], text=True).split()
    ports = [f"{host}:{outside.getsockname()[1]}" for host in ("127.0.0.1", *hosts)]
    return " ".join([*ports, *map(str, files)])


@pytest.mark.soak
def test_an_app_in_a_subprocess_reaches_all(tmp_path: Path) -> None:
    with federation(tmp_path) as running, socket.create_server(("0.0.0.0", 0)) as outside:
        rules = policy(tmp_path, **COUNTS)
        running.node(rules)
        (got,) = running.run("reach", targets=targets(outside, rules))
    assert got["metrics"]["num-examples"] >= 2


@pytest.mark.soak
def test_an_app_in_a_network_of_its_own_reaches_nothing(tmp_path: Path) -> None:
    if os.geteuid() or not all(map(shutil.which, ("ip", "setpriv"))):
        pytest.skip("only root can lay a cable")
    # In the place of the new user stands root without any right, who may run this interpreter
    # and may not read the policy; names and addresses are of this test alone.
    name, net = f"fc{os.getpid() % 10**6}", f"10.94.{os.getpid() % 250}"
    page = (Path(__file__).parents[3] / "docs" / "flower-site.md").read_text("utf-8")
    for old, new in {
        "--reuid flower-app --regid flower-app": "--bounding-set=-all",
        "/var/lib/flower-app": str(tmp_path / "apps"),
        "/etc/fedclip/site.toml": str(tmp_path / "site.toml"),
        "flower-app": f"{name}a",
        "flower-site": f"{name}s",
        "10.94.0": net,
    }.items():
        page = page.replace(old, new)
    lines = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE)]
    _, add_user, *network, start, apps = lines
    assert add_user[0] == "useradd"
    rules = policy(tmp_path, **COUNTS)
    rules.chmod(0)
    (tmp_path / "apps").mkdir()
    try:
        for command in network:
            subprocess.run(command, check=True)
        with federation(tmp_path) as running, socket.create_server(("0.0.0.0", 0)) as outside:
            link = ["--superlink", running.tap(), "--insecure"]
            after = start.index("--isolation")
            running.start("node", sys.executable, *NODE, start[3], *link, *start[after:])
            until(lambda: "SuperNode ID" in running.log("node"))
            running.start("apps", str(shutil.which(apps[0])), *apps[1:])
            reached = targets(outside, rules)
            kept = " ".join(one for one in reached.split() if not one.startswith(net))
            (got,) = running.run("reach", targets=f"{kept} {link[1]}")
    finally:
        subprocess.run(["ip", "netns", "delete", f"{name}a"], check=True)
    assert got["metrics"] == {"num-examples": 0}, running.log("apps")
