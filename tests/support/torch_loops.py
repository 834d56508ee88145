"""A small model of torch, its backward pass, and the norm of its gradients."""

import torch


def build(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def backward(model, scale=100.0, **options):
    loss = (scale * model(torch.ones(3, 5))).square().sum()
    loss.backward(**options)
    return loss


def total(model):
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).detach().double().norm()) if gradients else 0.0


def closure_of(model, optimizer, norms=None):
    """Return a closure that notes the norm of each gradient."""

    def closure():
        optimizer.zero_grad()
        loss = backward(model)
        if norms is not None:
            norms.append(total(model))
        return loss

    return closure
