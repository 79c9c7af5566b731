"""An HTML page about a fitted posterior or an ensemble: scores, plots, warnings, advice.

It needs matplotlib: ``pip install torch_lla_em[report]``.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from io import BytesIO
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_lla_em import plot
from torch_lla_em.data import Loader
from torch_lla_em.prediction import (
    Holder,
    PredictedData,
    Record,
    Table,
    advice,
    check,
    mean_and_error,
    predicted_data,
    required,
    scores,
    summary,
    suspicious_among,
)
from torch_lla_em.runtime import CALL

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
:root{{color-scheme:light dark}}
body{{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem}}
table{{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}}
td{{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8886;text-align:left;vertical-align:top}}
caption{{text-align:left;font-weight:bold}}h1+table caption{{display:none}}
@media(min-width:40rem){{td:first-child{{white-space:nowrap}}}}
div{{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.5rem}}
figure{{margin:0}}img{{width:100%;border-radius:.3rem}}figcaption{{font-size:.85rem}}
</style><h1>{title}</h1>{body}</html>
"""


def report(
    la: Holder,
    loader: Loader,
    path: str | PathLike[str] = "report.html",
    other: Tensor | Loader | None = None,
) -> None:
    """Write an HTML page about a posterior, as ``LinearisedLaplace.report``."""
    rows, (title, known) = predicted_data(la, loader), la._table()
    record = required(la)
    each = {name: scores(p, rows.targets) for name, p in rows.every().items()}
    cells: list[tuple[str, ...]] = [("", *each)]
    cells += [(key, *(f"{own[key]:.4g}" for own in each.values())) for key in each["posterior"]]
    of_scores = Table(f"Scores on {len(rows.targets):,} examples", cells)
    to_do, covered = to_do_for(record, rows), ""
    if record.correction.reference is not None:
        with suppress(TypeError, ValueError):  # labels of pixels, counts, or too few examples
            found = check(la, loader)
            name, coverage = found._table()
            to_do, covered = to_do + found.problems, Table(name, coverage)._repr_html_()
    with suppress(TypeError):  # a custom likelihood
        cells = suspicious_among(rows).cells(12)
        covered += Table("Targets that may be wrong", cells)._repr_html_()
    lines = "".join(
        f"<li>{escape(words)}</li>" for words in to_do or ["Nothing: no problem was found."]
    )
    parts = [
        Table(title, known)._repr_html_(),
        of_scores._repr_html_(),
        f"<h2>What to do</h2><ul>{lines}</ul>",
    ]
    parts += [covered, f"<h2>Plots</h2><div>{''.join(_figures(record, rows, other))}</div>"]
    numbers = Table("All numbers of the fit", summary.numbers(record))
    page = _PAGE.format(title=escape(title), body="".join([*parts, numbers._repr_html_()]))
    Path(path).write_text(page, encoding="utf-8")


def to_do_for(record: Record, rows: PredictedData) -> list[str]:
    """Return recommendations for a fit; empty if there is no problem."""
    calibration = record.correction.calibration
    own, alone = rows.log_probs()
    loss, error = mean_and_error(alone - own)
    to_do = [words for kind, words in advice(record) if kind == "to do"]
    if loss > 2 * error:
        remedy = "Calibrate with other held-out data, or predict with the network."
        if calibration is None or calibration.length is not None:
            remedy, to_do = f"{CALL}.", [words for words in to_do if CALL not in words]
        words = "The NLL of the posterior is higher than that of the network alone, by "
        to_do.insert(0, f"{words}{loss:.2g} ± {error:.1g} per example. {remedy}")
    return to_do


def _figures(record: Record, rows: PredictedData, other: Tensor | Loader | None) -> Iterator[str]:
    """Yield the plots that apply to these predictions."""
    from matplotlib.figure import Figure

    real = record.likelihood.real_valued and rows.posterior.expectation.shape == rows.targets.shape
    is_line = rows.inputs is not None and rows.inputs[0].numel() == 1
    pictures = rows.inputs is not None and rows.inputs.dim() == 4 and rows.targets.dim() == 1
    pictures = pictures and record.likelihood.gives_probabilities
    wanted: list[tuple[bool, Any, tuple[Any, ...], str]] = [
        (
            record.likelihood.gives_probabilities,
            plot.reliability,
            (rows,),
            "Accuracy over confidence",
        ),
        (real and is_line, plot.bands, (rows,), "Prediction intervals"),
        (real, plot.coverage, (rows,), "Coverage of prediction intervals"),
        (other is not None, plot.out_of_distribution, (rows, other), "Out-of-distribution inputs"),
        (pictures, plot.suspicious, (rows,), "Labels that may be wrong"),
    ]
    for _, draw, data, words in filter(itemgetter(0), wanted):
        figure, png = Figure(figsize=(5, 3.6), layout="constrained"), BytesIO()
        draw(record, *data, axes=figure.add_subplot())
        figure.savefig(png, format="png", dpi=110)
        source = f"data:image/png;base64,{b64encode(png.getvalue()).decode()}"
        yield f'<figure><img alt="{words}" src="{source}"><figcaption>{words}</figcaption></figure>'
