# %% [markdown]
# # Image classification and OOD detection
#
# A small convolutional network learns the handwritten digits 0 to 7. We fit a posterior to it and
# use it on inputs for which the network should not be certain: rotated digits, shuffled pixels,
# and the digits 8 and 9, which it has never seen.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.functional import auroc

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
unseen = x[y > 7]
x, y = x[y < 8], y[y < 8]
shuffled = torch.randperm(len(x))
train, validation, test = shuffled[:700], shuffled[700:900], shuffled[900:]

# %% [markdown]
# Train the network as usual.

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
for _ in range(30):
    for batch in train[torch.randperm(len(train))].split(50):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()

# %% [markdown]
# ## Fit the posterior
#
# `fit` accepts tensors, a `Dataset` or a `DataLoader`. `print(la)` shows what was fitted, how
# accurate it is, and recommendations.

# %%
la = LinearisedLaplace(model, "classification", num_samples=32)
la.fit(x[train], y[train], progress_bar=False)
print(la)

# %% [markdown]
# With a validation set, `calibrate` improves the probabilities. It contains temperature scaling as
# a special case. If the validation NLL does not improve, predictions stay as they were.

# %%
la.calibrate(x[validation], y[validation])
prediction = la.predict(x[test])
network = model(x[test]).detach().log_softmax(-1)
before, after = la.calibration.before, la.calibration.after
print(f"validation NLL: as fitted {before:.3f}, calibrated {after:.3f}")
print(f"test NLL: network {nn.functional.nll_loss(network, y[test]):.3f}, ", end="")
print(f"posterior {-prediction.log_prob(y[test]).mean():.3f}")
print(f"test accuracy: {(prediction.probs.argmax(-1) == y[test]).float().mean():.3f}")

# %% [markdown]
# ## Out-of-distribution detection
#
# After `calibrate`, `is_ood` flags inputs at a rate of false alarms that you choose. To rank
# inputs, use `-p_value`. We compare it with `epistemic`, the mutual information between label and
# function, and with the entropy of the network's own probabilities, the usual score without a
# posterior. A perfect detector has an AUROC of 1.

# %%
shifted = {
    "rotated by 90°": x[test].rot90(1, (-2, -1)),
    "pixels shuffled": x[test].flatten(1)[:, torch.randperm(64)].view(-1, 1, 8, 8),
    "8 and 9": unseen,
}


def entropy(images):
    probs = model(images).detach().softmax(-1)
    return torch.special.entr(probs).sum(-1)


def epistemic(images):
    return la.predict(images).epistemic


def p_value(images):
    return -la.predict(images).p_value


def detection(score, images):
    scores = torch.cat([score(x[test]), score(images)])
    is_shifted = torch.cat([torch.zeros(len(test)), torch.ones(len(images))]).long()
    return auroc(scores, is_shifted, task="binary").item()


print(f"{'':18}{'AUROC: entropy':>16}{'epistemic':>12}{'-p_value':>12}{'flagged as OOD':>17}")
print(f"{'test digits':18}{'':40}{la.is_ood(x[test], rate=0.05).float().mean():17.0%}")
for name, images in shifted.items():
    line = f"{name:18}{detection(entropy, images):16.3f}{detection(epistemic, images):12.3f}"
    flagged = la.is_ood(images, rate=0.05).float().mean()
    print(f"{line}{detection(p_value, images):12.3f}{flagged:17.0%}")

# %%
shown = {
    "test, lowest": (x[test], False),
    "test, highest": (x[test], True),
    "rotated, highest": (shifted["rotated by 90°"], True),
    "8 and 9, highest": (unseen, True),
}
figure, lines = plt.subplots(4, 10, figsize=(8, 4))
for line, (title, (images, highest)) in zip(lines, shown.items(), strict=True):
    score = epistemic(images)
    for axes, n in zip(line, score.argsort(descending=highest), strict=False):
        axes.imshow(images[n, 0], cmap="gray_r")
        axes.set_title(f"{score[n]:.2f}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    line[0].set_ylabel(title, rotation=0, ha="right")
figure.suptitle("Digits with the lowest and the highest mutual information (nats)")

# %% [markdown]
# ## Joint predictions
#
# A posterior sample is one function, evaluated at all inputs, so predictions of several inputs are
# joint. If five inputs are noisy copies of one digit, usually all or none of them are misclassified:
# `joint_log_prob` accounts for this, and a product of five probabilities does not.

# %%
alone, together = [], []
for n in test[:50]:
    images, labels = x[n] + 0.4 * torch.randn(5, 1, 8, 8), y[n].expand(5)
    alone.append(la.predict(images).log_prob(labels).sum())
    together.append(la.predict(images).joint_log_prob(labels))
print(f"log probability of five labels: as a product {torch.stack(alone).mean():.3f}, ", end="")
print(f"jointly {torch.stack(together).mean():.3f}")

# %% [markdown]
# ## Save and load
#
# `save` writes the posterior without the network.

# %%
la.save("posterior.pt")
loaded = LinearisedLaplace.load("posterior.pt", model)
assert torch.equal(loaded(x[test]), la(x[test]))
os.remove("posterior.pt")
