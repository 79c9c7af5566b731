"""Inputs of any form are predicted: loaders batch by batch, streams, names, sparse and of several lengths."""

import copy
import weakref

import pytest
import tiny
import torch
from tiny import draw, known, posterior_of
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_lla_em import Adapter, LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.prediction import posterior

FIXED = {"progress_bar": False, "em_steps": 0, "prior_precision": 2.0}


def several(name="classification"):
    case, la = known(name)
    la = copy.copy(la).calibrate(case.x + 0.1, case.y)
    loader = DataLoader(TensorDataset(case.x, case.y), 7)
    return case, loader, (la, LaplaceEnsemble([la, la]).calibrate(case.x + 0.1, case.y))


class Streamed(IterableDataset):
    """Inputs whose number is not known before."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter(self.x)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_loaders_are_predicted_as_all_inputs_at_once(name):
    case, loader, models = several(name)
    for la in models:
        each, whole = list(la.predictions(loader)), la.predict(case.x)
        assert [len(prediction.f_mean) for prediction in each] == [7, 7, 7, 7, 2]
        for quantity in ("expectation", "epistemic", "p_value", "f_mean", "f_variance"):
            parts = torch.cat([getattr(prediction, quantity) for prediction in each])
            assert_close(parts, getattr(whole, quantity))
        assert_close(torch.cat([p.samples for p in each], 1), whole.samples)
        assert torch.equal(la.is_ood(loader, 0.3), la.is_ood(case.x, 0.3))
        of_inputs = TensorDataset(case.x)
        every = loader, loader.dataset, DataLoader(of_inputs, 7), of_inputs
        for data in (*every, DataLoader(Streamed(case.x), 6), DataLoader(list(case.x), 7)):
            assert_close(la(data), la(case.x))
        linear = torch.cat([p.f_mean for p in la.predictions([case.x], "linear")])
        assert_close(linear, la.predict(case.x, "linear").f_mean)
        empty = DataLoader(TensorDataset(case.x[:0]))
        for words, call in (  # before the first batch
            ("mean='both'", lambda: la.predictions(loader, "both")),
            ("loader is empty", lambda: la(empty)),
            ("loader is empty", lambda: la.predict(empty)),
        ):
            with pytest.raises(ValueError, match=words):
                call()


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_predictions_depend_on_the_values_of_inputs_alone(name):
    """Not on how many there are, their memory format, or the mode of the module; none have none."""
    case, _, models = several(name)
    for la in models:
        whole, x = la.predict(case.x), case.x[:5]
        wide = torch.cat([x, x], 1)[:, :2]  # with other strides
        for inputs in (x, x.T.contiguous().T, wide, x.clone().requires_grad_()):
            assert_close(la.predict(inputs).f_variance.detach(), whole.f_variance[:5])
        assert_close(la.predict(x[:1].expand(3, 2)).f_mean, whole.f_mean[:1].expand(3, 3))
        none = la.predict(case.x[:0])
        assert none.f_mean.shape == (0, 3) and none.samples.shape[1:] == (0, 3)
        assert len(none.epistemic) == len(none.p_value) == len(none.sample(2)[0]) == 0
        with pytest.raises(ValueError, match=r"for a single example pass x\[None\]"):
            la(case.x[0])
        for mode in (False, True):
            models[0].model.train(mode)
            assert_close(la.predict(case.x).f_variance, whole.f_variance)


def test_all_predictions_are_in_the_order_of_the_dataset():
    case, la = known("regression")
    shuffled = DataLoader(TensorDataset(case.x, case.y), 7, shuffle=True)
    expected = la.predict(case.x).expectation
    of_batches = torch.cat([each.expectation for each in la.predictions(shuffled)])
    for found in (la(shuffled)[0], la.predict(shuffled).expectation, of_batches):
        assert_close(found, expected)


def test_two_tensors_in_a_list_are_two_batches_and_in_a_tuple_inputs_and_targets():
    case, la = known("classification")
    expected = la(case.x[:20])
    x, y = case.x[:20], case.y[:20]
    for two in ([x[:10], x[10:]], (x, x), [x, y]):
        found = torch.cat([each.expectation for each in la.predictions(two)])
        assert_close(found, expected)


class WithOptionalInput(nn.Module):
    """A network whose second input may be left out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, a, b=None):
        return self.layer(a if b is None else a + b)


@pytest.mark.parametrize("adapter", [Adapter(), Adapter(targets=lambda batch: batch[-1])])
def test_batches_without_targets_keep_every_input_that_the_fit_had(adapter, tmp_path):
    x, y = draw(20, 3), torch.arange(20) % 3
    options = {"num_samples": 2, "adapter": adapter}
    la = LinearisedLaplace(WithOptionalInput(), "classification", **options)
    la.fit(DataLoader(TensorDataset(x, x, y), 7), progress_bar=False, em_steps=1)
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.model, adapter=adapter)
    for own in (la, loaded):
        for tensors in ((x, x), (x, x, y)):
            assert_close(own(DataLoader(TensorDataset(*tensors), 7)), la((x, x)))


def test_groups_and_weights_belong_to_examples_of_a_loader_that_shuffles():
    case, la = known("regression")
    la = copy.copy(la)
    for name, of in (("groups", (case.x[:, 1] > 0).long()), ("weights", case.x[:, 1].exp())):
        la.calibrate(case.x + 0.1, case.y, **{name: of})
        shuffled = DataLoader(TensorDataset(case.x), 16, shuffle=True)
        found = la.predict(shuffled, **{name: of}).interval(0.6)
        assert_close(tuple(found), tuple(la.predict(case.x, **{name: of}).interval(0.6)))


