"""The setting or agent switch that avoids a divergence: data, and the look-up in it."""

from __future__ import annotations

from dataclasses import dataclass

from policies.causes import Cause
from policies.changes import Kind


@dataclass(frozen=True, slots=True)
class Advice:
    """What helps against kinds of change, in one agent ("" for any), the most particular first."""

    kinds: frozenset[Kind]
    agent: str
    text: str


def _row(kinds: str, agent: str, text: str) -> Advice:
    return Advice(frozenset(Kind(kind.strip()) for kind in kinds.split(",")), agent, text)


REPAIR = "--mode repair (the default) keeps it out of the prompt that the engine sees"
TABLE: tuple[Advice, ...] = (
    # Claude Code and opencode: agents.md, "Biggest findings" and "Claude switches that change the prompt"
    _row("id", "claude", "CLAUDE_CODE_ATTRIBUTION_HEADER=0 in Claude Code's environment; --mode repair does the same"),
    _row("tools added, tools order", "claude", "ENABLE_TOOL_SEARCH=false in Claude Code's environment (fixed tools)"),
    _row(
        "reminder moved",
        "claude",
        "a model name that Claude Code knows (ANTHROPIC_MODEL=claude-sonnet-4-5-20250929 as an --alias of your model): "
        "no system messages in mid-conversation; --mode repair",
    ),
    _row(
        "date, clock, path, git status",
        "opencode",
        "OPENCODE_EXPERIMENTAL_CACHE_STABILIZATION=1 in opencode's environment; --mode repair does it for any agent",
    ),
    _row("date, clock, path, git status, id, meter", "", f"volatile text in the base: {REPAIR}"),
    _row("tools order", "", "--mode repair (the default) keeps the order that was seen first"),
    _row(
        "tools added", "", "a fixed tool list from the start; --mode repair (the default) puts later tools at the end"
    ),
    _row("tools removed, tools edited", "", "another base: nothing avoids it; its snapshot makes switching back cheap"),
    _row("reasoning dropped", "", "--mode repair (the default) gives the model's own reasoning back"),
    _row(
        "arguments respelled, reminder moved, content form, white space",
        "",
        "--mode repair (the default) sends the spelling that was sent before",
    ),
    _row("pruned result", "", "--mode repair (the default) defers it; or switch the agent's pruning off"),
    _row(
        "compaction",
        "",
        "a compaction, the agent's own or ours: a larger --ctx-size, told to the agent, makes it rarer",
    ),
    _row("setting", "", "keep the same tool_choice, response_format and chat_template_kwargs in a conversation"),
    _row("edited, shortened", "", "the client changed its history, and that is honoured: nothing avoids it"),
)
"""The first row that fits is shown."""

_VALUE = "no rule of mode repair knows this value: add one (layout_rules in the configuration file)"
_MORE = "more than the spelling changed, so mode repair left it: the client's edit is honoured"
IN_REPAIR: dict[Kind, str] = {
    **dict.fromkeys((Kind.DATE, Kind.CLOCK, Kind.PATH, Kind.GIT_STATUS, Kind.ID, Kind.METER), _VALUE),
    **dict.fromkeys((Kind.ARGUMENTS, Kind.REMINDER, Kind.FORM, Kind.WHITE_SPACE, Kind.REASONING_DROPPED), _MORE),
    Kind.TOOLS_ORDER: "the client listed its tools in a new order together with other changes",
    Kind.TOOLS_ADDED: "a fixed tool list from the start: later tools go to the end, but before the messages",
    Kind.PRUNED: "the context ran full, so deferred prunes were done at once: a larger --ctx-size makes it rarer",
}
"""What is shown instead where mode repair was on."""

BY_CAUSE: dict[Cause, str] = {
    Cause.EVICTED: "more room: a larger --ctx-size or --parallel, or fewer conversations at a time",
    Cause.ENGINE_RESTART: "after a stop of yours nothing is to be done: what its slot file (--persist, the default) "
    "does not hold is processed again; if the engine ended by itself, the log says why",
    Cause.CHECKPOINT_MISSING: "memory that cannot be rewound: --swa-full after -- for sliding windows, else more "
    "--ctx-checkpoints",
    Cause.RESTORE_INEFFECTIVE: "the slot file did not help this engine; it is not tried again for this prompt",
    Cause.ISOLATION: "cache_prompt: false, or another x-slotkeeper-salt: the client asked for it",
    Cause.CANCELLED: "an answer was cut off; its prompt is continued where the engine stopped",
    Cause.IMAGE: "prompts with images are not compared token by token",
    Cause.NEW_LINE: "name the conversation in a header x-slotkeeper-session",
}
BY_NAME = {
    "template_rewrite": "--append-only-template: the model's own template drops old reasoning",
    "template_clock": "--template-clock fixed: the model's own template prints the date",
}
"""Causes of the template (contract.md); by name, since they need no divergence of the client's."""

AGENTS = {
    "claude": ("claude-cli", "claude-code", "x-anthropic-billing-header", "cc_version="),
    "codex": ("codex",),
    "kilo": ("kilo",),
    "opencode": ("opencode",),
    "qwen": ("qwencode", "qwen code", "qwen-code"),
    "copilot": ("copilot",),
    "cline": ("cline",),
    "continue": ("continue/", "continue cli"),
    "aider": ("aider", "litellm"),
    "gptme": ("gptme",),
    "hermes": ("hermes",),
    "pi": ("pi/", "pi-coding"),
}
"""Words in a user agent, or at the start of a system prompt, by which an agent is known."""


def agent_of(*texts: str) -> str:
    """The agent that is named in a user agent or a system prompt's first lines; "" when none is."""
    text = "\n".join(text[:1000] for text in texts).lower()
    return next((agent for agent, words in AGENTS.items() if any(word in text for word in words)), "")


def advice(kind: Kind, agent: str = "", *, repaired: bool = False) -> str:
    """One line that names the setting or switch. `repaired`: mode repair was on, and it diverged all the same."""
    rows = [row for row in TABLE if kind in row.kinds and row.agent in ("", agent)]
    own = next((row.text for row in rows if row.agent), None)
    return own or (repaired and IN_REPAIR.get(kind)) or rows[0].text


def advice_for_cause(cause: str) -> str | None:
    """What helps where the client's text did not change; None when nothing is known."""
    if cause in BY_NAME:
        return BY_NAME[cause]
    return BY_CAUSE.get(Cause(cause)) if cause in set(Cause) else None
