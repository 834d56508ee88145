# SPDX-License-Identifier: Apache-2.0
"""The command line: ``fedclip list | translate | check | quickrun | run | report | doctor | demo``.

Exit codes: 0 all is well, 1 there is a problem (one sentence on standard error says which),
2 the command was called wrongly. ``fedclip run`` returns the exit code of the script.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import platform
import runpy
import socket
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from declearn.aggregator import Aggregator
from declearn.optimizer import list_optim_modules, list_optim_regularizers
from declearn.utils import access_types_mapping
from rich.console import Console
from rich.markup import escape

import fedclip
from fedclip import compat, parameters
from fedclip.report import Report, ReportError, read_report
from fedclip.toml import toml_line, toml_value
from fedclip.tools.check import Check, check_config, is_ours

__all__ = ["app", "main"]

OLDEST_DECLEARN = (2, 9, 1)

FRAMEWORKS = ("torch", "tensorflow", "jax", "scikit-learn", "opacus", "matplotlib", "websockets")

app = typer.Typer(
    name="fedclip",
    help="Gradient and update clipping for federated learning with declearn.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A declearn TOML file, or a folder with config.toml."),
]


def main() -> None:
    """Run the command line."""
    app(prog_name="fedclip")


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one sentence on standard error."""
    err.print(f"fedclip: {message}", markup=False)
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Gradient and update clipping for federated learning with declearn."""
    if version:
        out.print(f"fedclip {fedclip.__version__}")
        raise typer.Exit


# ------------------------------------------------------------------------------------- list


def catalogue() -> list[dict[str, Any]]:
    """Return what fedclip has registered with declearn, as plain data."""
    kinds: dict[str, dict[str, Any]] = {
        "module": dict(list_optim_modules()),
        "regularizer": dict(list_optim_regularizers()),
        "aggregator": access_types_mapping(Aggregator.__name__),
    }
    entries = []
    for kind, mapping in kinds.items():
        for name, cls in sorted(mapping.items()):
            if not is_ours(cls):
                continue
            entries.append(
                {
                    "name": name,
                    "kind": kind,
                    "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
                    "parameters": {
                        key: None if p.default is p.empty else p.default
                        for key, p in parameters.signature_of(cls).items()
                        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                    },
                    "required": [
                        key
                        for key, p in parameters.signature_of(cls).items()
                        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                    ],
                }
            )
    return entries


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the clippers, their parameters and defaults."""
    entries = catalogue()
    if as_json:
        print(json.dumps(entries, indent=2, default=str))
        return
    for entry in entries:
        kind = "" if entry["kind"] == "module" else f" ({entry['kind']})"
        out.print(f"[bold]{escape(entry['name'])}[/]{kind}  {escape(entry['summary'])}")
        shown = [
            key if key in entry["required"] else f"{key} = {toml_value(value)}"
            for key, value in entry["parameters"].items()
        ]
        if shown:
            out.print(f"    {escape(', '.join(shown))}", style="dim")


# -------------------------------------------------------------------------------- translate


@app.command()
def translate(
    peer: Annotated[str, typer.Argument(metavar="PACKAGE", help="As in torchzero, optax, …")],
    cls: Annotated[str, typer.Argument(metavar="CLASS", help="Its class or function.")],
    config: Annotated[
        list[str] | None, typer.Argument(metavar="[PARAMETER=VALUE]...", help="As given there.")
    ] = None,
) -> None:
    """Translate another package's clipper into the line of TOML that does the same here."""
    given: dict[str, Any] = {}
    for item in config or []:
        key, equals, value = item.partition("=")
        if not equals:
            fail(f"{item!r} must be PARAMETER=VALUE", code=2)
        given[key.strip()] = from_words(value.strip())
    try:
        kind, name, parameters_ = compat.translate(peer, cls, given)
    except (TypeError, ValueError) as exc:
        fail(str(exc))
    out.print(toml_line(kind, name, parameters_), markup=False)
    for note in compat.notes(peer, cls, given):
        err.print(f"note: {note}", markup=False)


def from_words(value: str) -> Any:
    """Read a value as Python or TOML would: None, a number, a list; anything else is a word."""
    if value in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[value]
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


# ------------------------------------------------------------------------------------ check


@app.command()
def check(config: ConfigPath, as_json: JsonFlag = False) -> None:
    """Check a federation's configuration before it runs."""
    result = _checked(config)
    if as_json:
        findings = [vars(finding) for finding in result.findings]
        facts = {"file": str(result.path), "ok": result.ok, "findings": findings}
        print(json.dumps({**facts, "places": result.places}))
    else:
        _print_check(result)
    raise typer.Exit(0 if result.ok else 1)


def _checked(config: Path) -> Check:
    try:
        return check_config(config)
    except FileNotFoundError as exc:
        fail(str(exc), code=2)


def _print_check(result: Check) -> None:
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    out.print(str(result.path), markup=False)
    for finding in result.findings:
        level = f"[{colours[finding.level]}]{finding.level:7}[/]"
        out.print(f"  {level} {escape(finding.where)} {escape(finding.message)}")
    if result.places:
        out.print("What is clipped where:")
    for place in result.places:
        out.print(f"  {place}", markup=False)
    count = len(result.problems)
    if count:
        out.print(f"{count} problem{'s' if count > 1 else ''}.")
    else:
        out.print("No problem.")


# --------------------------------------------------------------------------------- quickrun


