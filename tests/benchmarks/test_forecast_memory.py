"""The memory that a plan expects, compared with the peak of the fit in a process of its own."""

import json
import sys
from pathlib import Path

import pytest
from fresh import run_python

MEASURE = """
import json, logging, torch, cost, forecast
torch.set_num_threads(1)
logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
print(json.dumps(forecast.measured("", cost.made(lambda: {}), {})))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.parametrize(
    ("problem", "num_samples"),
    [
        ("cost.mlp(rows=2000, width=50, classes=20)._replace(epochs=5)", 8),
        ("(lambda p: p._replace(x=p.x[:300], y=p.y[:300], epochs=2))(cost.cnn())", 4),
    ],
)
def test_a_plan_expects_the_peak_of_memory_within_a_factor_of_two(problem, num_samples):
    path = str(Path(__file__).parents[2] / "benchmarks")
    code = f"import sys; sys.path.insert(0, {path!r})" + MEASURE.format(problem, num_samples)
    found = json.loads(run_python("-c", code, MALLOC_MMAP_THRESHOLD_="65536").splitlines()[-1])
    assert found["peak"] > 40
    assert 0.5 <= found["ratio"] <= 2 and found["peak"] <= found["at most"], found
