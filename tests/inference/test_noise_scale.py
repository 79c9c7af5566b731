"""A regression is the same in all units of its targets, and whatever their mean."""

import pytest
import torch
from daily import daily
from direct import Direct
from torch import nn
from torch.testing import assert_close

from torch_lla_em import BlockCG, Compute, LinearisedLaplace, Regression

NOISE = 0.4


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
    for value, expected in zip(found[:-1], known[:-1]):
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
    la = LinearisedLaplace(model, Regression(0.1), num_samples=2)
    la.fit(x, y + 5, weights=weights, progress_bar=False, prior_precision=1e15, em_steps=0)
    mean = la.predict(x[:1], mean="linear").f_mean.item()
    assert mean == pytest.approx(5 + (weights * y[:, 0]).sum().item() / 100, abs=1e-6)


def test_few_targets_have_no_mean_of_their_own():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 40), torch.randn(4, 2), torch.randn(4, 40)
    la = LinearisedLaplace(model, Regression(1.0), num_samples=2)
    la.fit(x, y, prior_precision=1e8, progress_bar=False, em_steps=0)
    assert la.predict(x, mean="linear").f_mean.abs().max() < 1e-3
