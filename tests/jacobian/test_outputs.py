"""Outputs of any rank, and what is never allocated."""

import pytest
import torch
from allocator import Largest
from dense import ExactLaplace, gaussian_log_prob
from jacobians import linear_model
from tiny import draw
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from torch_lla_em import Bernoulli, Classification, Compute, LinearisedLaplace, Regression
from torch_lla_em.data import Data
from torch_lla_em.problem import Problem

FIXED = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}
SIGMAS = torch.tensor([0.5, 0.8], dtype=torch.float64)


class Tagger(nn.Module):
    """(B, T) tokens to (B, T, C); it looks back only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)).cumsum(1).tanh())


def tagger():
    tokens = torch.randint(0, 7, (6, 4), generator=torch.Generator().manual_seed(0))
    labels = tokens % 3
    labels[2, 1:] = labels[4, 3] = -100
    return Tagger().double(), tokens, labels


def pixels(outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, outputs, 1))
    return model.double(), draw(5, 1, 3, 4)


def of_classes(*shape):
    """Return log p of labels for outputs of one example, with the classes on the second axis of a batch."""
    return lambda f, y: -functional.cross_entropy(f.view(shape), y.view(1, -1), reduction="sum")


BITS = (draw(5, 2, 3, 4, seed=1) > 0).double()
CASES = {
    "pixels": (*pixels(3), (draw(5, 3, 4) > 0).long(), Classification(), 1, of_classes(1, 3, 12)),
    "sequence": (*tagger(), Classification(), -1, lambda f, y: -functional.cross_entropy(f.view(4, 3), y, reduction="sum")),
    "image": (*pixels(2), draw(5, 2, 3, 4, seed=1), Regression(SIGMAS), 1, lambda f, y: gaussian_log_prob(SIGMAS[:, None, None])(f.view(2, 3, 4), y)),
    "labels": (*pixels(2), BITS, Bernoulli(), -3, lambda f, y: -functional.binary_cross_entropy_with_logits(f.view(2, 3, 4), y, reduction="sum")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_and_predictions_have_the_shape_of_the_outputs(name):
    model, x, y, likelihood, class_dim, log_prob = CASES[name]
    la = LinearisedLaplace(model, likelihood, class_dim=class_dim, num_samples=4)
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    linear = linear_model(model, class_dim=class_dim)
    problem = Problem(linear, likelihood, Data(data, torch.device("cpu")))
    exact = ExactLaplace.of(model, x, y, log_prob, list(linear.layout.names))
    w = draw(3, problem.size)
    assert_close(problem.ggn_product(w), w @ exact.ggn)
    loss, gradient = problem.loss_and_gradient(0.1 * w[0])
    assert_close(loss, exact.loss(0.1 * w[0]).item())
    assert_close(gradient, torch.func.grad(exact.loss)(0.1 * w[0]))
    la.fit(data, **FIXED)
    f, prediction, outputs = model(x).detach(), la.predict(x), la(x)
    for values in outputs if isinstance(likelihood, Regression) else [outputs]:
        assert values.shape == f.shape
    assert_close(la.predict(x, mean="network").f_mean, f)
    assert prediction.samples.shape == (4, *f.shape)
    if isinstance(likelihood, Classification):
        assert_close(la(x).sum(class_dim), torch.ones(y.shape).double())
        assert prediction.entropy.shape == prediction.epistemic.shape == y.shape
    assert torch.isfinite(prediction.joint_log_prob(y))
    la.calibrate([(x, y)])
    assert la.predict(x).log_prob(y).sum() >= prediction.log_prob(y).sum()


@pytest.mark.parametrize("curvature", ["network", "variational"])
def test_padding_counts_for_nothing(curvature):
    model, tokens, labels = tagger()
    options = {"num_samples": 4, "prior": "isotropic", "curvature": curvature}
    options["compute"] = Compute(tolerance=1e-8)

    def fit(tokens, labels, likelihood="classification"):
        return LinearisedLaplace(model, likelihood, **options).fit([(tokens, labels)], **FIXED)

    la = fit(tokens, labels)
    chosen = fit(tokens, labels.where(labels != -100, 99), Classification(ignore_index=99))
    assert_close((chosen.w_samples, chosen.w_lin), (la.w_samples, la.w_lin))
    changed = tokens.clone()
    changed[2, 1:] = 0  # tokens after the last label
    assert_close(fit(changed, labels).w_lin, la.w_lin, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(fit(tokens, tokens % 3).w_lin, la.w_lin)


def test_the_class_axis_is_asked_for():
    model, x = pixels(3)
    with pytest.raises(ValueError, match="classes last"):
        LinearisedLaplace(model, "classification").fit([(x, BITS[:, 0].long())], **FIXED)


def test_nothing_is_of_size_classes_squared():
    """K columns of outputs are the most that is there, with 20,000 classes; also with a random head."""
    torch.manual_seed(0)
    samples, rows, classes = 3, 2, 20_000
    model = nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, classes))
    model[2].requires_grad_(False)
    x, y = torch.randn(4, 20), torch.randint(0, classes, (4,))
    loader = [(x[:rows], y[:rows]), (x[rows:], y[rows:])]
    with Largest() as largest:
        la = LinearisedLaplace(model, "classification", num_samples=samples, curvature="network")
        la.fit(loader, em_steps=2, progress_bar=False)
        prediction = la.predict(x[:rows])
        assert prediction.entropy.shape == prediction.epistemic.shape == (rows,)
        assert prediction.log_probs.shape == (rows, classes)
        la.predict(x).joint_log_prob(y)
        la.calibrate(loader)
    # every product is of a block of 2 K columns at most; a validation set of 4 rows stays in memory, and its samples
    # have mirror images; the outputs of the span's directions, of two passes, are stored for all rows
    most = max((2 * samples + 1) * rows, 2 * samples * 4, 2 * (samples + 1) * 4)
    assert largest.numel <= most * classes
    assert 3 * largest.numel < rows * classes * la.w_lin.numel()  # J of one batch
    model, x, y = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3_000)), torch.randn(4, 2), y % 3_000
    with Largest() as largest:
        la = LinearisedLaplace(model, "classification", num_samples=2, curvature="network")
        la.fit([(x, y)], em_steps=0, prior_precision=100.0, progress_bar=False)
        la(x)
    size = la.w_lin.numel()
    assert largest.numel < 200 * size < 3_000 * size / 10  # the span, a hundred vectors or so
