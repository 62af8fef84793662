"""timm's Vision Transformer: one matrix for queries, keys and values, rows [3, heads, dim]; and CaiT, which mixes heads. Needs timm.

The weights are caught at the dropout that they go through; timm returns none.
"""

import torch
from casefile import case, draw, draw_all, save

try:
    import torchvision  # noqa: F401
except RuntimeError:  # PyPI's is made for CUDA, and beside a torch without it misses operators that it registers more for
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
from timm.models.cait import TalkingHeadAttn
from timm.models.vision_transformer import VisionTransformer


def main():
    torch.set_num_threads(1)
    versions = {"timm": timm.__version__, "torch": torch.__version__.partition("+")[0]}
    save_vit(versions)
    save_cait(versions)


def save_vit(versions):
    model = VisionTransformer(img_size=4, patch_size=2, in_chans=1, num_classes=0, embed_dim=15, depth=2, num_heads=3, mlp_ratio=1).eval()
    fill(model, 15)
    attention = model.blocks[1].attn
    attention.fused_attn = False
    seen = watch(attention)
    with torch.no_grad():
        model(torch.from_numpy(draw(16, 2, 1, 4, 4)))
    load = {"prefix": "blocks.1", "spec": {"num_heads": 3}}
    cases = [case("the second block, an image", load, {"query": seen["query"]}, seen["output"], seen["weights"])]
    save("timm_vit", "timm's VisionTransformer", versions, {name: x.numpy() for name, x in model.state_dict().items()}, cases)


def save_cait(versions):
    block = torch.nn.ModuleDict({"attn": TalkingHeadAttn(15, 5, qkv_bias=True)})
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])}).eval()
    fill(model, 17, scale=0.3)
    attention = block["attn"]
    seen = watch(attention)
    with torch.no_grad():
        attention(torch.from_numpy(draw(18, 2, 7, 15)))
    cases = [case("a block of CaiT", {"prefix": "blocks.0"}, {"query": seen["query"]}, seen["output"], seen["weights"])]
    save("timm_cait", "timm's TalkingHeadAttn", versions, {name: x.numpy() for name, x in model.state_dict().items()}, cases)


def fill(model, seed, scale=0.5):
    """Sets all parameters to drawn numbers."""
    drawn = draw_all(seed, {name: tuple(x.shape) for name, x in model.named_parameters()}, scale)
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(drawn[name])


def watch(attention):
    """The dictionary to which the next call adds its query, weights and output."""
    seen = {}
    attention.register_forward_pre_hook(lambda _, args: seen.update(query=args[0].numpy()))
    attention.attn_drop.register_forward_hook(lambda _, args, result: seen.update(weights=result.numpy()))
    attention.register_forward_hook(lambda _, args, result: seen.update(output=result.numpy()))
    return seen


if __name__ == "__main__":
    main()
