"""What is saved, copied, cast or put into a module predicts the same; what has changed is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from loaders import Loader
from tiny import batched, fitted, known, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import (
    Adapter,
    BlockCG,
    Classification,
    Compute,
    LaplaceEnsemble,
    LinearisedLaplace,
    NotFittedError,
)
from torch_lla_em.runtime.files import from_bytes, to_bytes

FIXED = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}


def alone(members):
    return members[0]


def calibrated(name="classification", kind=alone):
    case, la = known(name)
    return case, kind([copy.copy(la)] * 2).calibrate(case.x + 0.1, case.y)


def unfitted(model, name="classification", **options):
    return LinearisedLaplace(model, name, num_samples=6, **options)


def same(ours, theirs, x):
    """Both have the same tensors and predictions, to the last bit."""
    one, other = ours.state_dict(), theirs.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    one, other = ours.predict(x), theirs.predict(x)
    assert torch.equal(one.samples, other.samples) and torch.equal(one.f_mean, other.f_mean)
    assert ours.calibration == theirs.calibration
    if ours.calibration:
        assert torch.equal(one.p_value, other.p_value)


KINDS = [("classification", alone), ("regression", alone), ("classification", LaplaceEnsemble)]


@pytest.mark.parametrize("name, kind", KINDS)
def test_files_copies_and_states_hold_the_same(name, kind, tmp_path):
    """Calibrated or not; files hold tensors alone."""
    case, la = calibrated(name, kind)
    members = [unfitted(case.model, name) for _ in range(2)]
    if kind is LaplaceEnsemble:
        load = partial(LaplaceEnsemble.load, members=members)
    else:
        load = partial(LinearisedLaplace.load, model=case.model)
    state = la.state_dict()
    if kind is alone:
        members[0].load_state_dict(state)
        same(members[0], la, case.x)
    for each in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        same(each, la, case.x)
    plain = kind([copy.copy(known(name)[1])] * 2)
    for number, each in enumerate((la, plain)):
        path = tmp_path / f"{number}.pt"
        each.save(path)
        found = load(path)
        same(found, each, case.x)
        if kind is alone:
            assert found.history == la.history and found.messages == la.messages
            assert found.num_data == 30
            assert found.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert len([*tmp_path.iterdir()]) == 2
    found = torch.load(tmp_path / "0.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    if kind is LaplaceEnsemble:
        with pytest.raises(ValueError, match="no version key"):
            la.load_state_dict({})
        with pytest.raises(RuntimeError, match="more members than this ensemble, 1"):
            LaplaceEnsemble.load(tmp_path / "0.pt", members[:1])
    else:
        cast = copy.deepcopy(la).to(torch.float32)
        tensors = cast.w_lin, cast.w_samples, cast.scale, next(cast.model.parameters())
        tensors = *tensors, cast.mixture, cast.reference.unusual, cast.reference.table
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_loaded_posterior_has_its_accuracy_and_is_fitted_again_as_it_was(layerwise, tmp_path):
    options = {"prior": "isotropic", "curvature": "network", "class_dim": 1, "num_samples": 5}
    case, la = fitted(em_steps=2, seed=3, layerwise=layerwise, **options)
    la.calibrate(case.x + 0.1, case.y).save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert again.accuracy == la.accuracy and again.accuracy.tolerance > 0
    one, other = la.posterior, again.posterior
    assert (one.tolerance, one.result.why) == (other.tolerance, other.result.why)
    assert one.result.mode_error == other.result.mode_error and one.result.mode_error > 0
    assert one.correction.room == other.correction.room > 0
    again.fit([(case.x, case.y)], em_steps=2, validation=False, progress_bar=False)
    assert torch.equal(again.w_samples, la.w_samples) and torch.equal(again.w_lin, la.w_lin)


def test_files_of_earlier_releases_predict_what_they_predicted(tmp_path):
    """0.4 had one score, and 0.3 stored coverages with a calibration."""
    case, la = calibrated()
    la.save(tmp_path / "la.pt")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    record = from_bytes(state["record"])
    calibration, own = record["calibration"], ("room", "marks", "why")
    record = {name: value for name, value in record.items() if name not in own}
    record["calibration"] = calibration[:5]
    state["mixture"] = state.pop("table")
    state["conformal_unusual"] = state["conformal_unusual"][:, -1:]
    state["training_distances"] = torch.ones(30)
    torch.save({**state, "record": to_bytes(record)}, tmp_path / "old.pt")
    loaded = LinearisedLaplace.load(tmp_path / "old.pt", case.model)
    ours, theirs = la.predict(case.x), loaded.predict(case.x)
    assert torch.equal(ours.probs, theirs.probs)
    assert loaded.calibration[:5] == la.calibration[:5] and loaded.compute == Compute()
    assert loaded.history == la.history and loaded.messages == la.messages
    for asked in (theirs.p_values, theirs.compared):  # distances were others
        with pytest.raises(ValueError, match="of version 0.4"):
            asked()
    record["calibration"] = [*calibration[:4], [0.8, 0.9], 0.1, True]
    torch.save({**state, "record": to_bytes(record)}, tmp_path / "old.pt")
    earliest = LinearisedLaplace.load(tmp_path / "old.pt", case.model)
    assert torch.equal(earliest.predict(case.x).probs, ours.probs)
    assert earliest.calibration[:5] == la.calibration[:5]
    several = LaplaceEnsemble([loaded]).calibrate(case.x + 0.1, case.y)
    state = {n.removeprefix("members."): tensor for n, tensor in several.state_dict().items()}
    again = LaplaceEnsemble([unfitted(case.model)])
    again.load_state_dict(state)
    same(again, several, case.x)
    with pytest.raises(ValueError, match="LinearisedLaplace, not of LaplaceEnsemble"):
        again.load_state_dict(la.state_dict())
    # regressions were predicted around the network, whose noise was not stored
    case, la = known("regression")
    state = la.state_dict()
    del state["network_noise"]
    state["mixture"] = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    loaded = unfitted(case.model, la.likelihood)
    loaded.load_state_dict(state)
    assert_close(loaded(case.x)[0], case.model(case.x).detach())
    assert_close(loaded(case.x)[1], la.predict(case.x).f_variance + la.sigma_noise**2)


def test_damaged_files_and_those_of_others_are_refused(tmp_path):
    case, la = known()
    path = tmp_path / "la.pt"
    la.save(path)
    whole, state = path.read_bytes(), torch.load(path, weights_only=True)

    def flipped(place):
        start = int(place * len(whole))  # longer than what aligns the records
        return whole[:start] + bytes(b ^ 1 for b in whole[start : start + 80]) + whole[start + 80 :]

    def otherwise(**changed):
        torch.save({n: t for n, t in (state | changed).items() if t is not None}, path)
        return path.read_bytes()

    other = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    changed = copy.deepcopy(case.model)
    changed[0].bias.data += 1e-9
    for content, words, *given in (
        (whole[:500], "truncated"),
        (whole[:-20], "damaged"),
        *((flipped(place), "damaged") for place in (0.9, 0.5, 0.1)),
        (b"words", "by another program"),
        (otherwise(torch_lla_em_version=torch.tensor(99)), "format 99"),
        (otherwise(torch_lla_em_version=None), "no version key"),
        (otherwise(w_lin=torch.ones(26)), r"'w_lin' .* \(26,\), not \(27,\)"),
        (otherwise(w_samples=torch.ones(6, 26)), r"'w_samples' .*not \(6, 27\)"),
        (otherwise(certificate=torch.ones(5)), r"'certificate' .*not \(6,\)"),
        (otherwise(prior_precision=None), "'prior_precision' of the state is missing"),
        (otherwise(options=None), "holds a state_dict"),
        (whole, "weights or buffers", {"model": other}),
        (whole, "weights or buffers", {"model": changed}),
        (whole, "same parameters", {"parameters": "last_layer"}),
        (whole, "the same likelihood", {"likelihood": "poisson"}),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            LinearisedLaplace.load(path, **{"model": case.model, **dict(*given)})
    with pytest.raises(FileNotFoundError):
        LinearisedLaplace.load(tmp_path / "nowhere.pt", case.model)


def test_neither_a_solver_nor_the_precision_is_asked_for(tmp_path):
    options = {"compute": Compute(solver=BlockCG(), precision="bfloat16")}
    case, la = fitted(em_steps=0, prior_precision=5.0, **options)
    la.save(tmp_path / "la.pt")
    load = partial(LinearisedLaplace.load, tmp_path / "la.pt", case.model)
    assert load().compute == Compute(precision="bfloat16")
    assert torch.equal(load()(case.x), la(case.x))
    assert load(compute=Compute(vectors="cpu")).compute == Compute(vectors="cpu")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    record, saved = from_bytes(state["record"]), from_bytes(state["options"])
    record["given"], _ = ["solver"], saved.pop("precision")  # as release 0.4.0 stored them
    torch.save({**state, "record": to_bytes(record), "options": to_bytes(saved)}, tmp_path / "old")
    assert LinearisedLaplace.load(tmp_path / "old", case.model).compute == Compute()


class Named(Classification):
    """A user's likelihood, with an attribute."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.tensor(weight)


