"""Accuracy against epsilon, beside declearn's own DP-SGD: python compare.py [EPSILON ...].

Each training is a federation of its own: a server and three clients, in a process each. Writes
accuracy.png. declearn's own takes a minute or two for each epsilon, most of it for accounting.
"""

import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = Path("config.toml").read_text()
# Smaller steps for declearn's own, whose noise is as many times larger as a batch has records.
OWN = {"lrate = 4.0": "lrate = 0.05", "sclip_norm = 0.5": "sclip_norm = 0.1"}


def train(epsilon: float | None, declearn: bool = False) -> float:
    """Return the accuracy of one federation; without privacy, if epsilon is None."""
    text, private = CONFIG, epsilon is not None and not declearn
    if not private:
        text = re.sub(r"modules = .*", "", text)
    if declearn:
        for old, new in OWN.items():
            text = text.replace(old, new)
    if epsilon is None:
        text = re.sub(r"\[run.privacy\](\n.+)*", "", text).replace("lrate = 4.0", "lrate = 0.5")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    text = text.replace("port = 8765", f"port = {address[1]}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.toml")
        config.write_text(re.sub(r"budget = .*", f"budget = [{epsilon}, 1e-5]", text))
        server = start("server.py", config)
        # A client that comes too early would try again in a minute.
        while server.poll() is None and not listens(address):
            time.sleep(0.2)
        # Each training stands for a client with other records, so that it has its own ledgers.
        clients = [
            start(
                *("client.py", config, f"client_{i}"),
                *(["--ledger", Path(folder, f"{i}.json")] if private else ["--declearn"]),
            )
            for i in range(3)
        ]
        said = server.communicate()[0]
        for client in clients:
            client.communicate()
    return float(said.split()[-1])


def listens(address: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(address) == 0


def start(*command: str | Path) -> subprocess.Popen[str]:
    quiet = subprocess.DEVNULL
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=quiet, text=True)


def plot(epsilons: list[float], curves: dict[str, list[float]], without: float) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.axhline(without, color="grey", linestyle="--", label="without privacy")
    for name, values in curves.items():
        axes.plot(epsilons, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel("epsilon of each record, at delta = 1e-5")
    axes.set_ylabel("accuracy on records that no client has")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig("accuracy.png", dpi=150)


def main() -> None:
    epsilons = [float(word) for word in sys.argv[1:]] or [0.5, 1.0, 2.0, 4.0, 8.0]
    curves: dict[str, list[float]] = {"PrivateFederatedClient": [], "declearn's own": []}
    without = train(None)
    print(f"without privacy: {without:.3f}", flush=True)
    for epsilon in epsilons:
        for declearn, values in enumerate(curves.values()):
            values.append(train(epsilon, bool(declearn)))
        print(f"epsilon {epsilon:g}:", *(f"{n} {v[-1]:.3f}" for n, v in curves.items()), flush=True)
    plot(epsilons, curves, without)


if __name__ == "__main__":
    main()
