"""Language models that choose an answer: LoRA adapters and their posterior, in the protocol of bayesian-peft.

    python benchmarks/language.py                     # a tiny random Llama, generated questions: two minutes
    python benchmarks/language.py --model meta-llama/Llama-2-7b-hf --data ARC-Challenge --seeds 1 2 3
    python benchmarks/language.py --model meta-llama/Llama-2-7b-hf --data winogrande_s --seeds 1 2 3
    python benchmarks/language.py --report            # the tables of results/language.jsonl

Real weights and data need a GPU, access to the Hugging Face Hub and ``pip install datasets``; they have not been run
yet. As in github.com/Wang-ML-Lab/bayesian-peft: LoRA of rank 8 with α = 16 on q_proj, v_proj and lm_head, AdamW, a
learning rate of 1e-4 with 6 % of warm-up and linear decay, 5,000 steps with batches of 4, prompts of 300 tokens at
most, a weight decay of 1e-5 for MAP, 10 samples of a dropout of 0.1, an ensemble of 3, and the logits of the answer
letters only. The test set is the validation split. Unlike there, a tenth of the training questions is held out from
all methods, for the temperature and ``calibrate``.

A run ends with what real weights would need. These lines are extrapolated lower bounds: the fit's price in forward
passes and its number of vectors are those of the run, a GPU is assumed to reach --tflops with bfloat16, and activations
and the overhead of small batches are not counted.
"""

import argparse
import logging
import random
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from methods import markdown
from methods.metrics import Classes
from methods.provenance import provenance
from methods.resume import resume
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace
from torch_lla_em.compat import answers

RANDOM, GENERATED = "random", "generated"
REAL = {"ARC-Challenge": 1119, "ARC-Easy": 2251, "winogrande_s": 640, "winogrande_m": 2558}
"""Data sets of the Hugging Face Hub, and how many questions their training splits have."""

ASSUMED_TOKENS = 80
"""Of a prompt with real questions, for what is extrapolated."""

LLAMAS = {
    "Llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "vocab_size": 32000},
    "Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
"""Sizes of models with real weights."""

PROMPT = """Return the label of the correct answer for the question below.

Question: {question}
Choices:
{choices}
Answer:"""


class Question(NamedTuple):
    """A prompt, and the number of its answer."""

    prompt: str
    answer: int


class Words:
    """A tokenizer of single words, for generated questions."""

    def __init__(self) -> None:
        self.known = ["[PAD]", *"ABC0123456789", "+", "=", "?"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.known.index(word) for word in text.split()]}


def generated(count: int, seed: int) -> list[Question]:
    """Return sums of two or three digits: is the remainder by three 0, 1 or 2? A tenth is answered wrongly."""
    drawn, found = random.Random(seed), []
    for _ in range(count):
        digits = [drawn.randrange(4) for _ in range(drawn.choice([2, 3]))]
        answer = sum(digits) % 3 if drawn.random() < 0.9 else drawn.randrange(3)
        found.append(Question(" + ".join(map(str, digits)) + " = ?", answer))
    return found


def downloaded(name: str, split: str) -> list[Question]:
    """Return the questions of a data set of the Hub."""
    from datasets import load_dataset

    is_arc = name.startswith("ARC")
    found = []
    for row in load_dataset(*("allenai/ai2_arc", name) if is_arc else ("winogrande", name))[split]:
        if is_arc:
            labels, texts, key = row["choices"]["label"], row["choices"]["text"], row["answerKey"]
            question, number = row["question"], labels.index(key)
        else:
            texts, question = [row["option1"], row["option2"]], row["sentence"]
            number = int(row["answer"]) - 1
        choices = "\n".join(f"{chr(65 + i)}) {text}" for i, text in enumerate(texts))
        found.append(Question(PROMPT.format(question=question, choices=choices), number))
    return found


def batches(questions: list[Question], tokenizer: Any, size: int, device: str) -> list[dict]:
    """Return padded batches: "input_ids", "attention_mask" and "labels"."""
    found = []
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        ids = [tokenizer(q.prompt)["input_ids"][-300:] for q in part]
        padded, mask = torch.zeros(2, len(part), max(map(len, ids)), dtype=torch.long)
        for row, tokens in enumerate(ids):  # on the left
            padded[row, -len(tokens) :], mask[row, -len(tokens) :] = torch.tensor(tokens), 1
        labels = torch.tensor([q.answer for q in part])
        batch = {"input_ids": padded, "attention_mask": mask, "labels": labels}
        found.append({name: tensor.to(device) for name, tensor in batch.items()})
    return found


