"""Orthonormal bases and inner products under rounding."""

import pytest
import torch
from tiny import draw

from torch_lla_em.solvers import orthonormalise, overlap


def test_rounding_does_not_turn_a_basis():
    """A run that another number of ranks goes on with must find the same basis."""
    rows = draw(9, 40)
    for block in (rows, orthonormalise(rows)[0], torch.cat([rows, rows[:2] + rows[2:4]])):
        one, other = block, block + 1e-14 * draw(*block.shape, seed=1)
        bases = orthonormalise(one)[0], orthonormalise(other)[0]
        torch.testing.assert_close(*bases, rtol=0, atol=1e-11)


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-9])
def test_nearly_dependent_rows_in_float32_have_an_orthonormal_basis(distance):
    rows = draw(6, 5000).float()
    rows = torch.cat([rows, rows[:3] + distance * draw(3, 5000, seed=1).float()])
    basis, coefficients = orthonormalise(rows)
    assert len(basis) == (9 if distance > 1e-8 else 6)
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), rtol=0, atol=1e-5)
    torch.testing.assert_close(coefficients.float() @ basis, rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlaps_are_as_exact_as_float32(dtype):
    a, b = draw(3, 10_000).float(), draw(2, 10_000, seed=1).to(dtype)
    lengths = torch.outer(a.double().norm(dim=1), b.double().norm(dim=1))
    off = overlap(a, b) - a.double() @ b.double().T
    assert (off.abs() <= torch.finfo(torch.float32).eps * lengths).all()
