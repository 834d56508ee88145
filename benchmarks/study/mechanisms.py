# SPDX-License-Identifier: Apache-2.0
"""What is compared: each mechanism as sections of [optim], at a factor of its one scale.

The scale of a fixed limit is the median norm of a clean first round; that of all others is their
default. All have the same five factors. A share q has them on its odds, q / (1 - q), and a ratio
to a mean on its excess over 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Field, Job, Mechanism
from benchmarks.study.scenes import CLAIMS, SOURCES, TROUBLES, Scene
from fedclip import PercentileNormClip, ZScoreClip

Sections = dict[str, Any]
Made = Callable[[Scene, float], Sections]
Parameters = Callable[[Scene], Mapping[str, Any]]


def odds(share: float, factor: float) -> float:
    """Return a share with so many times its odds."""
    times = factor * share / (1 - share)
    return round(times / (1 + times), 6)


def _step(name: str, parameter: str, at: Callable[[float], float], **more: Any) -> Made:
    """Return a clipper of the clients' steps."""
    return lambda _scene, factor: {
        "client_opt": {"modules": [[name, {**more, parameter: at(factor)}]]}
    }


def _shared(name: str, parameter: str, at: Callable[[float], float]) -> Made:
    """Return a clipper with one limit for all clients, and its counterpart on the server."""

    def made(_: Scene, factor: float) -> Sections:
        own = {parameter: at(factor)}
        client = {"modules": [[name, {"shared": True, **own}]]}
        return {"client_opt": client, "server_opt": [[f"{name}-server", own]]}

    return made


def _preset(clipper: Any, preset: str, parameter: str, at: Callable[[float], float]) -> Made:
    return _step(clipper.name, parameter, at, **_config(clipper, preset))


def _config(clipper: Any, preset: str) -> dict[str, Any]:
    """Return the parameters of a preset that are not the defaults."""
    config, usual = clipper.preset(preset).get_config(), clipper().get_config()
    return {key: value for key, value in config.items() if value != usual[key]}


def _as_it_is(name: str) -> Made:
    return lambda _scene, _factor: {"client_opt": {"modules": [name]}}


def _none(_: Scene) -> Mapping[str, Any]:
    return {}


def _agc(_scene: Scene, _factor: float) -> Sections:
    return {"client_opt": {"regularizers": ["agc"]}}


def _norm_clip(scene: Scene, factor: float) -> Sections:
    limit = {"max_norm": scene.source.step_norm * factor}
    return {"client_opt": {"modules": [["norm-clip", limit]]}}


def _fixed_update(scene: Scene, factor: float) -> Sections:
    bound = scene.source.update_norm * factor
    return {"aggregator": {"name": "clipped-averaging", "max_norm": bound}}


def _update(table: bool = False, **more: Any) -> Made:
    """Return clipped averaging, with a bound that follows a quantile of the updates' norms."""

    def made(scene: Scene, factor: float) -> Sections:
        weights = {"weights": dict(scene.counts)} if table else {}
        bound = {"quantile": odds(0.5, factor), "start_norm": scene.source.update_norm}
        return {
            "aggregator": {"name": "clipped-averaging", **weights, **more},
            "client_opt": {"modules": ["update-clip-client"]},
            "server_opt": [["update-clip-server", bound]],
        }

    return made


def _unbounded(**more: Any) -> Made:
    """Return averaging whose bound is beyond all updates."""
    whole = {"name": "clipped-averaging", "max_norm": 1e9, **more}
    return lambda _scene, _factor: {"aggregator": whole}


def _as_it_comes(aggregator: Parameters = _none, bound: Parameters = _none) -> Made:
    """Return clipped averaging by its defaults, but for these parameters."""
    return lambda scene, _factor: {
        "aggregator": {"name": "clipped-averaging", **aggregator(scene)},
        "client_opt": {"modules": ["update-clip-client"]},
        "server_opt": [["update-clip-server", bound(scene)]],
    }


def _times(default: float) -> Callable[[float], float]:
    return lambda factor: default * factor


def _share(default: float, whole: float = 1.0) -> Callable[[float], float]:
    return lambda factor: whole * odds(default, factor)


