"""Students: what they learn of their posteriors, their own guarantees, files, programs, and what is refused."""

import copy
import dataclasses
import logging
import warnings

import pytest
import torch
from daily import daily
from models import of_onnx
from tiny import draw, fitted, likelihood_of, posterior_of
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.testing import assert_close

from torch_lla_em import (
    Adapter,
    BradleyTerry,
    HeteroscedasticRegression,
    LaplaceEnsemble,
    LinearisedLaplace,
    Regression,
    Student,
)
from torch_lla_em.distil import StudentError, training
from torch_lla_em.distil.inputs import augmented, chosen_ways
from torch_lla_em.distil.training import Known
from torch_lla_em.runtime import files

QUICK = {"num_inputs": 100, "steps": 40, "progress_bar": False}


@pytest.fixture(scope="module")
def classified():
    case, la = fitted()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 80), nn.Tanh(), nn.Linear(80, 3)).double()
    close = QUICK | {"num_inputs": 1000, "steps": 500}
    return case, la, la.distil(draw(300, 2, seed=5), **close, student=network)


@pytest.fixture(scope="module")
def regressed():
    case, la = fitted("regression")
    return case, la, la.distil(draw(100, 2, seed=5), **QUICK)


@pytest.fixture(params=["regressed", "classified"])
def student(request):
    """A case and a student that is calibrated on its examples."""
    case, _, student = request.getfixturevalue(request.param)
    return case, student.calibrate(case.x, case.y)


def test_a_student_learns_the_posterior(classified):
    case, la, student = classified
    x = draw(400, 2, seed=8)
    p, q = la.predict(x), student.predict(x)
    kl = (p.probs * (p.log_probs - q.log_probs)).sum(1).mean()
    network = case.model(x).detach().log_softmax(1)
    assert kl < 0.1 * (p.probs * (p.log_probs - network)).sum(1).mean()
    assert_close(student(x), q.probs)
    ranks = torch.stack([v.argsort().argsort().double() for v in (p.epistemic, q.epistemic)])
    assert torch.corrcoef(ranks)[0, 1] > 0.95
    assert_close(q.aleatoric + q.epistemic, q.entropy)
    assert_close(q.predictive_variance, q.probs * (1 - q.probs))
    assert student.error.number == 30 and 0 < max(student.error.kl, student.error.kl_made) < 0.02
    x = case.x.clone().requires_grad_()
    student.predict(x).epistemic.sum().backward()
    assert x.grad.abs().sum() > 0 and not student(case.x).requires_grad
    other = copy.deepcopy(student)  # whose features are those of its own network
    other.head[-1].bias.add_(9.0)
    assert_close(other.predict(case.x).log_scores, student.predict(case.x).log_scores + 9)
    assert (other.predict(case.x).aleatoric >= 0).all()


def test_networks_random_numbers_and_formats_of_inputs():
    """The network and global seeds are not changed, and any format of the inputs gives the same student."""
    case, la = fitted()
    quick = QUICK | {"steps": 5, "num_inputs": 20}
    before, state = copy.deepcopy(case.model.state_dict()), torch.get_rng_state()
    student = la.distil([(case.x, case.y)], **quick)  # whose targets are not used
    due = student(case.x)
    assert not torch.equal(la.distil(case.x, **quick, seed=1)(case.x), due)
    assert torch.equal(torch.get_rng_state(), state)
    data = torch.utils.data.TensorDataset(case.x, case.y)
    loader = torch.utils.data.DataLoader(data, 7)
    for given in (loader, data, case.x.numpy(), iter(list(loader))):
        assert torch.equal(la.distil(given, **quick)(case.x), due)
    assert_close(case.model.state_dict(), before)
    assert student.train().network.training is False
    assert not any(p.requires_grad for p in student.parameters())
    assert all(p.requires_grad for p in case.model.parameters())


OTHERS = ["bernoulli", "regression per output", "classification"]


