"""Any history that grows, against its line's ledger: append-only, complete, repaired once."""

from __future__ import annotations

import copy
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.types import Match
from tests.proxy.talk import (
    Json,
    Talk,
    answer,
    call,
    is_prefix,
    new_service,
    result,
    sent,
    system,
    text,
    user,
)

WORD = st.sampled_from(["alpha", "beta", "gamma", "delta", "<system-reminder>note</system-reminder>", "é", ""])
STEP = st.one_of(
    st.tuples(st.just("user"), WORD),
    st.tuples(st.just("tools"), st.integers(1, 2), WORD),
)


def grown(steps: list[Any]) -> list[list[Json]]:
    """A history after each of its requests."""
    history: list[Json] = []
    after = []
    for i, (what, *how) in enumerate(steps):
        if what == "user":
            history = [*history, user(f"{i} {how[0]}")]
        else:
            ids = [f"c{i}-{n}" for n in range(how[0])]
            calls = [c for id_ in ids for c in call(id_=id_)["tool_calls"]]
            history = [*history, answer("", tool_calls=calls), *(result(f"{i} {how[1]}", id_) for id_ in ids)]
        after.append(history)
        history = [*history, answer(f"answer {i}")] if what == "user" else history
    return after


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=5), st.data())
def test_any_history_that_grows_is_append_only_and_loses_nothing(steps: list[Any], data: st.DataObject) -> None:
    talk = Talk()
    before = alone_before = None
    dates = ["Sun Nov 29 2026", "Mon Nov 30 2026"]
    for history in grown([("user", "start"), *steps]):
        date = data.draw(st.sampled_from(dates))
        messages = [system(date), *copy.deepcopy(history)]
        for message in messages[1:-1]:
            if message["role"] == "user" and data.draw(st.booleans()):
                message["content"] = [{"type": "text", "text": message["content"]}]
        prepared = talk.send(messages)
        assert before is None or (prepared.found.match is Match.EXTENDS and is_prefix(before, prepared))
        for fact in (date, *(m["content"] for m in history if isinstance(m["content"], str))):
            assert orjson.dumps(fact).decode()[1:-1] in text(prepared)
        again = Talk().ask(sent(prepared))
        assert sent(again) == sent(prepared)
        before = prepared
        alone = Talk(new_service()).ask([system(), *history])
        assert alone_before is None or is_prefix(alone_before, alone)
        alone_before = alone
