# %% [markdown]
# # Bayesian optimisation with BoTorch
#
# Which C and γ should a support vector machine have? Each answer costs a cross-validation, so one asks
# where a surrogate expects an improvement. The surrogate here is a small network with its posterior:
# `LaplaceModel` makes it a model of BoTorch, whose samples are functions, joint over candidates and
# differentiable in them.

# %%
import os
import warnings

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.optim import optimize_acqf
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.botorch import LaplaceModel

TINY = "TINY" in os.environ  # for the tests: a single round
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
X, labels = load_breast_cancer(return_X_y=True)


def objective(point):
    """Return the log odds of being right, cross-validated, at (C, γ) on a log scale."""
    C, gamma = 10 ** (6 * point[0].item() - 3), 10 ** (6 * point[1].item() - 5)
    machine = make_pipeline(StandardScaler(), SVC(C=C, gamma=gamma))
    accuracy = cross_val_score(machine, X, labels, cv=5).mean()
    return torch.tensor(accuracy, dtype=torch.float64).logit()


# %% [markdown]
# ## The surrogate
#
# Train, fit, wrap: the outputs are standardised, and σ is learnt. A few dozen weights take a tenth of a
# second a round.

# %%


def surrogate(x, y):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 2e-2, weight_decay=1e-4)
    for _ in range(50 if TINY else 300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(2 * x - 1), y).backward()
        optimiser.step()
    la = LinearisedLaplace(
        nn.Sequential(Centred(), model), "regression", num_samples=64, sigma_noise=0.3
    )
    return LaplaceModel(la.fit(x, y, progress_bar=False))


class Centred(nn.Module):
    def forward(self, x):
        return 2 * x - 1


# %% [markdown]
# ## The search
#
# Five points at random, then twelve where the expected improvement is largest. As many points at random
# stand beside it.

# %%
rounds = 1 if TINY else 12
x = torch.rand(5 + rounds, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
random_values = torch.stack([objective(point) for point in x])
x, values = x[:5], random_values[:5]
for _ in range(rounds):
    y = ((values - values.mean()) / values.std())[:, None]
    model = surrogate(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a search that ends early is still a candidate
        point, _ = optimize_acqf(
            qLogExpectedImprovement(model, best_f=y.max()),
            BOUNDS,
            1,
            num_restarts=4,
            raw_samples=32,
        )
    x = torch.cat([x, point])
    values = torch.cat([values, objective(point[0])[None]])

print(f"best accuracy: {values.max().sigmoid():.4f} by expected improvement, ", end="")
print(f"{random_values.max().sigmoid():.4f} at random, {len(x)} cross-validations each")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, found in {"expected improvement": values, "random": random_values}.items():
    left.plot(range(5, len(x) + 1), found.cummax(0).values[4:].sigmoid(), label=name)
left.set(xlabel="cross-validations", ylabel="best accuracy so far")
left.legend()
grid = torch.linspace(0, 1, 40, dtype=torch.float64)
mesh = torch.cartesian_prod(grid, grid)
deviation = surrogate(x, ((values - values.mean()) / values.std())[:, None]).la.predict(mesh)
shown = deviation.variance.sqrt().view(40, 40).T
image = right.imshow(shown, origin="lower", extent=(-3, 3, -5, 1), aspect="auto")
right.plot(6 * x[:, 0] - 3, 6 * x[:, 1] - 5, "w.")
right.set(xlabel="log10 C", ylabel="log10 γ", title="Deviation of the surrogate")
figure.colorbar(image)
figure.tight_layout()

# %% [markdown]
# On so easy a problem chance does nearly as well, and one search is an anecdote: what this shows is the
# plumbing, and where the surrogate does not know.
