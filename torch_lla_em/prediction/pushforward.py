"""Examples with f and the products J w of posteriors, and the mixtures that are made from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.mixture import MODE, SCALE, Component, Mixture
from torch_lla_em.prediction.neighbours import TrainingExamples, output_variance
from torch_lla_em.runtime import NUMBERS

Rows = list[list[Any]]
"""A table of components: numbers, or tensors of a single number if the table is differentiated."""

Table = Tensor | Rows
Tables = Table | tuple[Table, ...]
"""A table of components for all members of an ensemble, or one table for each member."""

LENGTHS = (
    "pad the inputs to one length, with targets of -100 there, or predict batch by batch: "
    "la.predictions(loader)."
)
_CLASSES = (
    "an ensemble needs networks with the same classes, or the same targets, in the same order."
)


def posterior_alone(mean: str = "network", scale: float | Tensor = 1.0) -> Tensor:
    """Return the table of a single component: √τ J w_k around one mean."""
    row = [1.0, float(mean == "linear"), float(mean == "network"), float(scale)]
    return torch.tensor([row], dtype=torch.float64, device="cpu")


class Member(NamedTuple):
    """Examples under one posterior."""

    likelihood: Likelihood

    f: Tensor
    """The network's outputs f, (B, ..., C), classes last."""

    Jw: Tensor
    """J w for w_lin and for the samples, (1 + K, B, ..., C)."""

    training: TrainingExamples | None = None
    """The stored training examples; logits of inputs with a larger variance than theirs are
    shrunk."""

    network_noise: Tensor | None = None
    """σ of the network's residuals relative to the σ of the likelihood, which belongs to J w_lin;
    None: 1."""

    shares: Tensor | None = None
    """The factors of the means, (B,), if they are known without the samples."""

    def factors(self) -> Tensor | None:
        """Return the factors of the means, (B,), below 1 where the variance exceeds that of all
        training examples; None: all are 1."""
        if self.shares is not None or self.training is None:
            return self.shares
        if not self.likelihood.gives_probabilities:  # for counts, a mean of 0 is a rate of 1
            return None
        variance = output_variance(self.training.likelihood, self.Jw[1:])
        largest = self.training.largest_variance.to(variance)
        return torch.where(variance > largest, largest / variance, 1.0)

    def components(
        self, table: Table, noise: Tensor | None, members: int = 1, owner: int = 0
    ) -> Iterator[Component]:
        """Yield the components of a table, for one of several members. ``noise`` is a factor of σ
        in a regression."""
        rows: Rows = table.tolist() if isinstance(table, Tensor) else table
        likelihood, factor, f, h = self.likelihood, noise, self.f, self.Jw[0]
        if self.network_noise is not None and rows[0][MODE] == 0:
            # the σ of the network's own residuals
            factor = self.network_noise if noise is None else noise * self.network_noise.to(noise)
        if factor is not None and likelihood.observation_noise is not None:
            likelihood = likelihood.with_noise(likelihood.observation_noise.to(factor) * factor)
        if (shares := self.factors()) is not None:
            f, h = (shares.to(f).view(-1, *(1,) * (f.dim() - 1)) * mean for mean in (f, h))
        deviations = rows[0][SCALE] ** 0.5 * self.Jw[1:]
        for weight, of_mode, of_f, _ in rows:
            # a number that is fitted is a tensor, through which gradients pass
            terms = [
                v if isinstance(n, float) and n == 1 else n * v
                for n, v in ((of_mode, h), (of_f, f))
                if isinstance(n, Tensor) or n
            ]
            centre = sum(terms[1:], terms[0]) if terms else torch.zeros_like(f)
            yield Component(likelihood, centre, deviations, weight / members, owner)
            deviations = deviations[:0]  # the first component alone has samples

    def part(self, examples: slice | Tensor) -> Member:
        """Return some of the examples."""
        shares = None if self.shares is None else self.shares[examples]
        return self._replace(f=self.f[examples], Jw=self.Jw[:, examples], shares=shares)

    def means_alone(self) -> Member:
        """Return the means, with their factors, without the samples."""
        return self._replace(Jw=self.Jw[:1], training=None, shares=self.factors())


