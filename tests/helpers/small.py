"""Small sizes for the tutorials, so that their tests take seconds: what the scripts state -> what the tests run."""

from pathlib import Path

K = {f"num_samples={number}": "num_samples=4" for number in (16, 32, 64)}

SIZES = {
    "bayesian_optimisation": {"range(300)": "range(50)", "rounds = 12": "rounds = 1"},
    "calibration": {"K = 32": "K = 4", "range(steps)": "range(20)"},
    "choosing": {"K = 32": "K = 4", "range(epochs)": "range(10)"},
    "classification": {"range(30)": "range(2)"},
    "distilled_serving": {"range(150)": "range(10)", "num_inputs=3000": "num_inputs=200", "steps=1500": "steps=30", "count=200": "count=10"},
    "five_minutes": {"range(300)": "range(20)"},
    "lightning_callback": {"max_epochs=20": "max_epochs=1"},
    "own_likelihood": {"range(400)": "range(20)"},
    "regression": {"range(300)": "range(20)"},
    "segmentation": {"in (40, 20, 50))": "in (20, 10, 10))", "range(80)": "range(2)", "level = 0.1": "level = 0.5"},
    "serving": {"range(150)": "range(10)", "[path] * 80": "[path] * 8", ", 400\n": ", 16\n"},
    "several_machines": {"range(100)": "range(10)"},
    "wrong_labels": {"given, 400)": "given, 20)"},
    "text_and_lora": {"K = 16": "K = 4", "min(300,": "min(60,", "=epochs,": "=1,"},
}  # fmt: skip


def small(name: str, code: str) -> str:
    """Return the code of a tutorial with small sizes; raise an error if it has others than stated here."""
    for stated, run in SIZES.get(name, {}).items():
        assert stated in code, f"{name} has no {stated!r} any more: change tests/helpers/small.py"
        code = code.replace(stated, run)
    for stated, run in K.items() if name in SIZES else ():
        code = code.replace(stated, run)
    return code


def written(path: Path, folder: Path) -> Path:
    """Write a tutorial with small sizes to a folder, and return its path there."""
    copy = folder / path.name
    copy.write_text(small(path.stem, path.read_text()))
    return copy
