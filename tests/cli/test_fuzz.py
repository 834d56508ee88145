# SPDX-License-Identifier: Apache-2.0
"""Any file of bytes gives findings or a sentence; a failure prints the seed that gives it again."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from declearn.main.utils import Checkpointer
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import Optimizer
from report_runs import call
from typer.testing import Result

ODD = [
    *(None, True, -1, 0, 2**63, -(2**40), 0.5, -1.0, float("nan"), float("inf"), 1e308, 5e-324),
    *("", "x", "[/x]", "\x1b[31m", "all", b"bytes", [], {}, [[]], [1, "a"], {"a": 1}, [None] * 9),
]


def twisted(value: Any, dice: random.Random) -> Any:
    """Return a state in which something, anywhere, is something else."""
    if dice.random() < 0.15:
        return dice.choice(ODD)
    if isinstance(value, dict) and value:
        key = dice.choice(list(value))
        new = {k: twisted(v, dice) if k == key else v for k, v in value.items()}
        if dice.random() < 0.1:
            del new[key]
        return new
    if isinstance(value, list) and value:
        i = dice.randrange(len(value))
        return [*value[:i], twisted(value[i], dice), *value[i + 1 :]]
    return dice.choice(ODD)


pytestmark = pytest.mark.slow

SEEDS = [
    range(100),
    *(pytest.param(range(i, i + 500), marks=pytest.mark.soak) for i in range(100, 10_100, 500)),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = [file.read_text() for file in sorted(EXAMPLES.glob("*/*.toml"))]

VALUES = [
    *("nan", "inf", "-inf", "-1", "0", "1e308", "-0.0", "true", "1979-05-27", "07:32:00"),
    *('""', '"x"', '"[/x]"', r'"\u001b[31m"', r'"\u0000"', '"../../.."', '"/"', '"%s {0} $x"'),
    *("[]", "{}", "[[]]", "[1, 'a', nan]", "{a = 1}", "[['norm-clip', {}]]", "{name = []}"),
    *("9" * 400, "9" * 5_000, "'" + "y" * 5_000 + "'", "[" * 300 + "]" * 300, "2e-324", "0x10"),
]


def mutated(text: str, dice: random.Random) -> bytes:
    """Return a configuration with a few mistakes, of values, of lines, or of bytes."""
    lines = text.strip().splitlines()
    for _ in range(dice.choice([1, 1, 2, 5])):
        i = dice.randrange(len(lines))
        match dice.randrange(8):
            case 0 | 1 | 2:
                key, equals, _ = lines[i].partition("=")
                lines[i] = f"{key}={dice.choice(VALUES)}" if equals else lines[i]
            case 3:
                words = list(re.finditer(r"[\w.-]+", lines[i]))
                if words:
                    word = dice.choice(words)
                    new = dice.choice([*VALUES, "optim", "modules", "client_opt", "max_norm"])
                    lines[i] = lines[i][: word.start()] + new + lines[i][word.end() :]
            case 4:
                del lines[i]
                lines = lines or ["x = 1"]
            case 5:
                j = dice.randrange(len(lines))
                lines[i], lines[j] = lines[j], lines[i]
            case 6:
                lines.insert(i, dice.choice(lines))
            case _:
                section = dice.choice(["network", "optim", "run", "data", "model", "experiment"])
                lines.insert(0, f"{section} = {dice.choice(VALUES)}")
    data = "\n".join(lines).encode()
    return damaged(data, dice) if dice.random() < 0.2 else data


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return bytes with some flipped, cut off, inserted or repeated."""
    for _ in range(dice.choice([1, 1, 1, 3])):
        i, j = sorted(dice.choices(range(len(data) + 1), k=2))
        match dice.randrange(5):
            case 0 | 1:
                data = data[:i] + bytes([dice.randrange(256)]) + data[i + 1 :]
            case 2:
                data = data[:i]
            case 3:
                data = data[:i] + dice.randbytes(dice.randrange(9)) + data[i:]
            case _:
                data = data[:j] + data[i:j] + data[j:]
    return data


def answered(result: Result) -> bool:
    """Whether a command ended as it should: with an answer, or a sentence."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code in (0, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", SEEDS)
def test_check_of_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in seeds:
        dice = random.Random(seed)
        data = mutated(dice.choice(CONFIGS), dice)
        (tmp_path / "config.toml").write_bytes(data)
        try:
            result = call("check", "config.toml", *["--json"] * (seed % 2))
            assert answered(result)
            assert "\x1b" not in result.output
        except Exception as exc:
            raise AssertionError(f"seed {seed}: {data!r:.3000}") from exc


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Checkpoints of several clippers and of declearn's own modules."""
    folder = tmp_path_factory.mktemp("states")
    found = []
    for i, modules in enumerate(
        [
            ["norm-clip", ["zscore-clip", {"scope": "tensor"}], "momentum"],
            ["no-op", "percentile-norm-clip", "adam", "no-op"],
        ]
    ):
        optimizer = Optimizer(1.0, modules=modules)
        for norm in (0.5, 3.0):
            optimizer.start_round()
            gradient: Any = NumpyVector({"a": np.array([norm]), "b.w": np.ones((2, 2))})
            for module in optimizer.modules:
                gradient = module.run(gradient)
        Checkpointer(str(folder / str(i))).save_optimizer(optimizer, timestamp="1")
        found.append((folder / str(i) / "optimizer_state_1.mpk").read_bytes())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", SEEDS)
def test_report_of_any_checkpoint(tmp_path: Path, states: list[bytes], seeds: range) -> None:
    for node in ("healthy", "damaged"):
        (tmp_path / node).mkdir()
    (tmp_path / "healthy" / "optimizer_state_1.mpk").write_bytes(states[0])
    file = tmp_path / "damaged" / "optimizer_state_1.mpk"
    for seed in seeds:
        dice = random.Random(seed)
        data = dice.choice(states)
        if dice.random() < 0.5:
            data = damaged(data, dice)
        else:
            data = msgpack.packb(twisted(msgpack.unpackb(data), dice))
        file.write_bytes(data)
        try:
            result = call("report", tmp_path, *["--rounds"] * (seed % 2))
            assert answered(result)
            assert result.exit_code == 0
            assert "healthy" in result.stdout
            assert "\x1b" not in result.output
            assert answered(call("report", tmp_path, "--csv", "-"))
            assert answered(call("report", tmp_path / "damaged"))
        except Exception as exc:
            raise AssertionError(f"seed {seed}: {data!r:.3000}") from exc
