"""Two and three ranks fit what one process fits."""

import functools
import warnings

import pytest
import ranks
import torch
from daily import daily
from ranks import batches, facts
from tiny import Binomial, tiny
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em import SGD, BlockCG, FunctionSpace, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.group import current_group

SIZES = 2, 3
# each way to share the work and each form of loader once; the others are slow
DAILY = {
    *("krylov", "cg, layerwise", "sampler", "parts", "shuffled", "weights"),
    *("variational", "weights, variational"),
}
# cases whose shares differ where a rank is neither the first nor the last
OF_THREE = {
    *("krylov", "variational", "cg, layerwise", "function space, regression", "sampler", "parts"),
    *("shuffled", "weights, regression", "weights, layerwise", "weights, function space"),
}


class Stream(IterableDataset):
    def __init__(self, case):
        self.case = case

    def __iter__(self):
        return iter(zip(self.case.x, self.case.y))


def in_one_batch(case):
    return [(case.x, case.y)]


def listed(case):
    return DataLoader(TensorDataset(case.x, case.y), batch_size=7)


def shuffled(case):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        TensorDataset(case.x, case.y), batch_size=7, shuffle=True, generator=generator
    )


def streamed(case):
    return DataLoader(Stream(case), batch_size=7)


def sampled(case):
    """As in distributed training, padded: 29 rows are no multiple of 2 or 3."""
    data = TensorDataset(case.x[:29], case.y[:29])
    if not torch.distributed.is_initialized():
        return DataLoader(data, batch_size=7)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


NOISES = {"solver": BlockCG(), "sigma_noise": torch.tensor([0.4, 0.7, 0.2])}
LAYERWISE, WEIGHTS = {"solver": BlockCG(), "prior": "layerwise"}, {"shard": "weights"}
LIKELIHOODS = {"binomial": Binomial, "regression per output": "regression"}

# name: (likelihood, loader, options of the posterior, options of the fit)
CASES = {
    "krylov": ("classification", batches, {}, {}),
    "krylov, linear curvature": ("classification", batches, {"curvature": "linear"}, {}),
    "krylov, regression": ("regression", batches, {}, {}),
    "krylov, poisson": ("poisson", listed, {"g_prior": False}, {}),
    "krylov, bernoulli": ("bernoulli", batches, {}, {}),
    "variational": ("classification", batches, {"curvature": "variational"}, {}),
    "weights, variational": ("bernoulli", batches, {"curvature": None}, WEIGHTS),
    "cg, layerwise": ("classification", streamed, LAYERWISE, {}),
    "cg, noise by output": ("regression per output", batches, NOISES, {}),
    "function space, layerwise": ("binomial", batches, {"prior": "layerwise"}, {}),
    "function space, regression": ("regression", in_one_batch, {"solver": FunctionSpace()}, {}),
    "last layer": ("classification", in_one_batch, {"parameters": "last_layer"}, {}),
    "sampler": ("classification", sampled, {"g_prior": False}, {}),
    "parts": ("classification", None, {"g_prior": False}, {}),
    "parts, weights": ("classification", None, {"g_prior": False}, WEIGHTS),
    "shuffled": ("regression", shuffled, {}, {}),
    "weights": ("classification", batches, {}, WEIGHTS),
    "weights, regression": ("regression", listed, {}, WEIGHTS),
    "weights, linear curvature": ("bernoulli", batches, {"curvature": "linear"}, WEIGHTS),
    "weights, layerwise": ("poisson", batches, LAYERWISE, WEIGHTS),
    "weights, noise by output": ("regression per output", batches, NOISES, WEIGHTS),
    "weights, function space": ("classification", batches, {"solver": FunctionSpace()}, WEIGHTS),
}


assert CASES.keys() >= OF_THREE | DAILY


def cases_of(size, is_daily):
    names = [name for name in CASES if size < 3 or name in OF_THREE]
    return [name for name in names if (size == 2 and name in DAILY) == daily]


def every_fit():
    return [
        pytest.param(size, name, is_daily, marks=() if is_daily else pytest.mark.slow)
        for size in SIZES
        for is_daily in (True, False)
        for name in cases_of(size, is_daily)
    ]


