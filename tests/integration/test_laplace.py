"""The face: fit on any loader, predict, save and load, and the network left as it was."""

import copy
import json
import pickle

import pytest
import torch
from tiny import LOG_PROBS, likelihood_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_lla_em import (
    BlockCG,
    Classification,
    FunctionSpace,
    LinearisedLaplace,
    NotFittedError,
    Regression,
)
from torch_lla_em.prediction.functions import JOINT, functions_of

NAMES = list(LOG_PROBS)


def fitted(name="classification", loader=None, **options):
    case = tiny(name)
    fit = {"progress_bar": False, "prior_precision": options.pop("prior_precision", None)}
    fit["em_steps"] = options.pop("em_steps", 20)
    options = {"num_samples": 6, "tolerance": 1e-8, **options}
    options = {"curvature": "network", **options}
    la = LinearisedLaplace(case.model, likelihood_of(name), **options)
    return case, la.fit([(case.x, case.y)] if loader is None else loader(case), **fit)


class Stream(IterableDataset):
    def __init__(self, case):
        self.case = case

    def __iter__(self):
        return iter(zip(self.case.x, self.case.y))


LOADERS = {
    "list": lambda c: list(zip(c.x.split(7), c.y.split(7))),
    "DataLoader": lambda c: DataLoader(TensorDataset(c.x, c.y), batch_size=8),
    "drop_last": lambda c: DataLoader(TensorDataset(c.x, c.y), batch_size=6, drop_last=True),
    "IterableDataset": lambda c: DataLoader(Stream(c), batch_size=11),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_batches_do_not_matter(loader, name):
    _, whole = fitted(name, g_prior=False)
    _, cut = fitted(name, LOADERS[loader], g_prior=False)
    assert cut.num_data == 30
    for key in ("prior_precision", "w_lin", "w_samples", "effective_dim"):
        assert_close(getattr(cut, key), getattr(whole, key), rtol=1e-5, atol=1e-7)


def test_g_prior_does_not_depend_on_batches_of_whole_groups():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(128, 2).double(), torch.randint(3, (128,))
    posteriors = []
    for size in (32, 64, 128):
        la = LinearisedLaplace(model, "classification", num_samples=3)
        fit = {"em_steps": 0, "prior_precision": 50.0, "progress_bar": False}
        posteriors.append(la.fit(list(zip(x.split(size), y.split(size))), **fit))
    for la in posteriors[1:]:
        assert_close(la.scale, posteriors[0].scale)
        assert_close(la.w_samples, posteriors[0].w_samples, rtol=1e-3, atol=1e-4)


def test_shuffled_data_give_the_same_mode_and_the_same_moments():
    def shuffled(case):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(case.x, case.y), 7, shuffle=True, generator=generator)

    options = {"g_prior": False, "em_steps": 0, "prior_precision": 2.0}
    case, whole = fitted(**options)
    _, shuffle = fitted(loader=shuffled, **options)
    assert_close(shuffle.w_lin, whole.w_lin, rtol=1e-6, atol=1e-6)
    # each draw meets other rows, but it solves its own system on the same G
    problem = case.problem()
    residual = problem.ggn_product(shuffle.w_samples) + 2.0 * shuffle.w_samples
    assert residual.std() == pytest.approx((case.exact().ggn.diagonal() + 2).mean().sqrt(), rel=0.5)
    assert (shuffle.certificate < 1e-6).all()


def test_short_loaders_are_counted():
    _, la = fitted(loader=lambda c: DataLoader(TensorDataset(c.x, c.y), 8, drop_last=True))
    assert la.num_data == 24


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_every_likelihood_and_prior_fits_and_predicts(name, prior):
    with pytest.MonkeyPatch.context() as patch:
        if prior == "layerwise":  # weights that the evidence prunes reach the bounds
            patch.setattr("torch_lla_em.inference.mackay.PRECISION_BOUNDS", (0.0, float("inf")))
        case, la = fitted(name, prior=prior, em_steps=3)
    assert la.history[-1]["step"] == len(la.history)
    prediction = la.predict(case.x)
    assert prediction.mean.shape == (30, 3)
    assert_close(prediction.mean, case.model(case.x).detach())
    assert prediction.samples.shape == (6, 30, 3)
    assert torch.isfinite(la.log_marginal_likelihood().value)
    if name.startswith("regression"):
        mean, variance = la(case.x)
        assert_close(variance, prediction.variance + la.sigma_noise.expand(3) ** 2)
    else:
        assert la(case.x).shape == (30, 3)
    json.dumps(la.history)


