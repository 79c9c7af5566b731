"""TorchUncertainty's own metrics and routines on our posteriors."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny import likelihood_of, tiny
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch_uncertainty")
    pytest.importorskip("timm")  # which its routines import
    lightning = pytest.importorskip("lightning")
    from torch_uncertainty.metrics import BrierScore, CalibrationError, CategoricalNLL
    from torch_uncertainty.routines import (
        ClassificationRoutine,
        RegressionRoutine,
        SegmentationRoutine,
    )
    from torch_uncertainty.transforms import RepeatTarget

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction import outcomes, scores
from torch_lla_em.torch_uncertainty import RoutineModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def fitted(name):
    case = tiny(name)
    la = LinearisedLaplace(case.model, likelihood_of(name), num_samples=6)
    return case, la.fit(case.x, case.y, em_steps=0, prior_precision=5.0, progress_bar=False)


def evaluated(routine, case):
    """What a routine says of the data, in batches of uneven sizes."""
    options = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = lightning.Trainer(accelerator="cpu", enable_model_summary=False, **options)
    loader = DataLoader(TensorDataset(case.x, case.y), 20)
    (found,) = trainer.test(routine, loader, verbose=False)
    return {name.removeprefix("test/"): value for name, value in found.items()}


def test_metrics_take_what_the_posterior_returns():
    case, la = fitted("classification")
    probs, found = la(case.x), scores(outcomes(la.predict(case.x), case.y))
    assert CategoricalNLL()(probs, case.y).item() == pytest.approx(found["NLL"])
    error = CalibrationError(task="multiclass", num_classes=3, num_bins=15)(probs, case.y)
    assert error.item() == pytest.approx(found["ECE"], rel=1e-5)
    brier = (probs - torch.nn.functional.one_hot(case.y, 3)).square().sum(1).mean()
    assert BrierScore(num_classes=3)(probs, case.y).item() == pytest.approx(brier.item())


def test_the_classification_routine_evaluates_the_posterior():
    case, la = fitted("classification")
    found = evaluated(ClassificationRoutine(RoutineModel(la), num_classes=3, loss=None), case)
    own = scores(outcomes(la.predict(case.x), case.y))
    assert found["cls/NLL"] == pytest.approx(own["NLL"])
    assert found["cls/Acc"] == pytest.approx(own["accuracy"])
    assert found["cal/ECE"] == pytest.approx(own["ECE"], rel=1e-4)


def test_functions_of_the_posterior_are_an_ensemble():
    case, la = fitted("classification")
    routine = ClassificationRoutine(
        RoutineModel(la, ensemble=True),
        num_classes=3,
        loss=None,
        is_ensemble=True,
        format_batch_fn=RepeatTarget(la.num_samples),
    )
    found = evaluated(routine, case)
    each = la.functional_samples(case.x).softmax(-1)
    mean = each.mean(0)
    log_probs = mean.gather(1, case.y[:, None]).log()
    assert found["cls/NLL"] == pytest.approx(-log_probs.mean().item())
    entropies = torch.special.entr(mean).sum(-1) - torch.special.entr(each).sum(-1).mean(0)
    assert found["ens_MI"] == pytest.approx(entropies.mean().item(), rel=1e-4)


def test_the_regression_routine_evaluates_mean_and_deviation():
    case, la = fitted("regression")
    routine = RegressionRoutine(RoutineModel(la), output_dim=3, loss=None, dist_family="normal")
    found = evaluated(routine, case)
    own = scores(outcomes(la.predict(case.x), case.y))
    assert found["reg/NLL"] == pytest.approx(own["NLL"] / 3, rel=1e-5)  # of a number
    assert found["reg/RMSE"] == pytest.approx(own["RMSE"], rel=1e-5)


def test_the_segmentation_routine_takes_classes_first():
    torch.manual_seed(0)
    x, y = torch.randn(4, 2, 3, 3), torch.randint(3, (4, 3, 3))
    la = LinearisedLaplace(nn.Conv2d(2, 3, 1), "classification", class_dim=1, num_samples=6)
    la.fit(x, y, em_steps=0, prior_precision=5.0, progress_bar=False)
    all_pixels = {"loss": None, "metric_subsampling_rate": 1.0}
    routine = SegmentationRoutine(RoutineModel(la), num_classes=3, **all_pixels)
    found = evaluated(routine, SimpleNamespace(x=x, y=y))
    own = scores(outcomes(la.predict(x), y))
    assert found["seg/pixAcc"] == pytest.approx(own["accuracy"])


def test_likelihoods_without_a_routine_raise():
    for name, options in (("poisson", {}), ("bernoulli", {}), ("regression", {"ensemble": True})):
        with pytest.raises(TypeError, match="no .*routine for"):
            RoutineModel(fitted(name)[1], **options)
