"""Fits depend neither on units and means of the data nor on how layers split a factor."""

import copy
import math

import pytest
import torch
from daily import daily
from direct import Direct
from tiny import draw, posterior_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import BlockCG, Compute, LinearisedLaplace, Regression

TARGETS = {
    "regression": lambda f: f + 0.1 * draw(*f.shape, seed=3),
    "classification": lambda f: f.argmax(1),
    "bernoulli": lambda f: (f > 0).double(),
    "poisson": lambda f: (3 * f).exp().round(),
    "heteroscedastic": lambda f: f[:, :1] + 0.1 * draw(len(f), 1, seed=3),
}


def fit_of(model, likelihood, x, y, **options):
    la = posterior_of(model, likelihood, x, y, num_samples=8, **options)
    mean, deviations = la.predict(x).f_mean, la.functional_samples(x) - la.predict(x).f_mean
    return la, mean, deviations


@pytest.mark.parametrize(
    "likelihood, curvature",
    [*((name, None) for name in TARGETS), ("classification", "network"), ("poisson", "network")],
)
def test_a_factor_moves_from_one_layer_to_the_next(likelihood, curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    model, x = model.double(), draw(40, 3)
    model[2].bias.data.zero_()
    y = TARGETS[likelihood](model(x).detach())
    moved = copy.deepcopy(model)
    for layer, factor in ((0, 50.0), (2, 0.002), (4, 10.0)):
        moved[layer].weight.data *= factor
    moved[0].bias.data *= 50
    moved[2].bias.data *= 0.1
    assert_close(moved(x), model(x))
    known, found = (fit_of(each, likelihood, x, y, curvature=curvature) for each in (model, moved))
    assert_same(known, found)


def in_units(model, columns, rows):
    """The same function of inputs and outputs in other units, as if it had been trained in them."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.div_(columns)
        other[2].weight.mul_(rows[:, None])
        other[2].bias.mul_(rows)
    return other


def assert_same(known, found, unit=1.0):
    for name in ("prior_precision", "effective_dim"):
        assert_close(getattr(found[0], name), getattr(known[0], name), rtol=1e-4, atol=0)
    for value, expected in zip(found[1:], known[1:], strict=True):
        atol = 1e-4 * expected.abs().max().item()
        assert_close(value / unit, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("column, row", [(1e3, 1.0), (1e-4, 1.0), (1.0, 1e3), (1e5, 1e-3)])
def test_single_columns_and_outputs_have_other_units(column, row):
    """The σ from which EM starts has no unit then, and the prior must not take it for one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), draw(60, 3)
    y, ones = TARGETS["regression"](model(x).detach()), torch.ones(2).double()
    columns, rows = x.new_tensor([1.0, 1.0, column]), x.new_tensor([1.0, row])
    known = fit_of(model, Regression(ones), x, y)
    found = fit_of(in_units(model, columns, rows), Regression(ones), x * columns, y * rows)
    # EM ends after another number of steps, since it starts elsewhere
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=0.02, atol=0)
    assert_close(found[1] / rows, known[1], rtol=0, atol=0.01)
    assert_close(found[0].sigma_noise / rows, known[0].sigma_noise, rtol=0.02, atol=0)


@pytest.mark.parametrize("unit", [1e-3, 1e5])
def test_a_heteroscedastic_network_has_learnt_another_unit(unit):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), draw(60, 3)
    y = TARGETS["heteroscedastic"](model(x).detach())
    other = in_units(model, torch.ones(3), x.new_tensor([unit, 1.0]))
    other[2].bias.data[1] += 2 * math.log(unit)
    known = fit_of(model, "heteroscedastic", x, y)
    found = fit_of(other, "heteroscedastic", x, unit * y)
    assert_close(found[0].effective_dim, known[0].effective_dim, rtol=0.02, atol=0)
    size = known[1][:, 0].std().item()
    assert_close(found[1][:, 0] / unit, known[1][:, 0], rtol=0, atol=0.02 * size)


LAYERS = [(1e3, 1.0), (1e-3, 1.0), (1.0, 1e-6), (1.0, 1e12)]
LAYERS = [(*units, torch.float32, None) for units in LAYERS]
LAYERS += [(1.0, u, torch.float64, s) for u in (1e-6, 1e5) for s in (None, torch.full((2,), 0.1))]


