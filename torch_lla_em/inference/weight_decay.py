"""Weight decay and prior precision: the same thing in other units."""

from __future__ import annotations


def prior_precision_from_weight_decay(
    weight_decay: float,
    num_data: int,
    *,
    loss: str = "nll",
    sigma_noise: float = 1.0,
    num_outputs: int = 1,
) -> float:
    """Return the λ that training with a mean loss and this weight decay has assumed.

    An optimiser that adds ``weight_decay * w`` to the gradient of the mean of N C losses
    minimises 1 / (N C) Σ loss + ½ weight_decay ‖w‖². Times N C that is a negative log
    posterior with λ = weight_decay N C where the loss is a negative log likelihood ("nll":
    cross-entropy, BCE, Poisson); a squared error ("mse") is 2 σ² of those.
    ``num_outputs`` counts the entries C over which the mean runs beside the data: 1 for
    cross-entropy of one label per datum, the tokens of a sequence, the outputs of a regression.
    """
    if loss not in ("nll", "mse"):
        raise ValueError(f"loss={loss!r} is not known: choose 'nll' or 'mse'.")
    for name, value in (("num_data", num_data), ("num_outputs", num_outputs)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}.")
    if weight_decay < 0 or not sigma_noise > 0:
        raise ValueError(
            f"weight_decay must be 0 or more and sigma_noise above 0, not {weight_decay} and "
            f"{sigma_noise}."
        )
    precision = float(weight_decay) * num_data * num_outputs
    return precision / (2 * sigma_noise**2) if loss == "mse" else precision
