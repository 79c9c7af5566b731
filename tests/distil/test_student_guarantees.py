"""Error rates of a student's p-values, sets and intervals, over repeated validation sets."""

import copy

import pytest
import torch
from tiny import draw, tiny

from torch_lla_em import LinearisedLaplace
from torch_lla_em.distil import Student


def drawn(case, count, generator):
    """New examples of the tiny problem."""
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    f = case.model(x).detach()
    noise = torch.randn(f.shape, generator=generator, dtype=torch.float64)
    return x, (f + 0.5 * noise).argmax(1) if case.name == "classification" else f + 0.4 * noise


def test_error_rates_hold_for_any_student(student):
    case, student = student
    generator, level, rate, size, repeats = torch.Generator().manual_seed(1), 0.8, 0.1, 19, 300
    alarms, inside = [], []
    for _ in range(repeats):
        student.calibrate(*drawn(case, size, generator))
        x, y = drawn(case, 20, generator)
        prediction = student.predict(x)
        alarms.append(prediction.is_ood(rate).double().mean())
        if case.name == "classification":
            found = prediction.prediction_set(level).gather(1, y[:, None])
        else:
            lower, upper = prediction.interval(level)
            found = (lower <= y) & (y <= upper)
        inside.append(found.double().mean())
    for values, low, high in ((alarms, 0.0, rate), (inside, level, 1.0)):
        mean, error = torch.stack(values).mean(), torch.stack(values).std() / repeats**0.5
        assert low - 5 * error <= mean <= high + 5 * error
    if case.name == "regression":  # without ties, rates are exact: ranks of 20 are uniform
        error = torch.stack(inside).std() / repeats**0.5
        assert abs(torch.stack(inside).mean() - level) < 5 * error


def test_p_values_are_ranks_among_the_reference(student):
    case, student = student
    x, y = drawn(case, 39, torch.Generator().manual_seed(2))
    student.calibrate(x, y)
    others = draw(7, 2, seed=3) * 2
    prediction = student.predict(others)
    reference, own = student.predict(x).log_scores, prediction.log_scores
    every = torch.cat([reference.expand(7, -1, -1), own[:, None]], 1)  # the input is the last
    ranks = (every[:, None] >= every[:, :, None]).sum(2).double()
    weights = torch.tensor([4.0, 1.0, 1.0] if ranks.shape[2] == 3 else [1.0, 1.0]).double()
    unusual = (weights / ranks).sum(2)
    due = (unusual >= unusual[:, -1:] - 1e-9).double().mean(1)
    torch.testing.assert_close(prediction.p_value, due)
    assert torch.equal(prediction.is_ood(0.2), prediction.p_value <= 0.2)
    with pytest.raises(ValueError, match="needs at least 99 reference examples"):
        prediction.is_ood(0.01)
    assert "39 examples" in repr(student)
    shown = repr(prediction).splitlines()
    assert len(shown) == 9 and "of 7" in shown[-1]
    is_real = prediction.likelihood.real_valued
    numbers = prediction.expectation if is_real else prediction.epistemic
    assert f"{numbers[0].flatten()[0]:.3g}" in shown[2].split()


def test_examples_without_label_are_no_reference(classified):
    case, _, student = classified
    student, y = copy.deepcopy(student), case.y.clone()
    y[:10] = -100
    student.calibrate(case.x, y)
    assert len(student.reference.unusual) == 20
    with pytest.raises(ValueError, match="The validation set is empty"):
        student.calibrate([])
    with pytest.raises(ValueError, match="None of the validation examples has a label"):
        student.calibrate(case.x, torch.full_like(y, -100))


def test_ties_of_discrete_inputs_remain_when_a_student_is_cast(quick, tmp_path):
    """The reference keeps its digits, and scores tie by the rounding of the coarser dtype."""
    generator = torch.Generator().manual_seed(0)

    def discrete(count):
        x = torch.randint(0, 2, (count, 2), generator=generator).float()
        return x, (x.sum(1) + torch.rand(count, generator=generator)).long()

    model = tiny("classification").model.float()
    la = LinearisedLaplace(model, "classification", num_samples=4)
    la.fit(*discrete(60), progress_bar=False)
    student = la.distil(discrete(100)[0], **quick | {"steps": 300, "lr": 0.05})
    student.calibrate(*discrete(99))
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    due = student.predict(x)
    student.save(tmp_path / "student.pt")
    loaded = Student.load(tmp_path / "student.pt", student.network)
    program = student.export(x).module()
    torch.testing.assert_close(program(x)["p_value"], due.p_value, rtol=0, atol=1e-12)
    for cast in (loaded, loaded.double(), student.double()):
        now = cast.predict(x.to(next(cast.parameters()).dtype))
        torch.testing.assert_close(now.p_value, due.p_value, rtol=0, atol=1e-12)
        assert torch.equal(now.prediction_set(0.8), due.prediction_set(0.8))
        assert cast.reference.unusual.dtype == torch.float64