def adapted(name: str, seed: int, dropout: float, device: str) -> nn.Module:
    """Return a language model with new adapters."""
    import peft
    import transformers

    if name == RANDOM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "vocab_size": len(Words().known)}
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=0))
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    return peft.get_peft_model(base, lora(dropout)).to(device)


def lora(dropout: float) -> Any:
    import peft

    modules = ["q_proj", "v_proj", "lm_head"]
    return peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules=modules)


def trained(case: "Case", seed: int, dropout: float = 0.0) -> nn.Module:
    """Return a model whose adapters are trained."""
    args, model = case.args, adapted(case.args.model, seed, dropout, case.device)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, args.lr, weight_decay=1e-5)
    warm = max(1, round(0.06 * args.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min((i + 1) / warm, (args.steps - i) / max(1, args.steps - warm))
    )
    model.train()
    drawn, left = random.Random(seed), []
    for _ in range(args.steps):
        left = left or drawn.sample(case.small, len(case.small))
        batch = left.pop()
        optimiser.zero_grad()
        F.cross_entropy(case.forward(model, batch), batch["labels"]).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


class Case(NamedTuple):
    """The data of a run."""

    args: argparse.Namespace
    device: str
    forward: Any
    small: list[dict]
    """Batches to train on."""

    train: list[dict]
    held_out: list[dict]
    test: list[dict]


def case_of(data: str, seed: int, args: argparse.Namespace) -> Case:
    """Read the questions and divide them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if data == GENERATED:
        tokenizer: Any = Words()
        known, test, letters = generated(args.questions, seed), generated(500, 1000 + seed), "ABC"
    else:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        known, test = (downloaded(data, split) for split in ("train", "validation"))
        letters = "ABCDE" if data.startswith("ARC") else "AB"
    random.Random(seed).shuffle(known)
    count = len(known) // 10
    try:
        forward = answers(tokenizer, [f" {letter}" for letter in letters])
    except ValueError:  # tokenizers that mark the beginning of a word themselves
        forward = answers(tokenizer, list(letters))
    cut = partial(batches, tokenizer=tokenizer, device=device)
    parts = (cut(part, size=32) for part in (known[count:], known[:count], test))
    return Case(args, device, forward, cut(known[count:], size=4), *parts)


def logits_of(case: Case, model: nn.Module, loader: list[dict]) -> Tensor:
    with torch.no_grad():
        return torch.cat([case.forward(model, batch).cpu() for batch in loader])


def scored(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    found = Classes(log_probs, lambda: log_probs[None]).scores(y, {})
    return {name: found[name] for name in ("accuracy", "nll", "ece")}


def measured(model: str, data: str, seed: int, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the scores of all methods, and what the fit cost."""
    case = case_of(data, seed, args)
    y, kept = (torch.cat([b["labels"] for b in part]).cpu() for part in (case.test, case.held_out))
    clock = time.process_time if case.device == "cpu" else time.perf_counter
    began = clock()
    network = trained(case, seed)
    training = clock() - began
    logits, held = (logits_of(case, network, part) for part in (case.test, case.held_out))
    yield {"method": "MAP", "seconds": training, **scored(logits.log_softmax(1), y)}
    grid = torch.logspace(-1, 1.5, 200)
    best = grid[torch.tensor([F.cross_entropy(held / t, kept) for t in grid]).argmin()]
    yield {"method": "MAP, temperature", **scored((logits / best).log_softmax(1), y)}

    dropped = trained(case, seed, 0.1)
    for layer in dropped.modules():
        layer.train(isinstance(layer, nn.Dropout))
    draws = torch.stack([logits_of(case, dropped, case.test) for _ in range(10)])
    yield {"method": "MC dropout, 10 samples", **scored(Classes.of(draws).log_probs, y)}
    members = [logits] + [logits_of(case, trained(case, 100 * seed + i), case.test) for i in (1, 2)]
    found = Classes.of(torch.stack(members)).log_probs
    yield {"method": "ensemble of 3", **scored(found, y)}

    la = LinearisedLaplace(
        network, "classification", parameters="*lora*", forward_fn=case.forward, seed=seed
    )
    began = clock()
    logits_of(case, network, case.train)
    forward = clock() - began
    vectors = la.plan(case.train).vectors
    began = clock()
    la.fit(case.train, progress_bar=False)
    fit = clock() - began
    price = {"seconds": fit, "forward_passes": fit / forward, "weights": la.w_lin.numel()}
    price |= {"vectors": vectors / la.w_lin.numel() / 4}
    for method in ("posterior", "posterior, calibrated"):
        log_probs = torch.cat([p.log_probs.cpu() for p in la.predictions(case.test)])
        yield {"method": method, **price, **scored(log_probs.float(), y)}
        if method == "posterior":
            la.calibrate(case.held_out)


def sizes_of(name: str) -> tuple[int, int]:
    """Return how many parameters a model and its adapters have, without allocating them."""
    import peft
    import transformers

    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMAS[name]))
        count = sum(p.numel() for p in base.parameters())
        model = peft.get_peft_model(base, lora(0.0))
    return count, sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)


