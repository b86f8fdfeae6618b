"""What the model was told last is what the client says now."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.message_parts import inner_of, reminders
from policies.reminders import MOST_COMPARED, overtaken


def block(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


PLAN, BUILD = block("The current mode is plan."), block("The current mode is build.")
FILES = block("These are the files of the project: a.py b.py")


def test_inner_of() -> None:
    """Tag and text, whatever attributes the tag has."""
    for text in (PLAN, '<a-reminder id="1">x < y</a-reminder>'):
        assert reminders({"role": "user", "content": text}) == (text,)
    assert inner_of(PLAN) == ("system-reminder", "The current mode is plan.")
    assert inner_of('<a-reminder id="1">x < y</a-reminder>') == ("a-reminder", "x < y")


def test_another_version_told_last() -> None:
    """It is told again; what is independent of it is not."""
    assert overtaken([FILES, PLAN, BUILD], [FILES, PLAN]) == (PLAN,)
    assert overtaken([FILES, PLAN, BUILD, PLAN], [FILES, PLAN]) == ()
    assert overtaken([FILES, PLAN, BUILD], [FILES, PLAN, BUILD]) == ()
    assert overtaken([FILES, PLAN, BUILD], [FILES, BUILD]) == ()
    assert overtaken([FILES, PLAN, BUILD], [BUILD, PLAN, FILES]) == (PLAN,), "the client's order counts"
    three = block("The current mode is ask.")
    assert overtaken([PLAN, BUILD, three], [three, BUILD]) == (BUILD,), "told late, and not the newest"
    assert overtaken([three], [PLAN]) == (), "not told at all is another matter"


def test_what_returned() -> None:
    """What was told in between has taken its place, however it begins; not what the client still says."""
    build = block("You may edit files again.")
    assert overtaken([PLAN, build], [PLAN]) == ()
    assert overtaken([PLAN, build], [PLAN], {PLAN}) == (PLAN,)
    assert overtaken([PLAN, build], [PLAN, build], {PLAN}) == ()


def test_bounds() -> None:
    """Of very many only the newest are compared."""
    many = [block(f"{i} is what counts here") for i in range(4 * MOST_COMPARED)]
    assert overtaken([*many, BUILD], [PLAN, *many]) == ()
    assert overtaken([PLAN, *many, BUILD], [*many, PLAN]) == (PLAN,)


VERSIONS = st.sampled_from([f"<{tag}-reminder>{text}</{tag}-reminder>" for tag in "ab" for text in ("x", "y", "z")])


@given(st.lists(VERSIONS, max_size=8), st.lists(VERSIONS, max_size=8))
def test_the_last_word(told: list[str], said: list[str]) -> None:
    """Of each kind of reminder the model is told that last which the client says last; nothing is told in vain."""
    told = [*told, *(b for b in said if b not in told)]
    again = overtaken(told, said)
    read = [*told, *again]
    for tag in "ab":
        kind = [b for b in said if b.startswith(f"<{tag}")]
        assert not kind or kind[-1] == [b for b in read if b.startswith(f"<{tag}")][-1]
    assert overtaken(read, said) == ()
    assert len(set(again)) == len(again)
