"""Exported programs return what the posterior predicts, without this library."""

import pytest
import torch
from daily import daily
from fresh import run_python
from tiny import likelihood_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.prediction.export import record, simplified

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def fitted(model, likelihood, x, y, **options):
    la = LinearisedLaplace(model, likelihood, num_samples=6, **options)
    return la.fit(x, y, em_steps=0, prior_precision=5.0, progress_bar=False)


def assert_same(found, due):
    """Compare what a program returns by name with what ``la(x)`` returns."""
    assert_close(tuple(found.values()), due if isinstance(due, tuple) else (due,))


@pytest.mark.parametrize(
    "name", daily("regression", rest=["classification", "bernoulli", "poisson"])
)
def test_programs_return_the_predictions_of_the_posterior(name):
    case = tiny(name)
    la = fitted(case.model, likelihood_of(name), case.x, case.y)
    program = la.export(case.x[:7]).module()
    for x in (case.x[:7], case.x[7:14]):
        assert_same(program(x), la(x))
    la.calibrate(case.x, case.y)
    assert_same(la.export(case.x[:7]).module()(case.x[7:14]), la(case.x[7:14]))


@pytest.mark.parametrize(
    "num_samples, dtype, tolerance",
    daily(
        (6, torch.float32, 1e-5),
        rest=[
            (1, torch.float64, 1e-10),
            (1, torch.float32, 1e-5),
            (6, torch.float64, 1e-10),
        ],
    ),
)
def test_programs_are_exact_by_factors_and_by_torch_func(num_samples, dtype, tolerance, caplog):
    torch.manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8, dtype=dtype), torch.arange(12) % 3
    la = fitted(convolutions().eval().to(dtype), "classification", x, y)
    caplog.set_level("INFO", logger="torch_lla_em")
    program, other = la.export(x[:5], num_samples=num_samples), 2 * x
    assert ("1 of 6 samples" in caplog.text) == (num_samples == 1)
    # the network runs once, also in forward mode
    assert [str(node.target) for node in program.graph.nodes].count("aten.relu.default") == 1
    # with as many samples as outputs, the outputs are differentiated backwards
    backward = [
        node for node in program.graph.nodes if "pool2d_with_indices_backward" in str(node.target)
    ]
    assert bool(backward) == (num_samples == 6)
    expected = la.predict(other, num_samples=num_samples).probs
    assert_close(program.module()(other)["probs"], expected, rtol=tolerance, atol=tolerance)


def test_networks_without_factors_are_exported():
    torch.manual_seed(0)
    x, model = torch.randn(12, 2), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    la = fitted(model, "regression", x, x[:, 0])
    assert la._linear_model.factored is None
    assert_same(la.export(x[:5]).module()(x), la(x))


class Accumulating(nn.Linear):
    """Adds its outputs to a tensor of zeros, in place."""

    def forward(self, x):
        total = torch.zeros(3, dtype=x.dtype)
        total += super().forward(x).mean(0)
        return super().forward(x) + total.detach()


def test_a_constant_that_is_written_to_is_new_in_every_call():
    x = torch.randn(6, 3)
    graph = simplified(record(Accumulating(3, 3).eval(), x))
    assert_close(graph(x), graph(x), rtol=0, atol=0)


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


FREE = {
    "perceptron": (perceptron, (5,)),
    "convolutions": (convolutions, (1, 8, 8)),
    "attention": (attention, (3, 8)),
    "recurrent": (recurrent, (6, 4)),
    "two inputs": (TwoInputs, None),
}


def inputs(shape, rows):
    if shape is None:
        return torch.randint(7, (rows, 3)), torch.randn(rows, 2)
    return torch.randn(rows, *shape)


@pytest.fixture
def no_warnings(caplog):
    """No warning is logged of programs that take a single batch size."""
    caplog.set_level("WARNING", logger="torch_lla_em")
    yield
    assert "only the batch size" not in caplog.text


