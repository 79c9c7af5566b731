"""Sets for the pixels of images, whose expected loss is bounded."""

import pytest
import torch
from tiny import draw
from torch.testing import assert_close

from torch_lla_em import RiskControl


def images(count, seed=0):
    """Probabilities for 3 classes and labels, whose images are of different difficulty."""
    logits = 3 * draw(count, 3, 4, 5, seed=seed) * draw(count, 1, 1, 1, seed=seed + 1).exp()
    noise = draw(count, 3, 4, 5, seed=seed + 2)
    return logits.softmax(1), (logits + noise).argmax(1)


def test_the_threshold_is_the_largest_that_is_allowed():
    p, y = images(40)
    y[0, 0] = -100
    control = RiskControl(lambda x: x, zip(p.split(7), y.split(7)), level=0.15)
    losses = control.loss(p, y)
    assert control.num_images == 40 and control.threshold > 0
    inside = control.sets(p).gather(1, y.clamp_min(0)[:, None])[:, 0]
    assert_close(losses[1:], 1 - inside[1:].flatten(1).double().mean(1))
    assert_close(losses[0], 1 - inside[0, 1:].double().mean())
    assert_close(losses.mean().item(), control.risk)
    assert (40 * control.risk + 1) / 41 <= 0.15
    larger = torch.tensor(control.threshold).logit() + 0.01  # one step of the grid is 0.0078
    control.threshold = larger.sigmoid().item()
    assert (control.loss(p, y).sum() + 1) / 41 > 0.15


def test_the_loss_of_new_images_is_bounded_on_average():
    means = []
    for seed in range(0, 900, 9):
        p, y = images(30, seed)
        control = RiskControl(lambda x: x, [(p, y)], level=0.1)
        means.append(control.loss(*images(30, seed + 3)).mean())
    means = torch.stack(means)
    assert 0.04 < means.mean() < 0.1 + 3 * means.std() / 10


def test_pixels_of_some_classes_alone_can_count():
    p, y = images(40)
    control = RiskControl(lambda x: x, [(p, y)], level=0.15, classes=[1, 2])
    kept = y > 0
    missed = ~control.sets(p).gather(1, y[:, None])[:, 0] & kept
    shares = missed.flatten(1).sum(1) / kept.flatten(1).sum(1)
    assert_close(control.loss(p, y), shares.double())
    assert_close(control.risk, shares.double().mean().item())


def test_what_cannot_be_guaranteed_is_refused():
    p, y = images(8)
    with pytest.raises(ValueError, match="with 8 validation images: it needs 9 or more"):
        RiskControl(lambda x: x, [(p, y)], level=0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        RiskControl(lambda x: x, [(p, y)], level=1.5)
    with pytest.raises(ValueError, match="pass class_dim"):
        RiskControl(lambda x: x.movedim(1, -1), [(p, y)], level=0.2)
    hopeless = p.movedim(1, -1)
    assert RiskControl(lambda x: x, [(hopeless, y)], level=0.2, class_dim=-1).num_images == 8
