# SPDX-License-Identifier: Apache-2.0
"""The environment of the other engines: what an extra needs is pinned."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINNED = {
    canonicalize_name(name): pin
    for name, pin in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints-engines.txt").read_text(), re.M
    )
}


@pytest.mark.parametrize("extra", ["flower", "nvflare"])
def test_whatever_an_extra_needs_is_pinned_and_installed(extra: str) -> None:
    seen: set[str] = set()
    todo = [Requirement(text) for text in EXTRAS[extra]]
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if str(needed) in seen or name in ("setuptools", "pip"):
            continue
        seen.add(str(needed))
        assert PINNED.get(name) == version(name), f"constraints-engines.txt lacks {needed}"
        assert needed.specifier.contains(PINNED[name], prereleases=True), needed
        for text in requires(name) or []:
            inner = Requirement(text)
            extras = needed.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                todo.append(inner)
