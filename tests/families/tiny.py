"""A tiny random model of every supported family, made from its configuration: no files, no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_LLAMA: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BERT: dict[str, Any] = {**_LLAMA, "num_key_value_heads": None}
_GEMMA: dict[str, Any] = {**_LLAMA, "head_dim": 16}
_FALCON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_hidden_size": 64,
}  # fmt: skip
_GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}


def _causal(config: Any) -> Any:
    # the plain loop over experts is the one that also runs in float64; transformers 4 has no other
    options = {"experts_implementation": "eager"} if int(hf.__version__.split(".")[0]) >= 5 else {}
    return hf.AutoModelForCausalLM.from_config(config, **options)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _causal(hf.LlamaConfig(**_LLAMA)),
    "llama-mha-bias": lambda: _causal(hf.LlamaConfig(**{**_LLAMA, "num_key_value_heads": 4}, attention_bias=True)),
    "llama-mqa": lambda: _causal(hf.LlamaConfig(**{**_LLAMA, "num_key_value_heads": 1}, tie_word_embeddings=True)),
    "mistral": lambda: _causal(hf.MistralConfig(**_LLAMA, sliding_window=4)),
    "mixtral": lambda: _causal(hf.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": lambda: _causal(hf.Qwen2Config(**_LLAMA)),
    "qwen3": lambda: _causal(hf.Qwen3Config(**_LLAMA, head_dim=16)),
    "gemma": lambda: _causal(hf.GemmaConfig(**_GEMMA)),
    "gemma2": lambda: _causal(hf.Gemma2Config(**_GEMMA, sliding_window=4)),
    "gemma3": lambda: _causal(hf.Gemma3TextConfig(**_GEMMA, sliding_window=4)),
    "olmo2": lambda: _causal(hf.Olmo2Config(**_LLAMA)),
    "phi3": lambda: _causal(hf.Phi3Config(**_LLAMA)),
    "gpt2": lambda: _causal(hf.GPT2Config(**_GPT)),
    "gpt-neox": lambda: _causal(hf.GPTNeoXConfig(**_BERT)),
    "gpt-neox-sequential": lambda: _causal(hf.GPTNeoXConfig(**_BERT, use_parallel_residual=False)),
    "gpt-j": lambda: _causal(hf.GPTJConfig(**_GPT, rotary_dim=4)),
    "opt": lambda: _causal(hf.OPTConfig(**_LLAMA, ffn_dim=64, word_embed_proj_dim=32)),
    "opt-post-norm": lambda: _causal(
        hf.OPTConfig(**_LLAMA, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False)
    ),
    "falcon": lambda: _causal(hf.FalconConfig(**_FALCON)),
    "falcon-new": lambda: _causal(hf.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-alibi": lambda: _causal(
        hf.FalconConfig(**_FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True)
    ),
    "bloom": lambda: _causal(hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=3, n_head=4)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**{**_BERT, "pad_token_id": 1})),
    "distilbert": lambda: hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(vocab_size=96, dim=32, hidden_dim=64, n_layers=3, n_heads=4)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
    ),
}
DECODERS = [name for name in FAMILIES if name not in ("bert", "roberta", "distilbert", "vit")]


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """The tiny model, seeded, with every parameter random (no zero biases or unit norms to hide a mistake)."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model
