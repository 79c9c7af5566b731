"""Data in parts equal data at once, and every refusal."""

import copy
import io

import pytest
import torch
from daily import daily
from loaders import Loader
from tiny import likelihood_of, tiny
from torch.testing import assert_close

from torch_lla_em import BlockCG, BlockKrylov, Compute, LinearisedLaplace, NotFittedError

FIXED = {"em_steps": 0, "prior_precision": 20.0}


def parts(case, *cuts):
    """Loaders of one batch each."""
    return [[(case.x[a:b], case.y[a:b])] for a, b in zip(cuts, cuts[1:])]


def three_parts(name):
    case = tiny(name)
    return case, parts(case, 0, 11, 19, 30)


def posterior(case, likelihood=None, **options):
    options = {"num_samples": 4, "tolerance": 1e-9, "solver": BlockKrylov(), **options}
    options = {"curvature": "network", **options}
    return LinearisedLaplace(case.model, likelihood or likelihood_of(case.name), **options)


def add(la, *loaders, **options):
    """Fit the loaders one after the other, each beside those before."""
    for loader in loaders:
        la.fit(loader, override=False, progress_bar=False, **(options or FIXED))
    return la


def at_once(la, loaders, **options):
    every = [batch for loader in loaders for batch in loader]
    return la.fit(every, progress_bar=False, **(options or FIXED))


