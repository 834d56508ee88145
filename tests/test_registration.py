# SPDX-License-Identifier: Apache-2.0
"""`import fedclip` registers everything, imports no framework, and needs none."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers import SPECIMENS

# As if the packages were not installed: they are neither found nor imported.
BLOCK = """
import importlib.util, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
def find_spec(name, package=None, find=importlib.util.find_spec):
    return None if name.partition(".")[0] in {blocked!r} else find(name, package)
importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Block())
"""
FRAMEWORKS = ["torch", "tensorflow", "jax", "jaxlib", "haiku", "keras"]


def python(code: str, *blocked: str) -> str:
    head = BLOCK.format(blocked=blocked) if blocked else ""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:fedclip", "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optimizer_after_import_and_nothing_else() -> None:
    out = python(
        """
        import fedclip
        from declearn.optimizer import Optimizer
        opt = Optimizer(lrate=0.1, modules=["l2-global-clipping", "zscore-clip"],
                        regularizers=["agc"])
        print([m.name for m in opt.modules], [r.name for r in opt.regularizers])
        """
    )
    assert out == "['l2-global-clipping', 'zscore-clip'] ['agc']"


def test_every_clipper_is_registered() -> None:
    names = sorted({s.name for s in SPECIMENS})
    out = python(
        """
        import fedclip
        from declearn.optimizer import list_optim_modules, list_optim_regularizers
        print(sorted([*list_optim_modules(), *list_optim_regularizers()]))
        """
    )
    assert all(repr(name) in out for name in names)


def test_every_clipper_has_a_specimen() -> None:
    import fedclip

    public = {getattr(getattr(fedclip, n), "name", None) for n in fedclip.__all__}
    clippers = {name for name in public if isinstance(name, str)}
    assert clippers - {"clipped-averaging"} - SHELLS <= {s.name for s in SPECIMENS}


# Counterparts and carriers of the federation, which clip nothing by themselves.
SHELLS = {
    "zscore-clip-server",
    "ema-clip-server",
    "auto-clip-server",
    "percentile-norm-clip-server",
    "adaptive-clip-server",
    "update-clip-client",
    "update-clip-server",
}


def test_importing_it_imports_no_framework() -> None:
    # torch is imported by declearn itself where it is installed.
    out = python(
        """
        import sys
        import fedclip
        print([name for name in ("tensorflow", "jax", "haiku", "keras") if name in sys.modules])
        """
    )
    assert out == "[]"


def test_compat_does_not_import_clippers_or_frameworks() -> None:
    out = python(
        """
        import ast, pathlib, importlib.util
        spec = importlib.util.find_spec("fedclip")
        text = (pathlib.Path(spec.origin).parent / "compat.py").read_text()
        found = [n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
        print(sorted(m for m in found if m.startswith("fedclip")))
        """
    )
    assert out == "['fedclip.errors']"


@pytest.mark.parametrize("blocked", [("torch",), ("tensorflow", "keras"), tuple(FRAMEWORKS)])
def test_works_without_a_framework(blocked: tuple[str, ...]) -> None:
    out = python(
        """
        import numpy as np
        import fedclip
        from declearn.model.sklearn import NumpyVector
        from declearn.optimizer import Optimizer
        opt = Optimizer(lrate=1.0, modules=[("norm-clip", {"max_norm": 1.0}), "zscore-clip"])
        out = opt.modules[0].run(NumpyVector({"w": np.array([3.0, 4.0])}))
        print(out.coefs["w"].round(6).tolist())
        """,
        *blocked,
    )
    assert out == "[0.6, 0.8]"


def test_importing_it_twice_and_in_any_order() -> None:
    python(
        """
        import declearn.optimizer
        import fedclip, importlib
        import fedclip.compat, fedclip.testing, fedclip.modules
        """
    )
