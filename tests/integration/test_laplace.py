"""The public interface: fit on any loader, predict, save and load, and leave the network unchanged."""

import copy
import json
import pickle

import loaders
import pytest
import tiny
import torch
from dense import gaussian_log_prob
from tiny import LOG_PROBS
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, FunctionSpace, LinearisedLaplace, NotFittedError, Regression

FIXED = {"em_steps": 0, "prior_precision": 3.0}


def fitted(name="classification", loader=None, **options):
    options = {"num_samples": 6, "tolerance": 1e-8, "curvature": "network", **options}
    return tiny.fitted(name, loader, **options)


@pytest.fixture(scope="module")
def known():
    """A classifier's posterior that no test changes."""
    return fitted()


def surprising(case):
    """Validation data whose labels are not those that were learnt."""
    return [(case.x, (case.y + 1) % 3)]


def dropping_none(case):
    return DataLoader(TensorDataset(case.x, case.y), batch_size=6, drop_last=True)


KINDS = loaders.batches, loaders.in_order, dropping_none, loaders.shuffled, loaders.streamed


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_neither_batch_size_nor_order_changes_the_posterior(name):
    case, whole = fitted(name, g_prior=False)
    for loader in KINDS:
        _, batched = fitted(name, loader(case), g_prior=False)
        assert batched.num_data == 30
        for key in ("prior_precision", "w_lin", "w_samples", "effective_dim"):
            assert_close(getattr(batched, key), getattr(whole, key), rtol=1e-5, atol=1e-7)


def test_only_seed_and_arguments_decide_a_fit(tmp_path):
    """Neither earlier fits nor the global generator do, nor changes of what was passed in."""
    case, la = fitted("regression", sigma_noise=0.4, em_steps=3, seed=3)
    names = "scale", "prior_precision", "sigma_noise", "w_lin", "w_samples"
    first = {name: getattr(la, name) for name in names}
    state = torch.get_rng_state()
    # the scale is in units of the noise at which it was drawn: that given, not that learnt
    la.fit(case.x[:11], case.y[:11], progress_bar=False)
    assert la.num_data == 11 and not torch.equal(la.w_lin, first["w_lin"])
    la.fit([(case.x, case.y)], em_steps=3, progress_bar=False)
    assert la.num_data == 30 and torch.equal(torch.get_rng_state(), state)
    for name in names:
        assert torch.equal(getattr(la, name), first[name]), name
    _, other = fitted("regression", sigma_noise=0.4, em_steps=3, seed=4)
    assert not torch.equal(other.w_samples, la.w_samples)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert loaded.fit(case.x, case.y, progress_bar=False, **FIXED).sigma_noise == 0.4
    precision = torch.tensor(3.0).double()
    _, la = fitted("bernoulli", em_steps=0, prior_precision=precision)
    precision.mul_(50)
    assert la.prior_precision == 3.0
    case = tiny.tiny("bernoulli")
    _, of_booleans = fitted("bernoulli", [(case.x, case.y.bool())], **FIXED)
    assert_close(of_booleans.w_lin, la.w_lin)


@pytest.mark.parametrize("name", LOG_PROBS)
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.filterwarnings("ignore")  # weights that the evidence prunes reach the bounds
def test_every_likelihood_and_prior_fits_and_predicts(name, prior):
    case, la = fitted(name, prior=prior, em_steps=3)
    assert [record["step"] for record in la.history] == list(range(1, len(la.history) + 1))
    prediction, learns_noise = la.predict(case.x), name.startswith("regression")
    assert la.mean == ("linear" if learns_noise else "network")
    assert_close(la.predict(case.x, mean="network").mean, case.model(case.x).detach())
    assert_close(prediction.mean, la.predict(case.x, mean=la.mean).mean)
    assert prediction.samples.shape == (6, 30, 3)
    data = (case.x, case.y) if prior == "layerwise" else ()
    assert torch.isfinite(la.log_marginal_likelihood(*data).value)
    if learns_noise:
        mean, variance = la(case.x)
        assert_close(variance, prediction.variance + la.sigma_noise.expand(3) ** 2)
    else:
        assert la(case.x).shape == (30, 3)
    json.dumps(la.history)


