"""Data in parts equal data at once, and every refusal."""

import copy
import io

import pytest
import torch
from daily import daily
from tiny import likelihood_of, tiny
from torch.testing import assert_close

from torch_lla_em import BlockCG, BlockKrylov, Compute, LinearisedLaplace, NotFittedError

CUTS = (0, 11, 19, 30)


def parts(case, *cuts):
    """Loaders of one batch each."""
    return [[(case.x[a:b], case.y[a:b])] for a, b in zip(cuts, cuts[1:])]


def posterior(case, likelihood=None, **options):
    options = {"num_samples": 4, "tolerance": 1e-9, "solver": BlockKrylov(), **options}
    options = {"curvature": "network", **options}
    return LinearisedLaplace(case.model, likelihood or likelihood_of(case.name), **options)


FIXED = {"em_steps": 0, "prior_precision": 20.0, "progress_bar": False}


@pytest.mark.parametrize("name", daily("classification", rest=["poisson"]))
@pytest.mark.parametrize(
    "options", [{}, {"g_prior": False}, {"prior": "layerwise", "solver": BlockCG()}]
)
@pytest.mark.parametrize("first", [True, False])
def test_parts_equal_one_fit_of_all(name, options, first):
    case = tiny(name)
    loaders = parts(case, *CUTS)
    whole = posterior(case, **options).fit([b for part in loaders for b in part], **FIXED)
    la = posterior(case, **options)
    la.fit(loaders[0], override=first, **FIXED)
    for part in loaders[1:]:
        la.fit(part, override=False, **FIXED)
    assert la.num_data == whole.num_data == 30
    assert_close(la.scale, whole.scale)
    assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)
    assert_close(la.w_lin, whole.w_lin, rtol=1e-6, atol=1e-8)
    assert_close(la.log_marginal_likelihood().value, whole.log_marginal_likelihood().value)


@pytest.mark.parametrize("options", [{}, {"curvature": None, "solver": None, "tolerance": None}])
@pytest.mark.parametrize("cut", [1, 11])
def test_parts_learn_what_all_data_teach(options, cut):
    case = tiny("classification")
    whole = posterior(case, **options).fit(case.x, case.y, progress_bar=False)
    la = posterior(case, **options)
    for part in parts(case, 0, cut, 30):
        la.fit(part, override=False, progress_bar=False)
    assert_close(la.prior_precision, whole.prior_precision, rtol=1e-6, atol=0)
    assert_close(la(case.x), whole(case.x), rtol=1e-6, atol=1e-8)
    later = la.fit(parts(case, 0, 1)[0], override=False, em_steps=0, progress_bar=False)
    assert later.num_data == 31
    assert later.prior_precision == la.prior_precision


def test_a_list_may_be_filled_anew_between_fits():
    case = tiny("classification")
    whole = posterior(case).fit([*parts(case, 0, 11)[0], *parts(case, 11, 30)[0]], **FIXED)
    la, batches = posterior(case), parts(case, 0, 11)[0]
    la.fit(batches, override=False, **FIXED)
    batches[:] = parts(case, 11, 30)[0]
    la.fit(batches, override=False, **FIXED)
    assert la.num_data == 30
    assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)


