"""The server, which is declearn's own: python server.py CONFIG."""

import sys

import numpy as np
from declearn.communication import NetworkServerConfig
from declearn.main import FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.utils import set_device_policy
from model import model

import fedclip  # noqa: F401  (registers sample-clip)

config = sys.argv[1]
set_device_policy(gpu=False)
server = FederatedServer(
    model,
    NetworkServerConfig.from_toml(config, False, "network"),
    FLOptimConfig.from_toml(config, False, "optim"),
)
server.run(FLRunConfig.from_toml(config, False, "run"))

# The weights of the last round. (Those that declearn keeps as the best are chosen by losses,
# which have no noise.)
test = np.load("test.npz")
digits, scores, _ = model.compute_batch_predictions((test["pixels"], test["digits"], None))
print(f"accuracy {(scores.argmax(1) == digits).mean():.3f}")