def _excess(default: float) -> Callable[[float], float]:
    return lambda factor: round(1 + default * factor, 6)


_95 = _share(0.95, 100.0)
MECHANISMS: Mapping[str, Mechanism] = {
    "none": Mechanism(lambda _scene, _factor: {}, tuned=False),
    # Steps, on each client.
    "norm-clip": Mechanism(_norm_clip),
    "zscore-clip": Mechanism(_step("zscore-clip", "z_max", _times(2.5)), default=True),
    "ema-clip": Mechanism(_step("ema-clip", "ratio", _excess(1.0)), default=True),
    "percentile-norm-clip": Mechanism(
        _step("percentile-norm-clip", "percentile", _95), default=True
    ),
    "zclip, as published": Mechanism(_preset(ZScoreClip, "zclip", "z_max", _times(2.5))),
    "autoclip, as published": Mechanism(
        _preset(PercentileNormClip, "autoclip", "percentile", _share(0.1, 100.0))
    ),
    # Steps, with one limit for all clients.
    "mad-clip, shared": Mechanism(_shared("mad-clip", "mad_factor", _times(3.0)), default=True),
    # Updates.
    "update, fixed": Mechanism(_fixed_update),
    "update, adaptive": Mechanism(_update()),
    "update, weighted": Mechanism(_update(table=True)),
    "update, weighted, capped": Mechanism(_update(table=True, max_share=0.25)),
    "update, trimmed": Mechanism(_update(combine="trimmed", n_hostile=1)),
    "trimmed mean": Mechanism(_unbounded(combine="trimmed", n_hostile=1), tuned=False),
    "arc": Mechanism(_unbounded(combine="arc", n_hostile=1), tuned=False),
    # Nothing to tune.
    "agc": Mechanism(_agc, tuned=False, default=True),
    "auto-clip": Mechanism(_as_it_is("auto-clip"), tuned=False, default=True),
    "mad-clip": Mechanism(_as_it_is("mad-clip"), tuned=False, default=True),
    "adaptive-clip": Mechanism(_as_it_is("adaptive-clip"), tuned=False, default=True),
    "growth-clip": Mechanism(_as_it_is("growth-clip"), tuned=False, default=True),
    "ema-norm-clip": Mechanism(_as_it_is("ema-norm-clip"), tuned=False, default=True),
    "update-clip-server": Mechanism(_as_it_comes(), tuned=False, default=True),
}

# What the last of them could have been instead.
INSTEAD: Mapping[str, Mechanism] = {
    "weights by steps": Mechanism(_as_it_comes(lambda _: {"weights": "steps"}), tuned=False),
    "... at most a half": Mechanism(
        _as_it_comes(lambda _: {"weights": "steps", "max_share": 0.5}), tuned=False
    ),
    "... at most 2 / n": Mechanism(
        _as_it_comes(lambda scene: {"weights": "steps", "max_share": 2 / len(scene.counts)}),
        tuned=False,
    ),
    "quantile 0.8": Mechanism(_as_it_comes(bound=lambda _: {"quantile": 0.8}), tuned=False),
    "first bound known": Mechanism(
        _as_it_comes(bound=lambda scene: {"start_norm": scene.source.update_norm}), tuned=False
    ),
}


def run(job: Job) -> list[float]:
    """Return the accuracy of each mechanism of a job."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), job.data, job.trouble, job.seed)
        known = {**MECHANISMS, **INSTEAD}
        return [scene.score(known[name].made(scene, factor)) for name, factor in job.wanted]


def _places(*troubles: str) -> tuple[tuple[str, str], ...]:
    return tuple((trouble, data) for trouble in troubles for data in SOURCES)


_COMPARED = {name: MECHANISMS[name] for name in ("none", "update-clip-server")}
ALTERNATIVES = (
    Field(_places("sizes", "sizes and labels", "hostile"), INSTEAD, run),
    Field(_places(CLAIMS), {**_COMPARED, **INSTEAD}, run),
)
FIELD = Field(_places(*TROUBLES), MECHANISMS, run)
