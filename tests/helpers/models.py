"""Networks that several test files use."""

from itertools import pairwise

import pytest
import torch
from torch import nn


def network(*widths):
    """Linear layers with tanh between them."""
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def small_cnn():
    torch.manual_seed(0)
    head = nn.Linear(4 * 9, 3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), head)


def images(n=40):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 8, 8, generator=generator)
    return [(x, torch.randint(0, 3, (n,), generator=generator))]


def trained(model, x, y, steps, rate=0.02, loss=nn.functional.cross_entropy):
    """Return the model after so many steps of Adam on all examples at once."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


def gaussian_nll(f, y):
    """The loss of a network that predicts means and log variances."""
    mean, log_variance = f.chunk(2, -1)
    return nn.functional.gaussian_nll_loss(mean, y, log_variance.exp())


class Centred(nn.Sequential):
    """A network whose examples influence each other: their mean is subtracted."""

    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(0)


class Bent(nn.Module):
    """A network with finite outputs but no derivative at inputs of 0, in one mode or both."""

    def __init__(self, net, backwards_only=False):
        super().__init__()
        self.net, self.weight = net, nn.Parameter(torch.ones(3).double())
        self.backwards_only = backwards_only

    def forward(self, x):
        z = x[:, :1] * self.weight
        root = z.abs().sqrt()
        if self.backwards_only:
            # forward mode takes the other branch, reverse mode 0 times infinity
            root = torch.where(z > 0, root, 0.0 * z)
        return self.net(x) + torch.where(x[:, :1] == 0, root, 0.0)  # 0 for other inputs


def of_onnx(path):
    """An exported program as a function of tensors, run by onnxruntime, and the names of its inputs and outputs."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [[each.name for each in of()] for of in (session.get_inputs, session.get_outputs)]

    def program(x):
        x = x if isinstance(x, tuple) else (x,)
        values = session.run(None, dict(zip(names[0], (part.numpy() for part in x), strict=True)))
        return dict(zip(names[1], map(torch.tensor, values), strict=True))

    return program, *names
