"""Two and three ranks fit what one process fits."""

import functools
import math
import warnings

import pytest
import ranks
import tiny
import torch
from daily import daily
from loaders import batches, in_one_batch, in_order, shuffled, streamed
from ranks import facts
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em import SGD, BlockCG, FunctionSpace, LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.data.loader import Data
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.integrations.sklearn import LaplaceClassifier
from torch_lla_em.prediction import NotFittedError
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime.group import current_group

# cases whose shares differ where a rank is neither the first nor the last
OF_THREE = "krylov", "variational", "last layer, variational", "some sites", "weights", "sampler"
OF_THREE += "cg, layerwise", "function space, regression", "shuffled"


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
    return list(zip(x.split(3), y.split(3)))


def of_sites():
    """Return the tiny network with its layers at every site."""
    one, act, two = tiny.tiny("classification").model
    layers = torch.nn.Conv2d(2, 4, 1), act, torch.nn.Conv2d(4, 3, 1)
    for new, old in ((layers[0], one), (layers[2], two)):
        new.weight.data, new.bias.data = old.weight.data[..., None, None], old.bias.data
    return torch.nn.Sequential(*layers).double()


def weighted(case):
    w = torch.linspace(0.2, 2, len(case.x), dtype=torch.float64)
    return list(zip(case.x.split(7), case.y.split(7), w.split(7)))


CG, LINEAR = {"solver": BlockCG()}, {"curvature": "linear"}
LAYERWISE, SPACE = {**CG, "prior": "layerwise"}, {"solver": FunctionSpace()}
PLAIN = {"g_prior": False}
VARIATIONAL = {"curvature": "variational"}
LAST = {"parameters": "last_layer"}
SITES = {"class_dim": 1, "model": of_sites()}

# name: (likelihood, loader, options of the posterior and of the fit)
CASES = {
    "krylov": ("classification", batches, {}),
    "krylov, linear curvature": ("classification", batches, LINEAR),
    "krylov, regression": ("regression", batches, {}),
    "krylov, poisson": ("poisson", in_order, PLAIN),
    "krylov, bernoulli": ("bernoulli", batches, {}),
    "variational": ("classification", batches, VARIATIONAL),
    "variational, one batch": ("classification", in_one_batch, VARIATIONAL),
    "weights": ("classification", weighted, {**VARIATIONAL, "weights": "last"}),
    "all sites": ("classification", images, {**VARIATIONAL, **SITES}),
    "some sites": ("classification", images, {**VARIATIONAL, **SITES}),
    "some sites, last layer": ("classification", images, {**VARIATIONAL, **SITES, **LAST}),
    "bernoulli, variational": ("bernoulli", batches, {"curvature": None}),
    "cg, layerwise": ("classification", streamed, LAYERWISE),
    "cg, noise by output": ("regression per output", batches, CG),
    "function space, layerwise": ("binomial", batches, {"prior": "layerwise"}),
    "function space, regression": ("regression", in_one_batch, SPACE),
    "last layer": ("classification", in_one_batch, LAST),
    "last layer, variational": ("classification", batches, {**VARIATIONAL, **LAST}),
    "sampler": ("classification", sampled, PLAIN),
    "shuffled": ("regression", shuffled, {}),
}
EVERY_FIT = [(2, name) for name in CASES] + [(3, name) for name in OF_THREE]


def fit(name):
    likelihood, loader, options = CASES[name]
    options = {"curvature": "network", "em_steps": 2, **options}
    return tiny.fitted(likelihood, loader(tiny.tiny(likelihood)), **options)[1]


