"""Readers of data sets: every form from files written here, and what is said when a file is missing, cut off or hostile."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from nmsparse.workbench import datasets
from nmsparse.workbench.datasets import Sentence, _cache, _cifar, _embedded, _fashion, _text, _tokenizers
from nmsparse.workbench.datasets._files import Source

PACK = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NMSPARSE_DATA", raising=False)
    return tmp_path / "cache" / "data"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def put(path: Path, content: bytes | str) -> Path:
    """Write a file, packed as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(PACK.get(path.suffix, bytes)(data))
    return path


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


# ---- CIFAR-10 ----

COUNT = 6
PARTS = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Six batches of six images each: pixels (channel by channel) and labels."""
    monkeypatch.setattr(_cifar, "RECORDS", COUNT)
    random = np.random.default_rng(0)
    return {
        name: (random.integers(0, 256, (COUNT, 3072), dtype=np.uint8), random.integers(0, 10, COUNT, dtype=np.uint8))
        for name in PARTS
    }


def as_binary(batch: tuple[np.ndarray, np.ndarray]) -> bytes:
    pixels, labels = batch
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def as_pickle(batch: tuple[np.ndarray, np.ndarray]) -> bytes:
    """As Python 3 writes it today, in the protocol of the official files."""
    pixels, labels = batch
    return pickle.dumps({b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"a batch"}, protocol=2)


def as_old_pickle(batch: tuple[np.ndarray, np.ndarray]) -> bytes:
    """As Python 2 and an old numpy wrote the official files: byte strings, and numpy.core."""
    pixels, labels = batch

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + integer(0) + b"\x85" + string(b"b") + b"\x87R"
        b"(" + integer(1) + integer(len(pixels)) + integer(3072) + b"\x86"
        b"cnumpy\ndtype\n" + string(b"u1") + integer(0) + integer(1) + b"\x87R"
        b"(" + integer(3) + string(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
        b"\x89" + string(pixels.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(integer(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def check_cifar(found: datasets.Splits[datasets.Images], batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    pixels = np.concatenate([batches[name][0] for name in PARTS[:5]]).reshape(-1, 3, 32, 32)
    assert found.train.pixels.dtype == torch.uint8
    assert torch.equal(found.train.pixels, torch.from_numpy(pixels))
    assert found.train.labels.tolist() == [int(label) for name in PARTS[:5] for label in batches[name][1]]
    assert torch.equal(found.valid.pixels, torch.from_numpy(batches["test_batch"][0].reshape(-1, 3, 32, 32)))
    assert found.valid.labels.tolist() == batches["test_batch"][1].tolist()


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."])
def test_cifar_binary_batches_are_read(root: Path, small_batches: dict, folder: str) -> None:
    for name, batch in small_batches.items():
        put(root / folder / f"{name}.bin", as_binary(batch))
    check_cifar(datasets.cifar10(root), small_batches)


@pytest.mark.parametrize("write", [as_pickle, as_old_pickle])
def test_cifar_python_batches_are_read(root: Path, small_batches: dict, write: Any) -> None:
    for name, batch in small_batches.items():
        put(root / "cifar-10-batches-py" / name, write(batch))
    check_cifar(datasets.cifar10(root), small_batches)


@pytest.mark.parametrize("folder", [".", "cifar10"])
def test_cifar_archives_are_read_without_unpacking(root: Path, small_batches: dict, folder: str) -> None:
    binary = {f"cifar-10-batches-bin/{name}.bin": as_binary(batch) for name, batch in small_batches.items()}
    path = root / folder / "cifar-10-binary.tar.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(tarred(binary))
    check_cifar(datasets.cifar10(root), small_batches)
    path.unlink()
    python = {f"cifar-10-batches-py/{name}": as_old_pickle(batch) for name, batch in reversed(small_batches.items())}
    path.with_name("cifar-10-python.tar.gz").write_bytes(tarred(python))
    check_cifar(datasets.cifar10(root), small_batches)


def write_sheets(folder: Path, batches: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Compact form: sheets of 2 x 3 tiles, five for training and one for the test set."""
    folder.mkdir(parents=True)
    for number, name in enumerate(PARTS):
        tiles = batches[name][0].reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
        target = f"train_{number:02d}.webp" if number < 5 else "test_00.webp"
        Image.fromarray(tiles).save(folder / target, lossless=True)
    labels = [batches[name][1] for name in PARTS]
    np.savez(folder / "labels.npz", y_train=np.concatenate(labels[:5]), y_test=labels[5])


