"""Small random models of Hugging Face transformers, saved as checkpoints, and what their own attention modules compute, eager.

Run in an environment of its own: torch==2.13.0 transformers==5.23.0 safetensors. Nothing is downloaded: models are made from configs.
Queries, keys, output and weights are what went by inside the model; widths are unequal wherever a model allows it.
"""

import sys

import torch
import transformers as hf
from casefile import draw
from recording import AttentionModules, in_memory, write_cases

TEXT = {"vocab_size": 11, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
OTHER_IDS = torch.tensor([[7, 2, 8, 1, 3], [1, 6, 1, 8, 2]])
OTHER_RIGHT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
ENCODED = torch.from_numpy(draw(1, 2, 5, 15))
PADDED = {"padded on the right": {"input_ids": IDS, "attention_mask": RIGHT}}
DECODED = PADDED | {"padded on the left": {"input_ids": IDS, "attention_mask": LEFT}}
CAUSAL = {"causal": True}
FFN = 13


def bert():
    parts, sizes = ("self.query", "self.key", "output.dense"), {"intermediate_size": FFN, "max_position_embeddings": 17}
    config = hf.BertConfig(**TEXT, **sizes, hidden_size=15, num_hidden_layers=2, num_attention_heads=3)
    layers = [AttentionModules(f"encoder.layer.{i}.attention", *parts, f"encoder.layer.{i}.attention", {"num_heads": 3}) for i in (0, 1)]
    write_cases("bert", "BERT", hf.BertModel(config), layers, PADDED)

    config = hf.RobertaConfig(**TEXT, **sizes, hidden_size=10, num_hidden_layers=1, num_attention_heads=2)
    layer = AttentionModules("roberta.encoder.layer.0.attention", *parts, "roberta.encoder.layer.0", {"num_heads": 2})
    write_cases("roberta", "RoBERTa with a head on it, so with a prefix", hf.RobertaForMaskedLM(config), [layer], PADDED)

    config = hf.BertConfig(
        **TEXT, **sizes, hidden_size=15, num_hidden_layers=1, num_attention_heads=3, is_decoder=True, add_cross_attention=True
    )
    arguments = {"input_ids": IDS, "encoder_hidden_states": ENCODED, "encoder_attention_mask": OTHER_RIGHT}
    names = [f"encoder.layer.0.{name}" for name in ("attention", "crossattention")]
    layers = [
        AttentionModules(names[0], *parts, names[0], {"num_heads": 3}, CAUSAL),
        AttentionModules(names[1], *parts, names[1], {"num_heads": 3}, mask="encoder_attention_mask"),
    ]
    write_cases(
        "bert_decoder", "BERT as a decoder that attends to an encoder", hf.BertModel(config), layers, {"with an encoder": arguments}
    )


def other_encoders():
    config = hf.DistilBertConfig(vocab_size=11, pad_token_id=0, dim=14, n_layers=1, n_heads=2, hidden_dim=FFN, max_position_embeddings=17)
    layer = AttentionModules("transformer.layer.0.attention", "q_lin", "k_lin", "out_lin", "transformer.layer.0", {"num_heads": 2})
    write_cases("distilbert", "DistilBERT", hf.DistilBertModel(config), [layer], PADDED)

    sizes = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": FFN}
    sizes |= {"image_size": 4, "patch_size": 2, "num_channels": 1}
    pixels, proj = {"an image": {"pixel_values": torch.from_numpy(draw(2, 2, 1, 4, 4))}}, ("q_proj", "k_proj", "o_proj")
    layer = AttentionModules("layers.1.attention", *proj, "encoder.layer.1", {"num_heads": 3})
    write_cases("vit", "ViT as files have it", hf.ViTModel(hf.ViTConfig(**sizes)), [layer], pixels)
    layer = AttentionModules("layers.1.attention", *proj, "layers.1", {"num_heads": 3})
    write_cases(
        "vit_in_memory",
        "ViT without qkv bias, as it is in memory",
        hf.ViTModel(hf.ViTConfig(**sizes, qkv_bias=False)),
        [layer],
        pixels,
        in_memory,
    )

    config = hf.BartConfig(
        **TEXT,
        d_model=15,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=3,
        decoder_attention_heads=5,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_position_embeddings=17,
        decoder_start_token_id=2,
    )
    parts = ("q_proj", "k_proj", "out_proj")
    layers = [
        AttentionModules("encoder.layers.0.self_attn", *parts, "encoder.layers.0", {"num_heads": 3}),
        AttentionModules("decoder.layers.0.encoder_attn", *parts, "decoder.layers.0.encoder_attn", {"num_heads": 5}),
    ]
    arguments = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": OTHER_IDS}
    write_cases("bart", "BART", hf.BartModel(config), layers, {"padded on the right": arguments})


def gpt2():
    config = hf.GPT2Config(**TEXT, n_embd=15, n_layer=2, n_head=3, n_positions=17, n_inner=FFN, scale_attn_by_inverse_layer_idx=True)
    parts = ("c_attn", "c_attn", "c_proj")
    spec = {"num_heads": 3, "scale": 5**-0.5 / 2}
    layer = AttentionModules("h.1.attn", *parts, "h.1.attn", spec, CAUSAL)
    write_cases(
        "gpt2", "GPT-2, scores of its second layer divided by 2 (scale_attn_by_inverse_layer_idx)", hf.GPT2Model(config), [layer], DECODED
    )

    config = hf.GPT2Config(**TEXT, n_embd=15, n_layer=1, n_head=3, n_positions=17, n_inner=FFN, add_cross_attention=True)
    layers = [
        AttentionModules("h.0.attn", *parts, "h.0.attn", {"num_heads": 3}, CAUSAL),
        AttentionModules(
            "h.0.crossattention", "q_attn", "c_attn", "c_proj", "h.0.crossattention", {"num_heads": 3}, mask="encoder_attention_mask"
        ),
    ]
    arguments = {"input_ids": IDS, "encoder_hidden_states": ENCODED, "encoder_attention_mask": OTHER_RIGHT}
    write_cases("gpt2_cross", "GPT-2 that attends to an encoder", hf.GPT2Model(config), layers, {"with an encoder": arguments})


def rotary(name, about, model, config, spec, layers=1, more=None, **fields):
    """A decoder with Llama's names: 4 heads of 6 over width 20, 2 of them for keys and values, unless `fields` say otherwise."""
    sizes = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": FFN}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 32} | fields
    sizes = {key: value for key, value in sizes.items() if value is not None}
    path = f"layers.{layers - 1}.self_attn"
    spec = {"num_heads": sizes["num_attention_heads"]} | spec
    layers = [AttentionModules(path, "q_proj", "k_proj", "o_proj", path, spec, **{"request": CAUSAL, **(more or {})})]
    write_cases(name, about, model(config(**TEXT, **sizes)), layers, DECODED)


def llamas():
    theta = {"theta": 10000.0, "interleaved": False}
    rotary("llama", "Llama with grouped keys and values", hf.LlamaModel, hf.LlamaConfig, {"rope": theta})
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    ours = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 32}
    spec = {"rope": {"theta": 500000.0, "interleaved": False, "scaling": ours}}
    parameters = {"rope_parameters": {"rope_theta": 500000.0, **scaling}, "attention_bias": True, "head_dim": 10}
    rotary("llama3", "Llama 3's frequencies, and all biases", hf.LlamaModel, hf.LlamaConfig, spec, **parameters)
    window = {"rope": theta, "window": {"left": 2, "right": None}}
    rotary("mistral", "Mistral, each query sees three keys", hf.MistralModel, hf.MistralConfig, window, sliding_window=3)
    qwen2 = {"hidden_size": 16, "head_dim": None}
    rotary("qwen2", "Qwen2: biases of q, k and v, none of o", hf.Qwen2Model, hf.Qwen2Config, {"rope": theta}, **qwen2)
    rotary("qwen3", "Qwen3: norms before RoPE; the head count comes from them", hf.Qwen3Model, hf.Qwen3Config, {"rope": theta})


