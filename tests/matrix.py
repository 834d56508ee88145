# SPDX-License-Identifier: Apache-2.0
"""Measure which tests fail for which faults: those of `mutations.txt`, and 300 made by a tool.

    python tests/matrix.py coverage    # runs the tests of NumPy and torch, once for a commit
    python tests/matrix.py [FAULTS]    # runs the faults that build/matrix/results.jsonl lacks
    python tests/matrix.py tests       # prints what each test kills

For each fault, the tests that run the changed lines run on a changed copy of fedclip, the fastest
first, until eleven fail or two minutes are over. `--first` stops at the first that fails. You can
interrupt and repeat each command. It fails if a fault of `mutations.txt` survives, or more than a
tenth of the others. FAULTS are the beginnings of names.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "project"))

import test_mutations as listed  # noqa: E402

FOLDER = ROOT / "build" / "matrix"
RESULTS = FOLDER / "results.jsonl"
ROOMS = ("core", "updates", "statistics", "privacy", "dpsgd", "site")
MADE = 300
SECONDS = 120
# In how many files most of what runs a line stands.
FEW = 3
TYPES = (ast.arg, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)


class Mutant(NamedTuple):
    """A name, the changed text of each file, and the lines that changed in the original."""

    name: str
    files: dict[str, str]
    lines: dict[str, set[int]]

    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.files]).encode()).hexdigest()[:16]


def mutants_of_list() -> Iterator[Mutant]:
    """Yield the faults of `mutations.txt`."""
    for fault in listed.FAULTS:
        lines: dict[str, set[int]] = {}
        changed: list[tuple[ast.AST, str, Any]] = []
        files: dict[str, str] = {}
        for change in fault.changes:
            ((file, node, field, i),) = listed.find(change)
            old, new = change.parse()
            value = getattr(node, field)
            is_list = isinstance(value, list)
            for part in value[i : i + len(old)] if is_list else [value]:
                start, end = position(part, node)
                lines.setdefault(file, set()).update(range(start, end + 1))
            changed.append((node, field, value))
            setattr(node, field, value[:i] + new + value[i + len(old) :] if is_list else new[0])
            files[file] = ast.unparse(listed.TREES[file])
        for node, field, value in reversed(changed):
            setattr(node, field, value)
        yield Mutant(f"{fault.room}: {fault.name}", files, lines)


def position(part: Any, node: Any) -> tuple[int, int]:
    """Return the lines of a node, or of the node around it if it has none (an operator)."""
    found = part if hasattr(part, "lineno") else node
    return found.lineno, found.end_lineno


def mutants_of_tool() -> Iterator[Mutant]:
    """Yield faults that cosmic-ray makes, at places drawn by a hash of their lines."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import get_ast_from_path
    from cosmic_ray.mutating import mutate_code

    found = {name: plugins.get_operator(name) for name in plugins.operator_names()}
    # Those with arguments need a configuration.
    operators = {name: operator() for name, operator in found.items() if not operator.arguments()}
    places: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
    for path in sorted(p for room in ROOMS for p in (ROOT / "fedclip" / room).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        tree = get_ast_from_path(path)
        types = set(lines_of_types(listed.TREES[file]))
        for name, operator in operators.items():
            occurrence = 0
            for node in walk(tree):
                for (line, column), _ in operator.mutation_positions(node):
                    if (line, column) not in types:
                        places[file, line, column].append((name, occurrence))
                    occurrence += 1
    files = {file for file, _, _ in places}
    lines = {file: (ROOT / file).read_text("utf-8").splitlines() for file in files}

    def drawn(place: tuple[str, int, int]) -> str:
        file, line, column = place
        return hashlib.sha256(f"{file}:{lines[file][line - 1]}:{column}".encode()).hexdigest()

    # What other lines say changes nothing in whether a place is drawn.
    for file, line, column in sorted(places, key=drawn)[:MADE]:
        of_place = sorted(places[file, line, column])
        name, occurrence = of_place[int(drawn((file, line, column)), 16) % len(of_place)]
        text = mutate_code((ROOT / file).read_text("utf-8"), operators[name], occurrence)
        short = name.removeprefix("core/")
        yield Mutant(f"tool: {file}:{line}:{column} {short}", {file: text}, {file: {line}})


def walk(node: Any) -> Iterator[Any]:
    """Yield nodes in the order in which cosmic-ray visits them."""
    yield node
    for child in getattr(node, "children", ()):
        yield from walk(child)


def lines_of_types(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield each place inside an annotation, which no run reads."""
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(node, TYPES) and annotation is not None:
                for line in range(annotation.lineno, annotation.end_lineno + 1):
                    first = annotation.col_offset if line == annotation.lineno else 0
                    last = annotation.end_col_offset if line == annotation.end_lineno else 120
                    yield from ((line, column) for column in range(first, last))


def measure_coverage() -> None:
    """Run the test suite, and store which test runs which line, and how long it takes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "coveragerc").open("w") as rc:
        rc.write(f"[run]\nsource = fedclip\ndata_file = {FOLDER}/coverage\n")
    command = [
        *[sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"],
        *["--cov", f"--cov-config={FOLDER}/coveragerc", "--cov-context=test"],
        # Tracing the other frameworks takes an hour.
        *["--cov-report=term", "--durations=0", "--backends=numpy,torch"],
    ]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    times: dict[str, float] = defaultdict(float)
    for seconds, test in re.findall(r"^([\d.]+)s \w+ +(\S.*)$", run.stdout, re.MULTILINE):
        times[test] += float(seconds)
    (FOLDER / "times.json").write_text(json.dumps(times))
    print(re.search(r"^TOTAL.*", run.stdout, re.MULTILINE), run.stdout.splitlines()[-1])


@cache
def read_coverage() -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """Return the tests of each line of each file, and the seconds of each test."""
    from coverage import CoverageData

    data = CoverageData(str(FOLDER / "coverage"))
    data.read()
    tests = {}
    for path in data.measured_files():
        file = "fedclip/" + path.rpartition("/fedclip/")[2]
        tests[file] = {
            line: [c.rpartition("|")[0] for c in contexts if c.startswith("tests/")]
            for line, contexts in data.contexts_by_lineno(path).items()
        }
    return tests, json.loads((FOLDER / "times.json").read_text())


def tests_of(mutant: Mutant) -> list[str]:
    """Return the tests that run a changed line, or else its file; the fastest first."""
    coverage, times = read_coverage()
    found: set[str] = set()
    for file, lines in mutant.lines.items():
        by_line = coverage.get(file, {})
        near = {test for line in lines for test in by_line.get(line, ())}
        found |= near or {test for tests in by_line.values() for test in tests}
    return sorted(found, key=lambda test: (times.get(test, 0.0), test))


class Runner:
    """A process that runs tests of changed copies of fedclip (`support/mutated.py`)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "mutated.py")],
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def first(self, mutant: Mutant) -> dict[str, Any]:
        """Return what `run` does of one failure: first of tests in few files, then of all."""
        tests = tests_of(mutant)
        files = Counter(test.partition("::")[0] for test in tests)
        few = {file for file, _ in files.most_common(FEW)}
        near = [test for test in tests if test.partition("::")[0] in few]
        found = self.run(mutant, near, 1)
        if len(near) < len(tests) and not found["killers"]:
            found = self.run(mutant, [test for test in tests if test not in {*near}], 1)
        return found | {"covering": len(tests)}

    def run(self, mutant: Mutant, tests: list[str], most: int) -> dict[str, Any]:
        """Return which tests were run and failed, and whether all were run."""
        assert self.process.stdin
        assert self.process.stdout
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(ROOT / "fedclip", Path(copy) / "fedclip")
            (Path(copy) / "benchmarks").symlink_to(ROOT / "benchmarks")
            for file, text in mutant.files.items():
                (Path(copy) / file).write_text(text, encoding="utf-8")
            more = [n for n in ("tensorflow", "jax") if any(n in file for file in mutant.files)]
            backends = ",".join(["numpy", "torch", *more])
            message = [copy, tests, most, SECONDS, backends]
            print(json.dumps(message), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        status, output, outcomes = json.loads(line)
        failed = [test for test, passed in outcomes if not passed]
        # The copy cannot be imported, or the process was killed in an endless loop.
        broken = bool(tests) and not failed and status not in (0, 5)
        return {
            "covering": len(tests),
            "run": len(outcomes),
            "killers": failed or (["broken: " + output[-300:]] if broken else []),
        }


def run_faults(names: list[str], first: bool) -> int:
    """Run the faults without a result, and print what survives."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    mutants = [
        mutant
        for mutant in [*mutants_of_list(), *mutants_of_tool()]
        if not names or mutant.name.startswith(tuple(names))
    ]
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = {(result := json.loads(line))["key"]: result for line in lines}
    todo = [mutant for mutant in mutants if mutant.key() not in results]
    runners, lock = threading.local(), threading.Lock()

    def run(mutant: Mutant) -> None:
        if not hasattr(runners, "runner"):
            runners.runner = Runner()
        runner: Runner = runners.runner
        result = runner.first(mutant) if first else runner.run(mutant, tests_of(mutant), 11)
        result |= {"key": mutant.key(), "name": mutant.name}
        with lock, RESULTS.open("a") as file:
            results[result["key"]] = result
            print(json.dumps(result), file=file, flush=True)
            print(
                f"{len(result['killers']):3d} of {result['covering']:4d}  {mutant.name}", flush=True
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, todo))
    chosen = [results[mutant.key()] for mutant in mutants]
    survivors = [result["name"] for result in chosen if not result["killers"]]
    made = [result for result in chosen if result["name"].startswith("tool: ")]
    lost = [name for name in survivors if name.startswith("tool: ")]
    print(*["survives: " + name for name in survivors], sep="\n")
    others = len(chosen) - len(made)
    print(f"{len(made) - len(lost)} of {len(made)} faults of the tool are killed,")
    print(f"{others - len(survivors) + len(lost)} of {others} of mutations.txt")
    return int(len(survivors) > len(lost) or 10 * len(lost) > len(made))


def print_tests() -> None:
    """Print for each test function how many faults it kills, and how many nothing else kills."""
    kills: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for line in RESULTS.read_text().splitlines():
        killers = {test.partition("[")[0] for test in json.loads(line)["killers"]}
        kills.update(killers)
        if len(killers) == 1:
            alone.update(killers)
    coverage, times = read_coverage()
    functions: dict[str, float] = defaultdict(float)
    for test in {test for by in coverage.values() for tests in by.values() for test in tests}:
        functions[test.partition("[")[0]] += times.get(test, 0.0)
    for function, seconds in sorted(functions.items()):
        print(f"{alone[function]:4d} {kills[function]:4d} {seconds:7.2f} s  {function}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help="coverage, tests, or the beginnings of names")
    parser.add_argument("--first", action="store_true", help="stop at the first test that fails")
    arguments = parser.parse_args()
    if arguments.what == ["coverage"]:
        measure_coverage()
    elif arguments.what == ["tests"]:
        print_tests()
    else:
        return run_faults(arguments.what, arguments.first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
