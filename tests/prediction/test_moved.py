"""Calibration on moved training examples, without a validation set."""

import copy
import sys

import models
import pytest
import ranks
import torch
from daily import daily
from tiny import batched
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torch_lla_em import (
    Adapter,
    Compute,
    LaplaceEnsemble,
    LinearisedLaplace,
    temperature_of_neighbours,
)
from torch_lla_em.data import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.prediction.moved import moves_of

CPU = torch.device("cpu")


def blobs(n, seed=0, noise=0.0):
    """Two overlapping classes in five dimensions, some labels at random."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=g)
    x = torch.randn(n, 5, generator=g) + 1.5 * (y[:, None] - 0.5)
    wrong = torch.rand(n, generator=g) < noise
    return x, torch.where(wrong, torch.randint(2, (n,), generator=g), y)


class Bayes(nn.Module):
    """The true logits of ``blobs``, times a factor."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        logit = self.factor * 1.5 * x.sum(1)
        return torch.stack([torch.zeros_like(logit), logit], 1)


class Memory(nn.Module):
    """Is certain of the label of the nearest example that it has seen."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def forward(self, x):
        return 20 * nn.functional.one_hot(self.y[torch.cdist(x, self.x).argmin(1)], 2).float()


def trained(x, y, classes=2):
    """A network that is certain of every label of its training set."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    return models.trained(model.append(nn.Linear(32, classes)), x, y, 200)


@pytest.fixture(scope="module")
def memorised():
    x, y = blobs(80, noise=0.3)
    return trained(x, y), x, y, blobs(500, seed=1, noise=0.3)


def nll(la, x, y):
    return -la.predict(x).log_prob(y).mean().item()


def fit(model, *data, validation=None, likelihood="classification", weights=None, **options):
    la = LinearisedLaplace(model, likelihood, num_samples=8, **options)
    return la.fit(*data, progress_bar=False, validation=validation, weights=weights)


def test_moves_keep_targets_and_distances():
    x, y = blobs(60)
    moves = moves_of(Data([(x, y)], CPU), Classification())
    distances = torch.cdist(x, x).fill_diagonal_(torch.inf).min(1).values
    place = torch.cdist(moves.inputs, x).argmin(1)
    for length in (0.0, 0.5, 2.0):
        moved, labels = (torch.cat(part) for part in zip(*moves.batches(length), strict=True))
        assert torch.equal(labels, y[place])
        apart = (moved - x[place]).norm(dim=1) - length * distances[place]
        assert (apart < 1e-5).all()
        assert apart.median() > -1e-5  # only examples far from all others move less


@pytest.mark.parametrize("way", ["copies", "order", "units", "rotation", "constant features"])
def test_temperature_does_not_depend_on_the_form_of_the_data(way):
    x, y = (t.double() if t.is_floating_point() else t for t in blobs(120, noise=0.2))
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    order, memory = torch.randperm(len(x)), Memory(x, y)
    given, back = {
        "copies": ((torch.cat([x, x]), torch.cat([y, y])), lambda x: x),
        "order": ((x[order], y[order]), lambda x: x),
        "units": ((x * 1e3 + 5, y), lambda x: (x - 5) / 1e3),
        "rotation": ((x @ turn, y), lambda x: x @ turn.T),
        "constant features": ((torch.cat([x, x[:, :1] * 0 + 3], 1), y), lambda x: x[:, :5]),
    }[way]
    expected = temperature_of_neighbours(memory, x, y)
    found = temperature_of_neighbours(lambda_module(lambda x: memory(back(x))), *given)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_network_that_generalises_keeps_its_temperature():
    """Also where the simple model knows more."""
    x, y = blobs(800)
    own, wrong = (temperature_of_neighbours(Bayes(factor), x, y) for factor in (1.0, 4.0))
    assert own == pytest.approx(1, abs=0.25)
    assert wrong == pytest.approx(4 * own, rel=0.01)
    blind = lambda_module(lambda x: Bayes()(x[:, :5]))
    told = torch.cat([x, 10.0 * y[:, None]], 1)
    assert temperature_of_neighbours(blind, told[:300], y[:300]) > 0.75


def test_fit_leaves_a_network_that_is_not_too_confident_as_it_is():
    x, y = blobs(400)
    for factor in (0.3, 3.0):
        head = nn.Linear(5, 2)
        with torch.no_grad():
            head.weight.copy_(factor * torch.tensor([[0.0], [1.5]]).expand(2, 5))
            head.bias.zero_()
        backbone = nn.Linear(5, 5, bias=False)
        nn.init.eye_(backbone.weight)
        model = nn.Sequential(backbone, head)
        la = fit(model, x, y, parameters="last_layer")
        assert (la.calibration is None) == (factor < 1)