def fitted(name):
    """Return the facts of a case's posterior; that of "krylov" is calibrated."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if name.startswith("some sites"):
            patch.setattr("torch_lla_em.problem.sites.KEPT_OUTPUTS", 7 * 3 * 12)
        la = fit(name)
        if name == "krylov":
            la.calibrate(batches(tiny.tiny("classification")))
    return facts(la)


def by_tensors(kind):
    """Return what calls with tensors give, some of which leave a rank without examples."""
    case, found = tiny.tiny(kind), {}
    x, y, few = case.x, case.y, DataLoader(TensorDataset(case.x, case.y), batch_size=64)
    la = LinearisedLaplace(case.model, kind, num_samples=4)
    la.fit(x, y, validation=[(x[:9], y[:9])], em_steps=2, progress_bar=False)
    uses = {
        "fit": lambda: la,
        "uneven": lambda: la.calibrate(x[:7], y[:7]),
        "one batch": lambda: la.calibrate(few),
        "groups": lambda: la.calibrate(x, y, groups=torch.arange(30) % 2),
        "weights": lambda: la.calibrate(x, y, weights=torch.linspace(0.1, 1, 30)),
        "classes": lambda: la.calibrate(x, y, groups="classes" if y.dim() == 1 else None),
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


def after_a_change_on_one_rank(rank):
    """Return the error of ``calibrate`` on each rank if the network of rank 1 has changed."""
    case, la = tiny.fitted(em_steps=1)
    with torch.no_grad():
        case.model[0].bias += rank
    try:
        la.calibrate(case.x, case.y)
    except Exception as error:
        return error


def by_an_estimator():
    X = tiny.tiny("classification").x.float().numpy()
    model = LaplaceClassifier(hidden=4, epochs=2, num_samples=2, validation_fraction=0.4)
    return model.fit(X, X[:, 0] > 0).predict_proba(X)


def every_case(rank, of_fits):
    if of_fits:
        size = current_group().size
        return {name: fitted(name) for ranks, name in EVERY_FIT if ranks == size}
    return {
        "passes": {loader.__name__: one_pass(loader) for loader in LOADERS},
        "sgd": by_sgd(batches(tiny.tiny("classification"))),
        "stored": stored_by_a_fit(),
        "tensors": {kind: by_tensors(kind) for kind in ("classification", "regression")},
        "a change": after_a_change_on_one_rank(rank),
        "estimator": by_an_estimator(),
    }


LOADERS = batches, in_one_batch, in_order, shuffled, streamed, sampled


def one_pass(loader):
    """Return this rank's inputs by the number of their example, what a pass counts, and the largest shares."""
    problem = tiny.tiny("regression").problem()
    data = Data(loader(tiny.tiny("regression")), torch.device("cpu"), group=current_group())
    before = data.largest_share
    rows = {int(n): x.tolist() for batch in data for n, x in zip(batch.rows, batch.inputs)}
    problem = Problem(problem.linear_model, problem.likelihood, data)
    problem.ggn_product(problem.zeros(1))
    counts = data.facts.num_rows, data.facts.num_targets, data.facts.num_outputs
    return rows, counts, (before, data.largest_share)


