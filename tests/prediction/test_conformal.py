"""Conformal p-values, sets and intervals, and the training examples that a fit keeps for them."""

import pytest
import tiny
import torch
from daily import daily
from models import trained
from tiny import draw
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, Prediction
from torch_lla_em.likelihoods import Bernoulli, Classification, Regression
from torch_lla_em.prediction.metrics import auroc
from torch_lla_em.prediction.neighbours import (
    TrainingExamples,
    output_variance,
    variances_without,
)
from torch_lla_em.prediction.pushforward import Products, Pushforward, push_forward
from torch_lla_em.prediction.ranks import mass_above, p_values, quantiles


def others(values, i):
    return torch.cat([values[:i], values[i + 1 :]])


@pytest.mark.parametrize("ties", [False, True])
def test_among_examples_that_are_alike_false_alarms_keep_to_their_rate(ties):
    """Each of 60 examples is the new one once, so that counting gives the probability."""
    scores = draw(60, 2)
    scores = scores.mul(2).round() if ties else scores
    found = torch.stack([p_values(others(scores, i), scores[i : i + 1])[0] for i in range(60)])
    for rate in (0.02, 0.05, 0.1, 0.3, 0.8):
        share = (found <= rate).double().mean()
        assert share <= rate
        assert ties or share > rate - 3 / 60


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_p_values_rank_a_harmonic_mean_of_the_shares_of_larger_scores(columns):
    reference, scores = draw(25, columns), draw(40, columns, seed=1)
    weights = torch.tensor([4.0, 1.0, 1.0] if columns == 3 else columns * [1.0]).double()
    for score, found in zip(scores, p_values(reference, scores)):
        every = torch.cat([score[None], reference])
        shares = (every[None] >= every[:, None]).double().mean(1)
        unusual = (weights / shares).sum(1)
        assert_close(found.item(), (unusual >= unusual[0] - 1e-9).double().mean().item())


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
def test_quantiles_cover_a_new_example(level):
    errors = draw(39, 2).abs()
    bounds = [quantiles(others(errors, i).sort(0).values, level) for i in range(39)]
    covered = (errors <= torch.stack(bounds)).double().mean(0)
    assert ((covered >= level) & (covered <= level + 1 / 39 + 1e-9)).all()


def test_levels_that_a_reference_cannot_support_are_refused_with_the_number_needed():
    quantiles(draw(19, 1), 0.95)
    with pytest.raises(ValueError, match="at least 19 reference examples.*18.*38 examples.*half"):
        quantiles(draw(18, 1), 0.95)
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantiles(draw(18, 1), 1.0)


