"""Checks of the derivatives of custom likelihoods, and of the meaning of outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Likelihood
from torch_lla_em.runtime import normals, report, suppressed

# the largest numbers of examples, and of their outputs, that are checked
_EXAMPLES, _NUMBERS = 64, 65_536
_TOLERANCE = 1e-3
_DRAWS = 256

_FEWEST, _CLEAR = 20, 3.0
"""Smallest number of examples for which the meaning of outputs is checked, and the number of
standard errors by which another meaning has to be better."""


def compare_with_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Raise an error if the derivatives of a custom likelihood are not those of its log_prob.

    They are compared at the first examples, and at a tenth of their outputs, where the network is
    less certain. H may be the Hessian of -log p, or its expectation over y (the Fisher
    information), which is checked by draws of y.

    Args:
        likelihood (Likelihood): The likelihood. Likelihoods of the library are not checked.
        f (Tensor): Outputs, shape (B, *sites, C).
        y (Tensor): Targets, as ``log_prob`` takes them.

    Raises:
        ValueError: If the gradient, H or S differ by more than rounding.

    Example:
        >>> compare_with_log_prob(Classification(), model(x), y)
    """
    name = type(likelihood).__name__
    if type(likelihood).__module__.startswith("torch_lla_em."):
        return
    count = min(_EXAMPLES, max(2, _NUMBERS // max(1, f[:1].numel())))
    f, y = f[:count].detach().clone(), y[:count].detach().clone()
    f, y = torch.cat([f, f / 10]), torch.cat([y, y])
    row = torch.zeros(1, dtype=torch.long, device=f.device)
    u = normals(0, 0, [0], row, f.numel()).view(f.shape)
    for dtype in (torch.float64, f.dtype):
        y = y.to(dtype) if y.is_floating_point() else y
        failures: list[Exception] = []
        with suppressed(failures):  # log_prob may not work in this precision, or not twice
            errors = _errors(likelihood, f.to(dtype), y, u.to(f.device, dtype))
        if not failures:
            break
    else:
        reason = f"{type(failures[0]).__name__}: {failures[0]}".split("\n")[0]
        report(
            "log",
            f"The derivatives of {name} could not be compared with its log_prob ({reason}): check "
            "them yourself.",
        )
        return
    of_gradient, of_root, of_H = errors
    for error, words in (
        (of_gradient, "gradient(f, y) is not the gradient of -log_prob in f"),
        (of_root, "S Sᵀ u by hessian_sqrt_product is not H u by hessian_product"),
    ):
        if error:
            raise ValueError(
                f"{name}: {words}: it is off by {error} on the first batch. Correct it, or leave "
                "gradient and hessian_product out for their defaults."
            )
    message = (
        f"{name}: H u by hessian_product (or curvature, or S Sᵀ u) is neither the Hessian of "
        f"-log_prob in f, from which it is off by {of_H} on the first batch, nor its expectation "
        "over y"
    )
    if of_H and likelihood.convex:
        raise ValueError(
            f"{message}. Correct it. If it is this expectation, define sample(f, generator), with "
            "which the check can confirm it."
        )
    if of_H:
        report("log", f"{message}: the posterior is that of the H given.")


def require_labels(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Raise an error if the log-probabilities of single labels of a custom likelihood do not sum to
    log_prob."""
    if type(likelihood).__module__.startswith("torch_lla_em."):
        return
    failures: list[Exception] = []
    with suppressed(failures):  # the default of label_log_prob may not apply
        whole, labels = likelihood.log_prob(f, y), likelihood.label_log_prob(f, y)
        if torch.allclose(labels.sum(-1), whole, _TOLERANCE, _TOLERANCE, equal_nan=True):
            return
    raise ValueError(
        f"{type(likelihood).__name__}: log_prob(f, y) is not the sum of label_log_prob(f, y), of "
        "shape (..., B, labels), whose default calls log_prob with one site or output at a time. "
        "Define label_log_prob(f, y) if the likelihood has parameters for each site or output."
    )


def warn_if_mistaken(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Report a warning if outputs f, (B, *sites, C), predict the targets clearly better when they
    are read in another way than by the likelihood.

    Args:
        likelihood (Likelihood): The likelihood, whose ``mistaken`` is the other meaning.
        f (Tensor): Outputs, classes last.
        y (Tensor): Targets, as ``log_prob`` takes them.

    Example:
        >>> warn_if_mistaken(Classification(), model(x), y)
    """
    other = likelihood.mistaken(f, y) if len(f) >= _FEWEST else None
    if other is None:
        return
    gain = other[0] - likelihood.log_prob(f.double(), y.double() if y.is_floating_point() else y)
    if gain.mean() > _CLEAR * gain.std() / len(gain) ** 0.5:
        report("log", other[1])


def _errors(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> list[str]:
    """Return the relative errors of the gradient, of S Sᵀ u and of H u in percent, as texts that
    are empty for rounding errors."""

    def by_autograd(y: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∇(-log p) and ∇²(-log p) u."""
        with torch.enable_grad():
            at = f.clone().requires_grad_()
            loss = -likelihood.log_prob(at, y).sum()
            (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
            if not gradient.requires_grad:
                return gradient, torch.zeros_like(f)
            return gradient.detach(), torch.autograd.grad((gradient * u).sum(), at)[0]

    mask, (gradient, exact) = likelihood.mask(y), by_autograd(y)
    counts, eps, words = 1 if mask is None else mask.unsqueeze(-1), torch.finfo(f.dtype).eps, []
    slope = likelihood.gradient(f, y).detach() * counts
    Hu = likelihood.hessian_product(f, u).detach() * counts
    SSu = Likelihood.hessian_product(likelihood, f, u).detach() * counts
    for computed, expected in ((slope, gradient), (SSu, Hu), (Hu, exact)):
        finite = computed.isfinite() & expected.isfinite()
        gap, size = (
            torch.where(finite, part, 0.0).norm() for part in (computed - expected, expected)
        )
        allowed = max(_TOLERANCE, 30 * eps**0.5) * size + 100 * eps * computed.numel() ** 0.5
        error = f"{100 * (gap / size.clamp_min(1e-300)).item():.3g} %"
        words.append("" if gap <= allowed else error)
    if words[2]:  # ⟨u, H u⟩ may be the expectation over y of the Hessian, estimated by draws of y
        generator = torch.Generator(f.device).manual_seed(0)
        try:
            targets = [likelihood.sample(f, generator) for _ in range(_DRAWS)]
        except NotImplementedError:
            return words
        drawn = torch.stack([(by_autograd(y)[1] * u).sum() for y in targets])
        allowed = 5 * drawn.std() / _DRAWS**0.5 + _TOLERANCE * drawn.mean().abs()
        if ((u * Hu).sum() - drawn.mean()).abs() <= allowed:
            words[2] = ""
    return words
