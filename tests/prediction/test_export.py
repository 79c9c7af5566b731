"""Exported programs answer as the posterior does, where this library is not at hand."""

import subprocess
import sys

import pytest
import torch
from daily import daily
from tiny import likelihood_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def fitted(model, likelihood, x, y, **options):
    la = LinearisedLaplace(model, likelihood, num_samples=6, **options)
    return la.fit(x, y, em_steps=0, prior_precision=5.0, progress_bar=False)


@pytest.mark.parametrize(
    "name", daily("regression", rest=["classification", "bernoulli", "poisson"])
)
def test_programs_answer_as_the_posterior_does(name):
    case = tiny(name)
    la = fitted(case.model, likelihood_of(name), case.x, case.y)
    program = la.export(case.x[:7]).module()
    for x in (case.x[:7], case.x[7:14]):
        assert_close(program(x), la(x))
    la.calibrate(case.x, case.y)
    assert_close(la.export(case.x[:7]).module()(case.x[7:14]), la(case.x[7:14]))


NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        ),
        (1, 8, 8),
        36,
    ),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten()),
        (3, 8),
        24,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("parameters", [None, "last_layer"])
def test_networks_are_recorded_with_their_derivatives(kind, parameters):
    torch.manual_seed(0)
    make, shape, features = NETWORKS[kind]
    model = nn.Sequential(make(), nn.Linear(features, 3)).double().eval()
    x, y = torch.randn(12, *shape).double(), torch.arange(12) % 3
    la = fitted(model, "classification", x, y, parameters=parameters)
    program = la.export(x[:5], num_samples=4).module()
    assert_close(program(x[5:10]), la.predict(x[5:10], num_samples=4).probs)


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
        "torch.save(program(torch.load('x.pt')), 'answer.pt')\n"
        "assert not any(name.startswith('torch_lla_em.') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    mean, variance = torch.load(tmp_path / "answer.pt")
    expected = la(case.x[7:14])
    assert_close(mean, expected[0])
    assert_close(variance, expected[1])


def test_what_cannot_be_recorded_is_refused():
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


@pytest.mark.parametrize("kind", CONSTANTS)
@pytest.mark.parametrize("rows", daily(1, rest=[5]))
def test_values_of_the_example_are_refused(kind, rows):
    torch.manual_seed(0)
    x, tokens, y = (
        torch.randn(12, 3).double(),
        1 + torch.arange(48).view(12, 4) % 4,
        torch.arange(12) % 3,
    )
    la = LinearisedLaplace(Constant(CONSTANTS[kind]).double(), "classification", num_samples=4)
    la.fit([(x, tokens, y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    with pytest.raises(Exception, match="holds values that the network computed at the example"):
        la.export((x[:rows], tokens[:rows]))


def test_inputs_of_several_kinds_are_exported():
    torch.manual_seed(0)
    x, tokens, y = (
        torch.randn(12, 3).double(),
        torch.arange(48).view(12, 4) % 5,
        torch.arange(12) % 3,
    )
    model = Constant(lambda x, tokens: x.amax() + (tokens > 0).sum()).double()
    la = LinearisedLaplace(model, "classification", num_samples=4)
    la.fit([(x, tokens, y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    program = la.export((x[:5], tokens[:5])).module()
    other = x[5:10], tokens[5:10]
    assert_close(program(other), la(other))
