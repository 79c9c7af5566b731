# %% [markdown]
# # Long runs, on several machines
#
# A fit of a large network on large data takes as long as a training, so it is given what a training is
# given: a checkpoint that survives a kill, and more machines. Neither changes the posterior. The same
# script runs alone and under `torchrun`.

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

from torch_lla_em import LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: a few steps, a few samples
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")  # "nccl" on cards
first = not dist.is_initialized() or dist.get_rank() == 0

torch.set_num_threads(
    1
)  # so that all processes train the very same network, as loading one would give
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
rows = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
train = torch.utils.data.Subset(rows, range(1000))
held_out = torch.utils.data.Subset(rows, range(1000, 1300))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # your trained network
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(10 if TINY else 100):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(rows.tensors[0][:1000]), rows.tensors[1][:1000]).backward()
    optimiser.step()


def posterior():
    return LinearisedLaplace(model, "classification", num_samples=4 if TINY else 16)


# %% [markdown]
# ## Killed, and gone on
#
# `checkpoint` is a folder that keeps the state after every EM step. A signal, a crash or a batch
# system may end the process at any moment; the same call goes on. Here a loader breaks in its fiftieth
# batch.

# %%


class Breaking:
    """A loader that breaks once."""

    def __init__(self, loader, after):
        self.loader, self.left = loader, after

    def __iter__(self):
        for batch in self.loader:
            self.left -= 1
            if self.left == 0:
                raise OSError("the file system is gone")
            yield batch


if not dist.is_initialized():
    loader = Breaking(DataLoader(train, 50), after=50)
    folder = tempfile.mkdtemp()
    try:
        posterior().fit(loader, checkpoint=folder, progress_bar=False)
    except OSError as error:
        kept = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
        print(f"{error}; {kept / 1e6:.1f} MB are saved")
    again = posterior().fit(loader, checkpoint=folder, progress_bar=False)
    whole = posterior().fit(DataLoader(train, 50), progress_bar=False)
    print(f"λ gone on {again.prior_precision:.6g}, in one go {whole.prior_precision:.6g}")

# %% [markdown]
# ## Several processes
#
# Under `torchrun`, `fit` is called on every rank with the same arguments. It shares the data out (and, with
# `shard="weights"`, slices of all vectors), and every rank ends with the posterior of one process. All
# ranks call `calibrate`; one saves.

# %%
if dist.is_initialized():
    la = posterior().fit(DataLoader(train, 50), progress_bar=False)
    la.calibrate(DataLoader(held_out, 100))
    if first:
        la.save(sys.argv[1])
    dist.destroy_process_group()

# %% [markdown]
# Two processes of this machine stand for two machines: the command below is what each would run, with
# `--nnodes` and `--rdzv-endpoint` beside it.

# %%
if not dist.is_torchelastic_launched():
    path = os.path.join(folder, "posterior.pt")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, path]
    subprocess.run([sys.executable, *command], check=True, stderr=subprocess.DEVNULL)
    shared = LinearisedLaplace.load(path, model)
    whole.calibrate(DataLoader(held_out, 100))
    difference = (shared(rows.tensors[0][1300:]) - whole(rows.tensors[0][1300:])).abs().max()
    print(
        f"λ of two processes {shared.prior_precision:.6g}, of one {whole.prior_precision:.6g}; ",
        end="",
    )
    print(f"probabilities differ by {difference:.1e} at most")

# %% [markdown]
# What is shared out how, what happens to a rank that fails, and what a pass costs over more of them:
# [several cards and machines](../scaling.md). What a folder holds and when it is refused:
# [long runs](../long_runs.md).
