"""Data that arrive in parts: what the fit of a later part adds to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.data import Data
from torch_lla_em.inference.prior import g_prior_squares
from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.problem import EarlierRows, NoiseFeatures


class Earlier(NamedTuple):
    """The noise features of all data so far, and the likelihood that they were drawn under."""

    rows: EarlierRows
    likelihood: Likelihood

    @classmethod
    def of(cls, eta: Tensor, scale: Tensor, likelihood: Likelihood, data: Data) -> Earlier:
        """Return what the next part of the data adds to, of the noise and its g-prior."""
        features = NoiseFeatures(eta, g_prior_squares(scale))
        return cls(EarlierRows(data.num_rows, data.num_outputs, features), likelihood)

    def at(self, likelihood: Likelihood) -> EarlierRows | None:
        """Return the features under a likelihood; None where only a pass can tell them."""
        if not isinstance(likelihood, Regression):
            return self.rows
        if likelihood.sigma_noise.dim():
            return None
        ratio = (likelihood.sigma_noise.cpu() / self.likelihood.sigma_noise.cpu()).item()
        eta, squares = self.rows.features
        return self.rows._replace(features=NoiseFeatures(eta / ratio, squares / ratio**2))
