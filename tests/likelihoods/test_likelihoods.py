"""Derivatives, moments and checks of every likelihood; a user's own is compared with its log_prob."""

import logging

import pytest
import torch
from tiny import LOG_PROBS, Binomial, draw, likelihood_of, posterior_of, tiny
from torch import nn
from torch.nn.functional import gaussian_nll_loss, logsigmoid, one_hot, softplus
from torch.testing import assert_close

from torch_lla_em import (
    Bernoulli,
    BradleyTerry,
    Classification,
    HeteroscedasticRegression,
    Likelihood,
    LinearisedLaplace,
    Poisson,
    Regression,
    compare,
)
from torch_lla_em.likelihoods import compare_with_log_prob


def example(name):
    f = draw(5, 3)
    y = torch.tensor([0, 2, 1, 1, 0]) if name == "classification" else (f > 0).double()
    return likelihood_of(name), f, y


@pytest.mark.parametrize("name", LOG_PROBS)
def test_derivatives_equal_those_of_the_density(name):
    likelihood, f, y = example(name)
    grad, hessian = (derive(LOG_PROBS[name]) for derive in (torch.func.grad, torch.func.hessian))
    gradient = torch.stack([-grad(a, b) for a, b in zip(f, y, strict=True)])
    H = torch.stack([-hessian(a, b) for a, b in zip(f, y, strict=True)])
    assert_close(likelihood.gradient(f, y), gradient)
    basis = torch.eye(3).double()[:, None].expand(3, 5, 3)
    assert_close(likelihood.hessian_product(f, basis), H.movedim(1, 0))
    root = likelihood.hessian_sqrt_product(f, basis)  # the columns of S
    assert_close(torch.einsum("kni,knj->nij", root, root), H)
    samples = torch.stack([f, 2 * f])
    expected = torch.stack(
        [LOG_PROBS[name](a, b) for s in samples for a, b in zip(s, y, strict=True)]
    )
    assert_close(likelihood.log_prob(samples, y), expected.view(2, 5))


def test_heteroscedastic_density_fisher_information_and_samples():
    likelihood, f, y = HeteroscedasticRegression(), draw(5, 4), draw(5, 2, seed=1)
    mu, s = f.chunk(2, -1)
    loss = gaussian_nll_loss(mu, y, s.exp(), full=True, reduction="none").sum(1)
    assert_close(likelihood.log_prob(f, y), -loss)
    assert_close(likelihood.gradient(f, y), Likelihood.gradient(likelihood, f, y))
    # the Hessian is quadratic in y, so that three Gauss-Hermite nodes give its expectation
    basis, expected, f = torch.eye(4).double()[:, None], 0, f[:1]
    mu, s = f.chunk(2, -1)
    for node, weight in ((-(3**0.5), 1 / 6), (0, 2 / 3), (3**0.5, 1 / 6)):
        y = mu + node * (0.5 * s).exp()
        hessian = torch.func.hessian(lambda f, y=y: -likelihood.log_prob(f[None], y).sum())
        expected = expected + weight * hessian(f[0])
    assert_close(likelihood.hessian_product(f, basis)[:, 0], expected)
    root = likelihood.hessian_sqrt_product(f, basis)[:, 0]
    assert_close(root.T @ root, expected)
    y = likelihood.sample(f.expand(20000, 4), torch.Generator().manual_seed(0))
    mu, sigma = f[0, :2], (0.5 * f[0, 2:]).exp()
    assert ((y.mean(0) - mu).abs() < 5 * sigma / 20000**0.5).all()
    assert ((y.std(0) - sigma).abs() < 5 * sigma / 40000**0.5).all()


