"""What benchmarks score and report is right, and each script runs whole at a tiny size."""

import shlex
from functools import partial
from math import log
from pathlib import Path

import cifar
import conformal
import cost
import distil
import gpu
import images
import interface
import labels
import language
import mixtures
import monitor
import numpy as np
import pytest
import reference
import report
import residuals
import scaling
import scores
import segmentation
import tables
import testbed
import torch
import uci
from fresh import run_python
from methods import markdown, peers, tasks
from methods.metrics import Classes, Numbers
from tiny import batched, draw, tiny
from torch.testing import assert_close
from torchvision.io import encode_jpeg

import paper
from torch_lla_em.jacobian import ParameterLayout
from torch_lla_em.solvers import BlockCG

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_scores_of_classes_reward_dependent_functions():
    # one of two functions knows every label, the other says the opposite
    right = torch.tensor([9.0, -9.0]).expand(20, 2)
    scores = Classes.of(torch.stack([right, -right])).scores(torch.zeros(20, dtype=torch.long))
    assert abs(scores["nll"] - log(2)) < 1e-4
    assert abs(scores["joint_dyadic"] - log(2) / 10) < 1e-4
    differ = Classes.of(torch.stack([torch.eye(2), -torch.eye(2)]) * 8)
    assert Classes.of(torch.ones(4, 3, 2)).unfamiliarity.abs().max() < 1e-6
    assert_close(differ.unfamiliarity, torch.full((2,), log(2)), atol=1e-2, rtol=0)


def test_scores_of_numbers_are_those_of_gaussians_in_the_unit_of_the_targets():
    f, y = draw(50, 12), torch.linspace(-1, 1, 12).double()
    sd = (Numbers.of(f, 0.5).covariance.diagonal() + 0.25).sqrt()
    nll = -torch.distributions.Normal(f.mean(0), sd).log_prob(y).mean()
    assert abs(Numbers.of(f, 0.5).scores(y)["nll"] - nll.item()) < 1e-6
    scales = torch.logspace(-3, 1, 400).tolist()
    nll = {s: Numbers.of(f, s).scores(y)["nll"] for s in scales}
    assert peers.best_noise(f, y) == pytest.approx(min(scales, key=nll.get))
    y, draws = draw(4000, 1), 10 * draw(2, 4000, seed=1)
    found = uci.scores((torch.zeros(1, 4000), torch.ones(1, 4000)), y, unit=10.0)
    nll = -torch.distributions.Normal(0.0, 10.0).log_prob(10 * y).mean().item()
    # E|Y - y| - E|Y - Y'| / 2, by Monte Carlo
    crps = (draws[:1] - 10 * y).abs().mean() - 0.5 * (draws[0] - draws[1]).abs().mean()
    due = {"nll": nll, "crps": crps.item(), "coverage": 0.9, "width": 32.897}
    assert {key: found[key] for key in due} == pytest.approx(due, rel=0.02)


@pytest.mark.parametrize("name", ["vowel", "friedman2", "pima:5"])
def test_tables_are_split_standardised_and_repeatable(name):
    task, again = tasks.task(name, 1), tasks.task(name, 1)
    assert torch.equal(task.test.x, again.test.x) and torch.equal(task.train.y, again.train.y)
    assert task.train.x.mean(0).abs().max() < 0.1 and len(task.held_out.x) <= 500
    assert_close(task.shifted["permuted"].sort(0).values, task.test.x.sort(0).values)
    assert (task.classes is None) == task.train.y.is_floating_point()
    differs = (tasks.task(name, 1, wrong=0.5).train.y != task.train.y).double().mean()
    assert abs(differs - 0.5 * (1 - 1 / (task.classes or 1))) < 0.08
    assert not set(tasks.TUNING) & {*distil.TABLES, *tasks.UNSEEN}


def test_a_summary_is_relative_to_a_temperature():
    score = {"network": "on", "auroc": 0.6, "fit_seconds": 1.0, "accuracy": 0.8, "ece": 0.1}
    records = []
    for table, seed, ratio in (("a", 0, 4.0), ("a", 1, 1.0), ("b", 0, 0.5)):
        for row, factor in ((peers.REFERENCE, 1.0), ("other", ratio)):
            values = dict.fromkeys(tables.RATIOS, 0.3 * factor)
            records.append(score | values | {"table": table, "seed": seed, "row": row})
    reference, other = tables.lines(records)
    assert (reference["nll"], reference["worst"], other["accuracy"]) == (1, 1, 0)
    assert other["nll"] == pytest.approx(2 ** (1 / 3)) and other["worst"] == pytest.approx(2.0)