@app.command()
def quickrun(config: ConfigPath) -> None:
    """Check a configuration, then run it with declearn's quickrun, fedclip registered."""
    result = _checked(config)
    if not result.ok:
        for finding in result.problems:
            err.print(f"fedclip: {finding.where} {finding.message}", markup=False)
        fail(f"{result.path} would not run; nothing was started")
    network = result.config["network"]
    host, port = network.get("host", "localhost"), network.get("port", 8765)
    if not port_is_free(host, port):
        fail(f"port {port} on {host} is in use; set another port in [network]")

    from declearn.quickrun import DataSourceConfig, parse_data_folder
    from declearn.quickrun import quickrun as run_experiment

    folder = result.path.resolve().parent
    data = DataSourceConfig.from_toml(str(result.path), False, "data")
    try:
        clients = parse_data_folder(data, str(folder))
    except (OSError, ValueError) as exc:
        fail(f"[data] {exc}")
    if not clients:
        fail("[data] the data folder holds no client's folder")
    model = result.config.get("model", {}).get("model_file") or folder / "model.py"
    if not Path(model).is_file():
        fail(f"[model] there is no model file {str(model)!r}")

    started = time.time()
    asyncio.run(run_experiment(str(result.path)))
    where = result.config.get("experiment", {}).get("checkpoint") or _newest(folder, started)
    out.print(f"fedclip: {len(clients)} clients; see  fedclip report {where}", markup=False)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there; True as well where `host` can not be resolved."""
    with contextlib.suppress(socket.gaierror), socket.socket() as sock:
        # As the server itself does: a port that only waits for its time-out is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except socket.gaierror:
            raise
        except OSError:
            return False
    return True


def _newest(folder: Path, started: float) -> Path:
    """Return the result folder that declearn named by the minute in which the run began."""
    results = [path for path in folder.glob("result_*") if path.stat().st_mtime >= started - 1]
    return max(results, key=lambda path: path.stat().st_mtime, default=folder)


# -------------------------------------------------------------------------------------- run


@app.command(
    context_settings={
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    }
)
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="server.py, client.py, …")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
) -> None:
    """Run a Python script, unedited, with fedclip registered."""
    if not script.is_file():
        fail(f"there is no script {str(script)!r}", code=2)
    sys.argv = [str(script), *(args or [])]
    # `python SCRIPT` puts the script's folder first; here that place holds the one of `fedclip`.
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        raise SystemExit(130) from None


# ----------------------------------------------------------------------------------- report


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with checkpoints.")],
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write CSV instead of a table; - for stdout.")
    ] = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="Show the groups of a scope, one line each.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot as well (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Show what the clippers did, by node and round, from an experiment's checkpoints."""
    try:
        result = read_report(folder)
    except ReportError as exc:
        fail(str(exc), code=1 if folder.is_dir() else 2)
    for path in result.skipped:
        err.print(f"fedclip: skipped {path}, which can not be read (yet)", markup=False)
    if plot is not None:
        save_plot(result, plot)
    if csv == "-":
        result.write_csv(sys.stdout)
        return
    if csv is not None:
        try:
            with open(csv, "w", encoding="utf-8", newline="") as file:
                result.write_csv(file)
        except OSError as exc:
            fail(f"can not write {csv}: {exc.strerror}")
        out.print(f"wrote {csv}", markup=False)
        return
    Console(highlight=False).print(result.table(groups))
    for sentence in result.in_words():
        out.print(sentence, markup=False)


def save_plot(result: Report, file: Path) -> None:
    """Write the report's plot; a missing matplotlib or folder is a sentence."""
    try:
        figure = result.figure()
    except ModuleNotFoundError:
        fail("--plot needs matplotlib: pip install 'fedclip[plot]'")
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as exc:
        fail(f"can not write {file}: {exc}")
    out.print(f"wrote {file}", markup=False)


# ----------------------------------------------------------------------------------- doctor


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Show what a bug report needs: versions, frameworks, registered names."""
    declearn = importlib.metadata.version("declearn")
    numbers = tuple(int(part) for part in declearn.split(".")[:3] if part.isdigit())
    fits = OLDEST_DECLEARN <= numbers < (3,)
    facts = {
        "fedclip": fedclip.__version__,
        "declearn": declearn,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        **{name: _version(name) for name in FRAMEWORKS},
        "platform": f"{platform.system()} {platform.machine()}",
        "registered": [entry["name"] for entry in catalogue()],
    }
    if as_json:
        print(json.dumps({**facts, "ok": fits}))
    else:
        for name, value in facts.items():
            shown = ", ".join(value) if isinstance(value, list) else value or "not installed"
            out.print(f"{name:13} {shown}", markup=False)
    if not fits:
        oldest = ".".join(map(str, OLDEST_DECLEARN))
        fail(f"fedclip needs declearn>={oldest},<3: pip install 'declearn>={oldest},<3'")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write; is made, or must be empty.")
    ] = Path("fedclip-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 15,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes any free one.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which one training is given up.")
    ] = 120.0,
) -> None:
    """Train over three hospitals, without clipping and with; print a table, write a plot."""
    from fedclip.tools.demo import DemoError, run_demo

    if port and not port_is_free("127.0.0.1", port):
        fail(f"port {port} on 127.0.0.1 is in use; choose another, or leave --port out")
    try:
        run_demo(
            folder, rounds=rounds, port=port, timeout=timeout, console=Console(highlight=False)
        )
    except DemoError as exc:
        fail(str(exc))
    except KeyboardInterrupt:
        fail("interrupted; all processes of the demo were ended", code=130)
