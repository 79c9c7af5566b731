"""The public interface: fits on any loader, functions and their gradients, and what a fit refuses."""

import copy
import json
import math
import warnings
from pathlib import Path

import loaders
import pytest
import tiny
import torch
from direct import Direct
from jacobians import Calls
from tiny import LOG_PROBS, batched, draw, known, posterior_of
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import torch_lla_em
from torch_lla_em import BlockCG, Compute, LinearisedLaplace, Regression

FIXED = {"em_steps": 0, "prior_precision": 3.0}
EXACT = {"num_samples": 6, "compute": Compute(tolerance=1e-8), "curvature": "network"}


def fitted(name="classification", loader=None, **options):
    return tiny.fitted(name, loader, **{**EXACT, **options})


def dropping_none(case):
    return DataLoader(TensorDataset(case.x, case.y), batch_size=6, drop_last=True)


KINDS = loaders.batches, loaders.in_order, dropping_none, loaders.shuffled, loaders.streamed


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_neither_batch_size_nor_order_changes_the_posterior(name):
    case, whole = fitted(name, prior="isotropic")
    for loader in KINDS:
        _, batched = fitted(name, loader(case), prior="isotropic")
        assert batched.num_data == 30
        for key in ("prior_precision", "w_lin", "w_samples", "effective_dim"):
            assert_close(getattr(batched, key), getattr(whole, key), rtol=1e-5, atol=1e-7)


def test_only_seed_and_arguments_decide_a_fit(tmp_path):
    """Neither earlier fits nor the global generator do, nor changes of what was passed in."""
    case, la = fitted("regression", likelihood=Regression(0.4), em_steps=3, seed=3)
    names = "scale", "prior_precision", "sigma_noise", "w_lin", "w_samples"
    first, state = {name: getattr(la, name) for name in names}, torch.get_rng_state()
    # the scale is in units of the noise at which it was drawn: that given, not that learnt
    la.fit(case.x[:11], case.y[:11], progress_bar=False)
    assert la.num_data == 11 and not torch.equal(la.w_lin, first["w_lin"])
    la.fit([(case.x, case.y)], em_steps=3, progress_bar=False)
    assert la.num_data == 30 and torch.equal(torch.get_rng_state(), state)
    for name in names:
        assert torch.equal(getattr(la, name), first[name]), name
    _, other = fitted("regression", likelihood=Regression(0.4), em_steps=3, seed=4)
    assert not torch.equal(other.w_samples, la.w_samples)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert loaded.fit(case.x, case.y, progress_bar=False, **FIXED).sigma_noise == 0.4
    precision = torch.tensor(3.0).double()
    case, la = fitted("bernoulli", em_steps=0, prior_precision=precision)
    precision.mul_(50)
    assert la.prior_precision == 3.0
    _, of_booleans = fitted("bernoulli", [(case.x, case.y.bool())], **FIXED)
    assert_close(of_booleans.w_lin, la.w_lin)


def test_draws_do_not_depend_on_the_default_dtype():
    case, found = tiny.tiny("classification"), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            la = LinearisedLaplace(case.model, "classification", num_samples=4)
            found.append(la.fit(case.x, case.y, progress_bar=False).w_samples)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", LOG_PROBS)
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.filterwarnings("ignore")  # weights that the evidence prunes reach the bounds
def test_every_likelihood_and_prior_fits_and_predicts(name, layerwise):
    case, la = fitted(name, layerwise=layerwise, em_steps=3)
    assert [record["step"] for record in la.history] == list(range(1, len(la.history) + 1))
    prediction, learns_noise = la.predict(case.x), name.startswith("regression")
    assert la.mean == ("linear" if learns_noise else "network")
    assert_close(la.predict(case.x, mean="network").f_mean, case.model(case.x).detach())
    assert_close(prediction.f_mean, la.predict(case.x, mean=la.mean).f_mean)
    assert prediction.samples.shape == (6, 30, 3)
    if layerwise:
        with pytest.raises(ValueError, match="has no evidence"):
            la.log_marginal_likelihood()
    else:
        assert torch.isfinite(la.log_marginal_likelihood().value)
    if learns_noise:
        assert_close(la(case.x)[1], prediction.f_variance + la.sigma_noise.expand(3) ** 2)
    else:
        assert la(case.x).shape == (30, 3)
    json.dumps(la.history)


