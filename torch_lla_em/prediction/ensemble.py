"""Several networks: the equally weighted mixture of their posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.prediction.calibration import (
    CalibratedComponents,
    Calibration,
    calibrated,
    folds_as_reference,
    restored,
)
from torch_lla_em.prediction.export import is_recording
from torch_lla_em.prediction.fitted import PosteriorBase
from torch_lla_em.prediction.passes import pushed
from torch_lla_em.prediction.posterior import Components, Posterior, mixed
from torch_lla_em.prediction.predictor import Predictor
from torch_lla_em.prediction.pushforward import joined
from torch_lla_em.prediction.reference import REFERENCE, Reference
from torch_lla_em.prediction.stored import without_prefix
from torch_lla_em.prediction.summary import PrintedResult
from torch_lla_em.runtime import collected, files


class Ensemble(PrintedResult, Predictor, nn.Module):
    """The equally weighted mixture of the posteriors of several networks: ``LaplaceEnsemble``."""

    def __init__(self, members: Iterable[PosteriorBase]):
        """Take the members; see ``help(LaplaceEnsemble)`` for the arguments."""
        super().__init__()
        given = list(members) if isinstance(members, Iterable) else [None]
        if not all(isinstance(member, PosteriorBase) for member in given):
            raise TypeError(
                "LaplaceEnsemble takes a list of posteriors, not one, and no networks: "
                "LaplaceEnsemble([la, other])."
            )
        self.members: Any = nn.ModuleList(given)
        kinds = {type(member.likelihood).__name__ for member in self.members}
        if len(kinds) != 1:
            raise ValueError(
                f"The members have the likelihoods {sorted(kinds)}: pass at least one "
                "LinearisedLaplace, all with the same likelihood."
            )
        self.calibration: Calibration | None = None
        """The result of the last ``calibrate``, or None."""

        self.messages: list[str] = []
        """The warnings of ``calibrate``."""

        self._calibrated_for: Tensor | None = None
        """Numbers of the members to which those of ``calibrate`` belong."""

        for name in ("table", "noise", *REFERENCE):
            self.register_buffer(name, None)

    def _members(self, surely: bool = False) -> tuple[Posterior, ...]:
        return tuple(member._fitted(surely) for member in self.members)

    @property
    def reference(self) -> Reference | None:
        """The scores of validation examples, if there are any."""
        if self.conformal_table is None:
            return None
        return Reference(*(getattr(self, name) for name in REFERENCE))

    @property
    def _components(self) -> Components:
        # a program is recorded after predictions of the same members
        checks = self.reference is not None and not is_recording()
        if checks and not self._is_calibrated_for_members():
            raise RuntimeError(
                "A member was fitted or calibrated again after the ensemble was calibrated, whose numbers belong to "
                "the members as they were: call ensemble.calibrate(validation_loader) again."
            )
        each = mixed(member._posterior for member in self.members)
        tables = each.tables if self.table is None else self.table
        return each._replace(tables=tables, noise=self.noise, reference=self.reference)

    def _is_calibrated_for_members(self) -> bool:
        """Return whether members are as ``calibrate`` or, where these came from a file, the first prediction saw them."""
        now = self._numbers()
        if self._calibrated_for is None:
            self._calibrated_for = now
        known = self._calibrated_for
        return known.shape == now.shape and torch.allclose(known, now, rtol=1e-3, atol=0)

    def _numbers(self) -> Tensor:
        """Return numbers that change where a member is fitted or calibrated again."""
        found = []
        for member in self.members:
            norm = member.w_lin.double().norm()
            numbers = member.prior_precision, member.sigma_noise, member.mixture, norm
            found += [n.detach().flatten().cpu().double() for n in numbers if n is not None]
        return torch.cat(found)

    def _keep(self, found: CalibratedComponents, reference: Reference, messages: list[str]) -> None:
        self.calibration, self.table, self.noise = found.calibration, None, None
        for name, tensor in zip(REFERENCE, reference):
            setattr(self, name, tensor)
        self.messages, self._calibrated_for = messages, self._numbers()
        if found.calibration.applied:
            self.table = found.table
            sigma = self.members[0].likelihood.observation_noise
            if sigma is not None:
                self.noise = found.noise.to(sigma)

    def _calibrate_by_folds(self, unseen: Sequence[Any]) -> None:
        """Fit the numbers of ``calibrate`` to a loader of unseen examples for each member."""
        messages: list[str] = []
        with collected(messages), torch.inference_mode(False), torch.no_grad():
            each = zip(self._members(), unseen)
            parts = [joined(part for _, part in pushed(*pair)) for pair in each]
            found = calibrated(parts, [member.mixture for member in self.members])
            reference = folds_as_reference(parts, found)
        self._keep(found, reference, messages)

    def state_dict(
        self,
        *args: Any,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Tensor]:
        """Return the posteriors of all members, and the numbers of ``calibrate``, as tensors.

        Args:
            destination (dict, optional): Where to add the tensors, as PyTorch passes it.
            prefix (str): What their names start with there. Default "".
            keep_vars (bool): Ignored: no tensor requires gradients.
        """
        state = {name: t for name, t in self._buffers.items() if t is not None}
        state["record"] = files.to_bytes(
            {"calibration": self.calibration, "messages": self.messages}
        )
        state["torch_lla_em_version"] = torch.tensor(files.VERSION, device="cpu")
        if destination is not None:
            destination.update({f"{prefix}{name}": tensor for name, tensor in state.items()})
            self.members.state_dict(destination=destination, prefix=f"{prefix}members.")
            return destination
        for i, member in enumerate(self.members):
            state |= {f"{i}.{name}": tensor for name, tensor in member.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> None:
        """Load the posteriors of all members, and the numbers of ``calibrate``.

        Args:
            state (dict): The tensors that ``state_dict`` returned.
            strict (bool): Ignored: the state is always compared with the members.

        Raises:
            ValueError: If the state has another format or number of members, or belongs to other
                networks.
        """
        files.check(state, "ensemble")
        count = len({name.partition(".")[0] for name in state if "." in name})
        if count != len(self.members):
            raise ValueError(
                f"The state has {count} members, but this ensemble has {len(self.members)}."
            )
        for i, member in enumerate(self.members):
            own = {n.partition(".")[2]: t for n, t in state.items() if n.startswith(f"{i}.")}
            member.load_state_dict(own)
        self._load(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *more: Any, **named: Any
    ) -> None:
        """Load the tensors of this module, without its members, from those of one that contains it."""
        own, (_, _, missing, _, _) = without_prefix(state_dict, prefix), more
        if "record" in own:
            self._load(own)
        else:
            missing.append(f"{prefix}record")

    def _load(self, state: dict[str, Tensor]) -> None:
        """Load the numbers of ``calibrate``."""
        for name in self._buffers:
            tensor = state.get(name)
            setattr(self, name, None if tensor is None else tensor.to(self.members[0]._device))
        record = files.from_bytes(state["record"])
        self.calibration = restored(record["calibration"])
        self.messages = list(record.get("messages", ()))  # version 0.4 stored none
        self._calibrated_for = None

    def save(self, path: str | PathLike[str]) -> None:
        """Write all posteriors to one file, without the networks.

        Args:
            path (str): Name of the file; .safetensors selects that format.
        """
        files.write_atomically(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | PathLike[str], members: Iterable[PosteriorBase]) -> Ensemble:
        """Return a saved ensemble.

        Args:
            path (str): Name of the file that ``save`` has written.
            members (iterable of LinearisedLaplace): One object for each member, on its network; it
                need not be fitted.

        Raises:
            ValueError: If the file is damaged or belongs to other networks.
        """
        ensemble = cls(members)
        ensemble.load_state_dict(files.read(path, "ensemble"))
        return ensemble
