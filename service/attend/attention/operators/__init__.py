"""The operators of attention: a file for each has all that is particular to it.

`operator.py` says what that is, `step.py` what their steps are, and `declarations.py` has the other values that they declare.
Here are their fields of LayerSpec, and their order. To import them needs no torch, so that specs can be read without it.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from attend.attention.operators.alibi import AlibiOperator
from attend.attention.operators.block_selection import BlockSelection, BlockSelectionOperator
from attend.attention.operators.chunks import ChunksOperator
from attend.attention.operators.differential import Differential, DifferentialOperator
from attend.attention.operators.forget_gate import ForgetGateOperator
from attend.attention.operators.grid_bias import GridBias, GridBiasOperator
from attend.attention.operators.indexer import Indexer, IndexerOperator
from attend.attention.operators.latent import Latent, LatentOperator
from attend.attention.operators.operator import Operator
from attend.attention.operators.output_gate import OutputGate, OutputGateOperator
from attend.attention.operators.qk_norm import QKNorm, QKNormOperator
from attend.attention.operators.query_scale import QueryScale, QueryScaleOperator
from attend.attention.operators.relative_scores import RelativeScores, RelativeScoresOperator
from attend.attention.operators.rope import Rope, RopeOperator
from attend.attention.operators.scalable_softmax import ScalableSoftmaxOperator
from attend.attention.operators.sigmoid import SigmoidOperator
from attend.attention.operators.sinks import SinksOperator
from attend.attention.operators.softcap import SoftcapOperator
from attend.attention.operators.t5_bias import RelativeBias, T5BiasOperator
from attend.attention.operators.talking_heads import TalkingHeadsOperator
from attend.attention.operators.window import WindowOperator
from attend.spec_parts import Dimensions, Finite, Flag, Width, Window


class OperatorFields(Dimensions):
    """The fields of a spec that the operators have."""

    softcap: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="c in c·tanh(scores/c), before masks; null or 0 for none."
    )
    window: Window | None = Field(default=None, description="Window of keys around each query's position, in every call.")
    chunk_size: Width | None = Field(
        default=None, description="A query attends only to keys in its own chunk of this many positions (Llama 4)."
    )
    rope: Rope | None = Field(default=None, description="Rotary position embedding.")
    query_scale: QueryScale | None = Field(default=None, description="Factor on queries that grows with their position.")
    alibi: Flag = Field(default=False, description="Biases linear in the distance (Press et al. 2022).")
    relative_bias: RelativeBias | None = Field(default=None, description="T5's relative position bias.")
    relative_scores: RelativeScores | None = Field(
        default=None, description="Terms of the scores that depend on content and distance (Transformer-XL, DeBERTa)."
    )
    grid_bias: GridBias | None = Field(default=None, description="Scores by relative position in a grid of tokens, such as an image.")
    forget_gate: Flag = Field(
        default=False, description="Gates that depend on the keys' inputs, by which scores fall with the distance (forgetting attention)."
    )
    talking_heads: Flag = Field(default=False, description="Heads mix their scores before the softmax, and their weights after it (CaiT).")
    qk_norm: QKNorm | None = Field(default=None, description="Normalisation of queries and keys.")
    sinks: Flag = Field(
        default=False, description="A learnt logit for each head, the weight `sinks`, that takes part in the softmax but has no value."
    )
    output_gate: OutputGate | None = Field(default=None, description="Gate on the output of each head, before the output projection.")
    latent: Latent | None = Field(default=None, description="Multi-head latent attention.")
    differential: Differential | None = Field(default=None, description="Differential attention, whose weights may be negative.")
    normalizer: Literal["softmax", "scalable_softmax", "sigmoid"] = Field(
        default="softmax",
        description="How scores S become weights: softmax(S); scalable_softmax, softmax(ln(n) S) for a row that may attend to n keys "
        "(Nakanishi 2025, arXiv 2501.19399); sigmoid, 1/(1 + exp(ln(n) - S)) for n keys in the query's sequence, without padding and other "
        "segments (Ramapuram et al. 2024, arXiv 2409.04431).",
    )
    indexer: Indexer | None = Field(default=None, description="Selection of the keys that each query attends to.")
    block_selection: BlockSelection | None = Field(
        default=None, description="Selection of the blocks of keys that each head of a query attends to."
    )


OPERATORS: tuple[type[Operator], ...] = (  # weights are drawn in this order; at one place of the program, steps are in this order
    WindowOperator,
    ChunksOperator,
    OutputGateOperator,
    LatentOperator,
    QKNormOperator,
    RopeOperator,
    QueryScaleOperator,
    SoftcapOperator,
    TalkingHeadsOperator,
    AlibiOperator,
    T5BiasOperator,
    RelativeScoresOperator,
    GridBiasOperator,
    IndexerOperator,
    BlockSelectionOperator,
    ForgetGateOperator,
    SinksOperator,
    DifferentialOperator,
    ScalableSoftmaxOperator,
    SigmoidOperator,
)


def shared_key_dim(fields: Mapping[str, Any]) -> int:
    """How many numbers of each key all heads share in a layer with these fields of a spec."""
    return sum(operator.shared_key_dim(fields[operator.field]) for operator in OPERATORS if fields.get(operator.field))


def num_softmaxes(fields: Collection[str]) -> int:
    """Number of softmaxes of each head of a layer with these fields."""
    return max((operator.num_softmaxes for operator in OPERATORS if operator.field in fields), default=1)
