"""A student against its posterior: what it learns, its error, and what it cannot say."""

import copy
import dataclasses

import pytest
import torch
from daily import daily
from tiny import Binomial, draw, fitted, likelihood_of
from torch import nn

from torch_lla_em import (
    BradleyTerry,
    HeteroscedasticRegression,
    LaplaceEnsemble,
    LinearisedLaplace,
    Regression,
    Student,
)
from torch_lla_em.distil.agreement import Agreement, Likelihoods, StudentError

QUICK = {"num_inputs": 200, "steps": 60, "batch_size": 64, "progress_bar": False}


def wide():
    torch.manual_seed(0)
    first, second = nn.Linear(2, 40), nn.Linear(40, 40)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(40, 3)).double()


@pytest.fixture(scope="module")
def classified():
    case, la = fitted()
    more = {"num_inputs": 1000, "steps": 1000, "lr": 0.01, "student": wide()}
    return case, la, la.distil(draw(300, 2, seed=5), **{**QUICK, **more})


def test_a_student_learns_the_posterior(classified):
    case, la, student = classified
    x = draw(400, 2, seed=8)
    p, q = la.predict(x), student.predict(x)
    kl = (p.probs * (p.log_probs - q.log_probs)).sum(1).mean()
    network = case.model(x).detach().log_softmax(1)
    assert kl < 0.1 * (p.probs * (p.log_probs - network)).sum(1).mean()
    torch.testing.assert_close(student(x), q.probs)
    ranks = torch.stack([v.argsort().argsort().double() for v in (p.epistemic, q.epistemic)])
    assert torch.corrcoef(ranks)[0, 1] > 0.95
    torch.testing.assert_close(q.aleatoric + q.epistemic, q.entropy)
    assert student.error.held_out.number == 30
    assert student.error.made.number == 100
    assert 0 < student.error.held_out.ood_spread < student.error.made.ood_spread
    assert student.error.held_out.kl < 0.02


def test_the_network_and_random_numbers_are_not_changed():
    case, la = fitted()
    before, state = copy.deepcopy(case.model.state_dict()), torch.get_rng_state()
    x = draw(40, 2)
    first, again = (la.distil(x, **QUICK) for _ in range(2))
    other = la.distil(x, **QUICK, seed=1)
    torch.testing.assert_close(case.model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first(x), again(x))
    assert not torch.equal(first(x), other(x))
    assert first.train().network.training is False
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in case.model.parameters())


