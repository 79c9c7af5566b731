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


def in_units(unit, dtype, outputs=1, sigma_noise=None, weighted=False, em_steps=20, **options):
    """Return σ, γ, certificates, predictions and their deviations of a fit, in units of 1."""
    model, x, y = trained(outputs)
    unit = torch.as_tensor(unit, dtype=torch.float64)
    model, x, y = InUnits(model, unit).to(dtype), x.to(dtype), (unit * y).to(dtype)
    sigma = None if sigma_noise is None else (unit * sigma_noise).squeeze()
    options = {"likelihood": Regression(sigma), **options}
    la = LinearisedLaplace(model, num_samples=8, **options)
    fit = {"weights": torch.ones(100) if weighted else None, "em_steps": em_steps}
    la.fit(x, y, progress_bar=False, **fit)
    mean, variance = la(x)
    found = la.sigma_noise / unit, la.effective_dim.sum(), mean / unit, variance.sqrt() / unit
    return [*(part.double() for part in found), la.certificate.double()], la.messages[1:]


KINDS = {
    "default": {},
    "plain prior": {"prior": "isotropic"},
    "krylov": {"compute": Compute(span_memory=1e6)},
    "cg": {"compute": Compute(solver=BlockCG())},
    "function space": {"compute": Compute(solver=Direct())},
    # later the precision of a tensor without effect grows to its bound, where rounding decides
    "layerwise": {"prior": "layerwise", "em_steps": 8, "compute": Compute(solver=Direct())},
    "sigma": {"sigma_noise": 0.1},
    "weights": {"sigma_noise": 0.1, "weighted": True},
}
SHARP = [("default", 1e5, torch.float32), ("weights", 1e4, torch.float64)]
UNITS = (1e-6, torch.float32), (30.0, torch.float64), (1e7, torch.float32)
KINDS_UNITS = [(kind, *unit) for kind in KINDS for unit in UNITS]


@pytest.mark.parametrize(("kind", "unit", "dtype"), daily(*SHARP, rest=KINDS_UNITS))
def test_results_do_not_depend_on_the_units_of_the_targets(kind, unit, dtype):
    found, messages = in_units(unit, dtype, **KINDS[kind])
    known, known_messages = in_units(1.0, torch.float64, **KINDS[kind])
    # λ, σ and γ of fits that round differently agree within what counts as converged
    for value, expected in zip(found[:-1], known[:-1]):
        assert_close(value, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    assert (found[-1] < known[-1] + 0.2).all()
    assert len(messages) == len(known_messages)


def shifted(shift, dtype=torch.float64, outputs=1, likelihood="regression", save=None, **options):
    """Return γ, σ, predictions less the shift and their variances of a fit to targets that are shifted."""
    model, x, y = trained(outputs)
    shift, em_steps = torch.as_tensor(shift, dtype=torch.float64), options.pop("em_steps", 20)
    weights = torch.linspace(0.5, 1.5, 100) if options.pop("weighted", False) else None
    of_outputs = shift
    if likelihood == "heteroscedastic":
        of_outputs = torch.cat([shift.expand(outputs), torch.zeros(outputs)])
        model[2].bias.data = torch.cat([model[2].bias.data, torch.full((outputs,), -4.0)])
        model[2].weight.data = torch.cat([model[2].weight.data, 0 * model[2].weight.data])
    model, x, y = InUnits(model, 1.0, of_outputs).to(dtype), x.to(dtype), (y + shift).to(dtype)
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options)
    la.fit(x, y, progress_bar=False, weights=weights, em_steps=em_steps)
    if save is not None:
        la.save(save)
        la = LinearisedLaplace.load(save, model)
    linear, (mean, variance) = la.predict(x, mean="linear").expectation, la(x)
    sigma = torch.zeros(1) if la.sigma_noise is None else la.sigma_noise
    found = la.effective_dim.sum(), sigma, linear - shift, mean - shift, variance
    return [part.double() for part in found]


SHIFTS = [
    (kind, shift, dtype)
    for kind in KINDS
    for shift, dtype in ((-3.0, torch.float32), (1e2, torch.float32), (1e6, torch.float64))
]
SHARP_SHIFTS = [("default", 1e6, torch.float64), ("weights", 1e2, torch.float32)]


@pytest.mark.parametrize(("kind", "shift", "dtype"), daily(*SHARP_SHIFTS, rest=SHIFTS))
def test_results_do_not_depend_on_the_mean_of_the_targets(kind, shift, dtype):
    options = dict(KINDS[kind])
    if "sigma_noise" in options:
        options["likelihood"] = Regression(options.pop("sigma_noise"))
    found, known = shifted(shift, dtype, **options), shifted(0.0, **options)
    for value, expected in zip(found, known):
        assert_close(value, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["regression", "heteroscedastic", "a noise per output"])
