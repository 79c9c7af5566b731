import pytest
import torch
from tiny import LOG_PROBS, likelihood_of
from torch.testing import assert_close

from torch_lla_em import Bernoulli, Classification, Likelihood, Poisson, Regression

NAMES = list(LOG_PROBS)


def example(name):
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 2, 1, 1, 0]) if name == "classification" else (f > 0).double()
    return likelihood_of(name), f, y


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_equal_those_of_the_loss(name):
    likelihood, f, y = example(name)
    gradient = torch.stack([-torch.func.grad(LOG_PROBS[name])(a, b) for a, b in zip(f, y)])
    H = torch.stack([-torch.func.hessian(LOG_PROBS[name])(a, b) for a, b in zip(f, y)])
    assert_close(likelihood.gradient(f, y), gradient)
    basis = torch.eye(3).double()[:, None].expand(3, 5, 3)
    assert_close(likelihood.hessian_product(f, basis), H.movedim(1, 0))
    root = likelihood.hessian_sqrt_product(f, basis)  # columns of S, one each
    assert_close(torch.einsum("kni,knj->nij", root, root), H)


@pytest.mark.parametrize("classes", [2, 15, 16])
def test_probabilities_are_a_softmax_of_any_number_of_classes(classes):
    f = torch.randn(4, 5, classes, generator=torch.Generator().manual_seed(0)).double()
    powers = f.exp()
    assert_close(Classification().mean(f), powers / powers.sum(-1, keepdim=True))
    assert_close(Classification().log_mean(f), f - powers.sum(-1, keepdim=True).log())


@pytest.mark.parametrize("name", NAMES)
def test_log_prob_broadcasts_over_samples(name):
    likelihood, f, y = example(name)
    samples = torch.stack([f, 2 * f])
    expected = torch.stack([LOG_PROBS[name](a, b) for s in samples for a, b in zip(s, y)])
    assert_close(likelihood.log_prob(samples, y), expected.view(2, 5))


def test_sequences_sum_over_their_sites():
    likelihood, f, y = example("classification")
    sequence, labels = f.view(1, 5, 3), y.view(1, 5)
    assert_close(likelihood.log_prob(sequence, labels), likelihood.log_prob(f, y).sum()[None])
    ignored = labels.clone()
    ignored[0, 1] = -100
    kept = torch.tensor([True, False, True, True, True])
    assert_close(
        likelihood.log_prob(sequence, ignored), likelihood.log_prob(f, y)[kept].sum()[None]
    )
    assert likelihood.gradient(sequence, ignored)[0, 1].eq(0).all()
    assert_close(likelihood.mask(ignored)[0], kept)


def test_softmax_root_survives_certain_outputs():
    f = torch.tensor([[200.0, 0.0, -200.0]])
    root = Classification().hessian_sqrt_product(f, torch.ones(1, 3))
    assert torch.isfinite(root).all()


@pytest.mark.parametrize("name", ["classification", "regression", "bernoulli", "poisson"])
@pytest.mark.slow
def test_samples_have_the_stated_mean(name):
    likelihood, f, _ = example(name)
    many = f[:1].expand(40000, 3)
    y = likelihood.sample(many, torch.Generator().manual_seed(0))
    y = torch.nn.functional.one_hot(y, 3).double() if name == "classification" else y.double()
    error = y.std(0) / len(y) ** 0.5
    assert ((y.mean(0) - likelihood.mean(f[0])).abs() < 5 * error).all()


def test_uncertainties_split_the_variance():
    f = torch.randn(7, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    aleatoric, epistemic = Poisson().uncertainties(f)
    assert_close(aleatoric, f.exp().mean(0))
    assert_close(epistemic, f.exp().var(0, correction=0))
    p = f.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    aleatoric, epistemic = Classification().uncertainties(f)
    assert_close(aleatoric, expected.mean(0))
    assert_close(aleatoric + epistemic, -(p.mean(0) * p.mean(0).log()).sum(-1))
    q = f.sigmoid()
    aleatoric, epistemic = Bernoulli().uncertainties(f)
    assert_close(aleatoric, (-q * q.log() - (1 - q) * (1 - q).log()).mean(0))
    assert (epistemic >= 0).all()


@pytest.mark.parametrize(
    "method, arguments",
    [
        ("log_prob", 2),
        ("hessian_sqrt_product", 2),
        ("mean", 1),
        ("variance", 1),
        ("sample", 1),
        ("smoothed_mean", 2),
    ],
)
def test_a_likelihood_says_what_it_lacks(method, arguments):
    with pytest.raises(NotImplementedError, match="Likelihood"):
        getattr(Likelihood(), method)(*[torch.zeros(1, 1)] * arguments)


@pytest.mark.parametrize(
    "likelihood, f, y, message",
    [
        (Classification(), torch.zeros(2, 1), torch.zeros(2).long(), "bernoulli"),
        (Classification(), torch.zeros(2, 3), torch.tensor([0, 3]), "outside of 0 to 2"),
        (Classification(), torch.zeros(2, 3), torch.tensor([0, -1]), "outside of 0 to 2"),
        (Classification(), torch.zeros(2, 3), torch.zeros(2, 1).long(), "ask for"),
        (Regression(), torch.zeros(2, 1), torch.zeros(2), "reshape the targets"),
        (Regression(), torch.zeros(2, 1), torch.tensor([[0.0], [float("nan")]]), "NaN"),
        (Regression(torch.ones(2)), torch.zeros(2, 3), torch.zeros(2, 3), "2 values"),
        (Bernoulli(), torch.zeros(2, 1), torch.full((2, 1), 2.0), "0 or 1"),
        (Poisson(), torch.zeros(2, 1), torch.full((2, 1), 0.5), "counts"),
        (Poisson(), torch.zeros(2, 1), torch.full((2, 1), -1.0), "counts"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, f, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(f, y)


def test_labels_must_be_integers():
    for y in (torch.zeros(2), torch.zeros(2).bool()):
        with pytest.raises(TypeError, match="integers"):
            Classification().check(torch.zeros(2, 3), y)
    with pytest.raises(TypeError, match="real"):
        Regression().check(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.complex64))


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("inf"), [[1.0]]])
def test_noise_must_be_positive(sigma):
    with pytest.raises(ValueError, match="sigma_noise"):
        Regression(torch.tensor(sigma))
