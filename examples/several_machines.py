# %% [markdown]
# # Several machines, and fits that resume
#
# A fit of a large network on many examples can take as long as its training. Like a training, it
# can be resumed from a checkpoint and distributed over several machines. Neither changes the
# posterior. This script runs alone and under `torchrun`.

# %%
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import Compute, LinearisedLaplace

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")  # "nccl" on GPUs
first = not dist.is_initialized() or dist.get_rank() == 0

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
train = torch.utils.data.Subset(data, range(1000))
validation = torch.utils.data.Subset(data, range(1000, 1300))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
folder = sys.argv[1] if dist.is_initialized() else tempfile.mkdtemp()
weights, fitted = os.path.join(folder, "network.pt"), os.path.join(folder, "posterior.pt")
if dist.is_initialized():  # all processes need exactly the same network
    model.load_state_dict(torch.load(weights))
else:
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(
            model(data.tensors[0][:1000]), data.tensors[1][:1000]
        ).backward()
        optimiser.step()
    torch.save(model.state_dict(), weights)


def posterior(**compute):
    compute = Compute(keep_data=False, **compute)  # the loader is read in every pass
    return LinearisedLaplace(model, "classification", num_samples=16, compute=compute)


# %% [markdown]
# ## Checkpoints
#
# `checkpoint` is a folder that stores the state of the fit. If the process is killed, the
# same call resumes. Here a loader raises an error at its thirtieth batch.

# %%


class Breaking:
    """A loader that raises an error once."""

    def __init__(self, loader, after):
        self.loader, self.left = loader, after

    def __iter__(self):
        for batch in self.loader:
            self.left -= 1
            if self.left == 0:
                raise OSError("file system unavailable")
            yield batch


if not dist.is_initialized():
    loader = Breaking(DataLoader(train, 50), after=30)
    states = os.path.join(folder, "checkpoint")
    try:
        posterior(checkpoint=states).fit(loader, progress_bar=False)
    except OSError as error:
        kept = sum(os.path.getsize(os.path.join(states, name)) for name in os.listdir(states))
        print(f"{error}; the checkpoint has {kept / 1e6:.1f} MB")
    again = posterior(checkpoint=states).fit(loader, progress_bar=False)
    whole = posterior().fit(DataLoader(train, 50), progress_bar=False)
    print(f"prior precision: resumed fit {again.prior_precision:.6g}, ", end="")
    print(f"uninterrupted fit {whole.prior_precision:.6g}")

# %% [markdown]
# ## Distributed fits
#
# Under `torchrun`, call `fit` on every rank with the same arguments. The ranks share the data, and
# every rank ends with the whole posterior. All ranks call `calibrate`; one rank saves.

# %%
if dist.is_initialized():
    la = posterior().fit(DataLoader(train, 50), progress_bar=False)
    la.calibrate(DataLoader(validation, 100))
    if first:
        la.save(fitted)
    dist.destroy_process_group()

# %% [markdown]
# We use two processes on this machine. For several machines, run the same command on each, with
# `--nnodes` and `--rdzv-endpoint`.

# %%
if not dist.is_torchelastic_launched():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([sys.executable, *command, __file__, folder], check=True)
    shared = LinearisedLaplace.load(fitted, model)
    whole.calibrate(DataLoader(validation, 100))
    difference = (shared(data.tensors[0][1300:]) - whole(data.tensors[0][1300:])).abs().max()
    print(
        f"prior precision: two processes {shared.prior_precision:.6g}, one {whole.prior_precision:.6g}; ",
        end="",
    )
    print(f"largest difference of probabilities {difference:.1e}")

# %% [markdown]
# See also [several GPUs and machines](../cost.md#distributed-fits-torchrun-several-gpus-and-machines) and
# [checkpoints](../cost.md#checkpoints).
