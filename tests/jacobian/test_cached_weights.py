"""Networks that keep tensors computed from their weights: there is no J of such weights."""

import pytest
import torch
from jacobians import Calls
from tiny import draw, posterior_of
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

X, Y = draw(20, 3), torch.arange(20) % 3


def doubled(own):
    return 2 * own.layer.weight


def caching(weight=doubled):
    """Return two layers, of which the first has twice its weights, as ``weight`` returns them."""
    torch.manual_seed(0)
    layers = {"layer": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 3)}
    model = Calls(lambda m, x: m.head(torch.tanh(linear(x, weight(m)))), **layers).double()
    model.cache = None
    return model


def in_attribute(own):
    if own.cache is None:
        own.cache = doubled(own)
    return own.cache


def fitted(model):
    return posterior_of(model, "classification", [(X, Y)], prior="isotropic", at=0.5)


def assert_same(la, plain):
    assert_close(la.effective_dim, plain.effective_dim)
    assert_close(la.predict(X).samples, plain.predict(X).samples)


@pytest.mark.parametrize("filled", [None, False, True])
def test_a_cache_in_an_attribute_is_left_as_it_was(filled):
    """An empty one is empty at every call; of a full one, with a graph or without, an error or a message tells."""
    model = caching(in_attribute)
    if filled is not None:
        with torch.set_grad_enabled(filled):
            model(X)
    before = model.cache
    if filled:
        with pytest.raises(RuntimeError, match="'layer.weight' is also used .* cannot be replaced"):
            fitted(model)
    elif filled is not None:
        (told,) = [words for words in fitted(model).messages if "do not depend on 1 of 3" in words]
        assert "'layer.weight'" in told and "in an attribute" in told and len(told.split()) <= 40
    else:
        assert_same(fitted(model), fitted(caching()))
    assert model.cache is before
    if filled is None:
        model(X).sum().backward()
        assert model.layer.weight.grad.abs().max() > 0


@pytest.mark.parametrize("layer", ["orthogonal", "weight_norm"])
def test_parametrisations_may_be_cached(layer):
    def make():
        torch.manual_seed(0)
        first = getattr(parametrizations, layer)(nn.Linear(3, 3))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3)).double()

    plain, model = fitted(make()), make()
    with parametrize.cached():
        assert_same(fitted(model), plain)
        model(X).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert parametrize._cache_enabled == 1
