"""Products of a network's Jacobian, and the same by reverse mode, one output at a time."""

import copy

import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network, default_forward
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters


def linear_model(model, selection=None, forward_fn=None, class_dim=-1):
    network = Network(model, forward_fn, class_dim)
    names = select_parameters(network.module, selection)
    return LinearModel(network, ParameterLayout.of(network.module, names))


def products(linear, x, w, u):
    """Return f, J w and Jᵀ u of one batch."""
    total = torch.zeros(len(u), linear.layout.size, dtype=w.dtype)
    with linear.network.guarded():
        rows = linear.at(x, len(w))
        Jw = rows.push(w)
        f = rows.f
        rows.pull(u, total)
    assert not (f.requires_grad or Jw.requires_grad or total.requires_grad)
    return f, Jw, total


def plain_products(model, names, forward, w, u):
    """Return f, J w and Jᵀ u from the rows of J, each by one backward pass of the model."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    chosen = [dict(model.named_parameters())[name].requires_grad_() for name in names]
    f = forward(model)
    Jw, total = torch.zeros(len(w), f.numel()).to(f), torch.zeros(len(u), w.shape[1]).to(f)
    for i, output in enumerate(f.reshape(-1)):
        grads = torch.autograd.grad(output, chosen, retain_graph=True, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(grads, chosen)]
        row = torch.cat([g.reshape(-1) for g in dense])
        Jw[:, i] = w @ row
        total += u.flatten(1)[:, i : i + 1] * row
    return f.detach(), Jw.view(len(w), *f.shape), total


def check(model, x, selection=None, forward_fn=None, class_dim=-1, rtol=1e-7):
    """Compare one and three columns with reverse mode; return the report of the probe."""
    linear = linear_model(model, selection, forward_fn, class_dim)
    module, names = linear.network.module, linear.layout.names
    before, random_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    modes = [layer.training for layer in module.modules()]
    report = linear.probe(x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [layer.training for layer in module.modules()] == modes

    def forward(module):
        return (forward_fn or default_forward)(module, x).movedim(class_dim, -1)

    generator = torch.Generator().manual_seed(1)
    with linear.network.guarded():
        outputs = linear.outputs(x)
    w = torch.randn(3, linear.layout.size, generator=generator, dtype=torch.float64)
    u = torch.randn(3, *outputs.shape, generator=generator, dtype=torch.float64)
    expected = plain_products(module, names, forward, w, u)
    for columns in (1, 3):
        f, Jw, total = products(linear, x, w[:columns], u[:columns])
        assert_close(f, outputs)
        assert_close(f, expected[0], rtol=rtol, atol=rtol)
        assert_close(Jw, expected[1][:columns], rtol=rtol, atol=rtol)
        assert_close(total, expected[2][:columns], rtol=rtol, atol=rtol)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert report.adjoint_error < rtol
    return report


def mlp(*extra):
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), *extra
    return nn.Sequential(*layers).double()


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def prepared(model):
    """Return the model in double precision, with other weights and statistics than at the start."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in model.double().state_dict().items():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) / 3
            tensor.copy_(1 + drawn.abs() if name.endswith(("var", "norm.weight")) else drawn)
    return model.eval()


class Calls(nn.Module):
    """Layers a, b, ..., called by a function."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.call = forward

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)
