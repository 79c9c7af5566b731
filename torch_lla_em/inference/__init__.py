"""The four stages, and EM over them."""

from torch_lla_em.inference.curve import Curve, Modes, curve, plot_curve
from torch_lla_em.inference.em import Evidence, iterate, split_evidence
from torch_lla_em.inference.empirical_bayes import EMState
from torch_lla_em.inference.fitting import FitOptions, Posterior, fit_posterior
from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.mackay import Estimate, function_space_Mackay_update
from torch_lla_em.inference.parts import Earlier
from torch_lla_em.inference.posterior_samples import Solver, optimise_samples
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.inference.weight_decay import prior_precision_from_weight_decay

__all__ = [
    "Curve",
    "EMState",
    "Earlier",
    "Estimate",
    "Evidence",
    "FitOptions",
    "Modes",
    "Posterior",
    "Solver",
    "curve",
    "fit_posterior",
    "function_space_Mackay_update",
    "get_sto_samples",
    "iterate",
    "optimise_MAP",
    "optimise_samples",
    "plot_curve",
    "prior_precision_from_weight_decay",
    "split_evidence",
]
