"""declearn's own plug-in tests pass for every clipper, and its helpers work with fedclip."""

import os
import re
import tarfile
from importlib.metadata import version

import pytest
from helpers import ended, hiding, python

pytestmark = pytest.mark.slow


def test_declearns_tests_pass_for_every_clipper(tmp_path):
    """Its source archive has them; nothing else of it is unpacked."""
    pytest.importorskip("torch")
    name = f"declearn=={version('declearn')}"
    options = ["--quiet", "--no-deps", "--no-binary=:all:", "--dest", str(tmp_path)]
    found = ended("-m", "pip", "download", *options, name, well=False)
    archives = list(tmp_path.glob("declearn-*.tar.gz"))
    if not archives:
        pytest.skip(f"{name} could not be downloaded: {found.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        members = [m for m in archive.getmembers() if "/test/" in m.name]
        archive.extractall(tmp_path, members=members, filter="data")
    suite = next(tmp_path.glob("declearn-*/test")).parent
    from declearn.optimizer import list_optim_modules, list_optim_regularizers

    import fedclip

    plugins = {**list_optim_modules(), **list_optim_regularizers()}
    ours = {n for n, cls in plugins.items() if cls.__module__.startswith(fedclip.__name__ + ".")}
    # It takes records, and refuses gradients.
    ours.remove("sample-clip")
    # declearn's own plug-ins are left to declearn; and counterparts, which look at no gradient, are
    # tried with NumPy alone. Other frameworks take long; tests/laws/test_testing.py has them all.
    chosen = " or ".join(f"{name}]" for name in sorted(ours))
    chosen = f"({chosen}) and not (server] and [torch) and not ([tensorflow or [jax)"
    # `-p fedclip` imports it, and so puts its plug-ins among those that are tested.
    options = ["-v", "-p", "fedclip", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
    files = ["test/optimizer/test_modules.py", "test/optimizer/test_regularizers.py"]
    hidden = hiding("tensorflow", "keras", "jax", "haiku")
    said = ended("-m", "pytest", *options, "-k", chosen, *files, cwd=suite, env=hidden).stdout
    for name in ours:
        assert re.search(rf"\[(numpy-)?{re.escape(name)}\] PASSED", said), name


FORKS = """
from declearn.utils import run_as_processes
import numpy as np
from declearn.model.sklearn import NumpyVector
from fedclip import NormClip
from fedclip.arrays import blocks, cores
from fedclip.arrays import numpy as numpy_file

for module in (blocks, numpy_file):
    module.num_threads = lambda _: 3

def norm(seed):
    clip = NormClip(1.0)
    values = np.random.default_rng(seed).standard_normal((3000, 1001))
    output = clip.run(NumpyVector({"w": values})).coefs["w"]
    return clip.last.norm_before[0], float(output.sum())

# The threads are there when the process is forked.
here = [norm(seed) for seed in range(3)]
assert cores._helpers.cache_info().currsize
done, found = run_as_processes(*[(norm, (seed,)) for seed in range(3)])
assert done, found
assert found == here, (found, here)
# They work on in the parent.
assert norm(1) == here[1]
"""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")
def test_threads_are_made_anew_after_a_fork():
    """With declearn's own helper, in a process that has threads already."""
    python(FORKS)
