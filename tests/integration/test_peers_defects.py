"""What was measured to go wrong elsewhere, each with the right behaviour here.

One test for every row of the list of defects of laplace-torch 0.3, and its strengths.
"""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LinearisedLaplace, NotFittedError
from torch_lla_em.inference.prior import prior_precision_from_weight_decay


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))


def classes(count=43):
    x = draw(count, 2)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def fitted(model=None, likelihood="classification", data=None, **options):
    la = LinearisedLaplace(model or net(), likelihood, num_samples=8, **options)
    return la.fit([data or classes()], em_steps=3, progress_bar=False)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_the_generator_decides_every_draw():
    la, x = fitted(), draw(5, 2, seed=1)
    for call in (la, la.functional_samples, la.predictive_samples):
        assert_close(
            call(x, generator=generator(0)), call(x, generator=generator(0)), rtol=0, atol=0
        )
        assert not torch.equal(call(x, generator=generator(0)), call(x, generator=generator(1)))
    torch.manual_seed(0)
    first = la(x)
    torch.manual_seed(1)
    assert torch.equal(la(x), first)  # and without one nothing is random


def test_functions_share_their_weights_and_are_not_one_shift():
    la = fitted()
    x = torch.tensor([[0.0, 0.0], [3.0, -3.0], [-4.0, 1.0]])
    samples = la.functional_samples(x)[..., 0]
    correlation = samples.T.corrcoef()
    assert (correlation[~torch.eye(3, dtype=bool)].abs() < 0.999).all()
    twice = la.functional_samples(torch.cat([x, x]))  # the same weights at every input
    assert_close(twice[:, :3], twice[:, 3:])
    assert_close(twice[:, :1], la.functional_samples(x[:1]), rtol=1e-4, atol=1e-5)


def test_one_logit_is_no_classification():
    x, y = classes()
    with pytest.raises(ValueError, match='likelihood="bernoulli"'):
        fitted(net(1), data=(x, (y > 0).long()))
    probabilities = fitted(net(1), "bernoulli", (x, (y > 0).float()[:, None]))(x)
    assert (probabilities < 0.999).all()
    assert probabilities.std() > 0


def test_counts_are_a_likelihood():
    x, y = classes()
    la = fitted(net(1), "poisson", (x, y[:, None].float()))
    assert (la(x) > 0).all()


def test_pixels_need_their_class_axis_and_name_it():
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 3, 3, padding=1), draw(4, 1, 5, 5)
    y = (x[:, 0] > 0).long()
    la = fitted(model, data=(x, y), class_dim=1)
    assert la(x).shape == (4, 3, 5, 5)
    with pytest.raises(ValueError, match="classes last"):
        fitted(model, data=(x, y))


@pytest.mark.parametrize("solver_choice", ["scalar", "layerwise"])
def test_predicting_before_the_fit_says_what_to_call(solver_choice):
    la, x = LinearisedLaplace(net(), "classification", prior=solver_choice), draw(2, 2)
    calls = [
        lambda: la(x),
        lambda: la.predict(x),
        lambda: la.functional_samples(x),
        lambda: la.predictive_samples(x),
        lambda: la.function_sample(0),
        lambda: la.joint_log_prob(x, torch.zeros(2).long()),
        lambda: la.calibrate([classes()]),
        lambda: la.log_marginal_likelihood(),
        lambda: la.curve([1.0]),
        lambda: la.state_dict(),
    ]
    for call in calls:
        with pytest.raises(NotFittedError, match="la.fit"):
            call()


def test_rows_are_counted_not_assumed():
    loader = DataLoader(TensorDataset(*classes(43)), batch_size=8, drop_last=True)
    la = LinearisedLaplace(net(), "classification", num_samples=4)
    assert len(loader.dataset) == 43
    assert la.fit(loader, em_steps=1, progress_bar=False).num_data == 40


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("parameters", [None, ["*"]])
def test_normalisation_needs_no_rules(norm, parameters):
    model = net()
    model.insert(1, norm(6))
    la = fitted(model, parameters=parameters)
    random = any(name.startswith("1.") for name in la._linear_model.layout.names)
    assert random == (parameters is not None)
    assert torch.isfinite(la(draw(5, 2))).all()


