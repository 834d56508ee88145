"""The model that all train: one hidden layer, over the 64 pixels of a digit."""

import torch
from declearn.model.torch import TorchModel

layers = (torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model = TorchModel(torch.nn.Sequential(*layers), torch.nn.CrossEntropyLoss())