@pytest.fixture(scope="module")
def blobs():
    """Four overlapping classes, a network trained on 200 of them, and its posterior."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (2200,), generator=generator)
    x = torch.randn(2200, 3, generator=generator) + 2 * nn.functional.one_hot(y, 4)[:, :3]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 4))
        trained(net, x[:200], y[:200], 150)
    la = LinearisedLaplace(net, "classification", num_samples=16, seed=0)
    la.fit(x[:200], y[:200], progress_bar=False)
    return la, x[200:], y[200:]


def fresh_copy(la, without):
    fresh = LinearisedLaplace(la.model, "classification", num_samples=16)
    state = {n: t for n, t in la.state_dict().items() if not n.startswith(without)}
    fresh.load_state_dict(state)
    return fresh


def test_without_a_validation_set_training_examples_are_the_reference(blobs):
    la, x, _ = blobs
    fresh = fresh_copy(la, without="conformal")
    with pytest.raises(ValueError, match="Call la.calibrate"):
        fresh.predict(x[:3]).prediction_set()
    with pytest.warns(UserWarning, match="calibrate has not been called"):
        assert fresh.is_ood(10 * draw(500, 3).float()).double().mean() > 0.9
    assert (fresh.predict(x[800:]).p_value <= 0.05).double().mean() < 0.15
    none = fresh_copy(la, without=("conformal", "training", "largest"))
    with pytest.raises(ValueError, match="Call la.calibrate"):
        none.is_ood(x[:3])


def test_far_inputs_are_flagged_and_others_at_the_rate(blobs):
    la, x, y = blobs
    far, alarms, covered = 10 * draw(500, 3).float(), [], []
    outside = (
        torch.cdist(far, x).amin(1) > 3
    )  # deviations of a class from all 2,000; the others lie among them
    for k in range(8):  # disjoint validation sets, one test set
        la.calibrate(x[100 * k : 100 * (k + 1)], y[100 * k : 100 * (k + 1)])
        alarms.append(la.is_ood(x[800:], 0.1).double().mean())
        sets = la.predict(x[800:]).prediction_set(0.8)
        covered.append(sets.gather(1, y[800:, None]).double().mean())
        flagged, by_spread, by_distance = (
            la.is_ood(far, score=score).double() for score in ("all", "epistemic", "distance")
        )
        assert by_distance.mean() > 0.95 and by_distance[outside].mean() > 0.99
        assert flagged[outside].mean() > 0.9 and flagged.mean() >= by_spread.mean()
    assert outside.double().mean() > 0.9
    # the share that 50 examples leave has variance p (1 - p) / 52
    error = 5 * (0.1 * 0.9 / 52 / 8 + 0.1 * 0.9 / 1200) ** 0.5
    assert torch.stack(alarms).mean() < 0.1 + error
    error = 5 * (0.2 * 0.8 / 52 / 8 + 0.2 * 0.8 / 1200) ** 0.5
    assert torch.stack(covered).mean() > 0.8 - error


def test_the_reference_is_of_examples_that_nothing_was_fitted_to(blobs):
    la, x, y = blobs
    la.calibrate(x[:60], y[:60])
    before = la.reference.table.clone()
    other = y[:60].clone()
    other[1::2] = (other[1::2] + 1) % 4
    la.calibrate(x[:60], other)
    assert torch.equal(la.reference.table, before)
    assert la.reference.unusual.shape == (30, 3) and la.reference.errors.shape == (30, 1)
    la.calibrate(list(zip(x[:60].split(7), y[:60].split(7))))
    assert_close(la.reference.table, before, rtol=1e-4, atol=1e-5)


def test_sets_of_pixels_are_those_of_risk_control():
    pixels = Prediction.of(Classification(), torch.zeros(2, 5, 5, 3), torch.zeros(2, 2, 5, 5, 3), 1)
    with pytest.raises(TypeError, match=r"use RiskControl\(la, validation_loader\)"):
        pixels.prediction_set()
    with pytest.raises(TypeError, match=r"use interval\(level\) for a regression"):
        Prediction.of(Regression(1.0), torch.zeros(2, 1), torch.zeros(2, 2, 1)).prediction_set()


def test_sets_are_saved_and_moved_with_the_posterior(blobs, tmp_path):
    la, x, y = blobs
    la.calibrate(x[:400], y[:400])
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    ours, theirs = la.predict(x[400:500]), loaded.predict(x[400:500])
    assert torch.equal(ours.p_value, theirs.p_value)
    assert torch.equal(ours.prediction_set(0.9), theirs.prediction_set(0.9))
    sizes = torch.stack([ours.prediction_set(level).sum(1) for level in (0.5, 0.9, 0.99)])
    assert (sizes[0] >= 1).all() and (sizes.diff(dim=0) >= 0).all()
    with pytest.raises(TypeError, match="prediction_set"):
        ours.interval()
    with pytest.raises(ValueError, match="without mean= and num_samples="):
        la.predict(x[:3], mean="network").prediction_set()


def test_intervals_are_for_each_output_and_wider_where_f_is_uncertain():
    noise = {"likelihood": "regression", "sigma_noise": torch.ones(3)}
    case, la = tiny.fitted("regression per output", num_samples=8, **noise)
    x = draw(120, *case.x.shape[1:])
    y = case.model(x).detach() + torch.tensor([0.1, 1.0, 10.0]) * draw(120, 3, seed=1)
    la.calibrate(x[:80], y[:80])
    prediction = la.predict(x[80:])
    lower, upper = prediction.interval(0.8)
    assert lower.shape == upper.shape == (40, 3)
    share = ((y[80:] >= lower) & (y[80:] <= upper)).double().mean(0)
    assert (share > 0.8 - 5 * (0.16 / 42 + 0.16 / 40) ** 0.5).all()
    half = (upper - lower) / 2
    other = prediction.judged("interval")[1]
    assert_close(half / other.predictive_variance.sqrt(), la_bounds(la, 0.8).expand(40, 3))
    with pytest.raises(TypeError, match="interval"):
        prediction.prediction_set()
    with pytest.raises(ValueError, match="regressions do not keep"):
        prediction.p_values("distance")
    assert_close(prediction.p_values("epistemic"), prediction.p_value)
    assert (la.predict(100 * x).p_value < 0.05).all()


def la_bounds(la, level):
    return quantiles(la.reference.errors, level)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_other_likelihoods_have_p_values_and_no_sets(name):
    case, la = tiny.fitted(name, em_steps=0, prior_precision=1.0)
    la.calibrate(case.x, case.y)
    prediction = la.predict(case.x)
    assert prediction.p_value.shape == (len(case.x),)
    for ask in (prediction.prediction_set, prediction.interval):
        with pytest.raises(TypeError):
            ask()


def test_some_of_the_scores_can_be_chosen(blobs):
    la, x, y = blobs
    la.calibrate(x[:400], y[:400])
    prediction = la.predict(x[400:500])
    reference, own = prediction.judged("p_value")
    scores, units = own.scored
    assert_close(own.epistemic.double(), scores[:, 0], rtol=1e-4, atol=1e-6)
    for score, columns in (("all", [0, 1, 2]), ("epistemic", [0]), ("distance", [1, 2])):
        among = reference.unusual[:, columns], scores[:, columns]
        due = p_values(*among, prediction._room, units[columns])
        assert_close(prediction.p_values(score), due)
        assert torch.equal(la.is_ood(x[400:500], score=score), due <= 0.05)
    assert torch.equal(prediction.p_value, prediction.p_values())
    with pytest.raises(ValueError, match="score='entropy'"):
        prediction.is_ood(score="entropy")


def test_posteriors_of_earlier_versions_have_the_p_values_of_their_one_score(blobs):
    la, x, y = blobs
    la.calibrate(x[:400], y[:400])
    state = la.state_dict()
    for name in ("conformal_unusual", "training_distances"):
        state[name] = state[name][:, -1:]
    state["training_distances"] = state["training_distances"][:, 0]
    old = LinearisedLaplace(la.model, "classification", num_samples=16)
    old.load_state_dict(state)
    prediction = old.predict(x[400:500])
    reference, own = prediction.judged("p_value")
    among = reference.unusual, own.scored.values[:, 2:]
    due = p_values(*among, prediction._room, own.scored.units[2:])
    assert_close(prediction.p_value, due)
    with pytest.raises(ValueError, match='score="epistemic" needs a reference with this score'):
        prediction.p_values("epistemic")
    without = {n: t for n, t in state.items() if not n.startswith("conformal")}
    old.load_state_dict(without)
    assert old.predict(x[400:500]).p_value.shape == (100,)


def test_examples_without_a_label_are_no_reference():
    case, la = tiny.fitted("classification", em_steps=0, prior_precision=1.0)
    y = case.y.clone()
    y[:2] = -100
    la.calibrate(case.x, y)
    assert len(la.reference.errors) == (len(y) - 2) // 2


@pytest.fixture(scope="module")
def kept():
    torch.manual_seed(0)
    x = draw(60, 3)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    la = LinearisedLaplace(trained(net, x, y, 100), "classification", num_samples=8)
    return la.fit(x, y, progress_bar=False), x, y


def test_a_fit_keeps_the_products_of_its_training_examples(kept):
    la, x, _ = kept
    _, Jw = push_forward(la._linear_model, x, la.w_samples)
    assert_close(la.training_deviations, Jw.movedim(0, 1), rtol=1e-6, atol=1e-9)
    assert la.largest_variance > output_variance(la.likelihood, Jw).max()


def test_the_distance_is_the_standard_deviation_of_a_difference():
    known, new = draw(5, 6, 3), draw(6, 4, 3, seed=1)

    def examples(likelihood, deviations=known):
        return TrainingExamples(likelihood, deviations, torch.tensor(1.0))

    apart = new[:, :, None] - known.movedim(0, 1)[:, None]  # (6, 4, 5, 3)
    every = apart.square().sum(-1).mean(0).sqrt()
    sizes = [part.square().sum(-1).mean(0).sqrt() for part in (new, known.movedim(0, 1))]
    relative = every / (sizes[0][:, None] * sizes[1]).sqrt()
    due = torch.stack([relative.min(1).values, every.min(1).values], 1)
    assert_close(examples(Bernoulli()).distances(new), due)
    small = examples(Bernoulli()).distances(1e-3 * new)  # near 0, and yet not near an example
    assert (small[:, 0] > 3 * due[:, 0]).all()
    shifted = examples(Classification()).distances(new + draw(6, 4, 1, seed=2))
    assert_close(shifted, examples(Classification()).distances(new))


def test_training_examples_are_compared_without_themselves_in_the_posterior():
    """The samples are a root of the covariance, so that there is no Monte Carlo error."""
    J, probs, P = draw(6, 3, 5), draw(6, 3, seed=1).softmax(1), 5
    H = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    precision = torch.eye(P).double() + torch.einsum("ncp,ncd,ndq->pq", J, H, J)
    roots = P**0.5 * torch.linalg.cholesky(torch.linalg.inv(precision)).T
    Jw = torch.einsum("ncp,kp->nkc", J, roots)
    leverages = torch.einsum("nkc,ncd,nld->nkl", Jw, H, Jw) / P
    found = TrainingExamples(Classification(), Jw, torch.tensor(1.0)).distances_without(leverages)
    centred = J - J.mean(1, keepdim=True)
    expected, variances = [], []
    for i in range(6):
        without = torch.linalg.inv(precision - J[i].T @ H[i] @ J[i])
        variances.append(torch.einsum("cp,pq,cq->", centred[i], without, centred[i]) / 3)
        apart = centred[i] - centred
        every = torch.einsum("ncp,pq,ncq->n", apart, without, apart).sqrt()
        sizes = torch.einsum("ncp,pq,ncq->n", centred, without, centred).sqrt()
        relative = every / (sizes * sizes[i]).sqrt()
        expected.append(torch.stack([others(each, i).min() for each in (relative, every)]))
    assert_close(found, torch.stack(expected))
    assert_close(variances_without(Classification(), Jw, leverages), torch.stack(variances))
    alone = TrainingExamples(Classification(), Jw[:1], torch.tensor(1.0))
    assert alone.distances_without(leverages[:1]).isinf().all()


def test_a_fit_takes_the_leverage_of_each_example_from_its_curvature(kept):
    la, x, _ = kept
    f, Jw = push_forward(la._linear_model, x, la.w_lin[None], la.w_samples)
    functions = la.predict(x, mean="linear").functions
    p = functions.softmax(-1)
    H = torch.diag_embed(p.mean(0)) - torch.einsum("snc,snd->ncd", p, p) / len(p)
    leverages = torch.einsum("knc,ncd,lnd->nkl", Jw[1:], H, Jw[1:]) / 8
    training, found = la._posterior.training(), la._posterior.training_distances
    # H of the fit is an average over other draws, which matters where a leverage is near 1
    apart = (found / training.distances_without(leverages) - 1).abs()
    assert apart.median() < 0.02
    apart = (found / training.distances_without(0 * leverages))[:, 1]
    assert apart.min() > 1 - 1e-6 and apart.mean() > 1.03


def test_means_are_shrunk_beyond_the_variance_of_training_examples_only(kept):
    la, x, _ = kept
    inside, far = la.predict(x), la.predict(20 * x)
    f, Jw = push_forward(la._linear_model, x, la.w_lin[None], la.w_samples)
    plain = Pushforward((Products(la.likelihood, f, Jw),), f).prediction(la.mixture)
    assert_close(inside.probs, plain.probs)
    f, Jw = push_forward(la._linear_model, 20 * x, la.w_lin[None], la.w_samples)
    plain = Pushforward((Products(la.likelihood, f, Jw),), f).prediction(la.mixture)
    variance = output_variance(la.likelihood, Jw[1:])
    share = (la.largest_variance / variance).clamp_max(1)
    assert (share < 0.5).any()
    assert_close(far.mean, share[:, None] * plain.mean)
    own, others = (p.mixture.components[0].deviations for p in (far, plain))
    assert_close(own, others)
    assert far.probs.max(1).values.mean() < plain.probs.max(1).values.mean() - 0.05


def test_functions_are_those_of_the_samples(kept):
    la, x, _ = kept
    at = torch.cat([x[:5], 20 * x[:5]])
    found = torch.stack([la.function_sample(k)(at) for k in range(8)])
    assert_close(found, la.predict(at).samples)


def test_an_ensemble_takes_the_mean_of_the_distances(kept):
    la, x, y = kept
    other = LinearisedLaplace(la.model, "classification", num_samples=4, seed=1)
    other.fit(x, y, progress_bar=False)
    ensemble = LaplaceEnsemble([la, other]).calibrate(draw(40, 3, seed=3), y[:40])
    distances = [member.predict(x).origin.distances()[0] for member in (la, other)]
    assert_close(ensemble.predict(x).scored.values[:, 1:], torch.stack(distances).mean(0))
    assert (ensemble.predict(30 * x).p_value <= 0.1).double().mean() > 0.8


def discrete(n, seed):
    """Inputs of two values, and labels that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, (n, 1), generator=generator).float()
    y = torch.rand(n, generator=generator) < 0.2 + 0.4 * x[:, 0]
    return x.expand(n, 3).contiguous(), y.long() + torch.randint(2, (n,), generator=generator)


