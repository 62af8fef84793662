"""Tiny models of transformers, and what their attention layers compute, eager. Needs torch and transformers; downloads nothing.

A model is made from a config.json, saved, filled with drawn numbers and loaded again, so its files and its config are as on a hub. Hooks
record the inputs of the query and key projections and the result of the output projection. Their modules are found by comparing weights
with the tensors of the file, so this works for any family.
"""

import json
import re
import tempfile
import warnings
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from model_variants import SIZES as MODEL_SIZES
from safetensors.numpy import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    MllamaTextModel,
    SiglipTextConfig,
    SiglipTextModel,
    TrOCRConfig,
    TrOCRForCausalLM,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
AutoModel.register(Step3p7TextConfig, Step3p7TextModel, exist_ok=True)  # transformers registers it only as a part of its composite
AutoModel.register(Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel, exist_ok=True)  # likewise
AutoModel.register(Qwen2_5OmniVisionEncoderConfig, Qwen2_5OmniVisionEncoder, exist_ok=True)  # likewise
AutoModel.register(Qwen3OmniMoeVisionEncoderConfig, Qwen3OmniMoeVisionEncoder, exist_ok=True)  # likewise
AutoModel.register(MllamaTextConfig, MllamaTextModel, exist_ok=True)  # likewise
AutoModel.register(TrOCRConfig, TrOCRForCausalLM, exist_ok=True)  # it has no model without a head
AutoModel.register(SiglipTextConfig, SiglipTextModel, exist_ok=True)  # likewise

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7]])
AXES = torch.tensor([[[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7]], [[0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7]], [[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]]])
SHORTER = torch.tensor([[2, 7, 18, 28, 18, 28, 4]])
XLNET = "XLNetRelativeAttention"
KEPT = re.compile(r"embed_positions|inv_freq|position_ids|running_")  # tables that some models compute
MASKED = ("SwinAttention", "DonutSwinAttention", "Swinv2Attention")  # which attend within windows of an image that was shifted
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "n_embed")
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 6),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 16),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp", "d_inner"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "type_vocab_size"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group", "first_k_dense_replace", "moe_topk"), 1),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "pad_token_id", "bos_token_id"), 1),
    "image_size": 8,
    "patch_size": 4,
    **dict.fromkeys(("conv_dim", "tdnn_dim"), [8] * 7),
    **dict.fromkeys(("num_conv_pos_embeddings", "num_conv_pos_embedding_groups"), 4),
    **dict.fromkeys(("projection_dim", "decoder_intermediate_size", "decoder_hidden_size"), 16),
    "vocab_size": 32,
    "num_key_value_heads": 2,
    "sliding_window": 5,
    "attention_chunk_size": 4,
    "embedding_size": 12,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "d_kv": 5,
    "num_buckets": 8,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 7,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 0,
}


def tiny_config(model_type, changes):
    """The config.json of a tiny model: transformers' default config with small sizes, also in its sections, and `changes`."""
    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in default}
    sizes |= {name: 20 if "head_dim" in default else 32 for name in WIDTHS if name in default}
    sizes |= {"head_dim": 8} if "head_dim" in default else {}
    for name, section in default.items():
        if isinstance(section, dict) and (inner := section.get("model_type")) in CONFIG_MAPPING:
            sizes[name] = tiny_config(inner, MODEL_SIZES.get(inner, {}))
    config = json.loads(kind(**(sizes | changes)).to_json_string())
    return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path", "architectures")}


def drawn(name, shape):
    """float32 numbers that depend on nothing but the tensor's name and shape."""
    return np.asarray(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * 0.35, np.float32)


def filled(name, tensor):
    """The tensor as an array, with drawn numbers in place of its own unless it is kept."""
    array = tensor.numpy()
    if array.dtype.kind == "f" and not KEPT.search(name):
        array[...] = drawn(name, array.shape)
    return array


