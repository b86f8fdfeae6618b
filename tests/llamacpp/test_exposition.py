"""llama-server's metrics are read as it writes them, and nothing else comes through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.exposition import MOST_CHARACTERS, MOST_SAMPLES, Family, Sample, parse

REAL = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 48
# HELP llamacpp:n_tokens_max Largest observed sequence length (prompt + generation)
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 1.5e+06
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
"""


def test_what_llama_server_writes() -> None:
    """b11549's lines: a counter, a maximum that is called one, a metric with a label."""
    position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert parse(REAL) == (
        Family(
            "prompt_tokens_total",
            "counter",
            "Number of prompt tokens processed, excluding cached tokens",
            (Sample((), 48.0),),
        ),
        Family("n_tokens_max", "gauge", "Largest observed sequence length (prompt + generation)", (Sample((), 1.5e6),)),
        Family(position, "counter", "", (Sample((("position", "0"),), 3.0), Sample((("position", "1"),), 2.0))),
    )


@pytest.mark.parametrize(
    "line",
    [
        "go_goroutines 7",
        "slotkeeper_engine_up 0",
        "llamacpp:Bad-Name 1",
        "llamacpp:x many",
        "llamacpp:x",
        '{"error": {"message": "no"}}',
        'llamacpp:x{a="\n"} 1',
    ],
)
def test_other_lines_are_left_out(line: str) -> None:
    """Whatever an address that is no llama-server says, ours stay ours."""
    assert parse(f"{line}\nllamacpp:y 1\n") == (Family("y", "gauge", "", (Sample((), 1.0),)),)


def test_an_engine_label_is_ours() -> None:
    """It says which engine; the engine cannot say it itself."""
    assert parse('llamacpp:x{engine="other"} 1')[0].samples == (Sample((), 1.0),)


def test_there_is_a_bound() -> None:
    """Series are not the engine's to multiply."""
    text = "".join(f"llamacpp:x{i} 1\n" for i in range(2 * MOST_SAMPLES))
    assert len(parse(text)) == MOST_SAMPLES
    assert parse("\n" * MOST_CHARACTERS + "llamacpp:x 1") == ()


def test_labels_have_one_order() -> None:
    """The engine's may change from line to line, and a name may come twice."""
    found = parse('llamacpp:x{a="1",b="2"} 1\nllamacpp:x{b="4",a="3"} 2\nllamacpp:x{a="0",a="3",b="4"} 3\n')
    assert found[0].samples == (Sample((("a", "1"), ("b", "2")), 1.0), Sample((("a", "3"), ("b", "4")), 3.0))


@given(
    st.text() | st.lists(st.sampled_from([*REAL.splitlines(), "llamacpp:x{", 'llamacpp:x{a="b"} NaN'])).map("\n".join)
)
def test_any_text(text: str) -> None:
    """Never raises; samples of one family have the same labels, each once."""
    for family in parse(text):
        assert len({tuple(name for name, _ in s.labels) for s in family.samples}) <= 1
        assert len({s.labels for s in family.samples}) == len(family.samples)
