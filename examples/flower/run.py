"""Start the app on this machine, on addresses of 127.0.0.1 only, and stop everything at the end.

    python run.py                    # Flower's simulation engine (Ray), 10 clients
    python run.py --clients 100      # the same with 100
    python run.py --supernodes 2     # a SuperLink and two SuperNodes, each a process of its own
    python run.py --set update-clip.noise-multiplier=1.0 --set update-clip.expected-clients=10

What the server keeps goes to --folder: see `fedclip report` and `fedclip privacy spent`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

APP = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def started(
    command: list[str], env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and end it with all that it has started."""
    with log.open("wb") as out:
        program = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield program
        finally:
            os.killpg(program.pid, signal.SIGTERM)
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()


def wait_for(url: str, program: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while program.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise RuntimeError(f"nothing answers at {url}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--supernodes", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("fedclip-flower"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds")
    args = parser.parse_args()
    # What was started is stopped, too, if this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    nodes = args.supernodes or args.clients
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    given = {
        "folder": f'"{folder}"',
        "nodes": nodes,
        "num-server-rounds": args.rounds,
        **dict(pair.split("=", 1) for pair in args.set),
    }
    settings = " ".join(f"{name}={value}" for name, value in given.items())
    link = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port"]
    link += [address.split(":")[1], "--disable-runtime-dependency-installation"]
    run = [str(BIN / "flwr"), "run", str(APP), "--stream", "--run-config", settings]
    if not args.supernodes:
        link.append("--simulation")
        run += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
    with ExitStack() as stack:
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="flwr-", ignore_cleanup_errors=True)
        )
        Path(home, "config.toml").write_text(
            '[superlink]\ndefault = "here"\n'
            f'[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        env = {
            **os.environ,
            "FLWR_HOME": home,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        superlink = stack.enter_context(started(link, env, folder / "superlink.log"))
        wait_for(f"http://{address}/health", superlink)
        for i in range(args.supernodes):
            node = ["flower-supernode", "--insecure", "--superlink", address]
            node += ["--port", str(free_port())]
            node += ["--node-config", f"partition-id={i} num-partitions={nodes}"]
            stack.enter_context(started(node, env, folder / f"supernode-{i}.log"))
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=args.limit)
    told = done.stdout + done.stderr
    print(told)
    return 0 if done.returncode == 0 and "execution finished" in told else 1


if __name__ == "__main__":
    sys.exit(main())
