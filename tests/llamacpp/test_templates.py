"""Changes of a template's text: what is found, what is left alone, and that twice is once."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp.templates import code, fix_clock, keep_reasoning, prints_clock
from policies.layout_text import placeholder

DATA = Path(__file__).parent.parent / "data"
QWEN = [(DATA / name).read_text() for name in ("qwen3.jinja", "qwen3.5.jinja")]
FIRST = "(template_date if template_date is defined else '[[env:template_date]]')"
SECOND = "(template_date_2 if template_date_2 is defined else '[[env:template_date_2]]')"


@pytest.mark.parametrize(
    ("template", "fixed"),
    [
        ('{{ strftime_now("%Y") }}', f"{{{{ {FIRST} }}}}"),
        ("{{- 'Today: ' + strftime_now( '%d %b' ) -}}", f"{{{{- 'Today: ' + {FIRST} -}}}}"),
        (
            '{% set d = strftime_now("%d") if strftime_now is defined else "x" %}{{ d }}',
            f'{{% set d = {FIRST} if strftime_now is defined else "x" %}}{{{{ d }}}}',
        ),
        ("{{ strftime_now('%Y')|trim }}", f"{{{{ {FIRST}|trim }}}}"),
        ("{{ {'a': {'}}': strftime_now('%Y')}} }}", f"{{{{ {{'a': {{'}}}}': {FIRST}}}}} }}}}"),
        (
            "{{ strftime_now('%H') }}{{ strftime_now(\"%H\") }}{{ strftime_now('%M') }}",
            f"{{{{ {FIRST} }}}}{{{{ {FIRST} }}}}{{{{ {SECOND} }}}}",
        ),
    ],
)
def test_calls_become_a_constant(template: str, fixed: str) -> None:
    """Wherever a call stands in an expression, in either kind of quotes; one name for each format."""
    clock = fix_clock(template, placeholder)
    assert clock.text == fixed
    assert not prints_clock(clock.text)
    assert fix_clock(clock.text, placeholder).text == fixed


@pytest.mark.parametrize(
    "template",
    [
        "strftime_now('%Y')",
        "{# {{ strftime_now('%Y') }} #}",
        "{{ \"strftime_now('%Y')\" }}",
        "{{ 'it\\'s {{ strftime_now(' }}",
        "{% if strftime_now is defined %}{% endif %}",
        "{{ date.strftime_now('%Y') }}",
        "{{ message.date_string }}{{ message['datetime'] }}{{ f(datetime=1) }}",
        "{% if date_string is defined %}x{% endif %}",
        "{{ 'cut",
        "{#",
        "{{",
    ],
)
def test_what_is_no_clock(template: str) -> None:
    """Text, comments, strings, attributes, questions, and templates that end too early."""
    assert not prints_clock(template)
    assert fix_clock(template, placeholder).text == template
    assert fix_clock(template, placeholder).values == ()


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now(form) }}",
        "{{ strftime_now('%Y' + form) }}",
        "{{ strftime_now('\\x25Y') }}",
        "{{ strftime_now('%Y')|int }}",
        "{{ strftime_now('%Y')[2:] }}",
        "{{ strftime_now('%d').lstrip('0') }}",
        "{% if strftime_now('%H') < '12' %}morning{% endif %}",
        "{% set d = strftime_now('%d-%m') %}{{ d.split('-')[0] }}",
        "{{ date_string[:2] }}",
    ],
)
def test_clocks_that_cannot_stand_still(template: str) -> None:
    """A computed format, and results that the template itself works with: they stay, and are found."""
    assert fix_clock(template, placeholder).text == template
    assert fix_clock(template, placeholder).values == ()
    assert prints_clock(template)


def test_variables_that_the_engine_sets() -> None:
    """llama.cpp's own `date_string`: nothing in the text changes, the engine is given it; a client's goes first."""
    template = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    clock = fix_clock(template + "{{ date_string }} {{ datetime }}", placeholder)
    assert clock.values == (("template_date", "%d %b %Y"), ("template_date_2", "%b %d %Y"))
    assert clock.defaults == (("date_string", "[[env:template_date]]"), ("datetime", "[[env:template_date_2]]"))
    assert clock.arguments == (
        ("template_date", "template_date"),
        ("date_string", "template_date"),
        ("datetime", "template_date_2"),
    )
    assert prints_clock(clock.text) and prints_clock(clock.text, ["date_string"])
    assert not prints_clock(clock.text, ["date_string", "datetime"])


@given(
    st.lists(st.sampled_from(["{{", "}}", "{%", "%}", "{#", "#}", "'", '"', "\\", "strftime_now", "('%Y')", " ", "x"]))
)
def test_any_text(parts: list[str]) -> None:
    """Tokens lie in order within the text; a change is idempotent; nothing raises."""
    text = "".join(parts)
    tokens = list(code(text))
    assert all(text[t.start : t.end] == t.text for t in tokens if t.kind != "open")
    assert all(a.end <= b.start for a, b in pairwise(tokens))
    once = fix_clock(text, placeholder).text
    assert fix_clock(once, placeholder).text == once
    assert keep_reasoning(text) is None


@pytest.mark.parametrize("template", QWEN, ids=["qwen3", "qwen3.5"])
def test_reasoning_is_kept_by_one_condition(template: str) -> None:
    """All else stays as it is, and twice is once."""
    old, new = "loop.index0 > ns.last_query_index", "(loop.index0 > ns.last_query_index or reasoning_content)"
    assert template.count(old) == 1
    assert keep_reasoning(template) == template.replace(old, new)
    assert keep_reasoning(template.replace(old, new)) == template.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loop.index0 > ns.last_query_index", "loop.index0 >= ns.last_query_index"),
        ("loop.index0 > ns.last_query_index", "not (loop.index0 > ns.last_query_index)"),
        ("loop.index0 > ns.last_query_index", "true"),
        ("reasoning_content", "thoughts"),
        ("{%- set reasoning_content", "{%- set other"),
        ("{{- '<|im_start|>' + message.role + '\\n<think>", "{{- '' }}{#"),
        (
            "{%- if add_generation_prompt",
            "{%- if loop.index0 > ns.last_query_index %}{%- endif %}{%- if add_generation_prompt",
        ),
    ],
)
def test_other_structures_are_not_recognised(old: str, new: str) -> None:
    """Whatever is not surely the family's way of dropping reasoning is left alone."""
    assert old in QWEN[0]
    assert keep_reasoning(QWEN[0].replace(old, new)) is None


def test_templates_of_others() -> None:
    """Those of the other tests know nothing of it."""
    names = ("alternating.jinja", "chatml-tools.jinja", "clock.jinja", "strict.jinja", "think.jinja")
    assert [keep_reasoning((DATA / name).read_text()) for name in names] == [None] * 5
