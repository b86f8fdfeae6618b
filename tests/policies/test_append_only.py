"""Histories against their ledger: appended, repaired, pruned, given up, edited."""

import copy
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.append_only import (
    Appended,
    Diverged,
    Repaired,
    aligned,
    is_placeholder,
    normal,
    normal_digest,
    reconcile,
)
from policies.append_only_data import PRUNED
from policies.message_parts import reminders, without_reminders
from policies.reminders import moved_reminders, new_reminders
from tests.policies.respellings import DEFAULTS, IMAGE, Message, assistants, call, messages, respelled

CLEARED = "[Old tool result content cleared]"
R, S = "<system-reminder>r</system-reminder>", "<system-reminder>s</system-reminder>"


def say(role: str, content: object, **more: object) -> Message:
    return {"role": role, "content": content, **more}


def part(text: str) -> Message:
    return {"type": "text", "text": text}


def step(n: int, result: object = None) -> list[Message]:
    """A call and its result."""
    calls = [call("edit", f'{{"path": "f{n}"}}', f"c{n}")]
    result = f"result {n} " * 40 if result is None else result
    return [say("assistant", "", tool_calls=calls), say("tool", result, tool_call_id=f"c{n}")]


def loop(*results: object) -> list[Message]:
    return [say("user", "do"), *(m for n, result in enumerate(results) for m in step(n, result))]


def reconciled(ledger: list[Message], incoming: list[Message], **more: bool) -> Any:
    return reconcile(ledger, incoming, DEFAULTS, **more)


histories = st.lists(messages(), min_size=1, max_size=6)


@settings(max_examples=50)
@given(histories, st.lists(messages(), max_size=3))
def test_what_only_appends_is_appended(ledger: list[Message], new: list[Message]) -> None:
    assert reconciled(ledger, ledger + new) == Appended(len(ledger))
    assert reconciled(ledger, copy.deepcopy(ledger) + new) == Appended(len(ledger))


@settings(max_examples=50)
@given(st.data(), histories, st.lists(messages(), max_size=3))
def test_other_words_are_repaired(data: st.DataObject, ledger: list[Message], new: list[Message]) -> None:
    incoming = [data.draw(respelled(message)) for message in ledger] + new
    before = copy.deepcopy((ledger, incoming))
    got = reconciled(ledger, incoming)
    assert isinstance(got, Appended | Repaired)
    assert got.n_shared == len(ledger)
    if isinstance(got, Appended):
        assert [m["content"] for m in ledger] == [m["content"] for m in incoming[: len(ledger)]]
    assert (ledger, incoming) == before


@settings(max_examples=50)
@given(st.data(), histories, messages(), st.lists(messages(), max_size=3))
def test_an_edit_diverges_where_it_is(
    data: st.DataObject, ledger: list[Message], edited: Message, new: list[Message]
) -> None:
    at = data.draw(st.integers(0, len(ledger) - 1))
    assume(normal(edited, DEFAULTS) != normal(ledger[at], DEFAULTS))
    assume(edited["role"] != "tool")
    got = reconciled(ledger, [*ledger[:at], edited, *ledger[at + 1 :], *new])
    assert isinstance(got, Diverged)
    assert (got.at, got.n_shared) == (at, at)


@given(histories, st.data())
def test_a_history_that_ends_early_is_shorter(ledger: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ledger) - 1))
    assert reconciled(ledger, ledger[:at]) == Diverged(at, "shorter", at)


@given(st.lists(messages() | st.sampled_from([say("user", R), say("user", S)]), max_size=6), st.data())
def test_lists_of_any_kind_get_an_answer_that_adds_up(ledger: list[Message], data: st.DataObject) -> None:
    pool = st.sampled_from([*ledger, say("user", R), say("tool", CLEARED, tool_call_id="c1"), say("user", "new")])
    incoming = data.draw(st.lists(pool, max_size=8))
    for apply in (False, True):
        got = reconciled(ledger, incoming, apply_prunes=apply)
        at = got.at if isinstance(got, Diverged) else len(ledger)
        deferred = set(getattr(got, "deferred", ()))
        assert at <= len(ledger) and got.n_shared <= len(incoming)
        # What is shared is equal but for reminder-only messages and deferred prunes.
        forms = [
            [form for m in part if (form := normal(m, DEFAULTS)) != normal(say("user", R), DEFAULTS)]
            for part in (ledger[:at], incoming[: got.n_shared])
        ]
        assert len(forms[0]) == len(forms[1])
        if not deferred and not isinstance(got, Diverged):
            assert forms[0] == forms[1]
        # What the ledger does not tell is listed as new.
        held = [block for message in ledger[:at] for block in reminders(message)]
        told = held + list(new_reminders(ledger[:at], incoming[: got.n_shared]))
        for block in {block for message in incoming[: got.n_shared] for block in reminders(message)}:
            assert block in told


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"role": "developer"}, "role"),
        ({"content": "other"}, "content"),
        ({"tool_calls": [call("edit", "{}", "c0")]}, "calls"),
        ({"tool_calls": [call("edit", '{"path": "f0"}', "c7")]}, "call_ids"),
        ({"tool_calls": None}, "calls"),
        ({"weight": 1}, "keys"),
    ],
)
def test_a_divergence_says_why(change: Message, why: str) -> None:
    ledger = loop(None, None)
    incoming = [ledger[0], {**ledger[1], **change}, *ledger[2:]]
    assert reconciled(ledger, incoming) == Diverged(1, why, 1)


