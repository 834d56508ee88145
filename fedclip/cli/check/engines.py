# SPDX-License-Identifier: Apache-2.0
"""Check the settings of Flower's apps, and of exported jobs of NVFlare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedclip.cli.check.claims import Claim, voids_of
from fedclip.cli.check.findings import Check, Section, as_count, part_of, text_of
from fedclip.core.parameters import Config
from fedclip.errors import nearest
from fedclip.updates.store import server_of, settings_in


def check_app(check: Check, config: Section) -> None:
    """Check the settings of an app of Flower, as its run configuration gets them."""
    app: Section = config
    for key in ("tool", "flwr", "app", "config"):
        app = part_of(app, key)
    table = part_of(app, "update-clip")
    where = "[tool.flwr.app.config.update-clip]"
    if not table:
        hint = nearest("update-clip", app)
        check.problem(where, f"this section is missing, so Flower would clip nothing: add it{hint}")
    for key in [key for key, value in table.items() if isinstance(value, list)]:
        check.problem(
            where, f"{key} is a list, which Flower does not accept: write one pattern, or a table"
        )
    if check.problems:
        return
    try:
        settings = settings_in(dict(_flat(app)))
    except ValueError as exc:
        check.problem(where, text_of(exc))
        return
    evaluates = app.get("fraction-evaluate") != 0
    claim = Claim(
        "flower",
        None,
        rounds=as_count(app.get("num-server-rounds")),
        evaluates=evaluates,
        keeps_best=False,
    )
    sections = {"evaluate": "[tool.flwr.app.config]"}
    _check_settings(check, settings, claim, where, sections)


def check_job(check: Check, config: Section) -> None:
    """Check the settings of a job of NVFlare, as a recipe has exported it."""
    workflows = [part_of(section, "args") for section in _sections(config, "workflows")]
    named = [(section, str(part_of(section, "aggregator").get("path"))) for section in workflows]
    clipping = [section for section, path in named if path.startswith("fedclip.")]
    if len(clipping) != 1:
        text = (
            "fedclip clips nothing in this job: call add_update_clipping(recipe) before you export "
            "it"
        )
        check.problem("[workflows]", text)
        return
    selects = any(
        "ModelSelector" in str(section.get("path")) for section in _sections(config, "components")
    )
    rounds = as_count(clipping[0].get("num_rounds"))
    claim = Claim("nvflare", None, rounds=rounds, evaluates=selects, keeps_best=selects)
    settings = part_of(part_of(part_of(clipping[0], "aggregator"), "args"), "settings")
    where = "[workflows.aggregator]"
    _check_settings(check, settings, claim, where, {"evaluate": "[components]"})


def _check_settings(
    check: Check, settings: Section, claim: Claim, where: str, sections: Mapping[str, str]
) -> None:
    """Check a flat table of settings, and what voids the guarantee of its noise."""
    try:
        bound = server_of(settings).bound
    except (TypeError, ValueError) as exc:
        check.problem(where, text_of(exc))
        return
    if bound.budget is None:
        return
    for severity, part, text in voids_of(claim._replace(bound=bound)):
        check.add(severity, sections.get(part, where), text)
    if claim.rounds:
        rounds = min(claim.rounds, bound.rounds_left())
        cost = bound.budget.cost(rounds)
        check.note(where, f"epsilon = {cost:.4g} after {rounds} of {claim.rounds} planned rounds")


def _flat(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield settings and their names as Flower hands them to an app."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _sections(config: Section, name: str) -> list[Config]:
    """Return the sections in a list of a file; none if there is no list."""
    value = config.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