@pytest.mark.parametrize(
    "name",
    daily("regression", "bernoulli", "poisson", rest=["regression per output", "classification"]),
)
def test_all_likelihoods(name):
    case, la = fitted(name)
    student = la.distil([(case.x, case.y)], validation=(case.x, case.y), **QUICK)
    ours, own = la.predict(case.x), student.predict(case.x)
    for quantity in ("expectation", "epistemic", "aleatoric", "predictive_variance"):
        assert getattr(own, quantity).shape == getattr(ours, quantity).shape
        assert getattr(own, quantity).isfinite().all()
    gap = (own.log_prob(case.y) - ours.log_prob(case.y)).mean().abs()
    assert gap < 0.3
    nll = student.error.nll
    assert nll.posterior == pytest.approx(-ours.log_prob(case.y).mean().item())
    assert nll.student == pytest.approx(-own.log_prob(case.y).mean().item())
    assert nll.kept == pytest.approx((nll.network - nll.student) / (nll.network - nll.posterior))
    if name.startswith("regression"):
        mean, variance = student(case.x)
        torch.testing.assert_close(
            own.credible_interval(0.5), ours.credible_interval(0.5), atol=0.5, rtol=0.5
        )
        torch.testing.assert_close(variance, own.aleatoric + own.epistemic)
        torch.testing.assert_close(own.mean, mean)
        torch.testing.assert_close(own.variance, own.epistemic)
        torch.testing.assert_close(own.aleatoric.std(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
        total = torch.distributions.Normal(mean, variance.sqrt())
        torch.testing.assert_close(own.log_prob(case.y), total.log_prob(case.y).sum(1))
        torch.testing.assert_close(own.entropy, total.entropy())


def test_counts_have_the_mean_and_the_variance_that_were_learnt():
    case, la = fitted("poisson", model=nn.Sequential(nn.Linear(2, 3)).double())
    prediction = la.distil(case.x, **QUICK).predict(case.x)
    counts = torch.arange(2000.0).double()
    of_one = dataclasses.replace(
        prediction,
        centre=prediction.centre[:, :1],
        log_uncertainty=prediction.log_uncertainty[:, ::3],
    )
    p = torch.stack([of_one.log_prob(n.expand(len(case.x), 1)) for n in counts], 1).exp()
    mean = p @ counts
    torch.testing.assert_close(mean, of_one.expectation[:, 0])
    variance = p @ counts.square() - mean.square()
    torch.testing.assert_close(variance, mean + of_one.epistemic[:, 0])


def test_other_likelihoods_and_outputs():
    x = draw(60, 2)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    la = LinearisedLaplace(network, HeteroscedasticRegression(), num_samples=4)
    la.fit(x, draw(60, 1, seed=2), progress_bar=False)
    prediction = la.distil(x, **QUICK).predict(x)
    for name in ("expectation", "predictive_variance", "epistemic", "aleatoric", "entropy"):
        assert getattr(prediction, name).shape == getattr(la.predict(x), name).shape
    for name, other in (("mean", "expectation"), ("variance", "epistemic")):  # of f, not of y
        with pytest.raises(TypeError, match=rf"has no \.{name}. Use \.{other}"):
            getattr(prediction, name)
    reward = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    la = LinearisedLaplace(reward, BradleyTerry(), num_samples=4)
    pairs = x, draw(60, 2, seed=1)
    la.fit([(pairs, (draw(60, seed=2) > 0).long())], progress_bar=False)
    student = la.distil(pairs, **{**QUICK, "steps": 300})
    assert student.head[0].in_features == 10  # the features of both
    torch.testing.assert_close(student(pairs), la(pairs), atol=0.1, rtol=0)
    case, la = fitted("binomial")
    with pytest.raises(NotImplementedError, match="must define variance"):
        la.distil(case.x, **QUICK)
    la = LinearisedLaplace(case.model, _Trials(), num_samples=4).fit(case.x, case.y, em_steps=1)
    student = la.distil(case.x, validation=(case.x, case.y), **QUICK)
    assert student.error.nll is None and student.error.held_out.kl >= 0  # there is no density
    with pytest.raises(TypeError, match=r"has no \.log_prob"):
        student.predict(case.x).log_prob(case.y)


class _Trials(Binomial):
    """It has the variance of y."""

    def variance(self, f):
        return 3 * f.sigmoid() * (1 - f.sigmoid())


def test_sites_and_tokens():
    torch.manual_seed(0)
    x, y = (
        draw(20, 2, 4, 4),
        torch.randint(3, (20, 4, 4), generator=torch.Generator().manual_seed(0)),
    )
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    la = LinearisedLaplace(conv, "classification", class_dim=1, num_samples=4)
    la.fit(x, y, progress_bar=False)
    student = la.distil(x, **QUICK, augment=["shift", "rotation", "flip"])
    prediction, ours = student.predict(x), la.predict(x)
    assert student(x).shape == prediction.probs.shape == (20, 3, 4, 4)
    assert prediction.epistemic.shape == ours.epistemic.shape == (20, 4, 4)
    torch.testing.assert_close(prediction.log_prob(y), ours.log_prob(y), atol=3.0, rtol=0)
    tokens = torch.randint(9, (30, 5), generator=torch.Generator().manual_seed(0))
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2)).double()
    la = LinearisedLaplace(text, "classification", num_samples=4)
    la.fit(tokens, tokens[:, 0] % 2, progress_bar=False)
    student = la.distil(tokens, **QUICK, mask_token=0)
    assert student.error.held_out.kl < 0.1


def test_ranks_of_nearly_equal_scores_are_explained():
    near = Agreement(50, 0.01, 0.001, 0.9, 0.4, ood_spread=0.2)
    made = near._replace(ood=0.95, ood_spread=1.0)
    error = StudentError(near, made)
    (kind, words), *rest = error.rows()[2:]
    assert kind == "note" and "Judge the student by those of made inputs." in words and not rest
    assert len(StudentError(near._replace(ood=0.95)).rows()) == 1
    apart = near._replace(ood_spread=0.7)
    assert len(StudentError(apart, made).rows()) == 2


