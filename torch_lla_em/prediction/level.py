"""A temperature for a posterior that leaves out parameters, from a posterior of all parameters.

A posterior of a last layer takes its features as given, although they were learnt from the same
labels, and is therefore overconfident. A posterior of all parameters is not, and one that is fitted
to a part of the examples shows how certain predictions of training examples should be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from torch_lla_em.data import Data, Loader
from torch_lla_em.jacobian import select_parameters
from torch_lla_em.prediction.calibration import Correction
from torch_lla_em.prediction.mixture import MODE, NETWORK, SCALE
from torch_lla_em.prediction.moved import LEAST, Batches, NoSubstitute, labelled_examples
from torch_lla_em.prediction.numbers import log_probs
from torch_lla_em.prediction.passes import pushed
from torch_lla_em.prediction.posterior import Posterior
from torch_lla_em.runtime import CALL, group_of, report

_MOST = 800
"""Largest number of examples to which the posterior of all parameters is fitted; if there are more,
at least half as many are used. With 200 instead of 400 windows of text the temperature was too
high: the test NLL was 1.19 instead of 1.02 times that of temperature scaling."""


def at_level(
    posterior: Posterior, loader: Loader, fit_all: Callable[[Batches], Posterior]
) -> Posterior:
    """Return a posterior with a temperature: the smallest one of at least 1 at which its NLL on
    training examples is not below that of a posterior of all parameters, which ``fit_all`` fits.

    Raises:
        NoSubstitute: If this does not determine a temperature.
    """
    setting, likelihood = posterior.setting, posterior.likelihood
    network, layout = setting.linear_model.network, setting.linear_model.layout
    # before all examples are read
    if {*select_parameters(network.module)} <= {*layout.names}:
        raise NoSubstitute("all parameters that require gradients are in the posterior")
    if group_of(setting.shard).size > 1:
        raise NoSubstitute("several ranks share the fit")
    with torch.inference_mode(False), torch.no_grad():
        data = Data(loader, network.device, setting.target_fn)
        part = [labelled_examples(data, likelihood, network.class_dim, _MOST, real=False)]
        if len(part[0][1]) < LEAST:
            raise NoSubstitute(f"there are only {len(part[0][1])} examples with a label")
        if part[0][1].dim() > 1:
            raise NoSubstitute("an example has several labels")
        whole = fit_all(part)
        read = (
            replace(each, setting=each.setting._replace(target_fn=None))
            for each in (posterior, whole)
        )
        own, of_all = (pushed((each,), part)[1] for each in read)
        level = log_probs([of_all], whole.tables).mean().item()
        low, high, a = 0.0, 1.0, 1.0
        for _ in range(30):
            is_surer = log_probs([own], tempered(posterior, a)).mean().item() > level
            low, high = (low, a) if is_surer else (a, high)
            if low == high:
                return posterior
            a = (low + high) / 2
        if not low:
            raise NoSubstitute("a posterior of all parameters predicts no better than chance")
    words = (
        f"Predictions have a temperature of {1 / a:.3g}, because the features were learnt from the "
        "same labels: with it they are as certain of training labels as a posterior of all "
        f"parameters. {CALL} to fit it to held-out data."
    )
    report("log", words)
    found = posterior.corrected(Correction(tempered(posterior, a), room=posterior.room()))
    return replace(found, messages=(*posterior.messages, words))


def tempered(posterior: Posterior, a: float) -> torch.Tensor:
    """Return the components of predictions whose logits are multiplied by a."""
    table = posterior.mixture.double().clone()
    table[:, [MODE, NETWORK]] *= a
    table[:, SCALE] *= a**2
    return table
