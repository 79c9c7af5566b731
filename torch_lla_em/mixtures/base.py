"""What every mixture offers: the fit, and the questions that a fitted one answers."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference import Evidence, split_evidence
from torch_lla_em.mixtures.family import Family, Problem, State, chunks
from torch_lla_em.mixtures.rows import Batch, Rows, Survey, survey


class Step(NamedTuple):
    """One line of a fit's history; see ``State``."""

    objective: float
    lower_bound: float


class Mixture(ABC):
    """A mixture of ``num_components``, fitted by EM.

    EM stops when the bound per row changes by no more than ``tolerance``, or after
    ``max_steps``. It starts from k-means on a random ``sample_size`` of the rows; of
    several ``restarts`` the one goes on whose own EM, on that sample, ends highest.
    ``seed`` is an integer, or a ``torch.Generator``.
    """

    parameters: Any = None
    """In the data's coordinates. None before ``fit``; welcome in ``use`` and as a ``start``."""

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
        positive = {
            "num_components": num_components,
            "max_steps": max_steps,
            "restarts": restarts,
            "sample_size": sample_size,
        }
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}.")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more, not {tolerance}.")
        self.num_components, self.max_steps, self.tolerance = num_components, max_steps, tolerance
        self.restarts, self.sample_size, self.seed = restarts, sample_size, seed
        self.history: list[Step] = []
        self.converged = False

    @abstractmethod
    def _family(self, num_components: int, mean: Tensor, variance: Tensor) -> Family:
        """Return the family for data of this mean and variance, each of shape (D,)."""

    @abstractmethod
    def _moments(self, parameters: Any) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of the mixture itself, each of shape (D,)."""

    @abstractmethod
    def _checked(self, parameters: Any, num_components: int, dim: int) -> Any:
        """Return the user's parameters, or say what is wrong with them."""

    def _check_values(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"The data are of type {x.dtype}. Pass floats: x.float().")

    def fit(
        self, data: Tensor | Iterable, *, start: Any = None, by_label: bool = False
    ) -> "Mixture":
        """Fit to the rows of a tensor (N, D) or of a loader's batches; return self.

        One pass surveys the data, then each EM step takes one. Where all rows fit in
        ``sample_size``, the survey is the only pass. ``by_label`` gives every label of
        batches (x, labels) ``num_components`` of its own.
        """
        for _ in self.steps(data, start=start, by_label=by_label):
            pass
        if not self.converged:
            warnings.warn(
                f"EM has not settled after {self.max_steps} steps. Increase max_steps, or "
                "tolerance (the change of the bound, per row, that counts as none).",
                stacklevel=2,
            )
        return self

    def steps(
        self, data: Tensor | Iterable, *, start: Any = None, by_label: bool = False
    ) -> Iterator[State]:
        """Fit as ``fit`` does and yield each state, while the mixture holds the latest."""
        generator = _generator(self.seed)
        rows = Rows(data, by_label)
        seen = survey(rows, self.sample_size, generator, self._check_values)
        classes = self._label_components(seen)
        num_components = self.num_components if classes is None else len(classes)
        family = self._family(num_components, seen.mean, seen.variance)
        sample = Problem(family, [seen.sample], len(seen.sample.x), classes)
        problem = sample if seen.complete else Problem(family, rows, seen.count, classes)
        if start is not None:
            first = family.enter(self._checked(start, num_components, len(seen.mean)))
        elif self.restarts == 1:
            first = sample.draw(seen.sample, generator)
        else:
            first = self._best_start(sample, seen.sample, generator)
        self.history, self.converged, self.classes = [], False, classes
        before = None
        for state in problem.states(first, self.max_steps, self.tolerance):
            self.history.append(Step(state.objective, state.lower_bound))
            self.converged = before is not None and problem.settled(before, state, self.tolerance)
            self._hold(family, state.parameters, state.natural)
            yield state
            before = state

    def _best_start(self, problem: Problem, sample: Batch, generator: torch.Generator) -> Any:
        """Return where EM on the sample ends highest, of several k-means starts."""
        ends = []
        for _ in range(self.restarts):
            first = problem.draw(sample, generator)
            *_, last = problem.states(first, self.max_steps, self.tolerance)
            ends.append(last)
        return max(ends, key=lambda state: state.lower_bound).parameters

    def _label_components(self, seen: Survey) -> Tensor | None:
        """Return the label of each component, or None; refuse fewer rows than components."""
        smallest = min(seen.class_counts.values(), default=seen.count)
        if smallest < self.num_components:
            whose = "The smallest class has" if seen.class_counts else "The data have"
            raise ValueError(
                f"{whose} {smallest} rows for {self.num_components} components. "
                "Give at most one component per row."
            )
        if not seen.class_counts:
            return None
        labels = torch.tensor(sorted(seen.class_counts), device=seen.mean.device)
        return labels.repeat_interleave(self.num_components)

    def use(self, parameters: Any, classes: Tensor | None = None) -> "Mixture":
        """Take parameters as they are, in place of a fit; return self."""
        num_components = self.num_components if classes is None else len(classes)
        dim = parameters.means.shape[-1]
        self._checked(parameters, num_components, dim)
        family = self._family(num_components, *self._moments(parameters))
        entered = family.enter(parameters)
        self._hold(family, entered, family.natural(entered))
        self.classes = classes
        return self

    def _hold(self, family: Family, parameters: Any, natural: Tensor) -> None:
        self.parameters = family.leave(parameters)
        self._fitted = (family, natural)

    def _known_parameters(self) -> Any:
        if self.parameters is None:
            raise RuntimeError("This mixture has no parameters yet. Call fit(data) first.")
        return self.parameters

    def log_joint(self, x: Tensor) -> Tensor:
        """Return log p(x, component), shape (n, K), in double precision."""
        dim = self._known_parameters().means.shape[-1]
        family, natural = self._fitted
        if x.ndim != 2 or x.shape[1] != dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, and the mixture takes (n, {dim}).")
        parts = [
            family.features(family.columns(part)).dot(natural)
            for part, _ in chunks([Batch(x, None)], family, natural.device)
        ]
        return torch.cat([natural.new_empty(len(natural), 0), *parts], 1).T.to(x.device)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x), shape (n,)."""
        return self.log_joint(x).logsumexp(1).to(_real(x))

    def responsibilities(self, x: Tensor) -> Tensor:
        """Return p(component | x), shape (n, K)."""
        return self.log_joint(x).softmax(1).to(_real(x))

    def class_log_prob(self, x: Tensor) -> Tensor:
        """Return log p(x, label), shape (n, C), with labels in increasing order."""
        if self.classes is None:
            raise RuntimeError("This mixture knows no labels. Fit it with by_label=True.")
        log_joint = self.log_joint(x).to(_real(x))
        own = [(self.classes == label).nonzero()[:, 0] for label in self.classes.unique()]
        return torch.stack([log_joint[:, k.to(x.device)].logsumexp(1) for k in own], 1)

    def evidence(self, x: Tensor, q: Tensor) -> Evidence:
        """Split log p(x), summed over rows, at responsibilities q (n, K): bound and divergence."""
        return split_evidence(self.log_joint(x), q.double())


def check_shapes(parameters: Any, *shapes: Sequence[int]) -> None:
    """Refuse parameters whose shapes differ, or that are not finite."""
    for name, tensor, shape in zip(parameters._fields, parameters, shapes, strict=True):
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"The {name} have shape {tuple(tensor.shape)}, not {tuple(shape)}.")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"The {name} hold NaN or infinity.")


def check_weights(weights: Tensor) -> None:
    """Refuse weights that are no probabilities."""
    if (weights < 0).any() or abs(float(weights.sum()) - 1) > 1e-4:
        raise ValueError("The weights must be at least 0 and sum to 1.")


def _real(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64


def _generator(seed: int | torch.Generator) -> torch.Generator:
    return seed if isinstance(seed, torch.Generator) else torch.Generator("cpu").manual_seed(seed)
