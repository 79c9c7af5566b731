"""Products of a network's Jacobian by both ways, and the same by reverse mode, one output at a time."""

import copy
from math import inf

import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.linearised import Linearised
from torch_lla_em.jacobian.network import Network, default_forward
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters


def linear_model(model, selection=None, forward_fn=None, class_dim=-1):
    network = Network(model, forward_fn, class_dim)
    names = select_parameters(network.module, selection)
    return LinearModel(network, ParameterLayout.of(network.module, names))


def products(linear, x, w, u):
    """Return f, J w and Jᵀ u of one batch."""
    with linear.network.guarded():
        rows = linear.at(x, len(w))
        Jw = rows.push(w)
        f = rows.f
        total = rows.pull(u).added_to(torch.zeros(len(u), linear.layout.size, dtype=w.dtype))
    assert not (f.requires_grad or Jw.requires_grad or total.requires_grad)
    return f, Jw, total


def dense(model, names, forward):
    """Return f, and J of all outputs, (f.numel(), P), each row by one backward pass of the model."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    chosen = [dict(model.named_parameters())[name].requires_grad_() for name in names]
    f, rows = forward(model), []
    if f.numel() > 400:  # of layers without functions of a user's own
        units = torch.eye(f.numel()).to(f)
        each = torch.autograd.grad(f.reshape(-1), chosen, units, is_grads_batched=True)
        return f.detach(), torch.cat([own.flatten(1) for own in each], 1).double()
    for output in f.reshape(-1):
        grads = torch.autograd.grad(output, chosen, retain_graph=True, allow_unused=True)
        pairs = zip(grads, chosen, strict=True)
        each = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs]
        rows.append(torch.cat([g.reshape(-1) for g in each]))
    return f.detach(), torch.stack(rows).double()


def check(model, x, selection=None, forward_fn=None, class_dim=-1, rtol=1e-7, defined=True):
    """Compare all ways with reverse mode, one column and three; return the report, and J by factors.

    ``defined``: torch.func supports all that a network with forward mode does.
    """
    linear = linear_model(model, selection, forward_fn, class_dim)
    module, names = linear.network.module, linear.layout.names
    before, random_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    modes = [layer.training for layer in module.modules()]
    flags = [p.requires_grad for p in module.parameters()]
    linear.probe(x)
    assert torch.equal(torch.get_rng_state(), random_state)
    forward = forward_fn or default_forward
    f, J = dense(module, names, lambda m: forward(m, x).movedim(class_dim, -1))
    generator, factors, near = torch.Generator().manual_seed(1), None, {"rtol": rtol, "atol": rtol}
    w = torch.randn(3, len(J[0]), generator=generator, dtype=torch.float64)
    u = torch.randn(3, *f.shape, generator=generator, dtype=torch.float64)
    with linear.network.guarded():
        ways = [model.by_autodiff(x) for model in (linear, linear.steady(x))]
        if linear.ways.forward and defined:
            ways.append(Linearised(linear.network, linear.layout, x))
        if linear.factored:
            factors = linear.at(x, inf, keep=True)
            ways.append(factors)
        for rows in ways:
            for columns in (1, 3):
                due = (w[:columns] @ J.T).view(-1, *f.shape)
                assert_close(rows.push(w[:columns]).double(), due, **near)
                total = rows.pull(u[:columns]).added_to(torch.zeros_like(w[:columns]))
                assert_close(total, u[:columns].flatten(1) @ J, **near)
            assert_close(rows.f, f, **near)
            squares, single = rows.row_squares(u), J.view(*f.flatten(1).shape, -1)
            each = torch.einsum("knd,ndp->knp", u.flatten(2), single).square().sum((0, 1))
            for name, block in linear.layout.unflatten(each).items():
                assert name not in squares or torch.allclose(squares[name].double(), block, **near)
            assert set(squares) == set(linear.factored if rows is factors else ())
            assert not any(own.any() for own in rows.row_squares(u[:0]).values())
            assert not (rows.f.requires_grad or total.requires_grad)
    assert [layer.training for layer in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == flags
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert linear.ways.adjoint_error < rtol
    return linear.ways, factors


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
