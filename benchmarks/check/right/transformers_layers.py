"""Attention layers of transformers, each as its configuration makes it: eager and sdpa."""

import torch
from torch import nn
from transformers import (
    BartConfig,
    BertConfig,
    CLIPTextConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    ViTConfig,
    WhisperConfig,
)
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 8, "num_hidden_layers": 1}


def _with(config, implementation):
    config._attn_implementation = implementation
    return config


bert_eager = BertSelfAttention(_with(BertConfig(**SIZES), "eager")).eval()
bert_sdpa = BertSelfAttention(_with(BertConfig(**SIZES), "sdpa")).eval()
clip_eager = CLIPAttention(_with(CLIPTextConfig(**SIZES), "eager")).eval()
clip_sdpa = CLIPAttention(_with(CLIPTextConfig(**SIZES), "sdpa")).eval()
vit_sdpa = ViTAttention(_with(ViTConfig(**SIZES), "sdpa")).eval()
bart_eager = BartAttention(24, 3, config=_with(BartConfig(d_model=24), "eager")).eval()
whisper_sdpa = WhisperAttention(24, 3, config=_with(WhisperConfig(d_model=24), "sdpa")).eval()
gpt2_sdpa = GPT2Attention(_with(GPT2Config(n_embd=24, n_head=3, n_positions=600), "sdpa"), layer_idx=0).eval()


class Decoder(nn.Module):
    """A layer with its rotary tables and the causal mask that the model makes for it."""

    def __init__(self, layer, rotary, config):
        super().__init__()
        self.attention, self.rotary, self.config = layer, rotary, config

    def forward(self, hidden_states):
        n = hidden_states.shape[1]
        positions = torch.arange(n)
        visible = positions[None, :] <= positions[:, None]
        if getattr(self.config, "sliding_window", None):
            visible &= positions[:, None] - positions[None, :] < self.config.sliding_window
        mask = torch.zeros(n, n).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        tables = self.rotary(hidden_states, positions[None])
        return self.attention(hidden_states, position_embeddings=tables, attention_mask=mask)[0]


def _decoder(config, layer, rotary, implementation):
    config = _with(config, implementation)
    return Decoder(layer(config, layer_idx=0).eval(), rotary(config), config).eval()


GROUPED = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
llama_eager = _decoder(LlamaConfig(**GROUPED), LlamaAttention, LlamaRotaryEmbedding, "eager")
llama_sdpa = _decoder(LlamaConfig(**GROUPED), LlamaAttention, LlamaRotaryEmbedding, "sdpa")
qwen3_sdpa = _decoder(Qwen3Config(**GROUPED), Qwen3Attention, Qwen3RotaryEmbedding, "sdpa")
mistral_sdpa = _decoder(MistralConfig(**GROUPED, sliding_window=7), MistralAttention, MistralRotaryEmbedding, "sdpa")
gemma2_eager = _decoder(
    Gemma2Config(**GROUPED, sliding_window=7, query_pre_attn_scalar=5, attn_logit_softcapping=2.0),
    Gemma2Attention,
    Gemma2RotaryEmbedding,
    "eager",
)
