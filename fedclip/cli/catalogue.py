# SPDX-License-Identifier: Apache-2.0
"""The commands ``fedclip list | translate | doctor``: the plug-ins of fedclip, and versions."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import fedclip
from fedclip.cli.output import JsonFlag, commands, fail, say
from fedclip.core.parameters import Config
from fedclip.errors import DECLEARN, FEDERATIONS, fits, nearest, requirement, version

app = commands()

FILE = Path(__file__).with_name("catalogue.json")
"""One line for each plug-in; written by ``python docs/clippers.py``."""

PACKAGES = "numpy torch tensorflow jax scikit-learn opacus dp-accounting matplotlib websockets"


def is_ours(cls: type) -> bool:
    """Whether a class comes with fedclip."""
    return cls.__module__.partition(".")[0] == "fedclip"


def registries() -> dict[str, Mapping[str, type]]:
    """Return the plug-ins registered with declearn, by kind and name."""
    # Imported here: versions are shown without declearn, too.
    from declearn.aggregator import list_aggregators
    from declearn.optimizer import list_optim_modules, list_optim_regularizers

    return {
        "module": list_optim_modules(),
        "regularizer": list_optim_regularizers(),
        "aggregator": list_aggregators(),
    }


def build(kind: str, name: str, config: Mapping[str, Any]) -> Any:
    """Return a plug-in of fedclip or declearn, made as declearn makes it; or a site's policy."""
    if kind == "policy":
        from fedclip.site.policy import Policy

        return Policy(**config)
    return registries()[kind][name](**config)


def catalogue() -> list[Config]:
    """Return the entries of `FILE`; no clipper is imported."""
    entries: list[Config] = json.loads(FILE.read_text(encoding="utf-8"))
    return entries


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One to explain.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the clippers, or explain one with its parameters."""
    entries = {entry["name"]: entry for entry in catalogue()}
    if name is not None and name not in entries:
        fail(f"there is no clipper {name!r}{nearest(name, entries)}", code=2)
    if as_json:
        print(json.dumps([entries[name]] if name else [*entries.values()], indent=2))
        return
    if name is not None:
        # By its class, because most are imported without declearn.
        cls = {cls.lower(): cls for cls in fedclip.__all__}.get(name.replace("-", ""))
        plugin = getattr(fedclip, cls) if cls else registries()[entries[name]["kind"]][name]
        typer.echo(inspect.getdoc(plugin))
        return
    for entry in entries.values():
        kind = "" if entry["kind"] == "module" else f" ({entry['kind']})"
        typer.secho(entry["name"], bold=True, nl=False)
        typer.echo(f"{kind}  {entry['summary']}")
    typer.echo("To read about one of them, and its parameters: fedclip list NAME")


@app.command()
def translate(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="As in torchzero, optax, …")],
    cls: Annotated[str, typer.Argument(metavar="CLASS", help="Its class or function.")],
    config: Annotated[list[str] | None, typer.Argument(metavar="PARAMETER=VALUE")] = None,
) -> None:
    """Translate another package's clipper into a line of TOML."""
    from fedclip.cli.check.findings import text_of
    from fedclip.core.toml import toml_line, value_of
    from fedclip.translate import notes
    from fedclip.translate import translate as translated

    values: dict[str, object] = {}
    for item in config or []:
        if "=" not in item:
            fail(f"{item!r} must be PARAMETER=VALUE", code=2)
        key, value = map(str.strip, item.split("=", 1))
        values[key] = value_of(value)
    try:
        kind, name, parameters = translated(package, cls, values)
        # Build the clipper, so that a line with invalid parameters is refused.
        build(kind, name, parameters)
    except (TypeError, ValueError, OverflowError) as exc:
        text = text_of(exc)
        fail(text if package in text else f"{cls} of {package}: {text}")
    typer.echo(toml_line(kind, name, parameters))
    say(*(f"note: {note}" for note in notes(package, cls, values)), err=True)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Show versions, for a bug report."""
    facts: dict[str, str | None] = {
        "fedclip": fedclip.__version__,
        "declearn": version("declearn"),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES.split()},
        "platform": f"{platform.system()} {platform.machine()}",
    }
    fitting = fits(DECLEARN)
    if as_json:
        print(json.dumps({**facts, "ok": fitting}))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:13} {value or 'not installed'}")
    if not fitting:
        fail(requirement("fedclip on declearn", DECLEARN))
    if not fits(FEDERATIONS) and not as_json:
        needed = requirement("a server, a client or a command that reads a config", FEDERATIONS)
        say(f"Clippers work. {needed[0].upper()}{needed[1:]}")
