"""Loaders are predicted batch by batch."""

import weakref

import pytest
import tiny
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, NotFittedError, compare
from torch_lla_em.prediction import Posterior, predictor


def loader_of(case):
    return DataLoader(TensorDataset(case.x, case.y), 7)


def several(name):
    case, la = tiny.fitted(name)
    la.calibrate(case.x, case.y)
    return case, (la, LaplaceEnsemble([la, la]).calibrate(case.x, case.y))


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_batches_are_predicted_as_all_inputs_at_once(name):
    case, models = several(name)
    loader = loader_of(case)
    for la in models:
        each, whole = list(la.predictions(loader)), la.predict(case.x)
        assert [len(prediction.mean) for prediction in each] == [7, 7, 7, 7, 2]
        for quantity in ("expectation", "epistemic", "p_value", "mean", "variance"):
            parts = torch.cat([getattr(prediction, quantity) for prediction in each])
            assert_close(parts, getattr(whole, quantity))
        assert_close(torch.cat([p.samples for p in each], 1), la.predict(loader).samples)
        assert torch.equal(la.is_ood(loader, 0.3), la.is_ood(case.x, 0.3))
        assert_close(la(loader), la(case.x))
        assert_close(la(loader, "probit"), la(case.x, "probit"))


def test_batches_have_the_same_new_functions():
    case, (la, ensemble) = several("classification")
    for model in (la, ensemble):
        one, other = (torch.Generator().manual_seed(1) for _ in range(2))
        each = [p.samples for p in model.predictions(loader_of(case), generator=one)]
        assert_close(torch.cat(each, 1), model.predict(case.x, generator=other).samples)
        assert torch.equal(one.get_state(), other.get_state())
        few = torch.cat([p.mean for p in model.predictions([case.x], "linear", num_samples=2)])
        assert_close(few, model.predict(case.x, "linear", num_samples=2).mean)


@pytest.mark.parametrize("call", [lambda la, x: la(x), lambda la, x: la.is_ood(x, 0.3)])
def test_one_batch_is_in_memory_at_a_time(call, monkeypatch):
    case, (la, _) = several("classification")
    alive, push_forward = [], predictor.push_forward

    def watched(*args):
        f, Jw = push_forward(*args)
        alive.append(weakref.ref(Jw))
        assert sum(each() is not None for each in alive) <= 2
        return f, Jw

    monkeypatch.setattr(predictor, "push_forward", watched)
    call(la, loader_of(case))
    assert len(alive) == 5


def test_posteriors_are_compared_with_one_batch_in_memory(monkeypatch):
    case, (la, _) = several("classification")
    alive, of_products = [], Posterior.of_products

    def watched(posterior, f, Jw, *more):
        alive.append(weakref.ref(Jw))
        assert sum(each() is not None for each in alive) <= 2
        return of_products(posterior, f, Jw, *more)

    monkeypatch.setattr(Posterior, "of_products", watched)
    parts = compare([la, la], loader_of(case), together=4)
    assert len(alive) >= 10
    whole = compare([la, la], case.x, case.y, together=4)
    for ours, theirs in zip(parts.records.values(), whole.records.values()):
        assert ours == pytest.approx(theirs)


def test_functions_that_do_not_fit_into_memory_are_refused_after_the_first_batch(monkeypatch):
    case, (la, _) = several("classification")
    numbers = (1 + len(la.w_samples)) * 7 * 3 * 8
    for free, fits in ((numbers * 9 + 1, True), (numbers * 9 - 1, False)):
        monkeypatch.setattr(predictor, "free_memory", lambda _, free=free: free)
        if fits:
            la.predict(loader_of(case))
            continue
        with pytest.raises(MemoryError, match=r"la\.predictions\(loader\)"):
            la.predict(loader_of(case))
        assert la(loader_of(case)).shape == (30, 3)


def test_errors_are_raised_before_the_first_batch():
    case, (la, _) = several("classification")
    with pytest.raises(ValueError, match="num_samples=99"):
        la.predictions(loader_of(case), num_samples=99)
    with pytest.raises(NotFittedError):
        LinearisedLaplace(case.model, "classification").predictions(loader_of(case))
