"""The smaller benchmarks run at a tiny size, and their arithmetic is right."""

from functools import partial
from pathlib import Path

import aims
import cost
import durations
import estimators
import folds
import gpu
import language
import linear_posterior
import ood
import pytest
import ranking
import scalings
import seeds
import sizes
import testbed
import torch
from fresh import run_python
from methods import markdown, tasks
from methods.plain_pass import plain_product
from tiny import tiny

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SPEED = "--networks lenet --batch 4 --columns 1 2 --repeats 1".split()


def run_script(name, *options, out):
    """Run a script, which writes to a folder or a file; return the lines it wrote."""
    run_python(BENCHMARKS / f"{name}.py", *options, "--out", out)
    return [line for path in out.parent.rglob(f"{name}.jsonl") for line in markdown.read(path)]


def test_ratios_of_aims_are_averaged_over_tasks_and_the_worst_over_seeds():
    keys = "accuracy", "auroc permuted", "auroc noise", "auroc inputs x 3"
    keys = *keys, "confidence test", "confidence noise"

    def record(task, seed, method, nll, **more):
        common = {"task": task, "seed": seed, "stage": "on", "method": method, "nll": nll}
        return common | dict.fromkeys(keys, 0.5) | more

    records = []
    for task, seed, ratio in (("a", 0, 4.0), ("a", 1, 1.0), ("b", 0, 0.5)):
        records.append(record(task, seed, "network", 0.3, accuracy=0.4))
        records.append(record(task, seed, aims.REFERENCE, 0.3))
        surer = {"confidence noise": 0.6 if task == "a" else 0.4}
        records.append(record(task, seed, "as fitted", 0.3 * ratio, **surer))
    line = aims.lines(aims.compared(records))[-1]
    assert line["NLL"] == pytest.approx(2 ** (1 / 3)) and line["worst"] == pytest.approx(2.0)
    assert line["accuracy"] == pytest.approx(0.1) and line["surer on noise"] == 2
    found = {line["figure"]: line["met"] for line in aims.verdicts([line])}
    assert found.pop("accuracy") == "yes"
    assert found == dict.fromkeys(("NLL", "worst", "gain", "surer on noise"), "no")
    assert "| one posterior, as fitted | | 1.26 | 1.26 | 2.00 |" in aims.ensembles_table(records)
    assert len(aims.HIDDEN) == 8 and not set(aims.HIDDEN) & set(tasks.TUNING)


@pytest.mark.slow
def test_students_are_compared_with_their_posteriors(tmp_path):
    out = tmp_path / "distil.jsonl"
    options = "--tasks", "wdbc", "diabetes", "--quick"
    records = run_script("distil", *options, out=out)
    methods = {record["method"] for record in records}
    assert methods >= {"network", "temperature scaling", "posterior", "student"}
    assert {r["nll"] for r in records if r["method"] == "posterior"} == {1.0, 0.0}
    assert all(0 <= record["coverage"] <= 1 for record in records if "coverage" in record)


@pytest.mark.slow
def test_aims_continue_from_their_records(tmp_path, capsys, monkeypatch):
    out = tmp_path / "aims.jsonl"
    command = ["--tasks", "vehicle", "--seeds", "0", "--quick", "--out", str(out)]
    aims.main(command)
    records = markdown.read(out)
    found = {(record["stage"], record["method"]) for record in records}
    assert found >= {("on", "as fitted"), ("early", "five posteriors, each calibrated")}
    assert "| tables | as fitted | NLL |" in capsys.readouterr().out
    monkeypatch.setattr(aims, "run", lambda **_: pytest.fail("a network was trained again"))
    aims.main(command)
    assert markdown.read(out) == records


@pytest.mark.slow
def test_scores_of_ood_inputs_are_compared(tmp_path, capsys):
    out = tmp_path / "ood.jsonl"
    ood.main(["--tasks", "vehicle", "--seeds", "0", "--quick", "--out", str(out)])
    assert len(markdown.read(out)) == 2 * (6 + 5)
    assert "| entropy |" in capsys.readouterr().out


@pytest.mark.slow
def test_networks_are_ranked_and_scalings_compared(tmp_path, capsys):
    options = ["--quick", "--seeds", "0", "--out"]
    ranking.main(["--tables", "pima", *options, str(tmp_path / "ranking.jsonl")])
    assert "| held-out evidence, fitted |" in capsys.readouterr().out
    scalings.main(["--families", "regression", *options, str(tmp_path / "scalings.jsonl")])
    assert "| regression | on |" in capsys.readouterr().out


