"""From inputs to predictions: products with the vectors of the posterior, and mixture components."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import TargetFn, inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import LinearModel, explained, require_rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import MODE, SCALE, WEIGHT
from torch_lla_em.prediction.mixture import FunctionMixture, Part
from torch_lla_em.prediction.neighbours import TrainingExamples
from torch_lla_em.prediction.prediction import Prediction

Rows = list[list[Any]]
"""A table of components as numbers, or as tensors of one number each if it is differentiated."""

Table = Tensor | Rows
Tables = Table | tuple[Table, ...]
"""A table of components, the same for all members of an ensemble, or one for each."""


# entries of blocks that are copied into one, which takes 0.05 ms; each further product takes 0.4 ms
_COPIED = 2**18


def push_forward(linear_model: LinearModel, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x), shape (B, ..., C), and J(x) w, (K, B, ..., C); differentiable in x if required.

    The vectors may be given in several blocks, so that they need not be copied into one.
    """
    network, count = linear_model.network, sum(map(len, w))
    x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_empty = bool(tensors) and tensors[0].dim() > 0 and not len(tensors[0])
    with explained(network, x), torch.set_grad_enabled(differentiate):
        try:
            with network.guarded():
                if linear_model.report is None and not is_empty:
                    linear_model.probe(map_tensors(Tensor.detach, x))
                with torch.set_grad_enabled(differentiate):
                    if is_empty:
                        f = linear_model.outputs(x)
                        return f, f.new_zeros(count, *f.shape)
                    rows = linear_model.at(x, count)
                    if sum(block.numel() for block in w) <= _COPIED:
                        w = (torch.cat(w),)
                    Jw = torch.cat([rows.push(block) for block in w])
                    f = rows.f
        except RuntimeError:  # possibly because x is a single example
            with network.guarded():
                require_rows(linear_model.outputs(x), x)
            raise
        require_rows(f, x)
        return f, Jw


def inputs_in(batch: Any, target_fn: TargetFn | None, device: torch.device) -> Any:
    """Return the inputs of a loader's batch, which may have no targets, as a fit reads them."""
    if target_fn is None or isinstance(batch, Tensor):
        return inputs_of(batch)
    batch = to_device(batch, device)
    try:
        targets = target_fn(batch)
    except (LookupError, AttributeError):  # there are none
        return inputs_of(batch)
    return inputs_of(batch, targets)


def posterior_alone(mean: str = "network", scale: float | Tensor = 1.0) -> Tensor:
    """Return the table of a single component: √τ J w_k around one mean."""
    row = [1.0, float(mean == "linear"), float(mean == "network"), float(scale)]
    return torch.tensor([row], dtype=torch.float64, device="cpu")


_LENGTHS = (
    "pad the inputs to one length, with targets of -100 there, or predict batch by batch: "
    "la.predictions(loader)."
)
_CLASSES = (
    "an ensemble needs networks with the same classes, or the same targets, in the same order."
)


class Products(NamedTuple):
    """Examples under one posterior: the network's outputs, and products of its Jacobian."""

    likelihood: Likelihood

    f: Tensor
    """The network's outputs, (B, ..., C), classes last."""

    Jw: Tensor
    """J w of w_lin and of the samples, (1 + K, B, ..., C)."""

    training: TrainingExamples | None = None
    """The stored training examples: logits of inputs with a larger variance are shrunk."""

    class_dim: int = -1
    """The axis of the classes in the predicted outputs."""

    network_noise: Tensor | None = None
    """σ of the network's residuals relative to that of the likelihood, which belongs to J w_lin; None: 1."""

    def components(self, table: Rows, noise: Tensor | None, posterior: int) -> list[Part]:
        """Return the components of a table, for regression with σ times ``noise``.

        Predictions around the network alone have the σ of its own residuals.
        """
        likelihood, f, h, apart = self.likelihood, self.f, self.Jw[0], self.Jw[1:]
        if self.network_noise is not None and table[0][MODE] == 0:
            noise = self.network_noise if noise is None else noise * self.network_noise.to(noise)
        if noise is not None and likelihood.observation_noise is not None:
            likelihood = likelihood.with_noise(likelihood.observation_noise.to(noise) * noise)
        if self.training is not None and likelihood.gives_probabilities:
            # of counts, a mean of 0 would be a rate of 1
            kept = self.training.kept_share(apart).view(-1, *(1,) * (f.dim() - 1))
            f, h = kept * f, kept * h
        apart = table[0][SCALE] ** 0.5 * apart
        none, parts = apart[:0], list[Part]()
        for _, of_mode, of_network, _ in table:
            pairs = (of_mode, h), (of_network, f)
            # a number that is fitted is a tensor, through which gradients pass
            known = [(n, v) for n, v in pairs if isinstance(n, Tensor) or n]
            terms = [v if isinstance(n, float) and n == 1 else n * v for n, v in known]
            centre = sum(terms[1:], terms[0]) if terms else torch.zeros_like(f)
            parts.append(Part(likelihood, centre, none if parts else apart, posterior))
        return parts


