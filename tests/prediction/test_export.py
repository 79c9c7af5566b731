"""Exported programs return what the posterior predicts, without this library."""

import copy

import pytest
import torch
from daily import daily
from fresh import run_python
from models import of_onnx
from tiny import known
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FIXED = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(6, 3)

    def forward(self, ids, values):
        return self.head(torch.cat([self.words(ids).mean(1), values], 1))


def perceptron():
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def convolutions():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3))


def attention():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3))


def recurrent():
    return nn.Sequential(Recurrent(4, 5, batch_first=True), nn.Linear(5, 3))


NETWORKS = {perceptron: (5,), convolutions: (1, 8, 8), attention: (3, 8), recurrent: (6, 4)}
NETWORKS[TwoInputs] = None


def inputs(make, rows):
    """Inputs as a posterior takes them."""
    shape = NETWORKS[make]
    if shape is None:
        return torch.randint(7, (rows, 3)), torch.randn(rows, 2)
    return torch.randn(rows, *shape)


def case_of(make, likelihood="classification"):
    """A posterior of a network, and unseen batches, of which 0.8 of 20 is a whole number."""
    torch.manual_seed(0)
    y = torch.arange(60) % 3 if likelihood == "classification" else torch.randn(60, 3)
    la = LinearisedLaplace(make().eval(), likelihood, num_samples=6)
    return la.fit([(inputs(make, 20), y[:20])], **FIXED), [(inputs(make, 38), y[20:58])]


CASES = [(make, kind) for make in NETWORKS for kind in ("classification", "regression")]


@pytest.mark.parametrize("suffix", daily("pt2", rest=["onnx"]))
@pytest.mark.parametrize("make, likelihood", daily(CASES[0], rest=CASES[1:]))
def test_programs_return_what_a_calibrated_posterior_predicts(make, likelihood, suffix, tmp_path):
    """For any number of examples, with sets or intervals and p-values."""
    la, unseen = case_of(make, likelihood)
    options, path = {"level": 0.8, "p_value": True}, tmp_path / f"posterior.{suffix}"
    first, is_class = inputs(make, 7), likelihood == "classification"
    with pytest.raises(ValueError, match="calibrate"):
        la.export(first, level=0.8)
    la.calibrate(unseen)
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    exported = la.export(first, path, **options)
    # the network runs once
    nodes = [str(node.target) for node in exported.graph.nodes]
    assert make is not convolutions or nodes.count("aten.relu.default") == 1
    program = exported.module()
    due = ["probs", "prediction_set"]
    if not is_class:
        due = ["expectation", "predictive_variance", "lower", "upper"]
    if suffix == "onnx":
        program, taken, returned = of_onnx(path)
        assert taken == (["x_0", "x_1"] if make is TwoInputs else ["x"])
        assert returned == [*due, "p_value"]
    else:
        program = torch.export.load(path).module()
    near = {"rtol": 1e-4, "atol": 1e-5} if suffix == "onnx" else {"rtol": 1e-5, "atol": 1e-6}
    for rows in (1, 3, 50):
        x = inputs(make, rows)
        found, prediction = dict(program(x)), la.predict(x)
        ours = prediction.prediction_set(0.8) if is_class else prediction.interval(0.8)
        ours = {"prediction_set": ours} if is_class else ours._asdict()
        assert list(found) == [*due, "p_value"]
        assert_close(found.pop("p_value"), prediction.p_value, rtol=0, atol=0)
        for name, values in found.items():
            expected = ours[name] if name in ours else getattr(prediction, name)
            assert_close(values, expected, check_dtype=False, **near)
    if is_class and suffix == "pt2":
        found = la.calibrate(unseen, groups="classes").export(first, level=0.8).module()(x)
        assert torch.equal(found["prediction_set"], la.predict(x).prediction_set(0.8))
        la.calibrate(unseen, groups=torch.arange(38) % 2)
        with pytest.raises(ValueError, match="Exported programs take no groups"):
            la.export(first, level=0.8)


