"""The model: a PyTorch network with one hidden layer, as large as columns.toml says."""

import tomllib
from pathlib import Path

import torch
from declearn.model.torch import TorchModel

columns = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf-8"))
inputs = len(columns["number"]) + sum(map(len, columns["text"].values()))

torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, len(columns["classes"]))
)
model = TorchModel(network, loss=torch.nn.CrossEntropyLoss())
