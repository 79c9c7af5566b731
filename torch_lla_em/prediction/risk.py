"""Sets of classes for every site of an image, with a bound on an expected loss per image."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.prediction.conformal import require_share


class RiskControl:
    """Sets of classes for every pixel that miss at most a given share of an image's pixels on
    average.

    A set holds the classes whose probability is at least ``threshold``. The loss of an image is the
    share of its labelled pixels whose label is not in its set. The threshold is the largest one at
    which the loss of the validation images, corrected for their number, is at most ``level``
    (conformal risk control, Angelopoulos et al., 2022). Then the expected loss of a new image is at
    most ``level``, whatever the quality of the probabilities, if it and the validation images are
    exchangeable and the posterior was not fitted to any of them. This holds on average over images,
    not for every image.

    Args:
        predict (callable): Inputs -> probabilities, such as a fitted ``LinearisedLaplace``.
        loader (iterable): Validation batches (inputs, labels) with labels of shape (B, *sites),
            which are read one by one. Pixels whose label is not a class, such as -100, do not
            count; an image with only such pixels has the loss 0.
        level (float): Largest expected loss. Default 0.1.
        class_dim (int): Axis of the classes in the probabilities. Default 1.

    Attributes:
        threshold (float): The smallest probability of a class in a set.
        risk (float): The mean loss of the validation images.
        num_images (int): Number of validation images.

    Raises:
        ValueError: If ``level`` is not between 0 and 1, or there are too few images for it.

    Example:
        >>> images, labels = torch.randn(30, 3, 4, 4), torch.randint(3, (30, 4, 4))
        >>> predict = lambda x: x.softmax(1)
        >>> control = RiskControl(predict, [(images, labels)], level=0.2)
        >>> sets = control.sets(predict(images))
    """

    def __init__(
        self,
        predict: Callable[[Any], Tensor],
        loader: Iterable[tuple[Any, Tensor]],
        level: float = 0.1,
        class_dim: int = 1,
    ):
        """Choose the threshold; the class documents the arguments."""
        require_share(level)
        self._class_dim, self.num_images = class_dim, 0
        grid = torch.linspace(-16, 16, 4096, dtype=torch.float64, device="cpu").sigmoid()
        total = torch.zeros_like(grid)
        for inputs, labels in loader:
            for chosen, counts in _chosen(predict(inputs), labels, class_dim):
                if (chosen[counts] < 0).any():
                    raise ValueError(
                        f"Probabilities of image {self.num_images} are NaN, so no threshold bounds "
                        "the loss: correct the network, or set the labels of such pixels to -100."
                    )
                own = chosen[counts].sort().values
                total += torch.searchsorted(own, grid).double() / max(1, len(own))
                self.num_images += 1
        n = self.num_images
        if 1 / (n + 1) > level:
            raise ValueError(
                f"An expected loss of {level:g} cannot be guaranteed with {n} validation images: "
                f"it needs {ceil(1 / level) - 1} or more. Use more images, or a larger level."
            )
        allowed = ((total + 1) / (n + 1) <= level).nonzero()
        self.threshold = self.risk = 0.0
        if len(allowed):
            place = allowed[-1, 0]
            self.threshold, self.risk = grid[place].item(), total[place].item() / n

    def sets(self, probs: Tensor) -> Tensor:
        """Return whether each class is in the set of its pixel, in the shape of the probabilities.

        Args:
            probs (Tensor): Probabilities, as ``predict`` returns them.
        """
        return probs.double() >= self.threshold

    def loss(self, probs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of every image, (B,).

        Args:
            probs (Tensor): Probabilities, as ``predict`` returns them.
            labels (Tensor): Labels, as those of ``loader``.
        """
        missed = torch.zeros(len(labels), dtype=torch.float64, device="cpu")
        for i, (p, kept) in enumerate(_chosen(probs, labels, self._class_dim)):
            missed[i] = (p[kept] < self.threshold).sum() / max(1, int(kept.sum()))
        return missed


def _chosen(probs: Tensor, labels: Tensor, class_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Return, for every image, the probability of each pixel's label, and which pixels count."""
    p = probs.movedim(class_dim, -1)
    if p.shape[:-1] != labels.shape:
        raise ValueError(
            f"Labels have the shape {tuple(labels.shape)}, but the probabilities are those of "
            f"sites {tuple(p.shape[:-1])}: pass class_dim if the classes are on another axis."
        )
    known = (labels >= 0) & (labels < p.shape[-1])
    index = labels.where(known, 0).long().to(p.device).unsqueeze(-1)
    # NaN is in no set, not even in the set of all classes
    own = p.gather(-1, index).squeeze(-1).double().cpu().flatten(1).nan_to_num(nan=-1.0)
    return list(zip(own, known.cpu().flatten(1), strict=True))
