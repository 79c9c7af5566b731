"""Gaussian mixtures, their data, fits and densities."""

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from torch_lla_em.mixtures.em import EM, pieces, start_of
from torch_lla_em.mixtures.gaussian import Family
from torch_lla_em.runtime import check_choice, check_whole


class GaussianMixture:
    """A Gaussian mixture, p(x) = Σ_k π_k N(x | μ_k, Σ_k), by EM for the mode of its posterior (MAP).

    With the weak conjugate prior no component collapses onto a few examples. EM starts from the best of several
    k-means clusterings. All computations are in float64.

    Args:
        num_components (int): Number of components K; with labels, that of each label.
        covariance (str): Structure of Σ_k: "full" (default) or "diagonal". Choose "diagonal" if there
            are few examples per component, or hundreds of columns.
        max_steps (int): Largest number of EM steps. Default 200; increase it if a warning says that
            EM has not converged.
        tolerance (float): EM stops when the lower bound per example changes by no more than this.
            Default 1e-4; decrease it for more exact parameters.
        seed (int): Randomness of the starts, which are computed from 4,000 examples or fewer. Default 0.

    Example:
        >>> mixture = GaussianMixture(3).fit(torch.randn(500, 2))
        >>> log_prob = mixture.log_prob(torch.randn(5, 2))
    """

    parameters: Any = None
    """A named tuple of tensors in the data's coordinates; None before ``fit``."""

    classes: Tensor | None = None
    """After a fit by label, the label that each component belongs to, shape (K,)."""

    _variational = False

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Literal["full", "diagonal"] = "full",
        max_steps: int = 200,
        tolerance: float = 1e-4,
        seed: int = 0,
    ):
        check_choice("covariance", covariance, ("full", "diagonal"))
        check_whole(1, num_components=num_components, max_steps=max_steps)
        self.num_components, self.covariance = num_components, covariance
        self.max_steps, self.tolerance, self.seed = max_steps, tolerance, seed
        self.lower_bounds: list[float] = []
        self.converged = False

    def fit(self, data: Tensor | Iterable[Any], *, by_label: bool = False) -> "GaussianMixture":
        """Fit the mixture to data.

        Args:
            data (Tensor or iterable): A tensor (N, D), or batches, which are read once and joined.
            by_label (bool): Whether each label of batches (x, labels) gets ``num_components``
                components of its own. Default False. Examples with the label −100 are ignored.

        Returns:
            The mixture itself, with ``parameters``, ``converged``, and the ``lower_bounds`` at the start and after each step.

        Raises:
            ValueError: If the data are empty, not finite, fewer than components, or lack labels.
        """
        x, labels = _examples(data, by_label)
        names, counts = labels.unique(return_counts=True)
        if counts.min() < self.num_components:
            raise ValueError(
                f"{'The smallest class has' if by_label else 'The data have'} {counts.min()} examples "
                f"for {self.num_components} components. Give at most one component per example."
            )
        classes = names.repeat_interleave(self.num_components)
        family = Family(x, len(classes), self.covariance == "full", self._variational)
        em = EM(family, x, labels, classes, self.tolerance)
        first = start_of(em, torch.Generator("cpu").manual_seed(self.seed))
        *before, last = em.states(first, self.max_steps)
        self.lower_bounds = [state.bound for state in (*before, last)]
        self.parameters, self.converged = family.leave(last.parameters), last.converged
        self.classes = classes if by_label else None
        self._fitted = family, family.natural(last.parameters)
        if not self.converged:
            warnings.warn(
                f"EM has not converged after {self.max_steps} steps. Increase max_steps, or "
                "tolerance if such a fit is good enough.",
                stacklevel=2,
            )
        return self

    def __repr__(self) -> str:
        words = "not fitted"
        if self.lower_bounds:
            words = f"{'' if self.converged else 'not '}converged after {len(self.lower_bounds) - 1} steps, "
            words += f"lower bound {self.lower_bounds[-1]:.6g}"
        options = f"{self.num_components}, covariance={self.covariance!r}"
        return f"{type(self).__name__}({options}), {words}"

    def log_joint(self, x: Tensor) -> Tensor:
        """Return log p(x, component) of examples x (n, D), shape (n, K), in float64."""
        if self.parameters is None:
            raise RuntimeError("This mixture has no parameters yet. Call fit(data) first.")
        family, natural = self._fitted
        dim = natural[1].shape[1]
        if x.shape != (len(x), dim):
            raise ValueError(f"x has shape {tuple(x.shape)}, and the mixture takes (n, {dim}).")
        parts = [
            family.log_joint(natural, family.columns(part.to(natural[0].device)))
            for (part,) in pieces(x.detach())
        ]
        return torch.cat(parts, 1).T.to(x.device)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x) of examples x (n, D), shape (n,)."""
        return self.log_joint(x).logsumexp(1).to(_floating(x))

    def responsibilities(self, x: Tensor) -> Tensor:
        """Return p(component | x) of examples x (n, D), shape (n, K)."""
        return self.log_joint(x).softmax(1).to(_floating(x))

    def predict(self, x: Tensor) -> Tensor:
        """Return the most probable component of examples x (n, D), or the label if fitted by label, (n,)."""
        if self.classes is None:
            return self.log_joint(x).argmax(1)
        labels: Tensor = self.classes.unique().to(x.device)
        return labels[self.class_log_prob(x).argmax(1)]

    def class_log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x, label) of examples x (n, D) after a fit by label, (n, C), labels in increasing order."""
        if self.classes is None:
            raise RuntimeError("This mixture was fitted without labels. Fit it with by_label=True.")
        log_joint, classes = self.log_joint(x).to(_floating(x)), self.classes.to(x.device)
        each = [log_joint[:, classes == label].logsumexp(1) for label in classes.unique()]
        return torch.stack(each, 1)


