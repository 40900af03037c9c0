"""Seventeen Hugging Face architectures, small enough to train a step in a moment on one core.

Each is built from its `transformers` config with random weights (nothing is downloaded), two layers deep and 32 to 64 wide, with every
dropout, drop-path and router-jitter rate of the config above zero, in training mode. The batches carry labels, so that the first
output of each model is its loss, and the padding mask that a user of the model would pass.

    for name, architecture in ARCHITECTURES.items():
        loss = architecture.build(seed=0)(**architecture.batch(seed=0)).loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY = 97
BATCH = 2
LENGTH = 16
IMAGE = 32
CLASSES = 5


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """Random token ids, clear of the ids 0 to 3 that configs use for padding and the like. Shape (BATCH, length)."""
    return torch.randint(4, VOCABULARY, (BATCH, length), generator=generator)


def _padding_mask(length: int = LENGTH) -> Tensor:
    """One for a token, zero for padding: the last row is a third shorter. Shape (BATCH, length)."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, length - length // 3 :] = 0
    return mask


def causal_text(seed: int) -> Batch:
    """Token ids, padding mask and labels for a language model; padding carries no label."""
    ids, mask = _tokens(_generator(seed)), _padding_mask()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded_text(seed: int) -> Batch:
    """Token ids and labels of full-length rows."""
    ids = _tokens(_generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_text(seed: int) -> Batch:
    """Token ids with some hidden (id 3), padding mask, and labels at the hidden places only."""
    generator = _generator(seed)
    ids, mask = _tokens(generator), _padding_mask()
    hidden = (torch.rand(ids.shape, generator=generator) < 0.3) & (mask == 1)
    return {"input_ids": ids.masked_fill(hidden, 3), "attention_mask": mask, "labels": ids.masked_fill(~hidden, -100)}


def labelled_text(seed: int) -> Batch:
    """Token ids, padding mask and the class of each row."""
    generator = _generator(seed)
    ids = _tokens(generator)
    return {"input_ids": ids, "attention_mask": _padding_mask(), "labels": torch.randint(0, CLASSES, (BATCH,), generator=generator)}


def pair_text(seed: int) -> Batch:
    """A source text with its padding mask and a shorter target text, for encoder-decoder models."""
    generator = _generator(seed)
    return {"input_ids": _tokens(generator), "attention_mask": _padding_mask(), "labels": _tokens(generator, LENGTH - 4)}


def labelled_images(seed: int) -> Batch:
    """Images of shape (BATCH, 3, IMAGE, IMAGE) and their classes."""
    generator = _generator(seed)
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, CLASSES, (BATCH,), generator=generator),
    }


@dataclass(frozen=True)
class Architecture:
    """A small model with random weights and batches for it.

    model, config   class names in `transformers`
    options         what the config gets
    make_batch      seed -> the model's keyword arguments, labels included
    """

    model: str
    config: str
    options: Mapping[str, Any]
    make_batch: Callable[[int], Batch]

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode; its weights depend on `seed` alone and the global random state is left as it was."""
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = getattr(transformers, self.config)(**self.options)
            return getattr(transformers, self.model)(config).train()

    def batch(self, seed: int = 0) -> Batch:
        """Keyword arguments of one training step, the same for the same seed."""
        return self.make_batch(seed)


_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GROUPED_QUERY = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.1, "max_position_embeddings": 64}
_BERT_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_IMAGES = {"num_channels": 3, "num_labels": CLASSES}

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        causal_text,
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", {**_TEXT, **_BERT_DROPOUT, "max_position_embeddings": 64}, masked_text),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _GROUPED_QUERY, causal_text),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _GROUPED_QUERY, causal_text),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **_GROUPED_QUERY,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "output_router_logits": True,
            # The default, grouped_mm, runs in float32 on CPU but its shape function takes bfloat16 alone (PyTorch 2.13).
            "experts_implementation": "batched_mm",
        },
        causal_text,
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        pair_text,
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{k: v for k, v in _TEXT.items() if k != "vocab_size"},
            **_BERT_DROPOUT,
            **_IMAGES,
            "image_size": IMAGE,
            "patch_size": 8,
        },
        labelled_images,
    ),
    "resnet": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        {**_IMAGES, "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]},
        labelled_images,
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            **_IMAGES,
            "hidden_sizes": [32, 64],
            "depths": [2, 2],
            "num_stages": 2,
            "drop_path_rate": 0.2,
            "layer_scale_init_value": 0.1,
            "image_size": IMAGE,
        },
        labelled_images,
    ),
    "swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            **_IMAGES,
            **_BERT_DROPOUT,
            "image_size": IMAGE,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.2,
        },
        labelled_images,
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4},
        unpadded_text,
    ),
    "distilbert": Architecture(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
        labelled_text,
    ),
    "deberta-v2": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **_TEXT,
            **_BERT_DROPOUT,
            "max_position_embeddings": 64,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        masked_text,
    ),
    "gpt-neox": Architecture(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_TEXT, "max_position_embeddings": 64, "hidden_dropout": 0.1, "attention_dropout": 0.1, "bos_token_id": 1},
        causal_text,
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        causal_text,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GROUPED_QUERY, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        causal_text,
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "classifier_dropout": 0.1,
        },
        pair_text,
    ),
}
"""Name -> architecture."""