@pytest.mark.slow
def test_durations_are_measured_or_forecast(tmp_path):
    network = "CNN, 0.1 M"
    options = "--networks", network, "--examples", "1000", "--limit", "0", "--out"
    run_python(BENCHMARKS / "durations.py", *options, tmp_path / "durations.jsonl")
    lines = markdown.read(tmp_path / "durations.jsonl")
    assert [line["layers"] for line in lines] == ["last layer", "last block", "all layers"]
    assert all(0 < line["low"] <= line["high"] and "seconds" not in line for line in lines)
    lines[0]["seconds"] = 120.0
    table = durations.summary(lines)
    assert "| 2 min |" in table and "≈ " in table


@pytest.mark.slow
def test_segmentation_is_fitted_by_layers(tmp_path):
    lines = run_script("segmentation", "--tiny", out=tmp_path / "segmentation")
    assert [line["layers"] for line in lines] == ["last layer", "last block", "all layers"]
    assert lines[0]["weights"] == 72 < lines[1]["weights"] < lines[2]["weights"]
    assert all(line["network"] > 0 and line["posterior"] > 0 and line["GB"] >= 0 for line in lines)


@pytest.mark.slow
def test_parts_of_cost_write_lines(tmp_path, monkeypatch):
    small = partial(cost.mlp, rows=60, width=5)
    monkeypatch.setattr(cost, "PROBLEMS", {"mlp": small, "cnn": small})
    monkeypatch.setattr(cost, "GROWTH", {"K": [({"rows": 60, "width": 5}, 2)]})
    cost.main(["--num-samples", "2", "--out", str(tmp_path)])
    lines = markdown.read(tmp_path / "cost.jsonl")
    parts = [line["part"] for line in lines]
    assert parts == 2 * ["fits"] + 10 * ["loaders"] + ["growth"] + 3 * ["first"]
    assert all(line["first fit"] > line["second fit"] > 0 for line in lines[-3:])
    for line in lines[:-3]:
        assert line["epochs"] == pytest.approx(line["seconds"] / line["epoch_seconds"])
    for key in ("laplace_torch", "ensemble", "network_curvature", "served 1", "served 8"):
        assert lines[1][key] > 0
    again = ["--parts", "fits", "--problems", "mlp", "--before", str(tmp_path / "cost.jsonl")]
    cost.main([*again, "--num-samples", "2", "--out", str(tmp_path / "again")])
    again = markdown.read(tmp_path / "again" / "cost.jsonl")
    assert [line["before"] for line in again] == [line["epochs"] for line in lines[:1]]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)
def test_a_gpu_is_measured_whole(tmp_path, device, monkeypatch):
    monkeypatch.setattr(cost, "PROBLEMS", {"mlp": partial(cost.mlp, rows=60, width=5)})
    path = tmp_path / "gpu.jsonl"
    gpu.main(["--tiny", "--device", device, "--out", str(path)])
    steps = {line["step"]: line for line in markdown.read(path)}
    known = {"fit lenet", "product lenet, eager", "launches lenet"}
    assert set(steps) == known | {"recovery", "compile lenet", "cost mlp"}
    assert not [line for line in steps.values() if "failed" in line]
    assert steps["fit lenet"]["relative_certificate"] <= 1e-3
    assert steps["compile lenet"]["difference"] < 1e-5
    assert steps["product lenet, eager"]["columns"] == 2
    gpu.main(["--tiny", "--device", device, "--out", str(path), "--steps", "launches"])
    assert [line["part"] for line in markdown.read(path)[-2:]] == ["cost", "launches"]


def test_committed_coverage_and_false_alarms_keep_their_promise():
    records = markdown.read(BENCHMARKS / "results/coverage.jsonl")
    for table in {record["table"] for record in records}:
        ours = [r for r in records if r["method"] in ("prediction_set", "interval")]
        runs = [r for r in ours if r["table"] == table]
        assert len(runs) == 20
        n, level = runs[0]["validation"] // 2, runs[0]["level"]

        def error(p):  # splits of one table overlap: they count as the trainings do
            return 3 * (p * (1 - p) * (1 / n + 1 / runs[0]["tested"]) / 4) ** 0.5

        assert sum(r["coverage"] for r in runs) / 20 > level - error(level)
        assert sum(r["flagged test"] for r in runs) / 20 < 0.05 + error(0.05)


@pytest.mark.slow
def test_coverage_is_measured(tmp_path):
    options = "--trainings 1 --splits 1 --epochs 3 --tables diabetes".split()
    lines = run_script("coverage", *options, out=tmp_path / "coverage.jsonl")
    assert "interval" in {line["method"] for line in lines}