@pytest.mark.parametrize("factor, unit, dtype, sigma", LAYERS)
def test_layers_have_learnt_other_units(factor, unit, dtype, sigma):
    """Rows between two layers, and outputs: each tensor rounds on its scale."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype), draw(60, 3)
    y, x = TARGETS["regression"](model(x.to(dtype)).detach()).to(dtype), x.to(dtype)
    other, sigma = copy.deepcopy(model), (sigma, None if sigma is None else unit * sigma)
    for layer, scale in ((0, factor), (2, unit)):
        other[layer].weight.data *= scale
        other[layer].bias.data *= scale
    other[2].weight.data /= factor
    known = fit_of(model, Regression(sigma[0]), x, y)
    found = fit_of(other, Regression(sigma[1]), x, unit * y)
    assert ((found[0].scale == 0) == (known[0].scale == 0)).all()
    if dtype == torch.float64:
        assert_same(known, found, unit)
        assert_close(found[0].sigma_noise / unit, known[0].sigma_noise, rtol=1e-4, atol=0)
    else:
        assert_close(found[0].effective_dim, known[0].effective_dim, rtol=1e-3, atol=0)
        assert_close(found[1] / unit, known[1], rtol=0, atol=1e-3)


def test_a_tensor_of_rounding_alone_is_left_out():
    """The bias of keys moves no output, since softmax is invariant; what rounding leaves of it is not scaled up."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            scores = self.query(x) @ self.key(x).mT
            return self.head((scores.softmax(-1) @ self.value(x)).mean(1))

    torch.manual_seed(0)
    x = draw(40, 5, 4).float()
    model = Attention()
    la = fit_of(model, "regression", x, TARGETS["regression"](model(x).detach()))[0]
    scales = la.scale.split([p.numel() for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    left_out = [n for n, scale in zip(names, scales, strict=True) if (scale == 0).all()]
    assert left_out == ["key.bias"]


# of networks whose outputs are given in other units and around another mean


class InUnits(nn.Module):
    """A network whose outputs are given in other units, so that all derivatives have them too."""

    def __init__(self, model, unit, shift=0.0):
        super().__init__()
        self.model, self.unit, self.shift = model, torch.as_tensor(unit), torch.as_tensor(shift)

    def forward(self, x):
        return self.model(x) * self.unit.to(x) + self.shift.to(x)


def trained(outputs=1):
    """A network with little noise in its targets, trained by its last layer; inputs and targets."""
    torch.manual_seed(1)
    x = 1.5 * torch.randn(100, 2).double()
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, outputs)).double()
    y = torch.sin(x @ torch.randn(2, outputs).double()) + 0.05 * torch.randn(100, outputs).double()
    with torch.no_grad():
        features = torch.cat([model[:2](x), torch.ones(100, 1).double()], 1)
        solution = torch.linalg.lstsq(features, y - y.mean(0)).solution
        model[2].weight.copy_(solution[:-1].T)
        model[2].bias.copy_(solution[-1])
    return model, x, y - y.mean(0)


def moved(unit=1.0, shift=0.0, dtype=torch.float64, *, outputs=1, sigma=None, save=None, **options):
    """Return σ or log variances, γ, predictions around both functions and variances, less the shift in units of 1, and
    certificates; and how many messages there were."""
    model, x, y = trained(outputs)
    unit, shift = (torch.as_tensor(part, dtype=torch.float64) for part in (unit, shift))
    likelihood, of_outputs = options.pop("likelihood", None), shift
    if likelihood == "heteroscedastic":
        of_outputs = torch.cat([shift.expand(outputs), torch.zeros(outputs)])
        model[2].bias.data = torch.cat([model[2].bias.data, torch.full((outputs,), -4.0)])
        model[2].weight.data = torch.cat([model[2].weight.data, 0 * model[2].weight.data])
    model = InUnits(model, unit, of_outputs).to(dtype)
    sigma = None if sigma is None else (unit * torch.as_tensor(sigma)).squeeze()
    weights = torch.linspace(0.5, 1.5, 100) if options.pop("weighted", False) else None
    em_steps = options.pop("em_steps", 20)
    la = LinearisedLaplace(model, likelihood or Regression(sigma), num_samples=8, **options)
    data = x.to(dtype), (unit * y + shift).to(dtype)
    la.fit(*data, progress_bar=False, weights=weights, em_steps=em_steps)
    messages = len(la.messages)
    if save is not None:
        la.save(save)
        la = LinearisedLaplace.load(save, model)
    (mean, variance), linear = la(data[0]), la.predict(data[0], mean="linear").expectation
    if la.sigma_noise is None:
        noise = la.functional_samples(data[0])[..., outputs:] - 2 * unit.log()
    else:
        noise = la.sigma_noise / unit
    found = noise, la.effective_dim.sum(), (mean - shift) / unit, (linear - shift) / unit
    parts = [part.double() for part in (*found, variance.sqrt() / unit, la.certificate)]
    return parts, messages