class VariationalGaussianMixture(GaussianMixture):
    """A posterior over Gaussian mixtures, q(z) q(π, μ, Λ), by variational EM.

    The lower bound is the ELBO with all its constants, a bound on the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k), which is slightly below the predictive log density
    and equal to it in the limit of many examples. ``parameters`` is a ``NormalWishart``;
    ``parameters.expected()`` returns a plain mixture. The prior is weak, and weights of superfluous
    components shrink.

    Args:
        num_components (int): Largest number of components K. Further arguments are those of ``GaussianMixture``.

    Example:
        >>> mixture = VariationalGaussianMixture(8).fit(torch.randn(500, 2))
        >>> weights = mixture.parameters.expected().weights
    """

    _variational = True


def _examples(data: Tensor | Iterable[Any], by_label: bool) -> tuple[Tensor, Tensor]:
    """Return all examples of a tensor or batches, (N, D), and their labels, (N,), 0 without labels."""
    batches = [data] if isinstance(data, Tensor) else data
    parts = [_batch(batch, by_label) for batch in batches]
    x, labels = map(torch.cat, zip(*parts)) if parts else torch.zeros(2, 0, 1, device="cpu")
    kept = labels != -100  # which PyTorch's losses ignore
    x, labels = x[kept], labels[kept]
    if not len(x):
        raise ValueError(
            "The data hold no examples. Is the loader empty or used up, or are all labels -100?"
        )
    if not x.double().square().sum(1).isfinite().all():
        bad = int((~torch.isfinite(x)).any(1).sum())
        raise ValueError(
            f"The data have {bad} examples with NaN or infinity, or values too large to square. Remove or rescale them."
        )
    return x, labels


def _batch(batch: Any, by_label: bool) -> tuple[Tensor, Tensor]:
    """Return the examples and labels of one batch."""
    x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"A batch holds a {type(x).__name__} of shape {tuple(getattr(x, 'shape', ()))}. Pass tensors with "
            "one row per example, shape (n, D); a single column is x[:, None]."
        )
    labels = x.new_zeros(len(x), dtype=torch.long)
    if by_label:
        labels = torch.as_tensor(others[0] if others else (), device=x.device)
        if labels.shape != x.shape[:1] or labels.is_floating_point():
            raise ValueError(
                "A fit by label needs batches (x, labels) with one integer per example, but "
                f"the labels are {labels.dtype} {tuple(labels.shape)}. Pass [(x, labels)] or a loader."
            )
    return x.detach(), labels


def _floating(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.float64
