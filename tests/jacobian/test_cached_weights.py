"""Networks that keep weights which they have computed: there is no J of the weights."""

import functools
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace

X = torch.linspace(-2, 2, 60).view(20, 3).double().sin()
Y = torch.arange(20) % 3


class Caching(nn.Module):
    """Two layers, of which the first has twice its weights, as ``weight(self)`` returns them."""

    def __init__(self, weight=lambda own: own.doubled()):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)
        self.weight = weight
        self.double()

    def doubled(self):
        return 2 * self.layer.weight

    def forward(self, x):
        return self.head(torch.tanh(linear(x, self.weight(self))))


class Attribute(Caching):
    def __init__(self):
        super().__init__(Attribute.kept)
        self.cache = None

    def kept(self):
        if self.cache is None:
            self.cache = self.doubled()
        return self.cache


class Contained(Caching):
    def __init__(self, cache):
        super().__init__(Contained.kept)
        self.cache = cache

    def kept(self):
        if isinstance(self.cache, dict):
            inner = self.cache.setdefault("layer", {})
            return inner["w"] if "w" in inner else inner.setdefault("w", self.doubled())
        if not self.cache:
            self.cache.append(self.doubled())
        return self.cache[0]


def fitted(model):
    la = LinearisedLaplace(model, "classification", num_samples=4, g_prior=False)
    return la.fit([(X, Y)], em_steps=0, prior_precision=0.5, progress_bar=False)


CACHES = {
    "attribute": Attribute,
    "dict": lambda: Contained({}),
    "list": lambda: Contained([]),
    "ordered": lambda: Contained(OrderedDict()),
    "deque": lambda: Contained(deque()),
}


def kept_by(model):
    cache = getattr(model, "cache", None)
    return {**cache, **cache.get("layer", {})} if isinstance(cache, dict) else cache


@pytest.mark.parametrize("kind", CACHES)
def test_caches_in_attributes_are_empty_at_every_call(kind):
    model, plain = CACHES[kind](), fitted(Caching())
    before, la = repr(kept_by(model)), fitted(model)
    assert_close(la.effective_dim, plain.effective_dim)
    assert_close(la.predict(X).samples, plain.predict(X).samples)
    assert repr(kept_by(model)) == before
    model(X).sum().backward()
    assert model.layer.weight.grad.abs().max() > 0


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_caches_that_are_full_are_told_and_left_as_they_were(kind, with_gradients):
    model = CACHES[kind]()
    with torch.set_grad_enabled(with_gradients):
        model(X)
    before = repr(kept_by(model))
    if with_gradients and isinstance(model.cache, (dict, list, deque)):
        with pytest.raises(RuntimeError, match="'layer.weight' is also used .* cannot be replaced"):
            fitted(model)
    else:
        (told,) = [words for words in fitted(model).messages if "do not depend on 1 of 3" in words]
        assert "'layer.weight'" in told and "in an attribute" in told and len(told.split()) <= 40
    assert repr(kept_by(model)) == before


@pytest.mark.parametrize("layer", ["orthogonal", "weight_norm"])
def test_parametrisations_may_be_cached(layer):
    def make():
        torch.manual_seed(0)
        first = getattr(parametrizations, layer)(nn.Linear(3, 3))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3)).double()

    plain, model = fitted(make()), make()
    with parametrize.cached():
        la = fitted(model)
        assert_close(la.effective_dim, plain.effective_dim)
        assert_close(la.predict(X).samples, plain.predict(X).samples)
        model(X).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert parametrize._cache_enabled == 1


class Box:
    """An object that is no module."""


def in_a_box(own, box=Box()):
    if not hasattr(box, "weight"):
        box.weight = own.doubled()
    return box.weight


HIDDEN = {"cache": functools.cache(Caching.doubled), "object": in_a_box}


@pytest.mark.parametrize("kind", HIDDEN)
def test_weights_cached_out_of_reach_are_refused(kind):
    with pytest.raises(RuntimeError, match="'layer.weight' is used in the first forward pass"):
        fitted(Caching(HIDDEN[kind]))


def test_other_tensors_in_attributes_may_be_used_and_written():
    class Scaled(Caching):
        def __init__(self):
            super().__init__(Scaled.scaled)
            self.scales, self.last, self.spare = [torch.tensor(1.5).double()], None, nn.Linear(2, 2)

        def scaled(self):
            self.last = self.scales[0] * self.doubled()
            return self.last

    model = Scaled()
    la = fitted(model)
    assert model.last is None
    assert_close(la.predict(X, mean="network").mean, model(X))


def test_calls_may_be_counted():
    model = Caching(lambda own: own.calls.append(1) or own.doubled())
    model.calls = []
    fitted(model)
    assert len(model.calls) > 10
