"""Models that are spread over processes are clipped like whole ones."""

import contextlib
from pathlib import Path

import pytest
from helpers import ended, require

torch = require("torch")
pytest.importorskip("torch.distributed.tensor")
if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

import federation_runs  # noqa: E402, F401
import sharded_cases  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[4])
def outcomes(request, tmp_path_factory):
    """Run all cases in so many processes; return for each what went wrong, by process."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"of{world}")
    arguments = (world, str(folder), list(sharded_cases.CASES))
    # If one fails, the files say in which case.
    with contextlib.suppress(torch.multiprocessing.ProcessRaisedException):
        # Forked from a process that has imported torch: see `federation_runs`.
        torch.multiprocessing.start_processes(
            sharded_cases.main, arguments, nprocs=world, start_method="forkserver"
        )
    return [folder / str(rank) for rank in range(world)]


@pytest.mark.parametrize("name", list(sharded_cases.CASES))
def test_sharded(outcomes: list[Path], name: str) -> None:
    for rank, folder in enumerate(outcomes):
        file = folder / name
        assert file.exists(), f"process {rank} did not come so far"
        said = file.read_text()
        assert not said, f"process {rank}:\n{said}"


def test_the_digits_in_two_processes_are_learnt_as_in_one() -> None:
    pytest.importorskip("sklearn")
    loops = Path(__file__).parents[2] / "examples" / "loops"
    spread = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = [
        ended(*command).stdout.splitlines()[-1]
        for command in ([*spread, loops / "torch_fsdp.py"], [loops / "torch_loop.py"])
    ]
    # Accuracy and number of clipped steps; then the last limit.
    (words, limit), (expected, alone) = (line.rsplit(" ", 1) for line in said)
    assert words == expected
    assert float(limit) == pytest.approx(float(alone), rel=1e-5)
    assert " 0 of them clipped" not in words
