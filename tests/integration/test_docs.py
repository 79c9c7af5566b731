"""Code of the README, the pages and the examples runs; figures are committed results; site and package build."""

import importlib.util
import json
import re
import warnings
from collections import OrderedDict
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from fresh import run_python
from small import SIZES, small, written
from tiny import batched, known, tiny
from torch import nn

import torch_lla_em
from torch_lla_em import BlockCG, Compute, LinearisedLaplace

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SCRIPTS = [path for path in EXAMPLES if "__file__" in path.read_text()]
NOTEBOOKS = [path for path in BOOKS if path.stem not in {script.stem for script in SCRIPTS}]
NUMBER = re.compile(r"-?\d+\.\d+")


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(name):
    """Return the Python code blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)


def run_page(name, **names):
    """Run the code of a page, and return the names it defines."""
    for block in blocks(name):
        exec(block, names)
    return names


def test_code_on_pages_has_the_syntax_of_python():
    for path in (ROOT / "docs").glob("*.md"):
        for block in blocks(path.stem):
            compile(block, path.name, "exec")


def test_the_readme_prints_what_it_shows(capsys):
    pytest.importorskip("sklearn")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 25 and len(README.splitlines()) <= 90
    exec(code, {})
    printed = capsys.readouterr().out
    assert NUMBER.sub("", printed) == NUMBER.sub("", shown)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    # rounding differs between machines, and training amplifies it
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.02)
    network, posterior, test_digits, rotated_digits = numbers[0]
    assert posterior < network and test_digits < 0.08 and rotated_digits > 0.9


# pages and their sentences; a figure is {table > row > column}, of cells with several numbers {table > row > column > which}
SENTENCES = [
    ("README", "finds [wrong labels](docs/wrong_labels.md) without further training (AUROC {labels > tuning tables, ours > AUROC} on the ten tables on which its rule was chosen, and {labels > other tables, ours > AUROC} on ten others; cleanlab with five trainings has {labels > tuning tables, cleanlab, self_confidence > AUROC} and {labels > other tables, cleanlab, self_confidence > AUROC})."),
    ("cost", "and has a lower NLL than the network ({cost of last layers > last layer, 10000 x 64 x 1000 > NLL, posterior} and {cost of last layers > last layer, 10000 x 64 x 1000 > NLL, network})."),
    ("README", "with 50,000 examples, 512 features and 10 classes takes {cost of last layers > last layer, 50000 x 512 x 10 > fit, s} s on one core"),
    ("paper", "AUROC {labels > tuning tables, ours > AUROC} on ten tables used to choose the rule and {labels > other tables, ours > AUROC} on ten others; cleanlab with five trainings has {labels > tuning tables, cleanlab, self_confidence > AUROC} and {labels > other tables, cleanlab, self_confidence > AUROC}."),
    ("paper", "**A posterior of all weights** has {headline > torch_lla_em, as fitted > 100 epochs} times that NLL and {headline > torch_lla_em, as fitted > joint NLL} times the joint NLL; that of the last layer {headline > torch_lla_em, last layer, as fitted > 100 epochs} and {headline > torch_lla_em, last layer, as fitted > joint NLL}."),
    ("benchmarks", "the mean ratio of all layers is {headline > torch_lla_em, as fitted > early stopping} (early stopping), {headline > torch_lla_em, as fitted > 100 epochs} (100 epochs) and {headline > torch_lla_em, as fitted > 400 epochs} (400 epochs), and {worst > ours, as fitted > early}, {worst > ours, as fitted > on} and {worst > ours, as fitted > late} on the worst table. The network alone has {headline > network alone > 100 epochs} and {headline > network alone > 400 epochs} after 100 and 400 epochs."),
    ("which_method", "The NLL of all layers is on average {headline > torch_lla_em, as fitted > early stopping} (early stopping) to {headline > torch_lla_em, as fitted > 400 epochs} (400 epochs) times that of temperature scaling, which needs a validation set, and {worst > ours, as fitted > early} times at worst"),
    ("which_method", "After `calibrate`, the NLL is on average {headline > torch_lla_em, calibrated > early stopping} (early stopping) to {headline > torch_lla_em, calibrated > 400 epochs} (400 epochs) times that of temperature scaling, and {worst > ours, calibrated > early} times at worst"),
    ("which_method", "it is {headline > torch_lla_em, last layer, as fitted > 100 epochs} on average, and {worst > ours, last layer, as fitted > on} times at worst"),
    ("which_method", "the mean NLL after 100 epochs is {headline > torch_lla_em, calibrated > 100 epochs} times that of temperature scaling, and {headline > torch_lla_em, last layer, calibrated > 100 epochs} with the last layer"),
    ("which_method", "without that its NLL after 100 epochs would be {headline > torch_lla_em, last layer, `validation=False` > 100 epochs} times that of temperature scaling"),
    ("which_method", "After 100 epochs the accuracy improves by {stages > torch_lla_em, as fitted > accuracy > 1} with full Laplace (calibrated {stages > torch_lla_em, calibrated > accuracy > 1}) and by {stages > ensemble of five > accuracy > 1} with an ensemble; after early stopping by {stages > torch_lla_em, as fitted > accuracy > 0} with both"),
    ("which_method", "The AUROC on tables is {stages > torch_lla_em, calibrated > OOD AUROC > 0} to {stages > torch_lla_em, calibrated > OOD AUROC > 2} higher than that of the network's entropy; that of an ensemble with temperature scaling is {stages > ensemble of five, temperature scaling > OOD AUROC > 0} to {stages > ensemble of five, temperature scaling > OOD AUROC > 2} higher"),
    ("which_method", "Its joint NLL for dyadic labels is {stages > torch_lla_em, calibrated > joint NLL, dyadic > 2} to {stages > torch_lla_em, calibrated > joint NLL, dyadic > 0} times that of temperature scaling"),
    ("benchmarks", "**Folds** (five trainings) have the best mean rank in each of the four tables: {uci, Standard splits (5), 40 epochs > ours, five folds > rank} and {uci, Standard splits (5), 400 epochs > ours, five folds > rank} on standard splits after 40 and 400 epochs, and {uci, Gap splits (5), 40 epochs > ours, five folds > rank} and {uci, Gap splits (5), 400 epochs > ours, five folds > rank} on gap splits."),
    ("benchmarks", "has the mean ranks {uci, Standard splits (5), 40 epochs > ours, as fitted > rank} and {uci, Standard splits (5), 400 epochs > ours, as fitted > rank} on standard splits (the deep ensemble of five {uci, Standard splits (5), 40 epochs > deep ensemble of 5 > rank} and {uci, Standard splits (5), 400 epochs > deep ensemble of 5 > rank})"),
    ("benchmarks", "On gap splits it has {uci, Gap splits (5), 40 epochs > ours, as fitted > rank} and {uci, Gap splits (5), 400 epochs > ours, as fitted > rank}, the deep ensemble {uci, Gap splits (5), 40 epochs > deep ensemble of 5 > rank} and {uci, Gap splits (5), 400 epochs > deep ensemble of 5 > rank}, and laplace-torch (full) {uci, Gap splits (5), 40 epochs > laplace-torch, full > rank} and {uci, Gap splits (5), 400 epochs > laplace-torch, full > rank}."),
    ("benchmarks", "without a validation set, has NLL {images > torch_lla_em, last layer, as fitted > solar cells > 0} and ECE {images > torch_lla_em, last layer, as fitted > solar cells > 1}, where temperature scaling with 500 validation examples has {images > temperature scaling > solar cells > 0} and {images > temperature scaling > solar cells > 1}, and an ensemble of five with temperature scaling {images > ensemble of five, temperature scaling > solar cells > 0} and {images > ensemble of five, temperature scaling > solar cells > 1}"),
    ("benchmarks", "our last layer has the lowest NLL ({cifar > torch_lla_em, last layer, calibrated > NLL}, temperature scaling {cifar > temperature scaling > NLL}). Its joint NLL is {cifar > torch_lla_em, last layer, calibrated > joint NLL}, where temperature scaling has {cifar > temperature scaling > joint NLL}."),
    ("benchmarks", "the NLL as fitted is {cifar > torch_lla_em, 10,000 images, as fitted > NLL}, higher than the network's, and the joint NLL {cifar > torch_lla_em, 10,000 images, as fitted > joint NLL}. After calibration the NLL is {cifar > torch_lla_em, 10,000 images, calibrated > NLL}, between that of the last layer and that of temperature scaling. With 2,000 images the joint NLL is {cifar > torch_lla_em, 2,000 images, as fitted > joint NLL}, the lowest of all; calibrated, the NLL is {cifar > torch_lla_em, 2,000 images, calibrated > NLL}, that of temperature scaling, and the ECE {cifar > torch_lla_em, 2,000 images, calibrated > ECE}, the lowest of all."),
    ("benchmarks", "With 10,000 images the mean AUROC of the p-values is {cifar > torch_lla_em, 10,000 images, calibrated > mean AUROC}, lower than that of the last layer;"),
    ("benchmarks", "finds wrong labels with an AUROC of {cifar, 20% wrong labels > network, suspicious > AUROC of wrong labels}, as `la.suspicious` of our last layer does; the F1 of its mask is {cifar, 20% wrong labels > torch_lla_em, last layer, suspicious > F1 of the mask} (network {cifar, 20% wrong labels > network, suspicious > F1 of the mask})."),
    ("benchmarks", "With a twentieth replaced, both find them with an AUROC of {cifar, 5% wrong labels > network, suspicious > AUROC of wrong labels}. The F1 is {cifar, 5% wrong labels > torch_lla_em, last layer, suspicious > F1 of the mask} (network {cifar, 5% wrong labels > network, suspicious > F1 of the mask}), because"),
    ("benchmarks", "calibrated, the NLL is {cifar, 5% wrong labels > torch_lla_em, last layer, calibrated > NLL} (temperature scaling {cifar, 5% wrong labels > temperature scaling > NLL}) and the joint NLL {cifar, 5% wrong labels > torch_lla_em, last layer, calibrated > joint NLL} ({cifar, 5% wrong labels > temperature scaling > joint NLL})."),
    ("calibration", "The test NLL of a small transformer for text is {language > torch_lla_em, last layer, as fitted > NLL} instead of {language > torch_lla_em, last layer, `validation=False` > NLL} (network {language > network alone > NLL}, with a temperature from a validation set {language > temperature scaling > NLL};"),
    ("paper", "are moved as far as their nearest neighbour: {headline > torch_lla_em, last layer, as fitted > 100 epochs} times the NLL of temperature scaling after 100 epochs, and {headline > torch_lla_em, last layer, `validation=False` > 100 epochs} without the correction."),
    ("benchmarks", "have an NLL of {cifar > laplace-torch, VaLLA, last layer > NLL} for the last layer; ELLA of all layers, fitted to the first 2,000 images, has {cifar > laplace-torch, ELLA, 2,000 images > NLL} as well."),
    ("benchmarks", "of the calibrated last layer has an NLL of {cifar > torch_lla_em, last layer, student > NLL}, higher than that of the network alone, an accuracy of {cifar > torch_lla_em, last layer, student > accuracy}, and by its p-values a mean AUROC of {cifar, CIFAR-10: AUROC / flagged > torch_lla_em, last layer, student > mean AUROC};"),
    ("wrong_labels", "(26 classes) the AUROC is {labels > letter, ours > AUROC}, and five folds have {labels > letter, five folds > AUROC}. The F1 of the mask is {labels > letter, ours > F1 of the mask} (cleanlab {labels > letter, cleanlab, self_confidence > F1 of the mask}),"),
    ("calibration", "have an NLL of {cost of last layers > last layer, 20000 x 256 x 100 > NLL, posterior} and {cost of last layers > last layer, 30000 x 256 x 10 > NLL, posterior} with this temperature,"),
    ("calibration", "(network {cost of last layers > last layer, 20000 x 256 x 100 > NLL, network} and {cost of last layers > last layer, 30000 x 256 x 10 > NLL, network})."),
    ("benchmarks", "posterior of all layers has the lowest NLL ({large > 196,407, torch_lla_em, as fitted > NLL}), and with a budget of 60 s the next ({large > 196,407, torch_lla_em, a budget of 60 s, as fitted > NLL}); the ensemble of two has {large > 196,407, ensemble of two > NLL}, the network alone {large > 196,407, network alone > NLL}, and the last layer, which `fit` corrects on moved examples, {large > 196,407, torch_lla_em, last layer, as fitted > NLL}."),
    ("benchmarks", "energy, kNN, ViM and ReAct have a mean AUROC of {cifar > ReAct > mean AUROC} to {cifar > kNN > mean AUROC}, the p-values of our last layer {cifar > torch_lla_em, last layer, calibrated > mean AUROC}, the entropy {cifar > entropy > mean AUROC}, and Mahalanobis {cifar > Mahalanobis > mean AUROC}."),
    ("benchmarks", "Calibrated, the NLL is that of temperature scaling ({cifar, 20% wrong labels > temperature scaling > NLL}), and the joint NLL {cifar, 20% wrong labels > torch_lla_em, last layer, calibrated > joint NLL} ({cifar, 20% wrong labels > temperature scaling > joint NLL}). As fitted, our last layer is worse than the network ({cifar, 20% wrong labels > torch_lla_em, last layer, as fitted > NLL} and {cifar, 20% wrong labels > network alone > NLL}),"),
    ("benchmarks", "the AUROC of `la.suspicious` is {labels > tuning tables, ours > AUROC} on the ten tuning tables (cleanlab with five trainings: {labels > tuning tables, cleanlab, self_confidence > AUROC}), {labels > other tables, ours > AUROC} on ten others ({labels > other tables, cleanlab, self_confidence > AUROC}), and {labels > MNIST, ours > AUROC} on MNIST ({labels > MNIST, cleanlab, self_confidence > AUROC})."),
    ("benchmarks", "has {testbed > ours > KL, ten labels at two inputs} times the network's divergence for joint predictions and {testbed > ours > KL, one label} times for single labels. laplace-torch (KFAC of all layers, functions of the linear model) has {testbed > laplace-torch > KL, ten labels at two inputs} and {testbed > laplace-torch > KL, one label}"),
]  # fmt: skip


def text_of(name):
    paths = {"README": "README.md", "paper": "paper/paper.md"}
    return (ROOT / paths.get(name, f"docs/{name}.md")).read_text()


def cells():
    """Return the numbers of all generated tables, by table, row and column."""
    stored = (ROOT / "benchmarks" / "results" / "tables.jsonl").read_text().splitlines()
    means = [json.loads(line) for line in stored]
    assert {len(line["tables"].split(", ")) for line in means} == {20}
    found = {("worst", line["row"], line["network"]): [line["worst"]] for line in means}
    for text in [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]:
        for block, body in re.findall(r"<!-- ([^/].*?) -->\n(.*?)<!-- /", text, re.DOTALL):
            parts = re.findall(r"(?:\*\*(.*?):\*\*\n\n)?((?:^\|.*\n)+)", body, re.MULTILINE)
            for caption, table in parts:
                lines = table.splitlines()
                head, _, *rows = (
                    [cell.strip() for cell in line[1:-1].split("|")] for line in lines
                )
                for row in rows:
                    names = [cell for cell in row if re.search("[a-z]", cell)]
                    title = ", ".join(filter(None, (block, caption)))
                    both = ", ".join(row[:2])
                    for column, cell in zip(head, row, strict=True):
                        numbers = [float(number) for number in NUMBER.findall(cell)]
                        for key in (title, f"{title}, {head[0]}"):
                            for line in (", ".join(names), both):
                                found.setdefault((key, line, column), numbers)
    return found


def test_figures_of_pages_are_those_of_the_results():
    """Tables are compared in tests/benchmarks, from which this takes them."""
    known = cells()
    for name, sentence in SENTENCES:
        text, *rest = re.split(r"\{(.+?)\}", sentence)
        pattern = re.escape(text)
        for text in rest[1::2]:
            pattern += r"(-?\d*\.\d+)" + re.escape(text)
        shown = re.search(pattern, " ".join(text_of(name).split()))
        assert shown, (name, sentence)
        for number, key in zip(shown.groups(), rest[::2], strict=True):
            *key, which = key.split(" > ") if key.count(" > ") == 3 else [*key.split(" > "), 0]
            digits = len(number.partition(".")[2])
            assert abs(float(number) - known[tuple(key)][int(which)]) <= 0.51 * 10**-digits, key


def test_delays_in_the_readme_are_those_of_the_monitor():
    shown = re.findall(r"^\|.* \| 0\.01 \| (\d+) \(", page("benchmarks"), re.MULTILINE)
    delays = [int(number) for number in shown]
    assert f"a median of {min(delays)} to {max(delays)} inputs" in README


def test_links_and_lists_are_complete():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path
    for path in (ROOT / "docs").glob("*.md"):  # also where the site is not built, as on GitHub
        for link in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", path.read_text()):
            assert (path.parent / link).exists(), (path.name, link)
    faces = sorted(path.parent.name for path in (ROOT / "torch_lla_em").glob("*/__init__.py"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert sorted(re.findall(r"^\| `([a-z]+)` \|", contributing, re.MULTILINE)) == faces
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", contributing):
        assert any((ROOT / folder / path).exists() for folder in ("", "torch_lla_em")), path
    contents = (ROOT / "mkdocs.yml").read_text()
    assert all(f"tutorials/{path.stem}.md" in contents for path in EXAMPLES)


def test_continuous_integration_runs_the_second_command_of_the_readme():
    """And its last one, the demonstration."""
    shell = re.search(r"```bash\n(.*?)```", README, re.DOTALL)[1]
    commands = [line.split("#")[0].strip() for line in shell.splitlines()]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[1] == 'pip install -e ".[test]" && pytest' and commands[1] in script
    assert commands[-1].split(" && ")[1] == script[-1]


def run_mixtures():
    labels = torch.arange(300) % 3
    x = 3 * torch.eye(3)[labels] + torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(OrderedDict(body=nn.Identity(), head=nn.Linear(3, 3)))
    loader = batched(50, x, labels)
    return run_page("mixtures", model=model, train_loader=loader, features=x, x=x)


def loop_of_the_paper():
    """Return a network, its data, and the names that the paper's loop defines."""
    case = tiny("classification")
    names = {"model": case.model, "x": case.x, "y": case.y}
    exec(blocks("method")[0], names)
    return names


