"""The examples of laplace-torch's documentation, with the import changed, beside the package itself."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import compat
from torch_lla_em.compat import Laplace, marglik_training
from torch_lla_em.compat.enums import HessianStructure, Likelihood, PredType, SubsetOfWeights


def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("laplace")


def sinusoid():
    """The data of the example of a regression, fewer of them."""
    torch.manual_seed(711)
    x = (torch.rand(30) * 8).unsqueeze(-1).double()
    y = torch.sin(x) + torch.randn_like(x) * 0.3
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return model, DataLoader(TensorDataset(x, y), batch_size=30)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_training_by_the_marginal_likelihood_takes_the_same_steps(kind):
    model, loader = sinusoid()
    if kind == "classification":
        x = loader.dataset.tensors[0]
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 4).long()), batch_size=30)
        model[2] = nn.Linear(5, 2).double()
    options = {"hessian_structure": "full", "prior_structure": "scalar", "n_epochs": 8}
    options |= {"optimizer_kwargs": {"lr": 1e-2}, "n_hypersteps": 3, "temperature": 0.8}
    reference, other = theirs(), deepcopy(model)
    backend = reference.curvature.CurvlinopsGGN
    la, model, margliks, losses = marglik_training(model, loader, kind, **options, backend=backend)
    found = reference.marglik_training(other, loader, kind, **options, backend=backend)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(margliks, found[2], **near)
    torch.testing.assert_close(losses, found[3], **near)
    precisions = (each.prior_precision.double() for each in (la, found[0]))
    torch.testing.assert_close(*precisions, **near)
    for one, same in zip(model.parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(one, same, **near)
    with pytest.raises(ValueError, match='prior_structure="scalar"'):
        marglik_training(model, loader, kind)


class Reward(nn.Module):
    """The reward model of the documentation, smaller: two logits of a pair, or one of an input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        if x.dim() == 3:
            return self.net(x.reshape(-1, 3)).reshape(len(x), 2)
        return self.net(x)


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_a_reward_model_runs():
    torch.manual_seed(0)
    model = Reward().double()
    x, y = torch.randn(20, 2, 3).double(), torch.arange(20) % 2
    loader, new = DataLoader(TensorDataset(x, y), batch_size=3), torch.randn(5, 3).double()
    options = {"likelihood": "reward_modeling", "subset_of_weights": "all"}
    reference = theirs().Laplace(model, **options, hessian_structure="full")
    reference.fit(loader)
    ours = Laplace(model, **options, num_samples=len(reference.mean))
    ours.fit(loader)
    covariance = reference.posterior_covariance
    basis = len(covariance) ** 0.5 * torch.linalg.cholesky(covariance).T
    ours.posterior.load_state_dict({**ours.posterior.state_dict(), "w_samples": basis})
    for one, same in zip(ours(new), reference(new), strict=True):
        torch.testing.assert_close(one, same.view_as(one), rtol=1e-5, atol=1e-6)
    one, same = (la.log_marginal_likelihood() for la in (ours, reference))
    torch.testing.assert_close(one, same.double(), rtol=1e-5, atol=0)
    ours.optimize_prior_precision()
    mean, variance = ours(new)
    assert mean.shape == (5, 1) and variance.shape == (5, 1, 1)
    with pytest.raises(ValueError, match='only "marglik"'):
        ours.optimize_prior_precision(method="gridsearch", val_loader=loader)


def test_the_example_of_expected_improvement_runs_for_the_linearised_network():
    torch.manual_seed(123)
    model = nn.Sequential(nn.Linear(2, 10), nn.GELU(), nn.Linear(10, 1))
    loader = DataLoader(TensorDataset(torch.randn(5, 2), torch.randn(5, 1)), batch_size=3)
    la = Laplace(
        model,
        Likelihood.REGRESSION,
        subset_of_weights=SubsetOfWeights.ALL,
        hessian_structure=HessianStructure.KRON,
        enable_backprop=True,
    )
    la.fit(loader)
    la.optimize_prior_precision(PredType.GLM)
    x = torch.randn(10, 2, requires_grad=True)
    samples = la.functional_samples(x, pred_type=PredType.GLM, n_samples=10)
    improvement = (samples - 0.123).clamp(0.0).mean(0)
    (gradient,) = torch.autograd.grad(improvement.sum(), x)
    assert improvement.shape == (10, 1) and gradient.abs().max() > 0
    with pytest.raises(ValueError, match='only "glm"'):
        la.functional_samples(x, pred_type=PredType.NN)


def test_the_example_of_gaussian_processes_uses_all_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    options = {"subset_of_weights": "all", "prior_precision": 2.0}
    gp = Laplace(
        model,
        "classification",
        hessian_structure="gp",
        independent_outputs=True,
        n_subset=10,
        **options,
    )
    full = Laplace(model, "classification", hessian_structure="full", **options)
    for la in (gp, full):
        la.fit(loader)
    torch.testing.assert_close(gp(x), full(x))


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_gpt2_with_lora_runs():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    class MyGPT2(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
            config = transformers.GPT2Config(**sizes, pad_token_id=0, num_labels=2)
            self.hf_model = transformers.GPT2ForSequenceClassification(config)

        def forward(self, data):
            ids, mask = data["input_ids"], data["attention_mask"]
            return self.hf_model(input_ids=ids, attention_mask=mask).logits

    torch.manual_seed(0)
    ids, labels = torch.randint(1, 20, (8, 6)), torch.arange(8) % 2
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    model = MyGPT2().eval()
    for parameter in model.hf_model.parameters():
        parameter.requires_grad = False
    for parameter in model.hf_model.score.parameters():
        parameter.requires_grad = True
    adapters = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["c_attn"], lora_dropout=0.1)
    for network in (model, peft.get_peft_model(MyGPT2(), adapters).eval()):
        la = Laplace(
            network, likelihood="classification", subset_of_weights="all", hessian_structure="diag"
        )
        la.fit([batch])
        la.optimize_prior_precision()
        assert la(batch).shape == (8, 2)
        assert la.n_params == sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_classes_of_laplace_torch_are_named_with_their_replacement():
    for name in theirs().__all__:
        if not name.endswith("Laplace") or name.startswith(
            ("Base", "Parametric", "LLL", "Laplace")
        ):
            continue
        with pytest.raises(ImportError, match=r"use (Laplace|LinearisedLaplace)\(model"):
            getattr(compat, name)
    with pytest.raises(ImportError, match='"last_layer", "kron"'):
        exec("from torch_lla_em.compat import KronLLLaplace")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compat.nothing
