"""What a validation set calls for, on examples whose answer is known."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from tiny import draw, tiny
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.likelihoods import Bernoulli, Classification, Poisson, Regression
from torch_lla_em.prediction.calibration import Calibration, calibrated, most_probable, numbers_of
from torch_lla_em.prediction.pushforward import Products, Pushforward, posterior_alone
from torch_lla_em.prediction.summary import of_calibration

PLAIN = posterior_alone()


def examples(likelihood, f, Jw, y):
    return SimpleNamespace(likelihood=likelihood, parts=(f, Jw, y))


def drawn(likelihood=None, count=2000, K=8, C=3, temperature=1.0, deviation=1.0):
    """Labels drawn from the network at a temperature, beside a posterior that knows nothing."""
    likelihood = likelihood or Classification()
    f, Jw = 2 * draw(count, C), deviation * draw(1 + K, count, C, seed=1)
    y = likelihood.sample(f / temperature, torch.Generator().manual_seed(2))
    return examples(likelihood, f, Jw, y)


def predicted(likelihood, f, Jw, table):
    return Pushforward((Products(likelihood, f, Jw),), f).prediction(table)


def parts_of(problem):
    f, Jw, y = problem.parts
    return [Pushforward((Products(problem.likelihood, f, Jw),), y)]


def fit(problem, before=PLAIN):
    return calibrated(parts_of(problem), [before])


@pytest.mark.parametrize("likelihood", [Classification(), Bernoulli()])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_calibration_finds_the_temperature_of_the_network(likelihood, temperature):
    problem = drawn(likelihood, temperature=temperature, deviation=4.0)
    f, Jw, y = problem.parts
    found = fit(problem)
    truth = likelihood.log_prob(f / temperature, y)
    ours = predicted(likelihood, f, Jw, found.table).log_prob(y)
    assert (truth - ours).mean() < 0.01
    assert found.calibration.before > found.calibration.after


def objective(likelihood, parts, theta):
    numbers = numbers_of(likelihood)
    f, Jw, y = parts
    table, noise = numbers.at(theta)
    if isinstance(likelihood, Regression):
        likelihood = likelihood.with_noise(likelihood.sigma_noise * noise)
    rows = predicted(likelihood, f, Jw, table).log_prob(y).sum()
    return rows - 0.5 * (theta / torch.tensor(numbers.deviations)).square().sum()


@pytest.mark.parametrize("likelihood", [Classification(), Regression(0.5), Poisson()])
def test_calibration_maximises_the_posterior_density(likelihood):
    problem = drawn(likelihood, count=300)
    theta = most_probable(numbers_of(likelihood), parts_of(problem))
    best = objective(likelihood, problem.parts, theta)
    for step in torch.eye(len(theta), dtype=torch.float64):
        for change in (0.03, -0.03):
            moved = theta + change * step
            assert objective(likelihood, problem.parts, moved) < best + 1e-6


def test_few_examples_leave_the_prior():
    found = fit(drawn(count=8, deviation=1e-3), before=PLAIN * torch.tensor([1.0, 20.0, 20.0, 1.0]))
    weight, mode, network, scale = found.table.unbind(1)
    assert (weight - 1 / 3).abs().max() < 0.3
    assert 0.3 < scale[0] < 3 and 0.5 < mode[1] < 2 and 0.5 < network[2] < 2


def test_calibration_finds_scale_and_noise_of_a_regression():
    f, sd = draw(20_000, 1), 0.5 + draw(20_000, 1, seed=1).square()
    signs = torch.cat([torch.zeros(1, 1, 1), torch.ones(1, 1, 1), -torch.ones(1, 1, 1)])
    y = f + (0.3 * sd**2 + 0.6**2).sqrt() * draw(20_000, 1, seed=2)
    Jw = signs.double() * sd + f * (signs == 0)
    found = fit(examples(Regression(2.0), f, Jw, y))
    assert_close(found.table[0, 3].item(), 0.3, rtol=0.1, atol=0)
    assert_close(2.0 * found.noise.item(), 0.6, rtol=0.05, atol=0)


def test_the_mean_lies_between_the_two():
    f, h = draw(500, 2), draw(500, 2, seed=1)
    y = 0.25 * h + 0.75 * f + 0.1 * draw(500, 2, seed=2)
    Jw = torch.cat([h[None], 0.01 * draw(4, 500, 2, seed=3)])
    found = fit(examples(Regression(0.1), f, Jw, y))
    assert_close(found.table[0, 1:3], torch.tensor([0.25, 0.75]).double(), rtol=0, atol=0.02)


def test_the_nll_is_corrected_for_optimism():
    problem = drawn(count=200)
    found = fit(problem)
    f, Jw, y = problem.parts
    inside = -predicted(problem.likelihood, f, Jw, found.table).log_prob(y).mean().item()
    assert inside < found.calibration.after < inside + 6 / 200
    assert found.calibration.num_rows == 200


def test_errors_are_those_of_paired_differences(caplog):
    problem = drawn(Regression(2.0), count=50)
    problem.likelihood = likelihood = Regression(1.0)
    with caplog.at_level(logging.INFO, logger="torch_lla_em"):
        found = fit(problem)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"Validation NLL {found.calibration}; calibration applied."
    f, Jw, y = problem.parts
    before = predicted(likelihood, f, Jw, PLAIN)
    after = predicted(
        likelihood.with_noise(likelihood.sigma_noise * found.noise), f, Jw, found.table
    )
    gain = after.log_prob(y) - before.log_prob(y)
    error = gain.std().item() / 50**0.5
    assert found.calibration.standard_error == pytest.approx(error)
    assert found.calibration.labels == problem.parts[2].shape[1]
    nll, after, gain = (value / found.calibration.labels for value in found.calibration[1:4])
    assert f"{nll:.4g} → {after:.4g} (improvement {nll - after:.2g} ± {gain:.2g})" in said


def test_better_predictions_are_kept(caplog):
    first = fit(drawn(count=2000, temperature=20.0))
    for problem in (drawn(count=2000, temperature=20.0), drawn(count=8, temperature=20.0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
            again = fit(problem, before=first.table)
        assert not again.calibration.applied
        assert again.calibration.after > again.calibration.before
        assert "probabilities stay as they were" in str(again.calibration) and not caplog.text


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_every_calibration_starts_from_the_posterior_as_fitted(name, tmp_path):
    case = tiny(name)
    la = LinearisedLaplace(case.model, name, num_samples=4)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=2.0, progress_bar=False)
    fitted, known = copy.copy(la), la.messages
    due = copy.copy(la).calibrate(case.x, case.y)
    assert due.calibration.applied and not torch.equal(due.mixture, fitted.mixture)
    y = 100 * case.y if name == "regression" else fitted.predict(case.x[:4]).probs.argmin(1)
    la.calibrate(case.x[: len(y)], y).save(tmp_path / "la.pt")
    assert not torch.equal(la.mixture, due.mixture)
    for again in (la, LinearisedLaplace.load(tmp_path / "la.pt", case.model)):
        again.calibrate(case.x, case.y)
        assert again.calibration == due.calibration and again.messages == due.messages
        state = again.state_dict()
        assert all(torch.equal(state[n], t) for n, t in due.state_dict().items())
    assert known == fitted.messages and fitted.calibration is None


def test_calibration_is_no_worse_than_a_temperature_but_for_its_prior():
    """An overfitted network whose posterior predicts well: the first search ends at a local optimum."""
    numbers = torch.Generator().manual_seed(0)
    f = 12 * torch.randn(170, 4, generator=numbers).double()
    y = torch.multinomial((f / 9).softmax(1), 1, generator=numbers)[:, 0]
    Jw = 6 * torch.randn(9, 170, 4, generator=numbers).double()
    Jw[0] = 1.6 * f + 4 * torch.randn(170, 4, generator=numbers)
    problem = examples(Classification(), f, Jw, y)

    def value(table):
        return predicted(Classification(), f, Jw, table).log_prob(y).sum().item()

    factors = torch.linspace(0.02, 2, 100)
    alone = max(Classification().log_prob(t * f, y).sum().item() for t in factors)
    numbers = numbers_of(Classification())
    once, _ = numbers.at(most_probable(numbers._replace(of_network=None), parts_of(problem)))
    assert value(once) < alone - 6 and alone - 2 < value(fit(problem).table)


def test_point_predictions_are_kept_where_their_change_is_within_noise():
    f = draw(60, 1)
    other = f + 0.02 * draw(60, 1, seed=1)
    y = f + 0.3 * draw(60, 1, seed=2)
    Jw = torch.cat([other[None], 0.1 * draw(4, 60, 1, seed=3)])
    for mean in ("network", "linear"):
        before = posterior_alone(mean)
        found = fit(examples(Regression(1.0), f, Jw, y), before)
        assert torch.equal(found.table[0, 1:3], before[0, 1:3]) and found.calibration.applied
        assert found.calibration.rmse[0] == found.calibration.rmse[1]
        assert str(found.calibration).endswith("; point predictions are unchanged")
    far = torch.cat([f[None] + 1, Jw[1:]])
    found = fit(examples(Regression(1.0), f, far, y), posterior_alone("linear")).calibration
    errors = (f + 1 - y).square().mean().sqrt().item()
    assert found.rmse == (pytest.approx(errors), pytest.approx(0.3, abs=0.06))
    first, second = found.rmse
    assert f"point predictions have changed, RMSE {first:.4g} → {second:.4g}" in str(found)


def test_ignored_labels_are_no_examples():
    problem = drawn(count=200)
    f, Jw, y = problem.parts
    some = examples(problem.likelihood, f, Jw, torch.where(torch.arange(200) < 150, -100, y))
    kept = examples(problem.likelihood, f[150:], Jw[:, 150:], y[150:])
    found, alone = fit(some).calibration, fit(kept).calibration
    assert found.num_rows == 50
    assert found[:4] == pytest.approx(alone[:4])
    with pytest.raises(ValueError, match="None of the validation examples has a label"):
        fit(examples(problem.likelihood, f, Jw, torch.full_like(y, -100)))


def test_a_difference_within_its_noise_is_no_improvement():
    small = Calibration(100, 0.5, 0.49, 0.008, True)
    assert str(small) == "0.5 → 0.49 (no measurable difference: 0.01 ± 0.008)"
    (kind, words), *rest = of_calibration(small)
    assert kind == "calibration" and words.endswith(str(small)) and not rest
    ((kind, _),) = of_calibration(small._replace(standard_error=0.004))
    assert kind == "good"


def test_a_network_that_predicts_better_than_its_posterior_is_named(caplog):
    y = torch.arange(12) % 2
    f = 3 * torch.nn.functional.one_hot(y, 2).double()  # sure of every label, and right
    Jw = torch.cat([-f[None], 3 * draw(4, 12, 2)])  # the mode is sure of the others
    found = fit(examples(Classification(), f, Jw, y)).calibration
    assert "The network alone has a validation NLL of 0.04859, lower by" in caplog.text
    assert found.kept > 0.1 and "more `parameters` or `num_samples`" in caplog.text
    caplog.clear()
    problem = examples(Classification(), f, Jw, y)
    calibrated(parts_of(problem), [PLAIN], is_whole=True)
    assert "more `num_samples`" in caplog.text
    caplog.clear()
    fit(drawn(count=200))
    assert not caplog.text
