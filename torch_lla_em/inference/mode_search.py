"""Which way to the mode: over a recycled subspace where rows allow it, else by Newton-CG or SGD."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from math import log
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.linear_mode import LinearMode, Precondition, first_mode, optimise_MAP
from torch_lla_em.inference.linear_mode import warn_of as warn_of_mode
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.subspace_mode import SubspaceMode
from torch_lla_em.problem import ImagedGGN, Problem, room
from torch_lla_em.solvers import SGD, BlockLanczos, Newton

_NO_ORDER = "Rows come in another order at every pass: the mode takes products of G."
_NO_ROOM = "Out of memory: the mode goes on without a subspace."
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
    ):
        self._problem, self._prior, self._solver = problem, prior, solver
        self.memory = room(problem) * _SHARE
        """Bytes that J v over all rows may take."""

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
        solver, mode = replace(self._solver, tolerance=tolerance), None
        if self._span is not None:
            found = partial(self._span.find, problem, precision, tolerance, precondition)
            mode, shortage = problem.attempt(found)
            if mode is None:
                logger.warning(_NO_ROOM) if shortage else logger.info(_NO_ORDER)
                self._span = None
        if mode is None:
            start = self._start(problem, precision)
            wish = problem, self._prior, precision, solver, start
            mode = optimise_MAP(*wish, precondition=precondition)
        elif not mode.converged:
            warn_of_mode(mode, solver)
        self.visited[_mean(precision)] = mode
        return mode

    def follow(self, lanczos: BlockLanczos, imaged: ImagedGGN, anew: bool = True) -> None:
        """Search in a Krylov basis too, for a λ for all."""
        if self._span is not None:
            self._span.follow(lanczos, imaged, anew)
        else:
            imaged.stop()

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with."""
        made = "_span" in self.__dict__
        span = None if not made or self._span is None else self._span.state()
        return {"visited": self.visited, "memory": self.memory, "made": made, "span": span}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from a state, if there is one."""
        if state is None:
            return
        self.visited, self.memory = state["visited"], state["memory"]
        if state["made"]:
            wish = self._problem, self._prior, self._problem.w_MAP, self.memory
            known = state["span"]
            self._span = None if known is None else SubspaceMode(*wish, known)

    def objective(self, problem: Problem, precision: Tensor) -> tuple[float, float] | None:
        """Return Σ loss and ‖w_lin / scale‖² over the span, at no pass; None without a span."""
        if self._span is None or not self.visited:
            return None
        loss, _ = self._span.minimise(problem, precision, 1e-2)
        return loss, self._span.squared_norm()

    @cached_property
    def _span(self) -> SubspaceMode | None:
        """The span, with w_MAP in it the first time; None where there is none."""
        if isinstance(self._solver, SGD):
            return None
        wish = self._problem, self._prior, self._problem.w_MAP, self.memory
        span, _ = self._problem.attempt(partial(SubspaceMode, *wish))
        if span is None or span.ready:
            return span
        logger.info(_NO_ORDER)
        return None

    def _start(self, problem: Problem, precision: Tensor) -> Tensor:
        """Return the mode at the visited λ that is nearest."""
        if self.visited:
            here = _mean(precision)
            return self.visited[min(self.visited, key=lambda other: abs(log(other / here)))].w
        return first_mode(problem, self._prior, precision)


def _mean(precision: Tensor) -> float:
    return precision.log().mean().exp().item()
