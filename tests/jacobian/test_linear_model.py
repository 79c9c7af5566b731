import pytest
import torch
from jacobians import X, check, linear_model, mlp, products
from torch import nn
from torch.testing import assert_close

from torch_lla_em.jacobian.factors import Factored


def test_large_outputs_are_pulled_one_by_one(monkeypatch):
    """Where temporaries of few columns are large, only J w takes several at once."""
    monkeypatch.setattr(Factored, "find", lambda *args: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    linear, x = linear_model(model), torch.randn(10_000, 3).double()
    assert not linear.probe(x[:5]).unbatched
    assert min(linear.path.at_once(5)) > 8
    pushed, pulled = linear.path.at_once(len(x))
    assert pulled == 1 and pushed in range(2, 9)
    w, u = torch.randn(3, linear.layout.size).double(), torch.randn(3, len(x), 2).double()
    found = products(linear, x, w, u)
    linear.path = linear.path._replace(example_bytes=None)
    for one_by_one, at_once in zip(found, products(linear, x, w, u)):
        assert_close(one_by_one, at_once)


def test_w_MAP_is_the_trained_weights_in_order():
    model = mlp()
    linear = linear_model(model)
    assert torch.equal(linear.w_MAP, nn.utils.parameters_to_vector(model.parameters()))
    with torch.no_grad():
        model[0].weight += 1  # between two blocks nothing is kept
    assert torch.equal(linear.w_MAP, nn.utils.parameters_to_vector(model.parameters()))


class TestLastLayer:
    @pytest.mark.parametrize(
        "after",
        [
            nn.Softmax(-1),
            nn.ReLU(inplace=True),
            nn.Unflatten(-1, (2, 1)),
            nn.LayerNorm(2, elementwise_affine=False),
        ],
        ids=lambda layer: type(layer).__name__,
    )
    def test_head_is_not_the_output(self, after):
        assert check(mlp(after), X, ["4.*"]).factors

    def test_inputs_overwritten_after_the_head(self):
        class Overwrites(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = mlp()[:4], nn.Linear(4, 4)

            def forward(self, x):
                h = self.body(x)
                out = self.head(h)
                h.zero_()
                return out

        check(Overwrites().double(), X, ["head.bias"])
