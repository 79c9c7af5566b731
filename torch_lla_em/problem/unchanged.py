"""The network's weights are those that a fit began with."""

from __future__ import annotations

import torch

from torch_lla_em.jacobian import Network


class UnchangedWeights:
    """What the weights were at first, to refuse changes during a fit."""

    def __init__(self, network: Network):
        self._network = network
        self._versions, self._sizes = network.versions(), network.sizes()

    def refuse_changes(self) -> None:
        """Raise where the weights are no longer those that the fit began with.

        It reads all of them, and waits for the device: to be asked before anything is kept.
        """
        for name, version in self._network.versions().items():
            if version != self._versions.get(name):
                raise RuntimeError(
                    f"The network's {name!r} was changed while it was being fitted: leave the "
                    "network alone until fit returns, or fit a copy.deepcopy of it."
                )
        if not torch.equal(self._network.sizes(), self._sizes):
            raise RuntimeError(
                "The network's weights were changed through `.data`, or exchanged, while it was "
                "being fitted: leave the network alone until fit returns."
            )
