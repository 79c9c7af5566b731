"""Which scaling of the prior a fit takes: by rule, or by a validation set."""

import pytest
import torch
from tiny import fitted, tiny
from torch.testing import assert_close


@pytest.mark.parametrize(
    "likelihood, options, chosen",
    [
        ("classification", {}, "root"),
        ("classification", {"curvature": "network"}, True),
        ("classification", {"prior": "layerwise"}, True),
        ("regression", {}, True),
    ],
)
def test_the_default_scaling_follows_the_rule(likelihood, options, chosen):
    _, by_rule = fitted(likelihood, **options)
    assert_close(by_rule.scale, fitted(likelihood, g_prior=chosen, **options)[1].scale)


def test_a_validation_set_decides_between_scalings(tmp_path):
    case = tiny("classification")
    validation = [(case.x[:7], case.y[:7])]
    each = [fitted(validation=validation, g_prior=g)[1] for g in ("root", "half")]
    best = min(each, key=lambda la: la.calibration.kept)
    for _ in range(2):  # the second time from the finished checkpoints
        _, la = fitted(validation=validation, checkpoint=tmp_path)
        assert la.calibration.kept == pytest.approx(best.calibration.kept)
        assert_close(la.scale, best.scale)
        assert_close(la(case.x), best(case.x))
    assert {path.name for path in tmp_path.iterdir()} == {"g_prior=root", "g_prior=half"}
    assert not torch.equal(each[0].scale, each[1].scale)