def test_an_ensemble_and_a_network_of_ones_own():
    (case, la), (_, other) = fitted(), fitted(seed=1)
    ensemble = LaplaceEnsemble([la, other])
    network = wide()
    before = copy.deepcopy(network.state_dict())
    student = ensemble.distil(draw(100, 2), **{**QUICK, "steps": 300}, student=network)
    assert student.head[0].in_features == 40
    torch.testing.assert_close(network.state_dict(), before)
    torch.testing.assert_close(student(case.x), ensemble(case.x), atol=0.15, rtol=0)
    narrow = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match="pass a network with the outputs of the model"):
        la.distil(case.x, student=narrow, **QUICK)


def test_what_a_student_cannot_say(classified):
    case, la, student = classified
    prediction = student.predict(case.x)
    for name in ("samples", "joint_log_prob", "covariance", "functions", "weighted_functions"):
        with pytest.raises(AttributeError, match=rf"la\.predict\(x\)\.{name}"):
            getattr(prediction, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        prediction.nothing
    with pytest.raises(TypeError, match=r"has no \.mean. Use \.expectation"):
        prediction.mean
    with pytest.raises(TypeError, match="predicts each target on its own"):
        prediction.credible_interval()
    with pytest.raises(ValueError, match=r"student\.calibrate"):
        prediction.p_value
    for level in (0, 1):
        with pytest.raises(ValueError, match="level must lie"):
            prediction.credible_interval(level)
    with pytest.raises(TypeError, match="by name, or all in one"):
        student(case.x, input_ids=case.x)
    with pytest.raises(TypeError, match="A student has no num_samples, because"):
        student.predict(case.x, num_samples=3)
    with pytest.raises(AttributeError, match=r"Use la\.joint_log_prob"):
        student.joint_log_prob(case.x, case.y)
    with pytest.raises(TypeError, match=r"Convert the inputs: x\.to\(torch\.float64\)"):
        student(case.x.float())
    with pytest.raises(TypeError, match="interval is for continuous targets"):
        prediction.interval()


def test_errors():
    case, la = fitted()
    for given, words in (
        (None, r"Pass unlabelled inputs, or the training data: la\.distil\(train_loader\)"),
        (case.x[:5], "at least 10 inputs, not 5"),
    ):
        with pytest.raises(ValueError, match=words):
            la.distil(given, **QUICK)
    for value in (float("nan"), float("inf")):
        bad = case.x.clone()
        bad[3, 0] = value
        with pytest.raises(ValueError, match=r"NaN or infinite at some of the inputs, such as"):
            la.distil(bad, **QUICK)
    with pytest.raises(ValueError, match="NaN or infinite"):
        la.distil(case.x, widen=lambda x: x / 0, **QUICK)
    with pytest.raises(TypeError, match="augment must be a name or a list of names"):
        la.distil(case.x, augment=3, **QUICK)
    with pytest.raises(ValueError, match=r"The model does not accept .* shape \(3,\) per example"):
        la.distil(draw(40, 3), **QUICK)
    with pytest.raises(ValueError, match="The student does not accept"):
        la.distil(case.x, student=nn.Linear(5, 3).double(), **QUICK)
    with pytest.raises(TypeError, match=r"Convert the inputs: x\.to\(torch.float32\)"):
        la.distil(case.x, student=nn.Linear(2, 3), **QUICK)
    with pytest.raises(TypeError, match="one row per example"):
        la.distil((case.x, case.x[:3]), **QUICK)
    with pytest.raises(ValueError, match="augment='blur' is not known"):
        la.distil(case.x, augment="blur", **QUICK)
    with pytest.raises(ValueError, match="for images of shape .* Leave them out of augment"):
        la.distil(case.x, augment="flip", **QUICK)
    with pytest.raises(ValueError, match="mask_token needs inputs that are token indices"):
        la.distil(case.x, mask_token=0, **QUICK)
    with pytest.raises(ValueError, match="widen returned 1 inputs for"):
        la.distil(case.x, widen=lambda x: x[:1], **QUICK)
    with pytest.raises(ValueError, match="steps must be a whole number"):
        la.distil(case.x, steps=0)
    with pytest.raises(ValueError, match="no features for each output"):
        la.distil(case.x, student=_Folded().double(), **QUICK)
    with pytest.raises(ValueError, match=r"30 inputs but 7 targets.* as validation=\(x, y\)"):
        la.distil(case.x, case.y[:7], **QUICK)


def test_what_does_not_fit_is_refused_before_the_work(monkeypatch):
    case, la = fitted()
    monkeypatch.setattr(type(la), "predict", None)
    with pytest.raises(ValueError, match=r"The student predicts shape \(2, 4\)"):
        la.distil(case.x, student=nn.Linear(2, 4).double(), **QUICK)
    with pytest.raises(TypeError, match="No targets found"):
        la.distil(case.x, validation=case.x, **QUICK)
    with pytest.raises(ValueError, match="Class labels"):
        la.distil(case.x, validation=(case.x, case.y + 9), **QUICK)


class _Folded(nn.Module):
    """Its last layer has fewer examples than the outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        return self.layer(x.reshape(-1, 4)).reshape(-1, 3)


def test_a_student_that_is_not_close_is_reported(caplog):
    case, la = fitted()
    student = la.distil(draw(100, 2), **{**QUICK, "steps": 1})
    assert "is not close to the posterior" in caplog.text
    assert "is not close to the posterior" in " ".join(repr(student).split())
    assert "student.calibrate(validation_loader)" in repr(student)


def test_targets_beside_the_inputs_are_not_used():
    case, la = fitted()
    quick = {**QUICK, "steps": 1, "num_inputs": 20}
    alone, beside = la.distil(case.x, **quick), la.distil(case.x, case.y, **quick)
    assert torch.equal(alone(case.x), beside(case.x))


def test_loaders_of_inputs():
    case, la = fitted()
    data = torch.utils.data.TensorDataset(case.x, case.y)
    loader = torch.utils.data.DataLoader(data, 7)
    first, *others = (
        la.distil(given, **QUICK)(case.x)
        for given in (case.x, loader, data, [(case.x, case.y)], case.x.numpy(), iter(loader))
    )
    for other in others:
        assert torch.equal(first, other)
    student = la.distil(case.x, **QUICK)
    torch.testing.assert_close(student(loader), first)
    torch.testing.assert_close(
        student.predict(loader).log_scores, student.predict(case.x).log_scores
    )


def test_a_share_is_shown_of_a_gain_that_is_measurable():
    assert str(Likelihoods(0.5, 0.4, 0.42, 90, 0.01)).endswith("80% of the gain kept (90 examples)")
    for posterior in (0.4999, 0.5001):
        shown = str(Likelihoods(0.5, posterior, 0.51, 90, 0.01))
        assert "no measurable difference between network and posterior" in shown


def test_kl_is_that_of_torch():
    from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

    from torch_lla_em.distil.targets import StudentTargets, divergence

    f, g = draw(6, 3), draw(6, 3, seed=1)
    none = torch.zeros(6, 1)
    p = f.softmax(-1)
    found = divergence(likelihood_of("classification"), g, none, StudentTargets(p, none, none))
    torch.testing.assert_close(found, kl_divergence(Categorical(p), Categorical(logits=g)))
    found = divergence(likelihood_of("bernoulli"), g, none, StudentTargets(f.sigmoid(), none, none))
    expected = kl_divergence(Bernoulli(logits=f), Bernoulli(logits=g)).mean(1)
    torch.testing.assert_close(found, expected)
    v, w = draw(6, 6, seed=2).exp(), draw(6, 3, seed=3).exp()
    found = divergence(Regression(), g, w, StudentTargets(f, v, none))
    total = v[:, :3] + v[:, 3:]
    expected = kl_divergence(Normal(f, total.sqrt()), Normal(g, w.sqrt())).mean(1)
    torch.testing.assert_close(found, expected)


def test_gradients_with_respect_to_inputs(classified):
    case, _, student = classified
    x = case.x.clone().requires_grad_()
    student.predict(x).epistemic.sum().backward()
    assert x.grad.abs().sum() > 0
    assert not student(case.x).requires_grad


def test_the_class_is_public():
    assert Student.__module__ == "torch_lla_em.distil.student"


@pytest.mark.cuda
def test_a_student_on_a_gpu():
    case, la = fitted()
    la.to("cuda")
    student = la.distil(case.x, validation=(case.x, case.y), **QUICK)
    prediction = student.predict(case.x)
    assert prediction.probs.device.type == prediction.p_value.device.type == "cuda"
    here = copy.deepcopy(student).to("cpu").predict(case.x)
    for name in ("probs", "epistemic", "p_value"):
        torch.testing.assert_close(getattr(prediction, name).cpu(), getattr(here, name))


def test_copies_predict_by_themselves(classified):
    case, _, student = classified
    other = copy.deepcopy(student)
    with torch.no_grad():
        other.head[-1].bias.add_(1.0)
    change = other.predict(case.x).log_scores - student.predict(case.x).log_scores
    torch.testing.assert_close(change, torch.ones_like(change))
