"""How many passes over the data each solver takes to a given error, and the whole EM.

    python benchmarks/passes.py                          # digits
    python benchmarks/passes.py --problems lenet --num-samples 16
    python benchmarks/passes.py --problems resnet20 --num-samples 16 --rows 60
    python benchmarks/passes.py --problems resnet18 --num-samples 8 --rows 32
    python benchmarks/passes.py --problems vit_s resnet50 --num-samples 4 --rows 4

takes about half an hour for digits on one core, and for the few images of resnet20; each of the
three large networks takes that long with --parts block_krylov traces. A pass pushes K columns
through the network, forwards and back. Errors are those of the functions J w_k on the data against
a tightly solved reference. On the digits expect block Krylov and block CG at 1 % in about 6 passes.
--parts takes what is wanted: fits, the traces of solvers at the λ found, and the dense fixed point
of λ where all of G fits. Lines go to results/passes.jsonl.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from methods.counted import problem_of
from methods.fits import FITS, dense_fixed_point, whole_fit
from methods.markdown import append
from methods.networks import PROBLEMS, trained
from methods.provenance import provenance
from methods.race import SOLVERS, TARGETS, Race, reached

from torch_lla_em.inference.stochastic_prior import get_sto_samples

PARTS = (*FITS, "traces", "dense")


def measured(args: argparse.Namespace, name: str) -> Iterator[dict]:
    """Yield the lines of one problem."""
    model, batches = trained(name, args.rows, args.epochs)
    problem = problem_of(model, batches)
    shown = name + (" (synthetic)" if name != "digits" else "")
    common = {
        "problem": f"{shown}, P = {problem.size:,}, N = {problem.data.facts.num_rows}, K = {args.num_samples}"
    }
    precision = None
    # λ comes from the first fit, whatever is wanted at it
    for part in sorted({"block_krylov", *args.parts}, key=PARTS.index):
        if part not in FITS:
            break
        fit = whole_fit(problem_of(model, batches), args.num_samples, FITS[part])
        last = fit.pop("path", [None])[-1]
        precision = last if part == "block_krylov" else precision
        scalar = {} if isinstance(last, list) else {"precision": last}
        yield common | {"part": "fit", "fit": part.replace("_", " ")} | fit | scalar
    noise = get_sto_samples(problem, args.num_samples)
    precision = torch.tensor(precision).double()
    if "dense" in args.parts:
        dense = dense_fixed_point(problem, noise, precision)
        yield common | {"part": "dense", "precision": dense, "found": precision.item()}
    if "traces" in args.parts:
        race = Race(problem, noise, precision, args.reference)
        for solver in args.solvers:
            points = race.trace(solver)
            line = {name: reached(points, target) for name, target in TARGETS.items()}
            yield common | {"part": "solver", "solver": solver.replace("_", " ")} | line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=SOLVERS)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--reference", type=float, default=1e-4, help="error of the reference")
    parser.add_argument("--rows", type=int, help="how many images; default: each problem's own")
    parser.add_argument("--epochs", type=int, help="of training; default: each problem's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.problems:
        for line in measured(args, name):
            print(line, flush=True)
            append(args.out / "passes.jsonl", [line], provenance(("torch",)))


if __name__ == "__main__":
    main()