@pytest.mark.slow
def test_agents_are_compared_on_the_testbed(tmp_path, capsys):
    out = tmp_path / "testbed.jsonl"
    agents = ["network", "30 with prior functions", "laplace-torch", "ours"]
    command = ["--inputs", "2", "--ratios", "10", "--temperatures", "0.1", "--agents", *agents]
    testbed.main([*command, "--out", str(out)])
    assert [line["agent"] for line in markdown.read(out)] == agents
    shown = capsys.readouterr().out.replace("**", "")  # the best of a column is bold
    assert "| network | 1.000 | 1.000 |" in shown


def test_the_truth_has_no_divergence_in_the_testbed():
    task = testbed.problem(2, 10, 0.1, 0)
    generator = torch.Generator().manual_seed(10_007 * 2 + 101 * 10 + 10)
    truth = testbed.with_biases(testbed.initial(2, 1, generator), generator)
    found = testbed.scores(lambda x: testbed.outputs(truth, x) / 0.1, task)
    assert found == pytest.approx({"τ = 1": 0, "τ = 10": 0}, abs=1e-4)


@pytest.mark.slow
def test_speed_writes_lines(tmp_path):
    lines = run_script("speed", *SPEED, out=tmp_path / "speed")
    for line, count in zip(lines, (1, 2), strict=True):
        assert line["weights"] == 61706 and line["rows"] == 4 and line["columns"] == count
        assert line["ratio"] == pytest.approx(line["product"] / line["forward"] / (1 + 4 * count))
        assert line["peak_gb"] > 0.1 and line["commit"]


def test_the_plain_pass_of_speed_is_the_same_product():
    case = tiny("classification")
    problem = case.problem()
    w = torch.randn(3, problem.size, dtype=case.x.dtype)
    plain = plain_product(case.model, problem.linear_model.layout.names, case.x)
    torch.testing.assert_close(plain(w), problem.ggn_product(w))


@pytest.mark.slow
def test_scaling_measures_every_number_of_ranks(tmp_path):
    small = "--rows 8 --batch 4 --width 8 --num-samples 2 --repeats 1 --ranks 1 2".split()
    lines = run_script("scaling", *small, out=tmp_path / "scaling")
    assert {line["ranks"] for line in lines if line["kind"] == "strong"} == {1, 2}
    sent = [line["bytes"] for line in lines if line["ranks"] == 2]
    assert min(sent) >= 2  # 2 (R - 1) K P numbers, and the traffic of others


