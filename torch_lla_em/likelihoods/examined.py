"""What a likelihood does at a few outputs: whether it is right there, and the same as another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Likelihood
from torch_lla_em.runtime import normals

logger = logging.getLogger("torch_lla_em")

# examples that are looked at, at most, and numbers of their outputs
_EXAMPLES, _NUMBERS = 64, 1 << 16
# times the outputs: where a network is less certain, or more
_FACTORS = 1.0, 0.25, 4.0

_LEAST_TOLERANCE = 1e-3
_DRAWS = 256
_SAME = 1e-4


class Example(NamedTuple):
    """A few outputs and targets, and what a likelihood makes of them."""

    outputs: Tensor
    targets: Tensor
    numbers: Tensor
    """Rows for log p, its gradient, H u, S u, mean and variance: a weighted sum and the norm."""

    @classmethod
    def of(cls, likelihood: Likelihood, f: Tensor, y: Tensor) -> Example:
        """Return what a likelihood makes of the first outputs and targets."""
        f, y = _few(f, y)
        rows = [row for factor in _FACTORS for row in _numbers(likelihood, factor * f, y)]
        return cls(f.cpu(), y.cpu(), torch.stack(rows).cpu())

    @classmethod
    def known(cls, tensors: dict[str, Tensor]) -> Example | None:
        """Return the example among tensors of ``tensors``, or None if there is none."""
        found = [tensors.get(f"example_{name}") for name in cls._fields]
        return None if None in found else cls(*found)

    def tensors(self) -> dict[str, Tensor]:
        """Return what ``known`` takes."""
        return {f"example_{name}": tensor for name, tensor in self._asdict().items()}

    def by(self, likelihood: Likelihood, device: torch.device) -> Example:
        """Return what another likelihood makes of the same outputs and targets."""
        return self.of(likelihood, self.outputs.to(device), self.targets.to(device))

    def contradicts(self, likelihood: Likelihood, device: torch.device) -> bool:
        """Whether a likelihood makes something else of the same outputs and targets."""
        try:
            numbers = self.by(likelihood, device).numbers
        except Exception:  # as of outputs or targets of another shape
            return True
        rounding = 100 * torch.finfo(self.outputs.dtype).eps * self.outputs.numel() ** 0.5
        room = _SAME * self.numbers.norm(dim=1) + rounding
        return bool(((numbers - self.numbers).norm(dim=1) > room).any())


def _few(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first outputs and targets, as many as are looked at."""
    count = min(_EXAMPLES, max(2, _NUMBERS // max(1, f[:1].numel())))
    return f[:count].detach().clone(), y[:count].detach().clone()


def _numbers(likelihood: Likelihood, f: Tensor, y: Tensor) -> Iterator[Tensor]:
    u = _direction(f)
    found = [
        likelihood.log_prob(f, y),
        likelihood.gradient(f, y),
        likelihood.hessian_product(f, u),
        likelihood.hessian_sqrt_product(f, u),
        likelihood.mean(f),
    ]
    with suppress(NotImplementedError):
        found.append(likelihood.variance(f))
    for each in found:
        flat = each.detach().double().flatten().nan_to_num(0, 0, 0)
        yield torch.stack([flat @ _direction(flat), flat.norm()])


def _direction(like: Tensor) -> Tensor:
    """Return standard normal numbers, always the same, of the shape of a tensor."""
    row = torch.zeros(1, dtype=torch.long, device=like.device)
    return normals(0, 0, [0], row, like.numel()).view(like.shape).to(like)


def compare_with_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Raise where gradient, H or S of a likelihood of one's own are not those of its log_prob.

    They are compared at a few examples' outputs and at a tenth of them, where a network is less
    certain. H may be the Hessian of -log p, or its expectation over y (the Fisher information).
    """
    likelihood = getattr(likelihood, "untempered", likelihood)
    if type(likelihood).__module__.startswith("torch_lla_em."):
        return
    f, y = _few(f, y)
    f, y = torch.cat([f, f / 10]), torch.cat([y, y])
    for dtype in (torch.float64, f.dtype):
        try:
            of = _Derivatives.of(
                likelihood, f.to(dtype), y.to(dtype) if y.is_floating_point() else y
            )
        except Exception as error:  # whatever log_prob does not do in this precision, or twice
            reason = error
            continue
        of.check(likelihood)
        return
    logger.warning(
        "The derivatives of %s could not be compared with its log_prob (%s: %s): check them yourself.",
        type(likelihood).__name__,
        type(reason).__name__,
        str(reason).split("\n")[0],
    )


class _Derivatives(NamedTuple):
    """Derivatives of log_prob by autograd, and what the likelihood says that they are."""

    f: Tensor
    y: Tensor
    u: Tensor
    slope: Tensor
    """∇(-log p)."""

    bend: Tensor
    """∇²(-log p) u."""

    gradient: Tensor
    Hu: Tensor
    SSu: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, f: Tensor, y: Tensor) -> _Derivatives:
        u = _direction(f)
        slope, bend = _by_autograd(likelihood, f, y, u)
        with torch.enable_grad():
            transpose = torch.func.vjp(lambda e: likelihood.hessian_sqrt_product(f, e), u)[1]
            SSu = likelihood.hessian_sqrt_product(f, transpose(u)[0])
        gradient, Hu = likelihood.gradient(f, y), likelihood.hessian_product(f, u)
        mask = likelihood.mask(y)
        if mask is not None:
            gradient, Hu, SSu = (each * mask.unsqueeze(-1) for each in (gradient, Hu, SSu))
        return cls(f, y, u, slope, bend, gradient.detach(), Hu.detach(), SSu.detach())

    def check(self, likelihood: Likelihood) -> None:
        """Raise where they differ."""
        name = type(likelihood).__name__
        error = self._error(self.gradient, self.slope)
        if error:
            raise ValueError(
                f"{name}.gradient(f, y) is not the gradient of -log_prob in f: it is off by "
                f"{error} on the first batch. Correct it, or leave it out: the default takes it of "
                "log_prob."
            )
        error = self._error(self.SSu, self.Hu)
        if error:
            raise ValueError(
                f"{name}: S Sᵀ u by hessian_sqrt_product is not H u by hessian_product, but off by "
                f"{error} on the first batch. Correct one of them, or leave hessian_product out: "
                "the default is S Sᵀ u."
            )
        error = self._error(self.Hu, self.bend)
        if not error or self._is_fisher(likelihood):
            return
        message = (
            f"{name}: H u by hessian_product (or curvature, or S Sᵀ u) is neither the Hessian of "
            f"-log_prob in f, from which it is off by {error} on the first batch, nor its "
            "expectation over y"
        )
        if likelihood.convex:
            raise ValueError(
                f"{message}. Correct it; if it is that expectation, define sample(f, generator), "
                "by which it is checked."
            )
        logger.warning("%s: error bars are those of the H given.", message)

    def _error(self, found: Tensor, expected: Tensor) -> str:
        """Return the relative distance in percent where it is more than rounding, else ""."""
        finite = found.isfinite() & expected.isfinite()
        gap, size = ((found - expected)[finite]).norm(), expected[finite].norm()
        eps = torch.finfo(found.dtype).eps
        tolerance = max(_LEAST_TOLERANCE, 30 * eps**0.5)
        if gap <= tolerance * size + 100 * eps * self.u.norm():
            return ""
        return f"{100 * (gap / size.clamp_min(1e-300)).item():.3g} %"

    def _is_fisher(self, likelihood: Likelihood) -> bool:
        """Whether ⟨u, H u⟩ is that of the Hessian's expectation over y, by draws of y."""
        generator = torch.Generator(self.f.device).manual_seed(0)
        draws = []
        try:
            for _ in range(_DRAWS):
                y = likelihood.sample(self.f, generator)
                draws.append((_by_autograd(likelihood, self.f, y, self.u)[1] * self.u).sum())
        except NotImplementedError:
            return False
        each = torch.stack(draws)
        room = 5 * each.std() / _DRAWS**0.5 + _LEAST_TOLERANCE * each.mean().abs()
        return bool(((self.u * self.Hu).sum() - each.mean()).abs() <= room)


def _by_autograd(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∇(-log p) and ∇²(-log p) u."""
    with torch.enable_grad():
        at = f.clone().requires_grad_()
        loss = -likelihood.log_prob(at, y).sum()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        bend = torch.zeros_like(f)
        if slope.requires_grad:
            (bend,) = torch.autograd.grad((slope * u).sum(), at)
    return slope.detach(), bend
