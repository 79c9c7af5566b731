"""Whole fits of unusual networks against the dense posterior in float64.

Layers whose products with J are compared in ``test_architectures`` need no fit of their own here.
"""

import pytest
import torch
from daily import daily
from jacobians import Calls
from tiny import likelihood_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from torch_lla_em import LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.exact import ExactLaplace, gaussian_log_prob
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network, default_forward
from torch_lla_em.problem.problem import Problem

LOG_PROBS = {
    "classification": lambda f, y: (
        -F.cross_entropy(f.view(*y.shape, -1).movedim(-1, 0)[None], y[None], reduction="sum")
    ),
    "regression": gaussian_log_prob(torch.tensor(0.4, dtype=torch.float64)),
    "bernoulli": lambda f, y: -F.binary_cross_entropy_with_logits(f, y, reduction="sum"),
}
LAMBDA = 2.0


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class FullSquare(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent * ctx.saved_tensors[0]


def linear(*sizes, **options):
    return nn.Linear(*sizes, **options, dtype=torch.float64)


def mlp(*between, outputs=3):
    return nn.Sequential(linear(3, 4), nn.Tanh(), *between, linear(4, outputs))


def two(forward, **layers):
    return Calls(forward, **{"a": linear(3, 4), "b": linear(4, 3), **layers}).double()


def through_b(h):
    return lambda m, x: m.b(h(m, x))


def tied():
    model = two(lambda m, x: m.b(m.c(m.a(x).tanh()).tanh()), c=linear(4, 4), d=linear(4, 4))
    model.d.weight = model.c.weight
    model.call = lambda m, x: m.b(m.d(m.c(m.a(x).tanh()).tanh()))
    return model


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def with_parameters(forward, **parameters):
    return Calls(forward, **{name: nn.Parameter(p.double()) for name, p in parameters.items()})


def training():
    model = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4))
    model.double()(drawn(20, 3, seed=4))
    return model.train()


def strided():
    model = mlp()
    model[0].weight = nn.Parameter(drawn(3, 4, seed=2).T)
    return model


def with_dead_units():
    model = nn.Sequential(linear(3, 6), nn.ReLU(inplace=True), linear(6, 3))
    with torch.no_grad():
        model[0].bias[:3] = -100.0
    return model


def counting():
    def forward(m, x):
        m.calls += 1
        return m.b(m.a(x).tanh())

    model = two(forward)
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    return model


def force(m, x):
    """The derivative of a network in its inputs, as of an energy."""
    return torch.func.vmap(torch.func.grad(lambda x: m.b(m.a(x).tanh()).sum()))(x)


def spectrum(m, x):
    return m.b(torch.view_as_real(torch.fft.fft(m.a(x))).square().sum(-1))


WIDE = drawn(3, 1000, seed=5)
MODELS = {
    "plain": mlp,
    "weights of one layer twice": lambda: two(
        lambda m, x: m.b(m.c(m.c(m.a(x)).tanh())), c=linear(4, 4)
    ),
    "tied weights": tied,
    "orthogonal": lambda: mlp(parametrizations.orthogonal(linear(4, 4))),
    "function with all": lambda: two(through_b(lambda m, x: FullSquare.apply(m.a(x)))),
    "derivative inside": lambda: two(force),
    "Fourier transform": lambda: two(spectrum),
    "frozen layer": frozen,
    "left in training mode": training,
    "transposed weight": strided,
    "dead units": with_dead_units,
    "forward that counts": counting,
    "scalar parameters": lambda: with_parameters(
        lambda m, x: torch.stack([m.a * x[:, 0], x[:, 1] + m.b, (m.a * m.b) * x[:, 2]], 1),
        a=torch.tensor(0.7),
        b=torch.tensor(0.3),
    ),
    "parameter of no size": lambda: with_parameters(
        lambda m, x: x @ m.a + m.b.sum(), a=drawn(3, 3, seed=1), b=torch.zeros(0)
    ),
    "unused parameter": lambda: two(lambda m, x: m.b(m.a(x).tanh()), c=linear(2, 2)),
    "outputs × 1e6": lambda: two(lambda m, x: 1e6 * m.b(m.a(x).tanh())),
    "outputs × 1e-6": lambda: two(lambda m, x: 1e-6 * m.b(m.a(x).tanh())),
    "a thousand classes": lambda: Calls(lambda m, x: m.a(x) @ WIDE, a=linear(3, 3)),
    "float32": lambda: mlp().float(),
    "bfloat16": lambda: mlp().bfloat16(),
    "labels per pixel": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 2, padding=1)
    ).double(),
    "one output, flat": lambda: nn.Sequential(mlp(outputs=1), nn.Flatten(0)),
}


