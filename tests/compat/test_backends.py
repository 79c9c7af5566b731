"""The posterior inside TorchUncertainty, lightning-uq-box and probly, with their own classes."""

import warnings

import pytest
import torch
from tiny import fitted
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em.compat import Laplace

pytestmark = pytest.mark.filterwarnings("ignore")
OFF = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
OFF |= {"enable_checkpointing": False, "accelerator": "cpu"}


def required(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture
def case_and_la():
    return fitted(em_steps=0, prior_precision=5.0)


def data_module(train, held_out):
    lightning = required("lightning")

    class Data(lightning.LightningDataModule):
        training = True

        def train_dataloader(self):
            return train

        def test_dataloader(self):
            return held_out

        def postprocess_dataloader(self):
            return held_out

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    return lightning, Data()


def test_a_routine_of_torch_uncertainty_calibrates_and_evaluates_a_posterior(case_and_la):
    required("torch_uncertainty")
    from torch_uncertainty.routines import ClassificationRoutine

    from torch_lla_em.compat.torch_uncertainty import LaplacePostProcessing

    case, la = case_and_la
    x, y = case.x + 0.1, case.y  # not the training data, which calibrate refuses
    loader = DataLoader(TensorDataset(x, y), 8)
    lightning, data = data_module(loader, loader)
    method = LaplacePostProcessing(la)
    routine = ClassificationRoutine(la.model, 3, None, post_processing=method)
    (results,) = lightning.Trainer(**OFF).test(routine, data, verbose=False)
    assert la.calibration is not None
    nll = -la.predict(x).log_prob(y).mean()
    network = torch.nn.functional.cross_entropy(la.model(x), y)
    found = {key.split("/")[1]: value for key, value in results.items() if key.endswith("NLL")}
    assert found["post"] == pytest.approx(nll.item(), rel=1e-4)
    assert found["cls"] == pytest.approx(network.item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"pass la\.model"):
        method.set_model(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="classes only"):
        LaplacePostProcessing(fitted("regression", em_steps=0, prior_precision=5.0)[1])


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_methods_of_lightning_uq_box_take_our_laplace(kind, tmp_path):
    required("lightning_uq_box")
    try:
        from lightning_uq_box import uq_methods
    except ImportError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = torch.arange(40) % 2 if kind == "classification" else x[:, :1] + 0.1 * torch.randn(40, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    if kind == "classification":
        model[2] = torch.nn.Linear(4, 2)
    dataset = [{"input": a, "target": b} for a, b in zip(x, y, strict=True)]
    lightning, data = data_module(DataLoader(dataset, 10), DataLoader(dataset, 10))
    la = Laplace(model, kind, "all", "full")
    method = getattr(uq_methods, f"Laplace{kind.capitalize()}")(la)
    trainer = lightning.Trainer(default_root_dir=tmp_path, inference_mode=False, **OFF)
    (results,) = trainer.test(method, data, verbose=False)
    assert results and isinstance(method.laplace_model, Laplace)
    assert method.laplace_model.n_data == 40
    prediction = method.predict_step(x[:5])["pred"]
    assert len(prediction) == 5


def test_the_measures_of_probly_take_samples(case_and_la):
    required("probly")
    from probly.quantification import classification

    case, la = case_and_la
    prediction = la.predict(case.x)
    probs = prediction.functions.softmax(-1).movedim(0, 1).numpy()  # (N, S, C)
    for measure, ours in (
        (classification.total_entropy, prediction.entropy),
        (classification.conditional_entropy, prediction.aleatoric),
        (classification.mutual_information, prediction.epistemic),
    ):
        found = torch.as_tensor(measure(probs, base=2.718281828459045))
        torch.testing.assert_close(found, ours, rtol=0.05, atol=2e-3)
