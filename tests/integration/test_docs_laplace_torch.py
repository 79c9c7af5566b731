"""Every line of code on two pages, run: laplace-torch's where it is installed."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

DOCS = Path(__file__).parents[2] / "docs"
HAS_LAPLACE = importlib.util.find_spec("laplace") is not None

pytestmark = pytest.mark.filterwarnings("ignore")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def table():
    rows = (DOCS / "coming_from_laplace_torch.md").read_text().split("| laplace-torch | here |")[1]
    rows = rows.split("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`([^`]*)`", row) for row in rows]


def run(page):
    """Run a page as two programs that share their beginning."""
    here, there = {}, {}
    seen = []
    for block in blocks(page):
        if block.startswith("# laplace-torch"):
            if HAS_LAPLACE:
                exec(block, there)
        else:
            exec(block, here)
            if not block.startswith("# here"):
                there.update(here)
        seen.append((dict(there), dict(here)))
    return seen


@pytest.fixture(scope="module")
def coming():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run("coming_from_laplace_torch.md")


def test_the_page_of_laplace_torch_runs(coming):
    there, here = coming[-1]
    assert here["preference"].shape == (40, 2)
    assert len(blocks("coming_from_laplace_torch.md")) > 10


def test_words_on_both_sides_run(coming):
    rows = table()
    assert len(rows) > 8
    there, here = coming[2]  # once both are fitted
    for left, right in rows:
        eval(right, here)
        if HAS_LAPLACE:
            eval(left, there)


def test_shapes_are_theirs(coming):
    pytest.importorskip("laplace")
    there, here = coming[2]
    for code in ("la(x)", "la.functional_samples(x)", "la.predictive_samples(x)"):
        theirs, ours = eval(code, there), eval(code, here)
        assert theirs.shape[-2:] == ours.shape[-2:]
        assert theirs.dim() == ours.dim()


def test_the_same_prior_is_the_same_posterior(coming):
    """laplace-torch's full covariance against the exact posterior and our samples' moments."""
    pytest.importorskip("laplace")
    from laplace import Laplace

    from torch_lla_em import LinearisedLaplace

    _, here = coming[0]
    x, y, model = here["x"].double(), here["y"], here["model"].double()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20)
    theirs = Laplace(model, "classification", "all", "full", prior_precision=3.0)
    theirs.fit(loader)
    covariance = torch.linalg.inv(theirs.posterior_precision)
    la = LinearisedLaplace(model, "classification", g_prior=False, num_samples=400)
    la.fit(loader, em_steps=0, prior_precision=3.0, progress_bar=False)
    products = la.w_samples[:, :, None] * la.w_samples[:, None]
    error = products.std(0) / len(products) ** 0.5
    assert ((products.mean(0) - covariance).abs() < 5 * error + 1e-4).all()
    # and of f, as it is asked for
    J, f = theirs.backend.jacobians(x)
    variance = torch.einsum("bcp,pq,bcq->bc", J, covariance, J).to(la.w_lin)
    spread = la.predict(x).deviations.square()
    error = spread.std(0) / len(spread) ** 0.5
    assert ((spread.mean(0) - variance).abs() < 5 * error).all()
    model.float()


def test_temperature_means_the_same():
    pytest.importorskip("laplace")
    from laplace import Laplace
    from torch import nn

    from torch_lla_em.likelihoods import Classification, tempered

    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    x, y = torch.randn(20, 2).double(), torch.randint(0, 3, (20,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20)
    theirs = Laplace(model, "classification", "all", "full", prior_precision=3.0, temperature=0.25)
    theirs.fit(loader)
    G = theirs.posterior_precision - 3 * torch.eye(9)
    J, f = theirs.backend.jacobians(x)
    HJ = tempered(Classification(), 0.25).hessian_product(f.detach(), J.movedim(2, 0).detach())
    assert_close(torch.einsum("bcp,qbc->pq", J.detach(), HJ), G, rtol=1e-5, atol=1e-6)


def test_the_page_of_priors_runs():
    _, here = run("prior_precision.md")[-1]
    function = here["prior_precision_from_weight_decay"]
    page = (DOCS / "prior_precision.md").read_text()
    claims = re.findall(r"^(prior_precision_from_weight_decay\(.*\)) +# (\d+)$", page, re.MULTILINE)
    assert len(claims) == 3
    for call, value in claims:
        assert eval(call, {function.__name__: function}) == pytest.approx(float(value))
    assert here["held"].sigma_noise == pytest.approx(0.1)