@pytest.mark.parametrize("margin", [1.0, 20.0, 60.0, 400.0])
def test_certain_softmax_keeps_its_digits(margin):
    """Where p is near 1, H u, S ε and the gradient are as exact as their entries, in float32."""
    f, u = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    f[torch.arange(50), torch.arange(50) % 4] += margin
    y, likelihood, at = torch.arange(50) % 4, Classification(), torch.arange(50)
    p = f.double().softmax(-1)
    for classes in (2, 15, 16):  # of any number
        g = draw(4, 5, classes)
        assert_close(likelihood.mean(g), g.softmax(-1))
        assert_close(likelihood.log_mean(g), g.log_softmax(-1))
    rest = p.scatter(-1, y[:, None], 0).sum(-1, keepdim=True)  # 1 - p without a difference
    v = (u - u.gather(-1, y[:, None])).double()
    tiny = 1e-37  # below it float32 underflows
    Hu = p * (v - (p * v).sum(-1, keepdim=True))
    assert_close(likelihood.hessian_product(f, u).double(), Hu, rtol=1e-4, atol=tiny)
    gradient = p.scatter(-1, y[:, None], -rest)
    assert_close(likelihood.gradient(f, y).double(), gradient, rtol=1e-4, atol=tiny)
    S = likelihood.hessian_sqrt_product(f[:, None], torch.eye(4).expand(50, 4, 4)).double()
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    H[at, y, y] = (p.gather(-1, y[:, None]) * rest)[:, 0]
    assert_close(S.mT @ S, H, rtol=1e-3, atol=max(tiny, 1e-6 * rest.max().item()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
def test_samples_have_the_stated_mean(name):
    likelihood, f, _ = example(name)
    y = likelihood.sample(f[:1].expand(40000, 3), torch.Generator().manual_seed(0))
    y = one_hot(y, 3).double() if name == "classification" else y.double()
    error = y.std(0) / len(y) ** 0.5
    assert ((y.mean(0) - likelihood.mean(f[0])).abs() < 5 * error).all()


REAL, NAN = Regression(), [[float("nan")]]
UNSUITABLE = [
    (Classification(), (2, 1), torch.zeros(2).long(), "bernoulli"),
    (Classification(), (2, 3), torch.tensor([0, 3]), "outside of 0 to 2"),
    (Classification(), (2, 3), torch.tensor([0, -1]), "outside of 0 to 2"),
    (Classification(), (2, 3), torch.zeros(2, 1).long(), r"integers of shape \(2,\)"),
    (Classification(), (2, 3), torch.zeros(2), "integers"),
    (Classification(), (2, 3), torch.zeros(2).bool(), "integers"),
    (BradleyTerry(), (2, 2), torch.tensor([0, 2]), "outside of 0 to 1"),
    (REAL, (2, 1), torch.zeros(2), "reshape the targets"),
    (REAL, (1, 1), torch.tensor(NAN), "NaN"),
    (REAL, (2, 1), torch.zeros(2, 1, dtype=torch.complex64), "real"),
    (Regression(torch.ones(2)), (2, 3), torch.zeros(2, 3), "2 values"),
    (Bernoulli(), (2, 1), torch.full((2, 1), 2.0), "0 or 1"),
    (Poisson(), (2, 1), torch.full((2, 1), 0.5), "counts"),
    (Poisson(), (2, 1), torch.full((2, 1), -1.0), "counts"),
    (HeteroscedasticRegression(), (3, 3), torch.zeros(3, 1), "twice as many outputs"),
    (HeteroscedasticRegression(), (3, 2), torch.zeros(3, 2), "twice as many outputs"),
    (HeteroscedasticRegression(), (3, 4), torch.zeros(3, 1), "twice as many outputs"),
    (HeteroscedasticRegression(), (1, 2), torch.tensor(NAN), "finite"),
]


@pytest.mark.parametrize("likelihood, f, y, words", UNSUITABLE)
def test_unsuitable_targets_raise(likelihood, f, y, words):
    error = TypeError if words in ("integers", "real") else ValueError
    with pytest.raises(error, match=words):
        likelihood.check(torch.zeros(f), y)


def test_missing_methods_and_unsuitable_noise_are_named():
    for name in ("log_prob", "hessian_sqrt_product", "mean", "variance", "sample"):
        count = 2 if name in ("log_prob", "hessian_sqrt_product") else 1
        with pytest.raises(NotImplementedError, match=f"Likelihood must define {name}"):
            getattr(Likelihood(), name)(*[torch.zeros(1, 1)] * count)
    for sigma in (0.0, -1.0, float("inf"), [[1.0]]):
        with pytest.raises(ValueError, match="sigma_noise"):
            Regression(torch.tensor(sigma))


# likelihoods of the user

F = torch.linspace(-3, 4, 24).view(12, 2)
LABELS = (torch.arange(24).view(12, 2) % 3 == 0).float()


class WrongCurvature(Bernoulli):
    def curvature(self, f):
        return 1.02 * super().curvature(f)


class WrongGradient(Bernoulli):
    def gradient(self, f, y):
        return super().gradient(f, y) + 0.02


class WrongRoot(Binomial):
    def hessian_product(self, f, u):
        return 3 * f.sigmoid() * (1 - f.sigmoid()) * u

    def hessian_sqrt_product(self, f, noise):
        return 1.02 * super().hessian_sqrt_product(f, noise)


class LabelNoise(Bernoulli):
    """Whose log_prob alone was changed."""

    def log_prob(self, f, y):
        return super().log_prob(f, 0.9 * y + 0.05)


class Detached(Bernoulli):
    def log_prob(self, f, y):
        return super().log_prob(f.detach(), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_derivatives_raise(dtype, caplog):
    f, y = F.to(dtype), LABELS.to(dtype)
    for own, words in (
        (WrongCurvature, "neither the Hessian of -log_prob"),
        (WrongGradient, "gradient.f, y. is not the gradient"),
        (WrongRoot, "S Sᵀ u by hessian_sqrt_product is not H u"),
        (LabelNoise, "gradient.f, y. is not the gradient"),
    ):
        with pytest.raises(ValueError, match=f"{own.__name__}.*{words}"):
            compare_with_log_prob(own(), f, y)
    with caplog.at_level(logging.WARNING):
        compare_with_log_prob(Detached(), f, y)
    assert "Detached could not be compared with its log_prob" in caplog.text
    fit = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
    case = tiny("bernoulli")
    for weights in (None, torch.ones(30)):
        la = LinearisedLaplace(case.model, WrongCurvature())
        with pytest.raises(ValueError, match="Batch 0: WrongCurvature"):
            la.fit(case.x, case.y, weights=weights, **fit)


class InOnePrecision(Bernoulli):
    """Whose own tensors allow single precision alone."""

    def log_prob(self, f, y):
        return super().log_prob(f @ torch.eye(2, dtype=torch.float32), y)


class OneSite(Likelihood):
    """Of numbers (B, sites, C), by default derivatives."""

    elementwise = True

    def log_prob(self, f, y):
        return -((y - f.exp()) ** 2 - (y - f.exp()) ** 2 + softplus(f) - y * f).flatten(-2).sum(-1)

    def hessian_sqrt_product(self, f, noise):
        return (0.5 * (logsigmoid(f) + logsigmoid(-f))).exp() * noise

    def mean(self, f):
        return f.sigmoid()


def own(kind, *args):
    return type("Own", (kind,), {})(*args)


RIGHT = {
    "binomial": (Binomial(), F, 3 * LABELS),
    "certain": (Binomial(), 60 + F, 3 * LABELS),
    "very certain": (Binomial(), 1e4 + F, 3 * LABELS),
    "in one precision": (InOnePrecision(), F, LABELS),
    "labels left out": (own(Classification), F, torch.arange(12) % 3 % 2 * 101 - 100),
    "sites": (OneSite(), F.view(4, 3, 2), LABELS.view(4, 3, 2)),
    "small noise": (own(Regression, 1e-6), F, F + 1e-6 * LABELS),
    "large noise": (own(Regression, 1e6), F, F + 1e6 * LABELS),
}


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_derivatives_pass(kind, dtype, caplog):
    likelihood, f, y = RIGHT[kind]
    dtype = torch.float32 if kind == "in one precision" else dtype
    compare_with_log_prob(likelihood, f.to(dtype), y.to(dtype) if y.is_floating_point() else y)
    assert not caplog.records


class Probit(Likelihood):
    """Convex, with a Hessian that depends on y: H is its expectation, the Fisher information."""

    elementwise, factor = True, 1.0

    def log_prob(self, f, y):
        return torch.special.log_ndtr((2 * y - 1) * f).sum(-1)

    def hessian_sqrt_product(self, f, noise):
        density = torch.distributions.Normal(0.0, 1.0).log_prob(f)
        both = torch.special.log_ndtr(f) + torch.special.log_ndtr(-f)
        return self.factor * (density - 0.5 * both).exp() * noise

    def mean(self, f):
        return torch.special.ndtr(f)


class SampledProbit(Probit):
    def sample(self, f, generator=None):
        return torch.bernoulli(self.mean(f), generator=generator)


def test_the_fisher_information_is_checked_by_draws(caplog):
    f, y = F[4:].double(), LABELS[4:].double()
    compare_with_log_prob(SampledProbit(), f, y)
    for likelihood in (Probit(), type("Wrong", (SampledProbit,), {"factor": 1.2})()):
        with pytest.raises(ValueError, match=r"define sample\(f, generator\)"):
            compare_with_log_prob(likelihood, f, y)
    assert not caplog.records
    compare_with_log_prob(type("Bent", (Probit,), {"convex": False})(), f, y)
    assert "the posterior is that of the H given" in caplog.text


class FromOne(Classification):
    """Classes are counted from 1: ``align`` must be called once for every target."""

    def align(self, y, class_dim):
        return super().align(y, class_dim) - 1


class OneHot(Classification):
    def align(self, y, class_dim):
        return super().align(y.argmax(class_dim), class_dim)


@pytest.mark.parametrize("weighted", [False, True])
def test_targets_are_aligned_once_in_every_path(weighted):
    case, found = tiny("classification"), []
    weights = 0.5 + torch.rand(30, generator=torch.Generator().manual_seed(0)) if weighted else None
    others = (FromOne(), case.y + 1), (OneHot(), nn.functional.one_hot(case.y))
    for likelihood, y in (("classification", case.y), *others):
        options = {"num_samples": 4, "class_dim": 1}
        la = posterior_of(case.model, likelihood, case.x, y, **options, weights=weights, em_steps=2)
        before = la.predict(case.x)
        record = compare({"la": la}, case.x, y).records["la"]
        la.calibrate(case.x + 1e-3, y)
        after = la.predict(case.x)
        values = [la.prior_precision, before.log_prob(y), before.joint_log_prob(y)]
        values += [torch.tensor([*record.values(), *la.calibration[:4]])]
        found.append([*values, after.log_prob(y), after.p_value, after.prediction_set(0.8)])
    for other in found[1:]:
        assert_close(other, found[0], equal_nan=True)