def more_llamas():
    theta = {"theta": 10000.0, "interleaved": False}
    spec = {"rope": theta, "scale": 24**-0.5, "softcap": 5.0}
    fields = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "layer_types": ["full_attention"]}
    rotary("gemma2", "Gemma 2: softcap, and a scale of its own", hf.Gemma2Model, hf.Gemma2Config, spec, **fields)
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {"query_pre_attn_scalar": 24, "layer_types": ["full_attention"], "rope_parameters": parameters}
    spec = {"rope": theta, "scale": 24**-0.5}
    rotary("gemma3", "Gemma 3: norm weights less 1", hf.Gemma3TextModel, hf.Gemma3TextConfig, spec, more={"layout": "gemma3"}, **fields)
    fields = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size": 8,
        "layer_types": ["sliding_attention"],
        "sliding_window": 3,
    }
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    spec = {"rope": theta, "window": {"left": 2, "right": None}}
    more = {"request": CAUSAL | {"fully_masked": "zero"}}  # the sink takes a row's whole weight where every key is blocked
    rotary(
        "gpt_oss",
        "gpt-oss: sinks, all biases, a window; without the yarn of its released config",
        hf.GptOssModel,
        hf.GptOssConfig,
        spec,
        more=more,
        **fields,
    )


def t5():
    config = hf.T5Config(
        **TEXT,
        d_model=14,
        d_kv=5,
        d_ff=FFN,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=7,
        decoder_start_token_id=0,
    )
    spec = {"relative_bias": {"max_distance": 7}}
    layers = [
        AttentionModules("encoder.block.1.layer.0.SelfAttention", "q", "k", "o", "encoder.block.1", spec),
        AttentionModules("decoder.block.1.layer.0.SelfAttention", "q", "k", "o", "decoder.block.1.layer.0", spec, CAUSAL, mask="none"),
        AttentionModules("decoder.block.1.layer.1.EncDecAttention", "q", "k", "o", "decoder.block.1.layer.1", {}),
    ]
    arguments = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": OTHER_IDS}
    write_cases(
        "t5", "T5, its second blocks, whose tables stand in the first", hf.T5Model(config), layers, {"padded on the right": arguments}
    )


