"""A rank that fails, dies or hangs ends all ranks; one that differs is named."""

import os
import random
import shutil
import signal
import time

import pytest
import ranks
import torch
from checkpoints import dying_after
from daily import daily
from models import Bent
from ranks import batches, facts
from tiny import tiny

from torch_lla_em import BlockCG, LinearisedLaplace
from torch_lla_em.runtime.compute import Compute


class Failing:
    """A loader that does something in the middle of its fourth pass."""

    def __init__(self, act, passes=3):
        self.act, self.passes = act, passes

    def __iter__(self):
        every = batches(tiny("classification"))
        yield from every[:2]
        if self.passes == 0:
            self.act()
        self.passes -= 1
        yield from every[2:]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError("the disk is gone")


def fit(loader=None, folder=None, model=None, shard="auto", **options):
    case = tiny("classification")
    loader = batches(case) if loader is None else loader
    known = {"num_samples": 4, "curvature": "network", "compute": Compute(keep_data=False)}
    la = LinearisedLaplace(model or case.model, "classification", **{**known, **options})
    return la.fit(loader, em_steps=3, progress_bar=False, checkpoint=folder, shard=shard)


def fit_with_a_fault(rank, victim, act):
    begin = time.monotonic()
    try:
        fit(Failing(act) if rank == victim else None)
    except Exception as error:
        return error, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_ends_all(victim, tmp_path):
    results = ranks.run(3, fit_with_a_fault, tmp_path, victim, die)
    assert results[victim] is None
    for rank in {0, 1, 2} - {victim}:
        error, seconds = results[rank]
        assert isinstance(error, RuntimeError) and seconds < 30


def test_a_rank_that_raises_ends_all(tmp_path):
    results = ranks.run(2, fit_with_a_fault, tmp_path, 1, fail)
    for rank, (error, seconds) in enumerate(results):
        assert isinstance(error, OSError if rank == 1 else RuntimeError) and seconds < 30
    assert "the disk is gone" in str(results[1][0])


def hang():
    time.sleep(12)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path):
    results = ranks.run(3, fit_with_a_fault, tmp_path, 1, hang, timeout=3)
    for rank in (0, 2):
        error, seconds = results[rank]
        assert isinstance(error, RuntimeError) and seconds < 11


def fit_if_first(rank):
    if rank == 1:
        time.sleep(8)
        return None
    try:
        fit()
    except RuntimeError as error:
        return error


@pytest.mark.slow
def test_a_rank_that_does_not_fit_is_named(tmp_path):
    error, _ = ranks.run(2, fit_if_first, tmp_path, timeout=4)
    assert "Rank 1" in str(error)


def differing(rank):
    """What is said where rank 1 is given something else."""
    case, own = tiny("classification"), rank == 1
    bent = tiny("classification").model
    with torch.no_grad():
        bent[0].bias += 1e-6 * own
    x = case.x + 1.0 * own
    first = case.x[:10], case.y[:10]
    other_sampler = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(case.x[:20], case.y[:20]), sampler=range(rank, 20, 2)
    )
    whole = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, case.y), batch_size=10)
    more = torch.utils.data.TensorDataset(case.x[: 30 - own], case.y[: 30 - own])
    fits = {
        "the model": lambda: fit(model=bent),
        "the seed": lambda: fit(seed=rank),
        "the solver": lambda: fit(solver=BlockCG() if own else None),
        "the data": lambda: fit([(x, case.y)]),
        "the labels of a later batch": lambda: fit([first, (case.x[10:], case.y[10:].roll(rank))]),
        "the dataset": lambda: fit(whole),
        "the length": lambda: fit(torch.utils.data.DataLoader(more, batch_size=10)),
        "the last batch": lambda: fit([(case.x, case.y), (case.x, case.y)][: 2 - own]),
        "the sampler": lambda: fit(other_sampler),
    }
    said = {}
    for name, start in fits.items():
        try:
            start()
        except Exception as error:
            said[name] = error
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return ranks.run(2, differing, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "name, words",
    {
        "the model": "another network weights than rank 0",
        "the seed": "Rank 1 has another seed than rank 0: '1' against '0'",
        "the solver": "Rank 1 has another solver",
        "the data": "A rank has other data than rank 0",
        "the labels of a later batch": "A rank has other data than rank 0",
        "the dataset": "A rank has other data than rank 0",
        "the length": "A rank has other data than rank 0",
        "the last batch": "A rank has other data than rank 0",
        "the sampler": "A DistributedSampler is allowed",
    }.items(),
)
def test_ranks_that_differ_are_refused(name, words, said):
    for errors in said:
        assert type(errors[name]) is ValueError
        assert words in str(errors[name])


