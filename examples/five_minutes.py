# %% [markdown]
# # Start in five minutes
#
# All you need is a trained network and its training data. The inputs of this network have two features, so we
# can plot its uncertainty.

# %%
import os

import matplotlib.pyplot as plt
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)


def spirals(count):
    """Return points (count, 2) on three noisy arms of a spiral, and their arms."""
    y = torch.randint(3, (count,))
    radius = 0.3 + 2 * torch.rand(count)
    angle = 2 * torch.pi / 3 * y + 1.2 * radius
    x = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return x + 0.25 * torch.randn(count, 2), y


x, y = spirals(150)
x_val, y_val = spirals(200)
x_test, y_test = spirals(1000)
model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(300):  # your own training
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()

# %% [markdown]
# ## Three lines
#
# `fit` learns the prior precision and draws functions from the posterior. The weights of the network are not
# changed. If you have a validation set, call `calibrate`; otherwise leave this line out.

# %%
la = LinearisedLaplace(model, "classification", num_samples=32)
la.fit(x, y, progress_bar=False)
la.calibrate(x_val, y_val)
print(la)

# %% [markdown]
# ## What you get
#
# A prediction has `probs` and `log_prob`; `epistemic`, the uncertainty that more data would reduce, and `aleatoric`, the rest;
# sets of classes that contain the label with a stated probability; and flags for out-of-distribution (OOD) inputs.

# %%
prediction = la.predict(x_test)
nll = nn.functional.cross_entropy(model(x_test), y_test).item()
print(f"test NLL: network {nll:.3f}, posterior {-prediction.log_prob(y_test).mean():.3f}")
sets = prediction.prediction_set(0.9)
covered = sets.gather(1, y_test[:, None]).float().mean()
print(
    f"sets of classes: {covered:.1%} contain the label, {sets.sum(1).float().mean():.2f} classes each"
)
print(
    f"flagged as OOD: {la.is_ood(x_test, rate=0.05).float().mean():.1%} of the test inputs, ",
    end="",
)
print(f"{la.is_ood(x_test + 5, rate=0.05).float().mean():.1%} of inputs moved by 5")

# %%
side = torch.linspace(-5, 5, 60)
grid = torch.cartesian_prod(side, side)
found = la.predict(grid)
network = model(grid).detach().softmax(-1)
maps = {
    "network: highest probability": network.amax(1),
    "posterior: highest probability": found.probs.amax(1),
    "epistemic uncertainty (nats)": found.epistemic,
}
figure, panels = plt.subplots(1, 3, figsize=(12, 3.4))
for axes, (title, values) in zip(panels, maps.items(), strict=True):
    limits = (0, None) if "nats" in title else (1 / 3, 1)
    image = axes.pcolormesh(side, side, values.view(60, 60).T, vmin=limits[0], vmax=limits[1])
    axes.scatter(*x.T, c=y, s=6, cmap="Set1")
    axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=axes)
figure.tight_layout()

# %% [markdown]
# Far from the data the network is certain of one class, but the posterior is not.
#
# ## Save it
#
# `save` writes the posterior without the network. Other [tutorials](index.md) cover images, regression, language
# models and deployment. [Which method should I use?](../which_method.md) compares the alternatives.

# %%
la.save("posterior.pt")
loaded = LinearisedLaplace.load("posterior.pt", model)
assert torch.equal(loaded(x_test), la(x_test))
os.remove("posterior.pt")
