"""What a caller may have meant by a name that the service does not know."""

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from os.path import commonprefix

COMPARED = 64  # most known names that an unknown one is compared with, which takes milliseconds

_CAUSAL = "causal (key j is visible to query i if j <= i + query_offset)"
_CUMULATIVE = "query_lengths and key_lengths (the rows of each sequence, not their sums)"
_DROPOUT = 'dropout {"p", "seed"}, without which nothing is dropped'
_KEY = "key, which is also the value if that is left out"
_LENGTHS = "valid_lens (only the first n keys are real)"
_PADDING = "block_keys (1 = blocked, as True is in torch's key_padding_mask), or attend_keys, which means the opposite"
_PAIRS = (
    "block_mask for the booleans of torch's MultiheadAttention (True = blocked), attend_mask for those of "
    "scaled_dot_product_attention (True = may attend), bias for numbers that are added to the scores"
)
_QUERY = "query, which is also the key and the value if those are left out"
_SEGMENTS = "segments (a query attends only to keys of its own segment), or query_segments and key_segments"
_WEIGHTS = 'outputs with attention_weights, which are among them by default; ["output"] for none'
_WINDOW = 'window {"left", "right"}, the number of keys on each side of the position of the query, null for no bound'

# A name of an argument in torch, Keras, Flax, transformers, flash-attention or a textbook -> the field of a request that has its meaning.
OTHER_NAMES = {
    "K": _KEY,
    "Q": _QUERY,
    "V": "value",
    "attention_mask": "attend_keys (1 = a real key) or attend_mask (1 = may attend), as in transformers and Keras; bias for numbers that "
    "are added to the scores",
    "attn_bias": "bias (added to the scores)",
    "attn_mask": _PAIRS,
    "average_attn_weights": 'select {"average": true} for the mean over the heads; without it the weights are of each head',
    "causal_mask": _CAUSAL,
    "cu_seqlens": _CUMULATIVE,
    "cu_seqlens_k": _CUMULATIVE,
    "cu_seqlens_q": _CUMULATIVE,
    "decoder_segment_ids": _SEGMENTS,
    "deterministic": _DROPOUT,
    "document_ids": _SEGMENTS,
    "dropout_p": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "head_mask": "head_scale (a factor on each head's output)",
    "hidden_states": _QUERY,
    "inputs_k": _KEY,
    "inputs_kv": _KEY,
    "inputs_q": _QUERY,
    "inputs_v": "value",
    "is_causal": _CAUSAL,
    "k": _KEY,
    "key_mask": "attend_keys (1 = a real key, as True is in Keras)",
    "key_padding_mask": _PADDING,
    "keys": _KEY,
    "lengths": _LENGTHS,
    "mask": "attend_mask, block_mask, attend_keys, block_keys, valid_lens or bias, since libraries disagree on what 1 means in a mask",
    "memory_key_padding_mask": _PADDING,
    "memory_mask": _PAIRS,
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "position_bias": "bias (added to the scores)",
    "q": _QUERY,
    "queries": _QUERY,
    "return_attention_scores": _WEIGHTS,
    "segment_ids": _SEGMENTS,
    "sliding_window": _WINDOW,
    "softmax_scale": "scale (a factor on query·key)",
    "src_key_padding_mask": _PADDING,
    "src_mask": _PAIRS,
    "tgt_key_padding_mask": _PADDING,
    "tgt_mask": _PAIRS,
    "training": _DROPOUT,
    "use_causal_mask": _CAUSAL,
    "v": "value",
    "valid_len": _LENGTHS,
    "valid_length": _LENGTHS,
    "value_mask": "attend_keys (1 = a real key, as True is in Keras)",
    "values": "value",
    "window_size": _WINDOW,
}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The words " (did you mean NAME?)" with the known name that is most like this one; "" if none is, or if this is no text."""
    if not isinstance(name, str):
        return ""
    text = name[:64]
    compared = nlargest(COMPARED, known, key=lambda other: len(commonprefix((text, other))))  # noqa: RUF071  # characters are meant
    near = get_close_matches(text, compared, 1)
    return f" (did you mean {near[0]}?)" if near else ""