class TinyModel:
    """A model in eager mode, and the tensors of its file.

    `in_memory`: the file is neither written nor read, which is faster. Its tensors are those of the model, which not all families save as
    they are.
    """

    def __init__(self, config, in_memory=False):
        torch.manual_seed(0)  # for what is kept
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "config.json").write_text(json.dumps(config))
            if in_memory:
                self.model = AutoModel.from_config(AutoConfig.from_pretrained(path), attn_implementation="eager").float().eval()
                self.tensors = {name: filled(name, x) for name, x in self.model.state_dict().items()}
                return
            AutoModel.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
            (path / "config.json").write_text(json.dumps(config))
            (file,) = path.glob("*.safetensors")
            tensors = {name: x if KEPT.search(name) or x.dtype.kind != "f" else drawn(name, x.shape) for name, x in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
            self.model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        self.tensors = tensors

    def module(self, array):
        """The module with these numbers, or the first rows of them, as its weight, transposed or not. Raises LookupError."""
        for module in self.model.modules():
            for parameter in module._parameters.values():
                own = np.zeros(0) if parameter is None else parameter.detach().numpy()
                if own.ndim > 1 and (np.array_equal(own, array[: len(own)]) or np.array_equal(own.T, array)):
                    return module
        raise LookupError(f"no module has a tensor of shape {array.shape}")

    def run(self, layers):
        """`layers`: any key -> modules of queries, keys, values and output. Gives for each: query, key, value [b, n, width], output.

        Raises ValueError if the model cannot be run with any of the usual inputs.
        """
        seen = {key: {} for key in layers}
        hooks, self.positions = [], []  # what goes into rotary embeddings, each [1, n, axes]
        for module in self.model.modules():
            if type(module).__name__ == XLNET:  # which adds its input to its output, and norms it
                module.post_attention, module.layer_norm = partial(module.post_attention, residual=False), torch.nn.Identity()
            if "Rotary" in type(module).__name__ or "Rope" in type(module).__name__:
                hooks.append(module.register_forward_pre_hook(self.keep_positions, with_kwargs=True))
        shares = getattr(self.model.config, "share_att_key", False)  # DeBERTa then projects its table of distances likewise
        for key, (*inputs, output) in layers.items():
            windows = (m for m in self.model.modules() if type(m).__name__ in MASKED and inputs[0] in m.modules())
            hooks += [module.register_forward_pre_hook(partial(keep_mask, seen[key]), with_kwargs=True) for module in windows]
            for name, module in zip(("query", "key", "value"), inputs, strict=True):
                hook = partial(keep_input, seen[key], name, shares)
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            hooks.append(output.register_forward_hook(partial(keep_output, seen[key])))
        try:
            forward(self.model)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def keep_positions(self, rotary, x, named):
        """Keeps position ids of several axes, [n, 2] or [3, 1, n]; DINOv3's are the centres of patches, 0 for the tokens before them."""
        ids = named.get("position_ids", x[1] if len(x) > 1 else None)
        if hasattr(rotary, "num_patches_h"):
            rows, columns = (2 * (np.arange(n) + 0.5) / n - 1 for n in (rotary.num_patches_h, rotary.num_patches_w))
            centres = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
            before = np.zeros((1 + self.model.config.num_register_tokens, 2))
            self.positions.append(np.concatenate([before, centres])[None])
        elif ids is not None and ids.shape[0] == 3 and ids.ndim == 3:
            self.positions.append(ids.movedim(0, -1).numpy().astype(np.float64))
        elif ids is not None and ids.shape[-1] == 2:
            self.positions.append(ids.reshape(1, -1, 2).numpy().astype(np.float64))


def keep_mask(here, _, x, named):
    """Keeps a mask of windows, [windows, n, n]: numbers that are added to the scores."""
    mask = named.get("attention_mask", x[1] if len(x) > 1 else None)
    if mask is not None:
        here["bias"] = mask.numpy().copy()


def forward(model):
    """Runs a model with the first of the usual inputs that it takes. Raises ValueError if it takes none."""
    failures = []
    for arguments in usual_inputs(model):
        try:
            with torch.no_grad():
                return model(**arguments)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as failure:
            failures.append(f"{', '.join(arguments)}: {failure!r:.300}")
    raise ValueError("; ".join(failures))


def usual_inputs(model):
    """Tokens, an image, both, sound as a wave or as features; with tokens for a decoder if there is one."""
    config = model.config
    extra = {"decoder_input_ids": SHORTER} if getattr(config, "is_encoder_decoder", False) else {}
    images = next((c for c in (config, getattr(config, "vision_config", None)) if hasattr(c, "image_size")), None)
    if getattr(config, "add_cross_attention", False) or config.model_type in ("trocr", "mllama_text_model"):
        width = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "hidden_size", None) or config.d_model
        name = "cross_attention_states" if config.model_type == "mllama_text_model" else "encoder_hidden_states"
        yield {"input_ids": IDS, name: input_numbers(1, 7, width)}
    if hasattr(config, "cross_attention_frequency"):
        yield {
            "query_embeds": input_numbers(1, 5, config.hidden_size),
            "encoder_hidden_states": input_numbers(1, 7, config.encoder_hidden_size),
        }
    if "mrope_section" in (getattr(config, "rope_parameters", None) or {}):
        yield {"input_ids": IDS, "position_ids": AXES}
    yield {"input_ids": IDS, **extra}
    if hasattr(config, "spatial_merge_size"):
        patches = getattr(config, "temporal_patch_size", 1) * config.patch_size**2 * getattr(config, "in_channels", 3)
        yield {"hidden_states": input_numbers(24, patches), "grid_thw": torch.tensor([[1, 4, 6]])}
    yield {"pixel_values": input_numbers(24, 3 * 16), "grid_thw": torch.tensor([[1, 4, 6]]), "merge_sizes": torch.tensor([1])}
    if images is not None:
        size, channels = images.image_size, getattr(images, "num_channels", 3)
        sides = (size, size) if isinstance(size, int) else tuple(size)
        pixels = {"pixel_values": input_numbers(1, channels, *sides)}
        yield pixels
        yield pixels | {"input_ids": IDS}
        yield {"pixel_values": input_numbers(1, getattr(images, "num_frames", 1), channels, *sides)}
    yield {"input_values": input_numbers(1, 4000), **extra}
    bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
    frames = 2 * getattr(config, "max_source_positions", 32)
    yield {"input_features": input_numbers(1, bins, frames), **extra}
    yield {"input_features": input_numbers(1, frames, bins), **extra}
    yield {"input_values": input_numbers(1, getattr(config, "max_length", frames), bins), **extra}


def input_numbers(*shape):
    """float32 numbers that depend on the shape alone."""
    return torch.from_numpy(drawn(str(shape), shape) * 3)


def keep_input(here, name, once, module, values, named):
    """A hook that keeps what goes into a module; if `once`, only the first time."""
    if not (once and name in here):
        keep(here, name, module, values[0] if values else next(iter(named.values())))


def keep_output(here, module, _, result):
    """A hook that keeps what comes out of a module."""
    keep(here, "output", module, result)


def keep(here, name, module, value):
    """Keeps a tensor, or the first of several, as [b, n, width]; n may be two axes, of a grid."""
    while isinstance(value, tuple | list):
        value = value[0]
    value = value.transpose(1, 2) if isinstance(module, torch.nn.Conv1d) else value  # [b, width, n]
    value = value.transpose(0, 1) if value.ndim == 3 and value.shape[1] == 1 else value  # [n, b, width]: FSMT
    here[name] = value.detach().numpy().reshape(len(value) if value.ndim > 2 else 1, -1, value.shape[-1]).copy()
