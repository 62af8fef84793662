"""Small tokenizers of three kinds, for tests that have the package tokenizers."""

from typing import Any

TEXTS = ["Anna saw the cat and the dog", "the cat saw Anna again", "dogs and cats, cats and dogs!"]  # that tokenizers learn


def tokenizer(kind: str) -> Any:
    """One that has learned TEXTS: pieces of words as BERT has them, bytes as GPT-2, or pieces with their spaces as T5."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[UNK]", "[CLS]", "[SEP]"]
    options: dict[str, Any] = {"vocab_size": 300, "special_tokens": special, "show_progress": False}
    if kind == "pieces of words":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer(**options)
    elif kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="[UNK]")
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return made