def packed_per_head():
    config = hf.BloomConfig(**TEXT, hidden_size=15, n_layer=1, n_head=3)
    layer = AttentionModules(
        "h.0.self_attention", "query_key_value", "query_key_value", "dense", "h.0", {"num_heads": 3}, CAUSAL, layout="bloom"
    )
    write_cases("bloom", "BLOOM, 3 heads", hf.BloomModel(config), [layer], PADDED)

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": FFN, "max_position_embeddings": 32}
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = hf.GPTNeoXConfig(**TEXT, **sizes, rope_parameters=parameters)
    spec = {"num_heads": 3, "rope": {"theta": 10000.0, "dims": 4}}
    layer = AttentionModules(
        "layers.0.attention", "query_key_value", "query_key_value", "dense", "layers.0.attention", spec, CAUSAL, layout="neox"
    )
    write_cases("neox", "GPT-NeoX, half of each head rotated", hf.GPTNeoXModel(config), [layer], DECODED)

    sizes |= {"hidden_size": 12, "num_key_value_heads": 1}
    config = hf.Phi3Config(**TEXT, **sizes)
    spec = {"num_heads": 3, "num_kv_heads": 1, "rope": {"theta": 10000.0}}
    layer = AttentionModules("layers.0.self_attn", "qkv_proj", "qkv_proj", "o_proj", "layers.0.self_attn", spec, CAUSAL, layout="fused")
    write_cases("phi3", "Phi-3: rows [q; k; v] with one head of k and v", hf.Phi3Model(config), [layer], DECODED)


def main():
    torch.set_num_threads(1)
    every = (bert, other_encoders, gpt2, llamas, more_llamas, t5, packed_per_head)
    for family in every:
        if not (named := [arg for arg in sys.argv[1:] if not arg.startswith("-")]) or family.__name__ in named:
            family()


if __name__ == "__main__":
    main()
