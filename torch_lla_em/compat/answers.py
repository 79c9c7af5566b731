"""Language models that answer questions with one of a few tokens, as classifiers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Answers:
    """A ``forward_fn`` that returns the logits of the answer tokens after each prompt, (B, n).

    ``answers`` creates it. Prompts may be padded on either side; only the logits after their last token
    are computed where the model allows it. They are returned in float32.

    Example:
        >>> forward_fn = Answers((5, 6))
    """

    tokens: tuple[int, ...]
    """The token of each answer."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits of the answers.

        Args:
            model (nn.Module): A causal language model of Hugging Face, with or without peft.
            batch (dict): "input_ids" and "attention_mask", shape (B, T).

        Raises:
            ValueError: If the batch has no "input_ids", or a prompt is empty.
        """
        if "input_ids" not in batch:
            raise ValueError(f"The batch has no 'input_ids', only {sorted(batch)}.")
        ids: Tensor = batch["input_ids"]
        mask: Tensor = batch.get("attention_mask", torch.ones_like(ids))
        number = torch.arange(ids.shape[1], device=ids.device)
        last = (mask * (number + 1)).argmax(1)
        if not mask.any(1).all():
            raise ValueError("A prompt has no tokens: its attention_mask is 0 everywhere.")
        # padding on the left must not shift the positions of the tokens
        given = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
        kept, places = last.unique(return_inverse=True)
        given["logits_to_keep"] = kept
        accepted = _arguments(model)
        named = {name: value for name, value in given.items() if name in accepted}
        outputs = model(input_ids=ids, attention_mask=mask, **named)
        logits: Tensor = outputs.logits
        at = places if "logits_to_keep" in named else last
        rows = torch.arange(len(ids), device=ids.device)
        tokens = torch.tensor(self.tokens, device=ids.device)
        return logits[rows, at][:, tokens].float()


def answers(tokenizer: Any, choices: Sequence[str]) -> Answers:
    """Return the ``forward_fn`` of a language model that answers with one of a few tokens.

    The targets ("labels" of a batch) are the numbers of the right answers. For LoRA adapters of peft
    select their parameters with ``parameters="*lora*"``.

    Args:
        tokenizer (object): The tokenizer of the model.
        choices (sequence of str): The answers, each a single token, such as ["A", "B", "C"].

    Returns:
        A function of the model and a batch, for ``LinearisedLaplace(..., forward_fn=)``.

    Raises:
        ValueError: If an answer is not a single token, or two answers are the same token.

    Example:
        >>> def tokenizer(text, add_special_tokens):
        ...     return {"input_ids": ["ABC".index(text)]}
        >>> forward_fn = answers(tokenizer, ["A", "B", "C"])
    """
    tokens = []
    for choice in choices:
        ids = list(tokenizer(choice, add_special_tokens=False)["input_ids"])
        if len(ids) != 1:
            raise ValueError(
                f"The answer {choice!r} has {len(ids)} tokens ({ids}), but it must be one. Try it with or "
                f"without a space before it ({' ' + choice.strip()!r}), or choose letters as answers."
            )
        tokens += ids
    if len(set(tokens)) < len(tokens) or len(tokens) < 2:
        raise ValueError(
            f"There must be at least two different answers: their tokens are {tokens}."
        )
    return Answers(tuple(int(token) for token in tokens))


def _arguments(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward, below the adapters of peft."""
    base: Any = model
    while hasattr(base, "get_base_model"):
        base = base.get_base_model()
    return set(inspect.signature(base.forward).parameters)
