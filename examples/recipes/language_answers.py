"""A language model that answers with one of a few tokens, as a classifier: a recipe to copy.

    pip install "torch_lla_em[transformers]"
    python examples/recipes/language_answers.py

``answers(tokenizer, ["A", "B", "C"])`` is the outputs of an ``Adapter``. The targets, "labels" of a
batch, are the numbers of the right answers. ``parameters="*lora*"`` selects the adapters of peft.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em import Adapter


@dataclass(frozen=True)
class Answers:
    """Returns the logits (B, n) of the answer tokens after each prompt, which may be padded on either side."""

    tokens: tuple[int, ...]

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits in float32; those before the last token of a prompt are not computed."""
        if "input_ids" not in batch:
            raise ValueError(f"The batch has no 'input_ids', only {sorted(batch)}.")
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        number = torch.arange(ids.shape[1], device=ids.device)
        last = (mask * (number + 1)).argmax(1)
        if not mask.any(1).all():
            raise ValueError("A prompt has no tokens: its attention_mask is 0 everywhere.")
        # padding on the left must not shift the positions of the tokens
        given = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
        given["logits_to_keep"], places = last.unique(return_inverse=True)
        base: Any = model
        while hasattr(base, "get_base_model"):  # below the adapters of peft
            base = base.get_base_model()
        accepted = inspect.signature(base.forward).parameters
        named = {name: value for name, value in given.items() if name in accepted}
        logits = model(input_ids=ids, attention_mask=mask, **named).logits
        at = places if "logits_to_keep" in named else last
        rows = torch.arange(len(ids), device=ids.device)
        tokens = torch.tensor(self.tokens, device=ids.device)
        return logits[rows, at][:, tokens].float()


def answers(tokenizer: Any, choices: Sequence[str]) -> Answers:
    """Return the outputs of an ``Adapter`` for answers that are a single token each."""
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
        raise ValueError(f"There must be at least two different answers, not tokens {tokens}.")
    return Answers(tuple(int(token) for token in tokens))


if __name__ == "__main__":
    import random

    import peft
    import transformers

    from torch_lla_em import LinearisedLaplace

    WORDS = ["[PAD]", "A", "B", "C", *"0123456789", "+", "=", "?"]

    def tokenizer(text, add_special_tokens=True):
        return {"input_ids": [WORDS.index(word) for word in text.split()]}

    def questions(count, seed):
        """Return sums of one or two digits, padded on the left: which is the first one?"""
        drawn, prompts, labels = random.Random(seed), [], []
        for _ in range(count):
            digits = [drawn.randrange(3) for _ in range(drawn.choice([1, 2]))]
            prompts.append(tokenizer(" + ".join(map(str, digits)) + " = ?")["input_ids"])
            labels.append(digits[0])
        ids = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in prompts])
        mask = (ids > 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}

    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=0)).eval()
    layers = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=layers))
    forward, train, test = answers(tokenizer, ["A", "B", "C"]), questions(60, 1), questions(60, 2)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.03)
    for _ in range(80):
        optimiser.zero_grad()
        nn.functional.cross_entropy(forward(model, train), train["labels"]).backward()
        optimiser.step()
    la = LinearisedLaplace(
        model,
        "classification",
        parameters="*lora*",
        adapter=Adapter(outputs=forward),
        num_samples=8,
    )
    la.fit([train], validation=[questions(60, 3)], progress_bar=False)
    prediction = la.predict(test)
    accuracy = (prediction.probs.argmax(1) == test["labels"]).float().mean()
    print(f"NLL {-prediction.log_prob(test['labels']).mean():.3f}, accuracy {accuracy:.3f}")