# name: (given, the same again, others, words about these)
GIVEN = {
    "likelihood": (
        *(Named(0.5), Named(0.5)),
        {"classification": "the same likelihood", Named(0.25): "the same likelihood"},
    ),
    "adapter": (*[Adapter(lambda model, x: model(10 * x))] * 2, {Adapter(): "the same adapter"}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_functions_of_the_user_must_be_passed_to_load(name, tmp_path):
    given, again, others = GIVEN[name]
    case, la = fitted(em_steps=0, prior_precision=5.0, **{name: given})
    la.calibrate(case.x + 0.1, case.y).save(tmp_path / "la.pt")
    load = partial(LinearisedLaplace.load, tmp_path / "la.pt", case.model)
    with pytest.raises(ValueError, match=rf"fitted with your own {name}.*Pass {name}=\.\.\."):
        load()
    same(load(**{name: again}), la, case.x)
    for other, words in others.items():
        options = {"name": other} if name == "likelihood" else {name: other}
        without = unfitted(case.model, **options)
        by_state = partial(without.load_state_dict, la.state_dict())
        for call in (by_state, partial(load, **{name: other})):
            with pytest.raises(ValueError, match=words):
                call()


def test_a_finished_fit_is_that_of_the_same_likelihood(tmp_path):
    fit = partial(fitted, em_steps=2, checkpoint=tmp_path)
    (_, one), (_, again) = (fit(likelihood=Named(0.5)) for _ in range(2))
    assert torch.equal(one.w_samples, again.w_samples)
    with pytest.raises(ValueError, match="options of the likelihood"):
        fit(likelihood=Named(0.25))


# a posterior is replaced at once


def ending(case, at):
    """Batches of which one pass ends with an error; whoever takes the first batch alone makes no pass."""
    left = iter(range(at - 1, -1, -1))

    def act(_):
        if next(left, 1) == 0:
            raise RuntimeError("planted")

    return Loader(batched([9, 11], case.x[:20], case.y[:20]), act)


@pytest.mark.parametrize("at", [1, 4, "calibration"])
def test_a_fit_that_fails_leaves_the_earlier_posterior(at):
    case, la = fitted(prior="g", em_steps=2, compute=Compute(keep_data=False))
    state, probs = la.state_dict(), la(case.x)
    fresh = unfitted(case.model, compute=Compute(keep_data=False))
    for each in (la, fresh):
        if at == "calibration":
            unseen = [(case.x[20:], torch.full((10,), -100))]
            with pytest.raises(ValueError, match="None of the validation examples has a label"):
                each.fit(case.x[:20], case.y[:20], validation=unseen, progress_bar=False)
        else:
            with pytest.raises(RuntimeError, match="planted"):
                each.fit(ending(case, at), em_steps=9, progress_bar=False)
    assert la.num_data == 30 and torch.equal(la(case.x), probs)
    assert all(torch.equal(la.state_dict()[name], state[name]) for name in state)
    x, calls = case.x, (fresh, fresh.predict, fresh.functional_samples, fresh.predictions)
    calls = *(partial(call, x) for call in calls), fresh.log_marginal_likelihood, fresh.state_dict
    for call in (*calls, partial(fresh.calibrate, x, case.y)):
        with pytest.raises(NotFittedError, match="[Cc]all la.fit"):
            call()


def test_loads_and_calibrations_that_fail_leave_the_earlier_posterior():
    case, la = calibrated()
    ensemble = LaplaceEnsemble([la]).calibrate(case.x + 0.1, case.y)
    for each in (la, ensemble):
        before = copy.copy(each)
        with pytest.raises(ValueError, match="None of the validation examples has a label"):
            each.calibrate(case.x, torch.full_like(case.y, -100))
        same(each, before, case.x)
    before, state = copy.copy(la), {**fitted(seed=1)[1].state_dict(), "scale": None}
    with pytest.raises(AttributeError):
        la.load_state_dict(state)
    same(la, before, case.x)


def test_results_are_read_only_and_a_copy_has_its_own():
    case, la = known()
    before, messages = la.state_dict(), la.messages
    other = copy.copy(la).calibrate(case.x + 0.1, case.y)
    assert all(torch.equal(la.state_dict()[name], before[name]) for name in before)
    assert other.calibration is not None and la.calibration is None
    assert other.w_samples.data_ptr() == la.w_samples.data_ptr()  # nothing is stored twice
    la.messages.append("not stored")
    assert la.messages == messages == other.messages[: len(messages)]
    for name in ("w_lin", "prior_precision", "calibration", "likelihood", "history", "messages"):
        with pytest.raises(AttributeError):
            setattr(la, name, None)


# the network of a posterior


def in_place_through_data(model):
    for p in model.parameters():
        p.data.add_(0.1)  # without a new version


def other_activation(model):
    model[1] = nn.ReLU()


@pytest.mark.parametrize("change", [in_place_through_data, nn.Module.float, other_activation])
def test_changed_networks_are_noticed(change, tmp_path):
    case, la = known()
    la = copy.deepcopy(la)
    la(case.x)  # a copy is compared by a hash first, then by a quick look
    change(la.model)
    x = case.x.to(next(la.model.parameters()).dtype)
    calls = partial(la, x), la.state_dict, partial(la.calibrate, x, case.y)
    for call in (*calls, partial(la.save, tmp_path / "la.pt"), LaplaceEnsemble([la]).state_dict):
        with pytest.raises(NotFittedError, match="have changed"):
            call()
    la.to(torch.float16)
    if change is nn.Module.float:  # by then both are cast, as in a module that contains them
        assert la(case.x.half()).isfinite().all()
        return
    with pytest.raises(NotFittedError, match="have changed"):  # moving does not make it right
        la(case.x.half())


def test_a_change_of_any_single_number_is_noticed():
    """Also in float32, where a sum of numbers would round it away; equal weights elsewhere are the same."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3, bias=False)
    model, x, y = nn.Sequential(*layers), torch.randn(30, 3), torch.arange(30) % 3
    la = LinearisedLaplace(model, "classification", num_samples=3).fit(x, y, **FIXED)
    expected = la(x)
    for tensor in model.state_dict().values():  # parameters and statistics
        flat = tensor.data.view(-1)
        for place in {0, len(flat) // 2, len(flat) - 1} if tensor.is_floating_point() else ():
            before = flat[place].clone()
            flat[place] = torch.nextafter(before, before + 1)
            with pytest.raises(NotFittedError, match="have changed"):
                la(x)
            flat[place] = before
            la(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(la(x), expected)
    model.train()(x)  # moves the running statistics
    with pytest.raises(NotFittedError, match="have changed"):
        la(x)


def test_autocast_and_inference_mode_change_nothing():
    case = tiny("classification")
    model, x, y = case.model.float(), case.x.float(), case.y

    def fit():
        return unfitted(model).fit(x, y, progress_bar=False).calibrate(x + 0.1, (y + 1) % 3)

    def answers(la):
        p = la.predict(x)
        names = "probs log_probs entropy epistemic f_covariance f_mean f_variance samples".split()
        several = [getattr(p, name) for name in (*names, "standard_error")]
        return [la(x), *several, p.joint_log_prob(y), la.w_samples]

    outside = fit()
    expected = answers(outside)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with context:
            inside = answers(outside), answers(fit())
        for found in inside:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(outside(x), expected[0])


# posteriors inside of other modules


class System(nn.Module):
    """A module with a posterior in front of its network and behind it."""

    def __init__(self, net, first, last):
        super().__init__()
        self.first, self.net, self.last = first, net, last
        self.threshold = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("kind", [alone, LaplaceEnsemble])
def test_a_module_is_stored_and_cast_with_the_posteriors_in_it(kind, tmp_path):
    case, la = known("classification")
    first = calibrated(kind=kind)[1]
    whole = System(la.model, first, copy.deepcopy(first))
    other = tiny("classification").model
    in_place_through_data(other)
    fresh = System(other, *(kind([unfitted(other), unfitted(other)]) for _ in range(2)))
    torch.save(whole.state_dict(), tmp_path / "system.pt")
    fresh.load_state_dict(torch.load(tmp_path / "system.pt"))
    for ours, theirs in ((fresh.first, whole.first), (fresh.last, whole.last)):
        same(ours, theirs, case.x)
    expected, copied = whole.first(case.x), pickle.loads(pickle.dumps(whole))
    for one, cast in ((copied, "bfloat16"), (copy.deepcopy(whole), "float"), (fresh, "float")):
        moved = getattr(one, cast)()
        dtype = moved.net[0].weight.dtype
        for each in (moved.first, moved.last):
            room = 100 * torch.finfo(dtype).eps
            assert_close(each(case.x.to(dtype)).double(), expected, rtol=room, atol=room)
        assert kind is LaplaceEnsemble or moved.first.model is moved.net
    in_place_through_data(fresh.net)
    with pytest.raises(RuntimeError, match="changed"):
        fresh.double().first(case.x)


def test_modules_with_posteriors_that_are_not_fitted_or_of_other_weights():
    case, la = known()
    model = tiny("classification").model
    empty = System(model, unfitted(model), unfitted(model))
    assert not [name for name in empty.state_dict() if "first" in name]
    empty.load_state_dict(empty.state_dict())
    with pytest.raises(RuntimeError, match="Missing.*first.w_lin"):
        System(la.model, la, la).load_state_dict(empty.state_dict())
    outer, own = nn.Sequential(unfitted(model)), la.state_dict()
    state = {f"0.{name}": tensor for name, tensor in own.items()}
    in_place_through_data(model)
    outer.load_state_dict(state)
    with pytest.raises(NotFittedError, match="weights have changed"):
        outer(case.x)
    with pytest.warns(UserWarning, match="The state_dict has no posterior"):
        assert not outer.state_dict()
    other = nn.Sequential(unfitted(model, parameters=["2.*"]))
    with pytest.raises(RuntimeError, match="pass the same parameters"):
        other.load_state_dict(state)