def assert_same(la, whole):
    assert la.num_data == whole.num_data == 30
    assert_close(la.scale, whole.scale)
    assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)
    assert_close(la.w_lin, whole.w_lin, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", daily("classification", rest=["poisson"]))
@pytest.mark.parametrize(
    "options", [{}, {"g_prior": False}, {"prior": "layerwise", "solver": BlockCG()}]
)
@pytest.mark.parametrize("first", [True, False])
def test_parts_equal_one_fit_of_all(name, options, first):
    case, loaders = three_parts(name)
    whole = at_once(posterior(case, **options), loaders)
    la = posterior(case, **options)
    la.fit(loaders[0], override=first, progress_bar=False, **FIXED)
    add(la, *loaders[1:])
    assert_same(la, whole)
    assert_close(la.log_marginal_likelihood().value, whole.log_marginal_likelihood().value)


@pytest.mark.parametrize("options", [{}, {"curvature": None, "solver": None, "tolerance": None}])
@pytest.mark.parametrize("cut", [1, 11])
def test_parts_learn_what_all_data_teach(options, cut):
    case = tiny("classification")
    whole = posterior(case, **options).fit(case.x, case.y, progress_bar=False)
    la = add(posterior(case, **options), *parts(case, 0, cut, 30), em_steps=20)
    assert_close(la.prior_precision, whole.prior_precision, rtol=1e-6, atol=0)
    assert_close(la(case.x), whole(case.x), rtol=1e-6, atol=1e-8)
    learnt = la.prior_precision
    add(la, *parts(case, 0, 1), em_steps=0)
    assert la.num_data == 31 and la.prior_precision == learnt


def test_parts_need_checkpoints_of_their_own(tmp_path):
    case, loaders = three_parts("classification")
    la, options = posterior(case), {**FIXED, "checkpoint": tmp_path}
    add(la, loaders[0], **options)
    with pytest.raises(ValueError, match="belongs to other data.* read 11 .* yields 19"):
        add(la, loaders[1], **options)


def test_a_list_may_be_filled_anew_between_fits():
    case, loaders = three_parts("classification")
    la, batches = posterior(case), []
    for loader in loaders:
        batches[:] = loader
        add(la, batches)
    assert_same(la, at_once(posterior(case), loaders))


CHANGES = {
    "inputs overwritten": lambda x, y, loader: x.mul_(2),
    "one label overwritten": lambda x, y, loader: y.__setitem__(3, (y[3] + 1) % 3),
    "labels permuted": lambda x, y, loader: y.copy_(y.flip(0)),
    "a row less": lambda x, y, loader: loader.batches.__setitem__(0, (x[1:], y[1:])),
    "other batches": lambda x, y, loader: loader.batches.__setitem__(0, (x + 1, y)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_earlier_data_that_have_changed_are_refused(change):
    case, (_, second, third) = three_parts("classification")
    x, y = case.x[:11].clone(), case.y[:11].clone()
    first = Loader([(x, y)])
    la = add(posterior(case), first, second)
    before = la.w_samples
    change(x, y, first)
    with pytest.raises(ValueError, match="earlier fit have changed.*do not modify"):
        add(la, third)
    assert la.num_data == 19 and la.w_samples is before


@pytest.mark.parametrize("sigma", [0.4, torch.tensor([0.4, 0.7, 0.2])])
def test_noise_is_rescaled_to_what_was_learnt(sigma):
    case, loaders = three_parts("regression")
    la = add(posterior(case, "regression", sigma_noise=sigma), loaders[0], em_steps=3)
    learnt = la.sigma_noise
    assert not torch.allclose(learnt, torch.as_tensor(sigma).double())
    fixed = {**FIXED, "prior_precision": la.prior_precision}
    add(la, *loaders[1:], **fixed)
    assert_close(la.sigma_noise, learnt)
    assert_same(la, at_once(posterior(case, "regression", sigma_noise=learnt), loaders, **fixed))


def test_a_plain_fit_forgets():
    case, loaders = three_parts("regression")
    la = at_once(posterior(case, "regression", sigma_noise=0.4), loaders[:1], em_steps=3)
    first, scale, precision = la.w_samples, la.scale, la.prior_precision
    add(la, loaders[1])
    at_once(la, loaders[:1], em_steps=3)
    assert la.num_data == 11
    assert_close(la.w_samples, first)
    # the g-prior's scale is in units of the noise it was drawn at: the one given, not learnt
    assert_close(la.scale, scale)
    assert_close(la.prior_precision, precision)


def test_a_loaded_posterior_has_no_data(tmp_path):
    case, (first, second, _) = three_parts("classification")
    la = add(posterior(case, "classification"), first)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model, solver=BlockKrylov())
    la.load_state_dict(loaded.state_dict())
    for without_data in (loaded, la):
        with pytest.raises(NotFittedError, match="one loader of all data"):
            add(without_data, second)


def test_copies_share_data_and_pickles_leave_them_out():
    case, (first, *_) = three_parts("classification")
    la = add(posterior(case), first)
    assert copy.deepcopy(la._loaders).loaders[0][0] is first[0]
    buffer = io.BytesIO()
    torch.save(la._loaders, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).loaders == ()


EACH = ("classification", 1.0, True), ("regression", 0.4, False)
OTHERS = ("classification", 1.0, False), ("regression", 0.4, True)


@pytest.mark.parametrize("name, sigma, first", daily(*EACH, rest=OTHERS))
def test_the_last_of_several_fits_may_be_killed(name, sigma, first, tmp_path):
    def die_in(last):
        def die(number):
            if number == last:
                raise InterruptedError

        return die

    def run(folder, last=None):
        case, loaders = three_parts(name)
        la = posterior(case, name, sigma_noise=sigma, compute=Compute(keep_data=False))
        loaders[2] = Loader(loaders[2], die_in(last))
        for number, loader in enumerate(loaders):
            where = tmp_path / folder / str(number)
            options = {"checkpoint": where, "em_steps": 3, "progress_bar": False}
            la.fit(loader, override=first and not number, **options)
        return la

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("broken", 5)
    assert (tmp_path / "broken" / "1" / "posterior.pt").exists()
    assert (tmp_path / "broken" / "2" / "state.pt").exists()
    resumed = run("broken")
    for key in ("w_samples", "w_lin", "scale", "prior_precision", "_log_evidence"):
        assert torch.equal(getattr(resumed, key), getattr(whole, key)), key
    assert [r["columns"] for r in resumed.history] == [r["columns"] for r in whole.history]