def test_regression_returns_the_variance_of_y():
    x = draw(60, 2)
    y = 3 * draw(60, 1, seed=1)
    la = fitted(net(1), "regression", (x, y), sigma_noise=3.0)
    mean, variance = la(x)
    prediction = la.predict(x)
    assert (variance > 0.5 * 9).all()
    assert_close(variance, prediction.variance + la.sigma_noise.float() ** 2)
    assert_close(prediction.aleatoric, (la.sigma_noise.float() ** 2).expand(60, 1))
    assert (prediction.variance < variance).all()  # without the noise, on request


def test_noise_is_learnt_with_the_prior_precision():
    x = draw(80, 2)
    y = x[:, :1] + 0.3 * draw(80, 1, seed=1)
    la = LinearisedLaplace(net(1), "regression", sigma_noise=2.0, num_samples=16)
    la.fit([(x, y)], progress_bar=False)
    # σ² = |residual|² / (N − γ), up to the step at which EM stops
    residual = (y - la.predict(x, mean="linear").mean).square().mean().sqrt()
    most = 80 / (80 - la.effective_dim - 5 * la.effective_dim_error)
    assert 0.95 < (la.sigma_noise / residual).square() < 1.05 * most
    told = [record["sigma_noise"] for record in la.history]
    assert told[0] != told[-1]


def test_the_model_comes_back_as_it_was():
    model = net()
    model.insert(1, nn.Dropout())
    model[2].eval()  # modes that differ
    attributes = [dict(vars(layer)) for layer in model.modules()]
    state = copy.deepcopy(model.state_dict())
    la = fitted(model)
    la(draw(3, 2))
    assert model.training and not model[2].training
    assert [set(vars(layer)) for layer in model.modules()] == [set(a) for a in attributes]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_predictions_change_nothing_that_they_return():
    la, x = fitted(), draw(5, 2)
    prediction = la.predict(x)
    centre, deviations = prediction.centre.clone(), prediction.deviations.clone()
    for link in ("mc", "probit", "probit_shared"):
        la(x, link_approx=link)
    for name in ("mean", "variance", "samples", "probs", "log_probs", "entropy", "epistemic"):
        getattr(prediction, name)
    prediction.smoothed(), prediction.smoothed(shared=True), prediction.credible_interval()
    prediction.joint_log_prob(torch.zeros(5).long())
    assert torch.equal(prediction.centre, centre)
    assert torch.equal(prediction.deviations, deviations)
    assert torch.equal(la.predict(x).centre, centre)


def test_weight_decay_has_its_own_page_and_units():
    """Nothing is zeroed behind the user's back: decay is converted, by a function."""
    la = LinearisedLaplace(net(), "classification", g_prior=False, num_samples=4)
    precision = prior_precision_from_weight_decay(1e-2, 43)
    la.fit([classes()], em_steps=0, prior_precision=precision, progress_bar=False)
    assert la.prior_precision.item() == pytest.approx(0.43)


def test_memory_runs_are_recurrent_too():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    _, y = classes(20)
    la = fitted(Reader(), data=(draw(20, 4, 2), y))
    assert la(draw(5, 4, 2)).shape == (5, 3)


def test_encoders_run_and_pad():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.1)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    _, y = classes(12)
    assert fitted(Model(), data=(draw(12, 3, 4), y))(draw(2, 3, 4)).shape == (2, 3)


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    x, y = classes(20)
    assert fitted(Tied(), data=(draw(20, 3), y)).w_lin.numel() == 9 + 3 + 3


def test_in_place_activations_and_double_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    assert fitted(model)(draw(4, 2)).dtype == torch.float32
    x, y = classes()
    double = fitted(model.double(), data=(x.double(), y))
    assert double(x.double()).dtype == torch.float64
    assert double.w_samples.dtype == torch.float64
