"""A student against its posterior: what it learns, its error, and what it cannot say."""

import copy
import dataclasses

import pytest
import torch
from daily import daily
from tiny import Binomial, draw, fitted, likelihood_of
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from torch_lla_em import (
    BradleyTerry,
    HeteroscedasticRegression,
    LaplaceEnsemble,
    LinearisedLaplace,
    Regression,
)
from torch_lla_em.distil.error import Agreement, Known, Likelihoods, StudentError
from torch_lla_em.distil.inputs import augmented, chosen_ways


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
    torch.testing.assert_close(q.predictive_variance, q.probs * (1 - q.probs))
    held_out, made, _ = student.error
    assert (held_out.number, made.number) == (30, 100) and 0 < max(held_out.kl, made.kl) < 0.02
    x = case.x.clone().requires_grad_()
    student.predict(x).epistemic.sum().backward()
    assert x.grad.abs().sum() > 0
    assert not student(case.x).requires_grad
    other = copy.deepcopy(student)  # whose features are those of its own network
    with torch.no_grad():
        other.head[-1].bias.add_(1.0)
    change = other.predict(case.x).log_scores - student.predict(case.x).log_scores
    torch.testing.assert_close(change, torch.ones_like(change))


def test_networks_random_numbers_and_formats_of_inputs(quick):
    """The network and global seeds are not changed, and any format of the inputs gives the same student."""
    case, la = fitted()
    quick |= {"steps": 5, "num_inputs": 20}
    before = copy.deepcopy(case.model.state_dict())
    data = torch.utils.data.TensorDataset(case.x, case.y)
    loader = torch.utils.data.DataLoader(data, 7)
    due = la.distil(case.x, **quick)(case.x)
    for given in (loader, data, case.x.numpy(), iter(list(loader))):
        assert torch.equal(la.distil(given, **quick)(case.x), due)
    state = torch.get_rng_state()  # loaders use it
    student = la.distil(case.x, case.y, **quick)  # whose targets are not used
    assert torch.equal(student(case.x), due)
    assert not torch.equal(la.distil(case.x, **quick, seed=1)(case.x), due)
    torch.testing.assert_close(case.model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert student.train().network.training is False
    assert not any(p.requires_grad for p in student.parameters())
    assert all(p.requires_grad for p in case.model.parameters())
    torch.testing.assert_close(student(loader), due)
    torch.testing.assert_close(student.predict(loader).probs, due)


@pytest.mark.parametrize(
    "name",
    daily("regression", "poisson", rest=["bernoulli", "regression per output", "classification"]),
)
def test_all_likelihoods(name, quick):
    case, la = fitted(name)
    student = la.distil([(case.x, case.y)], validation=(case.x, case.y), **quick)
    ours, own = la.predict(case.x), student.predict(case.x)
    for quantity in ("expectation", "epistemic", "aleatoric", "predictive_variance"):
        assert getattr(own, quantity).shape == getattr(ours, quantity).shape
        assert getattr(own, quantity).isfinite().all()
    assert (own.log_prob(case.y) - ours.log_prob(case.y)).mean().abs() < 0.3
    nll = student.error.nll
    assert nll.posterior == pytest.approx(-ours.log_prob(case.y).mean().item())
    assert nll.student == pytest.approx(-own.log_prob(case.y).mean().item())
    assert nll.kept == pytest.approx((nll.network - nll.student) / (nll.network - nll.posterior))
    if name == "poisson":  # counts have the learnt mean, and its uncertainty as further variance
        one = dataclasses.replace(
            own, centre=own.centre[:, :1], log_uncertainty=own.log_uncertainty[:, ::3]
        )
        counts, like = torch.arange(2000.0).double(), torch.ones_like(one.centre)
        p = torch.stack([one.log_prob(n * like) for n in counts], 1).exp()
        torch.testing.assert_close(p @ counts, one.expectation[:, 0])
        variance = p @ counts.square() - one.expectation[:, 0] ** 2
        torch.testing.assert_close(variance, (one.expectation + one.epistemic)[:, 0])
    if name.startswith("regression"):
        mean, variance = student(case.x)
        torch.testing.assert_close(
            own.credible_interval(0.5), ours.credible_interval(0.5), atol=0.5, rtol=0.5
        )
        torch.testing.assert_close(variance, own.aleatoric + own.epistemic)
        torch.testing.assert_close(own.aleatoric.std(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
        total = Normal(mean, variance.sqrt())
        torch.testing.assert_close(own.log_prob(case.y), total.log_prob(case.y).sum(1))
        torch.testing.assert_close(own.entropy, total.entropy())


class Trials(Binomial):
    """It has the variance of y."""

    def variance(self, f):
        return 3 * f.sigmoid() * (1 - f.sigmoid())


def test_other_likelihoods(quick):
    x = draw(60, 2)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    la = LinearisedLaplace(network, HeteroscedasticRegression(), num_samples=4)
    la.fit(x, draw(60, 1, seed=2), progress_bar=False, em_steps=2)
    prediction = la.distil(x, **quick).predict(x)
    for name in ("expectation", "predictive_variance", "epistemic", "aleatoric", "entropy"):
        assert getattr(prediction, name).shape == getattr(la.predict(x), name).shape
    reward = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    la = LinearisedLaplace(reward, BradleyTerry(), num_samples=4)
    pairs = x, draw(60, 2, seed=1)
    la.fit([(pairs, (draw(60, seed=2) > 0).long())], progress_bar=False, em_steps=2)
    student = la.distil(pairs, **{**quick, "steps": 300})
    assert student.head[0].in_features == 10  # the features of both
    torch.testing.assert_close(student(pairs), la(pairs), atol=0.1, rtol=0)
    case, la = fitted("binomial", em_steps=1)
    with pytest.raises(NotImplementedError, match="must define variance"):
        la.distil(case.x, **quick)
    la = LinearisedLaplace(case.model, Trials(), num_samples=4).fit(case.x, case.y, em_steps=1)
    student = la.distil(case.x, validation=(case.x, case.y), **quick)
    assert student.error.nll is None and student.error.held_out.kl >= 0  # there is no density
    with pytest.raises(TypeError, match=r"has no \.log_prob"):
        student.predict(case.x).log_prob(case.y)


def test_sites_and_tokens(quick):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = draw(20, 2, 4, 4), torch.randint(3, (20, 4, 4), generator=generator)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    la = LinearisedLaplace(conv, "classification", class_dim=1, num_samples=4)
    la.fit(x, y, progress_bar=False, em_steps=2)
    student = la.distil(x, **quick, augment=["noise", lambda x: x.flip(-1)])
    prediction, ours = student.predict(x), la.predict(x)
    assert student(x).shape == prediction.probs.shape == (20, 3, 4, 4)
    assert prediction.epistemic.shape == ours.epistemic.shape == (20, 4, 4)
    torch.testing.assert_close(prediction.log_prob(y), ours.log_prob(y), atol=3.0, rtol=0)
    with pytest.raises(TypeError, match=r"RiskControl\(la, validation_loader\) for labels of"):
        prediction.prediction_set()
    tokens = torch.randint(9, (30, 5), generator=generator)
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2)).double()
    la = LinearisedLaplace(text, "classification", num_samples=4)
    la.fit(tokens, tokens[:, 0] % 2, progress_bar=False, em_steps=2)
    assert la.distil(tokens, **quick).error.held_out.kl < 0.1


def test_inputs_are_made_from_others():
    x, mask = draw(40, 3), torch.ones(40, 2).long()
    tokens = 2 + torch.arange(160).view(40, 4) % 7
    generator = torch.Generator().manual_seed(0)

    def made(way, given, count):
        parts = augmented(given, count, chosen_ways(given, way), generator)
        return [torch.cat(each) for each in zip(*parts)]

    noisy, alike = made("noise", (x, tokens), 600)
    assert len(noisy) == 600 and {tuple(row) for row in alike.tolist()} <= {
        *map(tuple, tokens.tolist())
    }
    gap = torch.cdist(noisy, x).amin(1)
    assert 0 < gap.median() < 1 < gap.max()
    swapped, others, masks = made("swap", (x, tokens, mask), 400)
    whole = torch.stack([torch.isin(a, b) for a, b in zip(swapped.T, x.T)], 1).all(1)  # not mixed
    assert 150 < whole.sum() < 250 and (torch.cdist(swapped[whole], x).amin(1) > 0).any()
    assert ((swapped >= x.amin(0)) & (swapped <= x.amax(0))).all()
    assert all(torch.isin(found, given).all() for found, given in zip(others.T, tokens.T))
    assert not {*map(tuple, others.tolist())} <= {*map(tuple, tokens.tolist())}
    assert torch.equal(masks, mask[:1].expand(400, 2))
    double = made(["noise", lambda inputs: (100 + inputs[0], inputs[1])], (x, tokens), 301)[0]
    assert ((double > 50).all(1).sum(), len(double)) == (150, 301)
    assert chosen_ways(x, None) == ("noise", "swap") and chosen_ways(tokens, None) == ("swap",)


def test_an_ensemble_and_a_network_of_ones_own(quick, classified):
    (case, la, _), (_, other) = classified, fitted(seed=1)
    ensemble, network = LaplaceEnsemble([la, other]), copy.deepcopy(classified[2].network)
    before = copy.deepcopy(network.state_dict())
    student = ensemble.distil(draw(100, 2), **quick, student=network)
    assert student.head[0].in_features == 40
    torch.testing.assert_close(network.state_dict(), before)
    torch.testing.assert_close(student(case.x), ensemble(case.x), atol=0.15, rtol=0)


REFUSED = {
    r"p_value compares .* student\.calibrate": lambda _, p: p.p_value,
    r"is_ood compares .* student\.calibrate": lambda _, p: p.is_ood(),
    "rate must lie": lambda _, p: p.is_ood(0),
    r"Convert the inputs: x\.to\(torch\.float64\)": lambda s, _: s(torch.ones(4, 2)),
}
OF_CLASSES = {
    r"prediction_set compares .* student\.calibrate": lambda _, p: p.prediction_set(),
    r"has no \.interval\. Use \.prediction_set": lambda _, p: p.interval(),
    r"no \.credible_interval. Use .epistemic, or la\.predict": lambda _, p: p.credible_interval(),
}
OF_VALUES = {
    "Regression has no .probs": lambda _, p: p.probs,
    "Regression has no .log_probs": lambda _, p: p.log_probs,
    "Regression has no .prediction_set": lambda _, p: p.prediction_set(),
    "level must lie": lambda _, p: p.credible_interval(1),
}


def test_what_a_student_cannot_say(classified, regressed):
    for (case, _, student), more in ((classified, OF_CLASSES), (regressed, OF_VALUES)):
        prediction = dataclasses.replace(student.predict(case.x), reference=None)
        for words, use in (REFUSED | more).items():
            with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
                use(student, prediction)


class Folded(nn.Module):
    """Its last layer has fewer examples than the outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        return self.layer(x.reshape(-1, 4)).reshape(-1, 3)


def nan_at_3(x):
    return x.clone().index_fill(0, torch.tensor([3]), float("nan"))


@pytest.mark.parametrize(
    "words, change",
    [
        (r"inputs with no rows|hold tensors with no rows", {"inputs": None}),
        ("at least 10 inputs, not 5", {"inputs": draw(5, 2)}),
        (r"several shapes, \[\(2,\)\] and \[\(3,\)\]", {"inputs": [(draw(9, 2),), (draw(9, 3),)]}),
        ("NaN or infinite at some of the inputs, such as", {"inputs": nan_at_3(draw(30, 2))}),
        ("NaN or infinite", {"augment": lambda x: x / 0}),
        (r"The model does not accept .* shape \(3,\) per", {"inputs": draw(40, 3)}),
        ("The student does not accept", {"student": nn.Linear(5, 3).double()}),
        (r"Convert the inputs: x\.to\(torch.float32\)", {"student": nn.Linear(2, 3)}),
        (r"student predicts shape \(2, 4\)", {"student": nn.Linear(2, 4).double()}),
        ("no features for each output", {"student": Folded().double()}),
        ("one row per example", {"inputs": (draw(30, 2), draw(3, 2))}),
        ("augment='flip' is not a way .* functions that map", {"augment": "flip"}),
        ("augment=3 is not a way", {"augment": ["noise", 3]}),
        ("augment returned 1 inputs for", {"augment": lambda x: x[:1]}),
        ("steps must be a whole number", {"steps": 0}),
        (r"30 inputs but 7 targets.* as validation=\(x, y\)", {"targets": draw(7)}),
        ("No targets found", {"validation": draw(30, 2)}),
        ("The validation set is empty", {"validation": []}),
        ("Class labels", {"validation": (draw(30, 2), torch.full((30,), 9))}),
    ],
)
def test_what_does_not_fit_is_refused_before_the_work(
    words, change, quick, classified, monkeypatch
):
    case, la, _ = classified
    predict, sizes = type(la).predict, []
    monkeypatch.setattr(type(la), "predict", lambda la, x: sizes.append(len(x)) or predict(la, x))
    with pytest.raises((TypeError, ValueError), match=words):
        la.distil(**{"inputs": case.x, **quick, **change})
    assert "NaN" in words or max(sizes, default=0) <= 2


def test_the_error_in_words(caplog, quick):
    _, la = fitted()
    student = la.distil(draw(100, 2), **{**quick, "steps": 1})
    for text in (caplog.text, " ".join(repr(student).split())):
        assert "is not close to the posterior" in text
    assert "student.calibrate(validation_loader)" in repr(student)
    near = Agreement(50, 0.01, 0.001, 0.9, 0.4)  # of nearly equal scores, whose ranks are not shown
    rows = dict(StudentError(near, near._replace(ood=0.95)).rows())
    assert list(rows) == ["held-out inputs", "made inputs", "OOD scores"] and "0.4" not in str(rows)
    assert str(Likelihoods(0.5, 0.4, 0.42, 90, 0.01)).endswith("80% of the gain kept (90 examples)")
    assert "no measurable difference" in str(Likelihoods(0.5, 0.4999, 0.51, 90, 0.01))


def test_kl_is_that_of_torch():
    f, g, none = draw(6, 3), draw(6, 3, seed=1), torch.zeros(6, 1)

    def found(likelihood, expectation, uncertainty=none, own=none):
        return Known(none, expectation, uncertainty, none).divergence(likelihood, g, own)

    classes = found(likelihood_of("classification"), f.softmax(-1))
    torch.testing.assert_close(classes, kl_divergence(Categorical(logits=f), Categorical(logits=g)))
    labels = found(likelihood_of("bernoulli"), f.sigmoid())
    expected = kl_divergence(Bernoulli(logits=f), Bernoulli(logits=g)).mean(1)
    torch.testing.assert_close(labels, expected)
    v, w = draw(6, 6, seed=2).exp(), draw(6, 6, seed=3).exp()
    totals = [each[:, :3] + each[:, 3:] for each in (v, w)]
    expected = kl_divergence(*(Normal(m, t.sqrt()) for m, t in zip((f, g), totals))).mean(1)
    torch.testing.assert_close(found(Regression(), f, v, w.log()), expected)


@pytest.mark.cuda
def test_a_student_on_a_gpu(quick):
    case, la = fitted()
    la.to("cuda")
    student = la.distil(case.x, validation=(case.x, case.y), **quick)
    prediction = student.predict(case.x)
    assert prediction.probs.device.type == prediction.p_value.device.type == "cuda"
    here = copy.deepcopy(student).to("cpu").predict(case.x)
    for name in ("probs", "epistemic", "p_value"):
        torch.testing.assert_close(getattr(prediction, name).cpu(), getattr(here, name))
