"""The rules: each matches its example, takes volatile values out and leaves instructions and tool semantics alone."""

import pytest

from policies.layout import lay_out
from policies.layout_check import MAX_LINE, MIN_LINE, compiled, line_limit
from policies.layout_rules import RULES, Rule, check_rules
from tests.policies.layout_cases import STATIC, VOLATILE


def taken(text: str, *rules: Rule) -> dict[str, str]:
    leading, tools = [{"role": "system", "content": text}], [{"function": {"description": text}}]
    in_tool = bool(rules) and rules[0].where == "tools"
    laid = lay_out([] if in_tool else leading, tools if in_tool else None, rules=rules or RULES)
    return {value.name: value.text for value in laid.values}


def test_all_rules_are_sound() -> None:
    check_rules(RULES)


@pytest.mark.parametrize("rule", RULES, ids=[f"{i}-{rule.name}" for i, rule in enumerate(RULES)])
def test_each_rule_takes_its_example_out(rule: Rule) -> None:
    found = compiled(rule).search(rule.example)
    assert found
    assert list(taken(rule.example, rule).values())[:1] == [found[1].rstrip("/") if rule.action == "path" else found[1]]


@pytest.mark.parametrize(("text", "values"), VOLATILE, ids=[text[:30] for text, _ in VOLATILE])
def test_volatile_values_are_taken_out(text: str, values: dict[str, str]) -> None:
    assert taken(text) == values
    assert taken(f"# Head\n\n{text}\nMore text.") == values


@pytest.mark.parametrize("text", STATIC)
def test_instructions_stay(text: str) -> None:
    assert taken(text) == {}
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    assert lay_out([], tools).tools == tools


def test_project_instructions_stay_whole() -> None:
    for head, tail in (("Instructions from: /r/AGENTS.md", ""), ("<project_instructions>", "</project_instructions>")):
        text = f"{head}\nCurrent date: 2026-11-29\nBranch: main\n{tail}"
        assert taken(text) == {}
    assert taken("Instructions from: /r/AGENTS.md\nBe kind.\n<env>\nToday's date: 2026-11-29") == {"date": "2026-11-29"}


@pytest.mark.parametrize(
    ("pattern", "example", "says"),
    [
        ("(", "(", "does not compile"),
        ("balance: [0-9]+", "balance: 3", "exactly one capturing group"),
        ("(balance): ([0-9]+)", "balance: 3", "exactly one capturing group"),
        ("([0-9]*)", "3", "matches everything"),
        ("(.*)", "x", "matches everything"),
        (r"(\S+)", "x", "matches everything"),
        ("balance: ([0-9]+)", "balance is 3", "does not match its example"),
        ("balance: ([0-9]+)?", "balance: ", "does not match its example"),
        ("balance: ((?:a+)+)b", "balance: ab", "too long"),
        ("balance: ((?:a|aa)+)b", "balance: ab", "too long"),
        ("balance: (?:x*y*){1,9}(z)", "balance: xyz", "too long"),
        ("balance: ((?:a?){30})a{30}", "balance: " + "a" * 60, "too long"),
        ("balance: ((?:(?:a?){2}){1,2})b", "balance: ab", "too long"),
        ("(?#[)balance: ((?:a+)+)b(?#])", "balance: ab", "comments"),
        ("(?ix)balance:# [\n((?:a+)+)b#]", "balance:ab", "comments"),
        ("balance.*of.*in.*to.*at.*by ([0-9]+)", "balance of in to at by 3", "too long"),
        ("balance: ([0-9]+)", "balance: " + "3" * 300, "too long"),
    ],
)
def test_a_bad_rule_is_refused_by_name(pattern: str, example: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"'balance'.*{says}"):
        check_rules([*RULES, Rule("balance", "system", pattern, "move", example)])


def test_bad_names_hints_and_actions_are_refused() -> None:
    good = Rule("balance", "system", "balance: ([0-9]+)", "move", "balance: 3")
    check_rules([good])
    for bad in (
        Rule("Two words", "system", good.pattern, "move", good.example),
        Rule("balance", "system", good.pattern, "move", good.example, hints=("credit",)),
        Rule("balance", "system", good.pattern, "move", good.example, hints=("Balance",)),
        Rule("balance", "system", good.pattern, "move", good.example, near=("credit",)),
        Rule("balance", "system", good.pattern, "move", good.example, block=True),
        Rule("balance", "system", "balance.*: .*([0-9])", "move", good.example, hints=("balance",)),
        Rule("balance", "system", good.pattern, "drop", good.example),  # type: ignore[arg-type]
        Rule("balance", "nowhere", good.pattern, "move", good.example),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=bad.name):
            check_rules([bad])


def test_the_more_a_rule_repeats_the_shorter_the_lines_it_is_tried_on() -> None:
    limits = [line_limit(pattern) for pattern in ("a(b)", "a.*(b)", "a.*c.*(b)", "a.*c.*d.*(b)", "a.*c.*d.*e.*f.*(b)")]
    assert limits[:2] == [MAX_LINE, MAX_LINE]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < MIN_LINE
    assert line_limit(r"[(*+]{2}\(\*(b){2}") == MAX_LINE  # a class and escapes hold no groups, a fixed count no choice


def test_a_users_rule_takes_part_where_its_line_is_short_enough() -> None:
    rule = Rule("credit", "both", r"credit left: (\d+)", "move", "credit left: 3")
    assert taken("a\ncredit left: 12 EUR\n", rule) == {"credit": "12"}
    assert taken("credit left: 12" + "x" * MAX_LINE, rule) == {}
    hinted = Rule("credit", "both", rule.pattern, "move", rule.example, hints=("credit",))
    assert taken("y" * MAX_LINE + "credit left: 12" + "x" * MAX_LINE, hinted) == {"credit": "12"}
