"""A user's own likelihood is compared with derivatives of its log_prob."""

import logging

import pytest
import torch
from tiny import Binomial, tiny
from torch.nn.functional import logsigmoid, softplus

from torch_lla_em import Bernoulli, Classification, LinearisedLaplace, Regression
from torch_lla_em.likelihoods import Likelihood, Weighted, compare_with_log_prob, tempered

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


WRONG = {
    "curvature": (WrongCurvature, "neither the Hessian of -log_prob"),
    "gradient": (WrongGradient, "gradient.f, y. is not the gradient"),
    "root": (WrongRoot, "S Sᵀ u by hessian_sqrt_product is not H u"),
    "log_prob": (LabelNoise, "gradient.f, y. is not the gradient"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_derivatives_raise(kind, dtype):
    (own, message), f, y = WRONG[kind], F.to(dtype), LABELS.to(dtype)
    packed = torch.stack([y, torch.ones_like(y)], -1)
    for likelihood, targets in (
        (own(), y),
        (tempered(own(), 0.5), y),
        (Weighted(tempered(own(), 0.5)), packed),
    ):
        with pytest.raises(ValueError, match=f"{own.__name__}.*{message}"):
            compare_with_log_prob(likelihood, f, targets)


def test_fits_check_the_derivatives():
    case = tiny("bernoulli")
    with pytest.raises(ValueError, match="Batch 0: WrongCurvature"):
        LinearisedLaplace(case.model, WrongCurvature()).fit(
            [(case.x, case.y)], em_steps=0, prior_precision=1.0, progress_bar=False
        )


class Probit(Likelihood):
    """Convex, with a Hessian that depends on y: H is its expectation, the Fisher information."""

    elementwise = True

    def log_prob(self, f, y):
        return torch.special.log_ndtr((2 * y - 1) * f).sum(-1)

    def hessian_sqrt_product(self, f, noise):
        density = torch.distributions.Normal(0.0, 1.0).log_prob(f)
        both = torch.special.log_ndtr(f) + torch.special.log_ndtr(-f)
        return (density - 0.5 * both).exp() * noise

    def mean(self, f):
        return torch.special.ndtr(f)


class SampledProbit(Probit):
    def sample(self, f, generator=None):
        return torch.bernoulli(self.mean(f), generator=generator)


class WrongProbit(SampledProbit):
    def hessian_sqrt_product(self, f, noise):
        return 1.2 * super().hessian_sqrt_product(f, noise)


class BentProbit(Probit):
    convex = False


def test_the_fisher_information_is_checked_by_draws(caplog):
    f, y = F[4:].double(), LABELS[4:].double()
    compare_with_log_prob(SampledProbit(), f, y)
    for likelihood in (Probit(), WrongProbit()):
        with pytest.raises(ValueError, match=r"define sample\(f, generator\)"):
            compare_with_log_prob(likelihood, f, y)
    assert not caplog.records
    compare_with_log_prob(BentProbit(), f, y)
    assert "the posterior is that of the H given" in caplog.text


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


RIGHT = {
    "binomial": (Binomial(), F, 3 * LABELS),
    "certain": (Binomial(), 60 + F, 3 * LABELS),
    "very certain": (Binomial(), 1e4 + F, 3 * LABELS),
    "in one precision": (InOnePrecision(), F, LABELS),
    "labels left out": (
        type("Own", (Classification,), {})(),
        F,
        torch.arange(12) % 3 % 2 * 101 - 100,
    ),
    "sites": (OneSite(), F.view(4, 3, 2), LABELS.view(4, 3, 2)),
    "small noise": (type("Own", (Regression,), {})(1e-6), F, F + 1e-6 * LABELS),
    "large noise": (type("Own", (Regression,), {})(1e6), F, F + 1e6 * LABELS),
}


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_derivatives_pass(kind, dtype, caplog):
    likelihood, f, y = RIGHT[kind]
    dtype = torch.float32 if kind == "in one precision" else dtype
    compare_with_log_prob(likelihood, f.to(dtype), y.to(dtype) if y.is_floating_point() else y)
    assert not caplog.records


def test_a_log_prob_without_gradients_warns(caplog):
    class Detached(Bernoulli):
        def log_prob(self, f, y):
            return super().log_prob(f.detach(), y)

    with caplog.at_level(logging.WARNING):
        compare_with_log_prob(Detached(), F, LABELS)
    assert "Detached could not be compared with its log_prob" in caplog.text
