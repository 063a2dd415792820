"""Raw data: what ships in the package, what lies in a folder, and what the Hugging Face Hub has."""

from nmsparse.workbench.datasets._cifar import cifar10
from nmsparse.workbench.datasets._embedded import fashion_mini, pig_latin, questions, shakespeare
from nmsparse.workbench.datasets._fashion import fashion_mnist
from nmsparse.workbench.datasets._glue import glue
from nmsparse.workbench.datasets._hub import HubData, hub
from nmsparse.workbench.datasets._multi30k import BPE_ENTRIES, multi30k
from nmsparse.workbench.datasets._splits import Images, Pair, Sentence, Splits, Text, smallest_type
from nmsparse.workbench.datasets._text import enwik8, enwik8_bpe, wikitext2, wikitext2_bpe
from nmsparse.workbench.datasets._tokenizers import (
    BytePairTokenizer,
    WordPieceTokenizer,
    bert_tokenizer,
    train_byte_pairs,
)
from nmsparse.workbench.datasets._words import LetterTokenizer, WordTokenizer

__all__ = [
    "BPE_ENTRIES",
    "BytePairTokenizer",
    "HubData",
    "Images",
    "LetterTokenizer",
    "Pair",
    "Sentence",
    "Splits",
    "Text",
    "WordPieceTokenizer",
    "WordTokenizer",
    "bert_tokenizer",
    "cifar10",
    "enwik8",
    "enwik8_bpe",
    "fashion_mini",
    "fashion_mnist",
    "glue",
    "hub",
    "multi30k",
    "pig_latin",
    "questions",
    "shakespeare",
    "smallest_type",
    "train_byte_pairs",
    "wikitext2",
    "wikitext2_bpe",
]
