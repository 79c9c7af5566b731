"""Language models as classifiers: the logits of the answers, whatever the padding."""

import random

import pytest
import torch
from torch.nn import functional

from torch_lla_em import LinearisedLaplace
from torch_lla_em.compat import answers

WORDS = ["[PAD]", "A", "B", "C", *"0123456789", "+", "=", "?"]


def tokenizer(text, add_special_tokens=True):
    return {"input_ids": [WORDS.index(word) for word in text.split()]}


def batch_of(prompts, labels, left=False):
    length = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        part = slice(length - len(prompt), length) if left else slice(0, len(prompt))
        ids[row, part], mask[row, part] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}


def questions(count, seed):
    """Sums of two or three digits: is the sum's remainder by three 0, 1 or 2?"""
    drawn, prompts, labels = random.Random(seed), [], []
    for _ in range(count):
        digits = [drawn.randrange(3) for _ in range(drawn.choice([1, 2]))]
        prompts.append(tokenizer(" + ".join(map(str, digits)) + " = ?")["input_ids"])
        labels.append(digits[0] % 3)
    return prompts, labels


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_the_logits_do_not_depend_on_the_padding(llama):
    prompts, labels = questions(6, 0)
    forward = answers(tokenizer, ["A", "B", "C"])
    with torch.no_grad():
        alone = torch.cat([llama(torch.tensor([p])).logits[:, -1, 1:4] for p in prompts])
        for left in (False, True):
            found = forward(llama, batch_of(prompts, labels, left))
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
        half = forward(llama.bfloat16(), batch_of(prompts, labels))
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, alone, rtol=0.05, atol=0.02)
        llama.float()


@pytest.mark.filterwarnings("ignore")
def test_a_posterior_over_lora_adapters_predicts_answers(llama):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model, forward = peft.get_peft_model(llama, config), answers(tokenizer, ["A", "B", "C"])
    train = batch_of(*questions(60, 1), left=True)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.03)
    for _ in range(80):
        optimiser.zero_grad()
        functional.cross_entropy(forward(model, train), train["labels"]).backward()
        optimiser.step()
    la = LinearisedLaplace(
        model, "classification", parameters="*lora*", forward_fn=forward, num_samples=8
    ).fit([train], progress_bar=False)
    test = batch_of(*questions(60, 2))
    prediction = la.predict(test)
    assert prediction.probs.shape == (60, 3)
    assert (prediction.probs.argmax(1) == test["labels"]).float().mean() > 0.6
    assert prediction.log_prob(test["labels"]).mean() > -1.0  # guessing: -1.1


def test_answers_that_are_not_single_tokens_are_refused():
    with pytest.raises(ValueError, match="has 2 tokens"):
        answers(tokenizer, ["A", "1 0"])
    with pytest.raises(ValueError, match="two different answers"):
        answers(tokenizer, ["A", "A"])
    forward = answers(tokenizer, ["A", "B"])
    with pytest.raises(ValueError, match="no 'input_ids'"):
        forward(torch.nn.Identity(), {"tokens": 1})
    empty = {"input_ids": torch.zeros(1, 2).long(), "attention_mask": torch.zeros(1, 2).long()}
    with pytest.raises(ValueError, match="has no tokens"):
        forward(torch.nn.Identity(), empty)
