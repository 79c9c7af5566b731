"""Hostile calls: each is refused with an error that names the cause, or gives the right answer."""

import contextlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from jacobians import linear_model
from tiny import tiny
from torch import nn
from torch.testing import assert_close

import torch_lla_em
from torch_lla_em import BlockCG, Compute, LinearisedLaplace, Newton

REFUSED = ValueError, TypeError, RuntimeError


def fit(loader=None, model=None, likelihood="classification", **options):
    data = tiny("classification")
    keys = "em_steps", "checkpoint", "prior_precision", "shard"
    asked = {"em_steps": 1, "progress_bar": False}
    asked |= {key: options.pop(key) for key in keys if key in options}
    la = LinearisedLaplace(model or data.model, likelihood, **{"num_samples": 4, **options})
    return la.fit([(data.x, data.y)] if loader is None else loader, **asked)


def test_other_data_than_those_of_the_checkpoint_are_refused(tmp_path):
    data = tiny("classification")
    fit([(data.x, data.y[torch.randperm(30)])], checkpoint=tmp_path / "labels")
    with pytest.raises(ValueError, match="other data"):
        fit([(data.x, data.y)], checkpoint=tmp_path / "labels")
    # one large column does not hide noise in another
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].weight.data[:, 2] = 1e-9
    x = torch.cat([data.x, torch.full((30, 1), 1.7e9).double()], 1).float()
    fit([(x, data.y)], model, checkpoint=tmp_path / "columns")
    x[:, 0] += 0.01 * torch.randn(30)
    with pytest.raises(ValueError, match="other data"):
        fit([(x, data.y)], model, checkpoint=tmp_path / "columns")


def test_labels_that_change_their_examples_between_passes_are_noticed():
    class Repaired:
        data, passes = tiny("classification"), 0

        def __iter__(self):
            self.passes += 1
            yield self.data.x, self.data.y.roll(self.passes)

    with pytest.raises((ValueError, UserWarning)):
        fit(Repaired(), compute=Compute(keep_data=False))


