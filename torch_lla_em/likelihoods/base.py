"""The base class of likelihoods p(y | f), and functions that its subclasses share."""

from __future__ import annotations

import torch
from torch import Tensor


class Likelihood:
    """Base class of all likelihoods p(y | f), for targets y and outputs f of a network.

    Outputs f have shape (..., B, *sites, C), with the classes or output columns last; leading
    sample axes broadcast. Targets y have shape (B, *sites), or that of the outputs if
    ``elementwise``. A subclass must define ``log_prob``, ``hessian_sqrt_product`` and
    ``mean``. ``gradient`` and ``hessian_product`` have defaults by automatic differentiation.
    ``variance``, ``sample`` and ``entropy`` are optional: define them for
    aleatoric uncertainty, draws of y and entropies. Every fit compares
    gradient and Hessian with derivatives of ``log_prob`` on the first batch.

    Example:
        >>> class Binomial(Likelihood):  # successes in three trials
        ...     elementwise = True
        ...
        ...     def log_prob(self, f, y):
        ...         return (y * f - 3 * torch.nn.functional.softplus(f)).sum(-1)
        ...
        ...     def hessian_sqrt_product(self, f, noise):
        ...         return (3 * f.sigmoid() * (-f).sigmoid()).sqrt() * noise
        ...
        ...     def mean(self, f):
        ...         return 3 * f.sigmoid()
        >>> la = LinearisedLaplace(model, Binomial())
    """

    convex = True
    """Whether -log p is convex in f, so that the linear model has one mode."""

    is_quadratic = False
    """Whether -log p is quadratic in f, so that the mode is one linear solve."""

    elementwise = False
    """Whether every output has its own target, so that y has the axis C as f does."""

    real_valued = False
    """Whether targets are continuous; a prediction is then (mean, variance)."""

    gives_probabilities = False
    """Whether E[y | f] is a probability, so that its logarithm is meaningful."""

    is_softmax = False
    """Whether H = diag(p) - p pᵀ for p = E[y | f], so that blocks need not be stored."""

    from_data = False
    """Whether a fit starts σ from the network's own residuals."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f) of each example, (..., B): the sum over its sites."""
        raise self._lacks("log_prob(f, y)")

    def label_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p of each single label, (..., B, labels); their sum over an example is
        ``log_prob``.

        A label is the target of a site, or of one output if ``elementwise``. By default
        ``log_prob`` is called with every label as an example of its own, with axes of size 1 for
        sites. Define it if the likelihood has parameters for each output or site: ``calibrate`` and
        ``compare`` call it for examples with several labels.
        """
        labels, ones = y.shape[1:].numel(), (1,) * (y.dim() - 1)
        shape = ones if self.elementwise else (*ones, f.shape[-1])
        leading = f.shape[: f.dim() - y.dim() - (not self.elementwise)]
        pairs = f.reshape(*leading, y.numel(), *shape), y.reshape(-1, *ones)
        terms: Tensor = self.log_prob(*pairs).unflatten(-1, (len(y), labels))
        return terms

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, where S is a root of the Hessian of the loss: S Sᵀ = H(f).

        Args:
            f (Tensor): Outputs of the network, shape (..., B, *sites, C).
            noise (Tensor): ε, in the shape of the outputs; leading axes broadcast.

        Returns:
            S ε, in the broadcast shape of f and ε.
        """
        raise self._lacks(
            "hessian_sqrt_product(f, noise): any linear map S of the noise with S Sᵀ equal to the "
            "Hessian of -log_prob in f"
        )

    def mean(self, f: Tensor) -> Tensor:
        """Return E[y | f]; for classes these are the probabilities.

        Args:
            f (Tensor): Outputs of the network, shape (..., B, *sites, C).

        Returns:
            The means, in the shape of f.
        """
        raise self._lacks("mean(f)")

    def log_mean(self, f: Tensor) -> Tensor:
        """Return log E[y | f] in the shape of f."""
        return self.mean(f).log()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of -log p(y | f) in f. Default: by automatic differentiation."""
        gradient: Tensor = torch.func.grad(lambda f: -self.log_prob(f, y).sum())(f)
        return gradient

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        """Return H(f) u in the shape of u. Default: S(Sᵀ u), where Sᵀ is computed by reverse
        mode."""
        f = f.expand_as(u)
        transpose = torch.func.vjp(lambda e: self.hessian_sqrt_product(f, e), u)[1]
        return self.hessian_sqrt_product(f, transpose(u)[0])

    def expected_hessian(self, f: Tensor) -> Tensor:
        """Return the average of H over functions f (S, B, *sites, C), as blocks (B, *sites, C, C).

        It is the diagonal, (B, *sites, C), if ``elementwise``. Default: by ``hessian_product``.
        """
        if self.elementwise:
            return self.hessian_product(f, torch.ones_like(f)).mean(0)
        C = f.shape[-1]
        unit = torch.eye(C, dtype=f.dtype, device=f.device).view(C, *(1,) * (f.dim() - 2), C)
        total = f.new_zeros(C, *f.shape[1:])
        for one in f:
            total += self.hessian_product(one, unit.expand(C, *one.shape))
        return (total / len(f)).movedim(0, -1)

    def variance(self, f: Tensor) -> Tensor:
        """Return Var[y | f] in the shape of f."""
        raise self._lacks("variance(f) for aleatoric uncertainty")

    def uncertainties(self, f: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic part of the uncertainty about y.

        ``f`` are the outputs of S functions, (S, B, *sites, C), and ``weights`` their weights,
        (S,), with sum 1; None: equal ones. Default: the parts of Var[y], in the shape of outputs;
        for labels, of the entropy.
        """
        mean, variance = self.mean(f), self.variance(f)
        spread = (mean - average(mean, weights)).square()
        return average(variance, weights), average(spread, weights)

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the entropy of y, (B, *sites), under functions with ``weights``, as in
        ``uncertainties``."""
        raise self._lacks("entropy(f, weights). Or use .aleatoric and .epistemic")

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y given f, with its leading axes; ``generator`` None: torch's own."""
        raise self._lacks("sample(f, generator)")

    def predictive_log_prob(
        self, f: Tensor, deviations: Tensor, y: Tensor, joint: bool = False
    ) -> Tensor | None:
        """Return log E[p(y | f)] for normally distributed outputs, (B,), or None if it has no
        closed form.

        ``f`` are the means, (B, *sites, C), and ``deviations`` samples minus their mean, (K, B,
        *sites, C), or none. With ``joint`` all examples are one, whose outputs are correlated: the
        result is ().
        """
        return None

    def mask(self, y: Tensor) -> Tensor | None:
        """Return which sites count, as a mask or weights (B, *sites); None if every site counts
        once."""
        return None

    def labelled(self, y: Tensor) -> Tensor:
        """Return whether each example has a target that counts, (B,)."""
        mask = self.mask(y)
        if mask is None:
            return torch.ones(len(y), dtype=torch.bool, device=y.device)
        return mask.unsqueeze(-1).flatten(1).any(1)

    def align(self, y: Tensor, class_dim: int) -> Tensor:
        """Return targets of a loader as ``log_prob`` takes them, with the axis ``class_dim`` of the
        outputs last.

        Small integers become int64, as do booleans of an elementwise likelihood.
        """
        small = (torch.uint8, torch.int8, torch.int16, torch.int32)
        if y.dtype in small or (y.dtype == torch.bool and self.elementwise):
            y = y.long()
        if self.elementwise and -y.dim() <= class_dim < y.dim():
            return y.movedim(class_dim, -1)
        return y

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError or TypeError with its remedy if outputs or targets do not fit.
        Default: no check."""

    def mistaken(self, f: Tensor, y: Tensor) -> tuple[Tensor, str] | None:
        """Return log p(y), (B,), for another meaning of the outputs, with the warning if it is
        higher; None if there is no other meaning."""
        return None

    @property
    def observation_noise(self) -> Tensor | None:
        """σ, if y is E[y | f] with Gaussian noise and E[y | f] is linear in f; otherwise None."""
        return None

    def with_noise(self, sigma_noise: Tensor) -> Likelihood:
        """Return the same likelihood with ``sigma_noise``, which is one σ or one per output.
        Likelihoods without σ return themselves."""
        return self

    def offset(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """Return the constant in f, (C,) or (), for targets with this mean and variance; None if
        there is none.

        With it, the linear model has the same posterior for targets y + b, and for targets in
        another unit.
        """
        return None

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must define {method}.")


class Labels(Likelihood):
    """Base class for discrete targets: E[y | f] is a probability p with an entropy."""

    gives_probabilities = True

    def entropy_of(self, p: Tensor) -> Tensor:
        """Return the entropy of y for probabilities p."""
        raise NotImplementedError

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.entropy_of(average(self.mean(f), weights))

    def uncertainties(self, f: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p = self.mean(f)  # the parts are the expected entropy and the mutual information
        expected = average(self.entropy_of(p), weights)
        return expected, (self.entropy_of(average(p, weights)) - expected).clamp_min(0)


class ElementwiseLikelihood(Likelihood):
    """Base class for independent targets, whose H is diagonal; ``check`` requires y of the shape of
    f.

    A subclass defines ``log_prob``, ``curvature`` and ``mean``.
    """

    elementwise = True

    def curvature(self, f: Tensor) -> Tensor:
        """Return the diagonal of H(f), in the shape of f."""
        raise NotImplementedError

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.curvature(f) * u

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self.curvature(f).sqrt() * noise

    def check(self, f: Tensor, y: Tensor) -> None:
        if y.shape != f.shape:
            raise ValueError(
                f"Targets have shape {tuple(y.shape)}, but the outputs {tuple(f.shape)}. They "
                "must be equal, as broadcasting would pair every target with every output: "
                "reshape the targets, for example with y[:, None]."
            )
        require_real(y)


def require_real(y: Tensor) -> None:
    """Raise an error if targets are not finite real numbers."""
    if y.is_complex():
        raise TypeError(f"Targets must be real numbers, not {y.dtype}.")
    if not torch.isfinite(y).all():
        raise ValueError("Targets hold NaN or infinite values: remove those examples.")


def sum_rows(terms: Tensor, y: Tensor) -> Tensor:
    """Sum over sites and outputs: (..., B, *sites, C) becomes (..., B), for targets y (B, ...)."""
    within = y.dim() - 1
    return terms.flatten(terms.dim() - within).sum(-1) if within else terms


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of values (S, ...) over S functions, with weights (S,) if they are given."""
    if weights is None:
        return values.mean(0)
    weights = weights.to(values).view(-1, *(1,) * (values.dim() - 1))
    return (weights * values).sum(0)


def mean_square(deviations: Tensor) -> Tensor:
    """Return the variance of samples, 0 if there are none."""
    return deviations.square().sum(0) / max(1, len(deviations))