@pytest.mark.parametrize("name", daily("regression", "poisson", rest=OTHERS))
def test_all_likelihoods(name):
    case, la = fitted(name)
    student = la.distil([(case.x, case.y)], **QUICK)
    ours, own = la.predict(case.x), student.predict(case.x)
    for quantity in ("expectation", "epistemic", "aleatoric", "predictive_variance"):
        assert getattr(own, quantity).shape == getattr(ours, quantity).shape
        assert getattr(own, quantity).isfinite().all()
    if name == "poisson":
        with pytest.raises(TypeError, match=r"has no \.log_prob"):
            own.log_prob(case.y)
        return
    assert (own.log_prob(case.y) - ours.log_prob(case.y)).mean().abs() < 0.3
    if name.startswith("regression"):
        mean, variance = student(case.x)
        assert_close(variance, own.aleatoric + own.epistemic)
        assert_close(own.aleatoric.std(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
        total = Normal(mean, variance.sqrt())
        assert_close(own.log_prob(case.y), total.log_prob(case.y).sum(1))
        assert_close(own.entropy, total.entropy())


def posterior(network, likelihood, *data, **options):
    return posterior_of(network.double(), likelihood, *data, **options, em_steps=2)


def small(outputs):
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def test_two_outputs_pairs_sites_and_tokens():
    x = draw(60, 2)
    la = posterior(small(2), HeteroscedasticRegression(), x, draw(60, 1, seed=2))
    assert la.distil(x, **QUICK).predict(x).entropy.shape == la.predict(x).entropy.shape
    pairs = x, draw(60, 2, seed=1)
    la = posterior(small(1), BradleyTerry(), [(pairs, (draw(60, seed=2) > 0).long())])
    student = la.distil(pairs, **QUICK | {"steps": 300})
    assert student.head[0].in_features == 10  # the features of both
    assert_close(student(pairs), la(pairs), atol=0.1, rtol=0)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = draw(20, 2, 4, 4), torch.randint(3, (20, 4, 4), generator=generator)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    la = posterior(conv, "classification", x, y, class_dim=1)
    student = la.distil(x, **QUICK, augment=["noise", lambda x: x.flip(-1)])
    prediction, ours = student.predict(x), la.predict(x)
    assert student(x).shape == prediction.probs.shape == (20, 3, 4, 4)
    assert prediction.epistemic.shape == ours.epistemic.shape == (20, 4, 4)
    assert_close(prediction.log_prob(y), ours.log_prob(y), atol=3.0, rtol=0)
    with pytest.raises(TypeError, match=r"RiskControl\(la, validation_loader\) for a label at"):
        prediction.prediction_set()
    tokens = torch.randint(9, (30, 5), generator=generator)
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))
    la = posterior(text, "classification", tokens, tokens[:, 0] % 2)
    assert la.distil(tokens, **QUICK).error.kl < 0.1


def known_values(found, given):
    """Return which numbers are among those of their column."""
    return torch.stack([torch.isin(a, b) for a, b in zip(found.T, given.T, strict=True)], 1)


def test_inputs_are_made_from_others():
    x, mask = draw(40, 3), torch.ones(40, 2).long()
    tokens = 2 + torch.arange(160).view(40, 4) % 7
    generator, known = torch.Generator().manual_seed(0), {*map(tuple, tokens.tolist())}

    def made(way, given, count):
        parts = augmented(given, count, chosen_ways(given, way), generator)
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    noisy, alike = made("noise", (x, tokens), 600)
    assert len(noisy) == 600 and {tuple(row) for row in alike.tolist()} <= known
    gap = torch.cdist(noisy, x).amin(1)
    assert 0 < gap.median() < 1 < gap.max()
    swapped, others, masks = made("swap", (x, tokens, mask), 400)
    whole = known_values(swapped, x).all(1)  # not mixed
    assert 150 < whole.sum() < 250 and (torch.cdist(swapped[whole], x).amin(1) > 0).any()
    assert ((swapped >= x.amin(0)) & (swapped <= x.amax(0))).all()
    assert known_values(others, tokens).all()
    assert not {*map(tuple, others.tolist())} <= known
    assert torch.equal(masks, mask[:1].expand(400, 2))
    double = made(["noise", lambda inputs: (100 + inputs[0], inputs[1])], (x, tokens), 301)[0]
    assert ((double > 50).all(1).sum(), len(double)) == (150, 301)
    assert chosen_ways(x, None) == ("noise", "swap") and chosen_ways(tokens, None) == ("swap",)


