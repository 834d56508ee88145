"""Models that are spread over processes are clipped like whole ones."""

import contextlib
from pathlib import Path

import pytest
from helpers import require

torch = require("torch")
pytest.importorskip("torch.distributed.tensor")
if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

import sharded_cases  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory):
    """Run all cases in so many processes; return for each what went wrong, by process."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"of{world}")
    arguments = (world, str(folder), list(sharded_cases.CASES))
    # If one fails, the files say in which case.
    with contextlib.suppress(torch.multiprocessing.ProcessRaisedException):
        torch.multiprocessing.spawn(sharded_cases.main, arguments, nprocs=world)
    return [folder / str(rank) for rank in range(world)]


@pytest.mark.parametrize("name", list(sharded_cases.CASES))
def test_sharded(outcomes: list[Path], name: str) -> None:
    for rank, folder in enumerate(outcomes):
        file = folder / name
        assert file.exists(), f"process {rank} did not come so far"
        said = file.read_text()
        assert not said, f"process {rank}:\n{said}"