@pytest.mark.parametrize("solver", [None, BlockCG(), Direct()])
def test_history_records_the_steps(solver):
    _, la = fitted(compute=Compute(solver=solver))
    last = la.history[-1]
    # the last step of log λ is below its Monte Carlo error, which 6 samples leave
    allowed = (6 * last["effective_dim"]) ** -0.5
    assert last["effective_dim"] == pytest.approx(float(la.effective_dim), rel=allowed)
    assert abs(math.log(last["prior_precision"] / float(la.prior_precision))) < allowed
    assert last["data_passes"] > 0 and last["seconds"] > 0


def test_subclasses_of_regression_stay():
    class Shifted(Regression):
        def mean(self, f):
            return f + 1.0

    _, la = fitted("regression", likelihood=Shifted(0.4))
    assert type(la.likelihood) is Shifted and la.likelihood.sigma_noise == la.sigma_noise


def test_the_network_is_not_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    before, keys = copy.deepcopy(model), [set(vars(layer)) for layer in model.modules()]
    x, y = torch.randn(20, 2), torch.randint(3, (20,))
    _, la = tiny.fitted(loader=[(x, y)], model=model, num_samples=2)
    la(x)
    with pytest.raises(ValueError, match="outside"):
        la.fit([(x, y + 9)], progress_bar=False)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert keys == [set(vars(layer)) for layer in model.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert la.train().training and not la.eval().training


def written_to(m, inputs):
    """Write to what is given, tokens and numbers."""
    tokens, x = inputs["tokens"], inputs["x"]
    tokens[tokens < 0] = 0
    if x.max() > 2:  # in some batches only
        x.clamp_(max=2).relu_()
    return m.head(torch.cat([m.table(tokens), x], -1))


def test_inputs_are_not_changed():
    x, tokens, y = draw(40, 3), torch.arange(40) % 5 - 1, torch.arange(40) % 3
    parts = batched(10, tokens, x, y)
    batches = [{"inputs": {"tokens": t, "x": a}, "labels": b} for t, a, b in parts]
    others = {"tokens": tokens[:7].clone(), "x": 3 * draw(7, 3)}
    before, kept = x.clone(), copy.deepcopy(others)
    model = Calls(written_to, table=nn.Embedding(4, 3), head=nn.Linear(6, 3)).double()
    la = posterior_of(model, "classification", batches, em_steps=2)
    found = la.predict({"inputs": others}, mean="network").f_mean
    assert_close(found, model(copy.deepcopy(kept)).detach())
    torch_lla_em.compare([la], batches)
    la.calibrate(batches)
    assert torch.equal(others["x"], kept["x"]) and (others["tokens"] < 0).any()
    assert torch.equal(x, before) and (tokens < 0).any()


# functions


def test_functions_share_their_weights_over_inputs():
    case, la = known()
    together, p = la.functional_samples(case.x), la.predict(case.x)
    apart = torch.cat([la.functional_samples(x) for x in case.x.split(4)], dim=1)
    assert_close(together, apart)
    assert torch.equal(la(case.x), p.probs) and torch.equal(la(case.x), la(case.x))
    case, la = fitted(em_steps=1)
    exact, linear = case.exact(la.scale), la.predict(case.x, mean="linear")
    assert_close(linear.f_mean, exact.J @ exact.mode(la.prior_precision), rtol=1e-5, atol=1e-5)
    plain = la.predict(case.x)
    assert_close(linear.samples - linear.f_mean, plain.samples - plain.f_mean)


PREDICTIONS = {
    "mc": lambda la, x: la(x),
    "samples": lambda la, x: la.functional_samples(x),
    "entropy": lambda la, x: la.predict(x, mean="linear").entropy,
    "epistemic": lambda la, x: la.predict(x).epistemic,
}


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_have_right_gradients_on_request_only(kind):
    case, la = known(em_steps=0, prior_precision=20.0, num_samples=3)
    x, call = case.x[:2].clone().requires_grad_(), PREDICTIONS[kind]
    assert torch.autograd.gradcheck(lambda x: call(la, x), x)
    assert not call(la, x.detach()).requires_grad
    with torch.no_grad():
        assert not call(la, x).requires_grad
    assert_close(call(la, x).detach(), call(la, x.detach()))
    (slope,) = torch.autograd.grad(call(la, x).square().sum(), x)
    assert all(p.grad is None for p in la.model.parameters()) and slope.abs().sum() > 0


def test_gradients_pass_a_subset_of_parameters_and_two_reverse_passes():
    fixed = {"em_steps": 0, "prior_precision": 20.0, "num_samples": 2}
    for parameters in ("last_layer", ["0.*"]):
        case, la = tiny.fitted("regression", parameters=parameters, **fixed)
        x = case.x[:2].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: la(x)[1], x)
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm  # has no forward mode
    model = nn.Sequential(norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 3)).double()
    _, la = tiny.fitted("regression", model=model, **fixed)
    assert torch.autograd.gradcheck(la.functional_samples, x)