def test_categories_keep_their_values():
    """Columns of one category are replaced together, a constant one among them, and others are not mixed."""
    generator = torch.Generator().manual_seed(0)
    # a column that is no category, then 0, 1 or 2 of four, the same of three, 0 or 1, and 0 to 2
    kind, order = torch.randint(3, (400,), generator=generator), torch.tensor([0, 2, 3])
    four, three = (nn.functional.one_hot(kind, n).double() for n in (4, 3))
    binary = (draw(400, 2) > 0).double()
    parts = binary[:, :1], draw(400, 1), four[:, [0, 3, 1, 2]], three, binary[:, 1:], kind[:, None]
    x = torch.cat([parts[0], *[3 * part - 1 for part in parts[1:]]], 1)
    for way, changed in (("swap", 0.5), ("noise", 1)):
        found = torch.cat([*augmented(x, 2_000, [way], generator)])
        is_known = known_values(found, x)
        assert is_known[:, [0, *range(2, 11)]].all()
        assert abs((~is_known[:, 1]).double().mean() - changed) < 5 * (0.25 / 2_000) ** 0.5
        for columns in (slice(2, 6), slice(6, 9)):
            assert (found[:, columns].sum(1) == x[0, columns].sum()).all()
        # one of two is exchanged in 1/3 of the examples, and differs in 2/3 of these
        apart = (found[:, 2:6].argmax(1) != order[found[:, 6:9].argmax(1)]).double().mean()
        assert abs(apart - 2 / 9) < 5 * (2 / 9 * 7 / 9 / 2_000) ** 0.5
    # without examples of one value, or with few of all, columns are their own
    assert not torch.isin(torch.cat([*augmented(x[:30], 300, ["swap"], generator)]), x).all()


def test_an_ensemble_and_a_network_of_ones_own(classified):
    (case, la, known), (_, other) = classified, fitted(seed=1)
    ensemble, network = LaplaceEnsemble([la, other]), copy.deepcopy(known.network)
    before = copy.deepcopy(network.state_dict())
    student = ensemble.distil(draw(100, 2), **QUICK, student=network)
    assert student.head[0].in_features == 80
    assert_close(network.state_dict(), before)
    assert_close(student(case.x), ensemble(case.x), atol=0.15, rtol=0)


def test_what_a_student_cannot_say(classified, regressed):
    of_classes, of_values = (
        dataclasses.replace(student.predict(case.x), _reference=None)
        for case, _, student in (classified, regressed)
    )
    for words, use in {
        r"p_value needs .*own scores.*student\.calibrate": lambda: of_values.p_value,
        "prediction_set needs .*own scores": lambda: of_classes.prediction_set(),
        "rate must lie": lambda: of_values.is_ood(0),
        "interval is for continuous targets": lambda: of_classes.interval(),
        "Regression has no .probs": lambda: of_values.probs,
        "prediction_set is for one class label": lambda: of_values.prediction_set(),
    }.items():
        with pytest.raises((TypeError, ValueError), match=words):
            use()


class Folded(nn.Sequential):
    """Its last layer has fewer examples than the outputs."""

    def forward(self, x):
        return super().forward(x.reshape(-1, 4)).reshape(-1, 3)


NAN = draw(30, 2).index_fill(0, torch.tensor([3]), float("nan"))


REFUSED = [
    ("have no rows", {"inputs": None}),
    ("at least 10 inputs, not 5", {"inputs": draw(5, 2)}),
    ("Sizes of tensors must match", {"inputs": [(draw(9, 2),), (draw(9, 3),)]}),
    ("NaN or infinite at some inputs, such as", {"inputs": NAN}),
    ("NaN or infinite", {"augment": lambda x: x / 0}),
    (r"student predicts shape \(2, 4\)", {"student": nn.Linear(2, 4).double()}),
    ("no features for each output", {"student": Folded(nn.Linear(4, 6)).double()}),
    ("one row per example", {"inputs": (draw(30, 2), draw(3, 2))}),
    ("augment='flip' is not known: choose", {"augment": "flip"}),
    ("no argument 'lr' any more: leave it out", {"lr": 0.1}),
    ("steps must be a whole number", {"steps": 0}),
]