@pytest.mark.slow
def test_serving_asks_every_predictor_in_both_ways(tmp_path):
    lines = run_script("serving", "--tiny", out=tmp_path / "serving.jsonl")
    assert len(lines) == 8
    for line in lines:
        assert all(line[f"{way}, requests/s"] > 0 for way in ("alone", "batched"))
        assert line["CPU ms of 1"] > 0 and line["ensembles, 8"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits are those of Linux")
def test_memory_is_measured_below_a_limit(tmp_path):
    options = "--divide=200", "--gigabytes=3", "--cases", "many examples"
    (line,) = run_script("memory", *options, out=tmp_path / "memory.jsonl")
    assert line["case"] == "many examples" and line["curvature"] == "variational"
    assert line["samples"] == line["K"] and 0 < line["peak, GB"] < 3


@pytest.mark.parametrize("name", ["charts", pytest.param("gallery", marks=pytest.mark.slow)])
def test_pictures_of_the_documentation_are_drawn(name, tmp_path):
    run_script(name, *["--tiny"] * (name == "gallery"), out=tmp_path / name)
    shown = {path.name for path in (ROOT / "docs/images" / name).glob("*.png")}
    assert shown == {path.name for path in (tmp_path / name).glob("*.png")}


@pytest.mark.slow
def test_ensembles_by_folds_are_compared(tmp_path, capsys):
    out = tmp_path / "folds.jsonl"
    folds.main(["--tables", "pima", "diabetes", "--epochs", "5", "--out", str(out)])
    lines = markdown.read(out)
    methods = ["reference", "as fitted", "calibrate", "from_folds", "CV+ of the same networks"]
    assert [line["method"] for line in lines] == 2 * methods + 2 * [methods[0], *methods[2:]]
    assert all(0.7 < line.get("coverage", 1) <= 1 for line in lines)
    assert "| regression | all epochs | **`from_folds`** |" in capsys.readouterr().out


@pytest.mark.slow
def test_layers_are_compared_by_size(tmp_path, capsys):
    options = "--networks 50-50 --epochs 2 --tables wdbc".split()
    for limit in ("60", "0"):
        sizes.main([*options, "--limit", limit, "--out", str(tmp_path / f"{limit}.jsonl")])
    fitted, left_out = (markdown.read(tmp_path / f"{limit}.jsonl")[1:] for limit in (60, 0))
    assert [line["fit"] for line in fitted] == [line["fit"] for line in left_out]
    assert fitted[0]["weights"] < fitted[1]["weights"] < fitted[2]["weights"]
    assert fitted[2]["weights"] == fitted[2]["parameters"]
    assert all(line["NLL"] > 0 and 0 <= line["AUROC"] <= 1 for line in fitted)
    assert not any("NLL" in line for line in left_out) and "| – |" in capsys.readouterr().out


def test_scores_of_normal_distributions_are_those_of_draws():
    centre, variance = torch.tensor([[0.3]]).double(), torch.tensor([[0.5]]).double()
    y = torch.tensor([[1.1]]).double()
    found = estimators.of_numbers(centre, variance, y)
    normal = torch.distributions.Normal(centre, variance.sqrt())
    assert found["nll"] == pytest.approx(-normal.log_prob(y).item())
    grid = torch.linspace(-12, 12, 40_001).double()
    below = (normal.cdf(grid) - (grid >= y).double()).square().flatten()
    assert found["score"] == pytest.approx(torch.trapezoid(below, grid).item(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_estimators_are_compared_with_their_posteriors(tmp_path, capsys):
    pytest.importorskip("skorch")
    options = (
        "--tables saheart diabetes --libraries scikit-learn skorch --seeds 0 --epochs 5".split()
    )
    estimators.main([*options, "--out", str(tmp_path / "estimators.jsonl")])
    records = markdown.read(tmp_path / "estimators.jsonl")
    assert len(records) == 2 * 2 * 4 and all(record["nll"] < 3 for record in records)
    shown = capsys.readouterr().out
    assert "| skorch | posterior, calibrated | 0." in shown and shown.count("| own | 1.000 |") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_language_models_are_compared_and_their_needs_extrapolated(tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    options = "--seeds 1 --steps 30 --questions 80".split()
    language.main([*options, "--out", str(tmp_path / "language.jsonl")])
    lines = markdown.read(tmp_path / "language.jsonl")
    records = [line for line in lines if "method" in line]
    assert [record["method"] for record in records][::5] == ["MAP", "posterior, calibrated"]
    assert all(0 < record["nll"] < 3 and 0.2 < record["accuracy"] <= 1 for record in records)
    shown = capsys.readouterr().out
    assert "extrapolated" in shown and "| Llama-2-7b | ARC-Challenge | 4.5 M |" in shown
    # 6.74e9 weights of two bytes, and the vectors
    line = lines[len(records)]
    assert int(line["memory"].split()[0]) > 2 * 6.7e9 / 2**30


def test_prompts_are_padded_on_the_left_and_questions_have_three_answers():
    questions = language.generated(200, 0)
    (batch, *_) = language.batches(questions, language.Words(), 32, "cpu")
    assert batch["attention_mask"][:, -1].all() and not batch["attention_mask"].all()
    assert (batch["input_ids"][~batch["attention_mask"].bool()] == 0).all()
    right = [q.answer == sum(map(int, q.prompt[:-4].split(" + "))) % 3 for q in questions]
    assert {q.answer for q in questions} == {0, 1, 2} and 0.85 < sum(right) / 200 < 1


@pytest.mark.slow
def test_fits_with_several_seeds_are_compared(tmp_path, capsys):
    out = tmp_path / "seeds.jsonl"
    options = ["--rows", "60", "--epochs", "2", "--seeds", "3", "--samples", "4"]
    seeds.main(["--tables", "pima", *options, "--out", str(out)])
    (line,) = markdown.read(out)
    assert line["seeds"] == 3 and 0 < line["spread of log λ"] < 3 and 0 < line["1 / √(K γ)"] < 1
    assert line["spread / stated as fitted"] > 0 and "pima" in capsys.readouterr().out


@pytest.mark.slow
def test_q_is_compared_with_the_posterior_of_the_linear_model(tmp_path, capsys):
    out = tmp_path / "linear_posterior.jsonl"
    options = "--tables german --rows 60 --epochs 5 --factors 1".split()
    linear_posterior.main([*options, "--out", str(out)])
    (line,) = markdown.read(out)
    assert line["HMC"] == pytest.approx(line["dense q"], rel=0.05) and line["accepted"] > 0.6
    assert "german" in capsys.readouterr().out
