"""Ranks, quantiles and distances by their definitions: what guarantees rest on, without a fit."""

import pytest
import torch
from tiny import draw
from torch.testing import assert_close

from torch_lla_em.likelihoods import Bernoulli, Classification
from torch_lla_em.prediction.conformal import mass_above, p_values, quantiles
from torch_lla_em.prediction.neighbours import TrainingExamples, largest_variance
from torch_lla_em.prediction.reference import second_half

RATES = 0.02, 0.05, 0.1, 0.3, 0.8


def others(values, i):
    return torch.cat([values[:i], values[i + 1 :]])


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("kind", ["distinct", "ties", "rounded ties"])
def test_among_examples_that_are_alike_false_alarms_keep_to_their_rate(columns, kind):
    """Each of 60 examples is the new one once, in a batch of its own: counting gives the probability."""
    scores, room = draw(60, columns), {}
    scores = scores if kind == "distinct" else scores.mul(2).round().abs()
    new = scores
    if kind == "rounded ties":
        new, room = scores * (1 + 1e-6 * draw(60, columns, seed=1)), {"room": 3e-4}
    rows = range(60)
    found = [p_values(others(scores, i), new[i : i + 1], *room.values())[0] for i in rows]
    found = torch.stack(found)
    for rate in RATES:
        share = (found <= rate).double().mean()
        assert share <= rate and (kind != "distinct" or share > rate - 3 / 60)
    exact = torch.stack([p_values(others(scores, i), scores[i : i + 1])[0] for i in rows])
    assert torch.equal(found, exact)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_p_values_rank_a_harmonic_mean_of_the_shares_of_larger_scores(columns):
    reference, scores = draw(25, columns), draw(40, columns, seed=1)
    for score, found in zip(scores, p_values(reference, scores), strict=True):
        every = torch.cat([score[None], reference])
        shares = (every[None] >= every[:, None]).double().mean(1)
        unusual = (1 / shares).sum(1)
        assert_close(found.item(), (unusual >= unusual[0] - 1e-9).double().mean().item())


def test_levels_that_a_reference_cannot_support_are_refused_with_the_number_needed():
    quantiles(draw(19, 1), 0.95)
    with pytest.raises(ValueError, match="at least 19 reference examples.*18.*38 examples.*half"):
        quantiles(draw(18, 1), 0.95)
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantiles(draw(18, 1), 1.0)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_weights_are_the_probability_of_being_the_new_one(level, spread):
    """The new input is the i-th example with probability w_i / Σ w: a finite sum gives its coverage."""
    errors, weights = draw(30, 1).abs(), (spread * draw(30, seed=1)).exp()
    share, bounds, found = weights / weights.sum(), [], []
    for i in range(30):
        given = {"weights": others(weights, i), "own": weights[i : i + 1]} if spread else {}
        bounds.append(quantiles(others(errors, i), level, **given)[0])
        found.append(p_values(others(errors, i), errors[i : i + 1], **given)[0])
    covered = (share * (errors <= torch.stack(bounds))[:, 0]).sum()
    assert level - 1e-9 <= covered <= level + share.max() + 1e-9
    alarms = (share * (torch.stack(found) <= 1 - level)).sum()
    assert 1 - level - share.max() - 1e-9 <= alarms <= 1 - level + 1e-9


def test_equal_weights_change_nothing_and_too_large_ones_have_no_bound():
    scores, new, ones = draw(40, 2), draw(9, 2, seed=1), torch.ones(40).double()
    given = {"weights": 3 * ones, "own": 3 * ones[:9]}
    assert_close(p_values(scores, new, **given), p_values(scores, new))
    found = quantiles(scores.abs(), 0.8, **given)
    assert_close(found, scores.abs().sort(0).values[32].expand(9, 2))  # the 33rd of 40
    found = quantiles(scores.abs(), 0.9, weights=ones, own=torch.tensor([1.0, 5.0]))
    assert found[0].isfinite().all() and found[1].isinf().all()


def test_probabilities_that_rounding_orders_enter_a_set_together():
    probs = torch.tensor([[0.3, 0.3 + 1e-7, 0.3 - 1e-7, 0.1]])
    assert_close(mass_above(probs, 3e-4), torch.tensor([[0, 0, 0, 0.9]]).double())
    assert_close(mass_above(probs[:, [1, 2, 3, 0]], 0.0)[0, 2].item(), 0.9, atol=1e-6, rtol=0)


def test_every_other_example_of_each_group_is_the_reference():
    labels = torch.tensor([3, 1, 3, 3, 1, 1, 2, 1, 2])
    assert second_half(labels).int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 1]
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0])
    assert second_half(0 * labels[:5], weights).int().tolist() == [0, 0, 1, 0, 1]


def examples(likelihood, deviations):
    return TrainingExamples(likelihood, deviations, torch.tensor(1.0))


def test_distances_are_standard_deviations_of_differences_relative_to_those_of_outputs():
    known, new = draw(5, 6, 3), draw(6, 4, 3, seed=1)
    apart = new[:, :, None] - known.movedim(0, 1)[:, None]  # (6, 4, 5, 3)
    every = apart.square().sum(-1).mean(0).sqrt()
    own, theirs = (part.square().sum(-1).mean(0).sqrt() for part in (new, known.movedim(0, 1)))
    relative = every / torch.minimum(own[:, None], theirs), every / theirs
    due = torch.stack([quotient.min(1).values for quotient in relative], 1)
    assert_close(examples(Bernoulli(), known).distances(new), due)
    # near 0, and yet not near an example; far away, by either of them
    small, large = (examples(Bernoulli(), known).distances(c * new) for c in (1e-3, 1e3))
    assert (small[:, 0] > 100 * due[:, 0]).all() and (large > 100 * due).all()
    of_classes = examples(Classification(), known)
    shifted = of_classes.distances(new + draw(6, 4, 1, seed=2))
    assert_close(shifted, of_classes.distances(new))


def test_variances_of_training_examples_are_those_without_themselves_in_the_posterior():
    """The samples are a root of the covariance, so that there is no Monte Carlo error."""
    J, probs, P = draw(6, 3, 5), draw(6, 3, seed=1).softmax(1), 5
    H = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    precision = torch.eye(P).double() + torch.einsum("ncp,ncd,ndq->pq", J, H, J)
    roots = P**0.5 * torch.linalg.cholesky(torch.linalg.inv(precision)).T
    Jw = torch.einsum("ncp,kp->nkc", J, roots)
    leverages = torch.einsum("nkc,ncd,nld->nkl", Jw, H, Jw) / P
    centred, variances = J - J.mean(1, keepdim=True), []
    for i in range(6):
        without = torch.linalg.inv(precision - J[i].T @ H[i] @ J[i])
        variances.append(torch.einsum("cp,pq,cq->", centred[i], without, centred[i]) / 3)
    found = largest_variance(Classification(), Jw, leverages)
    assert_close(found, torch.stack(variances).max())
    certain = largest_variance(Classification(), Jw, 2 * torch.eye(P).double().expand(6, P, P))
    assert_close(certain, 20 * largest_variance(Classification(), Jw, 0 * leverages))  # at most
