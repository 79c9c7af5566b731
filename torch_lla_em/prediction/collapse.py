"""Warnings about fits that have failed, judged by some training examples."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from torch_lla_em.prediction.conformal import NUMBERS
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.prediction.predict import predicted
from torch_lla_em.prediction.printed import CALL
from torch_lla_em.prediction.pushforward import Pushforward
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS, report

_DETERMINED = 0.3
"""γ per target above which training residuals do not determine the noise, chosen on seven
regressions with 200 and 800 examples: above it 90 % intervals covered 72 to 88 %, below it at least
80 %."""


def warn_of_collapse(posterior: Posterior, problem: Problem) -> None:
    """Report a warning for each sign that a fit has failed, judged by some training examples."""
    facts, K = problem.data.facts, len(posterior.result.w_samples)
    most = NUMBERS // (K * max(facts.num_outputs // facts.num_rows, 1))
    if problem.data.group.rank > 0 or not most:
        return
    batch = next(problem.data.first().split(min(256, most)))
    if len(batch.rows) > most:  # a batch that cannot be split
        return
    data = posterior.at(batch.inputs)
    data = data._replace(targets=problem.sweep.aligned(batch).targets, class_dim=-1)
    for words in warnings_of(posterior, data):
        report("log", words)


def warnings_of(posterior: Posterior, data: Pushforward) -> Iterator[str]:
    """Yield a warning for each sign that a fit has failed, given some training examples."""
    result, likelihood, y = posterior.result, data.likelihood, data.y
    gamma, error = result.effective_dim.value.sum().item(), result.effective_dim[1].norm().item()
    collapsed = gamma < max(4 / len(result.w_samples), 2 * error)
    # where all λ are at their bound the fit has warned
    if collapsed and (result.prior_precision < PRECISION_BOUNDS[1]).any():
        scaling = 'prior="isotropic", ' if (result.scale != 1).any() else ""
        yield (
            f"The data determine hardly any parameters (γ = {gamma:.2g} ± {error:.1g}): the "
            f"posterior is close to the prior. Try {scaling}a smaller prior_precision, or "
            "parameters of later layers."
        )
    if likelihood.gives_probabilities:
        mask = likelihood.mask(y)
        count = y.numel() if mask is None else int(mask.sum())
        most = log(2 if likelihood.elementwise else data.f.shape[-1])
        nll = -likelihood.log_prob(data.f, y).double().sum().item() / max(count, 1)
        if count and nll >= most:
            yield (
                f"The network's NLL on training data, {nll:.3g}, is not below that of equal "
                f"probabilities, {most:.3g}. The posterior is that of a trained network: train it "
                "before fit."
            )
    if likelihood.observation_noise is None or posterior.num_data is None:
        return
    prediction = predicted(posterior, data)
    if y.shape != prediction.expectation.shape:
        return
    squares = ((y - prediction.expectation).square() / prediction.aleatoric).double()
    share = gamma / (posterior.num_data * y[0].numel())
    if share > _DETERMINED and not collapsed:
        yield (
            f"The network has overfitted (γ is {share:.0%} of the number of targets), so σ is "
            f"probably too small. {CALL} to learn it from other examples, or use more data."
        )
    count, sigma = y.shape[-1] if y.dim() > 1 else 1, result.sigma_noise
    least, output = squares.reshape(-1, count).mean(0).min(0)
    if sigma is not None and not sigma.dim() and count > 1 and least < 0.01:
        yield (
            f"All outputs share sigma_noise, but residuals of output {output} are only "
            f"{least.sqrt():.1%} of it: its intervals are far too wide. Pass "
            f"Regression(torch.ones({count})) to learn one for each."
        )
