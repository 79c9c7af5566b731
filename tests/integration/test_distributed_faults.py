"""A rank that fails, dies or hangs ends all ranks; one that differs is named."""

import os
import shutil
import signal
import time

import pytest
import ranks
import torch
from checkpoints import dying_after
from daily import daily
from loaders import InAnyOrder, Loader, batches
from models import Bent
from ranks import facts
from tiny import fitted, tiny
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, Compute
from torch_lla_em.runtime.group import Group
from torch_lla_em.session import compare_ranks


def fit(loader=None, folder=None, **options):
    loader = batches(tiny("classification")) if loader is None else loader
    known = {"em_steps": 3, "curvature": "network", "compute": Compute(keep_data=False)}
    return fitted("classification", loader, checkpoint=folder, **{**known, **options})[1]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError("the disk is gone")


def hang():
    time.sleep(30)


def fit_with_a_fault(rank, victim, act):
    """Return the error of a fit, of which one rank acts in its fourth pass, and its seconds."""
    begin, ours = time.monotonic(), batches(tiny("classification"))
    try:
        fit(Loader(ours, lambda number: act() if (rank, number) == (victim, 4) else None))
    except Exception as error:
        return error, time.monotonic() - begin


@pytest.mark.parametrize("act, victim", daily((fail, 1), rest=[(die, 0), (die, 2), (hang, 1)]))
@pytest.mark.slow
def test_a_rank_that_fails_dies_or_hangs_ends_all(act, victim, tmp_path):
    timeout = 3 if act is hang else 60
    results = ranks.run(3, fit_with_a_fault, tmp_path, victim, act, timeout=timeout)
    for rank in {0, 1, 2} - {victim}:
        error, seconds = results[rank]
        assert isinstance(error, RuntimeError) and seconds < (25 if act is hang else 30)
    if act is die:
        assert results[victim] is None
    if act is fail:
        assert isinstance(results[victim][0], OSError)
        assert "the disk is gone" in str(results[victim][0])


def error_of(call):
    try:
        call()
    except Exception as error:
        return error


def fit_if_first(rank):
    return time.sleep(20) if rank else error_of(fit)


@pytest.mark.slow
def test_a_rank_that_does_not_fit_is_named(tmp_path):
    error, _ = ranks.run(2, fit_if_first, tmp_path, timeout=4)
    assert "Rank 1" in str(error)


def other_model(rank):
    model = tiny("classification").model
    with torch.no_grad():
        model[0].bias += 1e-6 * rank
    return fit(model=model)


def whole(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=10, **options)


X, Y = tiny("classification").x, tiny("classification").y
OTHER_DATA = "A rank has other data than rank 0"
# name: (a fit for which rank 1 has something else, part of the error)
DIFFERENCES = {
    "the model": (other_model, "another network weights than rank 0"),
    "the seed": (
        lambda rank: fit(seed=rank),
        "Rank 1 has another seed than rank 0: '1' against '0'",
    ),
    "the solver": (
        lambda rank: fit(solver=BlockCG() if rank else None),
        "Rank 1 has another solver",
    ),
    "the data": (lambda rank: fit([(X + rank, Y)]), OTHER_DATA),
    "the labels of a later batch": (
        lambda rank: fit([(X[:10], Y[:10]), (X[10:], Y[10:].roll(rank))]),
        OTHER_DATA,
    ),
    "the dataset": (lambda rank: fit(whole(X + rank, Y)), OTHER_DATA),
    "the length": (lambda rank: fit(whole(X[: 30 - rank], Y[: 30 - rank])), OTHER_DATA),
    "the last batch": (lambda rank: fit([(X, Y), (X, Y)][: 2 - rank]), OTHER_DATA),
    "the sampler": (
        lambda rank: fit(whole(X[:20], Y[:20], sampler=range(rank, 20, 2))),
        "A DistributedSampler is allowed",
    ),
    "the validation data": (
        lambda rank: fit().calibrate(X[: 30 - 20 * rank], Y[: 30 - 20 * rank]),
        OTHER_DATA,
    ),
}
WRONG = Y.clone()
WRONG[7] = 3
LABELLED = [(X[:5], Y[:5]), (X[5:], WRONG[5:])]
# name: a call in which rank 1 alone reads the label 3 of 0 to 2
LABELS = {
    "fit, tensors": lambda: fit([(X, WRONG)]),
    "fit": lambda: fit(LABELLED),
    "calibrate, tensors": lambda: fit().calibrate(X, WRONG),
    "calibrate": lambda: fit().calibrate(LABELLED),
}