def needs(records: list[dict], tflops: float, steps: int) -> list[dict]:
    """Return what runs with real weights would need, extrapolated from a run."""
    run = [r for r in records if r.get("method") == "posterior"]
    passes, vectors = (max(r[key] for r in run) for key in ("forward_passes", "vectors"))
    found = []
    for name in LLAMAS:
        count, adapters = sizes_of(name)
        for data, questions in REAL.items():
            forward = 2 * count * ASSUMED_TOKENS / (tflops * 1e12)  # seconds of one question
            line = {"model": name, "data": data, "adapters": f"{adapters / 1e6:.1f} M"}
            line |= {"memory": f"{(2 * count + 4 * vectors * adapters) / 2**30:.0f} GiB"}
            # the frozen weights need no gradient: a step is two forward passes
            line |= {"train": f"{2 * forward * 4 * steps / 60:.0f} min"}
            line |= {"fit": f"{passes * forward * 0.9 * questions / 60:.0f} min"}
            found.append(line)
    return found


NEEDS = {
    "adapters": "parameters in the posterior",
    "memory": "memory, at least",
    "train": "one training, at least",
    "fit": "fit of the posterior, at least",
}


def scores_table(records: list[dict]) -> str:
    """Return the scores of all methods, over seeds."""
    keys = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
    best = {"accuracy": "max", "nll": "min", "ece": "min"}
    rows = {"model": "model", "data": "data", "method": "method"}
    return markdown.table([r for r in records if "method" in r], rows, keys, best, 3)


def needs_table(records: list[dict]) -> str:
    """Return what real weights would need, as the last run extrapolated it."""
    last = {(r["model"], r["data"]): r for r in records if "memory" in r}
    return markdown.table(last.values(), {"model": "model", "data": "data"}, NEEDS)


TFLOPS, STEPS = 300.0, 5000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=RANDOM, help="of the Hugging Face Hub, or random")
    parser.add_argument("--data", nargs="+", choices=[GENERATED, *REAL], help="default: by model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="of training: 5,000, or 600 of a random model")
    parser.add_argument("--lr", type=float, help="default: 1e-4, or 0.02 of a random model")
    parser.add_argument("--questions", type=int, default=600, help="generated ones, to train on")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="of a GPU, as reached")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--out", type=Path, default=Path("results/language.jsonl"))
    args = parser.parse_args(arguments)
    tiny = args.model == RANDOM
    args.steps = args.steps or (600 if tiny else STEPS)
    args.lr = args.lr or (0.02 if tiny else 1e-4)
    data = args.data or ([GENERATED] if tiny else list(REAL))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    cases = [
        {"model": args.model, "data": name, "seed": seed}
        for name in data
        for seed in args.seeds
        if not args.report
    ]
    origin = provenance(("torch", "transformers", "peft"))
    found = resume(args.out, cases, partial(measured, args=args), origin)
    if cases:
        extrapolated = needs(found, args.tflops, STEPS)
        markdown.append(args.out, extrapolated, origin)
        found += extrapolated
    print("\n" + scores_table(found))
    assumed = f"{args.tflops:.0f} TFLOP/s and {ASSUMED_TOKENS} tokens"
    print(f"\nReal weights, extrapolated at {assumed}:\n")
    print(needs_table(found))


if __name__ == "__main__":
    main()