def test_cifar_sheets_are_read(root: Path, small_batches: dict) -> None:
    write_sheets(root / "cifar10", small_batches)
    check_cifar(datasets.cifar10(root), small_batches)


def test_damaged_cifar_sheets_are_named(root: Path, small_batches: dict) -> None:
    write_sheets(root / "cifar10", small_batches)
    sheet = root / "cifar10" / "train_03.webp"
    whole = sheet.read_bytes()
    sheet.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"train_03\.webp cannot be decoded"):
        datasets.cifar10(root)
    sheet.unlink()
    with pytest.raises(ValueError, match=r"train_03\.webp is missing"):
        datasets.cifar10(root)
    Image.new("RGB", (33, 32)).save(sheet, lossless=True)
    with pytest.raises(ValueError, match=r"train_03\.webp measures 33 x 32"):
        datasets.cifar10(root)
    Image.new("RGB", (32, 32)).save(sheet, lossless=True)
    with pytest.raises(ValueError, match="25 images and 30 labels"):
        datasets.cifar10(root)
    (root / "cifar10" / "labels.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"labels\.npz is not an npz file"):
        datasets.cifar10(root)


def test_labels_in_a_pickled_npz_are_refused(root: Path, small_batches: dict) -> None:
    write_sheets(root / "cifar10", small_batches)
    np.savez(root / "cifar10" / "labels.npz", y_train=np.array([{}], dtype=object), y_test=np.zeros(1))
    with pytest.raises(ValueError, match=r"labels\.npz.*allow_pickle"):
        datasets.cifar10(root)


def test_cut_off_and_foreign_cifar_batches_are_named(root: Path, small_batches: dict) -> None:
    folder = root / "cifar-10-batches-bin"
    for name, batch in small_batches.items():
        put(folder / f"{name}.bin", as_binary(batch))
    (folder / "data_batch_2.bin").write_bytes(as_binary(small_batches["data_batch_2"])[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin holds 18,437 bytes; 6 records of 3,073 bytes are 18,438"):
        datasets.cifar10(root)
    (folder / "data_batch_2.bin").write_bytes(bytes([77]) * (COUNT * 3073))
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: labels are 0 \.\. 9"):
        datasets.cifar10(root)


def test_cut_off_cifar_archive_is_named(root: Path, small_batches: dict) -> None:
    data = tarred({f"cifar-10-batches-bin/{name}.bin": as_binary(batch) for name, batch in small_batches.items()})
    (root / "cifar-10-binary.tar.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz cannot be read"):
        datasets.cifar10(root)


class Touch:
    """Unpickling this runs code."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_pickle_is_refused_and_runs_nothing(root: Path, tmp_path: Path, small_batches: dict, protocol: int) -> None:
    for name, batch in small_batches.items():
        put(root / "cifar-10-batches-py" / name, as_pickle(batch))
    target = tmp_path / "ran"
    hostile = pickle.dumps({b"data": Touch(target), b"labels": [0]}, protocol=protocol)
    put(root / "cifar-10-batches-py" / "data_batch_4", hostile)
    with pytest.raises(ValueError, match=r"data_batch_4 cannot be read.*UnpicklingError: it asks for"):
        datasets.cifar10(root)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        b"no pickle at all",
        pickle.dumps([1, 2]),
        pickle.dumps({b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((COUNT, 3072), np.float32), b"labels": [1] * COUNT}, protocol=2),
        pickle.dumps({b"data": np.array([[[]]] * 2, dtype=object), b"labels": [1]}, protocol=2),
    ],
)
def test_broken_pickles_are_named(root: Path, small_batches: dict, content: bytes) -> None:
    for name, batch in small_batches.items():
        put(root / "cifar-10-batches-py" / name, as_pickle(batch))
    put(root / "cifar-10-batches-py" / "test_batch", content)
    with pytest.raises(ValueError, match=r"test_batch cannot be read as a CIFAR-10 batch"):
        datasets.cifar10(root)


# ---- Fashion-MNIST ----


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


FASHION = {
    "train-images-idx3-ubyte": np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28),
    "train-labels-idx1-ubyte": np.array([0, 9, 3, 3, 1], dtype=np.uint8),
    "t10k-images-idx3-ubyte": np.arange(2 * 28 * 28, dtype=np.uint8)[::-1].reshape(2, 28, 28),
    "t10k-labels-idx1-ubyte": np.array([7, 2], dtype=np.uint8),
}


@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_idx_files_are_read(root: Path, folder: str, suffix: str) -> None:
    for name, array in FASHION.items():
        put(root / folder / (name + suffix), idx(array))
    found = datasets.fashion_mnist(root)
    assert found.train.pixels.shape == (5, 1, 28, 28)
    assert np.array_equal(found.train.pixels[:, 0].numpy(), FASHION["train-images-idx3-ubyte"])
    assert found.train.labels.tolist() == [0, 9, 3, 3, 1]
    assert found.valid.labels.tolist() == [7, 2]


def test_fashion_is_found_where_debian_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fashion, "DEBIAN", tmp_path / "usr")
    for name, array in FASHION.items():
        put(tmp_path / "usr" / f"{name}.gz", idx(array))
    assert len(datasets.fashion_mnist(None).train.labels) == 5


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train-images-idx3-ubyte", idx(FASHION["train-images-idx3-ubyte"])[:-1], "declares 5 x 28 x 28 bytes and holds 3,919"),
        ("train-images-idx3-ubyte", b"\0\0\x08", "is not an idx file of bytes with 3 dimension"),
        ("train-images-idx3-ubyte", struct.pack(">BBBB3I", 0, 0, 8, 3, 1 << 31, 1 << 31, 1 << 31), "declares 2147483648 x"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(3, np.uint8)), "holds 2 images, but .* holds 3 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([1, 10], np.uint8)), "labels are 0 .. 9"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 28, 27), np.uint8)), "28 x 27 pixels; they should be square"),
    ],
)
def test_damaged_idx_files_are_named(root: Path, name: str, content: bytes, said: str) -> None:
    for each, array in FASHION.items():
        put(root / each, idx(array))
    put(root / name, content)
    with pytest.raises(ValueError, match=rf"{name}.*{said}|{said}"):
        datasets.fashion_mnist(root)


def test_cut_off_gzip_is_named(root: Path) -> None:
    for each, array in FASHION.items():
        put(root / f"{each}.gz", idx(array))
    path = root / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz cannot be read .*damaged or incomplete"):
        datasets.fashion_mnist(root)


# ---- enwik8 and WikiText-2 ----

ENWIK8 = bytes(range(256)) * 4 + "Zürich 東京 ".encode() * 80


@pytest.fixture
def small_enwik8(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(_text, "ENWIK8_BYTES", 2000)
    return ENWIK8[:2000]


@pytest.mark.parametrize("name", ["enwik8/enwik8", "enwik8/enwik8.xz", "enwik8.xz", "enwik8.gz", "enwik8"])
def test_enwik8_is_split_90_5_5(root: Path, small_enwik8: bytes, name: str) -> None:
    put(root / name, small_enwik8)
    text = datasets.enwik8(root)
    assert text.splits.train.dtype == torch.uint8
    assert bytes(text.splits.train.tolist()) == small_enwik8[:1800]
    assert bytes(text.splits.valid.tolist()) == small_enwik8[1800:1900]
    assert (text.vocabulary, text.is_characters) == (256, True)


@pytest.mark.parametrize("name", ["enwik8.zip", "enwik8/enwik8.zip"])
def test_enwik8_is_read_from_its_zip(root: Path, small_enwik8: bytes, name: str) -> None:
    put(root / name, zipped({"enwik8": small_enwik8}))
    assert len(datasets.enwik8(root).splits.train) == 1800


def test_enwik8_of_another_size_is_refused(root: Path, small_enwik8: bytes) -> None:
    put(root / "enwik8.xz", small_enwik8[:-1])
    with pytest.raises(ValueError, match=r"enwik8\.xz holds 1,999 bytes; enwik8 has 2,000"):
        datasets.enwik8(root)


@pytest.mark.parametrize("name", ["enwik8.xz", "enwik8.gz", "enwik8.bz2", "enwik8.zip"])
def test_cut_off_compressed_text_is_named(root: Path, small_enwik8: bytes, name: str) -> None:
    path = put(root / name, zipped({"enwik8": small_enwik8}) if name.endswith(".zip") else small_enwik8)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=rf"{name} cannot be read .*damaged or incomplete"):
        datasets.enwik8(root)


TRAIN = " \n = A title = \n \n the cat sat on the <unk> . \n"
VALID = " \n the dog sat . \n"


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("wikitext2/train.txt.xz", "wikitext2/valid.txt.xz"),
        ("wikitext2/train.txt", "wikitext2/valid.txt"),
        ("wikitext-2/wiki.train.tokens", "wikitext-2/wiki.valid.tokens"),
        ("wikitext2/wiki.train.tokens.gz", "wikitext2/wiki.valid.tokens.gz"),
    ],
)
def test_wikitext_words_are_numbered_as_they_occur_with_one_end_a_line(root: Path, train: str, valid: str) -> None:
    put(root / train, TRAIN)
    put(root / valid, VALID)
    text = datasets.wikitext2(root)
    # <eos>=0 "= A title =" -> 1 2 3 1, then the=4 cat=5 sat=6 on=7 <unk>=8 .=9; the valid word "dog" is unknown
    assert text.splits.train.tolist() == [0, 1, 2, 3, 1, 0, 0, 4, 5, 6, 7, 4, 8, 9, 0]
    assert text.splits.valid.tolist() == [0, 4, 8, 6, 9, 0]
    assert (text.vocabulary, text.is_characters) == (10, False)


def test_wikitext_is_read_from_its_zip(root: Path) -> None:
    members = {"wikitext-2/wiki.train.tokens": TRAIN.encode(), "wikitext-2/wiki.valid.tokens": VALID.encode()}
    put(root / "wikitext-2-v1.zip", zipped(members))
    assert datasets.wikitext2(root).vocabulary == 10


def test_text_that_is_not_utf8_is_named(root: Path) -> None:
    put(root / "wikitext2/train.txt", b"\xff\xfe")
    put(root / "wikitext2/valid.txt", VALID)
    with pytest.raises(ValueError, match=r"train\.txt is not UTF-8 text"):
        datasets.wikitext2(root)


# ---- tokenizers ----


@pytest.fixture
def gpt2(root: Path) -> Path:
    """A small tokenizer in GPT-2's files, trained on this file's text."""
    trained = json.loads(datasets.train_byte_pairs([TRAIN * 3, VALID * 3, "the cats and the dogs \n\n sat"], 300).to_json())
    folder = root / "tokenizers" / "gpt2"
    put(folder / "vocab.json", json.dumps(trained["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in trained["model"]["merges"]]
    put(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


def test_long_texts_have_the_tokens_of_the_whole(root: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizers.gpt2_tokenizer("test", root)
    text = "the cat\n\n\nsat  on \n the\tmat's  end . \n" * 20 + "日本語 text\n x\n\n"
    (whole,) = tokenizer.encode([text])
    for size in (1, 7, 50):
        monkeypatch.setattr(_tokenizers, "PIECE", size)
        assert len(list(_tokenizers._pieces(text))) > 5
        assert tokenizer.encode_long(text).tolist() == whole
    assert tokenizer.encode_long("").tolist() == []


def test_bpe_prefers_the_raw_text(root: Path, gpt2: Path) -> None:
    put(root / "wikitext2/train.txt", TRAIN)
    put(root / "wikitext2/valid.txt", VALID)
    words = datasets.wikitext2_bpe(root)
    put(root / "wikitext-2-raw/wiki.train.raw", TRAIN.replace("<unk>", "mat"))
    put(root / "wikitext-2-raw/wiki.valid.raw", VALID)
    raw = datasets.wikitext2_bpe(root)
    tokenizer = _tokenizers.gpt2_tokenizer("test", root)
    assert words.splits.train.tolist() == tokenizer.encode([TRAIN])[0]
    assert raw.splits.train.tolist() == tokenizer.encode([TRAIN.replace("<unk>", "mat")])[0]
    assert raw.vocabulary == tokenizer.vocabulary > 256


def test_damaged_gpt2_files_are_named(root: Path, gpt2: Path) -> None:
    put(gpt2 / "vocab.json", '{"a": ')
    with pytest.raises(ValueError, match=r"vocab\.json and .*merges\.txt cannot be read as a BPE"):
        _tokenizers.gpt2_tokenizer("enwik8-bpe", root)
    (gpt2 / "vocab.json").unlink()
    with pytest.raises(ValueError, match=r"enwik8-bpe was not found in .*tokenizers/gpt2/vocab\.json"):
        _tokenizers.gpt2_tokenizer("enwik8-bpe", root)


def test_trained_bpe_does_not_depend_on_threads_or_hash_seeds() -> None:
    script = (
        "from nmsparse.workbench.datasets import train_byte_pairs, pig_latin\n"
        "print(train_byte_pairs([w for p in pig_latin().train[:2000] for w in p], 500).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "sat", "##s", ".", "a"]


def test_bert_pairs_are_encoded_with_the_start_of_the_second(root: Path) -> None:
    put(root / "tokenizers/bert-base-uncased/vocab.txt", "\n".join(WORD_PIECES) + "\n")
    tokenizer = datasets.bert_tokenizer("test", root, None)
    assert (tokenizer.padding, tokenizer.begin, tokenizer.end, tokenizer.vocabulary) == (0, 2, 3, 11)
    sentences = [Sentence("The cats sat.", None, 0), Sentence("A dog", "a bird", 1)]
    assert tokenizer.encode(sentences, 16) == [([2, 4, 5, 8, 7, 9, 3], 7), ([2, 10, 6, 3, 10, 1, 3], 4)]
    assert [len(ids) for ids, _ in tokenizer.encode(sentences, 5)] == [5, 5]


def test_given_vocabulary_is_used_instead_of_the_folders(root: Path, tmp_path: Path) -> None:
    put(root / "tokenizers/bert-base-uncased/vocab.txt", "\n".join(WORD_PIECES) + "\n")
    given = put(tmp_path / "model/vocab.txt", "\n".join([*WORD_PIECES, "Cat"]) + "\n")
    put(tmp_path / "model/tokenizer_config.json", '{"do_lower_case": false}')
    for path in (given, given.parent):
        tokenizer = datasets.bert_tokenizer("test", root, path)
        assert tokenizer.encode([Sentence("Cat cat", None, 0)], 8) == [([2, 11, 5, 3], 4)]
    with pytest.raises(ValueError, match=r"nowhere is no vocab\.txt or tokenizer\.json, nor a folder with one"):
        datasets.bert_tokenizer("test", root, tmp_path / "nowhere")


def test_vocabulary_without_berts_tokens_is_refused(root: Path) -> None:
    put(root / "tokenizers/bert-base-uncased/vocab.txt", "a\nb\n")
    with pytest.raises(ValueError, match=r"vocab\.txt"):
        datasets.bert_tokenizer("test", root, None)


# ---- the cache ----


def source(path: Path) -> Source:
    return Source(path, str(path), path.read_bytes)


class Builds:
    """Counts how often something is computed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.count += 1
        return {"ids": torch.arange(1000, dtype=torch.int32), "text": torch.tensor([1, 2, 3], dtype=torch.uint8)}


def test_result_is_computed_once_for_the_same_file_and_extra(tmp_path: Path, cache: Path) -> None:
    file = put(tmp_path / "input.txt", "text")
    build = Builds()
    first = _cache.cached("name", [source(file)], build, extra="a")
    again = _cache.cached("name", [source(file)], build, extra="a")
    assert build.count == 1
    assert torch.equal(first["ids"], again["ids"])
    assert again["text"].dtype == torch.uint8
    _cache.cached("name", [source(file)], build, extra="b")
    put(file, "another text")
    _cache.cached("name", [source(file)], build, extra="a")
    assert build.count == 3
    assert [path.name for path in tmp_path.iterdir() if path != tmp_path / "cache"] == ["input.txt"]
    assert not list(cache.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "garbage"])
def test_damaged_cache_is_computed_again_with_a_warning(tmp_path: Path, cache: Path, damage: str) -> None:
    file = put(tmp_path / "input.txt", "text")
    build = Builds()
    good = _cache.cached("name", [source(file)], build)
    (saved,) = cache.iterdir()
    data = bytearray(saved.read_bytes())
    if damage == "cut":
        saved.write_bytes(data[:-10])
    elif damage == "flipped":
        data[-1] ^= 1
        saved.write_bytes(data)
    elif damage == "garbage":
        saved.write_bytes(b"garbage")
    else:
        save_file({"ids": torch.zeros(3)}, saved)
    with pytest.warns(UserWarning, match=rf"{saved.name} is ignored"):
        again = _cache.cached("name", [source(file)], build)
    assert build.count == 2
    assert torch.equal(good["ids"], again["ids"])
    _cache.cached("name", [source(file)], build)
    assert build.count == 2


def test_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = put(tmp_path / "a file", "in the way")
    monkeypatch.setenv("NMSPARSE_CACHE", str(blocked))
    file = put(tmp_path / "input.txt", "text")
    build = Builds()
    for _ in range(2):
        assert len(_cache.cached("name", [source(file)], build)["ids"]) == 1000
    assert build.count == 2
    assert "could not be written" in caplog.text


def test_bpe_of_enwik8_is_kept_and_follows_the_tokenizer(
    root: Path, gpt2: Path, small_enwik8: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("the cat sat on the mat ü . \n" * 100).encode()[:2000]
    put(root / "enwik8.xz", text)
    first = datasets.enwik8_bpe(root)
    tokenizer = _tokenizers.gpt2_tokenizer("test", root)
    assert first.splits.train.tolist() == tokenizer.encode([text[:1800].decode(errors="ignore")])[0]
    assert first.splits.valid.tolist() == tokenizer.encode([text[1800:1900].decode(errors="ignore")])[0]
    with monkeypatch.context() as patch:
        patch.setattr(_tokenizers.BytePairTokenizer, "encode_long", None)  # must not be called
        again = datasets.enwik8_bpe(root)
    assert torch.equal(first.splits.train, again.splits.train)
    merges = (gpt2 / "merges.txt").read_text().splitlines()
    put(gpt2 / "merges.txt", "\n".join(merges[:4]) + "\n")
    assert not torch.equal(datasets.enwik8_bpe(root).splits.train, first.splits.train)
    assert len(list(cache.glob("enwik8-bpe-*"))) == 2


# ---- GLUE ----

SST2 = 'sentence\tlabel\nhides "new secretions\t0\ngreat\t1\n'
SST2_TURNED = 'label\tsentence\n0\thides "new secretions\n1\tgreat\n'
MRPC = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tHe said "so .\tSo he said .\r\n0\t9\t10\tx\ty\r\n'
RTE = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\tc\td\tentailment\n"
COLA = "gj04\t1\t\tGood one.\ngj04\t0\t*\tOne bad.\n"
STSB = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n0\tg\tf\ty\t1\tn\tn\tA\tB\t3.800\n"
)
STSB_OWN = "main\tf\ty\t0001\t3.800\tA\tB\n"


@pytest.mark.parametrize("base", ["glue", "glue_data", "."])
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_glue_tables_are_read_by_their_header(root: Path, base: str, suffix: str) -> None:
    for folder, content in (("SST-2", SST2), ("MRPC", MRPC), ("RTE", RTE), ("CoLA", COLA), ("STS-B", STSB)):
        for name in ("train.tsv", "dev.tsv"):
            put(root / base / folder / (name + suffix), content)
    assert datasets.glue("sst2", root).train == [('hides "new secretions', None, 0), ("great", None, 1)]
    assert datasets.glue("mrpc", root).valid == [('He said "so .', "So he said .", 1), ("x", "y", 0)]
    assert datasets.glue("rte", root).train == [("a", "b", 0), ("c", "d", 1)]
    assert datasets.glue("cola", root).valid == [("Good one.", None, 1), ("One bad.", None, 0)]
    assert datasets.glue("stsb", root).train == [("A", "B", 3.8)]


def test_own_releases_of_glue_tasks_are_read(root: Path) -> None:
    for name in ("train.tsv.xz", "dev.tsv.xz"):
        put(root / "glue/SST-2" / name, SST2_TURNED)
    for name, content in (("in_domain_train", COLA), ("in_domain_dev", COLA), ("out_of_domain_dev", "x\t1\t\tThird.\n")):
        put(root / "glue/CoLA" / f"{name}.tsv.xz", content)
    for name in ("sts-train.csv.xz", "sts-dev.csv.xz"):
        put(root / "glue/STS-B" / name, STSB_OWN)
    assert datasets.glue("sst2", root).train == [('hides "new secretions', None, 0), ("great", None, 1)]
    cola = datasets.glue("cola", root)
    assert len(cola.train) == 2
    assert [sentence.first for sentence in cola.valid] == ["Good one.", "One bad.", "Third."]
    assert datasets.glue("stsb", root).valid == [("A", "B", 3.8)]


@pytest.mark.parametrize("base", [".", "glue"])
def test_glue_archives_are_read(root: Path, base: str) -> None:
    members = {
        "CoLA/": "",
        "CoLA/train.tsv": COLA,
        "CoLA/dev.tsv": COLA,
        "CoLA/original/raw/in_domain_train.tsv": "wrong",
        "__MACOSX/CoLA/._train.tsv": "wrong",
    }
    put(root / base / "CoLA.zip", zipped({name: content.encode() for name, content in members.items()}))
    assert len(datasets.glue("cola", root).train) == 2


@pytest.mark.parametrize(
    ("task", "folder", "content", "said"),
    [
        ("sst2", "SST-2", "text\tlabel\na\t1\n", r"no column 'sentence' in its first line; its columns are: text, label"),
        ("sst2", "SST-2", "sentence\tlabel\na\t1\nb\n", r"line 3: 1 columns, of which \[1, 2\]"),
        ("sst2", "SST-2", "sentence\tlabel\na\t2\n", r"line 2: 2 columns"),
        ("sst2", "SST-2", "sentence\tlabel\n", r"holds no examples"),
        ("cola", "CoLA", "", r"holds no examples"),
        ("rte", "RTE", RTE.replace("not_entailment", "perhaps"), r"line 2"),
        ("stsb", "STS-B", STSB.replace("3.800", "nan"), r"line 2: .*a score is 0 \.\. 5"),
    ],
)
def test_damaged_tables_are_named_with_the_line(root: Path, task: str, folder: str, content: str, said: str) -> None:
    for name in ("train.tsv", "dev.tsv"):
        put(root / folder / name, content)
    with pytest.raises(ValueError, match=rf"train\.tsv.*{said}"):
        datasets.glue(task, root)


# ---- Multi30k ----

GERMAN, ENGLISH = "Ein Hund läuft.\nZwei Katzen.\n", "A dog runs.\nTwo cats.\n"


@pytest.mark.parametrize(
    ("folder", "suffix"), [("multi30k", ".xz"), ("multi30k", ""), ("multi30k/data/task1/raw", ".gz"), (".", ".gz")]
)
def test_multi30k_pairs_are_read(root: Path, folder: str, suffix: str, cache: Path) -> None:
    for split in ("train", "val"):
        put(root / folder / f"{split}.de{suffix}", GERMAN)
        put(root / folder / f"{split}.en{suffix}", ENGLISH)
    pairs, tokenizer = datasets.multi30k(root, "de-en")
    assert pairs.train == pairs.valid == [("Ein Hund läuft.", "A dog runs."), ("Zwei Katzen.", "Two cats.")]
    assert (tokenizer.padding, tokenizer.begin, tokenizer.end) == (0, 1, 2)
    assert tokenizer.vocabulary >= 256 + 3
    assert min(min(ids) for ids in tokenizer.encode([GERMAN, ENGLISH])) > 2
    assert len(list(cache.glob("multi30k-de-en-bpe-*"))) == 1
    turned, same = datasets.multi30k(root, "en-de")
    assert turned.train[0] == ("A dog runs.", "Ein Hund läuft.")
    assert datasets.multi30k(root, "de-en")[1].digest == tokenizer.digest
    assert same.vocabulary >= 256 + 3


def test_multi30k_is_read_from_its_archives(root: Path) -> None:
    for archive, split in (("training", "train"), ("validation", "val")):
        data = tarred({f"{split}.de": GERMAN.encode(), f"{split}.en": ENGLISH.encode()})
        (root / "multi30k").mkdir(exist_ok=True)
        (root / "multi30k" / f"{archive}.tar.gz").write_bytes(data)
    assert len(datasets.multi30k(root, "de-en")[0].valid) == 2


def test_multi30k_files_that_do_not_match_are_named(root: Path) -> None:
    for split in ("train", "val"):
        put(root / "multi30k" / f"{split}.de", GERMAN)
        put(root / "multi30k" / f"{split}.en", ENGLISH)
    put(root / "multi30k/train.en", "A dog runs.\n")
    with pytest.raises(ValueError, match=r"train\.de has 2 lines and .*train\.en has 1"):
        datasets.multi30k(root, "de-en")
    with pytest.raises(ValueError, match=r"train\.de, train\.fr, val\.de, val\.fr"):
        datasets.multi30k(root, "de-fr")
    with pytest.raises(ValueError, match="does not name two languages"):
        datasets.multi30k(root, "../x")


# ---- what ships in the package ----


def test_embedded_shakespeare_has_its_known_size() -> None:
    text = datasets.shakespeare()
    assert len(text.splits.train) + len(text.splits.valid) == 1_115_394
    assert len(text.splits.train) == 1_115_394 * 9 // 10
    assert (text.vocabulary, text.splits.train.dtype) == (65, torch.uint8)
    assert int(text.splits.train.max()) == 64


def test_embedded_images_are_balanced_and_real() -> None:
    found = datasets.fashion_mini()
    assert found.train.pixels.shape == (5000, 1, 28, 28)
    assert found.valid.pixels.shape == (1000, 1, 28, 28)
    assert torch.bincount(found.train.labels).tolist() == [500] * 10
    assert torch.bincount(found.valid.labels).tolist() == [100] * 10
    assert found.train.labels[:8].tolist() == [9, 0, 0, 3, 0, 2, 7, 2]  # the official order starts so
    assert 70 < found.train.pixels.float().mean() < 76  # 72.9 over the whole training set


def test_pig_latin_moves_the_first_consonants() -> None:
    assert [_embedded.to_pig_latin(word) for word in ("string", "apple", "my", "a")] == ["ingstray", "appleay", "myay", "aay"]
    found = datasets.pig_latin()
    assert not {pair.source for pair in found.train} & {pair.source for pair in found.valid}


def test_questions_are_balanced_and_not_shared_between_splits() -> None:
    found = datasets.questions()
    both = [*found.train, *found.valid]
    assert sum(sentence.label for sentence in both) * 2 == len(both) > 4000
    assert not {sentence.first for sentence in found.train} & {sentence.first for sentence in found.valid}
    for split in (found.train, found.valid):
        assert sum(sentence.label for sentence in split) / len(split) == pytest.approx(0.5, abs=0.06)


# ---- the Hugging Face Hub ----


class Rows:
    """A split as the `datasets` package has it: columns by name."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __getitem__(self, column: str) -> list[Any]:
        return self._columns[column]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the `datasets` package: offer one data set under any name, and note what was asked for."""
    asked: list[Any] = []

    def install(**splits: Rows) -> list[Any]:
        module = types.ModuleType("datasets")
        module.load_dataset = lambda *arguments: asked.append(arguments) or splits
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return install


def test_hub_text_becomes_bytes(offer: Any) -> None:
    asked = offer(train=Rows(text=["ab", "ü"]), validation=Rows(text=["c"]))
    text = datasets.hub("owner/name:configuration").text
    assert asked == [("owner/name", "configuration")]
    assert text is not None
    assert bytes(text.splits.train.tolist()).decode() == "ab\nü"


def test_hub_images_become_bytes(offer: Any) -> None:
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    offer(train=Rows(img=[red, red], label=[0, 1]), test=Rows(img=[red], label=[1]))
    images = datasets.hub("name").images
    assert images is not None
    assert images.train.pixels.shape == (2, 3, 4, 4)
    assert images.train.pixels[0, :, 0, 0].tolist() == [255, 0, 0]
    offer(train=Rows(image=[red, Image.new("RGB", (8, 8))], label=[0, 1]), test=Rows(image=[red], label=[1]))
    with pytest.raises(ValueError, match="hf:name has images of several sizes"):
        datasets.hub("name")


def test_hub_sentences_and_translations_are_recognised(offer: Any) -> None:
    rows = Rows(sentence1=["a", "b"], sentence2=["c", "d"], label=[1, -1], idx=[0, 1])
    offer(train=rows, validation=rows)
    sentences = datasets.hub("glue:mrpc").sentences
    assert sentences is not None
    assert sentences.train == [("a", "c", 1)]
    rows = Rows(translation=[{"de": "ein", "en": "one"}])
    offer(train=rows, validation=rows)
    pairs = datasets.hub("wmt").pairs
    assert pairs is not None
    assert pairs.valid == [("ein", "one")]


def test_hub_data_that_fits_nothing_says_what_it_has(offer: Any) -> None:
    offer(train=Rows(audio=[1]), validation=Rows(audio=[1]))
    with pytest.raises(ValueError, match="hf:name has the columns audio; needed are"):
        datasets.hub("name")
    offer(train=Rows(text=["a"]))
    with pytest.raises(ValueError, match="hf:name has the splits train; needed are train and one of validation"):
        datasets.hub("name")
    secret = Rows(sentence=["a"], label=[-1])
    offer(train=secret, test=secret)
    with pytest.raises(ValueError, match="keeps the labels of a split secret"):
        datasets.hub("name")


def test_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError("Couldn't reach it")

    module = types.ModuleType("datasets")
    module.load_dataset = refuse
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ValueError, match=r"hf:owner/name cannot be loaded from the Hugging Face Hub \(Couldn't reach it\)"):
        datasets.hub("owner/name")


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'needs the package datasets.*pip install "nmsparse\[hub\]"'):
        datasets.hub("name")
