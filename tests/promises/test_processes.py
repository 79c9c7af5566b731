"""Two and three ranks fit what one process fits; one that fails, dies, hangs or differs ends all and is named."""

import functools
import math
import os
import shutil
import signal
import time
import warnings

import pytest
import ranks
import torch
from checkpoints import dying_after
from daily import daily
from direct import Direct
from loaders import InAnyOrder, Loader, batches, in_one_batch, in_order, shuffled, streamed
from models import Bent
from ranks import facts
from tiny import batched, fitted, tiny
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em import SGD, BlockCG, Compute, LaplaceEnsemble, LinearisedLaplace, NotFittedError
from torch_lla_em.data.loader import Data
from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.integrations.sklearn import LaplaceClassifier
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.group import Group, group_of


def sampled(case):
    """As in distributed training, padded: 29 rows are no multiple of 2 or 3."""
    data = TensorDataset(case.x[:29], case.y[:29])
    if not torch.distributed.is_initialized():
        return DataLoader(data, batch_size=7)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def images(case):
    """Batches of images of 36 sites, of which each is an example of its own."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, 6, 6, generator=numbers, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(7, 6, 6, generator=numbers) > 0).long()
    return batched(3, x, y)


def of_sites():
    """Return the tiny network with its layers at every site."""
    one, act, two = tiny("classification").model
    layers = torch.nn.Conv2d(2, 4, 1), act, torch.nn.Conv2d(4, 3, 1)
    for new, old in ((layers[0], one), (layers[2], two)):
        new.weight.data, new.bias.data = old.weight.data[..., None, None], old.bias.data
    return torch.nn.Sequential(*layers).double()


def weighted(case):
    w = torch.linspace(0.2, 2, len(case.x), dtype=torch.float64)
    return batched(7, case.x, case.y, w)


CG, SPACE = {"compute": Compute(solver=BlockCG())}, {"compute": Compute(solver=Direct())}
VARIATIONAL, LAST = {"curvature": "variational"}, {"parameters": "last_layer"}
FEW = {"num_samples": 1, "em_steps": 4}  # for which a span would not have all directions
SITES = {"class_dim": 1, "model": of_sites(), **VARIATIONAL}
# name: (likelihood, loader, options of the posterior and of the fit)
CASES = {
    "krylov": ("classification", batches, {}),
    "krylov, regression": ("regression", batches, {}),
    "variational": ("classification", batches, VARIATIONAL),
    "weights": ("classification", weighted, {**VARIATIONAL, "weights": "last"}),
    "all sites": ("classification", images, SITES),
    "some sites": ("classification", images, SITES),
    "some sites, last layer": ("classification", images, {**SITES, **LAST}),
    "cg, layerwise": ("binomial", streamed, {**CG, "layerwise": True}),
    "cg, noise by output": ("regression per output", batches, CG),
    "function space, regression": ("regression", in_one_batch, SPACE),
    "last layer, variational": ("classification", batches, {**VARIATIONAL, **LAST}),
    "last layer by features": ("classification", batches, {**VARIATIONAL, **LAST, **FEW}),
    "sampler": ("classification", sampled, {"prior": "isotropic"}),
    "shuffled": ("regression", shuffled, {}),
}  # fmt: skip
# cases whose shares differ where a rank is neither the first nor the last
OF_THREE = "krylov", "variational", "last layer, variational", "some sites", "weights", "sampler"
OF_THREE += "cg, layerwise", "function space, regression", "shuffled"
EVERY_FIT = [(2, name) for name in CASES] + [(3, name) for name in OF_THREE]


def facts_of(name):
    """Return the facts of a case's posterior; that of "krylov" is calibrated."""
    likelihood, loader, options = CASES[name]
    options = {"curvature": "network", "em_steps": 2, **options}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if name.startswith("some sites"):
            patch.setattr("torch_lla_em.problem.sites.KEPT_OUTPUTS", 7 * 3 * 12)
        _, la = fitted(likelihood, loader(tiny(likelihood)), **options)
        if name == "krylov":
            la.calibrate(batches(tiny("classification")))
    return facts(la)