# what is refused with an error that names the cause, or has the right answer


def fit(loader=None, model=None, **options):
    return tiny.fitted("classification", loader, model, **{"em_steps": 1, **options})[1]


def test_nothing_is_unpickled_nor_written_through_links(tmp_path):
    source = [path.read_text() for path in Path(torch_lla_em.__file__).parent.rglob("*.py")]
    calls = "import pickle", "pickle.load", "weights_only=False", "broadcast_object_list"
    assert not [call for call in calls for text in source if call in text]
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in ("header.pt", "posterior.pt", "state.pt"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError):
        fit(checkpoint=tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.filterwarnings("ignore")
def test_a_network_that_is_certain_of_every_example_has_the_prior():
    x, model = torch.cat([torch.eye(3)] * 10).double(), nn.Sequential(nn.Linear(3, 3)).double()
    model[0].weight.data.copy_(40 * torch.eye(3))
    model[0].bias.data.zero_()
    options = {"em_steps": 0, "prior_precision": 4.0, "curvature": "network", "prior": "isotropic"}
    la = fit([(x, torch.arange(30) % 3)], model, num_samples=200, **options)
    assert la.effective_dim <= 5 * la.effective_dim_error + 1e-6
    assert torch.isfinite(la.w_samples).all()


def without_gradient_later(layer):
    def forward(m, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(x[0, 0] < 50)):
            return m.layers(x)

    data = tiny.tiny("classification")
    far = data.x.index_fill(0, torch.tensor([0]), 100.0)
    model = Calls(forward, layers=nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))).double()
    compute = Compute(keep_data=False)  # batches are not joined
    fit([(data.x, data.y), (far, data.y)], model, parameters=[f"*.{layer}.*"], compute=compute)


def of_layers(kind, x, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(x.shape[1], 8), kind(), nn.Linear(8, 3)).to(x)
    fit([(x, torch.arange(len(x)) % 3)], model, curvature="network", **options)


def a_parameter_in_a_list():
    bias = nn.Parameter(torch.ones(3).double())
    # its gradient is easily overlooked
    forward = lambda m, x: m.layer(x) + 1e-9 * m.kept[0]  # noqa: E731
    fit(model=Calls(forward, layer=nn.Linear(2, 3).double(), bias=bias, kept=[bias]))


X = tiny.tiny("classification").x
SMALL = {"em_steps": 0, "prior_precision": 1e-16}
NO_GRAD = (NotImplementedError, ArithmeticError), "no_grad"
REFUSALS = {
    "inputs × 1e6": (ArithmeticError, "scaled as in training", lambda: of_layers(nn.ReLU, 1e6 * X)),
    "λ = 1e-16": (ArithmeticError, "larger `prior_precision`", lambda: of_layers(nn.Tanh, draw(40, 4).float(), **SMALL)),
    "no_grad in later batches": (*NO_GRAD, lambda: without_gradient_later("0")),
    "no_grad in a later layer": (*NO_GRAD, lambda: without_gradient_later("1")),
    "a parameter in a list": (RuntimeError, "'bias'.*list", a_parameter_in_a_list),
    "a softmax": (ValueError, "Leave out the last softmax, or pass adapter", lambda: fit(model=nn.Sequential(tiny.tiny("classification").model, nn.Softmax(-1)))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_cause(name):
    error, message, call = REFUSALS[name]
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        warnings.simplefilter("ignore")
        call()


def test_removed_solvers_name_their_replacement():
    for name, remedy in (
        ("BlockKrylov", "span_memory"),
        ("FunctionSpace", "BlockCG"),
        ("Newton", "torch_lla_em.solvers"),
    ):
        with pytest.raises(ImportError, match=f"{name}. any more: .*{remedy}"):
            getattr(torch_lla_em, name)
