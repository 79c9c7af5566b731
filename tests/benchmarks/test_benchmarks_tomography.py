"""The Radon transform, the scores of an image, and the script run whole."""

from math import pi

import pytest
import tomography
import torch
from methods import markdown
from methods.image_scores import Reconstruction, constant, scores
from methods.radon import Radon, phantom
from torch.testing import assert_close


@pytest.fixture
def radon():
    return Radon(16, torch.arange(7) * pi / 7)


def test_back_projection_is_the_adjoint(radon):
    f, y = torch.randn(3, 1, 16, 16).double(), torch.randn(3, radon.num_measurements).double()
    left = (radon.forward(f) * y).flatten(1).sum(1)
    assert_close(left, (f * radon.adjoint(y)).flatten(1).sum(1))


def test_a_disc_casts_the_same_shadow_everywhere():
    size, radius = 64, 20
    axis = torch.arange(size) - (size - 1) / 2
    disc = ((axis[:, None] ** 2 + axis**2) < radius**2).float()[None, None]
    radon = Radon(size, torch.arange(5) * pi / 5)
    bins = torch.arange(radon.num_bins) - (radon.num_bins - 1) / 2
    chord = 2 * (radius**2 - bins**2).clamp_min(0).sqrt() / size
    for shadow in radon.forward(disc).view(5, -1):
        assert (shadow - chord).abs().mean() < 0.05 * chord.max()


def test_filtered_back_projection_finds_the_phantom():
    image = phantom(32)
    radon = Radon(32, torch.arange(40) * pi / 40)
    found = radon.filtered_back_projection(radon.forward(image))
    blurred = radon.adjoint(radon.forward(image))
    relative = [
        (x - image).norm() / image.norm() for x in (found, blurred * found.sum() / blurred.sum())
    ]
    assert relative[0] < 0.45 < relative[1]


def test_a_perfect_model_of_the_error_scores_best():
    generator = torch.Generator().manual_seed(0)
    sd = torch.rand(1, 1, 40, 40, generator=generator) + 0.1
    truth = sd * torch.randn(sd.shape, generator=generator)
    deviations = sd[0] * torch.randn(300, *sd.shape[1:], generator=generator)
    zero = torch.zeros_like(truth)
    right = scores(Reconstruction(zero, deviations), truth)
    wrong = scores(Reconstruction(zero, 0.3 * deviations), truth)
    flat = constant(zero, truth.square().mean().item(), 300)
    flat = scores(flat, truth)
    assert abs(right["coverage"] - 0.95) < 0.03 and right["spearman"] > 0.3
    assert right["nll"] < flat["nll"] < wrong["nll"] and right["patch_nll"] < wrong["patch_nll"]
    assert abs(right["nll_scaled"] - wrong["nll_scaled"]) < 1e-3
    assert abs(flat["spearman"]) < 0.1


@pytest.mark.slow
def test_the_script_runs_whole(tmp_path, capsys):
    arguments = "--size 16 --angles 5 --channels 4 4 4 --steps 20 --num-samples 8 --dropout .1"
    out = ["--out", str(tmp_path), "--picture", str(tmp_path / "picture.png")]
    tomography.main([*arguments.split(), *out])
    records = markdown.read(tmp_path / "tomography.jsonl")
    assert [record["row"] for record in records][-1].startswith("MC dropout") and len(records) == 8
    ours = [record for record in records if "gamma" in record]
    assert len(ours) == 2 and all(r["learnt_sigma"] > 0 and r["outputs"] == 256 for r in ours)
    assert (tmp_path / "picture.png").stat().st_size > 5000
    assert {"psnr", "nll", "coverage"} <= set(ours[0])
    assert "| MC dropout |" in capsys.readouterr().out
