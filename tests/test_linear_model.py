import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em.linear_model import LinearModel
from torch_lla_em.network import Network
from torch_lla_em.parameters import ParameterLayout, select_parameters


def dense_jacobian(model, layout, x):
    """J, shape (B, C, P), by plain reverse mode."""
    chosen = [dict(model.named_parameters())[name] for name in layout.names]
    f = model.eval()(x)
    rows = [torch.autograd.grad(output, chosen, retain_graph=True) for output in f.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]).unflatten(0, f.shape)


def test_products_equal_the_dense_jacobian():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    layout = ParameterLayout.of(model, select_parameters(model))
    linear = LinearModel(Network(model), layout)
    w, u = torch.randn(7, layout.size).double(), torch.randn(7, 5, 2).double()
    for columns in (1, 7):
        total = torch.zeros(columns, layout.size).double()
        with linear.network.guarded():
            _, Jw = linear.jvp(x, w[:columns])
            f, add_pullback = linear.vjp(x)
            add_pullback(u[:columns], total)
        J = dense_jacobian(model, layout, x)
        assert_close(Jw, torch.einsum("bcp,kp->kbc", J, w[:columns]))
        assert_close(total, torch.einsum("bcp,kbc->kp", J, u[:columns]))
        assert_close(f, model(x).detach())