def run_method():
    exec("\n".join(blocks("method")[1:]), names := {})
    return names


def test_the_loop_of_the_paper_finds_the_prior_precision_of_a_fit():
    names = loop_of_the_paper()
    options = {"curvature": "network", "compute": Compute(solver=BlockCG())}
    la = LinearisedLaplace(names["model"], "classification", **options)
    la.fit(names["x"], names["y"], em_steps=50, progress_bar=False)
    change = (names["precision"] / la.prior_precision).log().abs()
    assert change < (32 * la.effective_dim).rsqrt() and len(blocks("method")[0].splitlines()) <= 12


# pages, what runs them, and what holds of the names that they define
PAGES = {
    "index": (lambda: run_page("index"), lambda n: n["probs"].shape == (200, 3) and Path("posterior.pt").exists()),
    "calibration": (
        lambda: run_page("wrong_labels", **run_page("out_of_distribution", **run_page("calibration"))),
        lambda n: n["prediction"].prediction_set(0.9).shape == (len(n["X"]) - 1000, 10)
        and n["record"].score.shape == (600,) and n["monitor"].state["seen"] == len(n["X"]) - 1000
        and n["la"].is_ood(n["X"][1000:]).float().mean() < 0.15 < 0.5 < n["la"].is_ood(3 * n["X"][1000:]).float().mean(),
    ),
    "mixtures": (run_mixtures, lambda n: n["posterior"].parameters.expected().weights.topk(3).values.sum() > 0.85),
    "method": (run_method, lambda n: n["small"].history[-1]["why"] == "accurate"),
    "regression": (lambda: run_page("regression"), lambda n: n["held"].sigma_noise == pytest.approx(0.1)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, holds = PAGES[name]
    with torch.random.fork_rng():
        assert holds(run())


OTHERS = {
    "lightning_uq_box": ("x", (30, 2)),
    "mapie": ("sets", (139, 2, 1)),
    "pytabkit": ("probabilities", (40, 2)),
    "sklearn.neural_network": ("probabilities", (37, 3)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", OTHERS)
def test_the_page_on_other_libraries_runs(package, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "recipes")
    (block,) = [block for block in blocks("other_libraries") if f"from {package}" in block]
    case, la = known()
    names = {"la": la, "model": la.model, "x": case.x, "y": case.y}
    if package == "pytabkit":
        frame = pytest.importorskip("pandas").DataFrame({"a": range(40), "b": ["x", "y"] * 20})
        names |= {"frame": frame, "y": [0, 1] * 20}
    torch.manual_seed(0)
    exec(block.replace("use_ls", 'n_epochs=2, device="cpu", use_ls'), names)
    name, shape = OTHERS[package]
    assert names[name].shape == shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_code_of_laplace_torch_and_ours_runs_and_shapes_agree():
    """Of laplace-torch where it is installed."""
    theirs = {} if importlib.util.find_spec("laplace") else None
    ours, seen = {}, []
    for block in blocks("coming_from_laplace_torch"):
        if not block.startswith("# laplace-torch"):
            exec(block, ours)
            if theirs is not None and not block.startswith("# torch_lla_em"):
                theirs.update(ours)
        elif theirs is not None:
            exec(block, theirs)
        seen.append((theirs and dict(theirs), dict(ours)))
    theirs, ours = seen[2]
    table = page("coming_from_laplace_torch").split("| laplace-torch | torch_lla_em |")[1]
    rows = [re.findall(r"`([^`]*)`", row) for row in table.split("\n\n")[0].splitlines()[2:]]
    assert len(seen) > 7 and len(rows) > 8
    for left, right in rows:
        one, other = eval(left, theirs) if theirs else None, eval(right, ours)
        if left == "la(x)" and theirs:
            assert one.shape == other.shape


@pytest.fixture(scope="module")
def pages():
    """The module that makes notebooks and pages from the scripts."""
    pytest.importorskip("griffe")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("pages")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_notebooks_are_made_from_their_scripts(path, pages):
    """Their sizes are those that tests replace."""
    stored = (pages.NOTEBOOKS / f"{path.stem}.ipynb").read_text()
    made = pages.notebook(path.stem, *pages.stored(path.stem))
    assert made == stored, f"run: python docs/pages.py {path.stem}"
    assert (small(path.stem, path.read_text()) != path.read_text()) == (path.stem in SIZES)
    assert {path.stem for path in EXAMPLES} == {path.stem for path in BOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_examples_that_need_their_file_run(path, tmp_path):
    run_python(written(path, tmp_path), cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_in_a_kernel(path, tmp_path, monkeypatch):
    """In a folder without other files, with figures shown where they are stored."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book, mark = nbformat.read(path, as_version=4), "\n# the next cell\n"
    stored = nbformat.writes(book).count("image/png")
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    of_all = small(path.stem, mark.join(cell.source for cell in code)).split(mark)
    for cell, source in zip(code, of_all, strict=True):
        cell.source = source
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=280, kernel_name="python3", resources=resources).execute()
    assert nbformat.writes(book).count("image/png") == stored and not list(tmp_path.iterdir())


# the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; it has no warnings."""
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("properdocs")
    folder = tmp_path_factory.mktemp("site")
    command = "-m", "properdocs", "build", "--strict", "-f", "mkdocs.yml", "-d", folder
    run_python(*command, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference_and_figures_have_alternative_texts(site):
    pages = "".join(path.read_text() for path in (site / "api").rglob("index.html"))
    names = set(torch_lla_em.__all__)
    for path in (ROOT / "torch_lla_em").glob("*/__init__.py"):
        names |= set(importlib.import_module(f"torch_lla_em.{path.parent.name}").__all__)
    assert len(names) > 50
    assert not [n for n in names if not re.search(rf'id="torch_lla_em\.[\w.]*\b{n}"', pages)]
    for path in site.rglob("index.html"):
        assert not re.search(r'<img alt=""|<img (?![^>]*alt=)', path.read_text()), path


# the package


def test_version_and_requirements_are_the_same_everywhere():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: torch_lla_em.__version__"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    released = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert torch_lla_em.__version__ == cited == released
    render = pytest.importorskip("rattler_build").Stage0Recipe.from_file(ROOT / "conda/recipe.yaml")
    (variant,) = render.render()
    recipe, options = variant.recipe.to_dict(), setup["options"]
    needed = {r.replace(" ", "").replace("pytorch", "torch") for r in recipe["requirements"]["run"]}
    assert needed == {*options["install_requires"].split(), f"python{options['python_requires']}"}
    assert recipe["package"]["version"] == torch_lla_em.__version__


def test_the_paper_cites_what_it_lists():
    body = (ROOT / "paper/paper.md").read_text().split("---\n", 2)[2]
    entries = re.findall(r"^@\w+\{([^,]+),", (ROOT / "paper/paper.bib").read_text(), re.MULTILINE)
    assert 500 < len(body.split()) < 1000
    assert set(re.findall(r"@([a-z][\w-]*)", re.sub(r"`[^`]*`", "", body))) == set(entries)
