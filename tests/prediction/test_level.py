"""The temperature of a last layer, from a posterior of all parameters."""

import copy

import models
import pytest
import torch
from torch import nn

from torch_lla_em import Adapter, LinearisedLaplace
from torch_lla_em.prediction.level import at_level


def windows(n, seed=0):
    """Windows of four tokens, whose most frequent kind is the label, four of ten times at random."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(12, (n, 4), generator=g)
    y = (x // 6).float().mean(1).round().long()
    wrong = torch.rand(n, generator=g) < 0.4
    return x, torch.where(wrong, torch.randint(2, (n,), generator=g), y)


@pytest.fixture(scope="module")
def memorised():
    """A network for tokens that has memorised its labels."""
    x, y = windows(60)
    torch.manual_seed(0)
    body = nn.Embedding(12, 6), nn.Flatten(), nn.Linear(24, 24), nn.Tanh()
    return models.trained(nn.Sequential(*body, nn.Linear(24, 2)).double(), x, y, 150), x, y


def fit(model, x, y, num_samples=8, parameters="last_layer", validation=None, **options):
    la = LinearisedLaplace(
        model, "classification", num_samples=num_samples, parameters=parameters, **options
    )
    return la.fit(x, y, progress_bar=False, validation=validation)


def nll(la, x, y):
    return -la.predict(x).log_prob(y).mean().item()


def temperature(la):
    return 1 / la.mixture[0, 1].item()


def test_training_labels_are_as_certain_as_under_all_parameters(memorised):
    model, x, y = memorised
    la, whole = fit(model, x, y), fit(model, x, y, num_samples=4, parameters=None)
    own = fit(model, x, y, validation=False)
    assert nll(own, x, y) < 0.5 * nll(la, x, y)
    assert nll(la, x, y) == pytest.approx(nll(whole, x, y), rel=1e-6)
    new = windows(500, seed=1)
    assert nll(la, *new) < 0.8 * nll(own, *new)
    a = 1 / temperature(la)
    torch.testing.assert_close(la.mixture, own.mixture * torch.tensor([1.0, a, a, a * a]).double())
    assert any(f"a temperature of {1 / a:.3g}" in words for words in la.messages)
    assert la.calibration is None


def test_every_logit_has_the_temperature(memorised):
    model, x, y = memorised
    la, own = fit(model, x, y), fit(model, x, y, validation=False)
    T, (new, _) = temperature(la), windows(50, seed=2)
    for mean in ("network", "linear"):
        found, expected = (one.predict(new, mean=mean) for one in (la, own))
        torch.testing.assert_close(found.samples, expected.samples / T)


@pytest.mark.parametrize("way", ["order", "batches", "targets", "units"])
def test_the_form_of_the_data_does_not_matter(memorised, way):
    model, x, y = memorised
    order, options = torch.randperm(len(x)), {}
    given = {
        "order": [(x[order], y[order])],
        "batches": list(zip(x.split(7), y.split(7), strict=True)),
        "targets": [(x, {"label": y})],
        "units": [(x, y)],
    }[way]
    if way == "targets":
        options["adapter"] = Adapter(targets=lambda batch: batch[1]["label"])
    if way == "units":  # features times ten, and weights that make up for it
        model = copy.deepcopy(model)
        with torch.no_grad():
            model[-1].weight.mul_(0.1)
        model = nn.Sequential(*model[:-1], Times(10.0), model[-1])
    la = LinearisedLaplace(
        model, "classification", num_samples=8, parameters="last_layer", **options
    )
    la.fit(given, progress_bar=False)
    expected = temperature(fit(*memorised))
    assert temperature(la) == pytest.approx(expected, rel=0.1 if way != "targets" else 1e-6)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_validation_files_and_calibrate(memorised, tmp_path):
    model, x, y = memorised
    la, held_out = fit(model, x, y), windows(200, seed=3)
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", model)
    assert torch.equal(again(x), la(x))
    fresh = fit(model, x, y, validation=False).calibrate(*held_out)
    assert torch.equal(la.calibrate(*held_out)(x), fresh(x))  # which replaces the temperature


def test_what_is_left_as_fitted(memorised):
    model, x, y = memorised
    plain = fit(model, x, y, validation=False)
    for why, la in {
        "only 12 examples": fit(model, x[:12], y[:12]),
        "require gradients": fit(frozen(model), x, y),
        "no better than chance": at(plain, lambda part: worse(plain)),
    }.items():
        words = la if isinstance(la, str) else " ".join(la.messages)
        assert why in words
        assert "la.calibrate(validation_loader)" in words
    sure = at_level(plain.posterior, [(x, y)], lambda part: plain.posterior)
    assert sure is plain.posterior  # where all parameters are as certain


def test_a_frozen_backbone_costs_no_pass_over_the_data(memorised, monkeypatch):
    model, x, y = memorised

    def read(*_, **__):
        raise AssertionError("all examples are read")

    monkeypatch.setattr("torch_lla_em.prediction.level.labelled_examples", read)
    assert any("require gradients" in words for words in fit(frozen(model), x, y).messages)


def frozen(model):
    model = copy.deepcopy(model)
    model[:-1].requires_grad_(False)
    return model


def worse(la):
    """A posterior that is certain of wrong labels."""
    table = la.mixture.clone()
    table[:, 1:3] *= -5
    return la.posterior.corrected(la.posterior.correction._replace(table=table))


def at(la, fit_all):
    x, y = windows(60)
    with pytest.raises(ValueError) as caught:
        at_level(la.posterior, [(x, y)], fit_all)
    return str(caught.value)


def test_weights_and_several_labels_stay_as_they_were(memorised):
    model, x, y = memorised
    la = LinearisedLaplace(model, "classification", num_samples=4, parameters="last_layer")
    la.fit(x, y, progress_bar=False, weights=torch.ones(60))
    assert any("no real numbers" in words for words in la.messages)
    sites = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    la = fit(sites, x, (x > 5).long())
    assert any("several labels" in words for words in la.messages)


@pytest.mark.cuda
def test_a_temperature_on_a_gpu(memorised):
    model, x, y = memorised
    la = fit(copy.deepcopy(model).cuda(), x.cuda(), y.cuda())
    assert la.mixture.is_cuda
    assert temperature(la) == pytest.approx(temperature(fit(model, x, y)), rel=0.1)
