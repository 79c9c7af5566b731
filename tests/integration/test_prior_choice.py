"""Which scaling of the prior a fit takes: by rule, or by a validation set."""

import pytest
import torch
from tiny import tiny
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace


def fitted(case, likelihood, validation=None, checkpoint=None, **options):
    la = LinearisedLaplace(case.model, likelihood, num_samples=4, **options)
    return la.fit(
        [(case.x, case.y)], validation=validation, progress_bar=False, checkpoint=checkpoint
    )


@pytest.mark.parametrize(
    "likelihood, options, chosen",
    [
        ("classification", {}, "half"),
        ("classification", {"curvature": "network"}, True),
        ("classification", {"prior": "layerwise"}, True),
        ("regression", {}, True),
    ],
)
def test_the_default_scaling_follows_the_rule(likelihood, options, chosen):
    case = tiny(likelihood)
    by_rule = fitted(case, likelihood, **options)
    assert_close(by_rule.scale, fitted(case, likelihood, g_prior=chosen, **options).scale)


def test_a_validation_set_decides_between_scalings(tmp_path):
    case = tiny("classification")
    validation = [(case.x[:7], case.y[:7])]
    each = [fitted(case, "classification", validation, g_prior=g) for g in (True, "tensor")]
    best = min(each, key=lambda la: la.calibration.kept)
    for _ in range(2):  # the second time from the finished checkpoints
        la = fitted(case, "classification", validation, checkpoint=tmp_path)
        assert la.calibration.kept == pytest.approx(best.calibration.kept)
        assert_close(la.scale, best.scale)
        assert_close(la(case.x), best(case.x))
    assert {path.name for path in tmp_path.iterdir()} == {"g_prior=True", "g_prior=tensor"}
    assert not torch.equal(each[0].scale, each[1].scale)
