"""Hostile calls, one line each: its number, what happened before, and what happens now.

``pytest -v tests/integration/test_hostile.py`` shows them as a list.
"""

import concurrent.futures
import contextlib
import os
import re
import warnings
from pathlib import Path

import pytest
import ranks
import torch
from tiny import tiny
from torch import nn

import torch_lla_em
from torch_lla_em import BlockCG, Compute, LinearisedLaplace, Newton
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters

CASES = {}
REFUSED = ValueError, TypeError, RuntimeError


def case(number, before, now):
    def add(function):
        function.words = f"{number}: before, {before}; now, {now}"
        CASES[number] = function
        return function

    return add


def fit(loader=None, model=None, likelihood="classification", **options):
    data = tiny("classification")
    keys = "em_steps", "checkpoint", "prior_precision", "shard"
    asked = {"em_steps": 1, "progress_bar": False}
    asked |= {key: options.pop(key) for key in keys if key in options}
    la = LinearisedLaplace(model or data.model, likelihood, **{"num_samples": 4, **options})
    return la.fit([(data.x, data.y)] if loader is None else loader, **asked)


def linear_model(model):
    network = Network(model, None, -1)
    return LinearModel(network, ParameterLayout.of(model, select_parameters(model, None)))


@case("1a", "labels of other rows gave the posterior of those labels", "other data are refused")
def _(folder):
    data = tiny("classification")
    fit([(data.x, data.y[torch.randperm(30)])], checkpoint=folder)
    with pytest.raises(ValueError, match="other data"):
        fit([(data.x, data.y)], checkpoint=folder)


class Repaired:
    """Pairs inputs and labels otherwise at every pass."""

    def __init__(self):
        self.data, self.passes = tiny("classification"), 0

    def __iter__(self):
        self.passes += 1
        yield self.data.x, self.data.y.roll(self.passes)


@case("1b", "labels that change their rows between passes went unseen", "the fit says so")
def _(folder):
    with pytest.raises((ValueError, UserWarning)):
        fit(Repaired(), compute=Compute(keep_data=False))


@case("2", "one large column hid noise in every other", "other data are refused")
def _(folder):
    data = tiny("classification")
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].weight.data[:, 2] = 1e-9
    x = torch.cat([data.x, torch.full((30, 1), 1.7e9).double()], 1).float()
    fit([(x, data.y)], model, checkpoint=folder)
    x[:, 0] += 0.01 * torch.randn(30)
    with pytest.raises(ValueError, match="other data"):
        fit([(x, data.y)], model, checkpoint=folder)


def of_other_labels_later(rank):
    data = tiny("classification")
    batches = [(data.x[:10], data.y[:10]), (data.x[10:], data.y[10:].roll(rank))]
    try:
        fit(batches, shard="data")
    except Exception as error:
        return str(error)


@case("3", "ranks compared their first batch only", "every rank's rows are compared")
def _(folder):
    said = ranks.run(2, of_other_labels_later, folder)
    assert all(text and "other data" in text for text in said)