def by_a_fused_optimiser(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step()


def by_assignment(model):
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def by_vector_to_parameters(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(2 * vector.detach(), model.parameters())


def by_data(model):
    model[0].weight.data = 2 * model[0].weight.data


def by_another_layer(model):
    model[0] = nn.Linear(2, 4).double()


@pytest.mark.parametrize(
    "change",
    [by_a_fused_optimiser, by_assignment, by_data, by_another_layer, by_vector_to_parameters],
)
def test_weights_that_have_changed_are_refused(change, tmp_path):
    la = fit()
    change(la.model)
    for call in (lambda: la(tiny("classification").x), lambda: la.save(tmp_path / "saved")):
        with pytest.raises(REFUSED, match="weights"):
            call()


def test_autocast_changes_neither_fits_nor_predictions():
    data = tiny("classification")
    model, x = data.model.float(), data.x.float()
    outside = fit([(x, data.y)], model)
    expected = outside.functional_samples(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fit([(x, data.y)], model)
        assert torch.equal(outside.functional_samples(x), expected)
    assert torch.equal(inside.w_lin, outside.w_lin)
    assert torch.equal(inside.w_samples, outside.w_samples)


class Gate(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            gate = h.sigmoid()
        return h * gate


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


def test_large_batches_hide_no_part_of_the_jacobian_from_the_probe():
    assert not linear_model(Gate(1000)).probe(torch.randn(64, 2)).path.forward
    with pytest.raises(NotImplementedError):
        linear_model(PartlyOnce()).probe(torch.randn(512, 3))


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("centres", torch.randn(3, 2, dtype=torch.float64))

    def forward(self, x):
        return -torch.cdist(self.layer(x), self.centres)


def test_a_loaded_posterior_is_probed_where_it_is_used(tmp_path):
    data, model = tiny("classification"), Distances()
    la = fit([(data.x, data.y)], model)
    la.save(tmp_path / "saved")
    loaded = LinearisedLaplace.load(tmp_path / "saved", model)
    assert_close(loaded.functional_samples(data.x), la.functional_samples(data.x))


def test_a_softmax_at_the_end_is_warned_of():
    data = tiny("classification")
    with pytest.warns(UserWarning, match="softmax|probabilities"):
        fit([(data.x, data.y)], nn.Sequential(data.model, nn.Softmax(-1)))


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(2, 3), nn.Parameter(torch.ones(3))
        self.kept = [self.bias]

    def forward(self, x):
        return self.layer(x) + 1e-9 * self.kept[0]  # a gradient that is easily overlooked


def test_files_of_the_user_are_left_alone(tmp_path):
    names = "probe", "partial.pt", "pass-words.pt", ".writing-anything"
    for name in names:
        (tmp_path / name).write_text("mine")
    with contextlib.suppress(REFUSED):
        fit(checkpoint=tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    (tmp_path / "run").mkdir()
    for name in ("header.pt", "posterior.pt", "outputs.pt"):  # links are not written through
        (tmp_path / "run" / name).symlink_to(tmp_path / "probe")
    with contextlib.suppress(REFUSED):
        fit(checkpoint=tmp_path / "run")
    assert (tmp_path / "probe").read_text() == "mine"


def test_an_empty_name_of_a_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="checkpoint"):
        fit(checkpoint="")


def test_nothing_is_unpickled():
    source = [path.read_text() for path in Path(torch_lla_em.__file__).parent.rglob("*.py")]
    calls = "import pickle", "pickle.load", "weights_only=False", "broadcast_object_list"
    assert not [call for call in calls for text in source if call in text]


def test_inference_mode():
    data = tiny("classification")
    with torch.inference_mode():
        la = fit([(data.x, data.y)], data.model)
        built_inside = tiny("classification")
    assert torch.equal(la.w_lin, fit().w_lin)
    try:
        fit([(built_inside.x, built_inside.y)], built_inside.model)
    except REFUSED as error:
        assert "inference_mode" in str(error)


def test_inputs_of_another_precision_work_or_are_named():
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


def test_inputs_by_keyword_are_the_mapping_or_named():
    ids = torch.randint(5, (8, 3), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones(8, 3)}
    la = fit([{**batch, "labels": torch.arange(8) % 2}], Words())
    try:
        found = la(**batch)
    except TypeError as error:
        assert "mapping" in str(error) or "dict" in str(error)
    else:
        assert torch.equal(found, la(batch))


def test_uint64_labels_work_or_are_named():
    data = tiny("classification")
    try:
        la = fit([(data.x, data.y.to(torch.uint64))])
    except REFUSED as error:
        assert "labels" in str(error) and "uint64" in str(error)
    else:
        assert torch.equal(la.w_lin, fit().w_lin)


def test_a_network_that_is_certain_of_every_example_has_the_prior():
    x = torch.cat([torch.eye(3)] * 10).double()
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(40 * torch.eye(3))
        model[0].bias.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"curvature": "network", "g_prior": False, "num_samples": 200}
        la = fit([(x, torch.arange(30) % 3)], model, em_steps=0, prior_precision=4.0, **options)
    assert (la.effective_dim - 0).abs() <= 5 * la.effective_dim_error + 1e-6
    assert torch.isfinite(la.w_samples).all()


def test_a_first_batch_of_zeros_says_nothing_of_the_jacobian():
    data = tiny("classification")
    model = nn.Sequential(nn.Linear(2, 3, bias=False)).double()
    fit([(torch.zeros(4, 2).double(), data.y[:4]), (data.x, data.y)], model)


def test_empty_batches_are_skipped():
    data = tiny("classification")
    empty = data.x[:0], data.y[:0]
    assert fit([empty, (data.x, data.y), empty]).num_data == 30


class Late(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(x[0, 0] < 50)):
            return self.layer(x)


def without_gradient_later(layer):
    data = tiny("classification")
    far = data.x.index_fill(0, torch.tensor([0]), 100.0)
    model = Late(nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))).double()
    compute = Compute(keep_data=False)  # batches are not joined
    fit([(data.x, data.y), (far, data.y)], model, parameters=[f"*.{layer}.*"], compute=compute)


def large_inputs():
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = [(1e6 * tiny("classification").x, torch.arange(30) % 3)]
    fit(data, model, curvature="network")


def a_tiny_prior_precision():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    fit([(x, torch.arange(60) % 3)], model, em_steps=0, prior_precision=1e-12)


def labels_per_pixel():
    model = nn.Sequential(nn.Conv2d(3, 5, 1))
    fit([(torch.randn(2, 3, 4, 4), torch.randint(5, (2, 4, 4)))], model)


def labels_of_255():
    data = tiny("classification")
    fit([(data.x, data.y.clone().index_fill_(0, torch.tensor([3]), 255))])


def made(model=None, **options):
    return LinearisedLaplace(model or tiny("classification").model, "classification", **options)


NO_GRAD = (NotImplementedError, ArithmeticError), "no_grad"
REFUSALS = {
    "inputs × 1e6": (ArithmeticError, "scaled as in training", large_inputs),
    "λ = 1e-12": (ArithmeticError, "larger `prior_precision`", a_tiny_prior_precision),
    "no_grad in later batches": (*NO_GRAD, lambda: without_gradient_later("0")),
    "no_grad in a later layer": (*NO_GRAD, lambda: without_gradient_later("1")),
    "solver=Newton()": (REFUSED, "solver", lambda: made(solver=Newton())),
    "a solver class": (REFUSED, "BlockCG", lambda: made(solver=BlockCG)),
    "labels per pixel": (REFUSED, "class_dim=1", labels_per_pixel),
    "labels of 255": (REFUSED, "ignore_index=255", labels_of_255),
    "a misspelt pattern": (REFUSED, r"0\.weight", lambda: made(parameters=["0.wieght"])),
    "parameter in a list": (RuntimeError, "'bias'.*list", lambda: fit(model=InAList().double())),
    "empty batches alone": (
        ValueError,
        "no (rows|data|batch)|empty",
        lambda: fit([(torch.zeros(0, 2).double(), torch.zeros(0).long())]),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_cause(name):
    error, message, call = REFUSALS[name]
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        warnings.simplefilter("ignore")
        call()


def test_a_pair_in_place_of_a_loader_is_understood_or_named():
    data = tiny("classification")
    try:
        fit((data.x, data.y))
    except REFUSED as error:
        assert re.search(r"\[\(", str(error))