LOADERS = batches, in_one_batch, in_order, shuffled, streamed, sampled


def one_pass(loader):
    """Return this rank's inputs by the number of their example, what a pass counts, and the largest share."""
    problem = tiny("regression").problem()
    data = Data(loader(tiny("regression")), torch.device("cpu"), group=group_of())
    pairs = (pair for batch in data for pair in zip(batch.rows, batch.inputs, strict=True))
    rows = {int(n): x.tolist() for n, x in pairs}
    problem = Problem(problem.linear_model, problem.likelihood, data)
    problem.ggn_product(problem.zeros(1))
    counts = data.facts.num_rows, data.facts.num_targets, data.facts.num_outputs
    return rows, counts, data.largest_share


def by_sgd(loader):
    options = {"solver": SGD(epochs=4, tolerance=9.0), "tolerance": 9.0, "prior": "isotropic"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return facts(fitted(loader=loader, at=10.0, **options)[1])


def stored_by_a_fit():
    """Return the entries of every tensor of a span and of q, and of the largest that crossed ranks."""
    crossed, found, measured = [], {}, OverSpan.measured

    def note(over, q):
        span = over.span
        found["J"] = sum(map(torch.numel, span.stored)) / span.size
        found["f"], found["targets"] = span.rows.f.numel(), span.rows.targets.numel()
        found["mean"], found["H"] = q.span.outputs.numel(), q.span.H.values.numel()
        return measured(over, q)

    def sent(group, total):
        crossed.append(total.numel())
        return add(group, total)

    group, add = type(group_of()), type(group_of()).sum
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    loader = batched(10, x, torch.randint(3, (400,), generator=generator))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(OverSpan, "measured", note)
        patch.setattr(group, "sum", sent)
        patch.setattr("torch_lla_em.inference.result.EXAMPLES", 8)
        fitted(loader=loader, num_samples=2, curvature="variational", em_steps=2)
    return found, max(crossed)


def by_tensors(kind):
    """Return what calls with tensors give, some of which leave a rank without examples."""
    case, found = tiny(kind), {}
    x, y = case.x, case.y
    la = LinearisedLaplace(case.model, kind, num_samples=4)
    la.fit(x, y, validation=[(x[:9], y[:9])], em_steps=2, progress_bar=False)
    uses = {
        "fit": lambda: la,
        "uneven": lambda: la.calibrate(x[:7], y[:7]),
        "groups": lambda: la.calibrate(x, y, groups=torch.arange(30) % 2),
        "weights": lambda: la.calibrate(x, y, weights=torch.linspace(0.1, 1, 30)),
        "ensemble": lambda: LaplaceEnsemble([la]).calibrate(x, y),
    }
    for name, use in uses.items():
        used = use()
        state = {n: t for n, t in used.state_dict().items() if not n.endswith("record")}
        groups = torch.arange(5) % 2 if name == "groups" else None
        found[name] = state, used.predict(x[:5], groups=groups).p_value
    found["check"] = [group[1:] for group in la.check(x, y, level=0.5).groups]
    with pytest.raises(ValueError, match="there are 30 examples"):
        la.calibrate(x, y, weights=torch.ones(7))
    return found


def error_of(call):
    try:
        call()
    except Exception as error:
        return error


def by_an_estimator():
    X = tiny("classification").x.float().numpy()
    model = LaplaceClassifier(hidden=4, epochs=2, num_samples=2, validation_fraction=0.4)
    return model.fit(X, X[:, 0] > 0).predict_proba(X)


def fit(loader=None, folder=None, **options):
    loader = batches(tiny("classification")) if loader is None else loader
    known = {"em_steps": 3, "curvature": "network", "compute": Compute(keep_data=False)}
    return fitted("classification", loader, checkpoint=folder, **{**known, **options})[1]


def after_a_change(rank):
    """Calibrate a posterior whose network has changed on rank 1."""
    la = fit()
    la.model[0].bias.data += rank
    la.calibrate(X, Y)


def other_model(rank):
    model = tiny("classification").model
    model[0].bias.data += 1e-6 * rank
    return fit(model=model)


def whole(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=10, **options)


X, Y = tiny("classification").x, tiny("classification").y
WRONG = Y.index_fill(0, torch.tensor([7]), 3)
OTHER_DATA = "A rank has other data than rank 0"
# name: (a call for which rank 1 has something else, part of the error)
DIFFERENCES = {
    "the model": (other_model, "another network weights than rank 0"),
    "the solver": (lambda r: fit(compute=Compute(solver=BlockCG() if r else None)), "Rank 1 has another solver"),
    "the data": (lambda r: fit([(X + r, Y)]), OTHER_DATA),
    "the dataset": (lambda r: fit(whole(X + r, Y)), OTHER_DATA),
    "the sampler": (lambda r: fit(whole(X[:20], Y[:20], sampler=range(r, 20, 2))), "A DistributedSampler is allowed"),
    "the validation data": (lambda r: fit().calibrate(X[: 30 - 20 * r], Y[: 30 - 20 * r]), OTHER_DATA),
}  # fmt: skip
# calls that fail on rank 1 alone, where it reads the label 3 of 0 to 2
OUTSIDE = "outside of 0 to 2"
FAULTS = {
    "fit": (lambda _: fit([(X[:5], Y[:5]), (X[5:], WRONG[5:])]), OUTSIDE),
    "calibrate": (lambda _: fit().calibrate([(X[:5], Y[:5]), (X[5:], WRONG[5:])]), OUTSIDE),
    "a change": (after_a_change, "weights have changed"),
}


def every_case(rank, of_fits):
    size = group_of().size
    if of_fits:
        return {name: facts_of(name) for ranks, name in EVERY_FIT if ranks == size}
    calls = {} if size == 3 else {**DIFFERENCES, **FAULTS}
    return {
        "passes": {loader.__name__: one_pass(loader) for loader in LOADERS},
        "sgd": by_sgd(batches(tiny("classification"))),
        "stored": stored_by_a_fit(),
        "tensors": {kind: by_tensors(kind) for kind in ("classification", "regression")},
        "estimator": by_an_estimator(),
        "errors": {name: error_of(lambda: call(rank)) for name, (call, _) in calls.items()},
    }


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """size, of_fits -> what every case returned on each rank of a group of that size."""

    def run(size, of_fits=False):
        return ranks.run(size, every_case, tmp_path_factory.mktemp("ranks"), of_fits)

    return functools.cache(run)


BY_SIZE = pytest.mark.parametrize("size", daily(2, rest=[3]))
alone = functools.cache(facts_of)


@pytest.mark.parametrize("size, name", EVERY_FIT)
@pytest.mark.slow
def test_ranks_fit_what_one_process_fits(size, name, together):
    expected, every_rank = alone(name), together(size, True)
    for found in every_rank:
        assert found[name]["num_data"] == expected["num_data"]
        for key, tensor in expected["state"].items():
            own, first = (each[name]["state"][key] for each in (found, every_rank[0]))
            assert_close(own, first, rtol=0, atol=0, equal_nan=True, msg=key)
            assert_close(own, tensor, rtol=1e-6, atol=1e-6, equal_nan=True)
        for key in ("columns", "data_passes", "step"):
            asked = [record[key] for record in expected["history"]]
            assert [record[key] for record in found[name]["history"]] == pytest.approx(asked)


@BY_SIZE
def test_ranks_share_out_rows_by_their_numbers(size, together):
    """A rank may have no examples; together the ranks have each example once."""
    for loader in LOADERS:
        expected, counts, alone = one_pass(loader)
        passes = [found["passes"][loader.__name__] for found in together(size)]
        shares = [share for share, *_ in passes]
        assert sum(map(len, shares)) == len(expected) and all(shares)
        assert {n: x for share in shares for n, x in share.items()} == expected
        assert all(found == counts for _, found, _ in passes) and alone == 1
        if loader is batches:  # five
            assert {by_batches for *_, by_batches in passes} == {math.ceil(5 / size) / 5}


@BY_SIZE
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_tensors_are_shared_out_too(kind, size, together):
    expected = by_tensors(kind)
    for found in (found["tensors"][kind] for found in together(size)):
        assert found.keys() == expected.keys()
        assert_close(found.pop("check"), expected["check"])
        for name, (state, p_values) in found.items():
            due, due_p_values = expected[name]
            assert_close(p_values, due_p_values)
            assert state.keys() == due.keys()
            for key, tensor in due.items():
                assert_close(state[key], tensor, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")


@BY_SIZE
def test_a_rank_stores_rows_of_its_own_examples_only(size, together):
    """J V, H and all others with a row for each example; what crosses ranks has none."""
    every = [found["stored"] for found in together(size)]
    for name, entries in stored_by_a_fit()[0].items():
        parts = [stored[name] for stored, _ in every]
        assert max(parts) <= entries * math.ceil(40 / size) / 40
        assert sum(parts) == entries
    assert all(crossed < 400 for _, crossed in every)


@BY_SIZE
def test_sgd_takes_one_batch_of_every_rank_a_step(size, together):
    every = batches(tiny("classification"))
    steps = [every[i : i + size] for i in range(0, len(every), size)]
    expected = by_sgd([tuple(map(torch.cat, zip(*step, strict=True))) for step in steps])["state"]
    for found in together(size):
        for name, tensor in expected.items():
            state = found["sgd"]["state"][name]  # the evidence is NaN until it is asked for
            assert_close(state, tensor, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_estimators_train_the_same_network_on_every_rank(together):
    one, two = (found["estimator"] for found in together(2))
    assert (one == two).all()


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_one_rank_is_raised_on_all(name, together):
    one, two = (found["errors"][name] for found in together(2))
    assert isinstance(two, (ValueError, NotFittedError)) and FAULTS[name][1] in str(two)
    assert str(one).startswith("Rank 1 failed") and str(two) in str(one)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_refused(name, together):
    for found in together(2):
        assert type(found["errors"][name]) is ValueError
        assert DIFFERENCES[name][1] in str(found["errors"][name])


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_ranks_that_round_differently_take_the_same_steps(name, monkeypatch):
    """The second fit is given what the first agreed on, and rounds the rest in another way."""
    case, told, eigh = tiny(name), [], torch.linalg.eigh
    calls, loss = [], Expectations.loss_and_slope

    def counted(*given):
        calls.append(given)
        return loss(*given)

    monkeypatch.setattr(Expectations, "loss_and_slope", counted)
    generator = torch.Generator().manual_seed(0)

    def rounded(tensor):
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor * (1 + 0.1 * noise)

    def fit():
        la = LinearisedLaplace(case.model, name, num_samples=4)
        return la.fit(case.x, case.y, progress_bar=False, validation=False)

    def first(group, tensor):
        told.append(tensor.clone())
        return tensor

    monkeypatch.setattr(Group, "from_first", first)
    expected, count, number = fit(), len(told), len(calls)
    given = iter(told)
    monkeypatch.setattr(Group, "from_first", lambda group, tensor: next(given).clone())
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: (lambda v, V: (rounded(v), V))(*eigh(A)))
    found = fit()
    assert count > 20 and next(given, None) is None  # as many collectives
    assert len(calls) == 2 * number
    assert found.prior_precision == expected.prior_precision
    assert [step["why"] for step in found.history[-1:]] == [expected.history[-1]["why"]]
    assert len(found.history) == len(expected.history)
    torch.testing.assert_close(found.w_samples, expected.w_samples, rtol=0.05, atol=1e-2)


# ranks that fail


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise OSError("the disk is gone")


def fit_with_a_fault(rank, folder, victim, act):
    """Return the error of a fit, of which one rank acts in its fourth pass; it hangs until all others have ended."""

    def at(number):
        if (rank, number) == (victim, 4):
            if act:
                act()
            while len([*folder.glob("ended-*")]) < 2:
                time.sleep(0.05)

    error = error_of(lambda: fit(Loader(batches(tiny("classification")), at)))
    (folder / f"ended-{rank}").touch()
    return error


@pytest.mark.slow
@pytest.mark.parametrize("act, victim", [(fail, 1), (die, 0), (die, 2), (None, 1)])
def test_a_rank_that_fails_dies_or_hangs_ends_all(act, victim, tmp_path):
    timeout = 60 if act else 20  # processes need some seconds to meet
    results = ranks.run(3, fit_with_a_fault, tmp_path, tmp_path, victim, act, timeout=timeout)
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(results[rank], RuntimeError)
        # else the others notice at once
        assert ("Timed out" in str(results[rank])) == (act is None)
    if act is die:
        assert results[victim] is None
    if act is fail:
        assert isinstance(results[victim], OSError) and "the disk is gone" in str(results[victim])


def fit_if_first(rank, end):
    """Return the error of a fit on the first rank, for which the other one waits."""
    error = None if rank else error_of(fit)
    while rank and not end.exists():
        time.sleep(0.05)
    end.touch()
    return error


def fit_with_checkpoint(rank, folder, saves, curvature, parameters):
    with dying_after(saves):
        return facts(fit(folder=folder, curvature=curvature, parameters=parameters))


CHANGES = [
    (2, 3, "network", "all", (1, 1)),
    (3, 2, "variational", "last_layer", (1, 1)),
    (1, 2, "variational", "all", (2,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("before, after, curvature, parameters, deaths", CHANGES)
def test_fits_go_on_with_other_ranks(before, after, curvature, parameters, deaths, tmp_path):
    whole, folder = facts(fit(curvature=curvature, parameters=parameters)), tmp_path / "run"

    def run(size, name, saves):
        options = folder, saves, curvature, parameters
        return ranks.run(size, fit_with_checkpoint, tmp_path / name, *options)

    for number, saves in enumerate(deaths):  # after the noise, and after a step of EM
        broken = run(before, f"broken {number}", saves)
        assert all(isinstance(found, Exception) for found in broken)
    assert (folder / "state.pt").exists()
    resumed = run(after, "resumed", 0)
    for found in resumed:
        assert found["num_data"] == whole["num_data"]
        for name, tensor in whole["state"].items():
            assert_close(found["state"][name], tensor, rtol=1e-6, atol=1e-6)
    # the finished fit is there for any number of ranks, which read the data once
    for found in run(before, "again", 0):
        assert torch.equal(found["state"]["w_lin"], resumed[0]["state"]["w_lin"])


def fit_in_an_order_of_its_own(rank, folder):
    return facts(fit(InAnyOrder(tiny("classification")), folder))


def fit_without_a_derivative(rank):
    every = [(x.clone(), y) for x, y in batches(tiny("classification"))]
    every[-1][0][0, 0] = 0.0
    bent = Bent(tiny("classification").model, backwards_only=True)
    return error_of(lambda: fit(every, model=bent))


def fit_where_nothing_can_be_written(rank, folder):
    fit(folder=folder)


@pytest.mark.slow
def test_ranks_agree_on_checkpoints_and_faults(tmp_path):
    for _ in "ab":  # nothing more is read on one rank alone, nor where the finished one comes back
        found = ranks.run(2, fit_in_an_order_of_its_own, tmp_path / "ranks", tmp_path / "run")
        shutil.rmtree(tmp_path / "ranks")
        assert torch.equal(found[0]["state"]["w_samples"], found[1]["state"]["w_samples"])
    errors = ranks.run(2, fit_without_a_derivative, tmp_path / "derivative")
    assert all(isinstance(error, Exception) for error in errors)
    told = [str(error) for error in errors if isinstance(error, FloatingPointError)]
    assert told and all("outputs on batch 4 is not finite" in words for words in told)
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "run"
    one, two = ranks.run(2, fit_where_nothing_can_be_written, tmp_path / "written", folder)
    assert isinstance(one, OSError) and "The checkpoint folder" in str(one)
    assert isinstance(two, Exception)
    error, _ = ranks.run(2, fit_if_first, tmp_path / "first", tmp_path / "end", timeout=10)
    assert "Rank 1" in str(error)  # which does not fit