def agree(found, known, rtol=0.02):
    """Within what counts as converged: fits may round differently."""
    (found, messages), (known, as_known) = found, known
    for value, expected in zip(found[:-1], known[:-1], strict=True):
        assert_close(value, expected, rtol=rtol, atol=rtol * expected.abs().max().item())
    assert (found[-1] < known[-1] + 0.2).all() and messages == as_known


KINDS = {
    "default": {},
    "plain prior": {"prior": "isotropic"},
    "krylov": {"compute": Compute(span_memory=1e6)},
    "cg": {"compute": Compute(solver=BlockCG())},
    "function space": {"compute": Compute(solver=Direct())},
    # later the precision of a tensor without effect grows to its bound, where rounding decides
    "layerwise": {"layerwise": True, "em_steps": 8, "compute": Compute(solver=Direct())},
    "sigma": {"sigma": 0.1},
    "weights": {"sigma": 0.1, "weighted": True},
}
SHARP = [
    ("default", 1e5, 0.0, torch.float32),
    ("default", 1.0, 1e6, torch.float64),
    ("weights", 1e4, 0.0, torch.float64),
    ("weights", 1.0, 1e2, torch.float32),
    ("plain prior", 1.0, 1e2, torch.float32),  # σ is not lost to rounding
]
REST = [(1e-6, 0.0, torch.float32), (30.0, 0.0, torch.float64), (1e7, 0.0, torch.float32)]
REST += [(1.0, -3.0, torch.float32), (1.0, 1e2, torch.float32), (1.0, 1e6, torch.float64)]


@pytest.mark.parametrize(
    ("kind", "unit", "shift", "dtype"),
    daily(*SHARP, rest=[(kind, *case) for kind in KINDS for case in REST]),
)
def test_results_depend_on_neither_unit_nor_mean_of_the_targets(kind, unit, shift, dtype):
    agree(moved(unit, shift, dtype, **KINDS[kind]), moved(**KINDS[kind]))


@pytest.mark.parametrize("kind", ["regression", "heteroscedastic", "a noise per output"])
def test_every_output_has_its_own_mean_also_when_loaded(kind, tmp_path):
    options = {"outputs": 2, "likelihood": kind}
    if kind == "a noise per output":  # random probes are drawn again when σ changes
        options = {"outputs": 2, "sigma": torch.tensor([0.1, 0.2]).double(), "em_steps": 4}
        options["compute"] = Compute(tolerance=1e-4)
    agree(moved(shift=[-1e3, 20.0], save=tmp_path / "la.pt", **options), moved(**options), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_may_have_different_units(dtype):
    options = {"outputs": 2, "sigma": torch.full((2,), 0.1).double()}
    agree(moved([1e-3, 1e4], dtype=dtype, **options), moved(**options))


def test_the_constant_of_the_linear_model_is_the_weighted_mean_of_the_targets():
    model, x, y = trained()
    weights = torch.linspace(0.0, 2.0, 100).double()
    la = posterior_of(model, Regression(0.1), x, y + 5, num_samples=2, weights=weights, at=1e15)
    mean = la.predict(x[:1], mean="linear").f_mean.item()
    assert mean == pytest.approx(5 + (weights * y[:, 0]).sum().item() / 100, abs=1e-6)


def test_few_targets_have_no_mean_of_their_own():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 40), torch.randn(4, 2), torch.randn(4, 40)
    la = posterior_of(model, Regression(1.0), x, y, num_samples=2, at=1e8)
    assert la.predict(x, mean="linear").f_mean.abs().max() < 1e-3