def changes(model):
    """number -> how weights change."""

    def fused():
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimiser.step()

    def assigned():
        state = {name: 2 * value for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def data():
        model[0].weight.data = 2 * model[0].weight.data

    def layer():
        model[0] = nn.Linear(2, 4).double()

    def vector():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(2 * vector.detach(), model.parameters())

    return {"4a": fused, "4b": assigned, "4c": data, "4d": layer, "4e": vector}


def changed(number):
    def run(folder):
        la = fit()
        changes(la.model)[number]()
        for call in (lambda: la(tiny("classification").x), lambda: la.save(folder / "saved")):
            with pytest.raises(REFUSED, match="weights"):
                call()

    return run


for number, how in {
    "4a": "by a fused optimiser",
    "4b": "by load_state_dict(assign=True)",
    "4c": "by p.data = ...",
    "4d": "with a layer",
    "4e": "by vector_to_parameters",
}.items():
    words = f"weights changed {how} went unseen", "predictions and save refuse"
    case(number, *words)(changed(number))


@case("5a", "a fit inside autocast reached the solvers", "it is the fit outside")
def _(folder):
    data = tiny("classification")
    model, x = data.model.float(), data.x.float()
    outside = fit([(x, data.y)], model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fit([(x, data.y)], model)
    assert torch.equal(inside.w_lin, outside.w_lin)
    assert torch.equal(inside.w_samples, outside.w_samples)


@case("5b", "a prediction inside autocast was rounded", "it is the prediction outside")
def _(folder):
    data = tiny("classification")
    la = fit([(data.x.float(), data.y)], data.model.float())
    outside = la.functional_samples(data.x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(la.functional_samples(data.x.float()), outside)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

    def forward(self, x):
        return (self.layer(x).to(torch.complex128) @ self.weight).abs()


@case("6", "complex parameters were left out", "they are two reals each, or refused")
def _(folder):
    data = tiny("classification")
    try:
        la = fit([(data.x, data.y)], Turned())
    except REFUSED as error:
        assert "complex" in str(error)
    else:
        assert la.w_lin.numel() == 9 + 2 * 9


class Gate(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            gate = h.sigmoid()
        return h * gate


@case("7a", "64,000 outputs hid a gate without grad from the probe", "it takes reverse mode")
def _(folder):
    linear = linear_model(Gate(1000))
    assert not linear.probe(torch.randn(64, 2)).path.forward


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]


class PartlyOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x):
        return self.a(x) + Once.apply(self.b(x))


@case("7b", "J without a part of it passed at 512 rows", "it is refused")
def _(folder):
    with pytest.raises(NotImplementedError):
        linear_model(PartlyOnce()).probe(torch.randn(512, 3))


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("centres", torch.randn(3, 2, dtype=torch.float64))

    def forward(self, x):
        return -torch.cdist(self.layer(x), self.centres)


@case("8", "a loaded posterior took forward mode unasked", "it is probed where it is used")
def _(folder):
    data, model = tiny("classification"), Distances()
    la = fit([(data.x, data.y)], model)
    la.save(folder / "saved")
    loaded = LinearisedLaplace.load(folder / "saved", model)
    torch.testing.assert_close(loaded.functional_samples(data.x), la.functional_samples(data.x))


@case("9", "a softmax at the end fitted without a word", "a warning says so")
def _(folder):
    data = tiny("classification")
    with pytest.warns(UserWarning, match="softmax|probabilities"):
        fit([(data.x, data.y)], nn.Sequential(data.model, nn.Softmax(-1)))


@case("10", "γ at λ = 1e12 in float32 was half of the truth", "its error bar holds the truth")
def _(folder):
    data = tiny("classification")
    la = fit(
        [(data.x.float(), data.y)],
        tiny("classification").model.float(),
        em_steps=0,
        prior_precision=1e12,
        g_prior=False,
        num_samples=64,
        solver=BlockCG(),
    )
    gamma = data.exact().effective_dims(torch.tensor(1e12).double()).sum()
    assert (la.effective_dim - gamma).abs() <= 5 * la.effective_dim_error


class InAList(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer, self.bias, self.size = nn.Linear(2, 3), nn.Parameter(torch.ones(3)), size
        self.kept = [self.bias]

    def forward(self, x):
        return self.layer(x) + self.size * self.kept[0]


@case("10b", "a parameter in a list with a small gradient went unseen", "it is refused")
def _(folder):
    with pytest.raises(RuntimeError, match="'bias'.*list"):
        fit(model=InAList(1e-9).double())


@case("11", "files of the user's in the folder were deleted", "they are left alone")
def _(folder):
    names = "probe", "partial.pt", "pass-words.pt", ".writing-anything"
    for name in names:
        (folder / name).write_text("mine")
    with contextlib.suppress(REFUSED):
        fit(checkpoint=folder)
    assert all((folder / name).read_text() == "mine" for name in names)


@case("11b", 'checkpoint="" wrote into the current folder', "it is refused")
def _(folder):
    here = os.getcwd()
    os.chdir(folder)
    try:
        with pytest.raises(ValueError, match="checkpoint"):
            fit(checkpoint="")
    finally:
        os.chdir(here)


@case("12", "links inside the folder were written through", "they are refused or replaced")
def _(folder):
    (folder / "precious").write_text("mine")
    (folder / "run").mkdir()
    for name in ("header.pt", "posterior.pt", "outputs.pt"):
        (folder / "run" / name).symlink_to(folder / "precious")
    with contextlib.suppress(REFUSED):
        fit(checkpoint=folder / "run")
    assert (folder / "precious").read_text() == "mine"


def damaged(change, entry):
    def run(folder):
        la = fit()
        la.save(folder / "saved")
        state = torch.load(folder / "saved", weights_only=True)
        change(state)
        torch.save(state, folder / "saved")
        with pytest.raises(REFUSED + (KeyError,)) as caught:
            LinearisedLaplace.load(folder / "saved", la.model)
        assert "saved" in str(caught.value) and re.search(entry, str(caught.value))

    return run


def find(tree, key):
    """The dictionary of a file that has this entry."""
    if key in tree:
        return tree
    return next(found for v in tree.values() if isinstance(v, dict) and (found := find(v, key)))


def put(key, change):
    def apply(state):
        held = find(state, key)
        held[key] = change(held[key])

    return apply


FILES = {
    "13a": ("NaN samples", put("w_samples", lambda w: w * float("nan")), "w_samples"),
    "13b": ("samples of another size", put("w_samples", lambda w: w[:, :-5]), "w_samples|weights"),
    "13c": ("no samples", put("w_samples", lambda w: w[:0]), "w_samples"),
    "13d": ("whole numbers as samples", put("w_samples", lambda w: w.long()), "w_samples"),
    "13e": ("a negative scale", put("scale", lambda s: -s), "scale"),
    "13f": ("a file without w_lin", lambda s: find(s, "w_lin").pop("w_lin"), "w_lin"),
}
for number, (what, change, entry) in FILES.items():
    case(number, f"{what} were loaded", "the error names file and entry")(damaged(change, entry))


@case("14", "files were unpickled", "they are tensors; ranks use torch.distributed's collectives")
def _(folder):
    source = [path.read_text() for path in Path(torch_lla_em.__file__).parent.rglob("*.py")]
    calls = (
        "import pickle",
        "pickle.load",
        "weights_only=False",
        "broadcast_object_list",
    )
    assert not [call for call in calls for text in source if call in text]


@case("15", "la(x) from four threads failed, or left the model changed", "it is right")
def _(folder):
    la, x = fit(), tiny("classification").x
    la.model.train()
    expected = la(x)
    flags = torch.backends.cuda.math_sdp_enabled(), torch.backends.mkldnn.enabled
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(la, [x] * 40):
            torch.testing.assert_close(found, expected)
    assert la.model.training and all(module.training for module in la.model.modules())
    assert flags == (torch.backends.cuda.math_sdp_enabled(), torch.backends.mkldnn.enabled)


@case("16a", "a fit under inference_mode failed", "it works")
def _(folder):
    data = tiny("classification")
    with torch.inference_mode():
        la = fit([(data.x, data.y)], data.model)
    assert torch.equal(la.w_lin, fit().w_lin)


@case("16e", "a network built under inference_mode failed inside torch", "it works, or says so")
def _(folder):
    with torch.inference_mode():
        data = tiny("classification")
    try:
        fit([(data.x, data.y)], data.model)
    except REFUSED as error:
        assert "inference_mode" in str(error)


@case(
    "16b", "la(x.double()) of a float32 network failed in a matrix product", "it works, or says so"
)
def _(folder):
    data = tiny("classification")
    la = fit([(data.x.float(), data.y)], data.model.float())
    try:
        assert la(data.x).shape == (30, 3)
    except REFUSED as error:
        assert "float32" in str(error) and "float64" in str(error)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        h = self.embed(input_ids) * attention_mask[..., None]
        return self.head(h.sum(1))


@case("16c", "la(input_ids=..., attention_mask=...) was a TypeError", "it is the mapping")
def _(folder):
    ids = torch.randint(5, (8, 3), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones(8, 3)}
    la = fit([{**batch, "labels": torch.arange(8) % 2}], Words())
    try:
        found = la(**batch)
    except TypeError as error:
        assert "mapping" in str(error) or "dict" in str(error)
    else:
        assert torch.equal(found, la(batch))


@case("16d", "uint64 labels failed inside torch", "they work, or the error says what to do")
def _(folder):
    data = tiny("classification")
    try:
        la = fit([(data.x, data.y.to(torch.uint64))])
    except REFUSED as error:
        assert "labels" in str(error) and "uint64" in str(error)
    else:
        assert torch.equal(la.w_lin, fit().w_lin)


@case(
    "17", "a network certain of every row was said to have a wrong J", "its posterior is the prior"
)
def _(folder):
    x = torch.cat([torch.eye(3)] * 10).double()
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(40 * torch.eye(3))
        model[0].bias.zero_()
    y = torch.arange(30) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"curvature": "network", "g_prior": False, "num_samples": 200}
        la = fit([(x, y)], model, em_steps=0, prior_precision=4.0, **options)
    assert (la.effective_dim - 0).abs() <= 5 * la.effective_dim_error + 1e-6
    assert torch.isfinite(la.w_samples).all()


@case("18", "a first batch of zeros was said to have no Jacobian", "another batch is looked at")
def _(folder):
    data = tiny("classification")
    model = nn.Sequential(nn.Linear(2, 3, bias=False)).double()
    fit([(torch.zeros(4, 2).double(), data.y[:4]), (data.x, data.y)], model)


@case("19a", "empty batches failed inside the network", "they are skipped")
def _(folder):
    data = tiny("classification")
    la = fit([(data.x[:0], data.y[:0]), (data.x, data.y), (data.x[:0], data.y[:0])])
    assert la.num_data == 30


@case("19b", "a loader of empty batches alone failed inside", "there are no rows, it says")
def _(folder):
    data = tiny("classification")
    with pytest.raises(ValueError, match="no (rows|data|batch)|empty"):
        fit([(data.x[:0], data.y[:0])])


class Late(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(x[0, 0] < 50)):
            return self.layer(x)


def late_batches():
    data = tiny("classification")
    far = data.x.index_fill(0, torch.tensor([0]), 100.0)
    return [(data.x, data.y), (far, data.y)]


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def refused(error, match, call):
    def run(folder):
        with warnings.catch_warnings(), pytest.raises(error, match=match):
            warnings.simplefilter("ignore")
            call()

    return run


def pixels():
    x = torch.randn(2, 3, 4, 4)
    y = torch.randint(5, (2, 4, 4))
    return [(x, y)], nn.Sequential(nn.Conv2d(3, 5, 1))


def with_label(label):
    data = tiny("classification")
    return [(data.x, data.y.clone().index_fill_(0, torch.tensor([3]), label))]


def pair():
    data = tiny("classification")
    try:
        fit((data.x, data.y))
    except REFUSED as error:
        assert re.search(r"\[\(", str(error))


case("20a", "inputs × 1e6 were blamed on the likelihood", "their scale is named")(
    refused(
        ArithmeticError,
        "inputs scaled as in training",
        lambda: fit(
            [(1e6 * tiny("classification").x, torch.arange(30) % 3)],
            nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double(),
            curvature="network",
        ),
    )
)
case("20b", "λ = 1e-12 ended inside torch.linalg", "the prior precision is named")(
    refused(
        ArithmeticError,
        "larger `prior_precision`",
        lambda: fit(
            [(seeded(200, 8), torch.arange(200) % 3)],
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)),
            em_steps=0,
            prior_precision=1e-12,
        ),
    )
)
for number, layer in (("20c", "0"), ("20d", "1")):
    case(number, "no_grad in later batches was blamed on J", "no_grad is named")(
        refused(
            (NotImplementedError, ArithmeticError),
            "no_grad",
            lambda layer=layer: fit(
                late_batches(),
                Late(nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))).double(),
                parameters=[f"*.{layer}.*"],
                compute=Compute(keep_data=False),  # batches are not joined
            ),
        )
    )