def test_records_become_rows_of_tables_and_killed_runs_continue(tmp_path):
    records = [{"row": "a", "nll": 0.1}, {"row": "b", "word": "no"}, {"row": "a", "nll": 0.3}]
    shown = markdown.table(records, ["row"], {"nll": "NLL", "word": ""}).splitlines()
    assert shown[0] == "| | NLL | |" and shown[2:] == ["| a | 0.200 ± 0.100 | |", "| b | | no |"]
    base = {"kind": "classes", "set": "kept", "network": "on"}
    stored = [base | {"row": "a", "nll": 1.0}, base | {"row": "b", "nll": 2.0}]
    assert report.replaced(stored, [base | {"row": "b", "nll": 3.0}])[1]["nll"] == 3.0
    measured, path = [], tmp_path / "lines.jsonl"
    for count in (1, 2):
        cases = [{"seed": seed} for seed in range(count)]
        run = lambda seed: measured.append(seed) or [{"nll": seed}]  # noqa: E731
        found = markdown.resume(path, cases, run, {})
    assert measured == [0, 1] and [line["nll"] for line in found] == [0, 1]
    assert report.kept(path) == found


def test_pages_are_made_from_what_is_kept(tmp_path):
    for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "paper/paper.md"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    report.fill(BENCHMARKS / "results", tmp_path)
    for path in tmp_path.rglob("*.md"):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path


