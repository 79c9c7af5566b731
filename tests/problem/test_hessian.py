"""The forms of H, and of averages of H over functions, against dense blocks."""

import pytest
import torch
from tiny import draw, likelihood_of
from torch.testing import assert_close

from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import AtOutputs, Blocks, Diagonal, Draws, Loss, towards


@pytest.mark.parametrize("name", ["classification", "bernoulli", "poisson", "binomial"])
def test_the_expected_hessian_is_the_average_of_dense_ones(name):
    likelihood, f = likelihood_of(name), 3 * torch.randn(4, 6, 3).double()
    f[0, 0] = torch.tensor([400.0, 0.0, -400.0])
    u = torch.eye(3).double()[:, None, None].expand(3, *f.shape)
    dense = likelihood.hessian_product(f, u).mean(1).movedim(0, -1)
    found = likelihood.expected_hessian(f)
    if likelihood.elementwise:
        found = found.diag_embed()
    assert_close(found, dense)


def forms(functions, sites=(), classes=3, seed=0):
    """Yield H of six examples by (S, 6, ..., C) functions in each form, and its dense blocks."""
    f = 3 * draw(functions, 6, *sites, classes, seed=seed)
    f[0, 0, ..., :3] = torch.tensor([400.0, 0.0, -400.0])  # sure in one function, and in all
    f[:, 1, ..., 1] = 800.0
    f[:, 2, ..., 1] = 20.0
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0, 1.0]).double()
    loss = Loss(Classification(), torch.zeros(6, *sites).long(), weights)
    values = loss.expected_hessian(f)
    yield Blocks(values), values
    yield Draws(loss.roots_of_probabilities(f)), values
    yield AtOutputs(f[0], loss), loss.expected_hessian(f[:1])
    loss = Loss(likelihood_of("bernoulli"), torch.zeros(6, *sites, classes), weights)
    yield Diagonal(loss.expected_hessian(f)), loss.expected_hessian(f).diag_embed()


@pytest.mark.parametrize("functions, sites, classes", [(4, (), 7), (9, (2,), 3), (1, (2,), 5)])
def test_every_form_of_h_has_the_products_and_roots_of_its_blocks(
    functions, sites, classes, monkeypatch
):
    monkeypatch.setattr("torch_lla_em.problem.hessian.ENTRIES", 20)
    unit = torch.eye(classes).double()
    for H, dense in forms(functions, sites, classes):
        columns = unit.expand(6, *sites, classes, classes).reshape(-1, classes)
        assert_close(H.product(columns).view_as(dense), dense)
        some = torch.tensor([4, 1])
        found = H.product(columns[: columns.shape[0] // 3], some)
        assert_close(found.view_as(dense[some]), dense[some])
        assert_close(H.diagonal(slice(1, None, 2)), dense.diagonal(dim1=-2, dim2=-1)[1::2])
        noise = unit.view(classes, *(1,) * (1 + len(sites)), classes)
        root = H.root(noise.expand(classes, 6, *sites, classes)).movedim(0, -1)
        assert_close(root @ root.mT, dense, rtol=1e-6, atol=1e-8)


def test_a_step_of_h_ends_at_the_other_one_and_is_never_too_small():
    """An average of probabilities is less certain than their H are on average."""
    for (H, dense), (other, there) in zip(forms(4), forms(4, seed=7), strict=True):
        if isinstance(H, AtOutputs):
            continue
        for share in (0.0, 0.3, 1.0):
            found = towards(H, other, share).product(torch.eye(3).double().repeat(6, 1))
            gap = found.view(6, 3, 3) - dense.lerp(there, share)
            assert torch.linalg.eigvalsh(gap).min() > -1e-12
            if share in (0, 1) or not isinstance(H, Draws):
                assert_close(gap, torch.zeros_like(gap))


def test_h_does_not_cancel_near_certainty():
    f = torch.tensor([[[20.0, 1.0, 0.0]], [[18.0, 3.0, -1.0]]])
    u = torch.tensor([[1.0], [0.5], [-2.0]])
    loss = Loss(Classification(), torch.zeros(1).long())
    for form in (
        lambda f: Blocks(loss.expected_hessian(f)),
        lambda f: Draws(loss.roots_of_probabilities(f)),
        lambda f: AtOutputs(f[0], loss),
    ):
        exact = form(f.double()).product(u.double())
        assert_close(form(f).product(u).double(), exact, rtol=1e-5, atol=0)
    # outputs that move alike change no probability
    root = Draws(loss.roots_of_probabilities(f)).root(torch.eye(3)[:, None])
    assert root.sum(-1).abs().max() < 1e-6
