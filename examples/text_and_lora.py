# %% [markdown]
# # Fine-tuning with LoRA: Hugging Face transformers
#
# A small BERT classifies sentences from documentation: are they from numpy, torch or the standard
# library? (Docstrings are real text that needs no download.) We fit posteriors over the last
# layer, over the encoder, and over LoRA adapters, with the data loaders of `Trainer`.

# %%
import argparse
import asyncio
import datetime
import email.message
import inspect
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading
import unittest

import numpy
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from torch_lla_em import LinearisedLaplace

K = 16
torch.manual_seed(0)


def lines(*modules):
    """Return the first sentences of the docstrings of functions, classes and their methods."""
    found = {}
    for module in modules:
        for thing in vars(module).values():
            members = vars(thing).values() if inspect.isclass(thing) else ()
            for member in (thing, *members):
                text = inspect.getdoc(member) if callable(member) else None
                line = " ".join((text or "").split("\n\n")[0].split())
                if 5 <= len(line.split()) <= 25 and "->" not in line:
                    found[line] = None
    return list(found)


sources = {
    "numpy": lines(numpy, numpy.linalg, numpy.random, numpy.ma, numpy.fft, numpy.polynomial),
    "torch": lines(torch, torch.nn, torch.optim, torch.nn.functional, torch.distributions),
    "python": lines(
        argparse, asyncio, datetime, email.message, logging, os, pathlib, shutil, socket, subprocess
    )
    + lines(tempfile, threading, unittest, inspect),
}
most = min(300, *map(len, sources.values()))
draw = torch.Generator().manual_seed(0)
texts = [
    found[i]
    for found in sources.values()
    for i in torch.randperm(len(found), generator=draw)[:most]
]
labels = [label for label in range(3) for _ in range(most)]
print({name: f"{len(found)} sentences, {most} used" for name, found in sources.items()})

# %% [markdown]
# We train a tokenizer and a BERT with two layers from scratch. With a pretrained checkpoint, use
# `from_pretrained` instead.

# %%
words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
words.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=800, special_tokens=special))
words.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words,
    pad_token="[PAD]",
    unk_token="[UNK]",
    cls_token="[CLS]",
    sep_token="[SEP]",
)
rows = [
    {**tokenizer(text, truncation=True, max_length=32), "labels": label}
    for text, label in zip(texts, labels, strict=True)
]
shuffled = torch.randperm(len(rows)).tolist()
third = len(rows) // 4
test, validation = ([rows[i] for i in shuffled[a : a + third]] for a in (0, third))
train = [rows[i] for i in shuffled[2 * third :]]
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    num_labels=3,
)


def trained(model, epochs):
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=epochs,
        learning_rate=3e-3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
    )
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        model, arguments, train_dataset=train, eval_dataset=validation, data_collator=collator
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


logging.getLogger("transformers").setLevel(logging.ERROR)
model = BertForSequenceClassification(config)
trainer = trained(model, 8)

# %% [markdown]
# ## Last layer or encoder
#
# The batches of `Trainer`'s loaders are dicts with "labels", padded to their longest sentence.
# They work as they are.

# %%
collated = DataCollatorWithPadding(tokenizer)(test)
y = collated.pop("labels")


def report(name, la):
    prediction = la.predict(collated)
    print(
        f"{name:18}{la.w_samples.shape[1]:8,} parameters  γ {la.effective_dim.sum():6.1f}  ", end=""
    )
    accuracy = (prediction.probs.argmax(-1) == y).float().mean()
    print(f"NLL {-prediction.log_prob(y).mean():.3f}  accuracy {accuracy:.3f}", end="")
    print(f"  {la.history[-1]['seconds']:.0f} s")


with torch.no_grad():
    plain = model(**collated).logits
print(f"network: NLL {torch.nn.functional.cross_entropy(plain, y):.3f}, ", end="")
print(f"accuracy {(plain.argmax(-1) == y).float().mean():.3f}")
fits = {}
for name, parameters in {"last layer": "last_layer", "encoder and head": "*[re]r.*"}.items():
    la = LinearisedLaplace(model, "classification", parameters=parameters, num_samples=K)
    la.fit(
        trainer.get_train_dataloader(),
        validation=trainer.get_eval_dataloader(),
        progress_bar=False,
    )
    fits[name] = la
    report(name, la)

# %% [markdown]
# ## LoRA adapters
#
# The posterior improves the NLL of an overconfident network, not its accuracy. For fine-tuned
# models, fit the posterior over the adapters alone: a name pattern selects them.

# %%
adapters = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
adapted = get_peft_model(BertForSequenceClassification(config), adapters)
adapted.base_model.model.load_state_dict(model.state_dict(), strict=False)
lora = trained(adapted, 2)
la = LinearisedLaplace(adapted, "classification", parameters="*lora*", num_samples=K)
la.fit(lora.get_train_dataloader(), validation=lora.get_eval_dataloader(), progress_bar=False)
report("LoRA adapters", la)

# %% [markdown]
# ## Other sentences
#
# Two of these sentences are not documentation. Do not expect the epistemic uncertainty to detect
# them here: the tokenizer has seen nine hundred sentences only, and splits all of these into small
# pieces that mean little to the network.

# %%
la = fits["encoder and head"]
sentences = [
    "Returns the determinant of a square matrix.",
    "Whisk the eggs with sugar until the mixture is pale and thick.",
    "Applies dropout to the input during training.",
    "The committee will meet again on Thursday to vote on the budget.",
]
asked = tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt")
prediction = la.predict(asked)
for text, probs, epistemic in zip(sentences, prediction.probs, prediction.epistemic, strict=True):
    name = list(sources)[probs.argmax()]
    print(f"{name:8}{probs.max():.2f}, epistemic {epistemic:.2f}: {text}")

# %% [markdown]
# ## Hugging Face Hub
#
# A posterior is saved in one file of tensors, without code. The network is not included:
# load it first, from its own repository. `hf upload you/bert-posterior posterior.pt` uploads
# the file, and `huggingface_hub.hf_hub_download("you/bert-posterior", "posterior.pt")` returns
# the path of a downloaded copy.

# %%
path = pathlib.Path(tempfile.mkdtemp(), "posterior.pt")
la.save(path)
again = LinearisedLaplace.load(path, model)
print("predictions are equal:", torch.equal(again.predict(asked).probs, prediction.probs))
