"""Students in files and as programs."""

import copy
import warnings

import pytest
import torch
from tiny import draw, fitted, likelihood_of
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, Student

QUICK = {"num_inputs": 100, "steps": 20, "batch_size": 64, "progress_bar": False}


@pytest.fixture(scope="module", params=["classification", "regression"])
def student(request):
    case, la = fitted(request.param)
    return case, la.distil(draw(100, 2, seed=5), validation=(case.x, case.y), **QUICK)


@pytest.mark.parametrize("name", ["student.pt", "student.safetensors"])
def test_saved_and_loaded(student, name, tmp_path):
    case, student = student
    student.save(tmp_path / name)
    again = Student.load(tmp_path / name, case.model)
    one, other = student.predict(case.x), again.predict(case.x)
    for quantity in ("expectation", "epistemic", "aleatoric", "p_value"):
        torch.testing.assert_close(getattr(one, quantity), getattr(other, quantity))
    assert again.error == student.error
    assert repr(again) == repr(student)
    assert not any(p.requires_grad for p in again.parameters())


def test_a_student_is_loaded_in_the_module_that_contains_it(student):
    case, student = student
    fresh = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.reference_scores = fresh.reference_errors = None
    nn.ModuleList([case.model, fresh]).load_state_dict(
        nn.ModuleList([case.model, student]).state_dict()
    )
    one, other = student.predict(case.x), fresh.predict(case.x)
    torch.testing.assert_close(one.expectation, other.expectation)
    assert torch.equal(one.p_value, other.p_value)


def test_files_that_do_not_fit(student, tmp_path):
    case, student = student
    student.save(tmp_path / "student.pt")
    other = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(ValueError, match="another architecture than the student"):
        Student.load(tmp_path / "student.pt", other)
    _, la = fitted()
    la.save(tmp_path / "posterior.pt")
    with pytest.raises(ValueError, match="holds a posterior, not a student"):
        Student.load(tmp_path / "posterior.pt", case.model)
    with pytest.raises(ValueError, match=r"holds a student, not a posterior: use Student\.load"):
        LinearisedLaplace.load(tmp_path / "student.pt", case.model)
    ensemble = LaplaceEnsemble([la, la])
    ensemble.save(tmp_path / "ensemble.pt")
    with pytest.raises(ValueError, match="holds an ensemble, not a posterior"):
        LinearisedLaplace.load(tmp_path / "ensemble.pt", case.model)
    for state, kind in (
        (student.state_dict(), "a student"),
        (ensemble.state_dict(), "an ensemble"),
    ):
        with pytest.raises(ValueError, match=f"holds {kind}, not a posterior"):
            la.load_state_dict(state)
    with pytest.raises(ValueError, match="holds a posterior, not an ensemble"):
        ensemble.load_state_dict(la.state_dict())


def test_own_functions_are_passed_again(tmp_path):
    case, _ = fitted()

    def half(model, x):
        return model(x) / 2

    la = LinearisedLaplace(
        case.model, likelihood_of("classification"), num_samples=4, forward_fn=half
    )
    student = la.fit(case.x, case.y, progress_bar=False).distil(case.x, **QUICK)
    student.save(tmp_path / "student.pt")
    with pytest.raises(ValueError, match="your own forward_fn"):
        Student.load(tmp_path / "student.pt", case.model)
    again = Student.load(tmp_path / "student.pt", case.model, forward_fn=half)
    torch.testing.assert_close(again(case.x), student(case.x))


def test_exported(student, tmp_path):
    case, student = student
    program = student.export(case.x[:4], tmp_path / "student.pt2", level=0.8)
    loaded = torch.export.load(tmp_path / "student.pt2").module()
    for x in (case.x, case.x[:1], 2 * case.x[:7]):
        due, found = student.predict(x), loaded(x)
        assert found.keys() == program.module()(x).keys()
        for name in found.keys() & {"probs", "expectation", "predictive_variance", "epistemic"}:
            torch.testing.assert_close(found[name], getattr(due, name))
        torch.testing.assert_close(found["p_value"], due.p_value)
        torch.testing.assert_close(found["ood_score"], due.log_scores.exp())
        if case.name == "regression":
            torch.testing.assert_close((found["lower"], found["upper"]), tuple(due.interval(0.8)))
        else:
            assert torch.equal(found["prediction_set"], due.prediction_set(0.8))
    with pytest.raises(ValueError, match="has no known ending"):
        student.export(case.x, tmp_path / "student.txt")


@pytest.mark.slow
def test_exported_to_onnx(student, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    case, student = student
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        warnings.simplefilter("error", RuntimeWarning)  # as of constants that overflow
        student.export(case.x[:4], tmp_path / "student.onnx", level=0.8)
    session = onnxruntime.InferenceSession(tmp_path / "student.onnx")
    names = [each.name for each in session.get_outputs()]
    (entry,), x = session.get_inputs(), draw(25, 2, seed=7)  # no ties with the reference
    found = dict(zip(names, session.run(None, {entry.name: x.numpy()})))
    due = student.predict(x)
    torch.testing.assert_close(torch.from_numpy(found["epistemic"]), due.epistemic)
    torch.testing.assert_close(torch.from_numpy(found["p_value"]), due.p_value)


def test_a_random_program_is_refused():
    case, la = fitted()

    class Random(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + torch.rand_like(x[:, :1]) * torch.arange(3.0)

    student = la.distil(case.x, **QUICK, student=Random(*case.model))
    with pytest.raises(RuntimeError, match=r"off by .* in 'probs'"):
        student.export(case.x)


def test_a_killed_distillation_resumes(tmp_path, monkeypatch):
    """It ends with the same student, and predicts nothing twice."""
    case, la = fitted()
    x, heads, predict = draw(100, 2, seed=5), Student.heads, type(la).predict
    due = la.distil(x, **QUICK)(case.x)
    monkeypatch.setattr("torch_lla_em.distil.progress._SECONDS", 0.0)
    calls = {"heads": 0, "predictions": 0}

    def counted(name, method, last):
        def call(self, *args):
            calls[name] += 1
            if calls[name] == last:
                raise KeyboardInterrupt
            return method(self, *args)

        return call

    monkeypatch.setattr(type(la), "predict", counted("predictions", predict, 3))
    monkeypatch.setattr(Student, "heads", counted("heads", heads, 12))
    for _ in range(2):  # killed while predicting, and in the training
        with pytest.raises(KeyboardInterrupt):
            la.distil(x, **QUICK, checkpoint=tmp_path)
    student = la.distil(x, **QUICK, checkpoint=tmp_path)
    assert torch.equal(student(case.x), due)
    made = calls["predictions"]
    assert calls["heads"] - 12 < QUICK["steps"]
    la.distil(x, **QUICK, checkpoint=tmp_path)
    assert calls["predictions"] == made
    for changed, name in (({"seed": 1}, "inputs"), ({"steps": 21}, "training")):
        with pytest.raises(ValueError, match=f"another distillation: its {name} is another"):
            la.distil(x, **QUICK | changed, checkpoint=tmp_path)