def test_a_result_of_another_call_diverges() -> None:
    ledger = loop(None)
    incoming = [*ledger[:2], {**ledger[2], "tool_call_id": "c5"}]
    assert reconciled(ledger, incoming) == Diverged(2, "call_ids", 2)


@settings(max_examples=50)
@given(st.data(), histories, st.lists(messages(), max_size=2))
def test_notes_in_the_ledger_are_no_difference(data: st.DataObject, sent: list[Message], new: list[Message]) -> None:
    """The proxy puts changed values into messages; the client does not know."""
    digests = [normal_digest(message, DEFAULTS) for message in sent]
    noted = [{**m, "content": f"<context>now</context>{m['content']}"} if data.draw(st.booleans()) else m for m in sent]
    got = reconcile(noted, [*sent, *new], DEFAULTS, digests=digests)
    assert got == Appended(len(sent))
    respelt = [data.draw(respelled(message)) for message in sent]
    got = reconcile(noted, [*respelt, *new], DEFAULTS, digests=digests)
    assert not isinstance(got, Diverged) and got.n_shared == len(sent)


def test_prunes_are_seen_in_noted_messages() -> None:
    sent = loop(None, "ok", "ok", "ok")
    digests = [normal_digest(message, DEFAULTS) for message in sent]
    ledger = [{**m, "content": f"{m['content']}\n\n<context>now</context>"} if m["role"] == "tool" else m for m in sent]
    assert reconcile(ledger, sent, DEFAULTS, digests=digests) == Appended(len(sent))
    pruned = [*sent[:2], {**sent[2], "content": CLEARED}, *sent[3:]]
    assert reconcile(ledger, pruned, DEFAULTS, digests=digests) == Repaired(len(sent), ("prune",), (2,))
    edited = [*sent[:4], {**sent[4], "content": "no"}, *sent[5:]]
    assert reconcile(ledger, edited, DEFAULTS, digests=digests) == Diverged(4, "content", 4)


# --- prunes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CLEARED, f" {CLEARED}\n", "Old environment output: (12 lines omitted)"])
@pytest.mark.parametrize("as_parts", [True, False])
def test_a_known_placeholder_is_deferred(text: str, as_parts: bool) -> None:
    ledger = loop(None, None, "short")
    content = [{"type": "text", "text": text}] if as_parts else text
    incoming = [*ledger[:2], {**ledger[2], "content": content}, *ledger[3:], say("user", "next")]
    assert reconciled(ledger, incoming) == Repaired(len(ledger), ("prune",), (2,))
    assert reconciled(ledger, incoming, apply_prunes=True) == Diverged(2, "pruned", 2)


def test_an_unknown_short_text_is_deferred_when_it_stands_for_several() -> None:
    ledger = loop(None, None, None)
    gone = [m if m["role"] != "tool" else {**m, "content": "gone"} for m in ledger]
    assert reconciled(ledger, [*gone[:5], *ledger[5:]]) == Repaired(7, ("prune",), (2, 4))
    assert reconciled(ledger, [*gone[:3], *ledger[3:]]) == Diverged(2, "content", 2)
    different = [*gone[:3], ledger[3], {**gone[4], "content": "gone too"}, *ledger[5:]]
    assert reconciled(ledger, different) == Diverged(2, "content", 2)


@pytest.mark.parametrize("length", [119, 120])
def test_what_is_long_is_no_placeholder(length: int) -> None:
    ledger = loop("x" * 200, "y" * 200)
    incoming = [m if m["role"] != "tool" else {**m, "content": "z" * length} for m in ledger]
    assert isinstance(reconciled(ledger, incoming), Repaired) == (length < 120)


def test_a_result_that_grew_is_no_prune() -> None:
    ledger = loop("a", "b")
    incoming = [m if m["role"] != "tool" else {**m, "content": CLEARED} for m in ledger]
    assert reconciled(ledger, incoming) == Diverged(2, "content", 2)


def test_pictures_are_pruned_and_do_not_prune() -> None:
    ledger, words = loop([IMAGE]), loop("long " * 50)
    assert reconciled(ledger, loop(CLEARED)) == Repaired(3, ("prune",), (2,))
    assert reconciled(words, loop([{"type": "text", "text": CLEARED}, IMAGE])) == Diverged(2, "content", 2)


