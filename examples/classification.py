# %% [markdown]
# # Images, and images of something else
#
# A small network learns handwritten digits from 0 to 7. Error bars for it take two lines; what they
# are good for shows on images it should not be sure of: digits lying on their side, noise, and the
# two digits that it has never seen.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.functional import auroc

from torch_lla_em import LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: a few epochs, a few samples
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
unseen = x[y > 7]
x, y = x[y < 8], y[y < 8]
shuffled = torch.randperm(len(x))
train, held_out, test = shuffled[:700], shuffled[700:900], shuffled[900:]

# %% [markdown]
# Training is yours, and nothing about it changes.

# %%
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 8),
)
optimiser = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(2 if TINY else 30):
    for rows in train[torch.randperm(len(train))].split(50):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()

# %% [markdown]
# ## Error bars
#
# `fit` takes tensors, a `Dataset` or a `DataLoader`. `print(la)` tells what was found.

# %%
la = LinearisedLaplace(model, "classification", num_samples=4 if TINY else 32)
la.fit(x[train], y[train], progress_bar=False)
print(la)

# %% [markdown]
# With a few held-out rows `calibrate` finds how far to go from the network towards the posterior;
# temperature scaling is a special case of what it fits. It says what it gained: here hardly anything,
# since the posterior took its curvature where it predicts itself.

# %%
la.calibrate(x[held_out], y[held_out])
calibrated = la.predict(x[test])
network = model(x[test]).detach().log_softmax(-1)
before, after = la.calibration.before, la.calibration.after
print(f"NLL on held-out images: as fitted {before:.3f}, calibrated {after:.3f}")
print(f"NLL on test images: network {nn.functional.nll_loss(network, y[test]):.3f}, ", end="")
print(f"posterior {-calibrated.log_prob(y[test]).mean():.3f}")
print(f"accuracy: {(calibrated.probs.argmax(-1) == y[test]).float().mean():.3f}")

# %% [markdown]
# ## Which images are unlike the training data?
#
# `epistemic` is the mutual information between the label and the function: what more training data
# would teach. It is large where the functions of the posterior disagree. The entropy of the network's
# own probabilities is what one would use without a posterior. A perfect detector has an AUROC of 1.

# %%
strange = {
    "rotated by 90°": x[test].rot90(1, (-2, -1)),
    "pixels shuffled": x[test].flatten(1)[:, torch.randperm(64)].view(-1, 1, 8, 8),
    "8 and 9": unseen,
}


def entropy(images):
    probs = model(images).detach().softmax(-1)
    return torch.special.entr(probs).sum(-1)


def epistemic(images):
    return la.predict(images).epistemic


def detection(score, images):
    scores = torch.cat([score(x[test]), score(images)])
    is_strange = torch.cat([torch.zeros(len(test)), torch.ones(len(images))]).long()
    return auroc(scores, is_strange, task="binary").item()


print(f"{'AUROC':20}{'entropy of the network':>24}{'epistemic':>12}")
for name, images in strange.items():
    print(f"{name:20}{detection(entropy, images):24.3f}{detection(epistemic, images):12.3f}")

# %%
shown = {
    "test, least": (x[test], False),
    "test, most": (x[test], True),
    "rotated, most": (strange["rotated by 90°"], True),
    "8 and 9, most": (unseen, True),
}
figure, rows = plt.subplots(4, 10, figsize=(8, 4))
for row, (title, (images, most)) in zip(rows, shown.items(), strict=True):
    doubt = epistemic(images)
    for axes, n in zip(row, doubt.argsort(descending=most), strict=False):
        axes.imshow(images[n, 0], cmap="gray_r")
        axes.set_title(f"{doubt[n]:.2f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    row[0].set_ylabel(title, rotation=0, ha="right")
figure.suptitle("Unfamiliar images, by mutual information in nats")

# %% [markdown]
# ## How errors go together
#
# A sample is one function at all inputs, so predictions of several images are joint. Of five noisy
# pictures of the same digit, all are misread if one is: `joint_log_prob` knows that, and a product of
# five probabilities does not.

# %%
alone, together = [], []
for n in test[:50]:
    pictures, labels = x[n] + 0.4 * torch.randn(5, 1, 8, 8), y[n].expand(5)
    alone.append(la.predict(pictures).log_prob(labels).sum())
    together.append(la.joint_log_prob(pictures, labels))
print(f"log probability of five labels: as a product {torch.stack(alone).mean():.3f}, ", end="")
print(f"together {torch.stack(together).mean():.3f}")

# %%
la.save("posterior.pt")  # the posterior, without the network
again = LinearisedLaplace.load("posterior.pt", model)
assert torch.equal(again(x[test]), la(x[test]))
os.remove("posterior.pt")