def free_case(kind, likelihood, parameters=None):
    torch.manual_seed(0)
    make, shape = FREE[kind]
    x = inputs(shape, 12)
    y = torch.arange(12) % 3 if likelihood == "classification" else torch.randn(12, 3)
    la = LinearisedLaplace(make().eval(), likelihood, num_samples=4, parameters=parameters)
    batches = [(*x, y) if shape is None else (x, y)]
    la.fit(batches, em_steps=0, prior_precision=5.0, progress_bar=False)
    return la.calibrate(batches), x, shape


@pytest.mark.parametrize("kind", daily("perceptron", rest=[*FREE][1:]))
def test_programs_take_any_number_of_examples(kind, no_warnings):
    la, x, shape = free_case(kind, "classification")
    program = la.export(x[:1] if kind == "perceptron" else x).module()
    for rows in (1, 2, 12, 50):
        other = inputs(shape, rows)
        assert_same(program(other), la(other))


def of_onnx(la, x, path, **options):
    """Return the exported program as a function of tensors, run by onnxruntime."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    la.export(x, path, **options)
    session = onnxruntime.InferenceSession(path)
    is_class = la.likelihood.gives_probabilities
    due = ["probs"] if is_class else ["expectation", "predictive_variance"]
    if "level" in options:
        due += ["prediction_set"] if is_class else ["lower", "upper"]
    due += ["p_value"] * options.get("p_value", False)
    if not options.get("num_samples"):
        assert [each.name for each in session.get_outputs()] == due
    names = [each.name for each in session.get_inputs()]
    assert names == (["x"] if len(names) == 1 else [f"x_{i}" for i in range(len(names))])

    def program(*inputs):
        values = session.run(None, dict(zip(names, (part.numpy() for part in inputs))))
        return [torch.tensor(value) for value in values]

    return program


@pytest.mark.parametrize(
    "kind, likelihood",
    daily(rest=[(kind, name) for kind in FREE for name in ("classification", "regression")]),
)
def test_onnx_returns_the_predictions_of_the_posterior(kind, likelihood, tmp_path, no_warnings):
    la, x, shape = free_case(kind, likelihood)
    program = of_onnx(la, x, tmp_path / "posterior.onnx")
    for rows in (1, 3, 12, 50):
        other = inputs(shape, rows)
        due = la(other) if likelihood == "regression" else (la(other),)
        for values, expected in zip(program(*(other if shape is None else (other,))), due):
            assert_close(values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "likelihood, curvature, suffix",
    daily(
        ("classification", None, "pt2"),
        rest=[
            ("regression", None, "pt2"),
            ("regression", None, "onnx"),
            ("classification", "linear", "onnx"),
            ("classification", None, "onnx"),
        ],
    ),
)
def test_what_calibrate_adds_is_exported(likelihood, curvature, suffix, tmp_path, monkeypatch):
    tried, steady = [], LinearModel.steady

    def note(model, x, by_factors):
        tried.append(by_factors)
        return steady(model, x, by_factors)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(80, 5)
    y = torch.arange(80) % 3 if likelihood == "classification" else torch.randn(80, 3)
    la, more = fitted(model, likelihood, x[:20], y[:20], curvature=curvature), {"level": 0.8}
    for asked in (
        more,
        *[{"p_value": True}] * (curvature is not None),
    ):  # others know training data
        with pytest.raises(ValueError, match="calibrate"):
            la.export(x[:7], **asked)
    la.calibrate(x[20:], y[20:])
    path, other = tmp_path / f"posterior.{suffix}", 2 * torch.randn(31, 5)
    more["p_value"] = True
    monkeypatch.setattr(LinearModel, "steady", note)
    if suffix == "onnx":
        found = of_onnx(la, x[:7], path, **more)(other)
    else:
        la.export(x[:7], path, **more)
        found = [*torch.export.load(path).module()(other).values()]
    # also where torch folds a product of matrices into rows from 8 examples on
    assert tried == [suffix != "onnx"]
    due = la.predict(other)
    assert len(due.p_value.unique()) > 5
    assert_close(found.pop(), due.p_value, rtol=0, atol=0)
    if likelihood == "classification":
        assert torch.equal(found.pop(), due.prediction_set(0.8))
        expected = [due.probs]
    else:
        expected = [due.expectation, due.predictive_variance, *due.interval(0.8)]
    near = {"rtol": 1e-4, "atol": 1e-5} if suffix == "onnx" else {"rtol": 1e-5, "atol": 1e-6}
    for value, known in zip(found, expected, strict=True):
        assert_close(value, known, check_dtype=False, **near)


@pytest.mark.slow
def test_networks_that_loop_over_examples_keep_their_batch_size(caplog):
    class Counting(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            for _ in x:
                out = out + 0.01
            return out

    torch.manual_seed(0)
    x, y = torch.randn(6, 2).double(), torch.arange(6) % 3
    la = fitted(Counting(2, 3).double(), "classification", x, y)
    caplog.set_level("WARNING", logger="torch_lla_em")
    program = la.export(x).module()
    assert "only the batch size of x" in caplog.text
    assert_same(program(x + 1), la(x + 1))


def test_unknown_file_endings_raise(tmp_path):
    case = tiny("classification")
    la = fitted(case.model, "classification", case.x, case.y)
    for name in ("posterior", "posterior.pt", "posterior.onnx.txt"):
        with pytest.raises(ValueError, match=f"{name}' has no known ending.*.pt2.*.onnx"):
            la.export(case.x, tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing'$"):
        la.export(case.x, tmp_path / "missing" / "posterior.pt2")
    assert not list(tmp_path.iterdir())


def test_an_export_to_a_full_disk_raises_and_leaves_the_earlier_file(tmp_path):
    resource = pytest.importorskip("resource")
    case, path = tiny("classification"), tmp_path / "posterior.pt2"
    la = fitted(case.model, "classification", case.x, case.y)
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
    case = tiny("regression")
    la = fitted(case.model, "regression", case.x, case.y)
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


def test_networks_with_data_dependent_branches_raise():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    torch.manual_seed(0)
    x, y = torch.randn(12, 2).double(), torch.arange(12) % 3
    la = fitted(Branching(2, 3).double(), "classification", x, y)
    with pytest.raises(Exception, match="data-dependent|values"):
        la.export(x[:5])
    with pytest.raises(ValueError, match="samples"):
        la.export(x[:5], num_samples=7)


class Constant(nn.Module):
    """A linear layer of inputs times a number that goes around torch."""

    def __init__(self, number):
        super().__init__()
        self.layer, self.table, self.number = nn.Linear(3, 3), nn.Embedding(5, 3), number

    def forward(self, x, tokens):
        x = x + self.table(tokens).mean(1)
        return self.layer(x * self.number(x.detach(), tokens))


CONSTANTS = {
    "numpy": lambda x, tokens: torch.from_numpy(x.abs().amax(1, keepdim=True).numpy()),
    "list": lambda x, tokens: torch.tensor(x.sum(1, keepdim=True).tolist()).to(x),
    "count": lambda x, tokens: int((tokens > 0).numpy().sum()),
    "token": lambda x, tokens: tokens.numpy()[0, 0] + 1.0,
}


def fitted_constant(number):
    torch.manual_seed(0)
    x, tokens = torch.randn(12, 3).double(), 1 + torch.arange(48).view(12, 4) % 4
    la = LinearisedLaplace(Constant(number).double(), "classification", num_samples=4)
    batches = [(x, tokens, torch.arange(12) % 3)]
    return la.fit(batches, em_steps=0, prior_precision=5.0, progress_bar=False), x, tokens


@pytest.mark.parametrize("kind", daily("list", rest=["token", "numpy", "count"]))
@pytest.mark.parametrize("rows", daily(1, rest=[5]))
def test_values_of_the_example_are_refused(kind, rows):
    la, x, tokens = fitted_constant(CONSTANTS[kind])
    with pytest.raises(Exception, match="contains constants that the network computed"):
        la.export((x[:rows], tokens[:rows]))


def test_inputs_of_several_kinds_are_exported_with_some_of_the_samples():
    la, x, tokens = fitted_constant(lambda x, tokens: x.amax() + (tokens > 1).sum())
    program = la.export((x[:5], tokens[:5]), num_samples=3).module()
    other = x[5:10], tokens[5:10]
    assert_same(program(other), la.predict(other, num_samples=3).probs)