def of_discrete(seed, likelihood="classification", device="cpu", **options):
    """A calibrated posterior of a network on inputs of two values, by rounding different in batches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    la = LinearisedLaplace(net, likelihood, num_samples=8, seed=seed, **options)
    targets = nn.functional.one_hot if likelihood == "regression" else lambda y, _: y
    (x, y), (new, labels) = discrete(60, seed), discrete(80, seed + 100)
    start = {"prior_precision": 1.0, "em_steps": 0}  # there is hardly any signal
    la.fit(x.to(device), targets(y, 3).to(device) * 1, progress_bar=False, **start)
    return la.calibrate(new.to(device), targets(labels, 3).to(device) * 1)


def compared(la, x):
    """What a prediction says of its inputs in comparison with the validation set."""
    prediction = la.predict(x)
    sets = [prediction.p_value, prediction.is_ood(0.1)]
    if not prediction.likelihood.real_valued:
        sets += [prediction.prediction_set(level) for level in (0.5, 0.8, 0.9)]
    return [each.cpu() for each in sets]


def alone_and_together(la, device="cpu"):
    for row in torch.tensor([[0.0], [1.0]]).expand(2, 3):
        each = [compared(la, row.to(device).expand(n, 3).contiguous()) for n in (1, 7, 200)]
        for one, several, many in zip(*each):
            assert (several == one).all() and (many == one).all()
    return torch.cat([compared(la, x[None].to(device))[0] for x in torch.eye(2)[:, [0, 0, 0]]])


@pytest.mark.parametrize("curvature", [None, "network"])
@pytest.mark.parametrize("seed", daily(0, rest=range(1, 4)))
def test_results_of_an_input_do_not_depend_on_its_batch(curvature, seed, tmp_path):
    la = of_discrete(seed, curvature=curvature)
    found = alone_and_together(la)
    la.save(tmp_path / "la.pt")
    assert torch.equal(
        alone_and_together(LinearisedLaplace.load(tmp_path / "la.pt", la.model)), found
    )
    ensemble = LaplaceEnsemble([la, of_discrete(seed + 50, curvature=curvature)])
    alone_and_together(ensemble.calibrate(*discrete(80, seed + 200)))
    if not seed and curvature is None:  # sets are made in the same way for both
        x, _ = discrete(9, 3)
        sets = la.export(x, level=0.8).module()(x)["prediction_set"]
        one = torch.cat([la.predict(row[None]).prediction_set(0.8) for row in x])
        assert torch.equal(sets, one)


@pytest.mark.parametrize("seed", range(4))
def test_p_values_of_regressions_do_not_depend_on_the_batch(seed):
    la = of_discrete(seed, "regression")
    alone_and_together(la)
    # a target at the end of an interval is in it
    x, y = discrete(80, seed + 100)
    y = nn.functional.one_hot(y, 3)
    for size in (1, 80):
        ends = [la.predict(part).interval(0.8) for part in x.split(size)]
        lower, upper = (torch.cat(end) for end in zip(*ends))
        assert ((lower <= y) & (y <= upper))[1::2].double().mean(0).min() >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_flags_of_images_are_about_as_good_as_the_better_score(norm):
    """With and without BatchNorm, whichever of the two scores misses a shift of 8 x 8 digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x).float().view(-1, 1, 8, 8)[order] / 16, torch.tensor(y)[order]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 16, 3, padding=1), *[nn.BatchNorm2d(16)] * norm, nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        optimiser = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(40):
            for rows in torch.randperm(700).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
    la = LinearisedLaplace(net.eval(), "classification", seed=0)
    la.fit(x[:700], y[:700], progress_bar=False).calibrate(x[700:1300], y[700:1300])
    new, generator = x[1300:], torch.Generator().manual_seed(1)
    shifts = {
        "90°": new.rot90(dims=(2, 3)),
        "180°": new.rot90(2, dims=(2, 3)),
        "blur": nn.functional.avg_pool2d(new, 3, 1, 1),
        "noise": new + 0.5 * torch.randn(new.shape, generator=generator),
        "inverted": 1 - new,
    }
    known = la.predict(new)
    for name, inputs in shifts.items():
        far, area = la.predict(inputs), {}
        for score in ("all", "epistemic", "distance"):
            area[score] = auroc(-far.p_values(score), -known.p_values(score)).item()
        assert area["all"] > max(area["epistemic"], area["distance"]) - 0.05, (name, area)
        assert area["all"] > 0.7, (name, area)