def test_functions_share_their_weights_over_inputs(known):
    case, la = known
    together = la.functional_samples(case.x)
    apart = torch.cat([la.functional_samples(x) for x in case.x.split(4)], dim=1)
    assert_close(together, apart)
    assert_close(la.function_sample(2)(case.x), together[2])
    assert_close(la.predictive_samples(case.x), together.softmax(-1))
    assert_close(la(case.x), la.predict(case.x).functions.softmax(-1).mean(0))
    few = la.predict(case.x, num_samples=2)
    assert_close(few.samples, la.predict(case.x).samples[:2])
    with pytest.raises(ValueError, match="num_samples=9"):
        la.predict(case.x, num_samples=9)
    exact, linear = case.exact(la.scale), la.predict(case.x, mean="linear")
    assert_close(linear.mean, exact.J @ exact.mode(la.prior_precision), rtol=1e-5, atol=1e-5)
    plain = la.predict(case.x)
    assert_close(linear.samples - linear.mean, plain.samples - plain.mean)


def test_a_generator_decides_every_draw_and_predictions_change_no_results(known):
    case, la = known
    prediction = la.predict(case.x)
    centre, samples = prediction.centre.clone(), prediction.samples.clone()
    for call in (la, la.functional_samples, la.predictive_samples):
        first, again, other = (
            call(case.x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
        )
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.equal(call(case.x), call(case.x))
    for link in ("mc", "probit"):
        la(case.x, link_approx=link)
    for name in ("mean", "variance", "samples", "probs", "log_probs", "entropy", "epistemic"):
        getattr(prediction, name)
    prediction.smoothed(), prediction.credible_interval(), prediction.joint_log_prob(case.y)
    for found in (prediction, la.predict(case.x)):
        assert torch.equal(found.centre, centre) and torch.equal(found.samples, samples)


def test_the_network_is_not_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    before = copy.deepcopy(model)
    keys = [set(vars(layer)) for layer in model.modules()]
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
    model.train()(x)  # moves the running statistics
    with pytest.raises(NotFittedError, match="have changed"):
        la(x)


@pytest.mark.parametrize("name", ["classification", "regression", "poisson"])
def test_calibration_improves_its_own_validation_set(name):
    case, la = fitted(name)
    y = case.y.clone()
    if name == "classification":
        y = case.model(case.x).argmin(1)
    else:
        y[::2] = y[::2] + 1.0
    before = la.predict(case.x).log_prob(y).mean().item()
    assert la.posterior_scale == 1 and la.calibration is None
    assert la.calibrate([(case.x[:13], y[:13]), (case.x[13:], y[13:])]) is la
    assert la.predict(case.x).log_prob(y).mean() > before
    assert la.calibration.num_rows == 30
    assert la.calibration.before == pytest.approx(-before)
    la.fit([(case.x, case.y)], progress_bar=False)
    assert la.mean == ("linear" if name == "regression" else "network")
    assert la.posterior_scale == 1 and la.calibration is None
    assert len(la.predict(case.x).mixture.components) == 1


def test_all_predictions_follow_the_calibration(tmp_path):
    case, la = fitted(num_samples=20)
    function = la.function_sample(1)
    drawn = function(case.x)
    la.calibrate(surprising(case))
    assert torch.equal(function(case.x), drawn)  # a function that was drawn before stays
    p = la.predict(case.x)
    assert len(p.mixture.components) == 3 and len(p.members) == 1
    assert_close(la(case.x), p.probs)
    assert_close(la.functional_samples(case.x), p.samples)
    for k in range(20):
        assert_close(la.function_sample(k)(case.x), p.samples[k])
    assert_close(la.predictive_samples(case.x), p.samples.softmax(-1))
    assert_close(la.joint_log_prob(case.x, case.y), p.joint_log_prob(case.y))
    alone = la.predict(case.x, mean="network")
    assert len(alone.mixture.components) == 1
    assert_close(alone.mean, case.model(case.x).detach())
    # so do fits that are given the validation set; the second comes from the finished checkpoint
    for _ in range(2):
        options = {"num_samples": 20, "validation": surprising(case), "checkpoint": tmp_path}
        _, other = fitted(**options)
        assert other.calibration == la.calibration
        assert_close(other(case.x), la(case.x))


@pytest.mark.parametrize("solver", [None, BlockCG(), FunctionSpace()])
def test_history_records_the_steps(solver):
    _, la = fitted(solver=solver)
    assert [record["step"] for record in la.history] == list(range(1, len(la.history) + 1))
    last = la.history[-1]
    # the last step of log λ is below its Monte Carlo error, which 6 samples leave
    allowed = (6 * last["effective_dim"]) ** -0.5
    assert last["effective_dim"] == pytest.approx(float(la.effective_dim), rel=allowed)
    assert last["prior_precision"] == pytest.approx(float(la.prior_precision), rel=allowed)
    assert last["data_passes"] > 0 and last["seconds"] > 0


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_a_saved_posterior_predicts_the_same(name, tmp_path):
    case, la = fitted(name)
    la.calibrate(surprising(case) if name == "classification" else [(case.x, case.y)])
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    other = LinearisedLaplace(case.model, name)
    other.load_state_dict({**la.state_dict(), "_modes": torch.ones(3, 5)})  # as 0.3.0 saved it
    for copied in (loaded, other, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert_close(copied(case.x), la(case.x), rtol=0, atol=0)
        assert copied.calibration[:4] == la.calibration[:4]
    assert torch.equal(loaded.mixture, la.mixture)
    assert loaded.history == la.history and loaded.num_data == 30
    assert torch.equal(loaded.log_marginal_likelihood().value, la.log_marginal_likelihood().value)
    state = torch.load(tmp_path / "posterior.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_unsuitable_files_raise(known, tmp_path):
    case, la = known
    path, other = tmp_path / "posterior.pt", tmp_path / "other.pt"
    la.save(path)
    with pytest.raises(FileNotFoundError):
        LinearisedLaplace.load(tmp_path / "nowhere.pt", case.model)
    other.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="truncated"):
        LinearisedLaplace.load(other, case.model)
    state = la.state_dict()
    for content, message in (
        ({"a": torch.ones(1)}, "no version key"),
        ({**state, "torch_lla_em_version": torch.tensor(99)}, "format 99"),
        (state, "load_state_dict"),
    ):
        torch.save(content, other)
        with pytest.raises(ValueError, match=message):
            LinearisedLaplace.load(other, case.model)
    changed = copy.deepcopy(case.model)
    with torch.no_grad():
        changed[0].bias += 1e-9
    for model, options, message in (
        (nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3)), {}, "weights or buffers"),
        (changed, {}, "weights or buffers"),
        (case.model, {"parameters": "last_layer"}, "same `parameters`"),
        (case.model, {"likelihood": "poisson"}, "the same one"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearisedLaplace.load(path, model, **options)


def test_everything_requires_a_fit_first():
    case = tiny.tiny("classification")
    la, x = LinearisedLaplace(case.model, "classification"), case.x
    of_inputs = la, la.predict, la.functional_samples, la.predictive_samples
    others = lambda: la.joint_log_prob(x, case.y), lambda: la.calibrate([(x, x)])
    calls = *(lambda call=call: call(x) for call in of_inputs), *others
    for call in (*calls, lambda: la.function_sample(0), la.log_marginal_likelihood, la.state_dict):
        with pytest.raises(NotFittedError, match="[Cc]all la.fit"):
            call()


def test_moving_moves_the_network_too():
    case, la = fitted()
    la.to(torch.float32)
    assert next(case.model.parameters()).dtype == torch.float32
    assert la(case.x.float()).dtype == torch.float32
    assert la.train().training and not la.eval().training


def test_true_em_reaches_the_same_precision():
    options = {"num_samples": 8, "tolerance": None, "curvature": None}
    _, la = fitted("regression", **options)
    case, slow = fitted("regression", em_steps=400, update="em", **options)
    assert_close(slow.prior_precision, la.prior_precision, rtol=0.1, atol=0)
    exact, values = case.exact(slow.scale).centred(), []
    for record in slow.history:
        precision, sigma = (
            torch.tensor(record[k]).double() for k in ("prior_precision", "sigma_noise")
        )
        values.append(exact.at_noise(gaussian_log_prob(sigma)).log_evidence(precision))
    # γ of few samples is wrong by so much
    assert len(values) > 10 and (torch.stack(values).diff() > -0.05).all()


def test_subclasses_of_regression_stay():
    class Shifted(Regression):
        def mean(self, f):
            return f + 1.0

    _, la = fitted("regression", likelihood=Shifted(0.4))
    assert type(la.likelihood) is Shifted
    assert la.likelihood.sigma_noise == la.sigma_noise


def test_linear_curvature_is_that_of_the_last_mode():
    options = {"curvature": "linear", "num_samples": 32, "tolerance": 1e-6}
    _, la = fitted(**options)
    _, again = fitted(em_steps=0, prior_precision=la.prior_precision, **options)
    assert_close(again.effective_dim, la.effective_dim, rtol=0.03, atol=0)


@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression"])
def test_networks_that_are_not_trained_are_named(name):
    for scale, words in ((0.0, 1), (-1.0, 1), (1.0, 0)):
        model = tiny.tiny(name).model
        with torch.no_grad():
            model[-1].weight *= scale
            model[-1].bias *= scale
        options = {"likelihood": name, "em_steps": 2, "curvature": "network"}
        _, la = tiny.fitted(name, model=model, **options)
        assert sum("train it before fit" in said for said in la.messages) == words
