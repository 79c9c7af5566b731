# %% [markdown]
# # Choosing a prior, and choosing a network
#
# Two questions that look alike. On *one* network, which prior or likelihood? The evidence answers, with
# the training data alone. *Which* network? The evidence is no judge of that: every network's features were
# learnt from the very targets that it would explain. Held-out rows are.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from torch_lla_em import LinearisedLaplace, plot_curve

TINY = "TINY" in os.environ  # for the tests: a few steps, a few samples
K = 4 if TINY else 32
x, y = load_breast_cancer(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, held_out, test = shuffled[:200], shuffled[200:300], shuffled[300:]
x = (x - x[train].mean(0)) / x[train].std(0)


def trained(width, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 2))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10 if TINY else epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimiser.step()
    return model


# %% [markdown]
# ## Priors, by evidence
#
# One network, three priors. `log_marginal_likelihood` comes with its Monte Carlo error, so that one sees
# whether a difference means anything.

# %%
model = trained(20, 60)
priors = {
    "g-prior, one precision": {},
    "plain, one precision": {"g_prior": False},
    "g-prior, a precision a tensor": {"prior": "layerwise"},
}
fits = {}
for name, options in priors.items():
    # the evidence of all three by the same method: a layerwise prior has no variational bound
    la = LinearisedLaplace(model, "classification", num_samples=K, curvature="network", **options)
    fits[name] = la.fit(x[train], y[train], progress_bar=False)
    evidence = la.log_marginal_likelihood()
    print(f"{name:30}log evidence {evidence.value:7.1f} ± {evidence.standard_error:.1f}", end="")
    print(f", γ {la.effective_dim.sum():.1f}")

# %% [markdown]
# With a precision for each tensor, the precision of one may grow without bound, which prunes the tensor;
# here `fit` warns that one does. With one precision, the whole curve over λ follows without another pass over the data. EM stops at its
# maximum.

# %%
la = fits["g-prior, one precision"]
curve = la.curve(torch.logspace(-1, 1, 41) * la.prior_precision.item())
axes = plot_curve(curve)
figure = plt.gcf()
figure.set_size_inches(8, 3.2)
figure.tight_layout()

# %% [markdown]
# ## Networks, by held-out rows
#
# Four networks, from one that has hardly learnt to one that knows its rows by heart.
# `held_out_evidence` is the log predictive of rows that none has seen: the larger the better.

# %%
networks = {
    "5 epochs": (20, 5),
    "60 epochs": (20, 60),
    "2000 epochs": (20, 2000),
    "wide": (200, 60),
}
print(f"{'':14}{'evidence':>10}{'held out':>18}{'test NLL':>10}{'network':>9}")
for name, (width, epochs) in networks.items():
    model = trained(width, epochs)
    la = LinearisedLaplace(model, "classification", num_samples=K).fit(
        x[train], y[train], progress_bar=False
    )
    unseen = la.held_out_evidence([(x[held_out], y[held_out])])
    ours = -la.predict(x[test]).log_prob(y[test]).mean()
    alone = nn.functional.cross_entropy(model(x[test]), y[test])
    print(f"{name:14}{la.log_marginal_likelihood().value:10.1f}", end="")
    print(f"{unseen.value:10.1f} ± {unseen.standard_error:.1f}{ours:12.3f}{alone:9.3f}")

# %% [markdown]
# Hardly trained or trained too long, a network predicts much better with its posterior than alone. The
# evidence orders these four much as the held-out rows do; it need not, as it never saw other rows than
# training did. The standard error of `held_out_evidence` is over rows: with a hundred of them, the last
# three are not told apart.
