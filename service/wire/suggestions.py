"""Suggestions for unknown names: the field that an argument of another library corresponds to, or the most similar known name."""

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from os.path import commonprefix

COMPARED = 64  # most known names that an unknown one is compared with, which takes milliseconds

# The field of a request to use -> arguments in torch, Keras, Flax, transformers, flash-attention or a textbook that have its meaning.
ADVICE = {
    "query, which is also the key and the value if those are left out": "q Q queries hidden_states inputs_q",
    "key, which is also the value if that is left out": "k K keys inputs_k inputs_kv",
    "value": "v V values inputs_v",
    "attend_mask, block_mask, attend_keys, block_keys, valid_lens or bias, since libraries disagree on what 1 means in a mask": "mask",
    "attend_keys (1 = a real key) or attend_mask (1 = may attend), as in transformers and Keras; bias for numbers that are added to the "
    "scores": "attention_mask",
    "block_mask for the booleans of torch's MultiheadAttention (True = blocked), attend_mask for those of scaled_dot_product_attention "
    "(True = may attend), bias for numbers that are added to the scores": "attn_mask memory_mask src_mask tgt_mask",
    "block_keys (1 = blocked, as True is in torch's key_padding_mask), or attend_keys, which means the opposite": (
        "key_padding_mask memory_key_padding_mask src_key_padding_mask tgt_key_padding_mask"
    ),
    "attend_keys (1 = a real key, as True is in Keras)": "key_mask value_mask",
    "valid_lens (only the first n keys are real)": "lengths valid_len valid_length",
    "bias (added to the scores)": "attn_bias position_bias",
    "causal (key j is visible to query i if j <= i + query_offset)": "causal_mask is_causal use_causal_mask",
    'window {"left", "right"}, numbers of keys on each side of the position of a query, null for no bound': "sliding_window window_size",
    "scale (a factor on query·key)": "softmax_scale",
    'dropout {"p", "seed"}, without which nothing is dropped': "deterministic dropout_p dropout_rate training",
    "head_scale (a factor on each head's output)": "head_mask",
    'outputs with attention_weights, which are among them by default; ["output"] for none': (
        "need_weights output_attentions return_attention_scores"
    ),
    'select {"average": true} for the mean over the heads; without it the weights are of each head': "average_attn_weights",
    "segments (a query attends only to keys of its own segment), or query_segments and key_segments": (
        "decoder_segment_ids document_ids segment_ids"
    ),
    "query_lengths and key_lengths (the rows of each sequence, not their sums)": "cu_seqlens cu_seqlens_k cu_seqlens_q",
}
OTHER_NAMES = {name: advice for advice, names in ADVICE.items() for name in names.split()}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question after the most similar known name: " (did you mean NAME?)"; "" if none is similar, or if `name` is no string."""
    if not isinstance(name, str):
        return ""
    text = name[:64]
    compared = nlargest(COMPARED, known, key=lambda other: len(commonprefix((text, other))))  # noqa: RUF071  # characters are meant
    near = get_close_matches(text, compared, 1)
    return f" (did you mean {near[0]}?)" if near else ""