class Stored:
    """A loader of one's own over batches that somebody may exchange."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


CHANGES = {
    "inputs overwritten": lambda x, y, stored: x.mul_(2),
    "one label overwritten": lambda x, y, stored: y.__setitem__(3, (y[3] + 1) % 3),
    "labels permuted": lambda x, y, stored: y.copy_(y.flip(0)),
    "a row less": lambda x, y, stored: stored.batches.__setitem__(0, (x[1:], y[1:])),
    "other batches": lambda x, y, stored: stored.batches.__setitem__(0, (x + 1, y)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_earlier_data_that_have_changed_are_refused(change):
    case = tiny("classification")
    x, y = case.x[:11].clone(), case.y[:11].clone()
    stored = Stored([(x, y)])
    la = posterior(case).fit(stored, override=False, **FIXED)
    la.fit(parts(case, 11, 19)[0], override=False, **FIXED)
    before = la.w_samples
    change(x, y, stored)
    with pytest.raises(ValueError, match="earlier fit have changed.*do not modify"):
        la.fit(parts(case, 19, 30)[0], override=False, **FIXED)
    assert la.num_data == 19 and la.w_samples is before


@pytest.mark.parametrize("sigma", [0.4, torch.tensor([0.4, 0.7, 0.2])])
def test_noise_is_rescaled_to_what_was_learnt(sigma):
    case = tiny("regression")
    loaders = parts(case, *CUTS)
    la = posterior(case, "regression", sigma_noise=sigma)
    la.fit(loaders[0], override=False, em_steps=3, progress_bar=False)
    learnt = la.sigma_noise
    assert not torch.allclose(learnt, torch.as_tensor(sigma).double())
    fixed = {**FIXED, "prior_precision": la.prior_precision}
    for part in loaders[1:]:
        la.fit(part, override=False, **fixed)
    whole = posterior(case, "regression", sigma_noise=learnt)
    whole.fit([b for part in loaders for b in part], **fixed)
    assert_close(la.sigma_noise, learnt)
    assert_close(la.scale, whole.scale)
    assert_close(la.w_samples, whole.w_samples, rtol=1e-6, atol=1e-8)
    assert_close(la.w_lin, whole.w_lin, rtol=1e-6, atol=1e-8)


def test_a_plain_fit_forgets():
    case = tiny("regression")
    loaders = parts(case, *CUTS)
    la = posterior(case, "regression", sigma_noise=0.4)
    la.fit(loaders[0], em_steps=3, progress_bar=False)
    first, scale, precision = la.w_samples, la.scale, la.prior_precision
    la.fit(loaders[1], override=False, **FIXED)
    again = la.fit(loaders[0], em_steps=3, progress_bar=False)
    assert again.num_data == 11
    assert_close(again.w_samples, first)
    # the g-prior's scale is in units of the noise it was drawn at: the one given, not learnt
    assert_close(again.scale, scale)
    assert_close(again.prior_precision, precision)


def test_a_loaded_posterior_has_no_data(tmp_path):
    case = tiny("classification")
    la = posterior(case, "classification").fit(parts(case, *CUTS)[0], **FIXED)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model, solver=BlockKrylov())
    with pytest.raises(NotFittedError, match="one loader of all data"):
        loaded.fit(parts(case, *CUTS)[1], override=False, **FIXED)
    la.load_state_dict(loaded.state_dict())
    with pytest.raises(NotFittedError, match="one loader of all data"):
        la.fit(parts(case, *CUTS)[1], override=False, **FIXED)


def test_copies_share_data_and_pickles_leave_them_out():
    case = tiny("classification")
    loaders = parts(case, *CUTS)
    la = posterior(case).fit(loaders[0], override=False, **FIXED)
    other = copy.deepcopy(la._loaders)
    assert other.loaders[0][0] is loaders[0][0]
    buffer = io.BytesIO()
    torch.save(la._loaders, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).loaders == ()


class Dying:
    """A loader of one batch that raises from some pass on."""

    def __init__(self, batches, passes):
        self.batches, self.passes = batches, passes

    def __iter__(self):
        self.passes -= 1
        if self.passes < 0:
            raise InterruptedError
        yield from self.batches


EACH = ("classification", 1.0, True), ("regression", 0.4, False)
OTHERS = ("classification", 1.0, False), ("regression", 0.4, True)


@pytest.mark.parametrize("name, sigma, first", daily(*EACH, rest=OTHERS))
def test_the_last_of_several_fits_may_be_killed(name, sigma, first, tmp_path):
    case = tiny(name)

    def run(folder, passes):
        options = {"sigma_noise": sigma, "compute": Compute(keep_data=False)}
        la, loaders = posterior(case, name, **options), parts(case, *CUTS)
        loaders[2] = Dying(loaders[2], passes)
        for number, loader in enumerate(loaders):
            where = tmp_path / folder / str(number)
            options = {"checkpoint": where, "em_steps": 3, "progress_bar": False}
            la.fit(loader, override=first and not number, **options)
        return la

    whole = run("whole", 999)
    with pytest.raises(InterruptedError):
        run("broken", 4)
    assert (tmp_path / "broken" / "1" / "posterior.pt").exists()
    assert (tmp_path / "broken" / "2" / "state.pt").exists()
    resumed = run("broken", 999)
    for key in ("w_samples", "w_lin", "scale", "prior_precision", "_log_evidence"):
        assert torch.equal(getattr(resumed, key), getattr(whole, key)), key
    assert [r["columns"] for r in resumed.history] == [r["columns"] for r in whole.history]
