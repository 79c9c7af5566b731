"""Hostile calls: each is refused with an error that names the cause, or gives the right answer."""

import warnings
from pathlib import Path

import pytest
import torch
from jacobians import Calls
from tiny import draw, fitted, tiny
from torch import nn
from torch.testing import assert_close

import torch_lla_em
from torch_lla_em import Compute, LinearisedLaplace


def fit(loader=None, model=None, **options):
    return fitted("classification", loader, model, **{"em_steps": 1, **options})[1]


def test_fits_and_predictions_do_not_follow_autocast_nor_inference_mode():
    data = tiny("classification")
    batches = [(data.x.float(), data.y)]
    outside = fit(batches, data.model.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, predicted = fit(batches, data.model), outside.predict(batches[0][0]).centre
    assert torch.equal(inside.w_lin, outside.w_lin)
    assert torch.equal(inside.w_samples, outside.w_samples)
    assert torch.equal(predicted, outside.predict(batches[0][0]).centre)
    model = tiny("classification").model
    with torch.inference_mode():
        la = fit(model=model)  # whose data are made here
    assert torch.equal(la.w_lin, fit().w_lin)


def test_a_loaded_posterior_is_probed_where_it_is_used(tmp_path):
    centres, layer = torch.randn(3, 2).double(), nn.Linear(2, 2, dtype=torch.float64)
    # forward mode is not implemented for distances
    model = Calls(lambda m, x: -torch.cdist(m.layer(x), centres), layer=layer)
    la, x = fit(model=model), tiny("classification").x
    la.save(tmp_path / "saved")
    loaded = LinearisedLaplace.load(tmp_path / "saved", model)
    assert_close(loaded.functional_samples(x), la.functional_samples(x))


def test_probabilities_are_refused_and_their_logarithms_are_logits():
    model = nn.Sequential(tiny("classification").model, nn.Softmax(-1))
    with pytest.raises(ValueError, match="Leave out the last softmax, or pass forward_fn"):
        fit(model=model)
    la, x = fit(model=model, forward_fn=lambda model, x: model(x).log()), tiny("classification").x
    assert_close(la.predict(x, mean="network").mean.exp(), model(x).detach())


def test_another_number_of_features_is_named():
    case, la = fitted()
    words = r"shape \(3,\) per example, .* '0' \(Linear\): .* as many features"
    with pytest.raises(RuntimeError, match=words):
        la.predict(draw(4, 3))
    with pytest.raises(RuntimeError, match=words):
        LinearisedLaplace(case.model, "classification").fit(draw(len(case.y), 3), case.y)
    for call in (la.calibrate, la.fit):  # of a network whose derivatives are known to be right
        with pytest.raises(RuntimeError, match=words):
            call(draw(len(case.y), 3), case.y)


def test_a_checkpoint_does_not_write_through_links(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in ("header.pt", "posterior.pt", "state.pt"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError):
        fit(checkpoint=tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"


def test_nothing_is_unpickled():
    source = [path.read_text() for path in Path(torch_lla_em.__file__).parent.rglob("*.py")]
    calls = "import pickle", "pickle.load", "weights_only=False", "broadcast_object_list"
    assert not [call for call in calls for text in source if call in text]


def test_a_network_that_is_certain_of_every_example_has_the_prior():
    x = torch.cat([torch.eye(3)] * 10).double()
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(40 * torch.eye(3))
        model[0].bias.zero_()
    options = {"em_steps": 0, "prior_precision": 4.0, "curvature": "network", "g_prior": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = fit([(x, torch.arange(30) % 3)], model, num_samples=200, **options)
    assert la.effective_dim <= 5 * la.effective_dim_error + 1e-6
    assert torch.isfinite(la.w_samples).all()


def without_gradient_later(layer):
    def forward(m, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(x[0, 0] < 50)):
            return m.layers(x)

    data = tiny("classification")
    far = data.x.index_fill(0, torch.tensor([0]), 100.0)
    model = Calls(forward, layers=nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))).double()
    compute = Compute(keep_data=False)  # batches are not joined
    fit([(data.x, data.y), (far, data.y)], model, parameters=[f"*.{layer}.*"], compute=compute)


def large_inputs():
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = [(1e6 * tiny("classification").x, torch.arange(30) % 3)]
    fit(data, model, curvature="network")


def a_tiny_prior_precision():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    fit([(x, torch.arange(60) % 3)], model, em_steps=0, prior_precision=1e-16)


def a_parameter_in_a_list():
    bias = nn.Parameter(torch.ones(3).double())
    # its gradient is easily overlooked
    forward = lambda m, x: m.layer(x) + 1e-9 * m.kept[0]  # noqa: E731
    fit(model=Calls(forward, layer=nn.Linear(2, 3).double(), bias=bias, kept=[bias]))


NO_GRAD = (NotImplementedError, ArithmeticError), "no_grad"
REFUSALS = {
    "inputs × 1e6": (ArithmeticError, "scaled as in training", large_inputs),
    "λ = 1e-16": (ArithmeticError, "larger `prior_precision`", a_tiny_prior_precision),
    "no_grad in later batches": (*NO_GRAD, lambda: without_gradient_later("0")),
    "no_grad in a later layer": (*NO_GRAD, lambda: without_gradient_later("1")),
    "a parameter in a list": (RuntimeError, "'bias'.*list", a_parameter_in_a_list),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_cause(name):
    error, message, call = REFUSALS[name]
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        warnings.simplefilter("ignore")
        call()
