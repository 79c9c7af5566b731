"""Inputs at the edges are predicted rightly, or refused with words that name the remedy."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, RiskControl

QUIET = {"progress_bar": False, "em_steps": 0, "prior_precision": 2.0}


def inputs(rows, seed=0):
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))


def labels(x):
    return (x[:, 0] > 0).long()


def values(x):
    noise = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(9))
    return x[:, :1] + torch.where(x[:, 1:] > 0, 1.0, 0.1) * noise


def classifier(classes=2, seed=0):
    torch.manual_seed(seed)
    x = inputs(60)
    la = LinearisedLaplace(nn.Linear(2, classes), "classification", num_samples=4)
    return la.fit(x, labels(x), **QUIET)


def regression(network=None, rows=60, **options):
    torch.manual_seed(0)
    x = inputs(rows)
    y = values(x) if network is None else values(x)[:, 0]
    la = LinearisedLaplace(network or nn.Linear(2, 1), "regression", num_samples=4)
    return la.fit(x, y, **QUIET | options)


@pytest.mark.parametrize("groups", [["a", "b"] * 40, [None] * 80, [0.5] * 80])
def test_groups_that_are_no_integers_are_refused_by_name(groups):
    x = inputs(80, 1)
    with pytest.raises(TypeError, match="groups must be integers.*numpy.unique"):
        classifier().calibrate(x, labels(x), groups=groups)


def test_no_inputs_have_no_sets_also_with_groups():
    x, none = inputs(80, 1), torch.zeros(0, dtype=torch.long)
    la = classifier().calibrate(x, labels(x), groups=torch.arange(80) % 2)
    prediction = la.predict(x[:0], groups=none)
    assert prediction.prediction_set(0.8).shape == (0, 2)
    assert prediction.p_value.shape == (0,)


def test_groups_and_weights_belong_to_examples_of_a_loader_that_shuffles():
    x, xv = inputs(90, 2), inputs(80, 1)
    la = regression().calibrate(xv, values(xv), groups=labels(xv.flip(1)))
    groups = labels(x.flip(1))
    expected = la.predict(x, groups=groups).interval(0.8)
    shuffled = DataLoader(TensorDataset(x), 16, shuffle=True)
    found = la.predict(shuffled, groups=groups).interval(0.8)
    torch.testing.assert_close(found.upper, expected.upper)
    torch.testing.assert_close(found.lower, expected.lower)


def test_reference_examples_all_have_a_weight():
    x = inputs(80, 1)
    weights = torch.zeros(80)
    weights[::2] = 1.0  # every other one would be the reference
    la = classifier().calibrate(x, labels(x), weights=weights)
    p = la.predict(x[:5], weights=torch.tensor([0.0, 1, 1, 1, 1])).p_value
    assert p.isfinite().all()


class Vector(nn.Module):
    """A network whose outputs have the shape (B,)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)[:, 0]


def test_intervals_of_outputs_without_a_last_dimension_have_their_shape():
    x, xv = inputs(50, 2), inputs(80, 1)
    la, y = regression(Vector()), values(xv)[:, 0]
    for stated in ({}, {"weights": torch.ones(80)}, {"groups": labels(xv.flip(1))}):
        la.calibrate(xv, y, **stated)
        own = {name: given[:50] for name, given in stated.items()}
        if "groups" in own:
            own["groups"] = labels(x.flip(1))
        lower, upper = la.predict(x, **own).interval(0.8)
        assert lower.shape == upper.shape == (50,)
        inside = (lower <= values(x)[:, 0]) & (values(x)[:, 0] <= upper)
    shown = la.check(x, values(x)[:, 0], level=0.8, groups=own["groups"]).groups[0].coverage
    assert shown == pytest.approx(inside.double().mean().item())


def test_one_example_and_no_label_are_refused_or_right():
    x, xv = inputs(1, 3), inputs(80, 1)
    la = classifier().calibrate(xv, labels(xv))
    with pytest.raises(ValueError, match="No example has a label"):
        la.check(xv, torch.full((80,), -100), level=0.5)
    one = regression()
    try:
        one.calibrate(x, values(x))
    except ValueError as error:
        assert "example" in str(error)


