# SPDX-License-Identifier: Apache-2.0
"""A server and a site of NVFlare, in processes of their own, and jobs at once: run as a script.

    python nvflare_poc.py FOLDER JOB...

The folder has the site's `site.toml`; what arrives at the server's processes is written
to `arrived/`, and how the jobs ended to `status.txt`.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nvflare.lighter
import yaml
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.tool.poc import poc_commands as poc

SITE = "site-1"
ADMIN = "admin@nvidia.com"

# On the server: each frame that arrives, and each result of a task as the workflow gets it.
LISTENING = """
import os, uuid
from nvflare.fuel.f3.sfm import conn_manager, sfm_conn
from nvflare.fuel.utils import fobs
from nvflare.private.fed.server import server_runner

folder = os.environ["ARRIVED"]

def keep(ending, data):
    with open(os.path.join(folder, f"{uuid.uuid4()}.{ending}"), "wb") as file:
        file.write(data)

frames = conn_manager.SfmFrameReceiver.process_frame
def frame(self, data):
    keep("frame", bytes(data))
    return frames(self, data)
conn_manager.SfmFrameReceiver.process_frame = frame

submitted = server_runner.ServerRunner.process_submission
def submission(self, client, task_name, task_id, result, fl_ctx):
    keep("result", fobs.dumps(result))
    return submitted(self, client, task_name, task_id, result, fl_ctx)
server_runner.ServerRunner.process_submission = submission
"""


def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def provisioned(folder: Path) -> Path:
    """Return the folder with a folder for each: server, site and admin."""
    dummy = Path(nvflare.lighter.__file__).with_name("dummy_project.yml")
    project = yaml.safe_load(dummy.read_text())
    server = {"name": "server", "type": "server", "fed_learn_port": port(), "admin_port": port()}
    admin = {"name": ADMIN, "type": "admin", "role": "project_admin"}
    people = [server, {"name": SITE, "type": "client"}, admin]
    project["participants"] = [{**one, "org": "nvidia"} for one in people]
    wanted = folder / "wanted.yml"
    wanted.write_text(yaml.safe_dump(project))
    poc.prepare_poc_provision([], 1, str(folder / "poc"), "", project_conf_path=str(wanted))
    prod = Path(poc.get_prod_dir(str(folder / "poc"), project["name"]))
    startup = prod / "server" / "startup" / "fed_server.json"
    startup.write_text(startup.read_text().replace('"server:', '"127.0.0.1:'))
    return prod


def protect(site: Path, policy: Path) -> None:
    """Write the page's privacy.json; with a file `short-lists`, allow only the page's classes."""
    resources = json.loads((site / "local" / "resources.json.default").read_text())
    resources["allow_log_streaming"] = False
    page = (Path(__file__).parents[2] / "docs" / "nvflare-site.md").read_text(encoding="utf-8")
    if (policy.parent / "short-lists").exists():
        found = re.findall(r'^"class_allow_list": (\[.*?^\])$', page, re.MULTILINE | re.DOTALL)
        resources["class_allow_list"], of_server = map(json.loads, found)
        file = site.parent / "server" / "local" / "resources.json"
        own = json.loads(file.with_suffix(".json.default").read_text())
        file.write_text(json.dumps({**own, "class_allow_list": of_server}))
    (site / "local" / "resources.json").write_text(json.dumps(resources))
    (block,) = re.findall(r"^```text\n(\{.*?^\})$", page, re.MULTILINE | re.DOTALL)
    shown = block.replace("/etc/fedclip/site.toml", str(policy))
    (site / "local" / "privacy.json").write_text(shown)


def started(prod: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    arrived = folder / "arrived"
    arrived.mkdir()
    (folder / "listening").mkdir()
    (folder / "listening" / "sitecustomize.py").write_text(LISTENING)
    path = os.pathsep.join([str(folder / "listening"), *filter(None, sys.path)])
    running = []
    for name, kind, more in (("server", "server", {"PYTHONPATH": path}), (SITE, "client", {})):
        env = os.environ | {"ARRIVED": str(arrived)} | more
        module = f"nvflare.private.fed.app.{kind}.{kind}_train"
        command = [sys.executable, "-m", module, "-m", str(prod / name), "-s", f"fed_{kind}.json"]
        command += ["--set", "secure_train=true", "org=nvidia", "config_folder=config"]
        command += [f"uid={name}"] if kind == "client" else []
        with (folder / f"{name}.txt").open("wb") as log:
            process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        running.append(process)
    return running


def run(prod: Path, jobs: list[str]) -> list[str]:
    """Return how jobs have ended that run at the same time."""
    until = time.monotonic() + 240
    where: dict[str, Any] = {"username": ADMIN, "startup_kit_location": str(prod / ADMIN)}
    session = new_secure_session(**where, timeout=60)
    try:
        numbers = [session.submit_job(job) for job in jobs]
        while True:
            status = [session.get_job_status(number) for number in numbers]
            if all(one.startswith("FINISHED") for one in status) or time.monotonic() > until:
                return status
            time.sleep(1)
    finally:
        session.close()


def main(folder: Path, *jobs: str) -> None:
    prod = provisioned(folder)
    protect(prod / SITE, folder / "site.toml")
    running = started(prod, folder)
    try:
        (folder / "status.txt").write_text("\n".join(run(prod, list(jobs))))
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
