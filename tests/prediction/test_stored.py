"""What is saved is what comes back: also what the first releases wrote."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction.functions import functions_of

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_posterior_of_the_first_release_answers_as_it_did(kind):
    truth = torch.load(SAVED / f"{kind}_truth.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model.load_state_dict(truth["model"])
    la = LinearisedLaplace.load(SAVED / f"{kind}.pt", model)

    def answer():
        if kind == "regression":
            return la(truth["x"])
        prediction = la.predict(truth["x"])  # averaged over as many functions as then
        functions = prediction.centre + functions_of(prediction.deviations, 256)
        return functions.softmax(-1).mean(0)

    assert_close(answer(), truth["answer"])
    assert la.mean == "linear" and la.num_samples == 3 and len(la.history) == 3
    state = la.state_dict()
    la.load_state_dict(state)
    assert_close(answer(), truth["answer"])