class Pushforward(NamedTuple):
    """Examples under one posterior, or under all members of an ensemble."""

    members: tuple[Member, ...]

    targets: Tensor | None = None
    """The targets, as ``log_prob`` takes them, if they are known."""

    class_dim: int = -1
    """The axis of the classes in the predicted outputs."""

    @property
    def y(self) -> Tensor:
        """The targets; raises an error if there are none."""
        if self.targets is None:
            raise ValueError("These examples have no targets: pass batches (inputs, targets).")
        return self.targets

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; they may differ in σ."""
        return self.members[0].likelihood

    @property
    def f(self) -> Tensor:
        """The outputs of the first member's network."""
        return self.members[0].f

    def mixture(self, table: Tables, noise: Tensor | None = None) -> Mixture:
        """Return the mixture for a table of components; for regression σ is multiplied by
        ``noise``."""
        count = len(self.members)
        tables = table if isinstance(table, tuple) else (table,) * count
        return Mixture(
            tuple(
                component
                for i, (member, own) in enumerate(zip(self.members, tables, strict=True))
                for component in member.components(own, noise, count, i)
            )
        )

    def distances(self) -> Tensor | None:
        """Return the distances to the nearest training example, (B, 2), or None if none are
        stored."""
        each = []
        for member in self.members:
            if member.training is None:
                return None
            each.append(member.training.distances(member.Jw[1:]))
        return torch.stack(each).mean(0)

    def member(self, i: int) -> Pushforward:
        """Return the examples under one of the posteriors."""
        return self._replace(members=(self.members[i],))

    def without_samples(self) -> Pushforward:
        """Return the examples for predictions of the networks, without the samples."""
        return self._replace(
            members=tuple(own._replace(Jw=own.Jw[:1], training=None) for own in self.members)
        )

    def part(self, examples: slice | Tensor) -> Pushforward:
        """Return some of the examples."""
        return self._replace(
            members=tuple(member.part(examples) for member in self.members),
            targets=None if self.targets is None else self.targets[examples],
        )

    def pieces(self, exact: bool = True) -> Iterator[Pushforward]:
        """Yield a few examples at a time, ``exact`` in double precision, otherwise at least in
        single precision."""
        least = torch.float64 if exact else torch.float32
        dtype = reduce(torch.promote_types, (own.f.dtype for own in self.members), least)
        size = max(1, NUMBERS // max(1, 64 * self.f[:1].numel()))
        for start in range(0, len(self.f), size):
            part = self.part(slice(start, start + size))
            members = (own._replace(f=own.f.to(dtype), Jw=own.Jw.to(dtype)) for own in part.members)
            yield part._replace(members=tuple(members))


def require_one_shape(outputs: Iterable[Tensor], remedy: str = LENGTHS) -> None:
    """Raise an error if outputs, (B, ...), have several shapes apart from their first axis."""
    shapes = {tuple(f.shape[1:]) for f in outputs}
    if len(shapes) > 1:
        raise ValueError(f"There are outputs of the shapes {sorted(shapes)} per example: {remedy}")


def joined(parts: Sequence[Pushforward]) -> Pushforward:
    """Concatenate the examples of several batches."""
    if len(parts) == 1:
        return parts[0]
    require_one_shape([part.f for part in parts])
    members = []
    for own in zip(*(part.members for part in parts), strict=True):
        f, Jw = torch.cat([one.f for one in own]), torch.cat([one.Jw for one in own], 1)
        members.append(own[0]._replace(f=f, Jw=Jw))
    return parts[0]._replace(members=tuple(members), targets=None)


def stack_members(each: Sequence[Pushforward]) -> Pushforward:
    """Combine the same examples under single posteriors to examples under several posteriors."""
    if len(each) == 1:
        return each[0]
    require_one_shape([pushed.f for pushed in each], _CLASSES)
    return each[0]._replace(members=tuple(own for pushed in each for own in pushed.members))
