# SPDX-License-Identifier: Apache-2.0
"""`import fedclip` registers everything in any order, imports no framework, and needs none."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import FRAMEWORK_MODULES, PATIENCE, SPECIMENS, hiding

import fedclip

pytestmark = pytest.mark.slow

QUIET = ["-W", "error::UserWarning:fedclip"]


def python(code: str, *hidden: str, options: list[str] | None = None) -> str:
    """Run code in a process that finds none of the hidden modules, or of the frameworks."""
    done = subprocess.run(
        [sys.executable, *(options or QUIET), "-c", textwrap.dedent(code)],
        env=hiding(*hidden),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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
    public = {getattr(getattr(fedclip, n), "name", None) for n in fedclip.__all__}
    clippers = {name for name in public if isinstance(name, str)}
    assert clippers - {"clipped-averaging", "own-limit"} - SHELLS <= {s.name for s in SPECIMENS}


# Counterparts and carriers of the federation, which clip nothing by themselves.
SHELLS = {
    "sample-clip",
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
        """,
        "nothing",
    )
    assert out == "[]"


def test_compat_does_not_import_clippers_or_frameworks() -> None:
    out = python(
        """
        import ast, pathlib, importlib.util
        spec = importlib.util.find_spec("fedclip")
        files = [*(pathlib.Path(spec.origin).parent / "compat").glob("*.py")]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
        found = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        ours = {m for m in found if m.startswith("fedclip") and "compat" not in m}
        frameworks = {m for m in found if m.split(".")[0] in ("torch", "jax", "declearn", "numpy")}
        print(len(files) > 5, sorted(ours | frameworks))
        """
    )
    assert out == "True ['fedclip.errors']"


@pytest.mark.parametrize("blocked", [("torch",), ("tensorflow", "keras"), FRAMEWORK_MODULES])
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


# ------------------------------------------------------------------------- orders of import

# Names of a clipper, of a counterpart, of a carrier, and of the other kinds of plug-in.
USE = """
from declearn.aggregator import Aggregator
from declearn.main.config import FLOptimConfig
from declearn.optimizer import Optimizer
from declearn.utils import access_registered
Optimizer(0.1, modules=["zscore-clip", "zscore-clip-server", "update-clip-server"],
          regularizers=["agc"])
FLOptimConfig.from_params(client_opt={"lrate": 0.1, "modules": ["auto-clip"]},
                          aggregator="clipped-averaging")
assert access_registered("named-clients", "ClientSampler")
import sys
assert not [f for f in sys.meta_path if type(f).__module__.startswith("fedclip")]
"""