def labels(*shape, classes=3):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


# inputs, targets, likelihood and options of a model, if they are not the usual ones
DATA = {
    "a thousand classes": (drawn(2, 3), labels(2, classes=1000), "classification", {}),
    "labels per pixel": (drawn(8, 3), labels(8, 2), "classification", {"class_dim": 1}),
    "one output, flat": (drawn(8, 3), drawn(8, seed=3), "regression", {}),
    "scalar parameters": (drawn(8, 3), drawn(8, 3, seed=3), "regression", {}),
    "outputs × 1e6": (drawn(8, 3), 1e6 * drawn(8, 3, seed=3), "regression", {}),
    "inputs × 1e6": (1e6 * drawn(8, 3), drawn(8, 3, seed=3), "regression", {}),
    "one row": (drawn(1, 3), labels(1), "classification", {}),
    "one weight": (drawn(8, 1), drawn(8, 1, seed=3), "regression", {}),
    "one weight, certain": (drawn(8, 1), labels(8, 1, classes=2).double(), "bernoulli", {}),
    "more samples than weights": (
        drawn(8, 3),
        drawn(8, 1, seed=3),
        "regression",
        {"num_samples": 9},
    ),
    "inputs in a dict": ({"x": drawn(8, 3)}, labels(8), "classification", {}),
    "last layer": (drawn(8, 3), labels(8), "classification", {"parameters": "last_layer"}),
    "linear curvature": (drawn(8, 3), labels(8), "classification", {"curvature": "linear"}),
}
MODELS |= {
    "inputs × 1e6": lambda: nn.Sequential(linear(3, 3, bias=False)),
    "one row": mlp,
    "one weight": lambda: nn.Sequential(linear(1, 1, bias=False)),
    "one weight, certain": lambda: nn.Sequential(linear(1, 1, bias=False)),
    "more samples than weights": lambda: nn.Sequential(linear(3, 1)),
    "inputs in a dict": lambda: Calls(lambda m, x: m.a(x), a=mlp()),
    "last layer": mlp,
    "linear curvature": mlp,
}
# the precision of the layers, or of G = 1e14 beside λ = 2
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "outputs × 1e6": 0.1, "inputs × 1e6": 0.1}


def dense(model, names, x, y, likelihood, forward):
    """Return the exact posterior of a model, with J by one backward pass per output."""
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names]
    f = forward(model, x)
    flat = f.reshape(len(f), -1)
    rows = [
        torch.autograd.grad(out, chosen, retain_graph=True, allow_unused=True)
        for out in flat.reshape(-1)
    ]
    J = torch.stack(
        [
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g.to_dense()).reshape(-1)
                    for g, p in zip(row, chosen)
                ]
            )
            for row in rows
        ]
    ).double()
    f, log_prob = flat.detach().double(), LOG_PROBS[likelihood]
    exact = ExactLaplace(
        J.view(*f.shape, -1),
        f,
        y.view(len(y), -1) if y.is_floating_point() else y,
        log_prob,
        J[:0],
        torch.ones_like(J[0]),
    )
    return exact.at_noise(log_prob)


SLOW = ["a thousand classes"]  # it takes half of the time of all models


