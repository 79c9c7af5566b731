"""Data for the tests of mixtures, and EM from given parameters."""

import pytest
import torch

from torch_lla_em.mixtures import mixture as mixture_module


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


def steps_from(start, mixture, data, **options):
    """Take all EM steps of a Gaussian mixture from given parameters, and return their states."""

    def entered(em, _):
        family = em.family
        weights, means, *others, matrices = start
        blocks = matrices.reshape(family.blocks) / family.units()
        return type(start)(weights, (means - family.centre) / family.unit, *others, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_module, "start_of", entered)
        return list(mixture.steps(data, **options))