@pytest.mark.cuda
def test_ties_are_the_same_on_both_devices(tmp_path):
    la = of_discrete(1)
    found = alone_and_together(la)
    assert torch.equal(alone_and_together(la.to("cuda"), "cuda"), found)


@pytest.mark.parametrize("columns", [1, 2])
def test_false_alarms_keep_to_their_rate_if_ties_are_rounded(columns):
    """Each of 60 examples with few different scores is the new one once, in a batch of its own."""
    scores = draw(60, columns).mul(2).round().abs()
    alone = scores * (1 + 1e-6 * draw(60, columns, seed=1))
    found = torch.stack([p_values(others(scores, i), alone[i : i + 1], 3e-4)[0] for i in range(60)])
    for rate in (0.02, 0.05, 0.1, 0.3, 0.8):
        assert (found <= rate).double().mean() <= rate
    exact = torch.stack([p_values(others(scores, i), scores[i : i + 1])[0] for i in range(60)])
    assert torch.equal(found, exact)


def test_probabilities_that_rounding_orders_enter_a_set_together():
    probs = torch.tensor([[0.3, 0.3 + 1e-7, 0.3 - 1e-7, 0.1]])
    assert_close(mass_above(probs, 3e-4), torch.tensor([[0, 0, 0, 0.9]]).double())
    assert_close(mass_above(probs[:, [1, 2, 3, 0]], 0.0)[0, 2].item(), 0.9, atol=1e-6, rtol=0)


@pytest.mark.parametrize("curvature", [None, "network"])
def test_ties_of_discrete_inputs_remain_when_a_posterior_is_cast(curvature, tmp_path):
    """The reference keeps the rounding errors of the dtype in which it was computed."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count):
        x = torch.randint(0, 2, (count, 2), generator=generator).float()
        return x, (x.sum(1) + torch.rand(count, generator=generator)).long()

    model = tiny.tiny("classification").model.float()
    la = LinearisedLaplace(model, "classification", num_samples=4, curvature=curvature)
    la.fit(*drawn(60), progress_bar=False).calibrate(*drawn(60))
    ensemble = LaplaceEnsemble([la, la]).calibrate(*drawn(60))
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    before = [(m.predict(x).p_value, m.predict(x).prediction_set(0.8)) for m in (la, ensemble)]
    ensemble.double()
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    for known, each in ((before[0], la), (before[1], ensemble), (before[0], loaded)):
        now = each.predict(x.double())
        assert_close(now.p_value.double(), known[0].double(), rtol=0, atol=1e-12)
        assert torch.equal(now.prediction_set(0.8), known[1])
