# SPDX-License-Identifier: Apache-2.0
"""`import fedclip` registers everything in any order, imports no framework, and needs none."""

import ast
import importlib
import pickle
import textwrap
from functools import partial
from pathlib import Path

import pytest
from helpers import SPECIMENS, needs
from helpers import python as run_python

import fedclip

pytestmark = pytest.mark.slow

python = partial(run_python, options=["-W", "error::UserWarning:fedclip"])


def test_every_clipper_has_a_specimen() -> None:
    public = {getattr(getattr(fedclip, n), "name", None) for n in fedclip.__all__}
    clippers = {name for name in public if isinstance(name, str)}
    # Parts of a federation, which clip no gradient, and what has its limit in a loop.
    others = {"sample-clip", "update-clip-client", "update-clip-server", "update-norms"}
    assert clippers - others - {"clipped-averaging", "own-limit"} <= {s.name for s in SPECIMENS}


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
for name in ("named-clients", "round-robin"):
    assert access_registered(name, "ClientSampler")
import sys
assert not [f for f in sys.meta_path if type(f).__module__.startswith("fedclip")]
"""

ORDERS = {
    "fedclip first": "import fedclip",
    "what plug-ins import": "import fedclip.statistics.server",
    "a clipper unpickles": (
        f"import declearn, pickle\n"
        f"assert pickle.loads({pickle.dumps(fedclip.ZScoreClip(z_max=2.0))!r}).z_max == 2.0"
    ),
    "only looking for declearn": (
        "import fedclip, importlib.util, sys; spec = importlib.util.find_spec('declearn')\n"
        "assert spec.loader.get_filename('declearn').endswith('__init__.py')\n"
        "assert 'declearn' not in sys.modules"
    ),
    "reloaded after": (
        "import fedclip, declearn, importlib; importlib.reload(fedclip); importlib.reload(declearn)"
    ),
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
import fedclip.translate
""",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_name_is_registered_in_any_order_of_imports(order: str) -> None:
    python(f"{order}\n{USE}", options=["-W", "error"])


def test_without_declearn_what_needs_it_says_so() -> None:
    out = python(
        """
        import fedclip
        print(fedclip.__version__, fedclip.ZScoreClip(3.0).z_max, "SampleClip" in dir(fedclip))
        try:
            from fedclip import UpdateClipServer
        except ImportError as exc:
            print(exc)
        """,
        "declearn",
    )
    assert out.splitlines() == [
        f"{fedclip.__version__} 3.0 True",
        "fedclip.UpdateClipServer needs declearn, which cannot be imported: No module named "
        "'declearn'; pip install 'declearn>=2.8,<3'",
    ]


OWN = """
from fedclip.clippers.own import Clipper, NormClip
class Mine(NormClip):
    name = "mine"
class Base(NormClip, register=False):
    pass
for bases, given in (((NormClip,), {}), ((NormClip,), {"name": "zscore-clip"}), ((Mine,), {})):
    try:
        type("Again", bases, given)
    except KeyError as exc:
        assert "has already been registered" in str(exc)
    else:
        raise AssertionError(given)
"""


@pytest.mark.parametrize("order", [f"{OWN}\nimport declearn", f"import declearn\n{OWN}"])
def test_a_clipper_of_ones_own_registers_when_it_is_defined_or_declearn_comes(order: str) -> None:
    python(
        f"""{order}
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import OptiModule
from declearn.optimizer.regularizers import Regularizer
from fedclip import AGC
(mine,) = Optimizer(0.1, modules=[("mine", {{"max_norm": 2.0}})]).modules
assert type(mine) is Mine and OptiModule.from_specs("mine", mine.get_config()).max_norm == 2.0
assert isinstance(Base(), OptiModule) and issubclass(Clipper, OptiModule)
assert isinstance(AGC(), Regularizer) and not isinstance(AGC(), OptiModule)
assert Mine.from_specs("norm-clip", {{}}).name == "norm-clip"
assert type(Mine.from_config({{}})) is Mine
try:
    Mine().process_aux_var({{}})
except NotImplementedError:
    pass
class Late(NormClip):
    name = "late"
assert type(Optimizer(0.1, modules=["late"]).modules[0]) is Late
"""
    )


