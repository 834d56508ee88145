# SPDX-License-Identifier: Apache-2.0
"""Any file of bytes gives findings or a sentence; a failure prints the seed that gives it again."""

import random
from pathlib import Path

import pytest
from checkouts import ROOT
from report_runs import Node, call
from typer.testing import Result

MANY = pytest.param(range(100, 10_100), marks=pytest.mark.soak)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("seeds", [range(100), MANY], ids=["some", "many"]),
]

CONFIGS = [file.read_text() for file in sorted(ROOT.glob("examples/*/*.toml"))]
VALUES = [
    *("nan", "inf", "-1", "0", "1e308", "-0.0", "true", "1979-05-27", "07:32:00", "2e-324", "0x10"),
    *('""', '"x"', '"[/x]"', r'"\u001b[31m"', r'"\u0000"', '"../../.."', '"/"', '"%s {0} $x"'),
    *("[]", "{}", "[[]]", "[1, 'a', nan]", "{a = 1}", "[['norm-clip', {}]]", "{name = []}"),
    *("9" * 5_000, "'" + "y" * 5_000 + "'", "[" * 300 + "]" * 300, "optim", "modules", "max_norm"),
]


def mutated(text: str, dice: random.Random) -> bytes:
    """Return a configuration with a few mistakes, of values, of lines, or of bytes."""
    lines = text.strip().splitlines()
    for _ in range(dice.choice([1, 1, 2, 5])):
        i, j = dice.choices(range(len(lines)), k=2)
        match dice.randrange(4):
            case 0:
                lines[i], lines[j] = lines[j], lines[i]
            case 1:
                lines[i] = dice.choice(["[network]", "optim = 1", lines[j], ""])
            case _:
                key, equals, _ = lines[i].partition("=")
                lines[i] = f"{key}={dice.choice(VALUES)}" if equals else lines[i]
    data = "\n".join(lines).encode()
    return damaged(data, dice) if dice.random() < 0.2 else data


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return bytes with some changed, cut off, inserted or repeated."""
    for _ in range(dice.choice([1, 1, 1, 3])):
        i, j = sorted(dice.choices(range(len(data) + 1), k=2))
        some = dice.randbytes(dice.randrange(9))
        changes = [data[:i] + some[:1] + data[i + 1 :], data[:i], data[:i] + some + data[i:]]
        data = dice.choice([*changes, data[:j] + data[i:j] + data[j:]])
    return data


def answered(result: Result) -> bool:
    """Whether a command ended as it should: with an answer, or a sentence."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code in (0, 1) and "\x1b" not in result.output


def test_check_of_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in seeds:
        dice = random.Random(seed)
        data = mutated(dice.choice(CONFIGS), dice)
        (tmp_path / "config.toml").write_bytes(data)
        try:
            assert answered(call("check", "config.toml", *["--json"] * (seed % 2)))
        except Exception as exc:
            raise AssertionError(f"seed {seed}: {data!r:.3000}") from exc


def test_report_of_any_checkpoint(tmp_path: Path, seeds: range) -> None:
    modules = ["norm-clip", ["zscore-clip", {"scope": "tensor"}], "percentile-norm-clip", "adam"]
    for folder in ("healthy", "damaged"):
        Node(tmp_path / folder, modules).round([0.5, 3.0])
    (file,) = (tmp_path / "damaged").glob("optimizer_state_*")
    state = file.read_bytes()
    for seed in seeds:
        data = damaged(state, random.Random(seed))
        file.write_bytes(data)
        try:
            result = call("report", tmp_path, *["--rounds"] * (seed % 2))
            assert answered(result)
            assert (result.exit_code, "healthy" in result.stdout) == (0, True)
            assert answered(call("report", tmp_path, "--csv", "-"))
            assert answered(call("report", tmp_path / "damaged"))
        except Exception as exc:
            raise AssertionError(f"seed {seed}: {data!r:.3000}") from exc
