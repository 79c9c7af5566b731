"""The recipes of ``examples/recipes`` run, and hold what they say."""

import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh import run_python
from torch import nn

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NEEDS = {"language_answers": "peft", "tabular_networks": "pytabkit"}
NEEDS |= {"torch_uncertainty_routine": "torch_uncertainty", "skorch_networks": "skorch"}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def names_of(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(NEEDS.get(recipe, recipe))
        return runpy.run_path(str(RECIPES / f"{recipe}.py"))


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_recipes_run(recipe, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(NEEDS.get(recipe, recipe))
    printed = run_python("-W", "ignore", RECIPES / f"{recipe}.py", cwd=tmp_path)
    assert "NLL" in printed


rng = np.random.default_rng(0)
SMALL = {"device": "cpu", "random_state": 0, "n_threads": 1, "n_epochs": 3}
WIDTHS = {"RealMLP_TD": {"hidden_sizes": [8, 8]}, "TabM_D": {"tabm_k": 3, "d_block": 8}}


def table(count):
    """Numbers, a constant, few and many categories, some missing; labels and numbers as targets."""
    import pandas as pd

    X = pd.DataFrame(rng.normal(size=(count, 3)), columns=list("abc"))
    X["constant"], X["few"] = 1.0, rng.choice(["x", "y", None], count)
    X["many"] = rng.choice(list("abcdefghijklmnop"), count)
    value = X["a"] + (X["few"] == "x") + 0.3 * rng.normal(size=count)
    return X, np.where(value > 0.3, "yes", "no"), 500 + 100 * value.to_numpy()


@pytest.mark.parametrize("name", WIDTHS)
def test_estimators_of_pytabkit_are_converted_with_their_encodings_and_units(name):
    of_pytabkit = names_of("tabular_networks")["of_pytabkit"]
    import pytabkit

    (X, y, numbers), (new, *_) = table(120), table(50)
    new.loc[0, "many"] = "unseen"
    estimator = getattr(pytabkit, f"{name}_Classifier")(**SMALL, **WIDTHS[name]).fit(X, y)
    la = of_pytabkit(estimator, num_samples=8)
    found = la.laplace.model(la.inputs(new)).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, estimator.predict_proba(new), rtol=1e-4, atol=1e-6)
    assert (la.fit(X, y).predict(X) == y).mean() > 0.7
    estimator = getattr(pytabkit, f"{name}_Regressor")(**SMALL, **WIDTHS[name]).fit(X, numbers)
    la = of_pytabkit(estimator, num_samples=8).fit(X, numbers)
    network = la.laplace.model(la.inputs(new)).detach().numpy()[:, 0]
    limits = (numbers.min(), numbers.max()) if name == "RealMLP_TD" else (-np.inf, np.inf)
    np.testing.assert_allclose(network.clip(*limits), estimator.predict(new), rtol=1e-4)
    mean, deviation = la.predict(new, return_std=True)
    assert abs(mean.mean() - 500) < 150 and 10 < deviation.mean() < 300


def test_estimators_of_skorch_keep_their_predictions():
    of_skorch = names_of("skorch_networks")["of_skorch"]
    import skorch

    torch.manual_seed(0)
    x, how = np.float32(rng.normal(size=(120, 4))), {"max_epochs": 20, "lr": 0.1, "verbose": 0}
    labels = (x[:, 0] > -0.5).astype(int) + (x[:, 0] + x[:, 1] > 0.5)
    probs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softmax(-1))
    for kind, network, y, link in (
        ("Classifier", probs, labels, lambda f: f.softmax(-1)),
        ("Classifier", probs[:3], labels, lambda f: f.softmax(-1)),
        ("BinaryClassifier", nn.Linear(4, 1), np.float32(x[:, 0] > 0), np.array),
        ("Regressor", nn.Linear(4, 2), np.sin(x[:, :2]), np.array),
    ):
        loss = {"criterion": nn.CrossEntropyLoss} if network is not probs and y is labels else {}
        net = getattr(skorch, f"NeuralNet{kind}")(network, **how, **loss).fit(x, y)
        la, due = of_skorch(net, num_samples=8), net.predict_proba(x)
        found = link(la.laplace.model(la.inputs(x)).detach())
        if kind == "BinaryClassifier":
            found, due = found[:, 0], np.log(due[:, 1] / due[:, 0])
        np.testing.assert_allclose(found, due, rtol=1e-3, atol=1e-4)
        assert kind == "Regressor" or (la.fit(x, y).predict(x) == y).mean() > 0.5


def tokenizer(text, add_special_tokens=True):
    return {"input_ids": [ord(word) - ord("A") + 1 for word in text.split()]}


def test_the_logits_of_answers_do_not_depend_on_the_padding():
    answers = names_of("language_answers")["answers"]
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    prompts = [[4, 13, 5, 14, 15], [5, 14, 15], [3, 13, 4, 13, 5, 14, 15]]
    forward = answers(tokenizer, ["A", "B", "C"])

    def batch_of(left):
        length = max(map(len, prompts))
        ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            part = slice(length - len(prompt), length) if left else slice(0, len(prompt))
            ids[row, part], mask[row, part] = torch.tensor(prompt), 1
        return {"input_ids": ids, "attention_mask": mask}

    with torch.no_grad():
        alone = torch.cat([llama(torch.tensor([p])).logits[:, -1, 1:4] for p in prompts])
        for left in (False, True):
            found = forward(llama, batch_of(left))
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
        half = forward(llama.bfloat16(), batch_of(False))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, alone, rtol=0.05, atol=0.02)
