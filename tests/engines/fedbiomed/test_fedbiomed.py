# SPDX-License-Identifier: Apache-2.0
"""Fed-BioMed's optimizer, serializer and training plan with clippers (`make fedbiomed`)."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from declearn.model.sklearn import NumpyVector
from declearn.model.torch import TorchVector
from fedbiomed.common.dataloader import PytorchDataLoader
from fedbiomed.common.optimizers.optimizer import Optimizer
from fedbiomed.common.serializer import Serializer
from fedbiomed.common.training_args import TrainingArgs
from fedbiomed.common.training_plans import TorchTrainingPlan

import fedclip
from fedclip.core.plugins import PLUGINS

MODULES = sorted(name for group, name in PLUGINS if group == "OptiModule")
# Opacus, which Fed-BioMed makes for each plan, warns of its generator.
pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off")
PARAMETERS = {"norm-clip": {"max_norm": 1.0}, "value-clip": {"max_value": 1.0}}


def vectors(kind: str, seed: int = 0) -> tuple[Any, Any]:
    """Return a gradient and weights in one of the containers that Fed-BioMed hands over."""
    rng = np.random.default_rng(seed)
    arrays = [{"w": rng.normal(size=(4, 3)), "b": rng.normal(size=3)} for _ in range(2)]
    if kind == "numpy":
        return NumpyVector(arrays[0]), NumpyVector(arrays[1])
    made = [{k: torch.tensor(a, dtype=torch.float32) for k, a in one.items()} for one in arrays]
    return TorchVector(made[0]), TorchVector(made[1])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", MODULES)
def test_every_clipper_steps_and_its_state_survives_a_round(
    name: str, kind: str, tmp_path: Path
) -> None:
    optimizer = Optimizer(lr=0.1, modules=[(name, PARAMETERS.get(name, {}))])
    for seed in range(3):
        optimizer.step(*vectors(kind, seed))
    # A node writes the state to a file, and reads it when the next round starts.
    path = str(tmp_path / "state.mpk")
    Serializer.dump(optimizer.get_state(), path=path)
    resumed = Optimizer.load_state(Serializer.load(path))
    gradient, weights = vectors(kind, 3)
    expected, found = optimizer.step(gradient, weights), resumed.step(gradient, weights)
    for key, value in expected.coefs.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(found.coefs[key]))


class Plan(TorchTrainingPlan):  # type: ignore[misc]
    def init_model(self, model_args: Any) -> Any:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    def init_optimizer(self, optimizer_args: Any) -> Any:
        return Optimizer(lr=optimizer_args["lr"], modules=[("norm-clip", {"max_norm": 1.0})])

    def init_dependencies(self) -> list[str]:
        return ["import fedclip", "from fedbiomed.common.optimizers import Optimizer"]

    def training_data(self) -> Any:
        return None

    def training_step(self, data: Any, target: Any) -> Any:
        return torch.nn.functional.mse_loss(self.model()(data), target)


def test_a_training_plan_clips_each_step(tmp_path: Path) -> None:
    plan = Plan()
    given: Any = {"loader_args": {"batch_size": 8}, "optimizer_args": {"lr": 1.0}}
    given |= {"num_updates": 1, "log_interval": 1}
    arguments = TrainingArgs(given, only_required=False)
    plan.post_init(model_args={}, training_args=arguments)
    rng = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        1000.0 * torch.randn(8, 3, generator=rng), torch.randn(8, 1, generator=rng)
    )
    plan.set_data_loaders(PytorchDataLoader(data, batch_size=8), None)
    before = {k: v.clone() for k, v in plan.after_training_params().items()}
    plan.training_routine(None, None)
    after = plan.after_training_params()
    moved = sum(float(((after[k] - before[k]).double() ** 2).sum()) for k in before) ** 0.5
    assert 0.999 < moved <= 1.0 + 1e-6
    # The file that a node runs has the import.
    plan.save_code(str(tmp_path / "plan.py"))
    assert "import fedclip" in (tmp_path / "plan.py").read_text(encoding="utf-8")


def test_with_declearn_28_what_needs_29_says_so() -> None:
    assert importlib.metadata.version("declearn").startswith("2.8")
    for name in ("PersonalFederatedClient", "PrivateFederatedClient"):
        with pytest.raises(ImportError, match=rf"{name} needs declearn>=2.9.1,<2.10, and declearn"):
            getattr(fedclip, name)
    for words, code in ((["check", "x.toml"], 1), (["list"], 0), (["doctor"], 0)):
        options: Any = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([sys.executable, "-Wignore", "-m", "fedclip", *words], **options)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        told = (done.stdout + done.stderr).count("needs declearn>=2.9.1,<2.10")
        assert told == (words != ["list"])
