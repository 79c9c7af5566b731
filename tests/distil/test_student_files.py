"""Students in files and as programs."""

import copy
import logging
import warnings

import pytest
import torch
from daily import daily
from tiny import draw, fitted
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, Student
from torch_lla_em.runtime import files

QUANTITIES = ("expectation", "epistemic", "aleatoric", "p_value")


def assert_alike(one, other):
    for quantity in QUANTITIES:
        torch.testing.assert_close(getattr(one, quantity), getattr(other, quantity))


@pytest.mark.parametrize("name", ["student.pt", "student.safetensors", "0.4.pt"])
def test_saved_and_loaded(student, name, tmp_path):
    case, student = student
    student.save(tmp_path / name)
    if name == "0.4.pt":  # whose agreements have one more number at the end
        state = torch.load(tmp_path / name)
        record = files.from_bytes(state["student"])
        record["error"]["held_out"].append(0.3)
        record["error"]["made"].append(1.2)
        n, scores = student.form.scores, state.pop("_extra_state")
        state |= {"reference_scores": scores[:, :n], "reference_errors": scores[:, n:-1]}
        state |= {"reference_room": scores[0, -1], "student": files.to_bytes(record)}
        torch.save(state, tmp_path / name)
    again = Student.load(tmp_path / name, copy.deepcopy(student.network))
    assert_alike(student.predict(case.x), again.predict(case.x))
    assert again.error == student.error and repr(again) == repr(student)
    assert not any(p.requires_grad for p in again.parameters())


def test_a_student_is_loaded_in_the_module_that_contains_it(student):
    case, student = student
    fresh = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.reference = None
    nn.ModuleList([case.model, fresh]).load_state_dict(
        nn.ModuleList([case.model, student]).state_dict()
    )
    assert_alike(student.predict(case.x), fresh.predict(case.x))


def test_files_that_do_not_fit(regressed, tmp_path):
    case, la, student = regressed
    student.save(tmp_path / "student.pt")
    la.save(tmp_path / "posterior.pt")
    ensemble = LaplaceEnsemble([la, la])
    ensemble.save(tmp_path / "ensemble.pt")
    other = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for words, use in {
        "another architecture than the student": lambda: Student.load(
            tmp_path / "student.pt", other
        ),
        "holds a posterior, not a student": lambda: Student.load(
            tmp_path / "posterior.pt", case.model
        ),
        r"holds a student, not a posterior: use Student\.load": lambda: LinearisedLaplace.load(
            tmp_path / "student.pt", case.model
        ),
        "holds an ensemble, not a posterior": lambda: LinearisedLaplace.load(
            tmp_path / "ensemble.pt", case.model
        ),
        "holds a student, not a post": lambda: la.load_state_dict(student.state_dict()),
        "holds an ensemble, not a post": lambda: la.load_state_dict(ensemble.state_dict()),
        "holds a posterior, not an ens": lambda: ensemble.load_state_dict(la.state_dict()),
    }.items():
        with pytest.raises(ValueError, match=words):
            use()


def half(model, x):
    return model(x) / 2


def test_own_functions_are_passed_again(quick, tmp_path):
    case, la = fitted(forward_fn=half)
    student = la.distil(case.x, **quick)
    student.save(tmp_path / "student.pt")
    with pytest.raises(ValueError, match="your own forward_fn"):
        Student.load(tmp_path / "student.pt", case.model)
    again = Student.load(tmp_path / "student.pt", case.model, forward_fn=half)
    torch.testing.assert_close(again(case.x), student(case.x))


@pytest.mark.parametrize("name", daily("regressed", rest=["classified"]))
def test_exported(name, request, tmp_path):
    case, _, student = request.getfixturevalue(name)
    student.calibrate(case.x, case.y)
    program = student.export(case.x[:4], tmp_path / "student.pt2", level=0.8)
    loaded = torch.export.load(tmp_path / "student.pt2").module()
    is_regression = case.name == "regression"
    names = ["expectation", "predictive_variance"] if is_regression else ["probs"]
    names += ["epistemic", "aleatoric", "ood_score", "p_value"]
    sets = ["lower", "upper"] if is_regression else ["prediction_set"]
    for x in (case.x, case.x[:1], 2 * case.x[:7]):
        due, found = student.predict(x), loaded(x)
        assert [*found] == [*program.module()(x)] == names + sets
        for name in names:
            torch.testing.assert_close(found[name], getattr(due, name))
        if is_regression:
            torch.testing.assert_close((found["lower"], found["upper"]), tuple(due.interval(0.8)))
        else:
            assert torch.equal(found["prediction_set"], due.prediction_set(0.8))
    with pytest.raises(ValueError, match="has no known ending"):
        student.export(case.x, tmp_path / "student.txt")


@pytest.mark.slow
def test_exported_to_onnx(student, tmp_path, capfd, caplog):
    onnxruntime = pytest.importorskip("onnxruntime")
    case, student = student
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        warnings.simplefilter("error", RuntimeWarning)  # as of constants that overflow
        caplog.clear()
        student.export(case.x[:4], tmp_path / "student.onnx", level=0.8)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not "".join(capfd.readouterr())
    session = onnxruntime.InferenceSession(tmp_path / "student.onnx")
    names = [each.name for each in session.get_outputs()]
    (entry,), x = session.get_inputs(), draw(25, 2, seed=7)  # no ties with the reference
    assert entry.name == "x"
    found = dict(zip(names, session.run(None, {"x": x.numpy()})))
    due = student.predict(x)
    torch.testing.assert_close(torch.from_numpy(found["epistemic"]), due.epistemic)
    torch.testing.assert_close(torch.from_numpy(found["p_value"]), due.p_value)


class Random(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x[:, :1]) * torch.arange(3.0)


def test_a_random_program_is_refused(quick, classified):
    case, la, _ = classified
    student = la.distil(case.x, **{**quick, "steps": 5}, student=Random(*case.model))
    with pytest.raises(RuntimeError, match=r"off by .* in 'probs'"):
        student.export(case.x)