@pytest.mark.parametrize("name", daily(*(name for name in MODELS if name not in SLOW), rest=SLOW))
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Full backward hook")
def test_the_posterior_is_the_dense_one(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y, likelihood, options = DATA.get(name, (drawn(8, 3), labels(8), "classification", {}))
    options = dict(options)
    dtype = next(p for p in model.parameters() if p.numel()).dtype
    if dtype in (torch.float32, torch.bfloat16):
        x = x.to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    was_training = model.training
    allowed = ROUNDING.get(name, 1e-6)
    options = {"num_samples": 3, "g_prior": False, "tolerance": allowed / 10, **options}
    la = LinearisedLaplace(model, likelihood_of(likelihood), **{"curvature": "network", **options})
    la.fit([(x, y)], em_steps=0, prior_precision=LAMBDA, progress_bar=False)
    assert model.training == was_training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) or key == "calls", key

    model.eval()
    layout, class_dim = la._linear_model.layout, options.get("class_dim", -1)

    def forward(model, x):
        out = default_forward(model, x)
        return out.movedim(class_dim, -1) if out.dim() > 1 else out[:, None]

    exact = dense(model, layout.names, x, y, likelihood, forward)
    w_lin, prior = la.w_lin.double(), LAMBDA * torch.eye(len(la.w_lin)).double()
    curvature = torch.func.hessian(exact.loss)(w_lin)
    H = prior + (curvature if "curvature" in options else exact.ggn)
    problem = Problem(
        LinearModel(Network(model, None, class_dim), layout),
        likelihood_of(likelihood),
        Data([(x, y)], torch.device("cpu")),
    )
    if "curvature" in options:
        problem = problem.with_curvature_at(la.w_lin)
    noise = get_sto_samples(problem, options["num_samples"], 0, g_prior=False)
    right = (LAMBDA**0.5 * noise.xi + noise.eta).double()
    truth = torch.linalg.solve(H, right.T).T
    root = torch.linalg.cholesky(H)
    error = ((la.w_samples - truth) @ root).norm(dim=1)
    assert (error <= allowed * (1 + truth @ root).norm(dim=1)).all()
    # one step of Newton's method from the mode that was found
    slope = torch.func.grad(exact.loss)(w_lin) + LAMBDA * w_lin
    root = torch.linalg.cholesky(curvature + prior)
    step = torch.linalg.solve_triangular(root, slope[:, None], upper=False)
    assert step.norm() <= 10 * allowed * (1 + (w_lin @ root).norm())


def test_a_single_class_raises():
    la = LinearisedLaplace(mlp(outputs=1), "classification")
    with pytest.raises(ValueError, match="two classes or more"):
        la.fit([(drawn(8, 3), labels(8, classes=1))], progress_bar=False)


def test_complex_weights_raise():
    model = Calls(lambda m, x: (x.to(torch.complex128) @ m.a).abs())
    model.a = nn.Parameter(torch.complex(drawn(3, 3, seed=1), drawn(3, 3, seed=2)))
    with pytest.raises(TypeError, match="view_as_real"):
        LinearisedLaplace(model, "classification").fit([(drawn(8, 3), labels(8))])


class WritesToInputs(nn.Module):
    """Its forward pass writes to what it is given, tokens and numbers, if ``in_place``."""

    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(6, 3)
        self.in_place = in_place

    def forward(self, inputs):
        tokens, x = inputs["tokens"], inputs["x"]
        if not self.in_place:
            tokens, x = tokens.clone(), x.clone()
        tokens[tokens < 0] = 0
        if x.max() > 2:  # in some batches only
            x.clamp_(max=2).relu_()
        return self.head(torch.cat([self.table(tokens), x], -1))


def test_inputs_of_a_fit_are_not_changed():
    x, tokens, y = drawn(40, 3), torch.arange(40) % 5 - 1, torch.arange(40) % 3
    batches = [
        {"inputs": {"tokens": t, "x": a}, "labels": b}
        for t, a, b in zip(tokens.split(10), x.split(10), y.split(10))
    ]
    before, others = x.clone(), {"tokens": tokens[:7].clone(), "x": 3 * drawn(7, 3, seed=2)}
    found = []
    for in_place in (True, False):
        la = LinearisedLaplace(WritesToInputs(in_place).double(), "classification", num_samples=4)
        la.fit(batches, em_steps=2, progress_bar=False)
        kept = others["x"].clone()
        found.append(la.predict({"inputs": others}).probs)
        la.held_out_evidence(batches)
        la.calibrate(batches)
        assert torch.equal(others["x"], kept) and (others["tokens"] < 0).any()
    assert torch.equal(x, before) and (tokens < 0).any()
    assert torch.equal(*found)
