"""transformers' models from tiny random configurations, with their default attention."""

import pytest
import torch
from daily import daily
from jacobians import check, linear_model

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK}
# LLaMA's RMSNorm computes in float32, whatever the weights are
SINGLE = {"rtol": 1e-5}
SMALL = {"vocab_size": 12, "pad_token_id": 1}
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTHS |= {"intermediate_size": 8, "num_labels": 2}
BERT = {**WIDTHS, "max_position_embeddings": 8}


def gpt2():
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "num_labels": 2}
    return transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=2, **SMALL)


def bert():
    return transformers.BertConfig(**BERT, **SMALL)


def llama(**options):
    sizes = {**BERT, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 2}
    return transformers.LlamaConfig(**sizes, **SMALL, **options)


def vit():
    return transformers.ViTConfig(**WIDTHS, image_size=8, patch_size=4)


def build(name, config):
    torch.manual_seed(0)
    return getattr(transformers, name)(config).double().train()


PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
DAILY = [
    ("GPT2ForSequenceClassification", gpt2, TEXT),
    ("BertForSequenceClassification", bert, transformers.BatchEncoding(TEXT)),
    ("LlamaForCausalLM", llama, TEXT),
    ("ViTForImageClassification", vit, PIXELS),
]
OTHERS = [("GPT2LMHeadModel", gpt2, TEXT), ("LlamaForSequenceClassification", llama, TEXT)]


@pytest.mark.parametrize("name, config, x", daily(*DAILY, rest=OTHERS))
def test_forward_mode_is_used_for(name, config, x):
    model = build(name, config())
    assert model.config._attn_implementation == "sdpa"
    options = SINGLE if config is llama else {}
    assert check(model, x, **options).path.forward
    assert check(model, x, "last_layer", **options).factors
    if config is llama:
        assert not any("norm" in name for name in linear_model(model).layout.names)


def test_bert_of_masked_words_has_tied_padding_rows():
    report = check(build("BertForMaskedLM", bert()), TEXT)
    assert not report.path.forward and "tied padding_idx" in report.forward


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_llama_with_gradient_checkpointing():
    model = build("LlamaForCausalLM", llama(use_cache=False))
    for reentrant in (False, True):  # transformers recomputes nothing in eval mode
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        report = check(model, TEXT, **SINGLE)
    # its hook calls requires_grad_ on the embeddings, which torch.func forbids
    assert not report.path.forward and "Embedding" in report.forward


peft_warns = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], **options)
    model = peft.get_peft_model(build("LlamaForSequenceClassification", llama()), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, where A moves no output
                parameter.normal_()
    return model.double()


@peft_warns
def test_only_the_adapters_of_lora_are_in_the_posterior():
    model = lora()
    names = linear_model(model).layout.names
    assert len(names) == 8 and all("lora_" in name for name in names)
    assert check(model, TEXT, **SINGLE).path.forward


@pytest.mark.slow
@peft_warns
def test_lora_with_a_trained_head():
    model = lora(task_type="SEQ_CLS")
    assert len(linear_model(model).layout.names) == 9
    assert check(model, TEXT, **SINGLE).path.forward
    assert check(model, TEXT, ["*score.modules_to_save*"], **SINGLE).factors