case("21a", "solver=Newton() failed in the fit", "the constructor refuses")(
    refused(
        REFUSED,
        "solver",
        lambda: LinearisedLaplace(nn.Linear(2, 3), "classification", solver=Newton()),
    )
)
case("21b", "a solver class failed in the fit", "the constructor says to call it")(
    refused(
        REFUSED,
        "BlockCG",
        lambda: LinearisedLaplace(nn.Linear(2, 3), "classification", solver=BlockCG),
    )
)
case("21c", "labels per pixel were of a wrong shape", "the error names class_dim=1")(
    refused(REFUSED, "class_dim=1", lambda: fit(*pixels()))
)
case("21d", "labels of 255 were out of range", "the error names ignore_index")(
    refused(REFUSED, "ignore_index=255", lambda: fit(with_label(255)))
)
case("21e", "fit((X, y)) took X for a batch", "it is understood, or says [(X, y)]")(
    lambda folder: pair()
)
case("21f", "a pattern that matches nothing was refused", "the error shows near names")(
    refused(
        REFUSED,
        r"0\.weight",
        lambda: LinearisedLaplace(
            tiny("classification").model, "classification", parameters=["0.wieght"]
        ),
    )
)


def marked(number):
    return pytest.param(number, marks=[pytest.mark.slow] * (number == "3"), id=CASES[number].words)


@pytest.mark.parametrize("number", [marked(number) for number in CASES])
def test_hostile(number, tmp_path):
    CASES[number](tmp_path)
