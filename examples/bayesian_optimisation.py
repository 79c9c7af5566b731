# %% [markdown]
# # Bayesian optimisation with BoTorch
#
# We search for the hyperparameters C and γ of a support vector machine. Each evaluation is a
# cross-validation, so we use a surrogate model to choose the next point. The surrogate is a small
# network with its posterior: `LaplaceModel` turns it into a BoTorch model, whose samples are joint
# over candidates and differentiable.

# %%
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

from torch_lla_em import LinearisedLaplace, Regression
from torch_lla_em.integrations.botorch import LaplaceModel

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
X, labels = load_breast_cancer(return_X_y=True)


def objective(point):
    """Return the cross-validated accuracy, in log odds, at (C, γ) on a log scale."""
    C, gamma = 10 ** (6 * point[0].item() - 3), 10 ** (6 * point[1].item() - 5)
    machine = make_pipeline(StandardScaler(), SVC(C=C, gamma=gamma))
    accuracy = cross_val_score(machine, X, labels, cv=5).mean()
    return torch.tensor(accuracy, dtype=torch.float64).logit()


# %% [markdown]
# ## The surrogate
#
# Train a network on the evaluations so far, fit its posterior, and wrap it. This takes a fraction
# of a second per round. The targets are standardised, and the observation noise is learnt.

# %%


def surrogate(x, y):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 2e-2, weight_decay=1e-4)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(2 * x - 1), y).backward()
        optimiser.step()
    la = LinearisedLaplace(nn.Sequential(Centred(), model), Regression(0.3), num_samples=64)
    return LaplaceModel(la.fit(x, y, progress_bar=False))


class Centred(nn.Module):
    def forward(self, x):
        return 2 * x - 1


# %% [markdown]
# ## The search
#
# We start with five random points and add twelve points with the largest expected improvement. For
# comparison, we also evaluate as many random points.

# %%
rounds = 12
x = torch.rand(5 + rounds, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
random_values = torch.stack([objective(point) for point in x])
x, values = x[:5], random_values[:5]
for _ in range(rounds):
    y = ((values - values.mean()) / values.std())[:, None]
    model = surrogate(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # an optimisation that stops early still returns a candidate
        point, _ = optimize_acqf(
            qLogExpectedImprovement(model, best_f=y.max()),
            BOUNDS,
            1,
            num_restarts=4,
            raw_samples=32,
        )
    x = torch.cat([x, point])
    values = torch.cat([values, objective(point[0])[None]])

print(f"best accuracy after {len(x)} cross-validations: ", end="")
print(f"expected improvement {values.max().sigmoid():.4f}, ", end="")
print(f"random search {random_values.max().sigmoid():.4f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, found in {"expected improvement": values, "random search": random_values}.items():
    left.plot(range(5, len(x) + 1), found.cummax(0).values[4:].sigmoid(), label=name)
left.set(xlabel="cross-validations", ylabel="best accuracy so far")
left.legend()
grid = torch.linspace(0, 1, 40, dtype=torch.float64)
mesh = torch.cartesian_prod(grid, grid)
deviation = surrogate(x, ((values - values.mean()) / values.std())[:, None]).la.predict(mesh)
shown = deviation.f_variance.sqrt().view(40, 40).T
image = right.imshow(shown, origin="lower", extent=(-3, 3, -5, 1), aspect="auto")
right.plot(6 * x[:, 0] - 3, 6 * x[:, 1] - 5, "w.")
right.set(xlabel="log10 C", ylabel="log10 γ", title="Standard deviation of the surrogate")
figure.colorbar(image)
figure.tight_layout()

# %% [markdown]
# This problem is so easy that random search is as good, and a single run proves nothing.
# The example shows how the parts fit together, and the standard deviation of the surrogate shows
# where it needs data.
