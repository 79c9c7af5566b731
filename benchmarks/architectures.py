"""How J w is computed for each architecture, and how exact it is.

    python benchmarks/architectures.py

updates the tables of docs/architectures.md in about a minute on one CPU core. It needs torchvision, transformers and peft.
Models have small random configurations, and nothing is downloaded. Expect adjoint errors at the rounding of the precision:
below 1e-8 in float64 (layers that always compute in float32 have larger ones), below 1e-3 in float32.
"""

import argparse
import copy
import platform
import warnings
from pathlib import Path

import peft
import torch
import torchvision
import transformers
from methods import markdown
from torch import nn
from torch.nn.functional import dropout
from torch.nn.utils import parametrizations

from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters

IDS = torch.tensor([[0, 4, 2, 0], [3, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
TEXT = {"input_ids": IDS + 1, "attention_mask": MASK}
IMAGE = torch.randn(2, 3, 32, 32)
SEQUENCE = torch.randn(2, 3, 4)
ROWS = torch.randn(5, 4)


class Model(nn.Module):
    """Layers a, b, c called by a function."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.call = forward
        for name, layer in zip("abc"[: len(layers)], layers, strict=True):
            setattr(self, name, layer)

    def forward(self, *args):
        return self.call(self, *args)


def mlp(*extra):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), *extra)


def pooled(**options):
    embedding = nn.Embedding(6, 4, **options)
    return Model(lambda m, x: m.b(m.a(x).tanh().mean(1)), embedding, nn.Linear(4, 2))


def tied():
    model = pooled()
    model.b = nn.Linear(4, 6)
    model.b.weight = model.a.weight
    return model


def recurrent():
    lstm = nn.LSTM(4, 3, 2, batch_first=True)
    return Model(lambda m, x: m.b(m.a(x)[0][:, -1]), lstm, nn.Linear(3, 2))


def attention():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Model(lambda m, x: m.a(x, x, x, need_weights=False)[0].mean(1), layer)


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Model(lambda m, x: m.a(x).mean(1), nn.TransformerEncoder(layer, 2))


def convolutional(*layers):
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), *layers, *end)


def checkpointed(reentrant):
    run = torch.utils.checkpoint.checkpoint
    layers = mlp(), nn.Linear(4, 4), nn.Linear(4, 2)
    return Model(lambda m, x: m.c(run(m.a, m.b(x), use_reentrant=reentrant)), *layers)


def normed():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), mlp())


LAYERS = {
    "MLP": lambda: (mlp(), ROWS),
    "LSTM": lambda: (recurrent(), SEQUENCE),
    "MultiheadAttention": lambda: (attention(), SEQUENCE),
    "TransformerEncoder": lambda: (encoder(), SEQUENCE),
    "Embedding": lambda: (pooled(), IDS),
    "Embedding, padding_idx": lambda: (pooled(padding_idx=0), IDS),
    "Embedding tied to the head": lambda: (tied(), IDS),
    "BatchNorm": lambda: (convolutional(nn.BatchNorm2d(4), nn.ReLU()), IMAGE),
    "GroupNorm": lambda: (convolutional(nn.GroupNorm(2, 4), nn.ReLU()), IMAGE),
    "Activations in place": lambda: (convolutional(nn.SiLU(True), nn.ReLU(True)), IMAGE),
    "weight_norm": lambda: (normed(), ROWS),
    "Dropout": lambda: (mlp(nn.Dropout(), nn.Linear(4, 2)), ROWS),
    "Checkpointing, not reentrant": lambda: (checkpointed(False), ROWS),
    "torch.compile": lambda: (torch.compile(mlp()), ROWS),
    "DataParallel": lambda: (nn.DataParallel(mlp()), ROWS),
}
REFUSED = {
    "Checkpointing, reentrant": lambda: (checkpointed(True), ROWS),
    "EmbeddingBag": lambda: (nn.Sequential(nn.EmbeddingBag(6, 4), mlp()), IDS),
    "Dropout active in eval mode": lambda: (Model(lambda m, x: m.a(dropout(x)), mlp()), ROWS),
    "torch.jit.script": lambda: (torch.jit.script(mlp()), ROWS),
}


def vision(name, **options):
    return lambda: (getattr(torchvision.models, name)(num_classes=3, **options), IMAGE)


VISION = {
    "resnet18": vision("resnet18"),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "efficientnet_b0": vision("efficientnet_b0"),
    "densenet121": vision("densenet121"),
    "convnext_tiny": vision("convnext_tiny"),
    "swin_t": vision("swin_t"),
    "vit (2 layers, width 32)": lambda: (
        torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=3),
        IMAGE,
    ),
}

TOKENS = {"vocab_size": 12, "pad_token_id": 1}
MARKS = {"bos_token_id": 0, "eos_token_id": 2}
BLOCK = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def language(name, inputs=TEXT, **options):
    def make():
        config = getattr(transformers, name.split("For")[0].replace("LMHeadModel", "") + "Config")
        return getattr(transformers, name)(config(num_labels=2, **options)), inputs

    return make


GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, **TOKENS, **MARKS}


def lora():
    model, inputs = language("LlamaForSequenceClassification", **BLOCK, **TOKENS, **MARKS)()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config), inputs


LANGUAGE = {
    "GPT-2, classification": language("GPT2ForSequenceClassification", **GPT2),
    "BERT, classification": language("BertForSequenceClassification", **BLOCK, **TOKENS),
    "BERT, masked words (tied head)": language("BertForMaskedLM", **BLOCK, **TOKENS),
    "LLaMA, classification": language("LlamaForSequenceClassification", **BLOCK, **TOKENS, **MARKS),
    "LLaMA with LoRA (PEFT)": lora,
    "ViT, classification": language(
        "ViTForImageClassification", IMAGE, image_size=32, patch_size=8, **BLOCK
    ),
}


def probe(make, dtype):
    """Return the report of the probe, or the error if there is none."""
    torch.manual_seed(0)
    model, inputs, *selection = make()
    try:
        network = Network(copy.deepcopy(model).to(dtype))
        names = select_parameters(network.module, *selection)
        linear = LinearModel(network, ParameterLayout.of(network.module, names))
        linear.probe(to(inputs, dtype))
        with linear.network.guarded():
            linear.by_autodiff(to(inputs, dtype))  # which tries torch.func, too
        return linear.ways
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return error


def to(inputs, dtype):
    if isinstance(inputs, dict):
        return {name: to(tensor, dtype) for name, tensor in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def row(name, make):
    double, single = probe(make, torch.float64), probe(make, torch.float32)
    if isinstance(double, Exception):
        return f"| {name} | {double} |"
    ways = ["forward" if found.forward else "reverse" for found in (double, single)]
    note = "By factors" if double.names else ""
    note = f"{ways[1].capitalize()} in float32" if ways[0] != ways[1] else note
    errors = f"{double.adjoint_error:.0e} | {single.adjoint_error:.0e}"
    return f"| {name} | {ways[0]} | {errors} | {note} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[1] / "docs" / "architectures.md"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    packages = torch, torchvision, transformers, peft
    versions = [f"{of.__name__} {of.__version__.split('+')[0]}" for of in packages]
    lines = [f"Measured on a CPU with Python {platform.python_version()}, {', '.join(versions)}."]
    sections = {"Layers": LAYERS, "torchvision": VISION, "transformers and peft": LANGUAGE}
    for title, cases in (sections | {"Not supported": REFUSED}).items():
        columns = ["architecture", "J w", "error, float64", "error, float32", "note"]
        if cases is REFUSED:
            columns = ["architecture", "error message"]
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, make in cases.items():
            lines.append(row(name, make))
            print(lines[-1], flush=True)
    markdown.insert(out, "architectures", "\n".join(lines))


if __name__ == "__main__":
    main()