def fit(name):
    likelihood, loader, options, fit_options = CASES[name]
    case = tiny(likelihood)
    likelihood = LIKELIHOODS.get(likelihood, likelihood)
    likelihood = likelihood if isinstance(likelihood, str) else likelihood()
    options = {"curvature": "network", **options}
    la = LinearisedLaplace(case.model, likelihood, num_samples=4, **options)
    if "parts" in name:
        for rows in (slice(0, 13), slice(13, 30)):
            part = [(case.x[rows][:8], case.y[rows][:8]), (case.x[rows][8:], case.y[rows][8:])]
            la.fit(part, override=False, progress_bar=False, em_steps=2, **fit_options)
        return la, case
    la.fit(loader(case), progress_bar=False, em_steps=2, **fit_options)
    return la, case


def fitted(name):
    """A case's posterior, of some with a scale by held-out data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, case = fit(name)
        if name == "krylov":
            la.calibrate(batches(case))
    return facts(la)


def every_case(rank, is_daily):
    found = {name: fitted(name) for name in cases_of(current_group().size, is_daily)}
    if is_daily:
        found["passes"] = {loader.__name__: one_pass(loader) for loader in LOADERS}
        found["sgd"] = by_sgd(batches(tiny("classification")))
    return found


LOADERS = batches, in_one_batch, listed, shuffled, streamed, sampled


def one_pass(loader):
    """What a pass counts, and which row each of this rank's inputs is."""
    problem = tiny("regression").problem()
    data = Data(loader(tiny("regression")), torch.device("cpu"), group=current_group())
    rows = {int(n): x.tolist() for batch in data for n, x in zip(batch.rows, batch.inputs)}
    problem = Problem(problem.linear_model, problem.likelihood, data)
    data.num_passes = 0
    problem.ggn_product(problem.zeros(1))
    return rows, (data.num_rows, data.num_targets, data.num_outputs)


def by_sgd(loader):
    la = LinearisedLaplace(
        tiny("classification").model,
        "classification",
        num_samples=4,
        g_prior=False,
        solver=SGD(epochs=4, tolerance=9.0),
        tolerance=9.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(loader, em_steps=0, prior_precision=10.0, progress_bar=False)
    return facts(la)


alone = functools.cache(fitted)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """size, function, its arguments -> what it returned on each rank of a group of that size."""

    def run(size, function, *arguments):
        return ranks.run(size, function, tmp_path_factory.mktemp("ranks"), *arguments)

    return functools.cache(run)


@pytest.mark.parametrize(("size", "name", "is_daily"), every_fit())
def test_ranks_fit_what_one_process_fits(size, name, is_daily, together):
    expected, every_rank = alone(name), together(size, every_case, is_daily)
    for found in every_rank:
        assert found[name]["num_data"] == expected["num_data"]
        for key, tensor in expected["state"].items():
            assert torch.equal(found[name]["state"][key], every_rank[0][name]["state"][key]), key
            if key.startswith("conformal_"):  # each rank halves its own share of the validation set
                continue
            torch.testing.assert_close(found[name]["state"][key], tensor, rtol=1e-6, atol=1e-6)
        # slices are made whole in chunks, each of which reads the data; their noise is not kept
        for key in ("step",) if "weights" in name else ("columns", "data_passes", "step"):
            asked = [record[key] for record in expected["history"]]
            assert [record[key] for record in found[name]["history"]] == pytest.approx(asked)


@pytest.mark.parametrize("size", daily(2, rest=[3]))
@pytest.mark.parametrize("name", [loader.__name__ for loader in LOADERS])
def test_ranks_share_out_rows_by_their_numbers(size, name, together):
    """A rank may have none; together they have each once."""
    expected, counts = every_pass_alone()[name]
    every_rank = together(size, every_case, True)
    shares = [found["passes"][name][0] for found in every_rank]
    assert sum(map(len, shares)) == len(expected)
    assert {n: x for share in shares for n, x in share.items()} == expected
    assert all(found["passes"][name][1] == counts for found in every_rank)
    if name == "in_one_batch":
        assert not shares[1]


@functools.cache
def every_pass_alone():
    return {loader.__name__: one_pass(loader) for loader in LOADERS}


@pytest.mark.parametrize("size", daily(2, rest=[3]))
def test_sgd_takes_one_batch_of_every_rank_a_step(size, together):
    every = batches(tiny("classification"))
    steps = [every[i : i + size] for i in range(0, len(every), size)]
    unions = [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in steps]
    expected = by_sgd(unions)["state"]
    for found in together(size, every_case, True):
        for name, tensor in expected.items():
            torch.testing.assert_close(found["sgd"]["state"][name], tensor, rtol=1e-6, atol=1e-6)