def test_risk_control_counts_nan_as_missed():
    x = torch.randn(60, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = x.argmax(1)
    control = RiskControl(lambda x: x.softmax(1), [(x, y)], level=0.03)
    x[:, :, 0, 0] = torch.nan
    probs = x.softmax(1)
    missed = ~control.sets(probs).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(control.loss(probs, y), missed.double().mean((1, 2)))
    with pytest.raises(ValueError, match="NaN"):
        RiskControl(lambda x: x.softmax(1), [(x, y)], level=0.03)
    y[:, 0, 0] = -100  # pixels without a label do not count
    assert RiskControl(lambda x: x.softmax(1), [(x, y)], level=0.03).risk <= 0.03


class Bag(nn.Module):
    """A network of sparse inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.sparse.mm(x, self.weight).tanh())


def test_sparse_inputs_are_fitted_and_checked():
    torch.manual_seed(0)
    x = (torch.rand(40, 5) < 0.3).float()
    y = (x.sum(1) > 1).long()
    options = {"num_samples": 4, "parameters": "last_layer"}
    la = LinearisedLaplace(Bag(), "classification", **options).fit([(x.to_sparse(), y)], **QUIET)
    dense = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), la.model.last)
    dense[0].weight = nn.Parameter(la.model.weight.detach().T.clone())
    other = LinearisedLaplace(dense, "classification", **options).fit([(x, y)], **QUIET)
    torch.testing.assert_close(la(x.to_sparse()), other(x), rtol=1e-4, atol=1e-5)
    x[0, 0] = torch.nan
    with pytest.raises(ValueError, match="[Ii]nputs"):
        LinearisedLaplace(Bag(), "classification", **options).fit([(x.to_sparse(), y)], **QUIET)


def test_outputs_of_several_lengths_are_predicted_batch_by_batch():
    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(8, length, 2, generator=generator) for length in (3, 5)]
        return [(x, x[..., 0].gt(0).long()) for x in parts]

    la = LinearisedLaplace(nn.Linear(2, 3), "classification", num_samples=4).fit(
        batches(0), **QUIET
    )
    with pytest.raises(ValueError, match=r"shapes.*pad"):
        la.calibrate(batches(1))
    loader = DataLoader([x for x, _ in batches(1)], batch_size=None)
    with pytest.raises(ValueError, match=r"la.predictions\(loader\)"):
        la(loader)
    assert [len(part.expectation[0]) for part in la.predictions(loader)] == [3, 5]


def test_members_have_the_same_classes():
    with pytest.raises(ValueError, match="same classes"):
        LaplaceEnsemble([classifier(2), classifier(3)])(inputs(5))


@pytest.mark.parametrize("again", ["fit", "calibrate"])
def test_an_ensemble_notices_that_a_member_has_changed(again):
    xv = inputs(80, 1)
    members = [regression(), regression(prior_precision=3.0)]
    ensemble = LaplaceEnsemble(members).calibrate(xv, values(xv))
    before = ensemble(xv)[1]
    ensemble.double().float()  # which changes rounding alone
    torch.testing.assert_close(ensemble(xv)[1], before)
    if again == "fit":
        members[0].fit(inputs(10, 4), values(inputs(10, 4)), **QUIET)
    else:
        members[0].calibrate(3 * xv, 5 * values(xv))
    for use in (lambda: ensemble(xv), lambda: ensemble.is_ood(xv, 0.2)):
        with pytest.raises(RuntimeError, match="calibrate.* again"):
            use()
    ensemble.calibrate(xv, values(xv))(xv)


@pytest.mark.filterwarnings("ignore")
def test_files_of_ensembles_keep_messages_and_tensors_that_members_share(tmp_path):
    pytest.importorskip("safetensors")
    xv, la = inputs(20, 1), classifier()
    ensemble = LaplaceEnsemble([la, la]).calibrate(xv, labels(xv))
    ensemble.messages.append("what calibrate has said")
    path = tmp_path / "ensemble.safetensors"
    ensemble.save(path)
    members = [LinearisedLaplace(la.model, "classification", num_samples=4) for _ in range(2)]
    loaded = LaplaceEnsemble.load(path, members)
    assert loaded.messages == ensemble.messages != []
    torch.testing.assert_close(loaded(xv), ensemble(xv))


def test_weights_of_inputs_and_groups_are_numbers_of_which_each_group_has_some():
    la, x, none = classifier(), inputs(80, 1), torch.zeros(0)
    la.calibrate(x, labels(x), weights=torch.arange(80) % 2)
    assert la.predict(x[:0], weights=none).prediction_set(0.8).shape == (0, 2)
    assert la.predict(x[:3], weights=[0.0] * 3).p_value.isfinite().all()
    for count, words in (
        (0, "no .* of group 0 with a positive weight"),
        (1, "only one .* group 0"),
    ):
        weights = torch.arange(80) % 2
        weights[:count] = 1
        with pytest.raises(ValueError, match=words):
            la.calibrate(x, labels(x), groups=torch.arange(80) % 2, weights=weights)
    for weights in (["a"] * 80, [None] * 80, [[1.0], [1.0, 2.0]] * 40):
        with pytest.raises(TypeError, match="weights must be numbers"):
            la.calibrate(x, labels(x), weights=weights)


class Streamed(IterableDataset):
    """Inputs whose number is not known before."""

    def __iter__(self):
        return iter(inputs(20, 2))


def test_streams_of_unknown_length_are_predicted():
    la = classifier()
    found = la.predict(DataLoader(Streamed(), 6)).probs
    torch.testing.assert_close(found, la(inputs(20, 2)))
