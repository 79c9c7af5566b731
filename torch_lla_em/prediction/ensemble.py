"""Several networks: the equally weighted mixture of their posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import Data, paired
from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.prediction.calibration import Calibration, calibrated_on
from torch_lla_em.prediction.conformal import REFERENCE, Judge, Reference
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.functions import FUNCTIONS, number_of_functions
from torch_lla_em.prediction.held_out import pushed
from torch_lla_em.prediction.parts import Pushed, joined
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushing import push_forward
from torch_lla_em.runtime import Group, files, records


@dataclass(frozen=True, repr=False)
class EnsemblePrediction(Prediction):
    """The mixture of the members' predictive distributions; ``samples`` are those of all members."""

    members: tuple[Prediction, ...] = ()

    @staticmethod
    def of(members: Sequence[Prediction], class_dim: int = -1) -> EnsemblePrediction:
        """Return the mixture of predictions at the same inputs, classes last."""
        means = torch.stack([member._mean() for member in members])
        centre = means.mean(0)
        apart = torch.cat([m.deviations + (at - centre) for m, at in zip(members, means)])
        found = members[0].likelihood, centre, apart, class_dim
        return EnsemblePrediction(*found, members=tuple(members))

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of ``expectation`` over the samples of all members."""
        errors = torch.stack([member.standard_error for member in self.members])
        return self._out(errors.square().sum(0).sqrt() / len(errors))

    def smoothed(self, shared: bool = False) -> Tensor:
        """Return the average of the members' E[y] in closed form."""
        return self._out(torch.stack([m.smoothed(shared) for m in self.members]).mean(0))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape (): all inputs are predicted by one member."""
        y = self._aligned(y)
        return self._log_mean([member.joint_log_prob(y) for member in self.members])

    def _log_prob(self, y: Tensor) -> Tensor:
        return self._log_mean([member._log_prob(y) for member in self.members])

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        if not self.likelihood.real_valued:
            return super()._uncertainties()
        parts = [torch.stack(each) for each in zip(*(m._uncertainties() for m in self.members))]
        means = torch.stack([member._expected() for member in self.members])
        return parts[0].mean(0), parts[1].mean(0) + means.var(0, correction=0)

    @property
    def _is_gaussian(self) -> bool:
        return False

    @property
    def covariance(self) -> Tensor:
        """The covariance of ``mean.flatten()``, shape (B C, B C)."""
        members = [replace(member, class_dim=self.class_dim) for member in self.members]
        apart = torch.stack([member.mean - self.mean for member in members]).flatten(1)
        within = torch.stack([member.covariance for member in members]).mean(0)
        return within + apart.T @ apart / len(members)

    def _variance_of_f(self) -> Tensor:
        means = torch.stack([member._mean() for member in self.members])
        within = torch.stack([member._variance_of_f() for member in self.members])
        return within.mean(0) + means.var(0, correction=0)

    def _samples(self) -> Tensor:
        return torch.cat([member._samples() for member in self.members])

    def _functions(self, rows: slice = slice(None), at_least: int = FUNCTIONS) -> Tensor:
        return torch.cat([member._functions(rows, at_least) for member in self.members])

    def _each(self, at_least: int = FUNCTIONS) -> Tensor:
        every = []
        for member in self.members:
            count, weights = (
                number_of_functions(member.deviations, at_least),
                member._each(at_least),
            )
            equal = member.centre.new_full((count,), 1 / count)
            every.append((equal if weights is None else weights) / len(self.members))
        return torch.cat(every)

    def _first(self, count: int) -> Prediction:
        members = [member._first(count) for member in self.members]
        return replace(self.of(members, self.class_dim), judge=self.judge)

    def _log_mean(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).logsumexp(0) - log(len(values))


class PushedMembers(NamedTuple):
    """Examples pushed through the linear models of all members, as ``Pushed`` is for one."""

    members: tuple[Pushed, ...]

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; others may have another σ."""
        return self.members[0].likelihood

    @property
    def f(self) -> Tensor:
        """The outputs of the first network."""
        return self.members[0].f

    @property
    def y(self) -> Tensor:
        """The targets."""
        return self.members[0].y

    def prediction(self, table: Any, noise: Tensor | None = None) -> EnsemblePrediction:
        """Return the mixture; ``table`` is for all members, or a tuple of one for each."""
        tables = table if isinstance(table, tuple) else (table,) * len(self.members)
        pairs = zip(self.members, tables)
        return EnsemblePrediction.of([member.prediction(t, noise) for member, t in pairs])

    def part(self, examples: slice | Tensor) -> PushedMembers:
        """Return some of the examples."""
        return PushedMembers(tuple(member.part(examples) for member in self.members))

    def split(self, size: int) -> Iterable[PushedMembers]:
        """Yield ``size`` examples at a time."""
        return map(PushedMembers, zip(*(member.split(size) for member in self.members)))

    def double(self) -> PushedMembers:
        """Return the examples in double precision."""
        return PushedMembers(tuple(member.double() for member in self.members))


