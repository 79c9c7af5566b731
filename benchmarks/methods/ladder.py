"""From images to a table: train or load a network, fit its posterior, score it under shifts."""

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from methods import markdown, ranks
from methods.images import MissingData, Sizes, Splits, splits
from methods.learning import best_temperature
from methods.measure import Meter
from methods.metrics import Classes, auroc
from methods.provenance import provenance
from methods.shifts import Shift, unchanged
from methods.training import Rung, network_of, train
from torch_lla_em import LinearisedLaplace
from torch_lla_em.prediction.functions import number_of_functions
from torch_lla_em.prediction.prediction import Prediction

PACKAGES = "torch", "torchvision", "torchmetrics"
CLEAN = "accuracy", "nll", "ece", "brier", "joint_dyadic", "fit_seconds", "gamma", "columns"
SHIFTED = "accuracy", "nll", "ece", "joint_dyadic", "auroc"
HELD = 2**28
"""Numbers that functions of all test images may take."""
Method = Callable[[Iterable[Tensor], Tensor], dict[str, Classes]]
"""Batches of images and the network's outputs there -> predictions, by what the row adds."""


def options(rung: Rung, description: str) -> argparse.ArgumentParser:
    """Return what every script of the ladder can be asked."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    data = parser.add_mutually_exclusive_group(required=rung.source.packaged is None)
    data.add_argument("--data-dir", type=Path, help="where the data set lies; never downloaded")
    data.add_argument("--synthetic", action="store_true", help="made-up images of the same shape")
    parser.add_argument("--network", choices=rung.networks, default=next(iter(rung.networks)))
    parser.add_argument("--weights", type=Path, help="a state_dict, instead of training")
    parser.add_argument("--epochs", type=int, default=rung.recipe.epochs)
    parser.add_argument("--learning-rate", type=float, default=rung.recipe.learning_rate)
    parser.add_argument("--batch-size", type=int, default=rung.recipe.batch_size)
    parser.add_argument("--train-size", type=int, help="images to train and to fit on")
    parser.add_argument("--held-out", type=int, help="images to calibrate on; default: a tenth")
    parser.add_argument("--test-size", type=int)
    parser.add_argument("--num-samples", type=int, default=rung.num_samples)
    parser.add_argument(
        "--priors", nargs="+", choices=["plain", "g-prior"], default=["plain", "g-prior"]
    )
    parser.add_argument("--parameters", choices=["all", "last_layer"], default="all")
    parser.add_argument("--ensemble", type=int, default=0, help="networks of a deep ensemble")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder: the same call goes on after a kill"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser


def climb(rung: Rung, args: argparse.Namespace) -> None:
    """Run one rung; print its tables and append its records."""
    torch.set_num_threads(args.threads)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    origin = provenance(PACKAGES)
    given = args.train_size, args.held_out, args.test_size
    if args.synthetic:
        default = rung.sizes
        given = [size if size is not None else other for size, other in zip(given, default)]
    with ranks.ranks(args.device) as device:
        try:
            source, folder = rung.source, args.data_dir
            if folder is None and not args.synthetic:
                source, folder = source._replace(load=lambda *_: rung.source.packaged()), Path()
            data = splits(source, folder, Sizes(*given))
            records = list(measured(rung, args, data, device))
        except MissingData as error:
            raise SystemExit(str(error)) from None
        if ranks.is_first():
            show(rung, records)
            markdown.append(args.out / f"{rung.name}.jsonl", records, origin)


def measured(
    rung: Rung, args: argparse.Namespace, data: Splits, device: torch.device
) -> Iterator[dict]:
    """Yield a record of every row: scores at clean images, costs, and scores under all shifts."""
    with Meter() as training:
        network = network_of(rung, args, data.train, device)
    common = {
        "task": rung.name,
        "synthetic": args.synthetic,
        "network": args.network,
        "parameters": args.parameters,
        "weights": sum(p.numel() for p in network.parameters()),
        "train_size": len(data.train),
        "test_size": len(data.test),
        "epochs": None if args.weights else args.epochs,
        "num_samples": args.num_samples,
        "seed": args.seed,
        "train_seconds": training.seconds,
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }
    say(f"{network_line(common)}, trained or loaded in {training.seconds:.0f} s")
    held_out = DataLoader(data.held_out, args.batch_size, num_workers=args.workers)
    methods, costs = baselines(rung, args, data, network, held_out)
    for prior in args.priors:
        la, cost = fitted(network, args, data.train, prior)
        la.calibrate(held_out)
        methods[f"ours: {prior}"] = posterior(la)
        costs[f"ours: {prior}"] = cost | {
            "tau": la.posterior_scale.item(),
            "mean": la.mean,
        }
    test = DataLoader(data.test, args.batch_size, num_workers=args.workers)
    labels = torch.cat([y for _, y in test])
    lines: dict[str, dict] = {}
    familiar: dict[str, Tensor] = {}
    for shift in (unchanged(), *rung.shifts):
        images = Changed(test, shift, args.seed)
        logits = outputs(network, images)
        for name, method in methods.items():
            for suffix, prediction in method(images, logits).items():
                line = lines.setdefault(name + suffix, {"row": name + suffix})
                found, score = prediction.scores(labels), prediction.unfamiliarity
                found["auroc"] = auroc(familiar.setdefault(name + suffix, score), score)
                if not shift.level:
                    line |= {key: found[key] for key in found if key != "auroc"}
                    line |= costs.get(name, {})
                else:
                    line |= {f"{key} {shift.name} {shift.level:g}": found[key] for key in SHIFTED}
    yield from (common | line for line in lines.values())


def baselines(
    rung: Rung, args: argparse.Namespace, data: Splits, network: nn.Module, held_out: DataLoader
) -> tuple[dict[str, Method], dict[str, dict]]:
    """Return the network itself, at a temperature, and in an ensemble."""
    logits = torch.cat([outputs(network, [x]) for x, _ in held_out])
    labels = torch.cat([y for _, y in held_out])
    temperature = best_temperature(logits, labels)
    methods = {
        "MAP": lambda x, f: {"": Classes.of(f[None])},
        "temperature scaling": lambda x, f: {"": Classes.of(f[None] / temperature)},
    }
    costs: dict[str, dict] = {"temperature scaling": {"temperature": temperature}}
    if args.ensemble:
        device = next(network.parameters()).device
        with Meter() as clock:
            others = [
                train(rung, args, data.train, device, seed) for seed in range(1, args.ensemble)
            ]
        name = f"deep ensemble of {args.ensemble}"
        methods[name] = lambda x, f: {
            "": Classes.of(torch.stack([f, *(outputs(member, x) for member in others)]))
        }
        costs[name] = {"fit_seconds": clock.seconds}
    return methods, costs


def fitted(
    network: nn.Module, args: argparse.Namespace, data, prior: str
) -> tuple[LinearisedLaplace, dict]:
    """Return the posterior, and what it cost."""
    loader = DataLoader(data, args.batch_size, num_workers=args.workers)
    la = LinearisedLaplace(
        network,
        "classification",
        g_prior=prior == "g-prior",
        num_samples=args.num_samples,
        parameters="last_layer" if args.parameters == "last_layer" else None,
        seed=args.seed,
    )
    with Meter() as clock:
        folder = args.checkpoint and args.checkpoint / prior
        la.fit(loader, checkpoint=folder, progress_bar=ranks.is_first())
    evidence = la.log_marginal_likelihood()
    cost = {
        "fit_seconds": clock.seconds,
        "megabytes": clock.megabytes,
        "columns": la.history[-1]["columns"],
        "em_steps": len(la.history),
        "random_weights": la.w_lin.numel(),
        "precision": la.prior_precision.item(),
        "gamma": la.effective_dim.item(),
        "gamma_error": la.effective_dim_error.item(),
        "certificate": la.certificate.max().item(),
        "log_evidence": evidence.value.item(),
    }
    say(
        f"{prior}: λ = {cost['precision']:.4g}, γ = {cost['gamma']:.1f} ± {cost['gamma_error']:.1f}, "
        f"{cost['columns']:.0f} columns, {clock.seconds:.0f} s"
    )
    return la, cost


def posterior(la: LinearisedLaplace) -> Method:
    """Return the method that averages over functions as fitted, by both links, and calibrated."""

    def method(images: Iterable[Tensor], f: Tensor) -> dict[str, Classes]:
        calibrated = joined([la.predict(x) for x in images])
        scale = la.posterior_scale.sqrt().to(calibrated.deviations)
        fitted = Prediction(la.likelihood, f, calibrated.deviations / scale)
        return {
            ", Monte Carlo": Classes(fitted.log_probs, partial(functions, fitted)),
            ", probit": Classes(fitted.smoothed().log(), partial(functions, fitted)),
            ", calibrated": Classes(calibrated.log_probs, partial(functions, calibrated)),
        }

    return method


def joined(parts: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the inputs of several batches."""
    centre = torch.cat([part.centre.cpu() for part in parts])
    deviations = torch.cat([part.deviations.cpu() for part in parts], dim=1)
    members = tuple(joined(same) for same in zip(*(part.members for part in parts)))
    return replace(parts[0], centre=centre, deviations=deviations, members=members)


