"""``LaplaceEnsemble``: the mixture of several posteriors, of given networks or of networks by
folds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm.auto import tqdm

from torch_lla_em.data import Inputs, as_targets, rows_of, tensors_in
from torch_lla_em.laplace import LinearisedLaplace
from torch_lla_em.likelihoods import Likelihood, Task
from torch_lla_em.prediction import (
    Cells,
    Correction,
    Posteriors,
    Record,
    calibrated_by_folds,
    required,
    stored,
    summary,
)
from torch_lla_em.predicts import Predicts
from torch_lla_em.runtime import files, require


class LaplaceEnsemble(Predicts):
    """The equally weighted mixture of the posteriors of several networks.

    Use it for networks trained with different seeds, or for snapshots of one training;
    ``from_folds`` trains networks and calibrates them without a validation set. ``epistemic``
    includes the disagreement of the members. The members are not changed.

    Args:
        members (iterable of LinearisedLaplace): Fitted posteriors, all with the same likelihood.

    Raises:
        ValueError: If there are no members, or if their likelihoods differ.

    Example:
        >>> ensemble = LaplaceEnsemble([la, other])
        >>> probabilities = ensemble.calibrate(x, y)(x)
    """

    def __init__(self, members: Iterable[LinearisedLaplace]):
        """Take the members; the class documents the arguments."""
        super().__init__()
        given = list(members) if isinstance(members, Iterable) else [None]
        if not all(isinstance(member, LinearisedLaplace) for member in given):
            raise TypeError(
                "LaplaceEnsemble takes a list of posteriors, not a single one and not networks: "
                "LaplaceEnsemble([la, other])."
            )
        self.members: Any = nn.ModuleList(given)
        kinds = {type(member.likelihood).__name__ for member in self.members}
        if len(kinds) != 1:
            raise ValueError(
                f"The members have the likelihoods {sorted(kinds)}: pass at least one "
                "LinearisedLaplace, all with the same likelihood."
            )
        self._correction = Correction()
        self.folds: Tensor | None = None
        """For ``from_folds``: the number of the member that has not seen each example, (N,). It is
        not saved."""

    @property
    def posterior(self) -> Posteriors | None:
        """The records of the members with the joint results of ``calibrate``; None if a member is
        not fitted."""
        each = tuple(member.posterior for member in self.members)
        return None if None in each else Posteriors(each, self._correction)

    def take(self, posterior: Record) -> None:
        """Use the results of ``calibrate`` in a record from now on.

        Args:
            posterior (Posteriors): A record of the same members.
        """
        words = "the record of several fits, as ensemble.posterior"
        require(isinstance(posterior, Posteriors), "posterior", posterior, words, TypeError)
        self._correction = posterior.correction

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first member; the members may differ in the observation noise."""
        likelihood: Likelihood = self.members[0].likelihood
        return likelihood

    @classmethod
    def from_folds(
        cls,
        train: Callable[[Any, Tensor], nn.Module],
        x: Inputs,
        y: Tensor,
        folds: int = 5,
        *,
        likelihood: Task | Likelihood | None = None,
        seed: int = 0,
        progress_bar: bool = True,
        **options: Any,
    ) -> LaplaceEnsemble:
        """Train a network without each fold of the data, and calibrate the mixture of their
        posteriors.

        The numbers of ``calibrate`` are fitted to the predictions of every example by the one
        member that was not trained on it, and these are the reference of p-values, sets and
        intervals. The guarantees are weaker than those of ``calibrate``, because the examples were
        predicted by single members and not by the mixture: P(p_value <= rate) is at most 2 rate + 2
        folds / N, and mostly below rate; sets and intervals have approximately the stated coverage.

        Args:
            train (callable): It is called with the inputs and targets of all folds but one, and
                returns a trained network. It must not use the other examples, not even for early
                stopping.
            x (Tensor, tuple or dict of tensors): All inputs, with one row per example.
            y (Tensor): All targets.
            folds (int): Number of folds and networks. Default 5. Each class is spread evenly
                over them.
            likelihood (str or Likelihood, optional): As in ``LinearisedLaplace``. Default None:
                "regression" if y is floating point, else "classification".
            seed (int): Seed of the folds and of the posterior samples. Default 0.
            progress_bar (bool): Show a progress bar over folds. Default True.
            **options: Further arguments of ``LinearisedLaplace``.

        Returns:
            The ensemble. Save the networks beside it: ``[la.model for la in ensemble.members]``.

        Raises:
            ValueError: If there are fewer than two folds, or fewer examples than folds.
            TypeError: If ``train`` returns no network.

        Example:
            >>> ensemble = LaplaceEnsemble.from_folds(train, x, y, folds=2)  # doctest: +SKIP
        """
        targets = as_targets(y)
        count = len(targets)
        if any(len(tensor) != count for tensor in tensors_in(x)):
            raise ValueError(
                f"There are {count} targets, but tensors of x have lengths "
                f"{[len(tensor) for tensor in tensors_in(x)]}: pass all examples as tensors."
            )
        if likelihood is None:
            likelihood = "regression" if targets.is_floating_point() else "classification"
        members, unseen = [], []
        fold_of = _folds(targets, folds, seed)
        for k in tqdm(range(folds), "Folds", disable=not progress_bar):
            out = fold_of == k
            rows = rows_of((x, targets), ~out)
            network = train(*rows)
            if not isinstance(network, nn.Module):
                raise TypeError(
                    f"train must return a trained nn.Module, not {type(network).__name__}."
                )
            la = LinearisedLaplace(network, likelihood, **{"seed": seed + k, **options})
            members.append(la.fit(*rows, validation=False, progress_bar=False))
            unseen.append([rows_of((x, targets), out)])
        ensemble = cls(members)
        known = Posteriors(required(ensemble).members)
        ensemble.take(calibrated_by_folds(known, unseen))
        ensemble.folds = fold_of
        return ensemble

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Add the numbers of ``calibrate`` to a state; the members add their own."""
        if not prefix:
            required(self, surely=True)
        own = stored.state_of_correction(self._correction)
        destination.update({f"{prefix}{name}": tensor for name, tensor in own.items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
    ) -> None:
        """Load the numbers of ``calibrate`` from a state; the members load their own."""
        own, (_, _, missing, _, errors) = stored.without_prefix(state_dict, prefix), more
        for name in filter(lambda name: name[0].isdigit(), own):  # members in earlier versions
            state_dict[f"{prefix}members.{name}"] = state_dict.pop(f"{prefix}{name}")
        if not prefix:
            files.check(own, "ensemble")
        if "record" not in own:
            missing.append(f"{prefix}record")
            return
        if f"{prefix}members.{len(self.members)}.record" in state_dict:
            errors.append(f"The state has more members than this ensemble, {len(self.members)}.")
        self._correction = stored.correction_of(own, self.members[0]._linear_model.network.device)

    def _table(self) -> tuple[str, Cells]:
        title = f"{type(self).__name__} of {len(self.members)} posteriors"
        missing = sum(member.posterior is None for member in self.members)
        unfitted = f"{missing} of {len(self.members)} members are not fitted: call fit of each"
        models = [member._linear_model for member in self.members]
        return summary.table_of(title, models, self.likelihood, self.posterior or unfitted)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LaplaceEnsemble:
        """Move or cast the members and the joint results of ``calibrate``."""
        nn.Module._apply(self, fn, recurse)
        self._correction = tree_map_only(Tensor, fn, self._correction)
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Write all posteriors to one file, without the networks.

        Args:
            path (str): Name of the file.
        """
        files.write_atomically(self.state_dict(), path)

    @classmethod
    def load(
        cls, path: str | PathLike[str], members: Iterable[LinearisedLaplace]
    ) -> LaplaceEnsemble:
        """Return a saved ensemble.

        Args:
            path (str): Name of the file that ``save`` has written.
            members (iterable of LinearisedLaplace): One object for each member, on its network; it
                need not be fitted.

        Raises:
            ValueError: If the file is damaged.
            RuntimeError: If it has another number of members, or belongs to other networks.
        """
        ensemble = cls(members)
        ensemble.load_state_dict(files.read(path, "ensemble"))
        required(ensemble, surely=True)
        return ensemble


def _folds(y: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each example, (N,), at random, with the classes spread evenly."""
    count = len(y)
    if not 2 <= folds <= count:
        raise ValueError(
            f"folds={folds}, but it must lie between 2 and the number of examples, {count}."
        )
    order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    if y.dim() == 1 and not y.is_floating_point():
        order = order[y.cpu()[order].argsort(stable=True)]
    return (torch.arange(count, device="cpu") % folds)[order.argsort()]
