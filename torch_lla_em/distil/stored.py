"""How a student is stored: its tensors, how its network is called, and its error."""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import TargetFn, default_forward
from torch_lla_em.distil.error import StudentError
from torch_lla_em.jacobian import ForwardFn
from torch_lla_em.likelihoods import LIKELIHOODS, BradleyTerry, Likelihood, compare
from torch_lla_em.prediction import likelihood_options
from torch_lla_em.runtime import files


class Form(NamedTuple):
    """How a student's network is called, and what its head returns."""

    likelihood: Likelihood
    forward_fn: ForwardFn
    target_fn: TargetFn | None
    class_dim: int
    last: str
    """Path of the layer whose inputs are the features of the head."""

    uncertainties: int
    """Number of outputs of the head for each site."""

    scores: int
    """Number of out-of-distribution scores of an example."""


def state_of(state: dict[str, Tensor], form: Form, error: StudentError) -> dict[str, Tensor]:
    """Return the contents of a student's file."""
    record = {
        **form._asdict(),
        "likelihood": likelihood_options(form.likelihood).get("likelihood"),
        "forward_fn": form.forward_fn not in (default_forward, compare),
        "target_fn": None,
        "error": error._asdict(),
    }
    version = torch.tensor(files.VERSION, device="cpu")
    return {**state, "student": files.to_bytes(record), "torch_lla_em_version": version}


def read(
    path: str | PathLike[str],
    network: nn.Module,
    likelihood: Likelihood | None,
    forward_fn: ForwardFn | None,
) -> tuple[dict[str, Tensor], Form, StudentError]:
    """Return the contents of a student's file; raise an error if they do not fit the network."""
    state = files.read(path, "student")
    record: dict[str, Any] = files.from_bytes(state.pop("student"))
    del state["torch_lla_em_version"]
    error, name = StudentError.of(record.pop("error")), record["likelihood"]
    given = {"likelihood": likelihood or name, "forward_fn": forward_fn or not record["forward_fn"]}
    for argument in (argument for argument in given if not given[argument]):
        raise ValueError(
            f"The student was distilled with your own {argument}, which a file cannot store. Pass "
            f"{argument}=... to load."
        )
    own = {n: t.shape for n, t in state.items() if n.startswith("network.")}
    if own != {f"network.{n}": t.shape for n, t in network.state_dict().items()}:
        raise ValueError(
            "The network has another architecture than the student: pass a network whose parameters "
            "and buffers have the same names and shapes."
        )
    likelihood = likelihood or LIKELIHOODS[name]()
    usual = compare if isinstance(likelihood, BradleyTerry) else default_forward
    record |= {"likelihood": likelihood, "forward_fn": forward_fn or usual}
    return state, Form(**record), error
