"""Which way to the mode: over a recycled subspace where rows allow it, else by Newton-CG or SGD."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from torch_lla_em.inference.linear_mode import LinearMode, Precondition, first_mode, optimise_MAP
from torch_lla_em.inference.linear_mode import warn_of as warn_of_mode
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.subspace_mode import SubspaceMode
from torch_lla_em.problem import ImagedGGN, Problem, room
from torch_lla_em.solvers import SGD, BlockLanczos, Newton

# of what is free, for J v over all rows
_SHARE = 1 / 4

logger = logging.getLogger("torch_lla_em")


class ModeSearch:
    """The mode at one λ after the other, each from what is known of those before."""

    def __init__(
        self,
        problem: Problem,
        prior: Prior,
        solver: Newton | SGD = Newton(),
        earlier: Tensor | None = None,
    ):
        self._problem, self._prior, self._solver = problem, prior, solver
        self._earlier = earlier
        """The mode of an earlier posterior."""

        self.memory = room(problem) * _SHARE
        """Bytes that J v over all rows may take."""

        self._subspace: SubspaceMode | None = None
        self._tried = isinstance(solver, SGD)
        self.visited: dict[float, LinearMode] = {}
        """By the geometric mean of λ."""

    def find(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None = None,
    ) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        tolerance = max(tolerance, 10 * torch.finfo(problem.dtype).eps)
        mode = self._within_span(problem, precision, tolerance, precondition)
        if mode is None:
            mode = optimise_MAP(
                problem,
                self._prior,
                precision,
                replace(self._solver, tolerance=tolerance),
                self._start(problem, precision),
                precondition=precondition,
            )
        elif not mode.converged:
            warn_of_mode(mode, replace(self._solver, tolerance=tolerance))
        self.visited[_mean(precision)] = mode
        return mode

    def follow(self, lanczos: BlockLanczos, imaged: ImagedGGN) -> None:
        """Search in a Krylov basis too, for a λ for all."""
        if self._begun is not None:
            self._begun.follow(lanczos, imaged)
        else:
            imaged.stop()

    def objective(self, problem: Problem, precision: Tensor) -> tuple[float, float] | None:
        """Return Σ loss and ‖w_lin / scale‖² over the span, at no pass; None without a span."""
        if self._begun is None or not self.visited:
            return None
        loss, _ = self._begun.minimise(problem, precision, 1e-2)
        return loss, self._begun.squared_norm()

    @property
    def _begun(self) -> SubspaceMode | None:
        """The span, with w_MAP in it the first time; None where there is none."""
        if not self._tried:
            self._tried = True
            start = self._problem.w_MAP if self._earlier is None else self._earlier
            wish = self._problem, self._prior, start, self.memory
            self._subspace, _ = self._problem.attempt(lambda: SubspaceMode(*wish))
        if self._subspace is not None and not self._subspace.ready:
            logger.info("Rows come in another order at every pass: the mode takes products of G.")
            self._subspace = None
        return self._subspace

    def _within_span(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None,
    ) -> LinearMode | None:
        span = self._begun
        if span is None:
            return None
        wish = problem, precision, tolerance, precondition
        mode, shortage = problem.attempt(lambda: span.find(*wish))
        if shortage:
            logger.warning("Out of memory: the mode goes on without a subspace.")
            self._subspace = None
        return mode

    def _start(self, problem: Problem, precision: Tensor) -> Tensor:
        """Return the mode at the visited λ that is nearest, or of an earlier posterior."""
        if self.visited:
            here = _mean(precision)
            return self.visited[min(self.visited, key=lambda other: abs(log(other / here)))].w
        if self._earlier is not None:
            return self._earlier
        return first_mode(problem, self._prior, precision)


def _mean(precision: Tensor) -> float:
    return precision.log().mean().exp().item()
