# %% [markdown]
# # Calibration and conformal prediction
#
# One network classifies handwritten digits, and another one predicts the progress of a disease. With a validation
# set we calibrate both, and get sets of classes and intervals that contain the target with a stated
# probability. [Calibration and coverage](../calibration.md) has the conditions.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import nn
from torchmetrics.functional.classification import multiclass_calibration_error

from torch_lla_em import LinearisedLaplace, plot

K = 32
torch.manual_seed(0)


def trained(model, loss, x, y, steps):
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model


x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
x += 0.3 * torch.randn(x.shape)  # so that some digits are hard
train, validation, test = torch.randperm(len(x)).split([400, 600, 797])
model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
trained(model, nn.functional.cross_entropy, x[train], y[train], 200)

# %% [markdown]
# ## Calibrated probabilities
#
# The network has overfitted its training set, so its confidence is too high. The fit alone corrects most of
# this. `calibrate` also uses the validation set, and contains temperature scaling as a special case.

# %%
la = LinearisedLaplace(model, "classification", num_samples=K)
la.fit(x[train], y[train], progress_bar=False)


def scores(name, log_probs):
    nll = nn.functional.nll_loss(log_probs, y[test])
    ece = multiclass_calibration_error(log_probs.exp(), y[test], 10, n_bins=15)
    print(f"{name:24}NLL {nll:.3f}  ECE {ece:.3f}")


scores("network", model(x[test]).detach().log_softmax(-1))
scores("posterior, as fitted", la.predict(x[test]).log_probs)
la.calibrate(x[validation], y[validation])
scores("posterior, calibrated", la.predict(x[test]).log_probs)
figure, axes = plt.subplots(figsize=(4.5, 3.6))
plot.reliability(la, (x[test], y[test]), axes)
figure.tight_layout()

# %% [markdown]
# ## Sets of classes
#
# `prediction_set(0.9)` contains the label of nine new images in ten, whatever the quality of the
# probabilities. An image with a set of several classes can go to a person.

# %%
prediction = la.predict(x[test])
for level in (0.9, 0.95, 0.99):
    sets = prediction.prediction_set(level)
    covered = sets.gather(1, y[test][:, None]).float().mean()
    single = (sets.sum(1) == 1).float().mean()
    print(f"level {level:.0%}: coverage {covered:.1%}, ", end="")
    print(f"{sets.sum(1).float().mean():.2f} classes a set, one class for {single:.0%}")

# %% [markdown]
# The guarantee holds on average over images. `check` shows where the coverage is lower, and
# `groups="classes"` gives every class a threshold of its own.

# %%
print(la.check(x[test], y[test], level=0.95))
la.calibrate(x[validation], y[validation], groups="classes")
sets = la.predict(x[test]).prediction_set(0.95)
inside = sets.gather(1, y[test][:, None])[:, 0].float()
worst = min(inside[y[test] == c].mean().item() for c in range(10))
print(f"\na threshold for each class: coverage {inside.mean():.1%}, of the worst class {worst:.1%}")

# %% [markdown]
# ## Prediction intervals
#
# For continuous targets `interval(level)` has the same guarantee. It is wider where the posterior is less
# certain. With 71 examples in the calibration set (half of the validation set), the coverage varies between validation
# sets with a standard deviation of 3.6 %.

# %%
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
train, validation, test = torch.randperm(len(x)).split([150, 142, 150])
x, y = x / x[train].std(0), ((y - y[train].mean()) / y[train].std())[:, None]
model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
trained(model, nn.functional.mse_loss, x[train], y[train], 150)
la = LinearisedLaplace(model, "regression", num_samples=K)
la.fit(x[train], y[train], progress_bar=False)
residuals = (y[train] - model(x[train])).detach().std()
centre, width = model(x[test]).detach(), 1.645 * residuals
bounds = {"network, training residuals": (centre - width, centre + width)}
bounds["posterior, as fitted"] = la.predict(x[test]).credible_interval(0.9)
la.calibrate(x[validation], y[validation])
bounds["conformal, after calibrate"] = la.predict(x[test]).interval(0.9)
for name, (lower, upper) in bounds.items():
    covered = ((y[test] > lower) & (y[test] < upper)).float().mean()
    print(f"{name:30}coverage of 90 % intervals {covered:.1%}, width {(upper - lower).mean():.2f}")
