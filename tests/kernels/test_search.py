"""The search for algorithms without a GPU: the file of choices, children that are made to fail, and who serves what."""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nmsparse.kernels import SPARSE_MATMUL, _dispatch, _engine, _search, select
from nmsparse.kernels._cusparselt import CusparseLtError, Product
from nmsparse.kernels._layout import random_packed
from nmsparse.kernels._search import Choice, Choices, Searcher, cache_folder, key_of, product_of

HARDWARE = {"format": _search.FORMAT, "gpu": "a GPU of tests", "driver": "1.2", "cusparselt": 800}
CHOICE = Choice(algorithm=3, split_k=2, sparse_ms=0.125, dense_ms=0.25, error=0.001)
OTHER = Choice(algorithm=-1, split_k=1, sparse_ms=1.5, dense_ms=1.0, error=0.002)
PRODUCT = Product(256, 512, 128, False, True, True, torch.bfloat16)


@pytest.fixture(autouse=True)
def hardware(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What this machine pretends to be; a test may change it."""
    pretended = dict(HARDWARE)
    monkeypatch.setattr(_search, "hardware", lambda device: dict(pretended))
    return pretended


class FakeSearcher:
    """Answers from a table, and notes what it was asked."""

    def __init__(self, answers: dict[Product, Choice | None]) -> None:
        self.answers, self.asked = answers, []

    def search(self, product: Product) -> Choice | None:
        self.asked.append(product)
        return self.answers[product]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Product, Choice | None]], FakeSearcher]:
    """Let searches be answered from a table."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def answer(answers: dict[Product, Choice | None]) -> FakeSearcher:
        fake = FakeSearcher(answers)
        monkeypatch.setattr(_search, "_searcher", lambda device: fake)
        return fake

    return answer


def saved(choices: Choices) -> dict[str, Any]:
    return json.loads(choices.file.read_text())


def written(folder: Path, found: dict[Product, Choice]) -> Choices:
    """Choices on disk."""
    choices = Choices(0, folder)
    choices.found = {key_of(product): choice for product, choice in found.items()}
    choices._write()
    return choices


# ---- keys ----


@pytest.mark.parametrize("flags", [(False, True, True), (True, False, False), (True, True, False), (False, False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_comes_back_from_its_key(flags, dtype):
    product = Product(128, 4096, 64, *flags, dtype=dtype)
    assert product_of(key_of(product)) == product


def test_keys_name_everything_that_a_choice_depends_on():
    assert key_of(PRODUCT) == "256x512x128 NTT bfloat16"
    others = [
        PRODUCT._replace(m=512),
        PRODUCT._replace(n=256),
        PRODUCT._replace(k=256),
        PRODUCT._replace(m_major=True),
        PRODUCT._replace(b_transposed=False),
        PRODUCT._replace(d_transposed=False),
        PRODUCT._replace(dtype=torch.float16),
    ]
    assert len({key_of(product) for product in [PRODUCT, *others]}) == 8
    assert key_of(PRODUCT._replace(has_bias=True)) == key_of(PRODUCT), "a bias takes the algorithm of the product without it"


# ---- the file ----


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NMSPARSE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("NMSPARSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "nmsparse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "nmsparse"
    assert Choices(0).file.parent == cache_folder()


def test_without_a_file_nothing_is_known_and_nothing_is_made(tmp_path):
    choices = Choices(0, tmp_path / "new")
    assert choices.found == {}
    assert choices.near(PRODUCT) is None
    assert not (tmp_path / "new").exists()


def test_choices_come_back_from_their_file(tmp_path):
    first = written(tmp_path / "deep" / "folder", {PRODUCT: CHOICE, PRODUCT._replace(m=64): OTHER})
    second = Choices(0, tmp_path / "deep" / "folder")
    assert second.file == first.file
    assert second.found == first.found
    assert second.near(PRODUCT) == CHOICE


def test_the_file_says_what_it_was_measured_on_and_in_which_format(tmp_path):
    choices = written(tmp_path, {PRODUCT: CHOICE})
    assert saved(choices) == {"hardware": HARDWARE, "choices": {key_of(PRODUCT): asdict(CHOICE)}}


@pytest.mark.parametrize("what", ["format", "gpu", "driver", "cusparselt"])
def test_other_hardware_has_a_file_of_its_own(tmp_path, hardware, what):
    here = written(tmp_path, {PRODUCT: CHOICE})
    hardware[what] = "another"
    there = written(tmp_path, {PRODUCT: OTHER})
    assert there.file != here.file
    assert there.near(PRODUCT) == OTHER
    hardware[what] = HARDWARE[what]
    assert Choices(0, tmp_path).near(PRODUCT) == CHOICE


def document(**changes: Any) -> bytes:
    """A file with one choice, some of whose fields are changed; None removes a field."""
    fields = {key: value for key, value in {**asdict(CHOICE), **changes}.items() if value is not None}
    return json.dumps({"hardware": HARDWARE, "choices": {key_of(PRODUCT): fields}}).encode()


BROKEN = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"algorithm = 3",
    "truncated": document()[:-20],
    "truncated early": document()[:5],
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "no hardware": json.dumps({"choices": {}}).encode(),
    "no choices": json.dumps({"hardware": HARDWARE}).encode(),
    "foreign hardware": json.dumps({"hardware": {**HARDWARE, "gpu": "another"}, "choices": {}}).encode(),
    "foreign format": json.dumps({"hardware": {**HARDWARE, "format": 0}, "choices": {}}).encode(),
    "choices as a list": json.dumps({"hardware": HARDWARE, "choices": [asdict(CHOICE)]}).encode(),
    "a choice as a list": json.dumps({"hardware": HARDWARE, "choices": {key_of(PRODUCT): [3, 2, 1, 1, 0]}}).encode(),
    "a choice as a number": json.dumps({"hardware": HARDWARE, "choices": {key_of(PRODUCT): 3}}).encode(),
    "a field too many": document(colour="red"),
    "a field too few": document(error=None),
    "a key that is no product": document().replace(b"256x512x128", b"256x512"),
    "a key without a layout": document().replace(b" NTT", b""),
    "a key with too short a layout": document().replace(b"NTT", b"NT"),
    "a key with an unknown type": document().replace(b"bfloat16", b"bfloat17"),
}
WRONG_TYPES = {
    "an algorithm in words": document(algorithm="3"),
    "half an algorithm": document(algorithm=3.5),
    "a time in words": document(sparse_ms="fast"),
    "a list of times": document(dense_ms=[1.0]),
}


@pytest.mark.parametrize("content", [*BROKEN.values(), *WRONG_TYPES.values()], ids=[*BROKEN, *WRONG_TYPES])
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning_and_replaced(tmp_path, answering, content):
    file = Choices(0, tmp_path).file
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"is ignored \(.*searched again and it is replaced") as warned:
        choices = Choices(0, tmp_path)
    assert str(file) in str(warned[0].message)
    assert choices.found == {}
    assert file.read_bytes() == content, "nothing is replaced before there is something better"
    answering({PRODUCT: OTHER})
    assert choices.search([PRODUCT]) == {PRODUCT: OTHER}  # a second warning would be an error
    assert Choices(0, tmp_path).found == {key_of(PRODUCT): OTHER}


def test_the_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    choices = written(tmp_path, {PRODUCT: CHOICE})
    seen = []
    really_replace = os.replace

    def look_and_replace(source: str, target: Path) -> None:
        seen.append((Path(source).parent, json.loads(Path(source).read_text()), saved(choices), Path(target)))
        really_replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    written(tmp_path, {PRODUCT: OTHER})
    (folder, new, old, target) = seen[0]
    assert len(seen) == 1
    assert folder == tmp_path, "a rename is one step inside one file system only"
    assert target == choices.file
    assert old["choices"][key_of(PRODUCT)] == asdict(CHOICE), "the old file is whole until the new one is"
    assert new["choices"][key_of(PRODUCT)] == asdict(OTHER)
    assert list(tmp_path.iterdir()) == [choices.file]


def test_a_failed_replacement_warns_and_leaves_the_old_file_whole(tmp_path, monkeypatch):
    choices = written(tmp_path, {PRODUCT: CHOICE})

    def fail(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match=r"could not be saved in .*no space left on device"):
        written(tmp_path, {PRODUCT: OTHER})
    assert saved(choices)["choices"] == {key_of(PRODUCT): asdict(CHOICE)}


def test_what_other_processes_found_meanwhile_is_kept(tmp_path, answering):
    wide, tall = PRODUCT._replace(n=4096), PRODUCT._replace(m=4096)
    one, other = Choices(0, tmp_path), Choices(0, tmp_path)
    answering({wide: CHOICE, tall: OTHER})
    one.search([wide])
    other.search([tall])
    assert Choices(0, tmp_path).found == {key_of(wide): CHOICE, key_of(tall): OTHER}


def test_a_folder_that_cannot_be_written_warns_and_the_search_goes_on(tmp_path, answering):
    (tmp_path / "file").write_text("not a folder")
    choices = Choices(0, tmp_path / "file" / "below")
    fake = answering({PRODUCT: CHOICE})
    with pytest.warns(UserWarning, match="could not be saved"):
        assert choices.search([PRODUCT]) == {PRODUCT: CHOICE}
    assert choices.near(PRODUCT) == CHOICE
    assert choices.search([PRODUCT]) == {PRODUCT: CHOICE}
    assert fake.asked == [PRODUCT], "known in memory"


def test_only_unknown_products_are_searched_and_only_successes_are_kept(tmp_path, answering):
    known, new, hopeless = PRODUCT, PRODUCT._replace(m=64), PRODUCT._replace(m=8192)
    written(tmp_path, {known: CHOICE})
    choices = Choices(0, tmp_path)
    fake = answering({new: OTHER, hopeless: None})
    assert choices.search(iter([known, new, hopeless, new])) == {known: CHOICE, new: OTHER, hopeless: None}
    assert fake.asked == [new, hopeless]
    assert Choices(0, tmp_path).found == {key_of(known): CHOICE, key_of(new): OTHER}


def test_a_search_for_what_is_known_touches_neither_gpu_nor_file(tmp_path, monkeypatch):
    choices = written(tmp_path, {PRODUCT: CHOICE})
    choices.file.unlink()
    monkeypatch.setattr(torch, "cuda", None)
    assert choices.search([PRODUCT]) == {PRODUCT: CHOICE}
    assert not choices.file.exists()


def test_without_nvidia_smi_the_cuda_version_stands_for_the_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _search._driver(0) == f"cuda {torch.version.cuda}"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.1\necho 570.2\n")
    tool.chmod(0o755)
    assert _search._driver(0) == "570.1"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert _search._driver(0) == f"cuda {torch.version.cuda}"


# ---- neighbours ----


def near(product: Product, **found: Choice) -> Choice | None:
    choices = Choices(0, Path("/nonexistent"))
    choices.found = {key_of(PRODUCT): CHOICE, **found}
    return choices.near(product)


FORMS = {  # output or grad_input, grad_weight, a packed gradient: which size counts tokens
    "n": (False, True, True),
    "k": (True, False, False),
    "m": (False, False, False),
}


@pytest.mark.parametrize("tokens", ["m", "n", "k"])
@pytest.mark.parametrize("factor", [0.5, 0.75, 1.25, 2])
def test_up_to_twice_as_many_tokens_take_a_known_choice_and_other_sizes_do_not(tokens, factor):
    known = Product(*PRODUCT[:3], *FORMS[tokens], PRODUCT.dtype)
    for size in ("m", "n", "k"):
        asked = known._replace(**{size: int(getattr(known, size) * factor)})
        assert near(asked, **{key_of(known): CHOICE}) == (CHOICE if size == tokens else None)


@pytest.mark.parametrize("size", ["m", "n", "k"])
@pytest.mark.parametrize("factor", [0.25, 0.45, 2.125, 4])
def test_a_product_further_away_takes_none(size, factor):
    assert near(PRODUCT._replace(**{size: int(getattr(PRODUCT, size) * factor)})) is None


@pytest.mark.parametrize("sizes", [("m", "n"), ("m", "k"), ("n", "k"), ("m", "n", "k")], ids=str)
def test_a_product_that_differs_in_several_sizes_takes_none(sizes):
    assert near(PRODUCT._replace(**{size: getattr(PRODUCT, size) + 64 for size in sizes})) is None


@pytest.mark.parametrize(
    "change", [{"m_major": True}, {"b_transposed": False}, {"d_transposed": False}, {"dtype": torch.float16}], ids=str
)
def test_another_layout_or_type_takes_none(change):
    assert near(PRODUCT._replace(**change)) is None
    assert near(PRODUCT._replace(n=PRODUCT.n + 64, **change)) is None


def test_an_exact_choice_comes_before_a_neighbours():
    grown = PRODUCT._replace(n=PRODUCT.n + 64)
    assert near(grown) == CHOICE
    assert near(grown, **{key_of(grown): OTHER}) == OTHER


# ---- children ----

CHILD = """
import json, os, sys, time
notes = sys.argv[1]
def say(answer):
    print(json.dumps(answer), flush=True)
def note(name):
    open(os.path.join(notes, name), "w").close()
def noted(name):
    return os.path.exists(os.path.join(notes, name))
RIGHT = {"algorithm": 3, "split_k": 2, "sparse_ms": 0.125, "dense_ms": 0.25, "error": 0.001}
answered = 0
while line := sys.stdin.readline():
    question = json.loads(line)
    with open(os.path.join(notes, "questions"), "a") as file:
        file.write(json.dumps([os.getpid(), question]) + "\\n")
    excluded = question["excluded"]
"""


class Children:
    """Scripts in place of the processes that time algorithms, and what they were asked."""

    def __init__(self, notes: Path) -> None:
        self.notes, self.body, self.started = notes, "", []

    def start(self) -> subprocess.Popen[bytes]:
        source = CHILD + "".join(f"    {line}\n" for line in self.body.strip("\n").splitlines()) + "    answered += 1\n"
        command = [sys.executable, "-S", "-E", "-c", source, str(self.notes)]
        self.started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
        return self.started[-1]

    def questions(self) -> list[tuple[int, dict[str, Any]]]:
        """The child that was asked, counted from 0, and the question, in order."""
        numbers = {child.pid: index for index, child in enumerate(self.started)}
        lines = (self.notes / "questions").read_text().splitlines()
        return [(numbers[pid], question) for pid, question in map(json.loads, lines)]

    def asked(self) -> list[tuple[int, str, list[list[int]]]]:
        """The child, the product and what is excluded, of every question."""
        return [(child, question["key"], question["excluded"]) for child, question in self.questions()]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.notes / name).exists():
            assert time.monotonic() < deadline, f"no child noted {name}"
            time.sleep(0.01)


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    made = Children(tmp_path)
    monkeypatch.setattr(Searcher, "_start", lambda searcher: made.start())
    yield made
    for child in made.started:
        child.kill()
        with child:  # waits, and closes both pipes
            pass


TRIES = """
for candidate in ([-1, 1], [0, 1], [1, 1], [0, 2]):
    if candidate in excluded or candidate in [known[:2] for known in question["timed"]]:
        continue
    say({"trying": candidate})
    %s
    say({"timed": [*candidate, 0.5]})
say({"result": RIGHT})
"""
KEY = key_of(PRODUCT)


def test_a_child_is_asked_and_its_answer_believed(children):
    children.body = TRIES % "pass"
    assert Searcher(0).search(PRODUCT) == CHOICE
    assert children.asked() == [(0, KEY, [])]


def test_one_child_answers_many_questions(children):
    children.body = TRIES % "pass"
    searcher = Searcher(0)
    other = PRODUCT._replace(n=64)
    assert [searcher.search(PRODUCT), searcher.search(other)] == [CHOICE, CHOICE]
    assert children.asked() == [(0, KEY, []), (0, key_of(other), [])]


def test_no_algorithm_that_works_is_an_answer(children):
    children.body = 'say({"trying": [-1, 1]}); say({"result": None})'
    assert Searcher(0).search(PRODUCT) is None
    assert len(children.started) == 1


def test_answers_may_arrive_in_pieces(children):
    children.body = """
text = json.dumps({"trying": [-1, 1]}) + "\\n" + json.dumps({"trying": [0, 1]}) + "\\n" + json.dumps({"result": RIGHT}) + "\\n"
for start in range(0, len(text), 50):
    sys.stdout.write(text[start : start + 50])
    sys.stdout.flush()
    time.sleep(0.02)
"""
    assert Searcher(0).search(PRODUCT) == CHOICE


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_a_candidate_that_kills_its_child_is_excluded_and_a_new_child_goes_on(children, caplog, end):
    children.body = TRIES % f"if candidate == [1, 1]: {end}"
    with caplog.at_level(logging.WARNING, "nmsparse"):
        assert Searcher(0).search(PRODUCT) == CHOICE
    assert children.asked() == [(0, KEY, []), (1, KEY, [[1, 1]])]
    assert children.started[0].poll() is not None
    assert "algorithm [1, 1] broke or hung on 256x512x128 NTT bfloat16 and is excluded" in caplog.text


def test_several_bad_candidates_cost_one_child_each(children):
    children.body = TRIES % "if candidate in ([0, 1], [0, 2]): os._exit(1)"
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    assert children.asked() == [(0, KEY, []), (1, KEY, [[0, 1]]), (2, KEY, [[0, 1], [0, 2]])]
    assert searcher.search(PRODUCT) == CHOICE
    assert children.asked()[3:] == [(2, KEY, [[0, 1], [0, 2]])], "what is known to break is not tried again"


def test_a_candidate_is_excluded_for_all_sizes_of_the_layout_and_type_that_it_broke(children):
    children.body = TRIES % "if candidate == [0, 1]: os._exit(1)"
    searcher = Searcher(0)
    other_size, other_type = PRODUCT._replace(m=64, k=512), PRODUCT._replace(dtype=torch.float16)
    assert [searcher.search(product) for product in (PRODUCT, other_size, other_type)] == [CHOICE] * 3
    assert children.asked()[1:] == [
        (1, KEY, [[0, 1]]),
        (1, key_of(other_size), [[0, 1]]),
        (1, key_of(other_type), []),
        (2, key_of(other_type), [[0, 1]]),
    ]


def test_what_a_lost_child_timed_is_known_to_the_next_one(children):
    children.body = TRIES % "if candidate in ([1, 1], [0, 2]): os._exit(1)"
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    known = [[-1, 1, 0.5], [0, 1, 0.5]]
    assert [question["timed"] for _, question in children.questions()] == [[], known, known]
    assert searcher.search(PRODUCT._replace(n=64)) == CHOICE
    assert children.questions()[-1][1]["timed"] == [], "of another product"


def test_after_many_losses_only_what_was_timed_is_compared(children):
    children.body = """
if question["finish"]:
    say({"result": RIGHT})
else:
    say({"trying": [-1, 1]})
    say({"timed": [-1, 1, 0.5]})
    say({"trying": [len(excluded), 1]})
    os._exit(1)
"""
    assert Searcher(0).search(PRODUCT) == CHOICE
    finish = [question["finish"] for _, question in children.questions()]
    assert finish == [False] * (_search.CHILDREN // 2) + [True]


def test_a_product_that_breaks_every_child_is_given_up(children):
    children.body = 'say({"trying": [len(excluded), 1]}); os._exit(1)'
    assert Searcher(0).search(PRODUCT) is None
    assert [len(question["excluded"]) for _, question in children.questions()] == list(range(_search.CHILDREN))
    assert not any(question["finish"] for _, question in children.questions()), "nothing was timed that could be compared"


def test_a_child_that_falls_silent_is_killed_and_its_candidate_excluded(children, monkeypatch):
    monkeypatch.setattr(_search, "SILENCE_S", 2)
    monkeypatch.setattr(_search, "START_S", 2)
    children.body = TRIES % "if candidate == [0, 1]: time.sleep(1000)"
    assert Searcher(0).search(PRODUCT) == CHOICE
    assert children.asked()[-1] == (1, KEY, [[0, 1]])
    assert children.started[0].poll() == -9


def test_a_slow_child_that_keeps_talking_is_not_silent(children, monkeypatch):
    monkeypatch.setattr(_search, "SILENCE_S", 2)
    monkeypatch.setattr(_search, "START_S", 2)
    children.body = TRIES % "time.sleep(0.6)"  # four times, longer than the limit together
    assert Searcher(0).search(PRODUCT) == CHOICE
    assert len(children.started) == 1


def test_a_child_that_dies_before_it_begins_is_an_error_that_says_how_to_see_why(children):
    children.body = "os._exit(7)"
    with pytest.raises(RuntimeError, match=r"ended before it began \(exit status 7\).*python -m nmsparse.kernels._search"):
        Searcher(0).search(PRODUCT)
    assert len(children.started) == 1


def test_a_child_that_never_says_anything_is_killed_and_an_error(children, monkeypatch):
    monkeypatch.setattr(_search, "SILENCE_S", 0.5)
    monkeypatch.setattr(_search, "START_S", 0.5)
    children.body = "time.sleep(1000)"
    with pytest.raises(RuntimeError, match="before it began"):
        Searcher(0).search(PRODUCT)
    assert children.started[0].poll() == -9


def test_a_child_without_memory_says_so_and_can_be_asked_again(children, caplog):
    children.body = """
if answered == 0:
    say({"trying": [-1, 1]})
    say({"result": None, "why": "the GPU has too little free memory to time it"})
else:
    say({"result": RIGHT})
"""
    searcher = Searcher(0)
    with caplog.at_level(logging.WARNING, "nmsparse"):
        assert searcher.search(PRODUCT) is None
    assert "256x512x128 NTT bfloat16 is not searched: the GPU has too little free memory to time it" in caplog.text
    assert searcher.search(PRODUCT) == CHOICE
    assert children.asked() == [(0, KEY, []), (0, KEY, [])]


def test_children_that_are_done_with_leave_no_pipe_open(children):
    children.body = TRIES % "if candidate == [1, 1]: os._exit(1)"
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    assert searcher._stop() == -9
    assert searcher._stop() is None
    assert len(children.started) == 2
    for child in children.started:
        assert child.returncode is not None
        assert child.stdin.closed
        assert child.stdout.closed


def test_a_child_that_went_away_idle_is_replaced(children):
    children.body = 'say({"result": RIGHT}); os._exit(0)'
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    children.started[0].wait()
    assert searcher.search(PRODUCT) == CHOICE
    assert [number for number, _ in children.questions()] == [0, 1]


def test_a_child_that_no_longer_listens_is_replaced(children):
    children.body = """
say({"result": RIGHT})
if not noted("deaf"):
    os.close(0)
    note("deaf")
    time.sleep(1000)
"""
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    children.wait_for("deaf")
    assert searcher.search(PRODUCT) == CHOICE
    assert [number for number, _ in children.questions()] == [0, 1]


def test_a_child_that_leaves_with_a_question_unread_is_replaced(children):
    children.body = """
say({"result": RIGHT})
if not noted("leaving"):
    note("leaving")
    import select
    select.select([0], [], [])
    os._exit(0)  # as when it has been idle for long enough, and is asked while it shuts down
"""
    searcher = Searcher(0)
    assert searcher.search(PRODUCT) == CHOICE
    children.wait_for("leaving")
    assert searcher.search(PRODUCT) == CHOICE
    assert [number for number, _ in children.questions()] == [0, 1]


def test_each_device_keeps_one_searcher(monkeypatch):
    monkeypatch.setattr(_search, "_SEARCHERS", {})
    monkeypatch.setattr(atexit, "register", lambda function: None)
    assert _search._searcher(0) is _search._searcher(0)
    assert _search._searcher(1) is not _search._searcher(0)
    assert _search._searcher(1).device == 1


def test_random_operands_are_packed_matrices():
    torch.manual_seed(0)
    for product in (PRODUCT, PRODUCT._replace(m_major=True, dtype=torch.float16)):
        packed = random_packed(product.m, product.k, product.dtype, torch.device("cpu"))
        assert packed.dtype == product.dtype
        metadata = packed[product.m * product.k // 2 :].view(torch.uint8).long()
        assert (metadata & 15).unique().tolist() == [0x4, 0x8, 0x9, 0xC, 0xD, 0xE]
        assert (metadata >> 4).unique().tolist() == [0x4, 0x8, 0x9, 0xC, 0xD, 0xE]


# ---- the door ----

CUDA = torch.device("cuda", 0)


def test_on_the_cpu_nothing_serves_and_the_reason_is_said():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        selected = select(SPARSE_MATMUL, dtype, torch.device("cpu"))
        assert selected.name is None
        assert selected.reason == "sparse tensor cores need a CUDA GPU"


def test_an_operation_that_nobody_knows_is_named():
    selected = select("dense_sparse_dense", torch.bfloat16, torch.device("cpu"))
    assert selected.name is None
    assert selected.reason == "nothing serves dense_sparse_dense"


def test_a_type_that_the_engine_does_not_compute_in_is_named(monkeypatch):
    monkeypatch.setattr(_dispatch, "TABLE", [replace(row, unavailable=lambda device: None) for row in _dispatch.TABLE])
    assert select(SPARSE_MATMUL, torch.bfloat16, CUDA).name == "cusparselt"
    selected = select(SPARSE_MATMUL, torch.float32, CUDA)
    assert selected.name is None
    assert selected.reason == "cusparselt computes in bfloat16 and float16, not in float32"


def test_without_triton_the_reason_is_triton(monkeypatch):
    monkeypatch.setattr(_dispatch, "find_spec", lambda name: None)
    assert select(SPARSE_MATMUL, torch.bfloat16, CUDA).reason == "the pack kernels need Triton, which is not installed"


@pytest.fixture
def fresh_engine() -> Iterator[None]:
    _engine.unavailable.cache_clear()
    yield
    _engine.unavailable.cache_clear()


@pytest.mark.usefixtures("fresh_engine")
def test_another_generation_of_gpus_is_named(monkeypatch):
    monkeypatch.setattr(_dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    selected = select(SPARSE_MATMUL, torch.bfloat16, CUDA)
    assert selected.name is None
    assert selected.reason.endswith("Hopper GPUs (SM 9.0) only, and this one is SM 10.0")


@pytest.mark.usefixtures("fresh_engine")
@pytest.mark.parametrize("error", [OSError("no such file"), AttributeError("no symbol"), CusparseLtError("no GPU")])
def test_a_library_that_does_not_load_is_a_reason_and_not_an_error(monkeypatch, error):
    def fail() -> None:
        raise error

    monkeypatch.setattr(_dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(_engine, "library", fail)
    selected = select(SPARSE_MATMUL, torch.bfloat16, CUDA)
    assert selected.name is None
    assert selected.reason == f"cuSPARSELt, which torch's CUDA wheels bring, does not load ({error})"


def test_the_first_row_that_can_serves_and_the_reasons_of_the_others_are_joined(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(_dispatch, "TABLE", [*_dispatch.TABLE, _dispatch.REFERENCE])
    assert select(SPARSE_MATMUL, torch.bfloat16, cpu).name == "reference"
    selected = select(SPARSE_MATMUL, torch.float64, cpu)
    assert selected.name is None
    first, second = selected.reason.split("; ")
    assert first == "sparse tensor cores need a CUDA GPU"
    assert second.endswith("not in float64")


def test_a_process_that_cannot_start_is_not_started_for_every_number_of_tokens(monkeypatch, tmp_path):
    asked = []

    class Broken:
        def search(self, product):
            asked.append(product)
            raise _search.ChildFailedError("no context on this GPU")

    monkeypatch.setattr(_search, "hardware", lambda device: HARDWARE)
    monkeypatch.setattr(_search, "_searcher", lambda device: Broken())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    choices = Choices(0, tmp_path)
    with pytest.warns(UserWarning, match="no context on this GPU"):
        assert choices.search([PRODUCT]) == {PRODUCT: None}
    for tokens in (1024, 4096):  # a second warning would be an error
        product = PRODUCT._replace(n=tokens)
        assert choices.search([product]) == {product: None}
    assert asked == [PRODUCT]
