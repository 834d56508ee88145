"""Everything that README and docs show is run, and what they promise is there."""

import doctest
import importlib.util
import json
import re
import runpy
import shutil
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkouts import ROOT
from declearn.main.config import FLOptimConfig
from declearn.optimizer import Optimizer
from helpers import BACKENDS, FRAMEWORK_OF, FRAMEWORKS
from report_runs import call

import fedclip
import fedclip.cli.catalogue
import fedclip.cli.main
from fedclip.cli.check.configuration import check_config
from fedclip.engines.local.crowd import SimulateConfig

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RUN = ("list", "check", "translate", "report", "doctor", "privacy", "site", "--version", "--help")
"""Commands that are over within two seconds; of others, only that they exist is checked."""

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block of a page, and the words of the comment right before it."""

    line: int
    language: str
    text: str
    needs: tuple[str, ...]
    file: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks; ``<!-- needs: a, b -->`` and ``<!-- file: x -->`` precede them."""
    text = page.read_text(encoding="utf-8")
    pattern = r"(?:<!-- (needs|file): ([^>]*) -->\n+)?^```(\w*)\n(.*?)^```$"
    for found in re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL):
        key, value, language, body = found.groups()
        words = tuple(word.strip() for word in (value or "").split(",") if word.strip())
        line = text[: found.start(4)].count("\n")
        file = words[0] if key == "file" else ""
        yield Block(line, language, body, words if key == "needs" else (), file)


def is_there(module: str) -> bool:
    framework = FRAMEWORK_OF.get(module, module)
    left_out = framework in FRAMEWORKS and framework not in BACKENDS
    return not left_out and importlib.util.find_spec(module) is not None


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A rich table as wide as the page shows it.
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copy(ROOT / "examples" / "quickrun" / "config.toml", tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page):
        where = f"{page_id(page)}, line {block.line}"
        named = block.language != "toml" or re.match(r"# [\w-]+\.toml\b", block.text)
        assert named, f"{where}: its first line does not say which file it is for"
        if not all(map(is_there, block.needs)):
            continue
        with warnings.catch_warnings():
            # Some blocks show what others do, warnings included.
            warnings.simplefilter("ignore")
            match block.language:
                case "pycon":
                    run_doctest(block, names, where)
                case "python":
                    exec(compile(block.text, where, "exec"), names)
                case "toml":
                    check_toml(block, tmp_path, where)
                case "console":
                    run_console(block, where)
                case "text" | "csv":
                    pass
                case other:
                    pytest.fail(f"{where}: a block of the language {other!r}")


def test_the_start_page_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, *_ = blocks(ROOT / "docs" / "index.md")
    exec(compile(code.text, "docs/index.md", "exec"), {})
    assert capsys.readouterr().out == shown.text


def run_doctest(block: Block, names: dict[str, Any], where: str) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS)
    test = parser.get_doctest(block.text, {}, where, where, block.line)
    test.globs = names
    said: list[str] = []
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)


def check_toml(block: Block, folder: Path, where: str) -> None:
    config = tomllib.loads(block.text, parse_float=lambda s: None if s == "nan" else float(s))
    if block.file:
        (folder / block.file).write_text(block.text, encoding="utf-8")
        return
    if "modules" in config or "regularizers" in config:
        Optimizer(**{"lrate": 0.1, **config})
    elif set(config) == {"optim"}:
        FLOptimConfig.from_params(**{"client_opt": 0.1, **config["optim"]})
    elif set(config) == {"simulate"}:
        SimulateConfig.from_params(**config["simulate"])
    else:
        (folder / "block.toml").write_text(block.text, encoding="utf-8")
        found = check_config(folder / "block.toml")
        assert found.ok, (where, found.problems)


def run_console(block: Block, where: str) -> None:
    """Run the lines that start with ``$ fedclip``, and compare what they print."""
    commands = re.findall(r"^\$ fedclip (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    for command, shown in commands:
        words = [word.strip("'\"") for word in command.split(" #")[0].split()]
        known = words[0] in fedclip.cli.main.COMMANDS or words[0].startswith("-")
        assert known, f"{where}: no command {words[0]!r}"
        # These read the result of a run.
        reads = words[0] == "report" or words[:3] == ["privacy", "spent", "result"]
        if words[0] not in RUN or (reads and not Path(words[-1]).exists()):
            continue
        result = call(*words)
        same = doctest.OutputChecker().check_output(shown, result.output, FLAGS)
        right = same if shown.strip() else result.exit_code == 0
        assert right, f"{where}: {command} printed\n{result.output}"


def test_links_lead_somewhere() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page, text in texts.items():
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            other = (page.parent / file).resolve() if file else page
            assert other.exists(), f"{page_id(page)}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", texts[other], flags=re.MULTILINE)
                slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
                assert anchor in slugs, f"{page_id(page)}: {target}"


def pages_tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("clippers")


@pytest.mark.slow
def test_each_picture_is_drawn_from_the_numbers_of_today() -> None:
    pages_tool()
    pictures: Any = sys.modules["pictures"]
    for name in pictures.PICTURES:
        assert (pictures.IMAGES / f"{name}.svg").exists(), "run: python docs/pictures.py"
        found, current = pictures.drawn(name), pictures.numbers(name)
        assert found.keys() == current.keys(), f"{name}: run: python docs/pictures.py"
        for key, values in current.items():
            message = f"{name}, {key}: run: python docs/pictures.py"
            np.testing.assert_allclose(found[key], values, 1e-4, 1e-9, err_msg=message)


def test_lists_and_pages_of_clippers_are_current() -> None:
    tool = pages_tool()
    for file, row in tool.LISTS.items():
        page = file.read_text(encoding="utf-8")
        assert page == tool.listed(page, row), "run: python docs/clippers.py"
    current = json.loads(json.dumps(sys.modules["catalogue"].registered(), default=str))
    assert fedclip.cli.catalogue.catalogue() == current, "run: python docs/clippers.py"
    for kind, name in ((entry["kind"], entry["name"]) for entry in current):
        page = (ROOT / "docs" / "clippers" / f"{name}.md").read_text(encoding="utf-8")
        assert page == tool.updated(page, kind, name), "run: python docs/clippers.py"
        assert "To be written." not in page, "write the section 'When to use it'"


PROMISES = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
CODE = "\n".join(file.read_text("utf-8") for file in (ROOT / "fedclip").rglob("*.py"))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PROMISES.splitlines()
    if line.startswith("| **")
]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0].split("**")[1])
def test_each_promise_has_an_object_a_source_and_tests(cells: list[str]) -> None:
    _, objects, source, tests, uncovered = cells
    assert source
    assert uncovered
    names = re.findall(r"`(\w+)`", objects)
    assert names
    for name in names:
        assert re.search(rf"^(class|def) {name}\b", CODE, re.MULTILINE), name
    assert "`test_" in tests
    assert len(ROWS) >= 20


@pytest.mark.parametrize("page", ["promises", "migrate/dp-libraries"])
def test_the_tests_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert len(named) >= 12
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), name


def test_public_names_are_those_of_the_file() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "public_names.py"))
    listed = names["FILE"].read_text(encoding="utf-8").splitlines()
    now = list(names["lines"]())
    lost = sorted({*listed} - {*now})
    assert not lost, f"0.1 promises these; `make docs` lists what is new: {lost}"
    assert listed == now, "run `make docs`"


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        if name != "index.md":
            assert f"({name})" in index, f"docs/index.md does not lead to {name}"