def test_other_devices_are_refused(monkeypatch):
    from torch_lla_em.runtime.group import Group
    from torch_lla_em.session import compare_ranks

    class Two(Group):
        def meet(self, value, merge):
            return merge([value, {**value, "device": "cuda"}])

    with pytest.raises(
        ValueError, match="Rank 1 has another device than rank 0: 'cuda' against 'cpu'"
    ):
        compare_ranks(Two(), torch.device("cpu"), {})


def fit_with_checkpoint(rank, folder, shard, saves, curvature="network"):
    with dying_after(saves):
        return facts(fit(folder=folder, shard=shard, curvature=curvature))


CHANGES = [
    ((2, "data"), (3, "data"), "network", (1, 1)),
    ((2, "data"), (1, "data"), "variational", (1, 1)),
    ((1, "data"), (2, "data"), "linear", (1, 1)),
    ((3, "weights"), (2, "weights"), "network", (1, 1)),
    ((2, "weights"), (3, "weights"), "variational", (1, 1)),
    ((2, "weights"), (1, "data"), "linear", (1, 1)),
    ((2, "weights"), (2, "weights"), "linear", (1, 1)),
]


@pytest.mark.parametrize(
    "before, after, curvature, deaths",
    daily(((2, "data"), (1, "data"), "variational", (2,)), rest=CHANGES),
)
def test_fits_go_on_with_other_ranks(before, after, curvature, deaths, tmp_path):
    (before, shard), (after, other) = before, after
    whole, folder = facts(fit(curvature=curvature)), tmp_path / "run"

    def run(size, name, shard, saves):
        return ranks.run(
            size, fit_with_checkpoint, tmp_path / name, folder, shard, saves, curvature
        )

    for saves in deaths:  # after the noise, and after a step of EM
        broken = run(before, f"broken after {saves}", shard, saves)
        assert all(isinstance(found, Exception) for found in broken)
        shutil.rmtree(tmp_path / f"broken after {saves}")
    assert (folder / "state.pt").exists() and list(folder.glob("block-*.pt"))
    resumed = run(after, "resumed", other, 0)
    for fitted in resumed:
        assert fitted["num_data"] == whole["num_data"]
        for name, tensor in whole["state"].items():
            torch.testing.assert_close(fitted["state"][name], tensor, rtol=1e-6, atol=1e-6)
    # the finished fit is there for any number of ranks, which read the data once
    again = run(before, "again", shard, 0)
    for fitted in again:
        assert torch.equal(fitted["state"]["w_lin"], resumed[0]["state"]["w_lin"])


@pytest.mark.slow
def test_whole_vectors_are_not_sliced_at_a_restart(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(InterruptedError), dying_after(2):
        fit(folder=folder)
    for error in ranks.run(2, fit_with_checkpoint, tmp_path / "ranks", folder, "weights", 0):
        assert 'Continue with shard="data"' in str(error)


class Drawn:
    """A loader with an order of its own, drawn anew at every pass."""

    def __init__(self):
        self.order = random.Random(0)

    def __iter__(self):
        every = batches(tiny("classification"))
        return iter(self.order.sample(every, len(every)))


def fit_in_an_order_of_its_own(rank, folder):
    return facts(fit(Drawn(), folder, shard="data"))


@pytest.mark.slow
def test_a_checkpoint_reads_nothing_more_on_one_rank_alone(tmp_path):
    for _ in range(2):  # and none does where the finished one comes back
        found = ranks.run(2, fit_in_an_order_of_its_own, tmp_path / "ranks", tmp_path / "run")
        shutil.rmtree(tmp_path / "ranks")
        assert torch.equal(found[0]["state"]["w_samples"], found[1]["state"]["w_samples"])


def fit_without_a_derivative(rank, shard):
    every = [(x.clone(), y) for x, y in batches(tiny("classification"))]
    every[-1][0][0, 0] = 0.0
    try:
        fit(every, model=Bent(tiny("classification").model, backwards_only=True), shard=shard)
    except Exception as error:
        return len(every) - 1, error


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["data", "weights"])
def test_a_derivative_that_is_not_finite_ends_all_ranks(shard, tmp_path):
    results = ranks.run(2, fit_without_a_derivative, tmp_path, shard)
    assert all(isinstance(error, Exception) for _, error in results)
    told = [(last, error) for last, error in results if isinstance(error, FloatingPointError)]
    assert told and all(f"outputs on batch {last} is not finite" in str(e) for last, e in told)


def fit_where_nothing_can_be_written(rank, folder):
    fit(folder=folder)


def test_unwritable_folders_end_all_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")
    results = ranks.run(2, fit_where_nothing_can_be_written, tmp_path, tmp_path / "file" / "run")
    assert isinstance(results[0], OSError) and "The checkpoint folder" in str(results[0])
    assert isinstance(results[1], Exception)


def test_sharing_columns_is_refused():
    with pytest.raises(ValueError, match='no longer supported: pass shard="data"'):
        fit(shard="columns")