@pytest.mark.parametrize("curvature", ["network", "linear"])
def test_samples_solve_their_system(curvature):
    case, la = fitted(curvature=curvature, em_steps=0, prior_precision=40.0)
    exact = case.exact(la.scale)
    w = la.w_samples
    if curvature == "linear":
        G = torch.func.hessian(exact.loss)(exact.mode(la.prior_precision))
    else:
        G = exact.ggn
    # (G + Λ) w = Λ^{1/2} ξ + η, whose prior part is known
    from torch_lla_em.inference.stochastic_prior import get_sto_samples

    problem = case.problem().with_curvature_at(la.w_lin if curvature == "linear" else None)
    noise = get_sto_samples(problem, 6, 0)
    Lambda = la.prior_precision / la.scale**2
    right = Lambda.sqrt() * noise.xi + noise.eta
    assert_close(w @ (G + torch.diag(Lambda)), right, rtol=1e-5, atol=1e-5)


def test_linear_mean_is_the_mode_of_the_linear_model():
    case, la = fitted()
    exact = case.exact(la.scale)
    linear = la.predict(case.x, mean="linear")
    assert_close(linear.mean, exact.J @ exact.mode(la.prior_precision), rtol=1e-5, atol=1e-5)
    assert_close(linear.deviations, la.predict(case.x).deviations)


def test_functions_are_joint_and_repeat_themselves():
    case, la = fitted()
    together = la.functional_samples(case.x)
    apart = torch.cat([la.functional_samples(x) for x in case.x.split(4)], dim=1)
    assert_close(together, apart)
    assert_close(la.function_sample(2)(case.x), together[2])
    assert_close(la.predictive_samples(case.x), together.softmax(-1))
    assert_close(la(case.x), la.predict(case.x).functions.softmax(-1).mean(0))


