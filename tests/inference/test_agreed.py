"""Every decision of a fit is the first rank's, although ranks may round what all of them compute."""

import pytest
import torch
from tiny import tiny

from torch_lla_em import LinearisedLaplace
from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.runtime import Group

ROUNDING = 0.1


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_ranks_that_round_differently_take_the_same_steps(name, monkeypatch):
    """The second fit, as another rank, is given what the first agreed on, and rounds the rest in another way."""
    case, told, eigh = tiny(name), [], torch.linalg.eigh
    calls, loss = [], Expectations.loss_and_slope

    def counted(*given):
        calls.append(given)
        return loss(*given)

    monkeypatch.setattr(Expectations, "loss_and_slope", counted)
    generator = torch.Generator().manual_seed(0)

    def rounded(tensor):
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor * (1 + ROUNDING * noise)

    def fit():
        la = LinearisedLaplace(case.model, name, num_samples=4)
        return la.fit(case.x, case.y, progress_bar=False, validation=False)

    def first(group, tensor):
        told.append(tensor.clone())
        return tensor

    monkeypatch.setattr(Group, "from_first", first)
    expected, count, number = fit(), len(told), len(calls)
    given = iter(told)
    monkeypatch.setattr(Group, "from_first", lambda group, tensor: next(given).clone())
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: (lambda v, V: (rounded(v), V))(*eigh(A)))
    found = fit()
    assert (
        count > 20 and next(given, None) is None and len(calls) == 2 * number
    )  # as many collectives
    assert found.prior_precision == expected.prior_precision
    assert [step["why"] for step in found.history[-1:]] == [expected.history[-1]["why"]]
    assert len(found.history) == len(expected.history)
    torch.testing.assert_close(found.w_samples, expected.w_samples, rtol=0.05, atol=1e-2)
