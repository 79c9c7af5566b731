"""Benchmarks on images: loaders of files in the true formats, shifts, and scripts run whole."""

import gzip
import struct
from math import pi

import mnist
import numpy as np
import pytest
import tomography
import torch
from methods import images, markdown
from methods.image_scores import Reconstruction, constant, scores
from methods.images import Sizes, splits
from methods.radon import Radon
from methods.shifts import corruptions, rotations
from torch import nn

TINY = "--train-size 40 --test-size 20 --epochs 2 --num-samples 2 --device cpu".split()


def write_mnist(folder, rows, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for prefix, count in zip(("train", "t10k"), rows):
        pixels = np.random.RandomState(count).randint(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            content = header + array.tobytes()
            path = folder / f"{prefix}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix else content)
            arrays[prefix, kind] = array
    return arrays


@pytest.mark.parametrize("home, suffix", [("", ""), ("MNIST/raw", ".gz")])
def test_mnist_is_read_from_idx_files(tmp_path, home, suffix):
    arrays = write_mnist(tmp_path / home, (30, 20), suffix)
    train, test = images.mnist(tmp_path, (1, 28, 28))
    x, y = train[13]
    assert len(train) == 30 and len(test) == 20 and x.shape == (1, 28, 28) and y == 3
    expected = torch.tensor(arrays["train", "images-idx3"][13]) / 255
    torch.testing.assert_close(x[0], expected)


def test_parts_are_disjoint_and_of_the_sizes_asked_for(tmp_path):
    write_mnist(tmp_path, (30, 20))
    parts = splits(mnist.RUNG.source, tmp_path, Sizes(20, 5, 8))
    assert [len(part) for part in parts] == [20, 5, 8]
    assert not set(parts.train.indices) & set(parts.held_out.indices)
    assert len(splits(mnist.RUNG.source, tmp_path, Sizes(None, None, None)).train) == 27


def test_rotations_turn_and_keep_the_range():
    x = torch.rand(2, 1, 9, 9)
    turned = {shift.level: shift(x, torch.Generator()) for shift in rotations(90)}
    torch.testing.assert_close(turned[180], x.flip(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[90], x.rot90(1, (2, 3)), atol=1e-5, rtol=0)
    assert [shift.level for shift in rotations(15)] == list(range(15, 181, 15))


def test_corruptions_grow_with_severity():
    x = images.synthetic(images.Source((3, 32, 32), 10, images.cifar100), 8).images / 255
    sizes = {}
    for shift in corruptions():
        changed = shift(x, torch.Generator().manual_seed(0))
        assert changed.shape == x.shape and changed.min() >= 0 and changed.max() <= 1
        assert torch.equal(changed, shift(x, torch.Generator().manual_seed(0)))
        sizes.setdefault(shift.name, []).append((changed - x).norm().item())
    assert len(sizes) == 5
    assert all(0 < a < b for s in sizes.values() for a, b in zip(s, s[1:]))


def run(script, folder, *options):
    """Run a rung at a tiny size; return its records."""
    __import__(script).main([*TINY, *options, "--out", str(folder)])
    return markdown.read(folder / f"{script}.jsonl")


@pytest.mark.slow
def test_mnist_runs_whole_and_from_its_checkpoint(tmp_path, capsys):
    options = "--synthetic --ensemble 2 --network lenet-small --checkpoint".split()
    first = run("mnist", tmp_path, *options, str(tmp_path / "kept"))
    printed = capsys.readouterr().out
    assert "rotation: nll" in printed and "ours: g-prior, probit" in printed
    again = run("mnist", tmp_path, *options, str(tmp_path / "kept"))[len(first) :]
    assert len(first) == 3 + 6 and all(record["synthetic"] for record in first)
    assert [record["nll"] for record in first] == [record["nll"] for record in again]
    assert all(record["nll rotation 180"] > 0 for record in first)
    fits = [record for record in first if record.get("gamma")]
    assert len(fits) == 6
    assert all(fit["precision"] > 0 and fit["columns"] > 1 and fit["commit"] for fit in fits)


def small_network(width):
    layers = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, width))


@pytest.mark.slow
@pytest.mark.parametrize("script, classes", [("cifar100", 100), ("imagenet", 1000)])
def test_the_larger_rungs_run_whole_with_a_small_network(tmp_path, monkeypatch, script, classes):
    networks = __import__(script).RUNG.networks
    for name in list(networks):
        monkeypatch.setitem(networks, name, small_network(classes))
    options = "--synthetic --priors plain --parameters last_layer --batch-size 20".split()
    options += "--learning-rate 0.01".split()
    options += "--image-size 32".split() if script == "imagenet" else []
    records = run(script, tmp_path, *options)
    shifts = [key for key in records[0] if key.startswith("auroc ")]
    assert len(records) == 5 and len(shifts) == (25 if script == "cifar100" else 0)
    assert records[0]["parameters"] == "last_layer" and records[0]["task"] == script


def test_a_disc_casts_the_same_shadow_everywhere():
    size, radius = 64, 20
    axis = torch.arange(size) - (size - 1) / 2
    disc = ((axis[:, None] ** 2 + axis**2) < radius**2).float()[None, None]
    radon = Radon(size, torch.arange(5) * pi / 5)
    bins = torch.arange(radon.num_bins) - (radon.num_bins - 1) / 2
    chord = 2 * (radius**2 - bins**2).clamp_min(0).sqrt() / size
    for shadow in radon.forward(disc).view(5, -1):
        assert (shadow - chord).abs().mean() < 0.05 * chord.max()


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
def test_tomography_runs_whole(tmp_path, capsys):
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
