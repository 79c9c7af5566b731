# %% [markdown]
# # Segmentation: a posterior for every pixel
#
# Networks for maps return (B, C, H, W), and their targets have pixels that do not count. Both are one
# word each: `class_dim=1`, and the `ignore_index` of the likelihood. The scenes here are made of real
# digits: four of them on a canvas, and every inked pixel is to be named. Pixels that are
# neither paper nor ink, as at the edges, are left out of training, fit and score.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from torch_lla_em import Classification, LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: a few scenes, a few samples
torch.manual_seed(0)
VOID = 255
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)


def scenes(count, kinds):
    """Return canvases (count, 1, 16, 16) of four digits each, and the class of every pixel."""
    candidates = torch.isin(labels, torch.tensor(kinds)).nonzero()[:, 0]
    chosen = candidates[torch.randint(len(candidates), (count, 2, 2))]
    ink = images[chosen].permute(0, 1, 3, 2, 4).reshape(count, 16, 16)
    named = labels[chosen][..., None, None].expand(-1, -1, -1, 8, 8)
    named = named.permute(0, 1, 3, 2, 4).reshape(count, 16, 16)
    target = torch.where(ink > 8, named + 1, 0)  # 0 is paper
    target = torch.where((ink > 2) & (ink <= 8), VOID, target)
    return ink[:, None] / 16, target


KNOWN = [0, 1, 2, 3]
train, held_out, test = (scenes(n, KNOWN) for n in ((20, 10, 10) if TINY else (40, 20, 50)))

# %%
model = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(12, 12, 3, padding=2, dilation=2),
    nn.ReLU(),
    nn.Conv2d(12, 12, 3, padding=2, dilation=2),
    nn.ReLU(),
    nn.Conv2d(12, 5, 3, padding=1),
)
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(2 if TINY else 80):
    for rows in torch.randperm(len(train[0])).split(20):
        optimiser.zero_grad()
        outputs = model(train[0][rows])
        nn.functional.cross_entropy(outputs, train[1][rows], ignore_index=VOID).backward()
        optimiser.step()

# %% [markdown]
# ## Fit
#
# A batch is given as for training. Held-out scenes are passed to `fit` here, which calls `calibrate` at
# its end.

# %%
la = LinearisedLaplace(
    model, Classification(ignore_index=VOID), class_dim=1, num_samples=4 if TINY else 16
)
la.fit(
    [(x, y) for x, y in zip(train[0].split(20), train[1].split(20), strict=True)],
    validation=[held_out],
    progress_bar=False,
)
print(la)

# %% [markdown]
# ## Pixels
#
# `probs` is (B, C, H, W), `epistemic` and `entropy` are (B, H, W).

# %%
prediction = la.predict(test[0])
print("probs", tuple(prediction.probs.shape), "epistemic", tuple(prediction.epistemic.shape))
counts = test[1] != VOID
right = prediction.probs.argmax(1) == test[1]
ink = counts & (test[1] > 0)
print(f"accuracy {right[counts].float().mean():.3f}, on ink {right[ink].float().mean():.3f}")
plain = model(test[0]).detach()
nll = nn.functional.cross_entropy(plain, test[1], ignore_index=VOID)
print(f"NLL a pixel: network {nll:.3f}, ", end="")
print(f"posterior {-prediction.log_prob(test[1]).sum() / counts.sum():.3f}")

# %% [markdown]
# ## Something else on the canvas
#
# The network has never seen a 7. It names its pixels all the same; the map of what the posterior's
# functions disagree on shows where not to believe it.

# %%
strange, truth = scenes(40, [*KNOWN, 7])
doubt = la.predict(strange).epistemic
ink, seven = (truth > 0) & (truth != VOID), truth == 8
print(f"mutual information on ink: known digits {doubt[ink & ~seven].mean():.3f}, ", end="")
print(f"sevens {doubt[seven].mean():.3f}")
figure, rows = plt.subplots(3, 6, figsize=(9, 4.6))
most = seven.flatten(1).sum(1).argsort(descending=True)[:6]
named = la.predict(strange[most]).probs.argmax(1)
for column, n in zip(range(6), most, strict=True):
    rows[0, column].imshow(strange[n, 0], cmap="gray_r")
    rows[1, column].imshow(named[column], cmap="tab10", vmin=0, vmax=9)
    rows[2, column].imshow(doubt[n], cmap="magma", vmin=0, vmax=doubt.max())
for axes in rows.flat:
    axes.set(xticks=[], yticks=[])
for row, title in zip(rows, ("scene", "named", "epistemic"), strict=True):
    row[0].set_ylabel(title)
