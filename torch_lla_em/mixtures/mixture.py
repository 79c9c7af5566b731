"""The public interface of every mixture: its fit, and its densities."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.data import ExampleBatches, Examples, Survey, survey
from torch_lla_em.mixtures.em import EM, Family, MixtureState, Tensors, chunks


class Progress(NamedTuple):
    """One entry of a fit's history; see ``MixtureState``."""

    objective: float
    lower_bound: float


class Evidence(NamedTuple):
    """log p(X | θ), split into a lower bound and the divergence that it leaves."""

    lower_bound: Tensor
    """L(q, θ), shape ()."""

    divergence: Tensor
    """KL(q ‖ p(z | X, θ)), shape ()."""


class Mixture(ABC):
    """A mixture of ``num_components``, fitted by EM from a k-means start.

    Args:
        num_components (int): K; with labels, the number of components of each label.
        max_steps (int, default 200): the most EM steps. Increase it after the warning that EM
            has not converged.
        tolerance (float, default 1e-4): EM stops when the lower bound per example changes by no
            more than this. Decrease it for parameters with more digits.
        restarts (int, default 1): with several, EM runs on a sample of the data from each start,
            and the fit continues from the one with the highest bound. Increase it for many
            components, where a single start may end at a poor local optimum.
        sample_size (int, default 10,000): how many random examples the starts are found on. If
            the data have no more, they are read only once.
        seed (int or torch.Generator, default 0): the randomness of starts and sample.

    Raises:
        ValueError: if an option is out of range.
    """

    parameters: Any = None
    """A named tuple of tensors in the data's coordinates; None before ``fit``."""

    classes: Tensor | None = None
    """After a fit by label, the label that each component belongs to, shape (K,)."""

    def __init__(
        self,
        num_components: int,
        *,
        max_steps: int = 200,
        tolerance: float = 1e-4,
        restarts: int = 1,
        sample_size: int = 10_000,
        seed: int | torch.Generator = 0,
    ):
        self.num_components, self.max_steps, self.tolerance = num_components, max_steps, tolerance
        self.restarts, self.sample_size, self.seed = restarts, sample_size, seed
        for name in ("num_components", "max_steps", "restarts", "sample_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}.")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more, not {tolerance}.")
        self.history: list[Progress] = []
        self.converged = False

    @abstractmethod
    def _family(self, num_components: int, centre: Tensor, variance: Tensor) -> Family:
        """Return the family for data whose columns have these means and variances."""

    def _check_values(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"The data are of type {x.dtype}. Pass floats: x.float().")

    def fit(
        self, data: Tensor | Iterable, *, start: Any = None, by_label: bool = False
    ) -> "Mixture":
        """Fit the mixture to data; return self.

        The first pass surveys the data, and each EM step takes another. If all examples fit in
        ``sample_size``, the survey is the only pass.

        Args:
            data (Tensor or iterable): a tensor (N, D), or batches that can be read several times.
            start (default None): parameters to begin with, as those of an earlier fit.
            by_label (bool, default False): give every label of batches (x, labels)
                ``num_components`` of its own. Examples labelled −100 are left out.

        Returns:
            The mixture itself, with ``parameters``, ``history`` and ``converged``.

        Raises:
            TypeError: if the data are no float tensors, an iterator, or lack labels.
            ValueError: if they are empty, of unequal width, not finite, or fewer than components.

        Example::

            mixture = GaussianMixture(3).fit(torch.randn(500, 2))
        """
        for _ in self.steps(data, start=start, by_label=by_label):
            pass
        if not self.converged:
            warnings.warn(
                f"EM has not converged after {self.max_steps} steps. Increase max_steps, or "
                "tolerance if such a fit is good enough.",
                stacklevel=2,
            )
        return self

    def steps(
        self, data: Tensor | Iterable, *, start: Any = None, by_label: bool = False
    ) -> Iterator[MixtureState]:
        """Fit as ``fit`` does and yield each state; the mixture holds the latest."""
        generator = self.seed
        if not isinstance(generator, torch.Generator):
            generator = torch.Generator("cpu").manual_seed(generator)
        batches = ExampleBatches(data, by_label)
        seen = survey(batches, self.sample_size, generator, self._check_values)
        classes = self._label_components(seen)
        num_components = self.num_components if classes is None else len(classes)
        family, in_sample = self._family(num_components, seen.mean, seen.variance), seen.sample.x
        sample = EM(family, [seen.sample], self.tolerance * len(in_sample), classes)
        whole = sample
        if len(in_sample) < seen.num_examples:
            whole = EM(family, batches, self.tolerance * seen.num_examples, classes)
        first = self._start(sample, generator) if start is None else family.enter(start)

        self.history, self.converged, self.classes = [], False, classes
        for state in whole.states(first, self.max_steps):
            self.history.append(Progress(state.objective, state.lower_bound))
            self.converged = state.converged
            self._hold(family, state.parameters, state.natural)
            yield state

    def _start(self, sample: EM, generator: torch.Generator) -> Any:
        """Return a k-means start, or the end of EM on the sample from the best of several."""
        if self.restarts == 1:
            return sample.start(generator)
        ends = []
        for _ in range(self.restarts):
            *_, last = sample.states(sample.start(generator), self.max_steps)
            ends.append(last)
        return max(ends, key=lambda state: state.lower_bound).parameters

    def _label_components(self, seen: Survey) -> Tensor | None:
        """Return the label of each component, or None; refuse fewer examples than components."""
        smallest = min(seen.class_counts.values(), default=seen.num_examples)
        if smallest < self.num_components:
            whose = "The smallest class has" if seen.class_counts else "The data have"
            raise ValueError(
                f"{whose} {smallest} examples for {self.num_components} components. "
                "Give at most one component per example."
            )
        if not seen.class_counts:
            return None
        labels = torch.tensor(sorted(seen.class_counts), device=seen.mean.device)
        return labels.repeat_interleave(self.num_components)

    def use(self, parameters: Any, classes: Tensor | None = None) -> "Mixture":
        """Take over parameters instead of fitting; return self.

        Args:
            parameters: as ``parameters`` of a fitted mixture.
            classes (Tensor, default None): as ``classes`` of one fitted by label.

        Example::

            again = GaussianMixture(3).use(mixture.parameters)
        """
        num_components = self.num_components if classes is None else len(classes)
        centre = parameters.means.double().mean(0)
        family = self._family(num_components, centre, torch.ones_like(centre))
        entered = family.enter(parameters)
        self._hold(family, entered, family.natural(entered))
        self.classes = classes
        return self

    def _hold(self, family: Family, parameters: Any, natural: Tensors) -> None:
        self.parameters = family.leave(parameters)
        self._fitted = (family, natural)

    def _known_parameters(self) -> Any:
        if self.parameters is None:
            raise RuntimeError("This mixture has no parameters yet. Call fit(data) first.")
        return self.parameters

    def log_joint(self, x: Tensor) -> Tensor:
        """Return log p(x, component), shape (n, K), in float64."""
        dim = self._known_parameters().means.shape[-1]
        if x.ndim != 2 or x.shape[1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, and the mixture takes (n, {dim}).")
        family, natural = self._fitted
        constant = natural[0]
        parts = [constant.new_empty(len(constant), 0)]
        for part, _ in chunks([Examples(x.detach())], family, constant.device):
            parts.append(family.log_joint(natural, family.columns(part)))
        return torch.cat(parts, 1).T.to(x.device)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x), shape (n,)."""
        return self.log_joint(x).logsumexp(1).to(_floating(x))

    def responsibilities(self, x: Tensor) -> Tensor:
        """Return p(component | x), shape (n, K)."""
        return self.log_joint(x).softmax(1).to(_floating(x))

    def class_log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x, label), shape (n, C), with labels in increasing order."""
        if self.classes is None:
            raise RuntimeError("This mixture knows no labels. Fit it with by_label=True.")
        log_joint = self.log_joint(x).to(_floating(x))
        own = [(self.classes == label).nonzero()[:, 0] for label in self.classes.unique()]
        return torch.stack([log_joint[:, k.to(x.device)].logsumexp(1) for k in own], 1)

    def evidence(self, x: Tensor, q: Tensor) -> Evidence:
        """Split log p(x), summed over x, at responsibilities q (n, K): bound and divergence."""
        log_joint, q = self.log_joint(x), q.double()
        bound = (q * (log_joint - q.log())).where(q > 0, 0.0).sum()
        return Evidence(bound, log_joint.logsumexp(1).sum() - bound)


def check_shapes(parameters: Any, *shapes: Sequence[int]) -> None:
    """Raise an error for parameters of other shapes, or that are not finite."""
    for name, tensor, shape in zip(parameters._fields, parameters, shapes, strict=True):
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"The {name} have shape {tuple(tensor.shape)}, not {tuple(shape)}.")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"The {name} hold NaN or infinity.")


def check_weights(weights: Tensor) -> None:
    """Raise an error unless the weights are probabilities."""
    if (weights < 0).any() or abs(float(weights.sum()) - 1) > 1e-4:
        raise ValueError("The weights must be at least 0 and sum to 1.")


def _floating(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64
