"""The field `tokens` of requests: tokens of queries and keys, and which of them are left out."""

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from attend.spec_parts import field_error
from attend.wire.problems import HALF_SURROGATE, describe_value, is_unicode
from attend.wire.schemas.schema import Schema

SPECIAL_TOKEN = re.compile(
    r"\[(CLS|SEP|PAD|BOS|EOS)\]|</?s>|<(pad|bos|eos|cls|sep|start_of_turn|end_of_turn)>|<[|\uff5c].*[|\uff5c]>", re.IGNORECASE
)


def _valid_tokens(value: Any) -> Any:
    nested = isinstance(value, list) and value and all(isinstance(row, list) for row in value)
    for i, row in enumerate(value if nested else [value]):
        if not isinstance(row, list):
            raise field_error("", "a list of tokens, or one such list per batch item", describe_value(row))
        for j, word in enumerate(row):
            if not isinstance(word, str):
                raise field_error(f"/{i}/{j}" if nested else f"/{j}", "a token, which is a string", describe_value(word))
            if not is_unicode(word):  # replies and pictures cannot hold it
                raise field_error(f"/{i}/{j}" if nested else f"/{j}", "a token of Unicode text", HALF_SURROGATE)
    return value


def _valid_omission(value: Any) -> Any:
    if value != "special" and not (isinstance(value, list) and all(isinstance(token, str) for token in value)):
        raise field_error("", '"special" or a list of tokens', describe_value(value))
    return value


TokenLists = Annotated[list[str] | list[list[str]], BeforeValidator(_valid_tokens)]


class Tokens(Schema):
    """Tokens of the queries and keys, as labels and for the metrics that need them: one list, or one for each batch item."""

    query: TokenLists | None = Field(default=None, examples=[["the", "cat"]], description="A token for each query.")
    key: TokenLists | None = Field(default=None, description="A token for each key; those of the queries if the key is left out.")
    omit: Annotated[Literal["special"] | list[str], BeforeValidator(_valid_omission)] | None = Field(
        default=None,
        description="Tokens left out of figures, of strongest links and, as queries, of metrics; `special`: [CLS], [SEP], <s>, <|…|> and "
        "other marks of a sequence. Weights stay as they are: as keys, these tokens count in all other metrics.",
    )

    def omits(self, token: str) -> bool:
        """Whether `omit` leaves this token out."""
        return is_special(token) if self.omit == "special" else token in self._listed

    @cached_property
    def _listed(self) -> frozenset[str]:
        return frozenset(self.omit or ())


def is_special(token: str) -> bool:
    """Whether the token marks the beginning, the end or the padding of a sequence, or a turn in it. Unknown and masked words do not."""
    return SPECIAL_TOKEN.fullmatch(token) is not None
