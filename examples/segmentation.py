# %% [markdown]
# # Segmentation
#
# Segmentation networks return outputs of shape (B, C, H, W), and some pixels are ignored in
# training. Pass `class_dim=1` and a likelihood with an `ignore_index`. The scenes here consist of
# four real digits on a canvas; each pixel of a digit gets the label of the digit. Pixels at the
# edges of digits are ignored in training, fit and evaluation.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from torch_lla_em import Classification, LinearisedLaplace, RiskControl

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
    target = torch.where(ink > 8, named + 1, 0)  # 0 is the background
    target = torch.where((ink > 2) & (ink <= 8), VOID, target)
    return ink[:, None] / 16, target


KNOWN = [0, 1, 2, 3]
train, validation, test = (scenes(n, KNOWN) for n in (40, 20, 50))

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
for _ in range(80):
    for batch in torch.randperm(len(train[0])).split(20):
        optimiser.zero_grad()
        outputs = model(train[0][batch])
        nn.functional.cross_entropy(outputs, train[1][batch], ignore_index=VOID).backward()
        optimiser.step()

# %% [markdown]
# ## Fit the posterior
#
# Batches have the same format as in training. With `validation`, `fit` calls `calibrate` at its
# end.

# %%
la = LinearisedLaplace(model, Classification(ignore_index=VOID), class_dim=1, num_samples=16)
la.fit(
    [(x, y) for x, y in zip(train[0].split(20), train[1].split(20), strict=True)],
    validation=[validation],
    progress_bar=False,
)
print(la)

# %% [markdown]
# ## Predictions for pixels
#
# `probs` has the shape (B, C, H, W); `epistemic` and `entropy` have the shape (B, H, W). The negative log-likelihood
# (NLL) below is that of single pixels under their own probabilities, as `calibrate` and `compare` report it.
# `prediction.log_prob` is the joint log-probability of all pixels of an image, which depend on each other given the data.

# %%
prediction = la.predict(test[0])
print("probs", tuple(prediction.probs.shape), "epistemic", tuple(prediction.epistemic.shape))
counts = test[1] != VOID
right = prediction.probs.argmax(1) == test[1]
ink = counts & (test[1] > 0)
print(f"accuracy {right[counts].float().mean():.3f}, on digits {right[ink].float().mean():.3f}")
plain = model(test[0]).detach()
nll = nn.functional.cross_entropy(plain, test[1], ignore_index=VOID)
print(f"NLL of a pixel: network {nll:.3f}, ", end="")
nll = nn.functional.nll_loss(prediction.log_probs, test[1], ignore_index=VOID)
print(f"posterior {nll:.3f}")

# %% [markdown]
# ## Sets of classes with a bound on what they miss
#
# `RiskControl` chooses the smallest probability of a class in a pixel's set, such that at most 10 % of
# the pixels of digits of an image are missed on average. The bound holds for new images like those of the validation
# set, whatever the quality of the probabilities, if neither the network nor the posterior has seen any of these images.
# (Here `calibrate` has fitted six numbers to the validation set; use other images for an exact bound.) The mean entropy
# is a score of an image: images with a high score have more pixels that are classified wrongly.

# %%
level = 0.1
x, y = validation
control = RiskControl(la, [(x, y.where(y > 0, VOID))], level=level)  # the background does not count
sets = control.sets(prediction.probs)
missed = control.loss(prediction.probs, test[1].where(ink, VOID))
print(f"smallest probability in a set {control.threshold:.3f}, classes in a set ", end="")
print(
    f"{sets.sum(1)[ink].float().mean():.2f}, missed {missed.mean():.3f} (at most {level:g} expected)"
)
score, wrong = prediction.entropy.flatten(1).mean(1), (counts & ~right).flatten(1).float().mean(1)
ranked = wrong[score.argsort()]
half = len(ranked) // 2
print(f"wrong pixels: half with the lowest scores {ranked[:half].mean():.3f}, ", end="")
print(f"half with the highest {ranked[half:].mean():.3f}")

# %% [markdown]
# ## An unseen class
#
# The network has never seen a 7, but assigns one of the known classes to its pixels. The map of
# the epistemic uncertainty shows where not to trust it.

# %%
unseen, truth = scenes(40, [*KNOWN, 7])
epistemic = la.predict(unseen).epistemic
ink, seven = (truth > 0) & (truth != VOID), truth == 8
print(f"mutual information: known digits {epistemic[ink & ~seven].mean():.3f}, ", end="")
print(f"sevens {epistemic[seven].mean():.3f}")
figure, rows = plt.subplots(3, 6, figsize=(9, 4.6))
most = seven.flatten(1).sum(1).argsort(descending=True)[:6]
predicted = la.predict(unseen[most]).probs.argmax(1)
for column, n in zip(range(6), most, strict=True):
    rows[0, column].imshow(unseen[n, 0], cmap="gray_r")
    rows[1, column].imshow(predicted[column], cmap="tab10", vmin=0, vmax=9)
    rows[2, column].imshow(epistemic[n], cmap="magma", vmin=0, vmax=epistemic.max())
for axes in rows.flat:
    axes.set(xticks=[], yticks=[])
for row, title in zip(rows, ("scene", "prediction", "epistemic"), strict=True):
    row[0].set_ylabel(title)
figure.suptitle("Scenes with a 7, predicted classes and epistemic uncertainty")
