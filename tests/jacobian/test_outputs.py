"""Outputs of any rank, and what is never allocated."""

import pytest
import torch
from allocator import Largest
from dense import ExactLaplace, gaussian_log_prob
from tiny import draw
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from torch_lla_em import Bernoulli, Classification, Compute, LinearisedLaplace, Regression
from torch_lla_em.data.loader import Data
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.problem.problem import Problem

FIXED = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}


class Tagger(nn.Module):
    """(B, T) tokens to (B, T, C)."""

    def __init__(self, vocabulary=7, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 3)
        self.mix = nn.Linear(3, 3)
        self.head = nn.Linear(3, classes)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)).cumsum(1).tanh())


def tagger():
    tokens = torch.randint(0, 7, (6, 4), generator=torch.Generator().manual_seed(0))
    labels = tokens % 3
    labels[2, 1:] = -100
    labels[4, 3] = -100
    return Tagger().double(), tokens, labels


def pixels(outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, outputs, 1))
    return model.double(), draw(5, 1, 3, 4)


def sequence_log_prob(f, y):
    return -functional.cross_entropy(f.view(4, 3), y, reduction="sum")


def pixel_log_prob(f, y):
    return -functional.cross_entropy(f.view(1, 3, 3, 4), y[None], reduction="sum")


SIGMAS = torch.tensor([0.5, 0.8], dtype=torch.float64)


def image_log_prob(f, y):
    return gaussian_log_prob(SIGMAS[:, None, None])(f.view(2, 3, 4), y)


def label_log_prob(f, y):
    return -functional.binary_cross_entropy_with_logits(f.view(2, 3, 4), y, reduction="sum")


def cases():
    model, x = pixels(3)
    yield "pixels", model, x, (draw(5, 3, 4) > 0).long(), Classification(), 1, pixel_log_prob
    yield "sequence", *tagger(), Classification(), -1, sequence_log_prob
    model, x = pixels(2)
    yield "image", model, x, draw(5, 2, 3, 4, seed=1), Regression(SIGMAS), 1, image_log_prob
    labels = (draw(5, 2, 3, 4, seed=1) > 0).double()
    yield "labels", model, x, labels, Bernoulli(), -3, label_log_prob


CASES = {case[0]: case[1:] for case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_the_dense_posterior(name):
    model, x, y, likelihood, class_dim, log_prob = CASES[name]
    layout = ParameterLayout.of(model, select_parameters(model))
    linear = LinearModel(Network(model, class_dim=class_dim), layout)
    data = Data([(x[:2], y[:2]), (x[2:], y[2:])], torch.device("cpu"))
    problem = Problem(linear, likelihood, data)
    exact = ExactLaplace.of(model, x, y, log_prob, list(layout.names))
    w = draw(3, problem.size)
    assert_close(problem.ggn_product(w), w @ exact.ggn)
    loss, gradient = problem.loss_and_gradient(0.1 * w[0])
    assert_close(loss, exact.loss(0.1 * w[0]).item())
    assert_close(gradient, torch.func.grad(exact.loss)(0.1 * w[0]))


@pytest.mark.parametrize("name", CASES)
def test_predictions_have_the_shape_of_the_outputs(name):
    model, x, y, likelihood, class_dim, _ = CASES[name]
    la = LinearisedLaplace(model, likelihood, class_dim=class_dim, num_samples=4)
    la.fit([(x[:2], y[:2]), (x[2:], y[2:])], **FIXED)
    with torch.no_grad():
        f = model(x)
    outputs = la(x) if isinstance(likelihood, Regression) else (la(x),)
    assert all(values.shape == f.shape for values in outputs)
    prediction = la.predict(x)
    assert_close(la.predict(x, mean="network").mean, f)
    assert prediction.samples.shape == (4, *f.shape)
    if isinstance(likelihood, Classification):
        assert_close(la(x).sum(class_dim), torch.ones_like(la(x).sum(class_dim)))
        assert prediction.entropy.shape == y.shape
        assert prediction.epistemic.shape == y.shape
    assert torch.isfinite(prediction.log_prob(y)).all()
    assert torch.isfinite(la.predict(x).joint_log_prob(y))
    before = prediction.log_prob(y).sum()
    la.calibrate([(x, y)])
    assert la.predict(x).log_prob(y).sum() >= before


@pytest.mark.parametrize("curvature", ["network", "variational"])
def test_padding_counts_for_nothing(curvature):
    model, tokens, labels = tagger()
    options = {
        "num_samples": 4,
        "compute": Compute(tolerance=1e-8),
        "prior": "isotropic",
        "curvature": curvature,
    }
    la = LinearisedLaplace(model, "classification", **options).fit([(tokens, labels)], **FIXED)
    other = labels.clone()
    other[labels == -100] = 99
    chosen = LinearisedLaplace(model, Classification(ignore_index=99), **options)
    chosen.fit([(tokens, other)], **FIXED)
    assert_close(chosen.w_samples, la.w_samples)
    assert_close(chosen.w_lin, la.w_lin)
    # the network looks back only, so that tokens after the last label do not matter
    changed = tokens.clone()
    changed[2, 1:] = 0
    padded = LinearisedLaplace(model, "classification", **options).fit([(changed, labels)], **FIXED)
    assert_close(padded.w_lin, la.w_lin, rtol=1e-6, atol=1e-8)
    full = LinearisedLaplace(model, "classification", **options)
    full.fit([(tokens, tokens % 3)], **FIXED)
    assert not torch.allclose(full.w_lin, la.w_lin)


def test_the_class_axis_is_asked_for():
    model, x = pixels(3)
    labels = (draw(5, 3, 4) > 0).long()
    with pytest.raises(ValueError, match="classes last"):
        LinearisedLaplace(model, "classification").fit([(x, labels)], **FIXED)


def test_nothing_is_of_size_classes_squared():
    """K columns of outputs are the most that is there, with 20,000 classes; also with a random head."""
    torch.manual_seed(0)
    samples, rows, classes = 3, 2, 20_000
    model = nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, classes))
    for p in model[2].parameters():
        p.requires_grad_(False)
    x, y = torch.randn(4, 20), torch.randint(0, classes, (4,))
    loader = [(x[:rows], y[:rows]), (x[rows:], y[rows:])]
    # every product is of a block of 2 K columns at most
    columns = 2 * samples + 1
    with Largest() as largest:
        la = LinearisedLaplace(model, "classification", num_samples=samples, curvature="network")
        la.fit(loader, em_steps=2, progress_bar=False)
        la(x[:rows])
        prediction = la.predict(x[:rows])
        assert prediction.entropy.shape == prediction.epistemic.shape == (rows,)
        assert prediction.log_probs.shape == (rows, classes)
        prediction.credible_interval()
        la.predict(x).joint_log_prob(y)
        la.calibrate(loader)
    # a validation set of 4 rows stays in memory, and its samples have mirror images; the outputs of
    # the span's directions, of two passes, are stored for all rows
    most = max(columns * rows, 2 * samples * 4, 2 * (samples + 1) * 4)
    assert largest.numel <= most * classes
    assert 3 * largest.numel < rows * classes * la.w_lin.numel()  # J of one batch
    model, x, y = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3_000)), torch.randn(4, 2), y % 3_000
    with Largest() as largest:
        la = LinearisedLaplace(model, "classification", num_samples=2, curvature="network")
        la.fit([(x, y)], em_steps=0, prior_precision=100.0, progress_bar=False)
        la(x)
    size = la.w_lin.numel()
    assert largest.numel < 200 * size < 3_000 * size / 10  # the span, a hundred vectors or so
