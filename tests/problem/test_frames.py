"""How much of the library lies between a solver and the network, inside of products."""

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_lla_em
from torch_lla_em import LinearisedLaplace

HERE = Path(torch_lla_em.__file__).parent


class Watching(nn.Module):
    """A network without factors, which notes the library's frames while torch.func differentiates it."""

    def __init__(self, outputs):
        super().__init__()
        self.inner, self.head = (
            nn.Parameter(torch.randn(16, 4)),
            nn.Parameter(torch.randn(outputs, 16)),
        )
        self.stacks = []

    def forward(self, x):
        if torch._C._functorch.peek_interpreter_stack() is not None:
            codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
            files = [Path(code.co_filename) for code in codes]
            own = zip(files, (code.co_name for code in codes))
            self.stacks.append([(f.name, name) for f, name in own if HERE in f.parents])
        return (x @ self.inner.sin().T).tanh() @ self.head.sin().T


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_few_frames_lie_between_a_product_and_the_network(likelihood):
    torch.manual_seed(0)
    x, y = torch.randn(200, 4), torch.arange(200) % 3
    network = Watching(3 if likelihood == "classification" else 1)
    y = y if likelihood == "classification" else y[:, None].float()
    la = LinearisedLaplace(network, likelihood, num_samples=4)
    la.fit(list(zip(x.split(100), y.split(100))), progress_bar=False)
    products = "ggn_product", "loss_and_gradient", "noise_features", "push_forward"
    names = [[name for _, name in stack] for stack in network.stacks]
    inside = [stack.index(p) for stack in names for p in products if p in stack]
    assert inside and max(inside) <= 7
    from_fit = [stack.index("fit") for stack in names if set(products) & set(stack)]
    assert max(from_fit) <= 12
