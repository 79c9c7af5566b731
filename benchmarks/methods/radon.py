"""Parallel-beam tomography in two dimensions: a phantom, its Radon transform, back-projection."""

from math import ceil, pi

import torch
from torch import Tensor

# centre, half-axes (in units of half the width), turn in degrees, and what is added to the density
_ELLIPSES = (
    (0.00, 0.00, 0.70, 0.90, 0, 1.00),
    (0.00, -0.02, 0.64, 0.84, 0, -0.70),
    (0.23, 0.02, 0.13, 0.32, -20, -0.18),
    (-0.22, 0.00, 0.16, 0.38, 16, -0.20),
    (0.00, 0.42, 0.20, 0.18, 0, 0.20),
    (0.00, -0.30, 0.07, 0.07, 0, 0.30),
    (0.30, -0.45, 0.10, 0.06, 35, 0.25),
    (-0.28, -0.50, 0.05, 0.09, -30, 0.35),
    (0.10, -0.62, 0.05, 0.03, 10, 0.40),
    (-0.06, 0.66, 0.03, 0.05, 0, 0.40),
)
_FINER = 4


def phantom(size: int) -> Tensor:
    """Return a head of ellipses, shape (1, 1, size, size), with densities in [0, 1]."""
    axis = (torch.arange(_FINER * size) + 0.5) / (_FINER * size) * 2 - 1
    y, x = torch.meshgrid(-axis, axis, indexing="ij")
    image = torch.zeros_like(x)
    for x0, y0, a, b, degrees, density in _ELLIPSES:
        turn = torch.tensor(degrees * pi / 180)
        u = (x - x0) * turn.cos() + (y - y0) * turn.sin()
        v = (y - y0) * turn.cos() - (x - x0) * turn.sin()
        image += density * ((u / a) ** 2 + (v / b) ** 2 <= 1)
    return torch.nn.functional.avg_pool2d(image[None, None], _FINER)


class Radon:
    """Integrals of an image along parallel rays, at angles between 0 and 180 degrees.

    Every pixel's mass falls on the two detector bins next to the projection of its centre, in
    proportion. One sparse matrix serves both A and Aᵀ.
    """

    def __init__(self, size: int, angles: Tensor):
        self.size, self.angles = size, angles
        self.num_bins = ceil(size * 2**0.5) + 2
        axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        turn = angles.double()[:, None]
        at = turn.cos() * x.flatten() + turn.sin() * y.flatten() + (self.num_bins - 1) / 2
        below = at.floor()
        first = torch.arange(len(angles))[:, None] * self.num_bins
        rows = torch.stack([first + below, first + below + 1]).flatten().long()
        columns = torch.arange(size**2).expand(2, len(angles), -1).flatten()
        weights = torch.stack([1 - (at - below), at - below]).flatten() / size
        shape = (len(angles) * self.num_bins, size**2)
        matrix = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), weights, shape, check_invariants=True
        )
        self._matrix, self._transpose = (m.coalesce().float() for m in (matrix, matrix.t()))

    @property
    def num_measurements(self) -> int:
        return len(self._matrix)

    def forward(self, images: Tensor) -> Tensor:
        """Return A f, (n, angles × bins), for images (n, 1, size, size)."""
        return torch.sparse.mm(self._matrix.to(images.dtype), images.flatten(1).T).T

    def adjoint(self, y: Tensor) -> Tensor:
        """Return Aᵀ y, (n, 1, size, size)."""
        images = torch.sparse.mm(self._transpose.to(y.dtype), y.T).T
        return images.reshape(-1, 1, self.size, self.size)

    def filtered_back_projection(self, y: Tensor) -> Tensor:
        """Return Aᵀ of y filtered by a ramp, scaled to explain y as well as a factor can."""
        rays = y.unflatten(1, (len(self.angles), self.num_bins))
        padded = torch.fft.rfft(rays, n=2 * self.num_bins)
        ramp = (
            torch.linspace(0, 1, padded.shape[-1])
            * torch.linspace(0, pi / 2, padded.shape[-1]).cos()
        )
        filtered = torch.fft.irfft(padded * ramp, n=2 * self.num_bins)[..., : self.num_bins]
        image = self.adjoint(filtered.flatten(1))
        explained = self.forward(image)
        return image * (explained * y).sum() / explained.square().sum()
