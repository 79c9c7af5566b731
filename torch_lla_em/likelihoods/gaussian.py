"""Likelihoods with Gaussian observation noise, constant or predicted, also of linear measurements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import log, pi

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from torch_lla_em.likelihoods.base import Likelihood, require_real
from torch_lla_em.likelihoods.elementwise import ElementwiseLikelihood
from torch_lla_em.likelihoods.sums import mean_square, sum_rows
from torch_lla_em.runtime import check_options, normal


class Gaussian(Likelihood):
    """Base class for continuous targets that are normally distributed around their mean."""

    real_valued = True

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.mean(f)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean(f)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + self.variance(f).sqrt() * noise


class Regression(Gaussian, ElementwiseLikelihood):
    """Gaussian observation noise, y ~ N(f, σ²); targets have the shape of the outputs.

    Args:
        sigma_noise (float or Tensor (C,), optional): Standard deviation σ of the noise from which EM
            starts, one number for all outputs or one per output. Default None: the standard
            deviation of the network's residuals. Set it to learn one σ per output, or if the
            network has overfitted its training set, so that its residuals are too small.

    Raises:
        TypeError: If sigma_noise is not a number or tensor; in ``fit``, if targets are complex.
        ValueError: If sigma_noise is not positive; in ``fit``, if it does not fit the outputs.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 1), Regression(0.1))
        >>> la = la.fit(torch.randn(20, 2), torch.randn(20, 1), progress_bar=False)
        >>> mean, variance = la(torch.randn(5, 2))  # the variance includes σ²
    """

    is_quadratic = True

    normalised = True
    """Whether log_prob includes its constant, next to which small residuals may be rounded away."""

    def __init__(self, sigma_noise: float | Tensor | None = None):
        check_options(sigma_noise=sigma_noise)
        self.from_data = sigma_noise is None
        """Whether a fit starts σ from the network's own residuals; until then it is 1."""

        sigma_noise = 1.0 if sigma_noise is None else sigma_noise
        sigma_noise = torch.as_tensor(sigma_noise, dtype=torch.float64, device="cpu")
        if sigma_noise.dim() > 1:
            raise ValueError(
                f"sigma_noise must be a positive number or one per output, not {sigma_noise}."
            )
        self.sigma_noise = sigma_noise.detach().clone()

    @property
    def observation_noise(self) -> Tensor:
        return self.sigma_noise

    def with_noise(self, sigma_noise: Tensor) -> Regression:
        other = copy.copy(self)
        other.sigma_noise, other.from_data = sigma_noise, False
        return other

    def offset(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        return mean if type(self).mean is Regression.mean else None

    def without_constant(self) -> Regression:
        other = copy.copy(self)
        other.normalised = False
        return other

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self._sigma(f)
        terms = -0.5 * ((y - self.mean(f)) / sigma) ** 2
        if self.normalised:
            terms = terms - sigma.log() - 0.5 * log(2 * pi)
        return sum_rows(terms, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (self.mean(f) - y) / self._sigma(f) ** 2

    def curvature(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** -2).expand_as(f)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** 2).expand_as(self.mean(f))

    def predictive_log_prob(
        self, f: Tensor, deviations: Tensor, y: Tensor, joint: bool = False
    ) -> Tensor:
        error, variance, spread = y - self.mean(f), self.variance(f), self.mean(deviations)
        if joint:
            return _joint_log_density(error, spread, variance)
        variance = variance + mean_square(spread)
        return sum_rows(-0.5 * (error**2 / variance + (2 * pi * variance).log()), y)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if self.sigma_noise.dim() and len(self.sigma_noise) != f.shape[-1]:
            raise ValueError(
                f"sigma_noise has {len(self.sigma_noise)} values, but the network has "
                f"{f.shape[-1]} outputs: pass one number, or one per output."
            )

    def _sigma(self, f: Tensor) -> Tensor:
        sigma = self.sigma_noise
        if sigma.dim() or sigma.device == f.device:
            return sigma.to(f, non_blocking=f.is_cuda)  # avoids a GPU sync in every batch
        return f.new_full((), sigma.item())


class HeteroscedasticRegression(Gaussian, ElementwiseLikelihood):
    """y ~ N(μ, exp(s)): the first C of the 2 C outputs are means μ, the others log variances s.

    -log p = ½ s + ½ (y - μ)² exp(-s) is not convex in (μ, s) together. H is its expectation
    over y, the Fisher information diag(exp(-s), ½), which is positive semi-definite, does not
    depend on y, and equals the generalised Gauss-Newton matrix. The posterior includes both μ and s,
    so the uncertainty of the noise is included too. The mode is found with H in place of the Hessian
    (Fisher scoring), which is slower than Newton's method: expect a relative error of about 1e-3.

    Raises:
        ValueError: In ``fit``, if there are not twice as many outputs as targets.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 2), "heteroscedastic")  # outputs (B, 2 C)
        >>> la = la.fit(torch.randn(40, 2), torch.randn(40, 1), progress_bar=False)  # y: (B, C)
    """

    convex = False

    def offset(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        return torch.cat([mean, variance.log()])

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        return sum_rows(-0.5 * (s + (y - mu) ** 2 * (-s).exp() + log(2 * pi)), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        error, precision = mu - y, (-s).exp()
        return torch.cat([error * precision, 0.5 - 0.5 * error**2 * precision], -1)

    def curvature(self, f: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def mean(self, f: Tensor) -> Tensor:
        return f.chunk(2, -1)[0]

    def variance(self, f: Tensor) -> Tensor:
        return f.chunk(2, -1)[1].exp()

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] % 2 or y.shape != (*f.shape[:-1], f.shape[-1] // 2):
            raise ValueError(
                f"Targets have shape {tuple(y.shape)} and the outputs {tuple(f.shape)} (classes "
                "last), but there must be twice as many outputs as targets: all means first, "
                "then all log variances."
            )
        require_real(y)


class LinearOperatorRegression(Regression):
    """y ~ N(A f, σ²): noisy linear measurements of the outputs, as in tomography; y is (B, M).

    ``Prediction.mean``, ``.variance`` and ``.samples`` are those of the output f (the image);
    ``.expectation``, ``.predictive_variance``, ``.aleatoric``, ``.epistemic`` and the log
    probabilities are those of y. The root S = Aᵀ/σ needs one random number per measurement, and
    there is one per output. Therefore there can be at most as many measurements as outputs.

    Args:
        operator (callable): The linear map A from n outputs (n, *shape) to A f, shape (n, M). PyTorch
            must be able to differentiate it, as products with Aᵀ are computed by ``torch.func.vjp``.
        shape (tuple of ints): Shape of one output of the network, with the classes last.
        sigma_noise (float, optional): As in ``Regression``, one number for all measurements.
            Default None.

    Raises:
        ValueError: If sigma_noise is not one positive number; in ``fit``, if the operator is not
            linear, or does not fit the outputs or the measurements.

    Example:
        >>> A = torch.randn(2, 3)
        >>> likelihood = LinearOperatorRegression(lambda f: f @ A.T, (3,), 0.05)
        >>> la = LinearisedLaplace(torch.nn.Linear(4, 3), likelihood)
        >>> la = la.fit(torch.randn(20, 4), torch.randn(20, 2), progress_bar=False)
        >>> variance = la.predict(torch.randn(5, 4)).variance  # of the outputs f
    """

    elementwise = False

    def __init__(
        self,
        operator: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        sigma_noise: float | Tensor | None = None,
    ):
        super().__init__(sigma_noise)
        if self.sigma_noise.dim():
            raise ValueError("sigma_noise must be one number for all measurements.")
        self.operator, self.shape = operator, tuple(shape)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self._adjoint(super().gradient(f, y))

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self._adjoint(self.mean(u)) / self._sigma(u) ** 2

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        measured = self.mean(f).shape[-1]
        kept = noise.flatten(noise.dim() - len(self.shape))[..., :measured]
        return self._adjoint(kept) / self._sigma(noise)

    def mean(self, f: Tensor) -> Tensor:
        leading = f.shape[: f.dim() - len(self.shape)]
        measured: Tensor = self.operator(f.reshape(-1, *self.shape)).unflatten(0, leading)
        return measured

    def check(self, f: Tensor, y: Tensor) -> None:
        if tuple(f.shape[1:]) != self.shape:
            raise ValueError(
                f"The operator takes outputs of shape {self.shape}, but the network's have shape "
                f"{tuple(f.shape[1:])} (classes last): pass that shape to LinearOperatorRegression."
            )
        expected = self._num_measurements(f)
        if y.shape != (len(f), expected):
            raise ValueError(
                f"The measurements have shape {tuple(y.shape)}, but the operator returns "
                f"{(len(f), expected)}: flatten what belongs to one output."
            )
        if expected > f[0].numel():
            raise ValueError(
                f"There are {expected} measurements of {f[0].numel()} outputs, but at most one per "
                'output is possible: let forward_fn return A f, with likelihood="regression".'
            )
        require_real(y)

    def _adjoint(self, v: Tensor) -> Tensor:
        """Return Aᵀ v, shape (..., *shape), for v (..., M)."""
        rows = v.reshape(-1, v.shape[-1])
        transpose = torch.func.vjp(self.operator, v.new_zeros(len(rows), *self.shape))[1]
        outputs: Tensor = transpose(rows)[0].unflatten(0, v.shape[:-1])
        return outputs

    def _num_measurements(self, f: Tensor) -> int:
        """Return M, after a check on a random output that the operator is linear."""
        row = torch.zeros(1, dtype=torch.long, device=f.device)
        u = normal(0, 0, 0, row, f[0].numel()).to(f.dtype).view(1, *self.shape)
        Au = self.operator(u)
        if Au.dim() != 2:
            raise ValueError(
                f"The operator returns shape {tuple(Au.shape)} for one output: it must return "
                "(n, M) for n outputs."
            )
        if ((u * self._adjoint(Au)).sum() - Au.square().sum()).abs() > 1e-3 * Au.square().sum():
            raise ValueError(
                "The operator is not linear, or not differentiable by PyTorch: ⟨u, Aᵀ A u⟩ and "
                "⟨A u, A u⟩ differ. If it is computed outside of PyTorch, pass the `apply` of a "
                "torch.autograd.Function with setup_context, whose backward returns Aᵀ v."
            )
        return Au.shape[-1]


def _joint_log_density(error: Tensor, deviations: Tensor, variance: Tensor) -> Tensor:
    """Return log N(error; 0, D Dᵀ / K + diag(variance)), shape (), for D of shape (K, ...)."""
    root = deviations.flatten(1).T.double() / len(deviations) ** 0.5
    mean = torch.zeros_like(root[:, 0])
    density = LowRankMultivariateNormal(
        mean, root, variance.flatten().double(), validate_args=False
    )
    log_density: Tensor = density.log_prob(error.flatten().double())
    return log_density