def test_generator_draws_fresh_functions_reproducibly():
    case, la = fitted()
    first, again, other = (
        la(case.x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(la(case.x), la(case.x))


def test_seed_makes_the_fit():
    _, first = fitted(seed=3)
    _, again = fitted(seed=3)
    _, other = fitted(seed=4)
    assert torch.equal(first.w_samples, again.w_samples)
    assert not torch.equal(first.w_samples, other.w_samples)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    case = tiny("classification")
    torch.manual_seed(5)
    LinearisedLaplace(case.model, "classification", num_samples=2).fit(
        [(case.x, case.y)], progress_bar=False
    )
    assert torch.equal(torch.randn(3), expected)


def test_network_comes_back_bitwise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    before = copy.deepcopy(model)
    keys = [set(vars(layer)) for layer in model.modules()]
    x, y = torch.randn(20, 2), torch.randint(3, (20,))
    la = LinearisedLaplace(model, "classification", num_samples=2)
    la.fit([(x, y)], progress_bar=False)
    la(x)
    with pytest.raises(ValueError, match="outside"):
        la.fit([(x, y + 9)], progress_bar=False)
    assert [layer.training for layer in model.modules()] == [
        layer.training for layer in before.modules()
    ]
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert keys == [set(vars(layer)) for layer in model.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_float32_agrees_with_float64():
    options = {"em_steps": 0, "prior_precision": 30.0}
    case, double = fitted(**options)
    asked = {"num_samples": 6, "tolerance": 1e-3, "curvature": "network"}
    single = LinearisedLaplace(copy.deepcopy(case.model).float(), "classification", **asked)
    single.fit([(case.x.float(), case.y)], progress_bar=False, **options)
    assert single.w_samples.dtype == torch.float32
    assert_close(single.w_samples.double(), double.w_samples, rtol=1e-2, atol=5e-3)
    assert_close(single(case.x.float()).double(), double(case.x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["classification", "regression", "poisson"])
def test_calibration_does_not_lose_on_its_own_rows(name):
    case, la = fitted(name)
    y = case.y.clone()
    if name == "classification":  # surprises
        y = case.model(case.x).argmin(1)
    else:
        y[::2] = y[::2] + 1.0
    before = la.predict(case.x).log_prob(y).mean().item()
    assert la.posterior_scale == 1 and la.calibration is None
    assert la.calibrate([(case.x[:13], y[:13]), (case.x[13:], y[13:])]) is la
    assert la.predict(case.x).log_prob(y).mean() > before
    assert la.calibration.num_rows == 30
    assert la.calibration.before == pytest.approx(-before)
    assert (la.calibration.coverage is None) == (name != "regression")
    la.fit([(case.x, case.y)], progress_bar=False)
    assert la.mean == "network" and la.mean_factor == 1 and la.posterior_scale == 1
    assert la.calibration is None and la.predict(case.x).beside is None


def test_a_mean_that_is_asked_for_is_taken():
    case, la = fitted()
    la.mixture = torch.tensor([[0.5, 1.0, 0.0, 1.0], [0.5, 0.0, 1.0, 0.0]]).double()
    alone = la.predict(case.x, mean="network")
    la.calibrate(case.x, case.model(case.x).argmax(1), mean="network")
    assert la.mean == "network" and not la.mixture[:, 1].any() and la.calibration.applied
    before = la.mixture.clone()
    la.calibrate(case.x, case.model(case.x).argmax(1), mean="network")
    assert torch.equal(la.mixture, before) and not la.calibration.applied
    _, la = fitted()
    la.mixture = torch.tensor([[0.5, 1.0, 0.0, 1.0], [0.5, 0.0, 1.0, 0.0]]).double()
    la.calibrate(case.x[:1], alone.probs[:1].argmax(1), mean="network")
    assert not la.calibration.applied  # one example shows no improvement
    assert_close(la(case.x), alone.probs)


def test_all_answers_follow_the_calibration():
    case, la = fitted(num_samples=20)
    la.calibrate([(case.x, (case.y + 1) % 3)])
    p = la.predict(case.x)
    assert p.weights is not None and len(p.beside) == 2
    assert_close(la(case.x), p.probs)
    assert_close(la.functional_samples(case.x), p.samples)
    for k in range(-1, 20):
        assert_close(la.function_sample(k)(case.x), p.samples[k])
    assert_close(la.predictive_samples(case.x), p.samples.softmax(-1))
    assert_close(la.joint_log_prob(case.x, case.y), p.joint_log_prob(case.y))
    alone = la.predict(case.x, mean="network")
    assert alone.beside is None
    assert_close(alone.mean, case.model(case.x).detach())


def test_validation_rows_calibrate_the_fit():
    case, la = fitted()
    surprising = [(case.x, (case.y + 1) % 3)]
    expected = la.calibrate(surprising)(case.x)
    options = {"num_samples": 6, "tolerance": 1e-8, "curvature": "network"}
    again = LinearisedLaplace(case.model, "classification", **options)
    again.fit([(case.x, case.y)], validation=surprising, progress_bar=False)
    assert_close(again(case.x), expected)


def test_fewer_samples_are_the_first_ones():
    case, la = fitted()
    few = la.predict(case.x, num_samples=2)
    assert_close(few.deviations, la.predict(case.x).deviations[:2])
    with pytest.raises(ValueError, match="num_samples=9"):
        la.predict(case.x, num_samples=9)


def test_calibration_is_saved(tmp_path):
    case, la = fitted()
    la.calibrate([(case.x, (case.y + 1) % 3)])
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert torch.equal(again.mixture, la.mixture) and again.calibration == la.calibration
    assert torch.equal(again(case.x), la(case.x))


def test_joint_log_prob_is_that_of_the_functions():
    case, la = fitted()
    prediction = la.predict(case.x)
    p = (prediction.centre + functions_of(prediction.deviations, JOINT)).softmax(-1)
    joint = p[:, torch.arange(30), case.y].prod(1).mean().log()
    assert_close(la.joint_log_prob(case.x, case.y), joint)
    case, la = fitted("regression")
    prediction = la.predict(case.x)
    noise = la.sigma_noise**2 * torch.eye(90, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(
        prediction.mean.flatten(), prediction.covariance + noise
    )
    assert_close(la.joint_log_prob(case.x, case.y), normal.log_prob(case.y.flatten()))


def test_last_layer_posterior_is_dense_laplace_of_that_layer():
    case = tiny("classification")
    options = {"parameters": "last_layer", "num_samples": 4, "curvature": "network"}
    la = LinearisedLaplace(case.model, "classification", **options)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=3.0, progress_bar=False)
    assert la.w_lin.shape == (15,)
    exact = case.exact().__class__.of(
        case.model, case.x, case.y, LOG_PROBS["classification"], ["2.weight", "2.bias"]
    )
    scaled = exact.mode(3.0 / la.scale**2)
    assert_close(la.w_lin, scaled, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("solver", [None, BlockCG(), FunctionSpace()])
def test_history_tells_the_path(solver):
    _, la = fitted(solver=solver)
    steps = [record["step"] for record in la.history]
    assert steps == list(range(1, len(steps) + 1))
    last = la.history[-1]
    # the last step of log λ is below its Monte Carlo error, which 6 samples leave
    allowed = (6 * last["effective_dim"]) ** -0.5
    assert last["effective_dim"] == pytest.approx(float(la.effective_dim), rel=allowed)
    assert last["prior_precision"] == pytest.approx(float(la.prior_precision), rel=allowed)
    assert last["data_passes"] > 0 and last["seconds"] > 0


def test_saved_posterior_predicts_the_same(tmp_path):
    for name in ("classification", "regression"):
        case, la = fitted(name)
        la.calibrate([(case.x, case.y)])
        la.save(tmp_path / "posterior.pt")
        loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
        for ours, theirs in zip(_flat(la(case.x)), _flat(loaded(case.x))):
            assert torch.equal(ours, theirs)
        assert loaded.history == la.history
        assert loaded.num_data == 30
        assert torch.equal(
            loaded.log_marginal_likelihood().value, la.log_marginal_likelihood().value
        )
        state = torch.load(tmp_path / "posterior.pt", weights_only=True)
        assert all(isinstance(value, torch.Tensor) for value in state.values())


def _flat(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_state_dict_moves_between_objects(tmp_path):
    case, la = fitted()
    other = LinearisedLaplace(case.model, "classification")
    other.load_state_dict(la.state_dict())
    assert torch.equal(other(case.x), la(case.x))


def test_own_likelihoods_are_passed_again(tmp_path):
    case, la = fitted("binomial")
    la.save(tmp_path / "own.pt")
    with pytest.raises(ValueError, match="pass likelihood"):
        LinearisedLaplace.load(tmp_path / "own.pt", case.model)
    loaded = LinearisedLaplace.load(tmp_path / "own.pt", case.model, likelihood=la.likelihood)
    assert torch.equal(loaded(case.x), la(case.x))


def test_files_that_do_not_fit_are_refused(tmp_path):
    case, la = fitted()
    path = tmp_path / "posterior.pt"
    la.save(path)
    with pytest.raises(FileNotFoundError):
        LinearisedLaplace.load(tmp_path / "nowhere.pt", case.model)
    path.with_name("short.pt").write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="truncated"):
        LinearisedLaplace.load(path.with_name("short.pt"), case.model)
    torch.save({"a": torch.ones(1)}, path.with_name("foreign.pt"))
    with pytest.raises(ValueError, match="no version key"):
        LinearisedLaplace.load(path.with_name("foreign.pt"), case.model)
    newer = {**la.state_dict(), "torch_lla_em_version": torch.tensor(99)}
    torch.save(newer, path.with_name("newer.pt"))
    with pytest.raises(ValueError, match="format 99"):
        LinearisedLaplace.load(path.with_name("newer.pt"), case.model)
    torch.save(la.state_dict(), path.with_name("state.pt"))
    with pytest.raises(ValueError, match="load_state_dict"):
        LinearisedLaplace.load(path.with_name("state.pt"), case.model)
    with pytest.raises(ValueError, match="another architecture"):
        LinearisedLaplace.load(path, nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3)))
    changed = copy.deepcopy(case.model)
    with torch.no_grad():
        changed[0].bias += 1e-9
    with pytest.raises(ValueError, match="weights or buffers are not those"):
        LinearisedLaplace.load(path, changed)
    with pytest.raises(ValueError, match="same `parameters`"):
        LinearisedLaplace.load(path, case.model, parameters="last_layer")
    with pytest.raises(ValueError, match="construct it with the same one"):
        LinearisedLaplace.load(path, case.model, likelihood="poisson")


def test_changed_weights_are_noticed():
    case, la = fitted()
    with torch.no_grad():
        case.model[0].weight.mul_(1.1)
    with pytest.raises(NotFittedError, match="have changed"):
        la(case.x)


@pytest.mark.parametrize(
    "call",
    [
        lambda la, x: la(x),
        lambda la, x: la.functional_samples(x),
        lambda la, x: la.function_sample(0),
        lambda la, x: la.calibrate([(x, x)]),
        lambda la, x: la.log_marginal_likelihood(),
        lambda la, x: la.state_dict(),
        lambda la, x: la.curve([1.0]),
    ],
)
def test_everything_asks_for_a_fit_first(call):
    case = tiny("classification")
    with pytest.raises(NotFittedError, match="call la.fit"):
        call(LinearisedLaplace(case.model, "classification"), case.x)


def test_moving_takes_the_network_along():
    case, la = fitted()
    la.to(torch.float32)
    assert next(case.model.parameters()).dtype == torch.float32
    assert la(case.x.float()).dtype == torch.float32
    assert la.train().training and not la.eval().training


def test_true_em_reaches_the_same_precision():
    case = tiny("regression")
    la = LinearisedLaplace(case.model, "regression", num_samples=8, sigma_noise=0.4)
    la.fit([(case.x, case.y)], progress_bar=False)
    slow = LinearisedLaplace(case.model, "regression", num_samples=8, sigma_noise=0.4)
    slow.fit([(case.x, case.y)], em_steps=400, update="em", progress_bar=False)
    assert_close(slow.prior_precision, la.prior_precision, rtol=0.1, atol=0)
    values = torch.tensor([record["log_evidence"] for record in slow.history])
    assert (values.diff() > -1e-9).all()


def test_saved_arguments_serve_the_next_fit(tmp_path):
    case = tiny("regression")
    la = LinearisedLaplace(case.model, "regression", sigma_noise=0.1, num_samples=2)
    fixed = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
    la.fit([(case.x, case.y)], **fixed).save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert loaded.fit([(case.x, case.y)], **fixed).sigma_noise == 0.1
    case = tiny("classification")
    la = LinearisedLaplace(case.model, Classification(ignore_index=-1), num_samples=2)
    la.fit([(case.x, case.y)], **fixed).save(tmp_path / "ignoring.pt")
    with pytest.raises(ValueError, match="arguments of your own"):
        LinearisedLaplace.load(tmp_path / "ignoring.pt", case.model)


def test_copies_predict():
    case, la = fitted()
    for other in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert torch.equal(other(case.x), la(case.x))


def test_statistics_that_move_are_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x, y = torch.randn(20, 2), torch.randint(3, (20,))
    la = LinearisedLaplace(model, "classification", num_samples=2)
    la.fit([(x, y)], progress_bar=False)
    model.train()(x)
    with pytest.raises(NotFittedError, match="have changed"):
        la(x)


def test_drawn_functions_outlive_calibration():
    case, la = fitted()
    function = la.function_sample(1)
    before = function(case.x)
    la.calibrate([(case.x, (case.y + 1) % 3)])
    assert torch.equal(function(case.x), before)


def test_own_kinds_of_regression_stay():
    class Shifted(Regression):
        def mean(self, f):
            return f + 1.0

    case = tiny("regression")
    la = LinearisedLaplace(case.model, Shifted(0.4), num_samples=2)
    la.fit([(case.x, case.y)], progress_bar=False)
    assert type(la.likelihood) is Shifted
    assert la.likelihood.sigma_noise == la.sigma_noise


def test_values_passed_in_are_copied():
    case = tiny("classification")
    precision = torch.tensor(3.0).double()
    la = LinearisedLaplace(case.model, "classification", num_samples=2)
    la.fit([(case.x, case.y)], em_steps=0, prior_precision=precision, progress_bar=False)
    precision.mul_(50)
    assert la.prior_precision == 3.0


def test_truth_values_and_small_integers_are_targets():
    case = tiny("bernoulli")
    fixed = {"em_steps": 0, "prior_precision": 3.0, "progress_bar": False}
    la = LinearisedLaplace(case.model, "bernoulli", num_samples=2)
    expected = la.fit([(case.x, case.y)], **fixed).w_lin
    assert_close(la.fit([(case.x, case.y.bool())], **fixed).w_lin, expected)
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=2)
    expected = la.fit([(case.x, case.y)], **fixed).w_lin
    assert_close(la.fit([(case.x, case.y.byte())], **fixed).w_lin, expected)


def test_linear_curvature_is_that_of_the_last_mode():
    case, la = fitted(curvature="linear", num_samples=32, tolerance=1e-6)
    assert [record["step"] for record in la.history] == list(range(1, len(la.history) + 1))
    again = LinearisedLaplace(
        case.model, "classification", curvature="linear", num_samples=32, tolerance=1e-6
    )
    precision = la.prior_precision
    again.fit([(case.x, case.y)], em_steps=0, prior_precision=precision, progress_bar=False)
    assert_close(again.effective_dim, la.effective_dim, rtol=0.03, atol=0)