def test_an_edit_before_a_prune_is_the_divergence() -> None:
    ledger = loop(None, None)
    incoming = [say("user", "edited"), *ledger[1:4], {**ledger[4], "content": CLEARED}]
    assert reconciled(ledger, incoming, apply_prunes=True) == Diverged(0, "content", 0)
    late = [*ledger[:2], {**ledger[2], "content": CLEARED}, {**ledger[3], "content": "edited"}, ledger[4]]
    assert reconciled(ledger, late, apply_prunes=True) == Diverged(2, "pruned", 2)
    assert reconciled(ledger, late) == Diverged(3, "content", 3, ("prune",), (2,))


def test_an_edited_result_before_a_prune_is_the_divergence() -> None:
    ledger = loop(None, None)
    incoming = [*ledger[:2], {**ledger[2], "content": "no"}, ledger[3], {**ledger[4], "content": CLEARED}]
    for apply in (True, False):
        assert reconciled(ledger, incoming, apply_prunes=apply) == Diverged(2, "content", 2)


def test_true_is_not_1() -> None:
    one, other = ([say("assistant", "", tool_calls=[call("edit", {"a": each}, "c1")])] for each in (1, True))
    assert reconciled(one, other) == Diverged(0, "calls", 0)


def test_a_call_id_that_names_several_results_prunes_nothing() -> None:
    ledger = [*loop(None), *step(0)]
    pruned = [*ledger[:2], {**ledger[2], "content": CLEARED}, *ledger[3:]]
    assert reconciled(ledger, pruned) == Diverged(2, "content", 2, ("gave_up",))
    assert reconciled(ledger, ledger) == Appended(len(ledger))


def test_only_results_are_pruned() -> None:
    ledger = [say("user", "long " * 100), say("assistant", "long " * 100)]
    for at in (0, 1):
        incoming = [*ledger[:at], {**ledger[at], "content": CLEARED}, *ledger[at + 1 :]]
        assert isinstance(reconciled(ledger, incoming), Diverged)


@pytest.mark.parametrize("text", sorted(PRUNED))
def test_known_placeholders_are_known(text: str) -> None:
    assert is_placeholder(text) and is_placeholder(f"\n{text} ")
    assert not is_placeholder(f"{text} and more")
    assert not is_placeholder(f"see {text}")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("[Old inline media cleared: image/png]", True),
        ("[Old tool result content cleared: 1234 chars]", True),
        ("[Tool result cleared - aged 5min, was 100 chars]", True),
        ("[Tool result cleared] [and more]", False),
        ("[Old tool result content clearedness]", False),
        ("ok", False),
        ("", False),
        (CLEARED + " " * 3_000, False),
    ],
)
def test_shapes_of_placeholders(text: str, is_one: bool) -> None:
    assert is_placeholder(text) == is_one


# --- reminders ------------------------------------------------------------------------------------------------------


def test_messages_that_are_reminders_come_and_go() -> None:
    ledger = [say("user", "do"), say("assistant", "a"), say("user", R), say("user", "more")]
    without = [ledger[0], ledger[1], ledger[3]]
    assert reconciled(ledger, [*without, say("assistant", "b")]) == Repaired(3, ("reminder",))
    assert reconciled(without, [*ledger, say("assistant", "b")]) == Repaired(4, ("reminder",))
    assert new_reminders(without, ledger) == (R,)
    assert new_reminders(ledger, without) == ()


def test_what_is_skipped_before_the_end_is_not_shared() -> None:
    ledger = [say("user", "do"), say("assistant", "a")]
    assert reconciled(ledger, [ledger[0], say("user", R)]) == Diverged(1, "shorter", 1)
    assert reconciled([say("user", R)], [say("user", "do")]) == Diverged(0, "content", 0, ("reminder",))
    late = [ledger[0], say("user", R), say("assistant", "b")]
    assert reconciled(ledger, late) == Diverged(1, "role", 1)


def test_new_reminders_are_counted() -> None:
    ledger = [say("user", f"{R}a"), say("tool", f"b{R}{S}")]
    assert new_reminders(ledger, [say("user", f"{R}{R}{S}")]) == ()
    assert new_reminders(ledger, [say("user", f"{R}{R}{R}{S}"), say("user", S)]) == (R, S)
    assert new_reminders([say("assistant", R)], [say("user", R)]) == (R,)


def test_a_moved_reminder_is_seen() -> None:
    ledger = [say("user", f"{R}a"), say("assistant", "b")]
    incoming = [say("user", "a"), say("assistant", "b"), say("user", f"c{R}{S}")]
    got = reconciled(ledger, incoming)
    assert got == Repaired(2, ("reminder",))
    assert moved_reminders(ledger, incoming, got.n_shared) == (R,)
    assert moved_reminders(ledger, [*ledger, say("user", R)], 2) == ()


