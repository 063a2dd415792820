import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmsparse import Pattern


@given(st.integers(1, 1024).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))))
def test_every_legal_pair_reads_back_as_itself(pair):
    n, m = pair
    pattern = Pattern(n, m)
    assert (pattern.n, pattern.m) == (n, m)
    assert str(pattern) == f"{n}:{m}"
    assert Pattern(str(pattern)) == Pattern(pattern) == pattern
    assert eval(repr(pattern)) == pattern
    assert pattern.density == n / m


def test_two_four_keeps_two_of_four():
    pattern = Pattern("2:4")
    assert (pattern.n, pattern.m, pattern.density) == (2, 4, 0.5)


def test_spaces_around_the_numbers_are_read():
    assert Pattern(" 2 : 4 ") == Pattern("2:4")


@pytest.mark.parametrize("spec", ["1:1", "4:4", "1024:1024"])
def test_keeping_everything_is_a_pattern(spec):
    assert Pattern(spec).density == 1.0


def test_equal_patterns_are_one_dictionary_key():
    assert {Pattern("2:4"): "a"}[Pattern(2, 4)] == "a"
    assert Pattern("2:4") != Pattern("1:2")


def test_patterns_cannot_be_changed():
    pattern = Pattern("2:4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.n = 1


def test_copies_and_pickles_are_equal():
    pattern = Pattern("3:8")
    assert copy.deepcopy(pattern) == pickle.loads(pickle.dumps(pattern)) == pattern


@pytest.mark.parametrize("spec", ["", "2", "2-4", "2:", ":4", "2:4:8", "a:b", "2.0:4", "-2:4", "2/4", "nm_2,4"])
def test_strings_that_are_no_pattern_are_quoted_in_the_error(spec):
    with pytest.raises(ValueError, match="is not a pattern: write two whole numbers with a colon") as error:
        Pattern(spec)
    assert str(error.value).startswith(repr(spec))


@pytest.mark.parametrize(("n", "m"), [(0, 4), (5, 4), (0, 0), (-1, 4)])
def test_a_pattern_keeps_at_least_one_and_at_most_all(n, m):
    with pytest.raises(ValueError, match=f'pattern "{n}:{m}" keeps {n} of {m}: it must keep at least 1 and at most all'):
        Pattern(n, m)


def test_a_string_that_keeps_more_than_all_says_so():
    with pytest.raises(ValueError, match='pattern "5:4" keeps 5 of 4'):
        Pattern("5:4")


def test_groups_above_the_largest_size_are_refused():
    assert Pattern(1, 1024).m == 1024
    with pytest.raises(ValueError, match='pattern "1:1025" has groups of 1025; the largest group is 1024'):
        Pattern("1:1025")


@pytest.mark.parametrize("spec", [2, 2.0, None, [2, 4], (2, 4), b"2:4"])
def test_other_types_are_quoted_in_the_error(spec):
    with pytest.raises(TypeError, match='a pattern is written as a string such as "2:4", got ') as error:
        Pattern(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize(("spec", "m"), [("2:4", 4), (Pattern("2:4"), 4), (2.0, 4), (2, 4.0), (True, 4), (2, "4")])
def test_a_second_argument_goes_with_a_whole_number_only(spec, m):
    with pytest.raises(TypeError, match=f"and {m!r}"):
        Pattern(spec, m)
