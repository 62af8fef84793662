"""Every layout there is: the rows of its forms, and one line for those who have to choose."""

from service.checkpoints import fused_projections, per_head, separate_projections, t5, tutorials
from service.checkpoints.layout import Layout

FORMS: tuple[Layout, ...] = (*tutorials.FORMS, *fused_projections.FORMS, *separate_projections.FORMS, *t5.FORMS, *per_head.FORMS)

LAYOUTS: dict[str, str] = {
    "attend": "this service's own names",
    "torch_mha": "torch.nn.MultiheadAttention, in encoder and decoder layers too",
    "bert": "BERT, RoBERTa and similar encoders",
    "distilbert": "DistilBERT",
    "vit": "ViT and similar models, with separate matrices or timm's qkv",
    "bart": "BART, OPT, Whisper, CLIP: four matrices, no RoPE",
    "gpt2": "GPT-2: Conv1D matrices",
    "llama": "Llama, Mistral, Qwen2, Qwen3, Gemma 2: norm weights as they are, one for each head; the spec says rope",
    "gemma3": "Gemma 3: as llama, norm weights less 1",
    "meta_llama": "Llama as Meta ships it: wq, wk, wv, wo, RoPE on pairs",
    "t5": "T5: relative bias, scale 1",
    "bloom": "BLOOM: one matrix, rows [heads, 3, head_dim], ALiBi",
    "neox": "GPT-NeoX: one matrix, rows [heads, 3, head_dim], RoPE on halves",
    "fused": "one matrix, rows [q; k; v]",
    "keras": "Keras MultiHeadAttention and GroupQueryAttention",
    "flax": "Flax MultiHeadDotProductAttention",
    "d2l": "Dive into Deep Learning, in any framework",
    "mxnet": "GluonNLP's Transformer cells",
    "numpy": "matrices W_q, W_k, W_v, W_o applied as x @ W",
    "transformerlens": "TransformerLens' HookedTransformer",
}
