"""What the pages call the methods and networks of the results."""

import re

NAMES = {
    "network": "network alone",
    "network (MAP)": "network alone",
    "MAP": "network alone",
    "temperature": "temperature scaling",
    "ensemble of 5": "ensemble of five",
    "deep ensemble of 5": "ensemble of five",
    "ensemble of 5, temperature": "ensemble of five, temperature scaling",
    "laplace-torch, as it comes": "laplace-torch, defaults",
    "laplace-torch, last layer, full, held-out": "laplace-torch, last layer, tuned on validation set",
    "ours, as fitted": "torch_lla_em, as fitted",
    "ours, calibrated": "torch_lla_em, calibrated",
    'ours, curvature="linear"': '`curvature="linear"`, as fitted',
    "the same, calibrated": '`curvature="linear"`, calibrated',
    "dense posterior, λ of ours": "dense posterior at the same λ",
    "constant sd, the true error's": "constant standard deviation (true error)",
    "ours: plain, held-out angles": "plain prior, validation angles",
    "ours: g-prior, held-out angles": "g-prior, validation angles",
    "ours: plain": "plain prior",
    "MC dropout, held-out angles": "MC dropout, validation angles",
    "diamonds": "MLP, diamonds (price)",
    "flights, late or not": "MLP, flights (late or not)",
    "flights, delay": "MLP, flights (delay)",
    "bound": "lower bound on the evidence",
}
"""Names of rows in the results -> names on the pages."""


def named(name: object) -> object:
    """Return what the pages call a row."""
    if not isinstance(name, str):
        return name
    name = NAMES.get(name, name).removeprefix("ours: ").replace("many rows", "MLP, many examples")
    name = name.replace(", by the network's curvature", ', `curvature="network"`')
    return re.sub("|".join(SPELLED), lambda word: SPELLED[word[0]], name)


SPELLED = {
    "mlp": "MLP",
    "cnn": "CNN",
    "lenet": "LeNet",
    "resnet": "ResNet-",
    "vit_s": "ViT-S",
    "bert": "BERT",
    "sgd": "SGD",
    " cg": " CG",
    "block krylov": "block Krylov",
    "last_layer": "last layer",
}