class LaplaceEnsemble(nn.Module):
    """The equally weighted mixture of the posteriors of several networks.

    ``members`` are fitted ``LinearisedLaplace`` objects of one likelihood, for example of networks
    trained from different seeds, or of snapshots of one training. The members are not changed.

    Example::

        ensemble = LaplaceEnsemble([la1, la2, la3])
        ensemble.calibrate(validation_loader)
        ensemble(x)                     # as la(x)
        ensemble.predict(x).epistemic   # with the disagreement of the members
    """

    def __init__(self, members: Iterable[Fitted]):
        super().__init__()
        self.members: Any = nn.ModuleList(members)
        kinds = {type(member.likelihood).__name__ for member in self.members}
        if len(kinds) != 1:
            raise ValueError(
                f"The members have the likelihoods {sorted(kinds)}: pass at least one "
                "LinearisedLaplace, all with the same likelihood."
            )
        self.calibration: Calibration | None = None
        """What the last ``calibrate`` measured."""

        for name in ("table", "noise", *REFERENCE):
            self.register_buffer(name, None)

    def forward(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities or rates; for regression (mean, variance of y)."""
        prediction = self.predict(x)
        if prediction.likelihood.real_valued:
            return prediction.expectation, prediction.predictive_variance
        return prediction.expectation

    def predict(self, x: Any) -> EnsemblePrediction:
        """Return the predictive distribution at x: as fitted, or as calibrated."""
        data = PushedMembers(tuple(_pushed(member, x) for member in self.members))
        class_dim = self.members[0]._linear_model.network.class_dim
        prediction = replace(data.prediction(self._tables(), self.noise), class_dim=class_dim)
        if self.conformal_table is None:
            return prediction
        reference = Reference(*(getattr(self, name) for name in REFERENCE))
        gaussian: Any = data.likelihood
        noise = None
        if reference.sigma is not None:
            noise = reference.sigma / gaussian.sigma_noise.to(reference.sigma)
        return replace(
            prediction, judge=Judge(reference, partial(data.prediction, reference.table, noise))
        )

    def is_ood(self, x: Any, rate: float = 0.05) -> Tensor:
        """Return which inputs are out-of-distribution, (B,), after ``calibrate``."""
        return self.predict(x).is_ood(rate)

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ()."""
        return self.predict(x).joint_log_prob(y)

    def calibrate(self, loader: Any, targets: Tensor | None = None) -> LaplaceEnsemble:
        """Fit one set of numbers to the NLL of the mixture on a validation set; return self.

        The numbers, and the split for p-values, sets and intervals, are those of
        ``LinearisedLaplace.calibrate``. Each process calibrates on its own.
        """
        first, parts = self.members[0], []
        for member in self.members:
            member._require_fit(surely=True)
        with torch.inference_mode(False), torch.no_grad():
            for batch in Data(paired(loader, targets), first._device, first.target_fn):
                parts.append([pushed(member, batch) for member in self.members])
            data = PushedMembers(tuple(joined(each) for each in zip(*parts)))
            before = tuple(member.mixture for member in self.members)
            found = calibrated_on(data, Group(), None, before)
        applied = found.calibration.applied
        self.calibration, self.table = found.calibration, found.table if applied else None
        scaled = applied and isinstance(data.likelihood, Regression)
        self.noise = None
        if scaled:
            self.noise = torch.tensor(found.noise, dtype=torch.float64, device=data.f.device)
        for name, tensor in zip(REFERENCE, found.reference):
            setattr(self, name, tensor)
        return self

    def _tables(self) -> Any:
        return tuple(m.mixture for m in self.members) if self.table is None else self.table

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posteriors of all members, and the numbers of ``calibrate``, as tensors."""
        state = {name: t for name, t in self._buffers.items() if t is not None}
        for i, member in enumerate(self.members):
            state |= {f"{i}.{name}": tensor for name, tensor in member.state_dict().items()}
        state["record"] = records.to_bytes({"calibration": self.calibration})
        return {**state, "torch_lla_em_version": torch.tensor(records.VERSION, device="cpu")}

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Take over the posteriors of all members, and the numbers of ``calibrate``."""
        count = len({name.partition(".")[0] for name in state if "." in name})
        if count != len(self.members):
            raise ValueError(
                f"The state is of {count} members, and this ensemble has {len(self.members)}."
            )
        for i, member in enumerate(self.members):
            own = {n.partition(".")[2]: t for n, t in state.items() if n.startswith(f"{i}.")}
            member.load_state_dict(own)
        for name in self._buffers:
            tensor = state.get(name)
            setattr(self, name, None if tensor is None else tensor.to(self.members[0]._device))
        found = records.from_bytes(state["record"])["calibration"]
        self.calibration = found and Calibration(*found)

    def save(self, path: str | PathLike) -> None:
        """Write all posteriors to one file, without the networks."""
        files.write_atomically(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | PathLike, members: Iterable[Fitted]) -> LaplaceEnsemble:
        """Return a saved ensemble; ``members`` are as constructed, on their networks."""
        ensemble = cls(members)
        ensemble.load_state_dict(records.read(path))
        return ensemble


def _pushed(member: Fitted, x: Any) -> Pushed:
    """Push inputs without targets through a member's linear model."""
    member._require_fit()
    f, Jw = push_forward(member._linear_model, x, member.w_lin[None], member.w_samples)
    return Pushed(member.likelihood, f, Jw, f)
