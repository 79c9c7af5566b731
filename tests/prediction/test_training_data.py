"""Validation sets of training examples are refused."""

import pytest
import torch
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.data.identity import Identity, distinct

FIXED = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
REFUSED = "validation examples are training examples"


def posterior():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return LinearisedLaplace(net, "classification", num_samples=4)


@pytest.fixture(scope="module")
def fit():
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return posterior().fit(x[:200], y[:200], **FIXED), x, y


@pytest.mark.parametrize("rows", [slice(0, 200), slice(0, 100), slice(100, 260), slice(0, 400)])
def test_training_examples_are_refused(fit, rows, tmp_path):
    la, x, y = fit
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", la.model)
    for each in (la, again, LaplaceEnsemble([la])):
        with pytest.raises(ValueError, match=REFUSED):
            each.calibrate(list(zip(x[rows].split(30), y[rows].split(30))))
    assert la.calibration is None
    again.calibrate(x[140:400], y[140:400])  # a few are known
    assert again.is_ood(x[200:]).float().mean() < 0.2


@pytest.mark.parametrize("weights", ["last", lambda y: 1.0 + y])
def test_training_examples_with_weights_are_refused_too(fit, weights):
    _, x, y = fit
    batches = list(zip(*(part[:200].split(50) for part in (x, y, torch.rand(200)))))
    batches = batches if weights == "last" else [batch[:2] for batch in batches]
    la = posterior().fit(batches, weights=weights, **FIXED)
    with pytest.raises(ValueError, match="100% of the 200 validation examples"):
        la.calibrate(x[:200], y[:200])
    la.calibrate(x[200:], y[200:])


def test_a_fit_with_training_examples_for_validation_ends_after_its_first_pass(fit):
    """Equal examples of few values are no sign."""
    _, x, y = fit
    read = []

    class Counted:
        def __iter__(self):
            read.append(1)
            return iter(zip(x[:200].split(50), y[:200].split(50)))

    for unseen in ([(x[:200], y[:200])], list(zip(x[:200].split(30), y[:200].split(30)))):
        with pytest.raises(ValueError, match=REFUSED):
            posterior().fit(Counted(), validation=unseen, progress_bar=False)
    assert len(read) <= 2 * 2
    x = torch.randint(2, (200, 3)).float()
    posterior().fit(x, x[:, 0].long(), **FIXED).calibrate(x, x[:, 0].long())


def test_a_sample_of_many_examples_estimates_what_is_shared():
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 1), torch.zeros(20_000)

    def of(*rows):
        parts = []
        for some in rows:
            parts.append(Identity())
            parts[-1].add((y[some], x[some]))
        return Identity.of(parts)

    train, half = of(slice(0, 4_000), slice(4_000, 10_000)), of(slice(5_000, 15_000))
    share, number = half.shared_with(train.least)
    assert abs(share - 0.5) < 5 * (0.25 / number) ** 0.5 and number > 400
    assert of(slice(10_000, 20_000)).shared_with(train.least)[0] == 0
    assert distinct(train.least, 10_000) > 0.85 and distinct(train.least, 100_000) < 0.2
    assert Identity.from_state(train.state()).least == train.least