def test_every_output_has_its_own_mean_also_when_loaded(kind, tmp_path):
    options = {"outputs": 2, "likelihood": kind}
    if kind == "a noise per output":  # random probes are drawn again when σ changes
        sigma = torch.tensor([0.1, 0.2]).double()
        options |= {
            "likelihood": Regression(sigma),
            "compute": Compute(tolerance=1e-4),
        }
        options |= {"em_steps": 4}
    known = shifted(0.0, **options)
    found = shifted([-1e3, 20.0], save=tmp_path / "la.pt", **options)
    for value, expected in zip(found, known):
        assert_close(value, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_the_constant_of_the_linear_model_is_the_weighted_mean_of_the_targets():
    model, x, y = trained()
    weights = torch.linspace(0.0, 2.0, 100).double()
    la = LinearisedLaplace(model, Regression(0.1), num_samples=2)
    la.fit(x, y + 5, weights=weights, progress_bar=False, prior_precision=1e15, em_steps=0)
    mean = la.predict(x[:1], mean="linear").mean.item()
    assert mean == pytest.approx(5 + (weights * y[:, 0]).sum().item() / 100, abs=1e-6)


def test_few_targets_have_no_mean_of_their_own():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 40), torch.randn(4, 2), torch.randn(4, 40)
    la = LinearisedLaplace(model, Regression(1.0), num_samples=2)
    la.fit(x, y, prior_precision=1e8, progress_bar=False, em_steps=0)
    assert la.predict(x, mean="linear").mean.abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_may_have_different_units(dtype):
    options = {"outputs": 2, "sigma_noise": torch.full((2,), 0.1).double()}
    found, _ = in_units([1e-3, 1e4], dtype, **options)
    known, _ = in_units([1.0, 1.0], torch.float64, **options)
    for value, expected in zip(found[:-1], known[:-1]):
        assert_close(value, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_a_prior_that_is_too_narrow_counts_as_converged_only_without_signal():
    model, x, y = trained()
    options = {"prior_precision": 1e11, "progress_bar": False, "em_steps": 2}
    la = LinearisedLaplace(model, Regression(0.1), num_samples=8)
    la.fit(x, y, weights=torch.ones(100), **options)
    assert la.effective_dim < 1e-2
    assert "not converged after 2 EM steps" in "".join(la.messages)
    assert "determine hardly any" in "".join(la.messages)
    torch.manual_seed(0)
    la.fit(x, 0.1 * torch.randn(100, 1).double(), weights=torch.ones(100), **options)
    assert "not converged" not in "".join(la.messages)


def test_a_lost_signal_is_not_called_overfitting():
    model, x, y = trained()
    la = LinearisedLaplace(model, "regression", num_samples=8)
    la.fit(x, y, em_steps=1, prior_precision=1e9, progress_bar=False)
    assert "determine hardly any" in "".join(la.messages)
    assert "overfitted" not in "".join(la.messages)


def scaled(scale, dtype, outputs=1, offset=0.0):
    """A network whose outputs have this scale, inputs, and targets around its outputs."""
    torch.manual_seed(0)
    x = torch.randn(400, 3).double()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[2].bias.mul_(scale).add_(offset * scale)
        y = model(x) + NOISE * scale * torch.randn(400, outputs).double()
    return model.to(dtype), x.to(dtype), y.to(dtype)


def learnt(model, x, y, sigma=None, **options):
    options = {"likelihood": Regression(sigma), **options}
    return LinearisedLaplace(model, **options).fit(x, y, progress_bar=False).sigma_noise


OPTIONS = (
    {},
    {"compute": Compute(solver=BlockCG())},
    {"sigma": 1.0},
    {"prior": "isotropic"},
    {"prior": "layerwise"},
)
SCALES = (1e-6, torch.float32), (5e-4, torch.float64), (1e6, torch.float32)
EVERY_SCALE = [(options, *SCALES[i % 3]) for i, options in enumerate(OPTIONS)]


@pytest.mark.parametrize("options, scale, dtype", EVERY_SCALE, ids=str)
def test_sigma_follows_the_scale_of_the_targets(scale, dtype, options):
    sigma = learnt(*scaled(scale, dtype), **options)
    # 400 residuals know their standard deviation to 1 / sqrt(800)
    assert abs(sigma.item() / scale / NOISE - 1) < 5 / 800**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_sigma_of_every_output_follows_its_scale(scale, dtype):
    sigma = learnt(*scaled(scale, dtype, outputs=2), sigma=torch.ones(2))
    assert ((sigma / scale / NOISE - 1).abs() < 5 / 800**0.5).all()


def test_residuals_are_not_lost_beside_a_large_mean():
    sigma = learnt(*scaled(1.0, torch.float64, offset=1e5))
    assert abs(sigma.item() / NOISE - 1) < 5 / 800**0.5


def test_sigma_starts_from_the_residuals_of_the_network():
    model, x, y = scaled(1e-3, torch.float64)
    la = LinearisedLaplace(model, "regression")
    la.fit([(x[:150], y[:150]), (x[150:], y[150:])], em_steps=0, prior_precision=1.0)
    residuals = (y - model(x)).detach().square().mean().sqrt()
    torch.testing.assert_close(la.sigma_noise.item(), residuals.item())
