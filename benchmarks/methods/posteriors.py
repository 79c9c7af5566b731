"""Other posteriors of the same network: laplace-torch, the dense one, and feature density."""

from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, hessian, jacrev, vmap

from methods import ours
from methods.baselines import Predictor, Setting
from methods.metrics import Classes, Numbers
from torch_lla_em.exact import ExactLaplace, gaussian_log_prob
from torch_lla_em.mixtures.feature_density import FeatureDensity


def laplace_torch(subset: str, structure: str, setting: Setting) -> dict[str, Predictor]:
    """laplace-torch, tuned by its own marginal likelihood, with its own link.

    Its samples of outputs are not joint over inputs, so joint predictions and mutual
    information come from its samples of weights, pushed through its Jacobian.
    """
    from laplace import Laplace

    regression = setting.task.regression
    la = Laplace(
        setting.network,
        "regression" if regression else "classification",
        subset_of_weights=subset,
        hessian_structure=structure,
    )
    la.fit(setting.loader)
    if regression:
        tune_with_noise(la, 5 if setting.quick else 100)
    else:
        la.optimize_prior_precision(method="marglik", n_steps=5 if setting.quick else 100)

    def draws(x: Tensor) -> Tensor:
        last = subset == "last_layer"
        J, f = la.backend.last_layer_jacobians(x) if last else la.backend.jacobians(x)
        generator = torch.Generator().manual_seed(setting.seed)
        w = la.sample(64, generator=generator) - la.mean
        return (f + torch.einsum("bcp,sp->sbc", J, w)).detach()

    def predict(x: Tensor) -> Classes | Numbers:
        with torch.no_grad():
            if not regression:
                return Classes(la(x).log(), lambda: draws(x))
            mean, covariance = la(x, joint=True)
            return Numbers(mean, covariance, la.sigma_noise.item())

    predict.details = {"prior_precision": la.prior_precision.tolist()}
    kind = "last layer" if subset == "last_layer" else "all layers"
    names = {"full": "full", "diag": "diagonal", "kron": "KFAC"}
    return {f"laplace-torch: {kind}, {names[structure]}": predict}


def dense(g_prior: bool, setting: Setting) -> dict[str, Predictor]:
    """The dense posterior at the λ (and σ) that ours learns with the scalar prior."""
    la = ours.fit(setting, ours.Variant(g_prior=g_prior))
    network, (x, y) = setting.network, setting.task.train
    log_prob = (
        gaussian_log_prob(la.sigma_noise.float()) if setting.task.regression else _log_softmax
    )
    weights = {name: p.detach() for name, p in network.named_parameters()}

    def output(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network, weights, (x[None],))[0]

    rows = vmap(jacrev(output), (None, 0))(weights, x)
    J = torch.cat([row.flatten(2) for row in rows.values()], dim=2)
    f = network(x).detach()
    H = vmap(hessian(lambda f, y: -log_prob(f, y)))(f, y)
    scale = la.scale.double()
    ggn = ExactLaplace(J, f, y, log_prob, H, torch.ones_like(J[0, 0])).ggn.double()
    precision = scale[:, None] * ggn * scale + la.prior_precision.double() * torch.eye(len(scale))
    factor = torch.linalg.cholesky(precision)
    generator = torch.Generator().manual_seed(setting.seed)
    noise = torch.randn(len(factor), 512, generator=generator, dtype=torch.float64)
    w = scale * torch.linalg.solve_triangular(factor.T, noise, upper=True).T
    la.w_samples = w.to(la.w_samples)
    prior = "g-prior" if g_prior else "plain prior"
    return ours.rows(la, f"dense posterior, {prior}, λ of ours", setting)


class Familiarity:
    """A predictor of unfamiliarity alone."""

    def __init__(self, unfamiliarity: Tensor):
        self.unfamiliarity = unfamiliarity

    def scores(self, y: Tensor) -> dict[str, float]:
        return {}


def familiarity(setting: Setting) -> dict[str, Predictor]:
    """Linearised variance, a density over features, and both together.

    Together: the sum of both scores' standard scores among held-out inputs.
    """
    la = ours.fit(setting, ours.Variant())
    density = FeatureDensity(setting.network, "body", by_label=not setting.task.regression)
    density.fit(setting.loader)

    scores = {
        "linearised variance": lambda x: la.predict(x).variance.sum(-1).log().double(),
        "feature density": lambda x: -density.score(x).double(),
    }
    if not setting.task.regression:
        scores["mutual information"] = lambda x: (
            la.predict(x).epistemic.clamp_min(1e-30).log().double()
        )
    held_out = {name: score(setting.task.val.x) for name, score in scores.items()}

    def together(name: str, x: Tensor) -> Tensor:
        pair = (name, "feature density")
        return sum((scores[n](x) - held_out[n].mean()) / held_out[n].std() for n in pair)

    both = {
        f"feature density and {n}": partial(together, n) for n in scores if n != "feature density"
    }
    return {
        f"score: {name}": lambda x, score=score: Familiarity(score(x))
        for name, score in (scores | both).items()
    }


def _log_softmax(f: Tensor, y: Tensor) -> Tensor:
    return f.log_softmax(-1).gather(-1, y[None])[0]


def tune_with_noise(la, steps: int) -> None:
    """Tune prior and noise together, as laplace-torch's regression example does."""
    log_prior = torch.zeros(1, requires_grad=True)
    log_sigma = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(steps):
        optimiser.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimiser.step()
    la.prior_precision, la.sigma_noise = log_prior.detach().exp(), log_sigma.detach().exp()
