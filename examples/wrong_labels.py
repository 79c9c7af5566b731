# %% [markdown]
# # Wrong labels in training data
#
# A network that is trained long enough learns wrong labels as well. Its posterior still finds most of them
# improbable, so `la.suspicious(x, y)` finds them in the training data themselves, without further training,
# folds or a validation set. [Wrong labels](../wrong_labels.md) has the measurements.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, plot

torch.manual_seed(0)


def replaced(y, share):
    """Return labels of which a share is replaced by another class, and which ones are."""
    wrong = torch.rand(len(y)) < share
    others = torch.randint(1, int(y.max()) + 1, y.shape)
    return torch.where(wrong, (y + others) % (int(y.max()) + 1), y), wrong


def train(model, x, y, steps):
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


# %% [markdown]
# ## Digits
#
# A twentieth of the labels is replaced. After 400 steps the CNN has learnt the wrong labels as well.

# %%
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, y = x[:1000].float().view(-1, 1, 8, 8) / 16, y[:1000]
given, wrong = replaced(y, 0.05)
model = nn.Sequential(
    *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(96, 10)),
)
train(model, x, given, 400)
with torch.no_grad():
    learnt = model(x).argmax(1) == given
print(
    f"{wrong.sum()} labels are wrong, and the network has learnt {(learnt & wrong).sum()} of them"
)
la = LinearisedLaplace(model, "classification").fit(x, given, progress_bar=False)
record = la.suspicious(x, given)
print(record)
print(
    f"in the mask: {(record.mask & wrong).sum()} that are wrong, {(record.mask & ~wrong).sum()} that are right"
)

# %% [markdown]
# The figure shows the most suspicious images, with their labels and those that the posterior would give.

# %%
plot.suspicious(la, [(x, given)])
plt.show()

# %% [markdown]
# ## A table
#
# The labels are diagnoses of tumours, a tenth of which is replaced. The classes overlap, so some right diagnoses are suspicious too.

# %%
x, y = (torch.tensor(part) for part in load_breast_cancer(return_X_y=True))
x = ((x - x.mean(0)) / x.std(0)).float()
given, wrong = replaced(y, 0.1)


def new():
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 2))


la = LinearisedLaplace(train(new(), x, given, 100), "classification")
record = la.fit(x, given, progress_bar=False).suspicious(x, given)
print(record)
first = wrong[record.order[: int(wrong.sum())]].double().mean()
print(f"wrong among the {wrong.sum()} first: {first:.0%}")

# %% [markdown]
# ## With folds
#
# If you train by folds, each example can be judged by the network that has not seen it.

# %%
ensemble = LaplaceEnsemble.from_folds(
    lambda x, y: train(new(), x, y, 100), x, given, progress_bar=False
)
record = ensemble.suspicious(x, given, folds=ensemble.folds)
first = wrong[record.order[: int(wrong.sum())]].double().mean()
print(f"wrong among the {wrong.sum()} first: {first:.0%}")