def test_some_of_many_examples_give_nearly_the_temperature_of_all():
    x, y = blobs(2100, noise=0.1)  # of which at most 2,000 are compared
    found = temperature_of_neighbours(Memory(x, y), batched(50, x, y))
    few = temperature_of_neighbours(Memory(x[:500], y[:500]), x[:500], y[:500])
    assert found == pytest.approx(few, rel=0.4)


def test_random_labels_give_nearly_uniform_predictions():
    x, y = blobs(200, noise=1.0)
    temperature = temperature_of_neighbours(Memory(x, y), x, y)
    assert (20 * torch.eye(2) / temperature).softmax(-1).max() < 0.7
    x, y = x[:80], y[:80]
    la = fit(trained(x, y), x, y, parameters="last_layer")
    assert la(blobs(200, seed=1)[0]).amax(1).mean() < 0.7


def test_last_layers_are_not_as_certain_as_the_network(memorised):
    model, x, y, test = memorised
    as_fitted = fit(model, x, y, parameters="last_layer", validation=False)
    assert as_fitted.calibration is None
    la = fit(model, x, y, parameters="last_layer")
    assert la.calibration.applied
    assert la.calibration.length >= 1
    assert nll(la, *test) < 0.75 < 1.2 < nll(as_fitted, *test)
    assert "moved training NLL" in str(la)
    assert "Call la.calibrate(validation_loader)" in str(la)
    with pytest.raises(ValueError, match="calibrate"):  # no guarantee follows
        la.predict(test[0]).prediction_set(0.9)
    as_fitted.calibrate()
    assert torch.equal(la(test[0]), as_fitted(test[0]))
    la.calibrate()
    assert torch.equal(la(test[0]), as_fitted(test[0]))
    la.calibrate(*test)
    assert la.calibration.length is None
    every = fit(model, x, y)  # posteriors of all parameters stay as fitted unless asked
    assert every.calibration is None and every.calibrate().calibration.length >= 1


def test_what_fit_calibrates_depends_on_the_parameters_and_not_on_how_they_were_selected(
    memorised, tmp_path
):
    model, x, y, _ = memorised
    every, frozen = fit(model, x, y), copy.deepcopy(model)
    frozen[:-1].requires_grad_(False)
    head, other = fit(model, x, y, parameters="last_layer"), fit(frozen, x, y)
    assert other.calibration.applied and torch.allclose(other(x), head(x), atol=1e-6)
    for number, la in enumerate((every, head)):
        la.save(tmp_path / str(number))
        loaded = LinearisedLaplace.load(tmp_path / str(number), model).fit(x, y, progress_bar=False)
        assert torch.allclose(loaded(x), la(x), atol=1e-6)
    assert fit(model, x, y, parameters="*").calibration is every.calibration is None


def test_files_keep_the_calibration_and_not_the_data(memorised, tmp_path):
    model, x, y, test = memorised
    options = {"parameters": "last_layer", "compute": Compute(checkpoint=tmp_path / "fit")}
    la, resumed = (fit(model, x, y, **options) for _ in range(2))
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", model)
    assert loaded.calibration == la.calibration == resumed.calibration
    assert torch.equal(loaded(test[0]), la(test[0]))
    for other in (loaded, copy.deepcopy(la)):
        with pytest.raises(ValueError, match="needs the training data of fit"):
            other.calibrate()
    second = fit(trained(*blobs(80, seed=2)), x, y, parameters="last_layer")
    ensemble = LaplaceEnsemble([loaded, second])
    assert torch.allclose(ensemble(test[0]), (la(test[0]) + second(test[0])) / 2, atol=1e-6)
    with pytest.raises(ValueError, match="ensembles do not hold"):
        ensemble.calibrate()
    with pytest.raises(ValueError, match="only without groups and weights"):
        la.calibrate(groups="classes")


@pytest.mark.parametrize("ignored", daily(255, rest=[-100]))
def test_examples_without_a_label_count_nowhere(ignored):
    x, y = blobs(80, noise=0.3)
    more = torch.cat([x, blobs(200, seed=3)[0]])
    labels, model = torch.cat([y, torch.full((200,), ignored)]), trained(x, y)
    options = {"parameters": "last_layer", "validation": False}
    due = fit(model, x, y, **options).calibrate().calibration
    weights = torch.cat([torch.ones(80), torch.zeros(200)])
    wrong = torch.cat([y, blobs(200, seed=4)[1]])
    ignoring = fit(model, more, labels, likelihood=Classification(ignored), **options)
    for la in (ignoring, fit(model, more, wrong, weights=weights, **options)):
        found = la.calibrate().calibration
        assert (found.num_rows, found.length) == (due.num_rows, due.length)
        assert found.network == pytest.approx(due.network, rel=1e-4)
    found = temperature_of_neighbours(model, more, labels.where(labels != ignored, -100))
    assert temperature_of_neighbours(model, x, y) == pytest.approx(found, rel=1e-4)


