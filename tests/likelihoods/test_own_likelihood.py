"""A user's own likelihood is compared with derivatives of its log_prob."""

import logging

import pytest
import torch
from tiny import Binomial, tiny
from torch import nn
from torch.nn.functional import logsigmoid, softplus
from torch.testing import assert_close

from torch_lla_em import Bernoulli, Classification, LinearisedLaplace, Regression, compare
from torch_lla_em.likelihoods import Likelihood, compare_with_log_prob

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
    with pytest.raises(ValueError, match=f"{own.__name__}.*{message}"):
        compare_with_log_prob(own(), f, y)


@pytest.mark.parametrize("weights", [None, torch.ones(30)])
def test_fits_check_the_derivatives(weights):
    case = tiny("bernoulli")
    with pytest.raises(ValueError, match="Batch 0: WrongCurvature"):
        LinearisedLaplace(case.model, WrongCurvature(), temperature=0.5).fit(
            *(case.x, case.y),
            weights=weights,
            em_steps=0,
            prior_precision=1.0,
            progress_bar=False,
        )


class FromOne(Classification):
    """Classes are counted from 1: ``align`` must be called once for every target."""

    def align(self, y, class_dim):
        return super().align(y, class_dim) - 1


class OneHot(Classification):
    def align(self, y, class_dim):
        return super().align(y.argmax(class_dim), class_dim)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "own, to_own", [(FromOne, lambda y: y + 1), (OneHot, nn.functional.one_hot)]
)
def test_targets_are_aligned_once_in_every_path(own, to_own, weighted, temperature):
    case = tiny("classification")
    weights = 0.5 + torch.rand(30, generator=torch.Generator().manual_seed(0)) if weighted else None
    found = []
    for likelihood, y in (("classification", case.y), (own(), to_own(case.y))):
        la = LinearisedLaplace(
            case.model, likelihood, num_samples=4, temperature=temperature, class_dim=1
        )
        la.fit(case.x, y, weights=weights, em_steps=2, progress_bar=False)
        prediction = la.predict(case.x)
        one = compare({"la": la}, case.x, y).records["la"]
        del one["seconds"]
        before = [prediction.log_prob(y), prediction.joint_log_prob(y)]
        la.calibrate(case.x + 1e-3, y)
        after = la.predict(case.x)
        evidence = torch.tensor([*one.values(), *la.calibration[:4]])
        sets = after.prediction_set(0.8)
        found.append(
            [la.prior_precision, *before, evidence, after.log_prob(y), after.p_value, sets]
        )
    for plain, ours in zip(*found):
        assert_close(plain, ours, equal_nan=True)


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
