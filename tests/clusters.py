"""Data for the tests of mixtures."""

import torch


def draw(seed=0, n=300, dim=3, num_components=3, dtype=torch.float64):
    """Overlapping clusters away from the origin, with columns of different scale."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    centres = 2 * torch.randn(num_components, dim, **normal)
    roots = torch.randn(num_components, dim, dim, **normal)
    owner = torch.randint(num_components, (n,), generator=generator)
    noise = torch.randn(n, dim, 1, **normal)
    x = centres[owner] + (roots[owner] @ noise)[..., 0]
    return (x * torch.logspace(-1, 1, dim) + 7).to(dtype)


class Batches(list):
    """A list of batches that counts how often it is read."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()