ORDERS = {
    "fedclip first": "import fedclip",
    "declearn first": "import declearn.optimizer, fedclip",
    "a part of declearn, then of fedclip": "import declearn.utils, fedclip.rules",
    "a public name": "from fedclip import ZScoreClip",
    "everything": "from fedclip import *",
    "the core alone": "import fedclip.rules.zscore, fedclip.transforms.norm, fedclip.records",
    "a clipper's own module": "import fedclip.modules.zscore_clip",
    "what plug-ins import": "import fedclip.federation.statistics.server",
    "a check": "import fedclip.federation.statistics.check",
    "a message": "import fedclip.federation.update.messages",
    "a public door": "import fedclip.toml, fedclip.report, fedclip.compat, fedclip.testing",
    "the tools": "import fedclip.tools.check",
    "declearn's parts one by one": "import fedclip, declearn.aggregator, declearn.utils",
    "only looking for declearn": (
        "import fedclip, importlib.util, sys; spec = importlib.util.find_spec('declearn')\n"
        "assert spec.loader.get_filename('declearn').endswith('__init__.py')\n"
        "assert 'declearn' not in sys.modules"
    ),
    "reloaded before": "import fedclip, importlib; importlib.reload(fedclip)",
    "reloaded after": (
        "import fedclip, declearn, importlib; importlib.reload(fedclip); importlib.reload(declearn)"
    ),
    "declearn reloaded first": "import declearn, importlib; importlib.reload(declearn)\n"
    "import fedclip",
    "a thread each": """
import threading
def first(): import fedclip
def second(): import declearn
def third(): from fedclip import AutoClip
def fourth(): import fedclip, declearn
threads = [threading.Thread(target=f) for f in (third, second, fourth, first) * 3]
for t in threads: t.start()
for t in threads: t.join()
""",
    "fedclip in the middle of declearn": """
import sys
class Middle:
    def find_spec(self, name, path=None, target=None):
        if name == "declearn.version" and "fedclip" not in sys.modules:
            import fedclip
sys.meta_path.insert(0, Middle())
import declearn
import fedclip.compat
""",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_name_is_registered_in_any_order_of_imports(order: str) -> None:
    python(f"{order}\n{USE}", options=["-W", "error"])


def test_a_clipper_unpickles_where_only_declearn_was_imported() -> None:
    data = pickle.dumps(fedclip.ZScoreClip(z_max=2.0))
    python(f"import declearn, pickle\nassert pickle.loads({data!r}).z_max == 2.0\n{USE}")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_child_processes_know_the_names(tmp_path: Path, method: str) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent(
            f"""
            import fedclip
            import multiprocessing

            def work():
                exec({USE!r})

            if __name__ == "__main__":
                child = multiprocessing.get_context({method!r}).Process(target=work)
                child.start()
                child.join()
                raise SystemExit(child.exitcode)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env=hiding(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_declearn_the_core_works_and_plug_ins_say_what_is_missing() -> None:
    out = python(
        """
        import fedclip, fedclip.rules, fedclip.records
        print(fedclip.__version__, fedclip.StepRecord.__name__, "ZScoreClip" in dir(fedclip))
        try:
            from fedclip import ZScoreClip
        except ImportError as exc:
            print(exc)
        """,
        "declearn",
    )
    assert out.splitlines() == [
        f"{fedclip.__version__} StepRecord True",
        "fedclip.ZScoreClip needs declearn, which can not be imported: No module named 'declearn'; "
        "pip install 'declearn>=2.9.1,<3'",
    ]


def test_a_declearn_that_breaks_can_be_imported_again(tmp_path: Path) -> None:
    # Its own error is what is seen, and the second attempt registers.
    python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import fedclip
        (package := __import__("pathlib").Path({str(tmp_path)!r}) / "declearn").mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('broken')")
        try:
            import declearn
        except RuntimeError as exc:
            assert str(exc) == "broken"
        else:
            raise AssertionError
        del sys.path[0]
        sys.path_importer_cache.clear()
        """
        + textwrap.indent(USE, " " * 8)
    )


def test_the_part_alone_imports_no_declearn() -> None:
    out = python(
        """
        import sys
        import fedclip, fedclip.rules, fedclip.records, fedclip.errors
        print([name for name in ("declearn", "torch", "typer") if name in sys.modules])
        """
    )
    assert out == "[]"


def test_public_names_are_those_that_type_checkers_see() -> None:
    block = next(n for n in ast.parse(read(fedclip)).body if isinstance(n, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"fedclip.{home}" for name, home in fedclip._HOMES.items()}
    assert fedclip.__all__ == sorted([*seen, "__version__"])
    for name, home in seen.items():
        assert getattr(fedclip, name) is getattr(importlib.import_module(str(home)), name)


def read(module: object) -> str:
    return Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ZscoreClip'; did you mean 'ZScoreC"):
        fedclip.ZscoreClip  # noqa: B018
    assert not hasattr(fedclip, "_nothing")
    assert not hasattr(fedclip, "nothing")
    assert set(fedclip.__all__) <= set(dir(fedclip))


@pytest.mark.parametrize(
    ("line", "kind", "hint"),
    [
        ("import fedclip.torch", ImportError, "import fedclip.adapters.torch"),
        ("from fedclip import jax", ImportError, "import fedclip.adapters.jax"),
        ("fedclip.keras", AttributeError, "import fedclip.adapters.keras"),
        ("from fedclip import clip_grad_norm", ImportError, "torch import clip_grad_norm_'"),
        ("fedclip.clip_", AttributeError, "from fedclip.adapters.torch import clip_"),
        ("fedclip.adapters.clip_", AttributeError, "from fedclip.adapters.torch import clip_"),
        ("from fedclip.adapters import torhc", ImportError, "did you mean 'import fedclip.ad"),
        ("from fedclip import NormClp", ImportError, "did you mean 'NormClip'"),
    ],
)
def test_what_is_elsewhere_is_found(line: str, kind: type[Exception], hint: str) -> None:
    with pytest.raises(kind, match=hint):
        exec(line, {"fedclip": fedclip})
    assert not hasattr(fedclip, "torch")
