"""Exported programs return what the posterior predicts, without this library."""

import pytest
import torch
from daily import daily
from fresh import run_python
from tiny import known
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FIXED = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}


def assert_same(found, due):
    """Compare what a program returns by name with what ``la(x)`` returns."""
    assert_close(tuple(found.values()), due if isinstance(due, tuple) else (due,))


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


def inputs(shape, rows):
    if shape is None:
        return torch.randint(7, (rows, 3)), torch.randn(rows, 2)
    return (torch.randn(rows, *shape),)


def case_of(make, likelihood="classification", dtype=torch.float32, **options):
    torch.manual_seed(0)
    x = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs(NETWORKS[make], 60))
    y = torch.arange(60) % 3 if likelihood == "classification" else torch.randn(60, 3, dtype=dtype)
    la = LinearisedLaplace(make().eval().to(dtype), likelihood, num_samples=6, **options)
    batches = [[(*(t[rows] for t in x), y[rows])] for rows in (slice(20), slice(20, 60))]
    return la.fit(batches[0], **FIXED), x, batches[1]


def given(x):
    """Inputs as a posterior takes them."""
    return x[0] if len(x) == 1 else x


def of_onnx(la, x, path, **options):
    """Return the exported program as a function of tensors, run by onnxruntime."""
    pytest.importorskip("onnxscript")
    la.export(x, path, **options)
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    is_class = la.likelihood.gives_probabilities
    due = ["probs"] if is_class else ["expectation", "predictive_variance"]
    if "level" in options:
        due += ["prediction_set"] if is_class else ["lower", "upper"]
    due += ["p_value"] * options.get("p_value", False)
    assert [each.name for each in session.get_outputs()] == due
    names = [each.name for each in session.get_inputs()]
    assert names == (["x"] if len(names) == 1 else [f"x_{i}" for i in range(len(names))])

    def program(*inputs):
        values = session.run(None, dict(zip(names, (part.numpy() for part in inputs))))
        return dict(zip(due, map(torch.tensor, values)))

    return program


CASES = [(make, kind) for make in NETWORKS for kind in ("classification", "regression")]


@pytest.mark.parametrize("suffix", daily("pt2", rest=["onnx"]))
@pytest.mark.parametrize("make, likelihood", daily(CASES[0], rest=CASES[1:]))
def test_programs_return_what_a_calibrated_posterior_predicts(
    make, likelihood, suffix, tmp_path, caplog
):
    """For any number of examples, with sets or intervals and p-values."""
    caplog.set_level("WARNING", logger="torch_lla_em")
    la, x, unseen = case_of(make, likelihood)
    options, path = {"level": 0.8, "p_value": True}, tmp_path / f"posterior.{suffix}"
    first = given(tuple(t[:7] for t in x))
    with pytest.raises(ValueError, match="calibrate"):
        la.export(first, level=0.8)
    la.calibrate(unseen)
    if suffix == "onnx":
        program = of_onnx(la, first, path, **options)
    else:
        la.export(first, path, **options)
        loaded = torch.export.load(path).module()

        def program(*x):
            return loaded(given(x))

    for rows in (1, 3, 50):
        other = inputs(NETWORKS[make], rows)
        found, due = [*program(*other).values()], la.predict(given(other))
        assert_close(found.pop(), due.p_value, rtol=0, atol=0)
        expected = due.expectation, due.predictive_variance
        if likelihood == "classification":
            assert torch.equal(found.pop(), due.prediction_set(0.8))
            expected = (due.probs,)
        else:
            expected = *expected, *due.interval(0.8)
        near = {"rtol": 1e-4, "atol": 1e-5} if suffix == "onnx" else {"rtol": 1e-5, "atol": 1e-6}
        assert_close(tuple(found), expected, check_dtype=False, **near)
    assert "only the batch size" not in caplog.text


