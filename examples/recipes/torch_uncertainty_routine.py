"""A fitted posterior in the routines of TorchUncertainty: a recipe to copy, for torch-uncertainty 0.13.

    pip install torch-uncertainty timm torch_lla_em
    python examples/recipes/torch_uncertainty_routine.py

The routine calls ``fit`` with the set for post-processing of its data module, on which the posterior is calibrated,
and reports metrics of the network (``test/cls/...``) and of the posterior (``test/post/...``). For a regression return
``{"loc": mean, "scale": variance.sqrt()}`` of ``la(x)`` from the model of the routine instead.
"""

import logging
import warnings

import torch
from torch import Tensor, nn
from torch_uncertainty.post_processing import PostProcessing

from torch_lla_em import LinearisedLaplace


class LaplacePostProcessing(PostProcessing):
    """A fitted posterior of a classifier, for ``ClassificationRoutine(post_processing=...)``."""

    def __init__(self, la: LinearisedLaplace):
        if not la.likelihood.gives_probabilities or la.likelihood.elementwise:
            raise TypeError("Routines of TorchUncertainty post-process classes only.")
        super().__init__(la.model)
        self.la = la

    def set_model(self, model: nn.Module) -> None:
        """Check that the routine has the network of the posterior."""
        if model is not self.la.model:
            raise ValueError(
                "The model of the routine is not that of the posterior: pass la.model."
            )

    def fit(self, dataloader) -> None:
        """Calibrate the posterior on data that were not used in training."""
        self.la.calibrate(dataloader)
        self.trained = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Return log probabilities, which are valid logits, shape (B, C)."""
        return self.la.predict(inputs).log_probs


if __name__ == "__main__":
    import lightning
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty.routines import ClassificationRoutine

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Data(lightning.LightningDataModule):
        """Held-out data in two halves, and the hooks that the routine calls."""

        training = False

        def __init__(self, x: Tensor, y: Tensor):
            super().__init__()
            self.halves = [TensorDataset(x[k::2], y[k::2]) for k in (0, 1)]

        def test_dataloader(self):
            return DataLoader(self.halves[0], 50)

        def postprocess_dataloader(self):
            return DataLoader(self.halves[1], 50)

    torch.manual_seed(0)
    x = torch.randn(300, 2)
    y = (x[:, 0] + 0.5 * torch.randn(300) > 0).long() + (x[:, 1] > 0)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 3))
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()
        optimiser.step()
    la = LinearisedLaplace(model, "classification").fit(x[:100], y[:100], progress_bar=False)
    method = LaplacePostProcessing(la)
    routine = ClassificationRoutine(model, 3, None, post_processing=method)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", **quiet)
    (results,) = trainer.test(routine, Data(x[100:], y[100:]), verbose=False)
    print({name: round(value, 3) for name, value in results.items() if name.endswith("NLL")})
