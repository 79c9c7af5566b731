"""Gaussian mixtures, their data, fits and densities."""

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.mixtures.em import EM, pieces, start_of
from torch_lla_em.mixtures.gaussian import Family, NormalWishart, Tensors
from torch_lla_em.runtime import check_choice, check_whole, check_within

Rows = Tensor | np.ndarray


class GaussianMixture:
    """A Gaussian mixture, p(x) = Σ_k π_k N(x | μ_k, Σ_k), by EM for maximum likelihood.

    The standard deviation of a component is at least 1e-4 of that of the data's columns in every
    direction, so that no component collapses onto a few examples. EM starts from the best of
    several clusterings. All computations are in float64.

    Args:
        num_components (int): Number of components K; with labels, the number for each label.
        covariance (str): Structure of Σ_k: "full" (default) or "diagonal". Choose "diagonal" if
            there are few examples per component, or hundreds of columns.
        prior (float, optional): Number of examples that a conjugate prior of Σ_k is worth in each
            component. The covariance of the prior is diagonal, that of the data's columns times
            K^(−2/D), and the fit is the mode of the posterior (MAP). Default None: maximum
            likelihood. Pass 1 if the examples of a component are not at least a few times as many
            as the columns.
        max_steps (int): Largest number of EM steps. Default 200; increase it if a warning says that
            EM has not converged.
        tolerance (float): EM stops when the lower bound per example changes by no more than this.
            Default 1e-4; decrease it for more exact parameters.
        seed (int): Seed of the starts, which are computed from 4,000 examples or fewer. Default 0.

    Example:
        >>> mixture = GaussianMixture(3).fit(torch.randn(500, 2))
        >>> log_prob = mixture.log_prob(torch.randn(5, 2))
    """

    parameters: Any = None
    """A named tuple of tensors in the data's coordinates; None before ``fit``."""

    classes: Tensor | None = None
    """After a fit by label, the label that each component belongs to, shape (K,)."""

    def __init__(
        self,
        num_components: int,
        *,
        covariance: Literal["full", "diagonal"] = "full",
        prior: float | None = None,
        max_steps: int = 200,
        tolerance: float = 1e-4,
        seed: int = 0,
    ):
        check_choice("covariance", covariance, ("full", "diagonal"))
        check_whole(1, num_components=num_components, max_steps=max_steps)
        check_within(1e-10, 1e10, prior=prior)
        self.num_components, self.covariance = num_components, covariance
        self._worth: float | None = prior or 0.0  # None: the fit is variational
        self.max_steps, self.tolerance, self.seed = max_steps, tolerance, seed
        self.lower_bounds: list[float] = []
        self.converged = False

    def fit(self, data: Rows | Iterable[Any], *, by_label: bool = False) -> "GaussianMixture":
        """Fit the mixture to data.

        Args:
            data (Tensor, array or iterable): A tensor or NumPy array (N, D), or batches, which are
                read once and joined.
            by_label (bool): Whether each label of batches (x, labels) has its own
                ``num_components`` components. Default False. Examples with the label −100 are
                ignored.

        Returns:
            The mixture itself, with ``parameters``, ``converged``, and the ``lower_bounds`` at the
            start and after each step.

        Raises:
            ValueError: If the data are empty, not finite, fewer than components, or lack labels.
        """
        x, labels = _examples(data, by_label)
        names, counts = labels.unique(return_counts=True)
        if counts.min() < self.num_components:
            raise ValueError(
                f"{'The smallest class has' if by_label else 'The data have'} {counts.min()} "
                f"examples for {self.num_components} components. Choose at most one component per "
                "example."
            )
        classes = names.repeat_interleave(self.num_components)
        family = Family(x, len(classes), self.covariance == "full", self._worth)
        room = self.tolerance * (1 if self._worth is None else len(x))
        em = EM(family, x, labels, classes, room)
        first = start_of(em, torch.Generator("cpu").manual_seed(self.seed))
        *before, last = em.states(first, self.max_steps)
        self.lower_bounds = [state.bound for state in (*before, last)]
        self.parameters, self.converged = family.leave(last.parameters), last.converged
        self.classes = classes if by_label else None
        self._fitted = family, family.natural(last.parameters)
        self._of_training = len(x), last.bound - float(last.parameters.log_prior(family.prior))
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
            words = (
                f"{'' if self.converged else 'not '}converged after {len(self.lower_bounds) - 1} "
                "steps, "
            )
            words += f"lower bound {self.lower_bounds[-1]:.6g}"
        options = f"{self.num_components}, covariance={self.covariance!r}"
        return f"{type(self).__name__}({options}), {words}"

    def log_joint(self, x: Rows) -> Tensor:
        """Return log p(x, component) of examples x (n, D), shape (n, K), in float64."""
        family, natural = self._ready()
        rows, dim = _tensor(x), natural[1].shape[1]
        if rows.shape != (len(rows), dim):
            raise ValueError(f"x has shape {tuple(rows.shape)}, and the mixture takes (n, {dim}).")
        parts = [
            family.log_joint(natural, family.columns(part.to(natural[0].device)))
            for (part,) in pieces(rows.detach())
        ]
        return torch.cat(parts, 1).T.to(rows.device)

    def log_prob(self, x: Rows) -> Tensor:
        """Return log p(x) of examples x (n, D), shape (n,)."""
        return self.log_joint(x).logsumexp(1).to(_floating(x))

    def responsibilities(self, x: Rows) -> Tensor:
        """Return p(component | x) of examples x (n, D), shape (n, K)."""
        return self.log_joint(x).softmax(1).to(_floating(x))

    def predict(self, x: Rows) -> Tensor:
        """Return the most probable component of examples x (n, D), or the label if fitted by label,
        (n,)."""
        if self.classes is None:
            return self.log_joint(x).argmax(1)
        scores = self.class_log_prob(x)
        labels: Tensor = self.classes.unique().to(scores.device)
        return labels[scores.argmax(1)]

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """Return examples drawn from the mixture, (n, D), in float64."""
        (family, natural), parameters = self._ready(), self.parameters
        if isinstance(parameters, NormalWishart):
            parameters = parameters.expected()
        check_whole(1, n=n)
        generator = torch.Generator("cpu").manual_seed(seed)
        weights, dim = parameters.weights, len(family.unit)
        drawn = torch.multinomial(weights.cpu(), n, True, generator=generator).to(weights.device)
        noise = torch.randn(n, dim, generator=generator, dtype=torch.float64, device="cpu")
        noise = noise.to(weights.device)
        for k, precision in enumerate(-2 * natural[2]):
            rows, root = drawn == k, torch.linalg.cholesky(precision).mT
            blocks = noise[rows].view(-1, *precision.shape[:-1], 1)
            spread = torch.linalg.solve_triangular(root, blocks, upper=True).view(-1, dim)
            noise[rows] = parameters.means[k] + family.unit * spread
        return noise

    def bic(self, x: Rows | None = None) -> float:
        """Return the Bayesian information criterion, −2 log p(x) + P log n, of examples x (n, D).

        By default x are the examples of the fit. P is the number of free parameters. Among fits
        with several numbers of components, choose the one with the lowest value.
        """
        n, count, log_prob = self._log_evidence(x)
        return count * math.log(n) - 2 * log_prob

    def aic(self, x: Rows | None = None) -> float:
        """Return Akaike's information criterion, −2 log p(x) + 2 P; see ``bic``."""
        _, count, log_prob = self._log_evidence(x)
        return 2 * count - 2 * log_prob

    def _log_evidence(self, x: Rows | None) -> tuple[int, int, float]:
        """Return the number of examples, the number of free parameters of π, μ and Σ, and log p of
        all examples."""
        self._ready()
        if self._worth is None:
            raise RuntimeError(
                "A variational mixture has no information criteria: compare lower_bounds[-1], "
                "which bounds the log marginal likelihood."
            )
        k, dim = map(int, self.parameters.means.shape)
        count = k - 1 + k * dim + k * (dim * (dim + 1) // 2 if self.covariance == "full" else dim)
        given = None if x is None else (len(x), float(self.log_prob(x).double().sum()))
        n, log_prob = given or self._of_training
        return n, count, log_prob

    def _ready(self) -> tuple[Family, Tensors]:
        """Return the coordinates and θ of the fit."""
        if self.parameters is None:
            raise RuntimeError("This mixture has no parameters yet. Call fit(data) first.")
        return self._fitted

    def class_log_prob(self, x: Rows) -> Tensor:
        """Return log p(x, label) of examples x (n, D) after a fit by label, (n, C), with labels in
        increasing order."""
        if self.classes is None:
            raise RuntimeError("This mixture was fitted without labels. Fit it with by_label=True.")
        log_joint = self.log_joint(x).to(_floating(x))
        classes = self.classes.to(log_joint.device)
        each = [log_joint[:, classes == label].logsumexp(1) for label in classes.unique()]
        return torch.stack(each, 1)


class VariationalGaussianMixture(GaussianMixture):
    """A posterior over Gaussian mixtures, q(z) q(π, μ, Λ), by variational EM.

    The lower bound is the ELBO with all its constants, a bound on the log marginal likelihood.
    ``log_prob`` is log Σ_k exp E_q log p(x, k), which is slightly below the predictive log density
    and equal to it in the limit of many examples. ``parameters`` is a ``NormalWishart``;
    ``parameters.expected()`` returns a plain mixture. The prior is weak. Superfluous components are
    emptied as long as the bound of all examples rises.

    Args:
        num_components (int): Largest number of components K.
        tolerance (float): EM stops when the lower bound of all examples changes by no more than
            this. Default 0.1.
        options: ``covariance``, ``max_steps`` and ``seed``, as in ``GaussianMixture``.

    Example:
        >>> mixture = VariationalGaussianMixture(8).fit(torch.randn(500, 2))
        >>> weights = mixture.parameters.expected().weights
    """

    def __init__(self, num_components: int, *, tolerance: float = 0.1, **options: Any):
        if "prior" in options:
            raise TypeError("The prior of VariationalGaussianMixture is fixed: leave out prior=.")
        super().__init__(num_components, tolerance=tolerance, **options)
        self._worth = None


def _examples(data: Rows | Iterable[Any], by_label: bool) -> tuple[Tensor, Tensor]:
    """Return all examples of a tensor or batches, (N, D), and their labels, (N,), 0 without
    labels."""
    is_whole = isinstance(data, Tensor) or hasattr(data, "__array__")
    batches: Iterable[Any] = [data] if is_whole else data
    parts = [_batch(batch, by_label) for batch in batches]
    x, labels = (
        map(torch.cat, zip(*parts, strict=True)) if parts else torch.zeros(2, 0, 1, device="cpu")
    )
    kept = labels != -100  # PyTorch's losses ignore this label
    x, labels = x[kept], labels[kept]
    if not len(x):
        raise ValueError(
            "The data have no examples. Is the loader empty or used up, or are all labels -100?"
        )
    if not x.double().square().sum(1).isfinite().all():
        bad = int((~torch.isfinite(x)).any(1).sum())
        raise ValueError(
            f"The data have {bad} examples with NaN or infinity, or values too large to square. "
            "Remove or rescale them."
        )
    return x, labels


def _batch(batch: Any, by_label: bool) -> tuple[Tensor, Tensor]:
    """Return the examples and labels of one batch."""
    x, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    x = _tensor(x)
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"A batch holds a {type(x).__name__} of shape {tuple(getattr(x, 'shape', ()))}. Pass "
            "tensors with one row per example, shape (n, D); a single column is x[:, None]."
        )
    labels = x.new_zeros(len(x), dtype=torch.long)
    if by_label:
        labels = torch.as_tensor(others[0] if others else (), device=x.device)
        if labels.shape != x.shape[:1] or labels.is_floating_point():
            raise ValueError(
                "A fit by label needs batches (x, labels) with one integer per example, but the "
                f"labels are {labels.dtype} {tuple(labels.shape)}. Pass [(x, labels)] or a loader."
            )
    return x.detach(), labels


def _tensor(x: Any) -> Tensor:
    """Return an array, such as a table of pandas, as a tensor, and anything else as it is."""
    is_array = not isinstance(x, Tensor) and hasattr(x, "__array__")
    found: Tensor = torch.from_numpy(np.array(x)) if is_array else x
    return found


def _floating(x: Rows) -> torch.dtype:
    dtype = _tensor(x[:1]).dtype
    return dtype if dtype.is_floating_point else torch.float64