def test_one_batch_is_in_memory_at_a_time(monkeypatch):
    _, loader, (la, _) = several()
    alive = []

    def at(*args, own=posterior.Posterior.at):
        pushed = own(*args)
        alive.append(weakref.ref(pushed.members[0].Jw))
        assert sum(each() is not None for each in alive) <= 2
        return pushed

    monkeypatch.setattr(posterior.Posterior, "at", at)
    assert la(loader).shape == (30, 3)
    la.is_ood(loader, 0.3)
    assert len(alive) >= 10


class Scaled(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, tokens, scale=None):
        return self.linear(tokens) * (1 if scale is None else scale)


TARGETS = {"entry": lambda batch: batch[1], "changed": lambda batch: batch[-1] - 1}


@pytest.mark.parametrize("kind", TARGETS)
def test_loaders_are_read_by_the_target_fn(kind):
    torch.manual_seed(0)
    case, scale = tiny.tiny("classification"), 1 + draw(30, 1).abs()
    entries = (case.x, case.y, scale) if kind == "entry" else (case.x, scale, case.y + 1)
    loader, own = DataLoader(TensorDataset(*entries), 7), Adapter(targets=TARGETS[kind])
    la = posterior_of(Scaled(), "classification", loader, adapter=own, em_steps=1)
    expected = la((case.x, scale))
    for each in (la, LaplaceEnsemble([la])):
        assert_close(each.predict(loader).probs, expected)
        assert_close(each.predict(loader.dataset).probs, expected)
        assert_close(each(loader), expected)


def test_batches_without_targets_are_inputs_and_inputs_have_names():
    case, la = tiny.fitted("classification", adapter=Adapter(targets=lambda batch: batch[1]))
    for rows in (TensorDataset(case.x), list(case.x)):
        assert_close(la.predict(DataLoader(rows, batch_size=7)).probs, la(case.x))
    own = Adapter(outputs=lambda model, x: model(x["x"]), targets=lambda batch: batch["y"])
    case, la = tiny.fitted(loader=[{"x": case.x, "y": case.y}], model=case.model, adapter=own)
    every = [{"x": x, "y": y} for x, y in zip(case.x, case.y, strict=True)]
    expected = la({"x": case.x})
    for rows in (every, [{"x": x} for x in case.x]):
        assert_close(la.predict(DataLoader(rows, batch_size=7)).probs, expected)
    torch.manual_seed(0)
    batch = {"tokens": case.x, "scale": 1 + draw(30, 1).abs()}
    la = LinearisedLaplace(Scaled(), "classification", num_samples=2)
    la.fit([{**batch, "labels": case.y}], **FIXED)
    assert_close(la(**batch), la({**batch, "labels": case.y}))
    assert_close(la.predict(batch).probs, la(batch))
    for options in ({"scale": batch["scale"]}, {"mean": "linear"}):
        with pytest.raises(TypeError, match="by name.*For options such as mean, call la.predict"):
            la(case.x, **options)
    for method in (la.predict, la.is_ood):
        with pytest.raises(TypeError, match="unexpected keyword argument 'tokens'"):
            method(**batch)


def test_outputs_without_a_last_dimension_have_intervals_of_their_shape():
    x, xv = draw(50, 2), draw(80, 2, seed=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).double()
    la = LinearisedLaplace(net, "regression", num_samples=4).fit(x, x[:, 0], **FIXED)
    for stated in ({}, {"weights": torch.ones(80)}, {"groups": (xv[:, 1] > 0).long()}):
        la.calibrate(xv, xv[:, 0] + draw(80, seed=2), **stated)
        own = {name: given[:50] for name, given in stated.items()}
        lower, upper = la.predict(x, **own).interval(0.8)
        assert lower.shape == upper.shape == (50,)
    inside = (lower <= x[:, 0]) & (x[:, 0] <= upper)
    shown = la.check(x, x[:, 0], level=0.8, **own).groups[0].coverage
    assert shown == pytest.approx(inside.double().mean().item())


class Bag(nn.Module):
    """A network of sparse inputs."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.sparse.mm(x, self.weight).tanh())


def test_sparse_inputs_are_fitted_and_checked():
    torch.manual_seed(0)
    x = (torch.rand(40, 5) < 0.3).float()
    y, options = (x.sum(1) > 1).long(), {"num_samples": 4, "parameters": "last_layer"}
    la = LinearisedLaplace(Bag(), "classification", **options).fit([(x.to_sparse(), y)], **FIXED)
    dense = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), la.model.last)
    dense[0].weight = nn.Parameter(la.model.weight.detach().T.clone())
    other = LinearisedLaplace(dense, "classification", **options).fit([(x, y)], **FIXED)
    assert_close(la(x.to_sparse()), other(x), rtol=1e-4, atol=1e-5)
    x[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="infinite inputs"):
        la.fit([(x.to_sparse(), y)], **FIXED)


def test_outputs_of_several_lengths_are_predicted_batch_by_batch():
    batches = [(x, x[..., 0].gt(0).long()) for x in (draw(8, 3, 2), draw(8, 5, 2))]
    la = posterior_of(nn.Linear(2, 3).double(), "classification", batches, **FIXED)
    loader = DataLoader([x for x, _ in batches], batch_size=None)
    for call in (lambda: la.calibrate(batches), lambda: la.predict(loader)):
        with pytest.raises(ValueError, match=r"shapes.*pad"):
            call()
    with pytest.raises(ValueError, match=r"la.predictions\(loader\)"):
        la(loader)
    assert [len(part.expectation[0]) for part in la.predictions(loader)] == [3, 5]