def by_sgd(loader):
    options = {"solver": SGD(epochs=4, tolerance=9.0), "tolerance": 9.0, "g_prior": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, la = tiny.fitted(loader=loader, em_steps=0, prior_precision=10.0, **options)
    return facts(la)


def stored_by_a_fit():
    """Return the entries of every tensor of a span and of q, and of the largest that crossed ranks."""
    crossed, found, saved = [], {}, OverSpan.saved

    def note(over, q):
        span = over.span
        found["J"] = sum(map(torch.numel, span.outputs.stored)) / span.size
        found["f"], found["targets"] = span.rows.f.numel(), span.rows.targets.numel()
        found["mean"], found["draws"] = q.outputs.numel(), q.curved.deviations.numel()
        found["H"], found["S"] = q.H.values.numel(), q.curved.S_noise.numel()
        found["noise"], found["epsilon"] = over.expected._noise.numel(), over.epsilon.numel()
        return saved(over, q)

    def sent(group, total):
        crossed.append(total.numel())
        return add(group, total)

    group, add = type(current_group()), type(current_group()).sum
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (400,), generator=generator)
    loader = list(zip(x.split(10), y.split(10)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(OverSpan, "saved", note)
        patch.setattr(group, "sum", sent)
        patch.setattr("torch_lla_em.inference.result.EXAMPLES", 8)
        tiny.fitted(loader=loader, num_samples=2, curvature="variational", em_steps=2)
    return found, max(crossed)


alone, one_pass_alone = functools.cache(fitted), functools.cache(one_pass)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """size, of_fits -> what every case returned on each rank of a group of that size."""

    def run(size, of_fits=False):
        return ranks.run(size, every_case, tmp_path_factory.mktemp("ranks"), of_fits)

    return functools.cache(run)


@pytest.mark.parametrize("size, name", EVERY_FIT)
@pytest.mark.slow
def test_ranks_fit_what_one_process_fits(size, name, together):
    expected, every_rank = alone(name), together(size, True)
    for found in every_rank:
        assert found[name]["num_data"] == expected["num_data"]
        for key, tensor in expected["state"].items():
            assert torch.equal(found[name]["state"][key], every_rank[0][name]["state"][key]), key
            assert_close(found[name]["state"][key], tensor, rtol=1e-6, atol=1e-6)
        for key in ("columns", "data_passes", "step"):
            asked = [record[key] for record in expected["history"]]
            assert [record[key] for record in found[name]["history"]] == pytest.approx(asked)


@pytest.mark.parametrize("size", daily(2, rest=[3]))
@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_ranks_share_out_rows_by_their_numbers(size, loader, together):
    """A rank may have no examples; together the ranks have each example once."""
    expected, counts, alone = one_pass_alone(loader)
    passes = [found["passes"][loader.__name__] for found in together(size)]
    shares = [share for share, *_ in passes]
    assert sum(map(len, shares)) == len(expected)
    assert {n: x for share in shares for n, x in share.items()} == expected
    assert all(found == counts for _, found, _ in passes) and alone == (1, 1)
    for _, _, (by_batches, by_examples) in passes:
        assert by_examples == max(map(len, shares)) / len(expected)
        known = loader(tiny.tiny("regression"))
        if isinstance(known, list):
            shared = len(known) if len(known) >= size else len(expected)  # batches or examples
            assert by_batches == math.ceil(shared / size) / shared
    assert all(shares)


@pytest.mark.parametrize("size", daily(2, rest=[3]))
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


def test_an_error_of_one_rank_is_raised_on_all(together):
    first, second = (found["a change"] for found in together(2))
    assert isinstance(second, NotFittedError) and "weights have changed" in str(second)
    assert str(first).startswith("Rank 1 failed") and str(second) in str(first)


def test_estimators_train_the_same_network_on_every_rank(together):
    one, two = (found["estimator"] for found in together(2))
    assert (one == two).all()


@pytest.mark.parametrize("size", daily(2, rest=[3]))
def test_a_rank_stores_rows_of_its_own_examples_only(size, together):
    """J V, H and all others with a row for each example; what crosses ranks has none."""
    whole, _ = stored_by_a_fit()
    every = [found["stored"] for found in together(size)]
    for name, entries in whole.items():
        parts = [stored[name] for stored, _ in every]
        assert max(parts) <= entries * math.ceil(40 / size) / 40
        assert sum(parts) == entries
    assert all(crossed < 400 for _, crossed in every)


@pytest.mark.parametrize("size", daily(2, rest=[3]))
def test_sgd_takes_one_batch_of_every_rank_a_step(size, together):
    every = batches(tiny.tiny("classification"))
    steps = [every[i : i + size] for i in range(0, len(every), size)]
    unions = [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in steps]
    expected = by_sgd(unions)["state"]
    for found in together(size):
        for name, tensor in expected.items():
            assert_close(found["sgd"]["state"][name], tensor, rtol=1e-6, atol=1e-6)