@pytest.mark.parametrize("words, change", REFUSED)
def test_what_does_not_fit_is_refused_before_the_work(words, change, classified):
    case, la, _ = classified
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        la.distil(**{"inputs": case.x, **QUICK, "steps": 10**9, **change})


def test_the_error_in_words(caplog):
    _, la = fitted()
    student = la.distil(draw(100, 2), **QUICK | {"steps": 1})
    for text in (caplog.text, " ".join(repr(student).split())):
        assert "is not close to the posterior" in text
    assert "student.calibrate(validation_loader)" in repr(student)
    assert f"OOD scores {student.error.ood_made:.3f}" in text
    good = StudentError(50, 0.01, 0.9, 0.05, 0.95)
    assert not good.warning
    for change in ({"kl": 0.04}, {"kl": float("nan")}, {"kl_made": 0.2}, {"epistemic": 0.5}):
        assert good._replace(**change).warning
    assert good._replace(ood_made=0.5).warning


def test_errors_are_those_at_inputs_that_the_training_has_not_seen(classified, monkeypatch):
    learnt, judged, la = [], [], classified[1]
    train, error = training._train, training._error
    monkeypatch.setattr(training, "_train", lambda *a: learnt.append(a[1].x) or train(*a))
    monkeypatch.setattr(training, "_error", lambda *a: judged.append(a[1].x) or error(*a))
    la.distil(draw(100, 2), **QUICK | {"steps": 2})
    (seen,), others = ([{*map(tuple, x.tolist())} for x in given] for given in (learnt, judged))
    assert [len(rows & seen) for rows in others] == [0, 0] and len(others[0]) == 10


def test_kl_is_that_of_torch():
    f, g, none = draw(6, 3), draw(6, 3, seed=1), torch.zeros(6, 1)

    def found(likelihood, expectation, uncertainty=none, own=none):
        return Known(none, expectation, uncertainty, none).divergence(likelihood, g, own)

    classes = found(likelihood_of("classification"), f.softmax(-1))
    assert_close(classes, kl_divergence(Categorical(logits=f), Categorical(logits=g)))
    labels = found(likelihood_of("bernoulli"), f.sigmoid())
    assert_close(labels, kl_divergence(Bernoulli(logits=f), Bernoulli(logits=g)).mean(1))
    v, w = draw(6, 6, seed=2).exp(), draw(6, 6, seed=3).exp()
    totals = [each[:, :3] + each[:, 3:] for each in (v, w)]
    one, other = (Normal(m, t.sqrt()) for m, t in zip((f, g), totals, strict=True))
    assert_close(found(Regression(), f, v, w.log()), kl_divergence(one, other).mean(1))


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
        assert abs(mean - level) < 5 * error


def test_p_values_are_ranks_among_the_labelled_reference(student):
    case, student = student
    x, y = drawn(case, 39, torch.Generator().manual_seed(2))
    student.calibrate(x, y)
    others = draw(7, 2, seed=3) * 2
    prediction = student.predict(others)
    reference, own = student.predict(x).log_scores, prediction.log_scores
    every = torch.cat([reference.expand(7, -1, -1), own[:, None]], 1)  # the input is the last
    room = torch.finfo(torch.float32).eps ** 0.5  # up to which scores are ties
    ranks = (every[:, None] >= every[:, :, None] - room).sum(2).double()
    unusual = (1 / ranks).sum(2)
    due = (unusual >= unusual[:, -1:] - 1e-9).double().mean(1)
    assert_close(prediction.p_value, due)
    assert torch.equal(prediction.is_ood(0.2), prediction.p_value <= 0.2)
    with pytest.raises(ValueError, match="needs at least 99 reference examples"):
        prediction.is_ood(0.01)
    assert "39 examples" in repr(student)
    shown = repr(prediction).splitlines()
    assert len(shown) == 9 and "of 7" in shown[-1]
    if case.name == "classification":
        student.calibrate(x, y.index_fill(0, torch.arange(10), -100))
        assert len(student.reference.unusual) == 29
        with pytest.raises(ValueError, match="None of the validation examples has a label"):
            student.calibrate(x, torch.full_like(y, -100))


