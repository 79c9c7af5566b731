"""How many passes over the data each solver takes to a given error, and the whole EM.

    python benchmarks/passes.py                          # digits
    python benchmarks/passes.py --problems lenet --synthetic --num-samples 16
    python benchmarks/passes.py --problems resnet20 --synthetic --num-samples 16 --rows 60
    python benchmarks/passes.py --problems resnet18 --synthetic --num-samples 8 --rows 32
    python benchmarks/passes.py --problems vit_s resnet50 --synthetic --num-samples 4 --rows 4
    python benchmarks/passes.py --report                 # docs/passes.md from the results

takes about half an hour for digits on one core, and for the few images of resnet20; each of the
three large networks takes that long with --parts block_krylov traces. A pass pushes K columns
through the network, forwards and back; a pass of block Krylov carries 2 K, and counts as two.
Errors are those of the functions J w_k on the data against a tightly solved reference. On the
digits expect block Krylov and block CG at 1 % in about 6 passes, and the whole fit by block
Krylov in about 10 passes and 90 single columns. Every part is written as soon as it is there;
--parts takes those that are wanted: fits, the traces of solvers at the λ found, block CG with
and without deflation at smaller λ, and the dense fixed point of λ where all of G fits.
"""

import argparse
import json
from pathlib import Path

import torch
from methods import passes_page, sgd_page
from methods.counted import problem_of
from methods.fits import FITS, deflation, dense_fixed_point, whole_fit
from methods.networks import PROBLEMS, Source, trained
from methods.provenance import save
from methods.race import SOLVERS, Race

from torch_lla_em.inference.stochastic_prior import get_sto_samples

HERE = Path(__file__).parent
PARTS = (*FITS, "traces", "deflation", "dense")


def measure(args: argparse.Namespace, name: str) -> None:
    """Update the record of one problem, part by part."""
    path = args.out / f"passes_{name}.jsonl"
    record = json.loads(path.read_text()) if path.exists() else {"fits": {}, "traces": {}}
    source = Source(args.synthetic, args.data, args.rows)
    model, batches = trained(name, source, args.epochs)
    problem = problem_of(model, batches)
    noise = get_sto_samples(problem, args.num_samples)
    record |= {
        "problem": name + (" (synthetic)" if args.synthetic and name != "digits" else ""),
        "weights": problem.size,
        "rows": problem.data.num_rows,
        "num_samples": args.num_samples,
        "reference": args.reference,
    }
    for part in args.parts:
        if part in FITS:
            counted = problem_of(model, batches)
            record["fits"][part] = whole_fit(counted, args.num_samples, FITS[part])
            print(f"  fit by {part}: {record['fits'][part]}", flush=True)
            save(record, path)
            continue
        precision = torch.tensor(record["fits"]["block_krylov"]["path"][-1]).double()
        if part == "deflation":
            record["deflation"] = deflation(problem, noise, precision)
            print(f"  {record['deflation']}", flush=True)
            save(record, path)
            continue
        if part == "dense":
            record["dense"] = dense_fixed_point(problem, noise, precision)
            print(f"  dense λ {record['dense']:.6g} against {precision:.6g}", flush=True)
            save(record, path)
            continue
        race = Race(problem, noise, precision, args.reference)
        for solver in args.solvers:
            record["traces"][solver] = race.trace(solver)
            print(
                f"  {solver:13}",
                *(f"{p:g}:{e:.2g}" for p, _, e in record["traces"][solver]),
                flush=True,
            )
            save(record, path)


def report(results: Path, docs: Path) -> None:
    """Write docs/passes.md and its pictures."""
    records = passes_page.load(results)
    studies = passes_page.load(results, "paper_sgd_*.jsonl")
    studies.sort(key=lambda record: record["num_samples"])
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "passes.md").write_text(passes_page.page(records, studies))
    passes_page.draw(records, docs / "passes.png")
    if studies:
        sgd_page.draw(studies[0], docs / "paper_sgd.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["digits"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=SOLVERS)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--reference", type=float, default=1e-4, help="error of the reference")
    parser.add_argument("--rows", type=int, help="how many images; default: each problem's own")
    parser.add_argument("--epochs", type=int, help="of training; default: each problem's own")
    parser.add_argument("--synthetic", action="store_true", help="data of the right shape")
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="where MNIST and CIFAR-10 are kept"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        for name in args.problems:
            print(name, flush=True)
            measure(args, name)
    report(args.out, args.docs)


if __name__ == "__main__":
    main()