def test_a_reminder_that_another_followed_is_not_told_yet() -> None:
    """What came between may have said the contrary; what moves along did not."""
    bare = [say("user", "a"), say("assistant", "b")]
    ledger = [say("user", f"{R}a{S}"), bare[1]]
    assert moved_reminders(ledger, [say("user", f"a{S}"), bare[1], say("user", R)], 2) == ()
    assert moved_reminders(ledger, [*bare, say("user", f"{R}{S}")], 2) == (R, S)
    other = "<new-reminder>c</new-reminder>"
    assert moved_reminders(ledger, [*bare, say("user", f"{S}{other}{R}")], 2) == (S,)


def test_the_places_of_messages_that_came_and_went() -> None:
    ledger = [say("user", "do"), say("user", R), say("assistant", "a"), say("user", "more")]
    incoming = [ledger[0], ledger[2], say("user", S), ledger[3], say("assistant", "b")]
    assert aligned(ledger, incoming, {}) == ([0, None, 1, 3], 4)
    assert aligned(ledger, ledger, {}) is None
    assert aligned(ledger, [ledger[0], say("assistant", "other"), ledger[3]], {}) is None
    assert aligned(ledger, [ledger[0], ledger[2], say("user", "other")], {}) == ([0, None, 1], 2)


def test_reminders_are_taken_out_as_often_as_asked() -> None:
    message = say("tool", [part(f"{R} a {R}"), part(S), {"type": "image_url"}])
    assert without_reminders(message, [R, S])["content"] == [part(f"a {R}"), {"type": "image_url"}]
    assert without_reminders(message, ["x"]) is message
    assert without_reminders(say("assistant", R), [R]) == say("assistant", R)


# --- turns that were given up ---------------------------------------------------------------------------------------


@given(assistants(call_ids=[]))
def test_an_interrupted_answer_only_appends(reply: Message) -> None:
    ledger = [say("user", "do")]
    for told in ([reply], [{**reply, "content": reply["content"][:1]}], []):
        incoming = [*ledger, *told, say("user", "go on")]
        assert reconciled(ledger, incoming) == Appended(1)


def test_a_turn_that_vanished_is_given_up() -> None:
    before = [say("user", "do"), say("assistant", "done")]
    ledger = [*before, say("user", "next"), *step(0)]
    assert reconciled(ledger, [*before, say("user", "else")]) == Diverged(2, "cancelled", 2)
    assert reconciled(ledger[:3], [*before, say("user", "nextelse")]) == Diverged(2, "cancelled", 2)
    assert reconciled(ledger, [*before, say("user", "else"), say("system", "late")]) == Diverged(2, "cancelled", 2)
    answered = [*before, say("user", "else"), say("assistant", "so"), say("user", "what")]
    assert reconciled(ledger, answered) == Diverged(2, "content", 2)
    earlier = [*ledger, say("user", "third")]
    assert reconciled(earlier, [*before, say("user", "else")]) == Diverged(2, "content", 2)


def test_an_answer_that_vanished_is_given_up() -> None:
    ledger = loop(None)
    assert reconciled(ledger, [ledger[0], say("user", "else")]) == Diverged(1, "cancelled", 1)
    assert reconciled(ledger, [*ledger[:2], say("user", "else")]) == Diverged(2, "cancelled", 2)
    assert reconciled(ledger, [ledger[0], say("assistant", "no"), say("user", "else")]) == Diverged(1, "content", 1)


@pytest.mark.parametrize("empty", [say("assistant", None), say("assistant", " ", reasoning_content="Hm")])
def test_empty_answers_come_and_go(empty: Message) -> None:
    ledger = [say("user", "do"), empty, say("user", "go on")]
    without = [ledger[0], ledger[2]]
    assert reconciled(ledger, [*without, say("assistant", "b")]) == Repaired(2, ("empty_turn",))
    assert reconciled(without, [*ledger, say("assistant", "b")]) == Repaired(3, ("empty_turn",))


def test_another_first_prompt_is_another_conversation() -> None:
    ledger = [say("system", "s"), say("user", "do")]
    assert reconciled(ledger, [ledger[0], say("user", "make")]) == Diverged(1, "content", 1)
    assert reconciled(ledger, [ledger[0], say("user", "dothat")]) == Diverged(1, "cancelled", 1)


def test_messages_of_any_shape_are_taken() -> None:
    odd: list[Any] = [None, 1, "a", [], {}, {"role": []}, {"role": "tool", "content": 3, "tool_call_id": {}}]
    assert isinstance(reconciled(odd, odd), Appended | Repaired)
    for at, one in enumerate(odd):
        for other in odd[at + 1 :]:
            assert isinstance(reconciled([one], [other]), Diverged)