@pytest.mark.parametrize(
    "name", daily("regression", rest=["classification", "bernoulli", "poisson"])
)
def test_programs_return_the_predictions_of_the_posterior(name):
    case, la = known(name)
    program = la.export(case.x[:7]).module()
    for x in (case.x[:7], case.x[7:14]):
        assert_same(program(x), la(x))


@pytest.mark.parametrize(
    "num_samples, dtype, near",
    daily((6, torch.float32, 1e-5), rest=[(1, torch.float64, 1e-10), (6, torch.float64, 1e-10)]),
)
def test_programs_are_exact_with_some_of_the_samples(num_samples, dtype, near):
    la, (x,), _ = case_of(convolutions, dtype=dtype)
    program, other = la.export(x[:5], num_samples=num_samples), 2 * x
    # the network runs once
    assert [str(node.target) for node in program.graph.nodes].count("aten.relu.default") == 1
    expected = la.predict(other, num_samples=num_samples).probs
    assert_close(program.module()(other)["probs"], expected, rtol=near, atol=near)


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
    "numpy": lambda x, tokens: torch.from_numpy(x.abs().amax(1, keepdim=True).numpy()),
    "count": lambda x, tokens: int((tokens > 0).numpy().sum()),
    "token": lambda x, tokens: tokens.numpy()[0, 0] + 1.0,
}


def fitted_constant(number):
    torch.manual_seed(0)
    x, tokens = torch.randn(12, 3).double(), 1 + torch.arange(48).view(12, 4) % 4
    la = LinearisedLaplace(Constant(number).double(), "classification", num_samples=4)
    return la.fit([(x, tokens, torch.arange(12) % 3)], **FIXED), x, tokens


@pytest.mark.parametrize("kind", daily("list", rest=[*CONSTANTS][1:]))
@pytest.mark.parametrize("rows", daily(1, rest=[5]))
def test_values_of_the_example_are_refused(kind, rows):
    la, x, tokens = fitted_constant(CONSTANTS[kind])
    with pytest.raises(Exception, match="must use only torch operations.*distil a student"):
        la.export((x[:rows], tokens[:rows]))


@pytest.mark.slow
def test_inputs_of_several_kinds_are_exported_with_some_of_the_samples():
    la, x, tokens = fitted_constant(lambda x, tokens: x.amax() + (tokens > 1).sum())
    program = la.export((x[:5], tokens[:5]), num_samples=3).module()
    other = x[5:10], tokens[5:10]
    assert_same(program(other), la.predict(other, num_samples=3).probs)


class Counting(nn.Linear):
    """Loops over the examples."""

    def forward(self, x):
        out = super().forward(x)
        for _ in x:
            out = out + 0.01
        return out


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def fitted_layer(layer):
    torch.manual_seed(0)
    x, model = torch.randn(12, 2).double(), nn.Sequential(layer(2, 3)).double()
    la = LinearisedLaplace(model, "classification", num_samples=6)
    return la.fit(x, torch.arange(12) % 3, **FIXED), x


def test_outputs_without_an_axis_and_factors_are_exported():
    torch.manual_seed(0)
    x, model = torch.randn(12, 2), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    la = LinearisedLaplace(model, "regression", num_samples=6).fit(x, x[:, 0], **FIXED)
    assert_same(la.export(x[:5]).module()(x), la(x))


def test_what_cannot_be_exported_raises(tmp_path):
    for layer in (Branching, Counting):
        la, x = fitted_layer(layer)
        with pytest.raises(RuntimeError, match="cannot be exported.*distil a student"):
            la.export(x[:5])
    with pytest.raises(ValueError, match="samples"):
        la.export(x[:5], num_samples=7)
    for name in ("posterior", "posterior.pt", "posterior.onnx.txt"):
        with pytest.raises(ValueError, match=f"{name}' has no known ending.*.pt2.*.onnx"):
            la.export(x, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing'$"):
        la.export(x, tmp_path / "missing" / "posterior.pt2")
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
    assert_same(found, la(case.x[7:14]))