def differing(rank):
    found = {name: error_of(lambda: call(rank)) for name, (call, _) in DIFFERENCES.items()}
    return {**found, **{name: error_of(call) for name, call in LABELS.items()}}


@pytest.fixture(scope="module")
def errors_of_ranks(tmp_path_factory):
    return ranks.run(2, differing, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_refused(name, errors_of_ranks):
    for errors in errors_of_ranks:
        assert type(errors[name]) is ValueError
        assert DIFFERENCES[name][1] in str(errors[name])


@pytest.mark.parametrize("name", LABELS)
def test_a_label_out_of_range_on_one_rank_ends_all(name, errors_of_ranks):
    first, second = (errors[name] for errors in errors_of_ranks)
    assert type(second) is ValueError and "outside of 0 to 2" in str(second)
    assert str(first).startswith("Rank 1 failed") and str(second) in str(first)


def test_other_devices_and_ways_to_share_are_refused():
    class Two(Group):
        def meet(self, value, merge):
            return merge([value, {**value, "device": "cuda"}])

    with pytest.raises(ValueError, match="Rank 1 has another device.*'cuda' against 'cpu'"):
        compare_ranks(Two(), torch.device("cpu"), {})
    for known in "auto", "columns", "weights":
        with pytest.raises(ValueError, match=f"shard='{known}' is not known.*'data', None"):
            fit(shard=known)


def fit_with_checkpoint(rank, folder, saves, curvature, parameters):
    with dying_after(saves):
        return facts(fit(folder=folder, curvature=curvature, parameters=parameters))


CHANGES = [
    (2, 3, "network", "all", (1, 1)),
    (3, 2, "variational", "all", (1, 1)),
    (3, 2, "variational", "last_layer", (1, 1)),
    (1, 2, "variational", "all", (2,)),
    (1, 2, "linear", "all", (1, 1)),
    (2, 2, "linear", "all", (1, 1)),
]


@pytest.mark.parametrize(
    "before, after, curvature, parameters, deaths",
    daily((2, 1, "variational", "all", (2,)), rest=CHANGES),
)
@pytest.mark.slow
def test_fits_go_on_with_other_ranks(before, after, curvature, parameters, deaths, tmp_path):
    whole, folder = facts(fit(curvature=curvature, parameters=parameters)), tmp_path / "run"

    def run(size, name, saves):
        options = folder, saves, curvature, parameters
        return ranks.run(size, fit_with_checkpoint, tmp_path / name, *options)

    for number, saves in enumerate(deaths):  # after the noise, and after a step of EM
        broken = run(before, f"broken {number}", saves)
        assert all(isinstance(found, Exception) for found in broken)
    assert (folder / "state.pt").exists() and list(folder.glob("block-*.pt"))
    resumed = run(after, "resumed", 0)
    for found in resumed:
        assert found["num_data"] == whole["num_data"]
        for name, tensor in whole["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-6, atol=1e-6)
    # the finished fit is there for any number of ranks, which read the data once
    for found in run(before, "again", 0):
        assert torch.equal(found["state"]["w_lin"], resumed[0]["state"]["w_lin"])


def fit_in_an_order_of_its_own(rank, folder):
    return facts(fit(InAnyOrder(tiny("classification")), folder))


@pytest.mark.slow
def test_a_checkpoint_reads_nothing_more_on_one_rank_alone(tmp_path):
    for _ in range(2):  # and none does where the finished one comes back
        found = ranks.run(2, fit_in_an_order_of_its_own, tmp_path / "ranks", tmp_path / "run")
        shutil.rmtree(tmp_path / "ranks")
        assert torch.equal(found[0]["state"]["w_samples"], found[1]["state"]["w_samples"])


def fit_without_a_derivative(rank):
    every = [(x.clone(), y) for x, y in batches(tiny("classification"))]
    every[-1][0][0, 0] = 0.0
    bent = Bent(tiny("classification").model, backwards_only=True)
    return error_of(lambda: fit(every, model=bent))


@pytest.mark.slow
def test_a_derivative_that_is_not_finite_ends_all_ranks(tmp_path):
    errors = ranks.run(2, fit_without_a_derivative, tmp_path)
    assert all(isinstance(error, Exception) for error in errors)
    told = [str(error) for error in errors if isinstance(error, FloatingPointError)]
    assert told and all("outputs on batch 4 is not finite" in words for words in told)


def fit_where_nothing_can_be_written(rank, folder):
    fit(folder=folder)


def test_unwritable_folders_end_all_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")
    results = ranks.run(2, fit_where_nothing_can_be_written, tmp_path, tmp_path / "file" / "run")
    assert isinstance(results[0], OSError) and "The checkpoint folder" in str(results[0])
    assert isinstance(results[1], Exception)