def test_scores_and_outputs_can_be_compared_apart(student):
    """As those of posteriors: p-values by one score, and intervals of all outputs at once."""
    case, student = student
    p = student.predict(case.x)
    scores, reference = p.ood_score, student.reference.unusual
    above = (reference[:, 0] >= scores[:, :1] * (1 - p._ties)).sum(1)
    by_rank = (1 + above) / (1 + len(reference))
    assert_close(p.p_values("epistemic"), by_rank.double())
    assert_close(p.is_ood(0.2, "epistemic"), p.p_values("epistemic") <= 0.2)
    assert_close(p.compared().scores, scores)
    if student.likelihood.real_valued and p.expectation.shape[1] > 1:
        alone, both = p.interval(0.8), p.interval(0.8, joint=True)
        assert (both.upper >= alone.upper).all()
    with pytest.raises(AttributeError, match="no attribute 'mean' any more: .*expectation"):
        p.mean


def assert_alike(one, other):
    for quantity in ("expectation", "epistemic", "aleatoric", "p_value"):
        assert_close(getattr(one, quantity), getattr(other, quantity))


def half(model, x):
    return model(x) / 2


def test_files(student, tmp_path):
    case, student = student
    own, former, halves = (tmp_path / f"{n}.pt" for n in ("student", "former", "half"))
    student.save(own)
    again = Student.load(own, copy.deepcopy(student.network))
    assert_alike(student.predict(case.x), again.predict(case.x))
    assert again.error == student.error and repr(again) == repr(student)
    assert not any(p.requires_grad for p in again.parameters())
    for parameter in again.parameters():
        parameter.zero_()
    again.reference = None
    again.load_state_dict(student.state_dict())
    assert_alike(student.predict(case.x), again.predict(case.x))
    state = torch.load(own)
    record = files.from_bytes(state["student"]) | {"forward_fn": False}
    torch.save(state | {"student": files.to_bytes(record)}, former)
    la = fitted(adapter=Adapter(outputs=half))[1]
    halved = la.distil(case.x, **QUICK | {"steps": 5})
    halved.save(halves)
    for words, use in {
        "of version 0.4: distil the posterior again": lambda: Student.load(former, case.model),
        "size mismatch for network": lambda: Student.load(own, small(3).double()),
        "that of Student, not of": lambda: LinearisedLaplace.load(own, case.model),
        "that of Student, not of L": lambda: la.load_state_dict(student.state_dict()),
        "your own adapter": lambda: Student.load(halves, halved.network),
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=words):
            use()
    again = Student.load(halves, halved.network, adapter=Adapter(half))
    assert_close(again(case.x), halved(case.x))


@pytest.mark.parametrize("name", daily("regressed", rest=["classified"]))
@pytest.mark.parametrize("suffix", daily("pt2", rest=["onnx"]))
def test_exported(name, suffix, request, tmp_path, capfd, caplog):
    case, _, student = request.getfixturevalue(name)
    student.calibrate(case.x, case.y)
    path = tmp_path / f"student.{suffix}"
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        warnings.simplefilter("error", RuntimeWarning)  # as of constants that overflow
        student.export(case.x[:4], path, level=0.8, p_value=True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not "".join(capfd.readouterr())
    program = of_onnx(path)[0] if suffix == "onnx" else torch.export.load(path).module()
    is_regression = case.name == "regression"
    names = ["expectation", "predictive_variance"] if is_regression else ["probs"]
    names += ["epistemic", "aleatoric", "ood_score", "p_value"]
    if suffix == "pt2":
        assert "p_value" not in student.export(case.x).module()(case.x)
    for x in (draw(25, 2, seed=7), draw(1, 2, seed=8), case.x):  # the last ties with the reference
        prediction, found = student.predict(x), program(x)
        due = {each: getattr(prediction, each) for each in names}
        if is_regression:
            due |= prediction.interval(0.8)._asdict()
        else:
            due["prediction_set"] = prediction.prediction_set(0.8)
        assert [*found] == [*due]
        assert_close(found, due, check_dtype=False)


class Random(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x[:, :1]) * torch.arange(3.0)


def test_a_random_program_is_refused(classified):
    case, la, _ = classified
    student = la.distil(case.x, **QUICK | {"steps": 5}, student=Random(*case.model))
    with pytest.raises(RuntimeError, match=r"off by .* in 'probs'"):
        student.export(case.x)
