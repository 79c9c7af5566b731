"""mixtures."""

from torch_lla_em.mixtures.feature_density import FeatureDensity

__all__ = ["FeatureDensity"]