def functions(prediction: Prediction) -> Tensor:
    """Return joint functions: those that the library averages over where they fit, or samples."""
    count = number_of_functions(prediction.deviations) * prediction.centre.numel()
    return prediction.functions if count <= HELD else prediction.samples


def outputs(network: nn.Module, images: Iterable[Tensor]) -> Tensor:
    """Return the network's outputs at batches of images, (N, C)."""
    device = next(network.parameters()).device
    with torch.no_grad():
        return torch.cat([network(x.to(device)).cpu() for x in images])


class Changed:
    """Shifted test images, batch by batch: read anew each time, and the same each time."""

    def __init__(self, loader: DataLoader, shift: Shift, seed: int):
        self._loader, self._shift, self._seed = loader, shift, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        for x, _ in self._loader:
            yield self._shift(x, generator)


def show(rung: Rung, records: list[dict]) -> None:
    """Print the scores at clean images, then each score over the levels of every shift."""
    print("\n" + markdown.table(records, ["row"], CLEAN))
    for name in dict.fromkeys(shift.name for shift in rung.shifts):
        levels = [f"{shift.level:g}" for shift in rung.shifts if shift.name == name]
        for key in SHIFTED:
            columns = {f"{key} {name} {level}": level for level in levels}
            print(f"\n{name}: {key}\n\n{markdown.table(records, ['row'], columns)}")


def network_line(record: dict) -> str:
    """Return what was run, in a line."""
    data = "synthetic images of its shape" if record["synthetic"] else "its images"
    return (
        f"{record['task']} ({data}): {record['network']}, P = {record['weights']}, "
        f"N = {record['train_size']}, K = {record['num_samples']}"
    )


def say(text: str) -> None:
    if ranks.is_first():
        print(text, flush=True)
