"""What a validation set calls for, on examples whose answer is known."""

import copy

import pytest
import torch
from tiny import batched, draw, known, label_log_prob
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Compute, LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.data import Batch
from torch_lla_em.data.identity import Identity, distinct
from torch_lla_em.likelihoods import (
    Bernoulli,
    Classification,
    HeteroscedasticRegression,
    Poisson,
    Regression,
)
from torch_lla_em.prediction.calibration import Calibration, calibrated
from torch_lla_em.prediction.numbers import LabelProbs, most_probable, numbers_of
from torch_lla_em.prediction.prediction import predicted_by
from torch_lla_em.prediction.pushforward import Member, Pushforward, posterior_alone
from torch_lla_em.prediction.scores import count_labels
from torch_lla_em.prediction.scores import label_log_prob as label_log_probs
from torch_lla_em.prediction.summary import of_calibration

PLAIN = posterior_alone()


def parts(likelihood, f, Jw, y):
    return [Pushforward((Member(likelihood, f, Jw),), y)]


def drawn(likelihood=None, count=2000, temperature=1.0, deviation=1.0):
    """Labels drawn from the network at a temperature, beside a posterior that knows nothing."""
    likelihood = likelihood or Classification()
    f, Jw = 2 * draw(count, 3), deviation * draw(9, count, 3, seed=1)
    y = likelihood.sample(f / temperature, torch.Generator().manual_seed(2))
    return likelihood, f, Jw, y


def predicted(likelihood, f, Jw, table):
    return predicted_by(Pushforward((Member(likelihood, f, Jw),)), table)


def fit(problem, before=PLAIN, **options):
    return calibrated(parts(*problem), [before], **options)[0]


@pytest.mark.parametrize("likelihood", [Classification(), Bernoulli()])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_calibration_finds_the_temperature_of_the_network(likelihood, temperature):
    problem = drawn(likelihood, 500, temperature=temperature, deviation=4.0)
    _, f, Jw, y = problem
    found = fit(problem)
    ours = predicted(likelihood, f, Jw, found.table).log_prob(y)
    assert (likelihood.log_prob(f / temperature, y) - ours).mean() < 0.01
    again = fit(problem, found.table).calibration  # the better predictions are kept
    assert not again.applied and again.after > again.before < found.calibration.before
    assert "predictions stay as they were" in str(again)


@pytest.mark.parametrize("likelihood", [Classification(), Regression(0.5), Poisson()])
def test_calibration_maximises_the_posterior_density(likelihood):
    (_, f, Jw, y), numbers = drawn(likelihood, 300, deviation=0.1), numbers_of(likelihood)
    Jw[0] += f  # a posterior around the truth, which a temperature alone does not beat
    problem = likelihood, f, Jw, y

    def density(theta):
        table, noise = numbers.at(theta)
        own = likelihood
        if isinstance(likelihood, Regression):
            own = likelihood.with_noise(likelihood.sigma_noise * noise)
        prior = 0.5 * (theta / torch.tensor(numbers.deviations)).square().sum()
        return predicted(own, f, Jw, table).log_prob(y).sum() - prior

    theta = most_probable(LabelProbs(numbers, parts(*problem)))
    for step in 0.05 * torch.eye(len(theta), dtype=torch.float64):  # components are interpolated
        assert max(density(theta + step), density(theta - step)) < density(theta) + 1e-6


def test_scale_noise_and_mean_of_a_regression_are_found():
    f, sd = draw(20_000, 1), 0.5 + draw(20_000, 1, seed=1).square()
    signs = torch.tensor([0.0, 1.0, -1.0]).double().view(3, 1, 1)
    y = f + (0.3 * sd**2 + 0.6**2).sqrt() * draw(20_000, 1, seed=2)
    found = fit((Regression(2.0), f, signs * sd + f * (signs == 0), y))
    assert_close(found.table[0, 3].item(), 0.3, rtol=0.1, atol=0)
    assert_close(2.0 * found.noise.item(), 0.6, rtol=0.05, atol=0)
    f, h = draw(500, 2), draw(500, 2, seed=1)
    y = 0.25 * h + 0.75 * f + 0.1 * draw(500, 2, seed=2)
    found = fit((Regression(0.1), f, torch.cat([h[None], 0.01 * draw(4, 500, 2, seed=3)]), y))
    assert_close(found.table[0, 1:3], torch.tensor([0.25, 0.75]).double(), rtol=0, atol=0.02)


