"""Tables of several posteriors on one validation set, and the scores in them."""

import pytest
import tiny
import torch
from tiny import LOG_PROBS
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, NotFittedError, compare
from torch_lla_em.prediction import predicted_data, scores
from torch_lla_em.prediction.validation import Comparison


def fitted(name, precision=5.0):
    return tiny.fitted(name, num_samples=6, em_steps=0, prior_precision=precision)


def by_torchmetrics(prediction, y, name):
    tm = pytest.importorskip("torchmetrics").functional
    if name == "classification":
        p, c = prediction.probs, tm.classification
        error = c.multiclass_calibration_error(p, y, 3, n_bins=15)
        return {"accuracy": c.multiclass_accuracy(p, y, 3, "micro"), "ECE": error}
    if name == "bernoulli":
        p, y, c = prediction.probs.flatten(), y.flatten().long(), tm.classification
        area = c.binary_auroc(p, y)
        return {"accuracy": c.binary_accuracy(p, y), "AUROC": area}
    r2 = tm.r2_score(prediction.expectation, y)
    mean, y = prediction.expectation.flatten(), y.flatten()
    error, absolute = tm.mean_squared_error(mean, y, squared=False), tm.mean_absolute_error(mean, y)
    return {"RMSE": error, "MAE": absolute, "R²": r2}


# what torchmetrics says of itself where it is imported first
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression", "poisson"])
def test_scores_are_those_of_torchmetrics(name):
    case, la = fitted(name)
    prediction = la.predict(case.x)
    found = scores(prediction, case.y)
    assert found["NLL"] == pytest.approx(-prediction.log_prob(case.y).mean().item())
    for score, value in by_torchmetrics(prediction, case.y, name).items():
        assert found[score] == pytest.approx(value.item(), rel=1e-5), score
    if name == "regression":
        lower, upper = prediction.credible_interval(0.9)
        inside = ((case.y > lower) & (case.y < upper)).double().mean().item()
        assert found["90 % coverage"] == pytest.approx(inside)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_the_table_shows_the_scores_of_each_posterior(name):
    (case, la), (_, other) = fitted(name), fitted(name, 500.0)
    loader = DataLoader(TensorDataset(case.x[:23], case.y[:23]), 20)
    table = compare({"wide": la, "narrow": other}, loader, together=8)
    for key, each in (("wide", la), ("narrow", other)):
        record, rows = table.records[key], predicted_data(each, loader)
        assert_close(table.log_probs[key], rows.posterior.log_prob(rows.targets).double())
        assert record["NLL"] == pytest.approx(-table.log_probs[key].mean().item())
        alone = -rows.network.log_prob(rows.targets).mean().item()
        assert record["network NLL"] == pytest.approx(alone)
        groups = zip(case.x[:23].split(8), case.y[:23].split(8))
        evidence = sum(each.joint_log_prob(*group) for group in groups)
        assert record["held-out evidence"] == pytest.approx(evidence.item())
        assert record["parameters"] == 27
    assert all(f"{record['NLL']:.4f}" in repr(table) for record in table.records.values())
    assert "held-out evidence" in table._repr_html_()


def test_differences_are_paired_where_the_loader_shuffles():
    (case, la), (_, same), (_, other) = (fitted("classification", p) for p in (5.0, 5.0, 1e4))
    loader = DataLoader(TensorDataset(case.x, case.y), 7, shuffle=True)
    torch.manual_seed(0)
    table = compare([la, same, other], loader)
    assert set(table.records) == {"0: Sequential", "1: Sequential", "2: Sequential"}
    assert_close(table.log_probs["0: Sequential"], table.log_probs["1: Sequential"])
    worst = table.ranking[-1]
    gap, error = table.behind(worst)
    gaps = table.log_probs[table.ranking[0]] - table.log_probs[worst]
    assert gap == pytest.approx(gaps.mean().item()) and gap > 0
    assert error == pytest.approx(gaps.std().item() / 30**0.5)
    assert "no measurable difference" in repr(table)  # of two that are the same


def test_posteriors_that_are_worse_than_their_networks_are_named():
    log_probs = {"a": torch.full((4,), -0.5), "b": torch.full((4,), -0.25)}
    alone = {"a": torch.tensor([-0.25, -0.25, -0.25, -0.5]), "b": log_probs["b"] - 1}
    table = Comparison(
        {name: {"NLL": -p.mean().item()} for name, p in log_probs.items()}, log_probs, 10, alone
    )
    assert table.findings[0] == "'b' has the lowest NLL."
    assert (
        "'a' is worse than its network alone, by 0.19 ± 0.06: call calibrate" in table.findings[2]
    )
    assert len(table.findings) == 4


def test_posteriors_of_other_targets_raise():
    (case, la), (other, real) = fitted("classification"), fitted("regression")
    with pytest.raises(ValueError, match="one posterior or more"):
        compare([], case.x, case.y)
    with pytest.raises(ValueError, match="not on one scale"):
        compare([la, real], case.x, case.y)
    for networks in ({"net": la.model}, [la, la.model]):
        with pytest.raises(TypeError, match="('net'|'1: .*') is of the class.*\"network NLL\""):
            compare(networks, case.x, case.y)
    with pytest.raises(ValueError, match="together"):
        compare([la, la], case.x, case.y, together=0)
    with pytest.raises(NotFittedError):
        compare([la, LinearisedLaplace(other.model, "classification")], case.x, case.y)


def test_ignored_labels_are_no_examples():
    case = tiny.tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    la.fit(case.x, case.y, em_steps=1, progress_bar=False)
    some = torch.where(torch.arange(30) < 20, -100, case.y)
    table = compare({"a": la, "b": la}, case.x, some)
    alone = compare({"a": la, "b": la}, case.x[20:], case.y[20:])
    assert table.records["a"]["NLL"] == pytest.approx(alone.records["a"]["NLL"])
    assert table.records["a"]["network NLL"] == pytest.approx(alone.records["a"]["network NLL"])
    assert len(table.log_probs["a"]) == 10


def test_a_loader_that_changes_its_order_is_refused():
    case, la = fitted("classification")

    class Turning:
        """Batches that begin with another one in every pass."""

        batches = list(zip(case.x.split(10), case.y.split(10)))

        def __iter__(self):
            self.batches = self.batches[1:] + self.batches[:1]
            return iter(self.batches)

    with pytest.raises(ValueError, match="pass a list of batches"):
        compare([la, la], Turning())
    with pytest.raises(ValueError, match="pass a list of batches"):
        LaplaceEnsemble([la, la]).calibrate(Turning())
