# %% [markdown]
# # Serving a distilled network
#
# A prediction of a posterior takes many forward passes. `distil` trains a student that predicts the same in one:
# probabilities, epistemic uncertainty and the OOD score. We compare both, guarantee the student's error
# rates, monitor its inputs, and export it as a program that needs neither this library nor the network's code.
# [Predictions in one forward pass](../serving.md#distillation) has the measurements.

# %%
import os
import statistics
import time

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
train, validation, conformal, test = torch.randperm(len(x)).split([800, 200, 300, 497])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimiser.step()
la = LinearisedLaplace(model, "classification", num_samples=32)
la.fit(x[train], y[train], progress_bar=False)
la.calibrate(x[validation], y[validation])

# %% [markdown]
# ## Distil
#
# The student learns from inputs without labels. Pass as many kinds of inputs as you expect in use. More inputs
# are generated from them, here also by rotating the images.

# %%
images = torch.cat([x[train], x[validation]])


def turned(x):
    """Return images rotated by 90°, which are out of distribution."""
    return x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)


student = la.distil(
    images,
    augment=["noise", "swap", turned],
    num_inputs=3000,
    steps=1500,
    progress_bar=False,
)
print(student)

# %% [markdown]
# ## What is kept
#
# We compare the predictions for test images and for rotated test images. The p-values of the student come from examples that
# neither `calibrate` of the posterior nor `distil` has seen, so its rate of false alarms is guaranteed.

# %%
student.calibrate(x[conformal], y[conformal])
rotated = turned(x[test])
for name, predictor in {"posterior": la, "student": student}.items():
    prediction = predictor.predict(x[test])
    flagged = [predictor.predict(z).is_ood(0.05).float().mean() for z in (x[test], rotated)]
    print(f"{name:11}test NLL {-prediction.log_prob(y[test]).mean():.3f}, ", end="")
    print(f"flagged: test {flagged[0]:.1%}, rotated {flagged[1]:.1%}")
nll = nn.functional.cross_entropy(model(x[test]), y[test]).item()
print(f"{'network':11}test NLL {nll:.3f}")

# %% [markdown]
# ## Monitor
#
# A monitor is given the inputs in use, and raises an alarm once their distribution differs from that of the examples of
# `calibrate`. The probability that it ever raises a false alarm is at most 0.001, however long the student is in use.

# %%
monitor = student.monitor(rate=0.001)
print("alarm after the test images:", monitor.update(x[test]))
print("alarm after ten rotated ones:", monitor.update(rotated[:10]))
print(monitor)

# %% [markdown]
# ## Export
#
# One ONNX program returns all outputs by name, including sets of classes at a level of 95 %.

# %%
student.export(x[test], "student.onnx", level=0.95)
session = onnxruntime.InferenceSession("student.onnx")
(name,) = [given.name for given in session.get_inputs()]
outputs = [given.name for given in session.get_outputs()]
answers = dict(zip(outputs, session.run(outputs, {name: x[test].numpy()}), strict=True))
print({key: value.shape for key, value in answers.items()})
difference = np.abs(answers["probs"] - student(x[test]).detach().numpy()).max()
print(f"largest difference to the student: {difference:.0e}")


# %% [markdown]
# ## Time of one request
#
# We compare the median times of calls with one image on one thread.


# %%
def milliseconds(call, count=200):
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


torch.set_num_threads(1)
one = x[test[:1]]
with torch.no_grad():
    print(f"network              {milliseconds(lambda: model(one)):.3f} ms")
    print(f"student              {milliseconds(lambda: student(one)):.3f} ms")
    print(f"student, all outputs {milliseconds(lambda: student.predict(one).p_value):.3f} ms")
    print(f"posterior            {milliseconds(lambda: la(one)):.3f} ms")
feed = {name: one.numpy()}
print(f"ONNX, all outputs    {milliseconds(lambda: session.run(outputs, feed)):.3f} ms")
os.remove("student.onnx")