def test_shifted_images_and_detectors_have_one_score_each():
    x = torch.rand(60, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    shifts = images.shifted(x)
    assert all(part.shape == x.shape for part in shifts.values())
    assert_close(shifts["rotated by 90°"].rot90(-1, (2, 3)), x)
    assert_close(shifts["inverted"] + x, torch.ones_like(x))
    assert shifts["blurred"][..., 8:20, 8:20].std() < 0.3 * x.std()  # away from the black border
    pytest.importorskip("pytorch_ood")
    network, y = images.lenet().eval(), torch.arange(60) % 10
    with torch.no_grad():
        for name, score in images.detectors(network, tasks.Rows(x, y)):
            assert score(x[:7]).shape == (7,), name


def test_a_true_agent_has_no_divergence():
    generator = torch.Generator().manual_seed(10_007 * 2 + 101 * 10 + 10)
    truth = testbed.with_biases(testbed.initial(2, 1, generator), generator)
    task = testbed.problem(2, 10, 0.1, 0)
    found = testbed.scores(lambda x: testbed.outputs(truth, x) / 0.1, task)
    assert found == pytest.approx({"τ = 1": 0, "τ = 10": 0}, abs=1e-4)


def test_the_system_of_the_race_is_that_of_the_dense_posterior():
    case = tiny("classification")
    system = paper.System(case.model, batched(12, case.x, case.y), 4.0)
    w = torch.randn(3, system.right_hand_side(1).shape[1]).to(case.x)
    assert_close(system(w), w @ case.exact().ggn / 4.0)
    first = next(system.minibatches()[1])
    first(w)
    assert 3 < system.columns < 6
    race = paper.Race(system, 200)
    assert race.error(race.truth) == 0
    assert race.error(BlockCG(0.1).solve(system, race.b).x) < 0.1
    *_, (passes, error) = race.trace("CG")
    assert error < 0.01 and paper.reached([(3, 0.2), (5, error)], 0.1) == "5"
    assert paper.reached([(3, 0.2)], 0.1) == "– (0.2 at 3)"


def splits(folder):
    """Return where a table of 60 rows lies as ``uci.py`` reads it, in units of 100."""
    x = draw(60, 3)
    for kind in ("standard", "gap"):
        data = folder / kind / "table" / "data"
        data.mkdir(parents=True)
        for part, rows in (("train", range(10, 60)), ("test", range(10))):
            np.savetxt(data / f"index_{part}_0.txt", rows, fmt="%d")
    data = folder / "standard" / "table" / "data"
    np.savetxt(data / "data.txt", torch.cat([x, 100 * x[:, :1] + draw(60, 1, seed=1)], 1))
    np.savetxt(data / "index_features.txt", range(3), fmt="%d")
    np.savetxt(data / "index_target.txt", [3], fmt="%d")
    return folder


def test_powers_of_the_scale_lie_between_one_number_per_tensor_and_the_default():
    layout = ParameterLayout(("0.weight", "0.bias"), (torch.Size([4, 3]), torch.Size([4])))
    squares, w = 0.1 + draw(16).square(), draw(16, seed=1)
    squares[5] = 0
    of = {name: scale(squares, layout, w) for name, scale in scaling.SCALES.items()}
    assert_close(scaling.powered(1.0, squares, layout, w), of["no units"])
    assert_close(of["power 1/2"].square(), of["no units"] * of["power 0"])
    live = squares > 0
    for part, alive in batched([*layout.sizes], of["power 0"], live):
        assert_close(part[alive], part[:1].expand(int(alive.sum())))
    for scale in of.values():
        assert ((scale > 0) == live).all()


@pytest.fixture
def quick_costs(monkeypatch):
    monkeypatch.setattr(cost, "PROBLEMS", {"mlp": partial(cost.mlp, rows=60, width=5)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_small_scripts_run_whole(tmp_path, quick_costs, capsys, monkeypatch):
    def run(script, options):
        out = tmp_path / f"{script.__name__}.jsonl"
        script.main([*shlex.split(options), "--out", str(out)])
        lines = markdown.read(out)
        assert not [line for line in lines if "error" in line and isinstance(line["error"], str)]
        return lines

    options = (
        "--tables wine diabetes --seeds 0 --quick --wrong .1 --ours num_samples=8,validation=False"
    )
    lines = run(tables, options)
    assert {line["network"] for line in lines} == {"early", "on"}
    shown = capsys.readouterr().out
    for row in ("as fitted", "moved examples", "calibrated"):
        assert f"ours, last layer (num_samples=8,validation=False), {row}" in shown
    calibrated = [line for line in lines if line["row"].endswith("calibrated")]
    assert calibrated and all(0 <= line["flagged"] < 0.5 for line in calibrated)
    (fit,) = run(cost, "--num-samples 2")
    for key in ("laplace_torch", "ensemble", "network_curvature", "served 1", "served 8"):
        assert fit[key] > 0
    (line,) = run(segmentation, "--tiny")
    assert line["weights"] == 72 and line["posterior"] > 0 < line["trainings"]
    monkeypatch.setattr(language, "COUNTS", {"train": 100, "held out": 50, "test": 50})
    for name in ("vowel", "segmentation", "diabetes"):
        lines = run(reference, f"--only {name} --groups tables segmentation natural --store")
        assert name in lines[-1]["name"] and lines[-1]["nll"] > 0
    assert len(run(language, "")) == 5
    lines = run(mixtures, "")
    assert len(lines) == 18 and min(line["training"] for line in lines) > -1e-3
    lines = run(interface, "--quick")
    assert lines[0]["lambda"] < lines[1]["lambda"] and lines[2]["lambda"] > lines[3]["lambda"]
    assert len(run(paper, "--rows 60 --epochs 2 --num-samples 2")) == 3
    lines = run(distil, "--tasks wdbc diabetes --quick")
    assert {line["nll"] for line in lines if line["method"] == "posterior"} == {1.0, 0.0}
    data = splits(tmp_path)
    lines = run(conformal, f"--data {data} --tables table --splits 1")
    assert all(line["coverage"] > 0.5 and line["score"] >= line["width"] for line in lines)
    lines = run(uci, f"--data {data} --methods {' '.join(uci.METHODS)}")
    assert len(lines) == 2 * 13
    assert all(0 <= line["coverage"] <= 1 and line["crps"] > 0 for line in lines)
    lines = run(labels, "--cases SwissLabor --seeds 0")
    assert len({line["row"] for line in lines}) == 7 and all(0 < x["auroc"] <= 1 for x in lines)
    lines = run(residuals, "--noises mean --functions plane --seeds 2")
    assert len(lines) == 8 and all(0 < line["p_value"] <= 1 for line in lines)
    lines = run(scores, "--only pima --seeds 0")
    assert len(lines) == 8 and {*scores.COMBINED} < {*lines[0]}
    lines = run(monitor, "--cases segment --streams 20")
    assert {line["part"] for line in lines} == {"alarms", "delay"}
    lines = run(testbed, "--inputs 2 --ratios 1 --temperatures .1")
    assert {line["agent"] for line in lines} == set(testbed.AGENTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scalings_of_the_prior_are_compared_whole(tmp_path, capsys):
    out = tmp_path / "scaling.jsonl"
    scaling.main(["--groups", "raw", "--only", "wine", "--out", str(out)])
    lines = markdown.read(out)
    assert not [line for line in lines if "error" in line]
    assert {line["scale"] for line in lines} == {"", *scaling.SCALES}
    assert "columns not standardised | as fitted |" in capsys.readouterr().out


@pytest.fixture
def little_pictures(tmp_path, monkeypatch):
    """A folder of 120 and 80 random pictures in the form of CIFAR-10."""
    for part, count in (("train", 120), ("test", 80)):
        pixels = (255 * draw(count, 3, 32, 32).sigmoid()).to(torch.uint8)
        files = [encode_jpeg(picture).numpy() for picture in pixels]
        stored = {"jpeg": np.concatenate(files), "sizes": np.array([*map(len, files)], np.int32)}
        labels = (np.arange(count) % 10).astype(np.uint8)
        np.savez(tmp_path / f"cifar10_{part}.npz", **stored, labels=labels)
    for name, value in {"HELD_OUT": 40, "TESTED": 40, "SHIFTED": 8, "BATCH": 40}.items():
        monkeypatch.setattr(cifar, name, value)
    last_layer = {"ours, last layer": (120, {"parameters": "last_layer", "num_samples": 4})}
    monkeypatch.setattr(cifar, "OURS", last_layer)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pictures_are_trained_on_and_compared(little_pictures, capsys):
    pytest.importorskip("pytorch_ood")
    pytest.importorskip("elpv_dataset")
    pytest.importorskip("laplace")
    out = little_pictures / "cifar.jsonl"
    options = f"--data {little_pictures} --folder {little_pictures} --out {out} --quick --epochs"
    cifar.main([*shlex.split(options), "1", "--train"])
    sparse = [name for name in cifar.SPARSE if "last layer" in name]
    methods = ["network", "temperature", cifar.DETECTORS, "ours, last layer", *sparse]
    more = ["2", "--wrong", ".2", "--students"]
    cifar.main([*shlex.split(options), *more, "--methods", *methods])
    lines = markdown.read(out)
    assert {line["part"] for line in lines} == {"probabilities", "ood", "labels"}
    assert all(0 <= line["flagged"] <= 1 for line in lines if line["part"] == "ood")
    shown = capsys.readouterr().out
    marginal = [line for line in lines if line["row"] in sparse]
    assert [line["row"] for line in marginal] == sparse and "joint_dyadic" not in marginal[0]
    assert all(0 < line["nll"] < 10 for line in marginal)
    students = {line["part"] for line in lines if line["row"] == "ours, last layer, student"}
    assert students == {"probabilities", "ood"}
    assert "| ours, last layer, calibrated |" in shown and "| ViM |" in shown
    assert shown.count("epoch 1") == 2 and shown.count("epoch 2") == 1


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.cuda)],
)
def test_a_gpu_is_measured_whole(tmp_path, device, quick_costs):
    path = tmp_path / "gpu.jsonl"
    gpu.main(["--tiny", "--device", device, "--out", str(path)])
    steps = {line["step"]: line for line in markdown.read(path)}
    assert set(steps) == {"fit lenet", "product lenet, float32", "cost mlp", "draws"}
    assert not [line for line in steps.values() if "failed" in line]
    assert steps["fit lenet"]["relative_certificate"] <= 1e-3
    assert steps["draws"]["times"] == 2 and steps["draws"]["nll"] < 10


@pytest.mark.slow
def test_pictures_are_draw(tmp_path):
    run_python(BENCHMARKS / "gallery.py", "--tiny", "--out", tmp_path)
    shown = {path.name for path in (ROOT / "docs/images/gallery").glob("*.png")}
    assert {path.name for path in tmp_path.glob("*.png")} == shown