def test_one_missing_value_changes_no_neighbours():
    """Coded as a large number: all other examples still differ, and move as far as without it."""
    x, y = blobs(80, noise=0.3)
    others = torch.arange(80) != 3
    distances = torch.cdist(x[others], x[others]).fill_diagonal_(torch.inf).min(1).values
    x[3, 0] = -99999999.0
    moves = moves_of(Data([(x, y)], CPU), Classification())
    still, moved = (torch.cat([x for x, _ in moves.batches(length)]) for length in (0.0, 1.0))
    place = (still[:, None] == x[others]).all(-1)
    assert place.sum() == 79
    row, column = place.nonzero().T
    usual = moves.source[row] != (still[:, 0] < -1e7).nonzero()[0, 0]
    apart = (moved - still).norm(dim=1)[row] - distances[column]
    assert (apart[usual] < 1e-5).all() and apart[usual].median() > -1e-5


class Named(nn.Module):
    """Takes a number for each example as a tensor of one axis."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, columns, last):
        return self.net(torch.cat([columns, last[:, None]], 1))


def test_many_examples_are_moved_only_if_asked(memorised, monkeypatch):
    model, x, y, _ = memorised
    monkeypatch.setattr(sys.modules["torch_lla_em.prediction.calibrate"], "MANY", len(x) - 1)
    la = fit(model, x, y, parameters="last_layer")
    assert la.calibration is None and "have a temperature" in la.messages[-1]
    assert la.calibrate().calibration.length >= 1
    onehot = nn.functional.one_hot(y, 2).float()
    real = fit(model, x, onehot, parameters="last_layer", likelihood="regression")
    assert real.calibration is not None


def test_a_calibration_that_nobody_asked_for_never_loses_a_fit(monkeypatch):
    x, y = blobs(80, noise=0.3)
    model = trained(x, y)
    la = fit(Named(model), [((x[:, :4], x[:, 4]), y)], parameters="last_layer")
    assert la.calibration.applied
    rows = [{"x": x, "name": [f"{i}" for i in range(80)], "labels": y}]
    adapter = Adapter(outputs=lambda model, batch: model(batch["x"]))
    la = fit(model, rows, parameters="last_layer", adapter=adapter)
    assert la.calibration is None and "not plain tensors" in la.messages[-1]
    rates = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    of_counts = {"likelihood": "poisson", "parameters": "last_layer"}
    counts = fit(rates, x, y[:, None].float(), **of_counts)
    assert counts.calibration is None and "rates" in counts.messages[-1]

    def failing(*_):
        raise ArithmeticError("at moved inputs")

    monkeypatch.setattr(sys.modules["torch_lla_em.prediction.calibrate"], "moved", failing)
    la = fit(model, x, y, parameters="last_layer")
    assert la.calibration is None and la.predict(x).probs.isfinite().all()
    assert "ArithmeticError: at moved inputs" in la.messages[-1]
    with pytest.raises(ArithmeticError):
        la.calibrate()


@pytest.mark.parametrize("steps", [60, 200])
def test_heteroscedastic_networks_that_have_overfitted_are_calibrated(steps):
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 1, generator=g)

    def rows(n):
        x = torch.randn(n, 4, generator=g)
        f = torch.sin(x @ weights)
        return x, f + (0.3 * f.abs() + 0.1) * torch.randn(n, 1, generator=g)

    (x, y), test = rows(80), rows(500)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU())
    model.append(nn.Linear(50, 2))
    models.trained(model, x, y, steps, 5e-3, models.gaussian_nll)
    options = {"likelihood": "heteroscedastic", "parameters": "last_layer", "validation": False}
    la = fit(model, x, y, **options)
    as_fitted = nll(la, *test)
    assert nll(la.calibrate(), *test) < as_fitted


def test_training_data_that_have_changed_since_fit_are_refused(memorised):
    model, x, y, _ = memorised
    x = x.clone()
    la = fit(model, x, y, parameters="last_layer")
    x.mul_(10)
    with pytest.raises(ValueError, match="changed since fit"):
        la.calibrate()


def test_inputs_without_distances_are_named():
    x, y = torch.randint(9, (40, 3)), torch.arange(40) % 2
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    la = fit(model, x, y, parameters="last_layer", validation=False)
    with pytest.raises(ValueError, match=r"no real numbers.*la.calibrate\(validation_loader\)"):
        la.calibrate()
    x, y = blobs(60, noise=0.3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    la = fit(model, x.view(60, 1, 1, 5), y, parameters="last_layer")  # of images only if asked
    assert la.calibration is None
    assert la.calibrate().calibration.length is not None
    linear = nn.Linear(5, 30)
    several = lambda_module(lambda x: x.sum((1, 2))[:, None] * torch.ones(2))
    logarithm = lambda_module(lambda x: (x[:, :2] + 2).log())
    for why, given in (
        ("no real numbers", (model, torch.randint(9, (40, 5)), y[:40])),
        ("only 5 examples differ", (linear, x[:5], y[:5])),
        ("all inputs are equal", (linear, x * 0, torch.arange(60) % 30)),
        ("all targets are equal", (linear, x, y * 0)),
        ("differ in shape", (several, [(x[:30, :, None], y[:30]), (x[30:, :3, None], y[30:])])),
        ("not finite", (logarithm, x.clamp_min(-1.9), y)),
    ):
        with pytest.raises(ValueError, match=why):
            temperature_of_neighbours(*given)


def lambda_module(function):
    model = nn.Module()
    model.forward = function
    return model


HALF = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
DENSE = nn.Sequential(nn.Conv1d(5, 8, 1), nn.Conv1d(8, 2, 1))
MANY = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 30))
FORMS = {  # of inputs, targets and options, by the network
    "dense": (DENSE, lambda x, y: (x[:, :, None] + torch.randn(60, 1, 4), y[:, None].expand(60, 4)), {"class_dim": 1}),
    "labels": (HALF, lambda x, y: (x, torch.stack([y, 1 - y], 1).float()), {}),
    "dict": (HALF, lambda x, y: ({"x": x}, y), {"adapter": Adapter(lambda model, given: model(given["x"]))}),
    "integers beside": (HALF, lambda x, y: ((x, torch.arange(60)), y), {"adapter": Adapter(lambda model, given: model(given[0]))}),
    "ignored": (HALF, lambda x, y: (x, torch.where(torch.arange(60) % 3 > 0, y, -100)), {}),
    "weights": (HALF, lambda x, y: (x, y, torch.linspace(0, 2, 60)), {}),
    "classes": (MANY, lambda x, y: (x, y + 7), {}),
    "duplicates": (HALF, lambda x, y: (x[:30].repeat(2, 1), torch.cat([y[:30], torch.where(x[:30, 0] > 0, y[:30], 0)])), {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_targets_and_inputs_of_other_forms(kind):
    model, form, options = FORMS[kind]
    torch.manual_seed(0)
    for layer in model:  # no weights of other seeds, as the order of imports gives
        getattr(layer, "reset_parameters", tuple)()
    likelihood = "bernoulli" if kind == "labels" else "classification"
    la = LinearisedLaplace(model, likelihood, num_samples=4, parameters="last_layer", **options)
    weights = "last" if kind == "weights" else None
    la.fit([form(*blobs(60, noise=0.3))], progress_bar=False, weights=weights)
    la.calibrate()  # also where fit does without
    assert la.calibration.length is not None
    assert la.calibration.after < la.calibration.before + 0.1


def calibrated_on_a_rank(rank):
    x, y = blobs(80, noise=0.3)
    data = [TensorDataset(x, y)]
    is_here, found = torch.distributed.is_initialized(), []
    samplers = None, DistributedSampler(*data, 2, rank, shuffle=False) if is_here else None
    for loader in [(x, y), *((DataLoader(*data, 20, sampler=each),) for each in samplers)]:
        la = fit(trained(x, y), *loader, parameters="last_layer")
        found.append((la.calibration, la(x)))
    return found


@pytest.mark.slow
def test_ranks_find_the_numbers_of_one_process(tmp_path):
    alone, every = calibrated_on_a_rank(0), ranks.run(2, calibrated_on_a_rank, tmp_path)
    for expected, *each in zip(alone, *every, strict=True):
        for calibration, probabilities in each:
            assert calibration.length == expected[0].length
            assert calibration.num_rows == expected[0].num_rows
            assert calibration.after == pytest.approx(expected[0].after, abs=0.02)
            assert torch.allclose(probabilities, each[0][1])
            assert (probabilities - expected[1]).abs().max() < 0.05
