import pytest
import torch
from jacobians import Calls
from torch import nn
from torch.testing import assert_close

from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.PReLU(), nn.Linear(3, 2))


def test_layout_expands_and_sums_blocks():
    layout = ParameterLayout(("a", "b"), (torch.Size([2]), torch.Size([1, 3])))
    assert torch.equal(layout.expand(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 1, 2, 2, 2]))
    w = torch.randn(4, 5)
    assert_close(layout.block_sums(w), torch.stack([w[:, :2].sum(1), w[:, 2:].sum(1)], 1))


def test_default_is_trainable_minus_normalisation_which_is_random_on_request(model):
    model[3].bias.requires_grad_(False)
    model.steps = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)  # are never random
    model.empty = nn.Parameter(torch.zeros(0, 2))
    assert select_parameters(model) == ("0.weight", "0.bias", "2.weight", "3.weight")
    trainable = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "3.weight")
    assert select_parameters(model, "requires_grad") == trainable
    assert select_parameters(model, "all") == (*trainable, "3.bias")
    assert select_parameters(model, ["1.*"]) == ("1.weight", "1.bias")
    assert select_parameters(model, "3.*") == ("3.weight", "3.bias")
    assert select_parameters(model, lambda name, p: p.ndim > 1) == ("0.weight", "3.weight")


def test_normalisation_layers_are_known_by_class_or_name_and_have_no_matrix():
    norms = nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True)
    norms += nn.GroupNorm(2, 4), nn.LayerNorm((4, 3)), nn.RMSNorm(4)
    for layer in (*norms, type("LlamaRMSNorm", (nn.PReLU,), {})(4)):
        assert select_parameters(nn.Sequential(nn.Linear(1, 1), layer)) == ("0.weight", "0.bias")
    layer = type("CosineNormLinear", (nn.Linear,), {})(2, 3)
    assert select_parameters(layer) == ("weight", "bias")
    block = type("PreNorm", (nn.Sequential,), {})(nn.LayerNorm(2), nn.Linear(2, 2))
    assert select_parameters(block) == ("1.weight", "1.bias")
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert len(select_parameters(model)) == 3


def test_tied_weights_count_once_under_any_of_their_names():
    layers = {"embed": nn.Embedding(3, 2), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 3, False)}
    model = Calls(None, **layers)
    model.head.weight = model.embed.weight
    for selection in (None, ["embed.*"], ["head.weight"], ["*.weight"], "last_layer"):
        names = select_parameters(model, selection)
        assert names[0] == "embed.weight" and "head.weight" not in names


def test_last_layer_is_the_last_registered_with_weights(model):
    assert select_parameters(model, "last_layer") == ("3.weight", "3.bias")
    model = nn.Sequential(model, nn.LayerNorm(2), nn.PReLU())
    assert select_parameters(model, "last_layer") == ("0.3.weight", "0.3.bias")
    assert select_parameters(nn.PReLU(), "last_layer") == ("weight",)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert len(select_parameters(nn.Sequential(nn.Linear(2, 2), head), "last_layer")) == 3


def test_errors_say_what_to_pass(model):
    turned = nn.Linear(2, 2)
    turned.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="'turn' is complex"):
        select_parameters(turned)
    assert select_parameters(turned, ["weight", "bias"]) == ("weight", "bias")
    none = "No parameter was selected"
    for selection, words in (
        ("head", 'Pass None, "last_layer", "requires_grad"'),
        (["0.*", "fc.*"], r"'fc.\*' in `parameters` matches no parameter"),
        ("3.weigth", "nearest names are .'3.weight'"),
        (lambda name, p: False, none),
        ([], none),
    ):
        with pytest.raises(ValueError, match=words):
            select_parameters(model, selection)
    with pytest.raises(ValueError, match=none):
        select_parameters(model.requires_grad_(False))
