"""The Monte Carlo error of q's mean, against the spread of means over other samples."""

from itertools import islice

import pytest
import torch
from models import trained
from steps import span_e_step, states_of_em
from tiny import problem_of
from torch import nn

from torch_lla_em import Classification
from torch_lla_em.inference.mean_error import error_of_mean
from torch_lla_em.inference.stochastic_prior import get_sto_samples


def steps_of(problem, num_samples, number):
    """Return the E-step of a moving H, and q after some of its steps."""
    e_step = span_e_step(problem, get_sto_samples(problem, num_samples, 0), 1e-3, moves=True)
    *_, state = islice(states_of_em(e_step, e_step.start()), number)
    return e_step.over, state.own.q


def with_new_samples(over, q, seed):
    """Return q with other samples of the same covariance, and the mean that follows from them."""
    generator = torch.Generator().manual_seed(seed)
    known = q.curved.spectrum
    xi, eta = torch.randn(2, *known.xi.shape, generator=generator, dtype=torch.float64)
    spectrum = known._replace(xi=xi, eta=eta * known.eigenvalues.sqrt())
    curved = q.curved._replace(spectrum=spectrum)
    return over.at(curved, q.precision, 1.0, q.mean, exact=True)


@pytest.mark.slow
def test_means_spread_over_samples_by_it():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 3
    x[:, :3] += torch.eye(3)[y]
    torch.manual_seed(0)
    network = trained(nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)), x, y, 200)
    problem = problem_of(network.double(), Classification(), [(x.double(), y)])
    over, q = steps_of(problem, 8, 4)
    assert not over.is_exact
    found, stated = [], []
    for seed in range(30):
        other = with_new_samples(over, q, seed)
        found.append(other.outputs)
        stated.append(error_of_mean(over, other))
    apart = torch.stack(found) - torch.stack(found).mean(0)

    def response(outputs):  # (columns, N, C)
        curved = over.expected.product(q.curved.H, outputs.flatten(1).T)
        return curved.square().sum() / len(outputs)

    root = (q.curved.spectrum.eigenvalues + q.precision).rsqrt()
    deviations = over.span.of_all.push((q.curved.vectors * root).T).movedim(-1, 0)
    due = response(apart) * 30 / 29 / (response(deviations) * len(deviations))
    ratio = torch.stack(stated).mean() / due
    assert 0.7 < ratio < 1.5