def test_the_nll_is_corrected_for_optimism_and_ignored_labels_are_no_examples():
    likelihood, f, Jw, y = drawn(count=250)
    some = torch.where(torch.arange(250) < 50, -100, y)
    found = fit((likelihood, f, Jw, some))
    alone = fit((likelihood, f[50:], Jw[:, 50:], y[50:])).calibration
    assert found.calibration.num_rows == 200
    assert found.calibration[:4] == pytest.approx(alone[:4])
    inside = -predicted(likelihood, f[50:], Jw[:, 50:], found.table).log_prob(y[50:]).mean().item()
    assert inside < found.calibration.after < inside + 6 / 200


DENSE = {  # outputs and targets of examples with several labels, and the likelihood
    "pixels": (Classification(), (2, 3, 4), lambda f: f.argmax(-1)),
    "void pixels": (Classification(255), (2, 3, 4), lambda f: f.argmax(-1).where(f[..., 0] > 0, 255)),
    "labels": (Bernoulli(), (3,), lambda f: (f > 0).double()),
    "counts": (Poisson(), (3,), lambda f: f.exp().round()),
    "outputs": (Regression(torch.tensor([0.5, 1.0, 2.0])), (3,), lambda f: f + 1),
    "noise": (HeteroscedasticRegression(), (4,), lambda f: f[..., :2] + 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("members", [1, 2])
def test_labels_are_judged_one_at_a_time(kind, members):
    """By the prediction of this label alone; one function of the posterior is not chosen for all labels of an example."""
    likelihood, sites, target = DENSE[kind]
    f, Jw = draw(5, *sites), draw(7, 5, *sites, seed=1)
    y, likelihood = target(draw(5, *sites, seed=2)), copy.copy(likelihood)
    every = Member(likelihood, f, Jw), Member(likelihood, f + 1, 0.5 * Jw)
    data = Pushforward(every[:members], y)
    table = torch.tensor([[0.5, 1.0, 0.0, 1.0], [0.5, 0.0, 1.0, 0.0]]).double()
    prediction = predicted_by(data, PLAIN if isinstance(likelihood, Regression) else table)
    each = label_log_probs(prediction, y)
    mean, counts = prediction.expectation, y != 255
    if kind in ("pixels", "void pixels"):
        own = mean.log().gather(-1, y.where(counts, 0)[..., None])[..., 0]
        due = own.where(counts, 0)
    elif kind == "labels":
        due = torch.where(y > 0, mean, 1 - mean).log()
    else:
        due = torch.stack([label_log_prob(prediction, y, c) for c in range(y.shape[-1])], -1)
    assert_close(each.sum(1), due.flatten(1).sum(1))
    assert count_labels(likelihood, y) == counts.sum()


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_probabilities_of_pixels_are_not_worse_than_as_fitted(share):
    """However many samples: one function of the posterior fits the pixels of an image together better than their mean."""
    likelihood, count = Classification(), 60
    generator = torch.Generator().manual_seed(0)

    def images(K):
        truth, shared = draw(count, 30, 3), 0.7 * draw(count, 1, 3, seed=1)  # an error
        f = truth + shared
        Jw = torch.cat([0 * f[None], 0.5 * draw(K, count, 1, 3, seed=2).expand(K, count, 30, 3)])
        truth = likelihood.sample(truth, generator)
        return f, Jw, truth.where(torch.rand(truth.shape, generator=generator) >= share, -100)

    for K in (8, 16, 32):
        f, Jw, y = images(K)
        held, new = ((f[part], Jw[:, part], y[part]) for part in (slice(0, 30), slice(30, 60)))
        found = fit((likelihood, *held))

        def nll(table, f, Jw, y):
            log_p = predicted(likelihood, f, Jw, table).log_probs.flatten(0, 1)
            return nn.functional.nll_loss(log_p, y.flatten()).item()

        assert nll(found.table, *new) < nll(PLAIN, *new) + 1e-3
        assert found.calibration.before == pytest.approx(nll(PLAIN, *held))


def test_errors_are_those_of_paired_differences():
    _, f, Jw, y = drawn(Regression(2.0), count=50)
    likelihood = Regression(1.0)
    found = fit((likelihood, f, Jw, y))
    own = likelihood.with_noise(likelihood.sigma_noise * found.noise)
    gain = predicted(own, f, Jw, found.table).log_prob(y)
    gain = gain - predicted(likelihood, f, Jw, PLAIN).log_prob(y)
    assert found.calibration.standard_error == pytest.approx(gain.std().item() / 50**0.5 / 3)
    assert found.calibration.labels == 3
    nll, after, error = found.calibration[1:4]
    words = f"{nll:.4g} → {after:.4g} (improvement {nll - after:.2g} ± {error:.2g})"
    assert words in str(found.calibration)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_every_calibration_starts_from_the_posterior_as_fitted(name, tmp_path):
    case, fitted = known(name)
    x, y = case.x + 0.1, case.y
    due, la = copy.copy(fitted).calibrate(x, y), copy.copy(fitted)
    assert due.calibration.applied and not torch.equal(due.mixture, fitted.mixture)
    wrong = 100 * y if name == "regression" else fitted.predict(x[:4]).probs.argmin(1)
    la.calibrate(x[: len(wrong)], wrong).save(tmp_path / "la.pt")
    assert not torch.equal(la.mixture, due.mixture)
    for again in (la, LinearisedLaplace.load(tmp_path / "la.pt", case.model)):
        again.calibrate(x, y)
        assert again.calibration == due.calibration
        state = again.state_dict()
        assert all(torch.equal(state[n], t) for n, t in due.state_dict().items())
    assert fitted.calibration is None
    la.fit(case.x, y, em_steps=1, validation=False, progress_bar=False)
    assert la.posterior_scale == fitted.posterior_scale and la.calibration is None
    components = (len(each.predict(x)._mixture.components) for each in (la, fitted))
    assert len({*components}) == 1


def test_all_predictions_follow_the_calibration(tmp_path):
    case, fitted = known()
    unseen = [(case.x + 0.1, (case.y + 1) % 3)]  # labels that were not learnt
    function, la = fitted.functional_samples, copy.copy(fitted)
    before, drawn = fitted.predict(case.x + 0.1).log_prob(unseen[0][1]).mean(), function(case.x)
    assert la.calibrate(unseen) is la and torch.equal(function(case.x), drawn)
    assert la.calibration.before == pytest.approx(-before.item()) and la.calibration.num_rows == 30
    p = la.predict(case.x)
    assert len(p._mixture.components) == 3 and len(p.members) == 1
    assert_close(la(case.x), p.probs)
    assert_close(la.functional_samples(case.x), p.samples)
    alone = la.predict(case.x, mean="network")
    assert len(alone._mixture.components) == 1
    assert_close(alone.f_mean, case.model(case.x).detach())
    # so do fits that are given the validation set; the second comes from the finished checkpoint
    for _ in range(2):
        compute = Compute(checkpoint=tmp_path)
        other = LinearisedLaplace(case.model, la.likelihood, num_samples=6, compute=compute)
        other.fit([(case.x, case.y)], validation=unseen, em_steps=2, progress_bar=False)
        assert other.calibration == la.calibration
        assert_close(other(case.x), la(case.x))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_predictions_have_the_nll_that_a_calibration_states(name, several):
    """It is stated higher by the optimism. Where nothing is gained, predictions do not change."""
    case, la = known(name)
    la = LaplaceEnsemble([la, la]) if several else copy.copy(la)
    x, y = case.x + 0.1, 3 * case.y if name == "regression" else (case.y + 1) % 3
    la.calibrate(x, y)
    nll = -label_log_prob(la.predict(x), y).mean().item()
    assert la.calibration.applied and nll < la.calibration.after < nll + 6 / 30
    if name == "regression":
        (_, la), x = known(name), draw(200, 2, seed=3)
        la = LaplaceEnsemble([la, la]) if several else copy.copy(la)
        before, generator = la.predict(x), torch.Generator().manual_seed(0)
        la.calibrate(x, before.sample(1, generator)[0])
        assert not la.calibration.applied
        assert torch.equal(la.predict(x).predictive_variance, before.predictive_variance)


@pytest.mark.parametrize("share", [0.0, 1.6])
@pytest.mark.parametrize("temperature, deviation", [(10.0, 4.0), (10.0, 20.0), (40.0, 4.0)])
@pytest.mark.parametrize("count", [30, 60, 150])
def test_a_calibration_on_few_examples_is_no_worse_than_a_temperature(
    count, temperature, deviation, share
):
    """Of networks that are far too sure: the prior of a factor is that of a temperature alone.

    The search with the narrow prior ends at a local optimum.
    """
    f, likelihood = 2 * temperature * draw(count, 3), Classification()
    y = likelihood.sample(f / temperature, torch.Generator().manual_seed(2))
    Jw = deviation * draw(9, count, 3, seed=1)
    Jw[0] += share * f
    found = fit((likelihood, f, Jw, y))
    nll = -predicted(likelihood, f, Jw, found.table).log_prob(y).sum().item()
    least = min(-likelihood.log_prob(t * f, y).sum() for t in torch.linspace(0.02, 2, 100))
    assert found.calibration.applied
    assert nll < min(count * found.calibration.temperature, least.item()) + 2.5


def test_point_predictions_are_kept_where_their_change_is_within_noise():
    f = draw(60, 1)
    y = f + 0.3 * draw(60, 1, seed=2)
    Jw = torch.cat([f[None] + 0.02 * draw(1, 60, 1, seed=1), 0.1 * draw(4, 60, 1, seed=3)])
    for mean in ("network", "linear"):
        before = posterior_alone(mean)
        found = fit((Regression(1.0), f, Jw, y), before)
        assert torch.equal(found.table[0, 1:3], before[0, 1:3]) and found.calibration.applied
        assert found.calibration.rmse[0] == found.calibration.rmse[1]
        assert str(found.calibration).endswith("; point predictions are unchanged")
    far = torch.cat([f[None] + 1, Jw[1:]])
    found = fit((Regression(1.0), f, far, y), posterior_alone("linear")).calibration
    errors = (f + 1 - y).square().mean().sqrt().item()
    assert found.rmse == (pytest.approx(errors), pytest.approx(0.3, abs=0.06))
    first, second = found.rmse
    assert f"point predictions have changed, RMSE {first:.4g} → {second:.4g}" in str(found)


def test_a_calibration_is_shown_beside_networks_and_temperature_scaling():
    """A difference within its noise is no improvement."""
    small = Calibration(100, 0.5, 0.49, 0.008, True)
    assert str(small) == "0.5 → 0.49 (no measurable difference: 0.01 ± 0.008)"
    ((kind, words),) = of_calibration(small)
    assert kind == "calibration" and words.endswith(str(small))
    ((kind, _),) = of_calibration(small._replace(standard_error=0.004))
    assert kind == "good"
    ((kind, words),) = of_calibration(small._replace(standard_error=0.004, num_rows=10))
    assert kind == "calibration" and "Fewer than 38 examples" in words
    case, la = known()
    x, y = case.x + 0.1, case.y
    found, loss = copy.copy(la).calibrate(x, y).calibration, torch.nn.functional.cross_entropy
    f = case.model(x).detach()
    assert found.network == pytest.approx(loss(f, y).item())
    least = min(loss(t * f, y).item() for t in torch.linspace(0.01, 3, 300))
    assert least < found.temperature < min(found.network, least + 0.02 + 1 / 30)
    rows = dict(of_calibration(Calibration(100, 1.01, 0.89, 0.02, True, None, 1.2, 0.95, 100.0)))
    assert rows["good"].endswith("NLL per label 1.01 → 0.89 (improvement 0.12 ± 0.02)")
    assert rows["compared"].endswith("network alone 1.2, with temperature scaling 0.95")


@pytest.mark.parametrize("unit", [0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 1e3])
@pytest.mark.parametrize("noise", [0.01, 1.0, 100.0])
def test_targets_in_another_unit_are_noticed(unit, noise):
    """Whether the network has learnt much or little, or has overfitted, so that its σ is far too small."""
    f = draw(200, 2)
    y = f + noise * draw(200, 2, seed=1)
    for sigma in (noise, min(noise, 0.01 + 0.01 * noise)):
        spread = max(1.0, noise)
        f = f if sigma == noise else spread * draw(200, 2, seed=4)
        found = fit((Regression(sigma), f, f.expand(5, 200, 2), unit * y)).calibration
        assert ("units of the fit" in found.unlike) == (not 1 / 3 < unit < 3)
    moved = fit((Regression(noise), f, f.expand(5, 200, 2), 1e3 * y), length=1.0)
    assert not moved.calibration.unlike


def test_inputs_that_are_preprocessed_otherwise_are_noticed(caplog):
    case, la = known()
    la = copy.copy(la)
    x, y = draw(60, 2, seed=5), case.model(draw(60, 2, seed=5)).argmax(1)
    la.calibrate(x, y)
    assert not la.calibration.unlike and "warning" not in dict(of_calibration(la.calibration))
    la.calibrate(100 * x, y)
    rows = dict(of_calibration(la.calibration))
    assert "check that they are preprocessed" in rows["warning"] and "good" not in rows
    assert la.calibration.unlike in caplog.text
    assert la.calibration.unlike in " ".join(repr(la).split())
    assert len(la.calibration.unlike.split()) <= 40


# validation sets of training examples

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
REFUSED = "validation examples are training examples"


def test_training_examples_are_refused(tmp_path):
    """In any batches, with weights, after a file, by ensembles, and by a fit after its first pass."""
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    y, read = (x[:, 0] > 0).long(), []
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def fit(*data, **options):
        return LinearisedLaplace(net, "classification", num_samples=4).fit(*data, **options)

    la = fit(x[:200], y[:200], **FIXED)
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", net)
    by_weights = fit([(x[:200], y[:200], torch.rand(200))], weights="last", **FIXED)
    by_function = fit([(x[:200], y[:200])], weights=lambda y: 1.0 + y, **FIXED)
    for each in (la, again, LaplaceEnsemble([la]), by_weights, by_function):
        for rows in (slice(0, 100), slice(100, 260), slice(0, 400)):
            with pytest.raises(ValueError, match=REFUSED):
                each.calibrate(batched(30, x[rows], y[rows]))
    assert la.calibration is None
    again.calibrate(x[140:400], y[140:400])  # a few are known
    assert again.is_ood(x[200:]).float().mean() < 0.2

    class Counted:
        def __iter__(self):
            read.append(1)
            return iter(batched(50, x[:200], y[:200]))

    for size in (200, 30):
        unseen = batched(size, x[:200], y[:200])
        with pytest.raises(ValueError, match=REFUSED):
            fit(Counted(), validation=unseen, progress_bar=False)
    assert len(read) <= 2 * 2
    few = torch.randint(2, (200, 3)).float()  # equal examples of few values are no sign
    fit(few, few[:, 0].long(), **FIXED).calibrate(few, few[:, 0].long())


def test_a_sample_of_many_examples_estimates_what_is_shared():
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 1), torch.zeros(20_000)

    def of(*rows):
        parts = []
        for some in rows:
            parts.append(Identity())
            parts[-1].add(Batch(0, torch.arange(len(x))[some], x[some], y[some]))
        return Identity.of(parts)

    train, half = of(slice(0, 4_000), slice(4_000, 10_000)), of(slice(5_000, 15_000))
    share, number = half.shared_with(train.least)
    assert abs(share - 0.5) < 5 * (0.25 / number) ** 0.5 and number > 400
    assert of(slice(10_000, 20_000)).shared_with(train.least)[0] == 0
    assert distinct(train.least, 10_000) > 0.85 and distinct(train.least, 100_000) < 0.2
