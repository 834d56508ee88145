"""declearn's own plug-in tests, from its source distribution, pass for every clipper."""

import os
import re
import tarfile
from importlib.metadata import version

import pytest
from helpers import ended, hiding

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return a folder with declearn's tests, and nothing else of its sources."""
    for framework in ("torch", "tensorflow", "haiku"):
        pytest.importorskip(framework)
    folder = tmp_path_factory.mktemp("declearn")
    name = f"declearn=={version('declearn')}"
    options = ["--quiet", "--no-deps", "--no-binary=:all:", "--dest", str(folder)]
    found = ended("-m", "pip", "download", *options, name, well=False)
    archives = list(folder.glob("declearn-*.tar.gz"))
    if not archives:
        pytest.skip(f"{name} could not be downloaded: {found.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        members = [m for m in archive.getmembers() if "/test/" in m.name]
        archive.extractall(folder, members=members, filter="data")
    return next(folder.glob("declearn-*/test")).parent


@pytest.mark.parametrize("frameworks", ["torch", pytest.param("all", marks=pytest.mark.soak)])
def test_declearns_tests_pass_for_every_clipper(suite, frameworks):
    from declearn.optimizer import list_optim_modules, list_optim_regularizers

    import fedclip

    plugins = {**list_optim_modules(), **list_optim_regularizers()}
    ours = {n for n, cls in plugins.items() if cls.__module__.startswith(fedclip.__name__ + ".")}
    # It takes records, and refuses gradients.
    ours.remove("sample-clip")
    # declearn's own plug-ins are left to declearn; and counterparts, which look at no gradient, are
    # tried with NumPy alone.
    chosen = " or ".join(f"{name}]" for name in sorted(ours))
    chosen = f"({chosen}) and not (server] and ([torch or [tensorflow or [jax))"
    # `-p fedclip` imports it, and so puts its plug-ins among those that are tested.
    options = ["-v", "-p", "fedclip", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
    files = ["test/optimizer/test_modules.py", "test/optimizer/test_regularizers.py"]
    # Others than torch take most of the time; tests/laws/test_testing.py has them all.
    hidden = None
    if frameworks == "torch":
        hidden = hiding("tensorflow", "keras", "jax", "haiku")
        chosen += " and not ([tensorflow or [jax)"
    said = ended("-m", "pytest", *options, "-k", chosen, *files, cwd=suite, env=hidden).stdout
    for name in ours:
        assert re.search(rf"\[(numpy-)?{re.escape(name)}\] PASSED", said), name