def test_a_name_that_declearn_has_is_told_and_hinders_nothing() -> None:
    python(
        """
        import warnings
        from fedclip import NormClip
        taken = type("Taken", (NormClip,), {"name": "adam"})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            import declearn
        words = "Taken is not registered with declearn: Name 'adam'"
        assert any(words in str(warning.message) for warning in told)
        from declearn.optimizer import list_optim_modules
        assert list_optim_modules()["adam"] is not taken
        try:
            type("Taken", (NormClip,), {"name": "rmsprop"})
        except KeyError:
            type("Taken", (NormClip,), {"name": "free"})
        else:
            raise AssertionError
        """
    )


ADAPTERS = {
    "jax": "jax, optax",
    "keras": "keras",
    "lightning": "lightning",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "transformers": "transformers.trainer_callback",
}
"""What an adapter's user has imported already."""


def test_each_adapter_is_looked_at() -> None:
    folder = Path(fedclip.__file__).parent / "loops"
    texts = {file.stem: file.read_text("utf-8") for file in folder.glob("*.py")}
    needing = {name for name, text in texts.items() if "with needing(" in text}
    assert {*needing, "torch"} == set(ADAPTERS)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_costs_its_framework_and_the_core(adapter: str) -> None:
    needs(ADAPTERS[adapter].partition(",")[0].partition(".")[0])
    out = python(
        f"""
        import sys
        import {ADAPTERS[adapter]}
        before = set(sys.modules)
        import fedclip.loops.{adapter}
        found = [name.partition(".")[0] for name in set(sys.modules) - before]
        print(len(before), found.count("fedclip"), len(found), *({HEAVY!r} & set(found)))
        """,
        "nothing",
    )
    theirs, ours, new, *heavy = out.splitlines()[-1].split()
    assert not heavy
    assert int(ours) <= 60
    # optax, which is small, does not import all of JAX that there is.
    assert int(new) <= int(theirs) / 10


HEAVY = {"declearn", "pandas", "sklearn", "grpc", "cryptography"}


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


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(fedclip.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == {name: f"fedclip.{home}" for name, home in fedclip._HOMES.items()}
    assert fedclip.__all__ == sorted([*seen, "__version__"])
    for name, home in seen.items():
        assert getattr(fedclip, name) is getattr(importlib.import_module(str(home)), name)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("fedclip.ZscoreClip", "no attribute 'ZscoreClip'; did you mean 'ZScoreC"),
        ("fedclip.keras", "import fedclip.loops.keras"),
        ("fedclip.clip_", "from fedclip.loops.torch import clip_"),
        ("fedclip.loops.clip_", "from fedclip.loops.torch import clip_"),
    ],
)
def test_an_unknown_name_is_an_attribute_error_with_the_nearest(line: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        exec(line, {"fedclip": fedclip})
    assert not any(hasattr(fedclip, name) for name in ("torch", "nothing", "_nothing"))


# All rooms but those that know frameworks or engines; `report`, too, reads files only.
ROOMS = (
    *("clippers", "core", "errors", "privacy", "report", "rules", "site", "statistics"),
    *("transforms", "translate", "updates"),
)


def test_importing_the_core_imports_neither_declearn_nor_a_framework() -> None:
    package = Path(fedclip.__file__).parent
    files = [file.relative_to(package.parent).with_suffix("") for file in package.rglob("*.py")]
    names = sorted({".".join(file.parts).removesuffix(".__init__") for file in files})
    names = [name for name in names if name.split(".")[1:2] and name.split(".")[1] in ROOMS]
    heavy = {*HEAVY, "torch", "tensorflow", "jax", "haiku", "keras", "typer"}
    code = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    code += f"print(sorted({heavy!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    assert python(code, "nothing", options=["-W", "error"]) == "[]"