class Pushforward(NamedTuple):
    """Examples with their products under one posterior, or under all members of an ensemble."""

    members: tuple[Products, ...]

    y: Tensor

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; they may differ in σ."""
        return self.members[0].likelihood

    @property
    def f(self) -> Tensor:
        """The outputs of the first member's network."""
        return self.members[0].f

    def mixture(self, table: Tables, noise: Tensor | None = None) -> FunctionMixture:
        """Return the mixture by a table of components, for regression with σ times ``noise``."""
        tables = table if isinstance(table, tuple) else (table,) * len(self.members)
        every = [own.tolist() if isinstance(own, Tensor) else own for own in tables]
        parts: list[Part] = []
        for i, (member, own) in enumerate(zip(self.members, every)):
            parts += member.components(own, noise, i)
        shares = [row[WEIGHT] / len(every) for own in every for row in own]
        is_known = not any(isinstance(share, Tensor) for share in shares)
        f = self.members[0].f
        weights = f.new_tensor(shares) if is_known else torch.stack(shares).to(f)
        return FunctionMixture(tuple(parts), weights)

    def prediction(self, table: Tables, noise: Tensor | None = None) -> Prediction:
        """Return the prediction of the examples, for regression with σ times ``noise``."""
        return Prediction(self.mixture(table, noise), self.members[0].class_dim, self)

    def distances(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the distances to the nearest training example, (B, 2), and their unit, if some are kept."""
        each = [(m.training, m.Jw[1:]) for m in self.members if m.training is not None]
        if len(each) < len(self.members):
            return None, None
        found = [(training.distances(Jw), training.unit()) for training, Jw in each]
        distances, units = (torch.stack(values).mean(0) for values in zip(*found))
        return distances, units

    def each(self) -> tuple[Pushforward, ...]:
        """Return the examples under each posterior."""
        return tuple(self._replace(members=(member,)) for member in self.members)

    def network(self) -> Prediction:
        """Return the prediction of the network alone, which has no samples."""
        return self.without_samples().prediction(posterior_alone())

    def without_samples(self) -> Pushforward:
        """Return the examples for predictions of the networks, without the samples."""
        return self._each(lambda member: member._replace(Jw=member.Jw[:1], training=None))

    def classes_last(self) -> Pushforward:
        """Return the examples with the classes last in predictions, as targets have them in a fit."""
        return self._each(lambda member: member._replace(class_dim=-1))

    def double(self) -> Pushforward:
        """Return the examples in double precision."""
        return self._each(lambda m: m._replace(f=m.f.double(), Jw=m.Jw.double()))

    def part(self, examples: slice | Tensor) -> Pushforward:
        """Return some of the examples."""
        some = self._each(lambda m: m._replace(f=m.f[examples], Jw=m.Jw[:, examples]))
        return some._replace(y=self.y[examples])

    def split(self, size: int) -> Iterator[Pushforward]:
        """Yield ``size`` examples at a time."""
        for start in range(0, len(self.y), size):
            yield self.part(slice(start, start + size))

    def _each(self, change: Callable[[Products], Products]) -> Pushforward:
        return self._replace(members=tuple(map(change, self.members)))


def require_one_shape(outputs: Iterable[Tensor], remedy: str) -> None:
    """Raise an error if outputs, (B, ...), have several shapes beside their first axis."""
    shapes = {tuple(f.shape[1:]) for f in outputs}
    if len(shapes) > 1:
        raise ValueError(f"There are outputs of the shapes {sorted(shapes)} per example: {remedy}")


def joined(parts: Iterable[Pushforward]) -> Pushforward:
    """Concatenate the examples of several batches."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    require_one_shape([part.f for part in parts], _LENGTHS)

    def whole(*batches: Products) -> Products:
        f, Jw = torch.cat([b.f for b in batches]), torch.cat([b.Jw for b in batches], 1)
        return batches[0]._replace(f=f, Jw=Jw)

    members = map(whole, *(part.members for part in parts))
    return Pushforward(tuple(members), torch.cat([part.y for part in parts]))


def stack_members(each: Sequence[Pushforward]) -> Pushforward:
    """Return the same examples under several posteriors, each given under one."""
    require_one_shape([pushed.f for pushed in each], _CLASSES)
    return Pushforward(tuple(member for pushed in each for member in pushed.members), each[0].y)
