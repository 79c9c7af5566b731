# %% [markdown]
# # Regression with prediction intervals
#
# From ten measurements of 442 patients we predict the progress of their diabetes after one year, with an interval
# for each prediction. The data set is small, so we learn the observation noise from the training data.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
shuffled = torch.randperm(len(x))
train, test = shuffled[:300], shuffled[300:]
x = (x - x[train].mean(0)) / x[train].std(0)
centre, unit = y[train].mean(), y[train].std()
y = ((y - centre) / unit)[:, None]  # shape (N, 1), like the network's outputs

model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-2)
for _ in range(300):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(x[train]), y[train]).backward()
    optimiser.step()

# %% [markdown]
# ## Fit the posterior
#
# EM learns the observation noise σ together with the prior precision, from the training data. σ is
# in the units of the targets.

# %%
la = LinearisedLaplace(model, "regression", num_samples=64)
la.fit(x[train], y[train], progress_bar=False)
print(la)

# %% [markdown]
# ## Prediction intervals
#
# `la(x)` returns mean and variance; the variance includes the observation noise. `la.predict(x)`
# also has its two parts: `.epistemic` is the variance that more data would reduce, and `.aleatoric` is
# the variance of the observation noise. `.credible_interval` includes both.

# %%
prediction = la.predict(x[test])
lower, upper = prediction.credible_interval(0.9)
print(prediction)
for n in test[:3]:
    low, high = la.predict(x[n : n + 1]).credible_interval(0.9)
    print(f"target {y[n, 0] * unit + centre:5.0f}, ", end="")
    print(f"90 % interval {low.item() * unit + centre:5.0f} to {high.item() * unit + centre:5.0f}")

# %% [markdown]
# ## Coverage
#
# A common alternative takes the network's prediction plus and minus the standard deviation of its
# *training* residuals. These intervals are too narrow, because the network was fitted to the
# training data.

# %%
levels = torch.linspace(0.05, 0.95, 19)
residuals = (y[train] - model(x[train])).detach().std()


def coverage(bounds):
    return torch.stack(
        [((y[test] > low) & (y[test] < high)).float().mean() for low, high in bounds]
    )


ours = coverage([prediction.credible_interval(level.item()) for level in levels])
normal = torch.distributions.Normal(model(x[test]).detach(), residuals)
naive = coverage([(normal.icdf((1 - level) / 2), normal.icdf((1 + level) / 2)) for level in levels])
print(f"coverage of 90 % intervals: posterior {ours[-2]:.0%}, training residuals {naive[-2]:.0%}")
print(f"test NLL: posterior {-prediction.log_prob(y[test]).mean():.3f}, ", end="")
print(f"training residuals {-normal.log_prob(y[test]).mean():.3f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
left.plot(levels, ours, "o-", label="posterior")
left.plot(levels, naive, "s--", label="training residuals")
left.plot([0, 1], [0, 1], "k:")
left.set(xlabel="level", ylabel="coverage of test data", title="Coverage of intervals")
left.legend()
order = prediction.expectation[:, 0].argsort()
middle = prediction.expectation[order, 0]
right.fill_between(range(len(test)), lower[order, 0], upper[order, 0], alpha=0.3, label="90 %")
right.plot(middle, label="mean")
right.plot(y[test][order, 0], "k.", markersize=3, label="target")
right.set(xlabel="test examples, by mean", ylabel="standardised target", title="90 % intervals")
right.legend()
figure.tight_layout()

# %% [markdown]
# The posterior's intervals have about the right coverage here. They can still be too narrow for networks
# that have overfitted more, because σ is learnt from data that the network was fitted to. With a validation set,
# `la.calibrate(loader)` corrects this, and `la.predict(x).interval(0.9)` has [guaranteed
# coverage](../calibration.md).
#
# ## Far from the data
#
# A typical patient is about three units from the mean of the standardised data. Further away the
# noise stays the same and the epistemic standard deviation grows.

# %%
direction = nn.functional.normalize(torch.randn(10), dim=0)
for distance in (0, 3, 10, 30):
    far = la.predict(distance * direction[None])
    print(f"distance {distance:3}: noise {far.aleatoric.sqrt().item():.2f}, ", end="")
    print(f"epistemic standard deviation {far.epistemic.sqrt().item():.2f}")