@pytest.mark.parametrize(
    "name", daily("regression", rest=["classification", "bernoulli", "poisson"])
)
@pytest.mark.parametrize("kind", daily(LaplaceEnsemble, rest=[lambda members: members[0]]))
def test_programs_return_the_predictions_of_the_posterior(kind, name):
    """Regressions are predicted around the linear model; an ensemble's have all members and their ranks."""
    (case, la), (_, other) = known(name), known(name, em_steps=0, prior_precision=500.0)
    one = kind([copy.copy(la), other]).calibrate(case.x + 0.1, case.y)
    program, x = one.export(case.x[:7], p_value=True).module(), case.x[7:14]
    found = dict(program(x))
    due = one(x) if isinstance(one(x), tuple) else (one(x),)
    assert_close(found.pop("p_value"), one.predict(x).p_value, rtol=0, atol=1.01 / 16)
    assert_close(tuple(found.values()), due)


class Constant(nn.Module):
    """A linear layer of inputs times a number that goes around torch."""

    def __init__(self, number):
        super().__init__()
        self.layer, self.table, self.number = nn.Linear(3, 3), nn.Embedding(5, 3), number

    def forward(self, x, tokens):
        x = x + self.table(tokens).mean(1)
        return self.layer(x * self.number(x.detach(), tokens))


CONSTANTS = {
    "list": lambda x, tokens: torch.tensor(x.sum(1, keepdim=True).tolist()).to(x),
    "token": lambda x, tokens: tokens.numpy()[0, 0] + 1.0,
    "branch": lambda x, tokens: 1.0 if x.sum() > 0 else -1.0,
    "loop": lambda x, tokens: sum(0.1 * len(row) for row in x.unbind()) + x[:1] * 0,
}


@pytest.mark.parametrize("kind", daily("list", "token", rest=["branch", "loop"]))
@pytest.mark.parametrize("rows", daily(5, rest=[1]))
def test_networks_that_compute_outside_of_torch_are_refused_with_the_remedy(kind, rows):
    torch.manual_seed(0)
    x, tokens = torch.randn(12, 3).double(), 1 + torch.arange(48).view(12, 4) % 4
    la = LinearisedLaplace(Constant(CONSTANTS[kind]).double(), "classification", num_samples=4)
    la.fit([(x, tokens, torch.arange(12) % 3)], **FIXED)
    with pytest.raises(RuntimeError, match="only torch operations.*distil a student"):
        la.export((x[:rows], tokens[:rows]))


def test_outputs_without_an_axis_are_exported():
    torch.manual_seed(0)
    x, model = torch.randn(12, 2), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    la = LinearisedLaplace(model, "regression", num_samples=6).fit(x, x[:, 0], **FIXED)
    assert_close(tuple(la.export(x[:5]).module()(x).values()), la(x))


def test_files_that_cannot_be_written_are_refused(tmp_path):
    case, la = known()
    for name in ("posterior", "posterior.pt", "posterior.onnx.txt"):
        with pytest.raises(ValueError, match=f"{name}' has no known ending.*.pt2.*.onnx"):
            la.export(case.x, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing'$"):
        la.export(case.x, tmp_path / "missing" / "posterior.pt2")
    assert not list(tmp_path.iterdir())


def test_an_export_to_a_full_disk_raises_and_leaves_the_earlier_file(tmp_path):
    resource = pytest.importorskip("resource")
    (case, la), path = known(), tmp_path / "posterior.pt2"
    path.write_bytes(b"earlier")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(OSError):
            la.export(case.x[:4], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"earlier" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_saved_program_needs_no_library(tmp_path):
    case, la = known("regression")
    la.export(case.x[:7], tmp_path / "posterior.pt2")
    torch.save(case.x[7:14], tmp_path / "x.pt")
    script = (
        "import sys; sys.modules['torch_lla_em'] = None\n"
        "import torch\n"
        "program = torch.export.load('posterior.pt2').module()\n"
        "torch.save(dict(program(torch.load('x.pt'))), 'answer.pt')\n"
        "assert not any(name.startswith('torch_lla_em.') for name in sys.modules)\n"
    )
    run_python("-c", script, cwd=tmp_path)
    found = torch.load(tmp_path / "answer.pt")
    assert list(found) == ["expectation", "predictive_variance"]
    assert_close(tuple(found.values()), la(case.x[7:14]))
