"""What is volatile in a system prompt: rules for shapes, as data. Their reader is policies/layout_text,
what a rule is stands in policies/layout_check.

A rule fires on a cue (a label, a tag, a heading) and a shape behind it, never on a shape alone: a date in a sentence of
project instructions, an example in a tool's description or `"format": "uuid"` stay where they are. Spellings are those
of agents.md, section 4, and of the agents' own sources (named at each rule).
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.layout_check import Rule, problem

__all__ = ["RULES", "Rule", "check_rules"]

_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6}\.?"
_NTH = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = (
    rf"(?:(?:{_DAY},? )?(?:"
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)"
    r"|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d\d)(?!\d)"
    rf"|{_MONTH} {_NTH},? \d{{4}}"
    rf"|{_NTH}\.?(?: of)? {_MONTH},? \d{{4}}"
    rf")(?: \({_DAY}\)|,? {_DAY}\b)?)"
)
_ZONE = (
    r"(?: ?Z\b| ?(?:UTC|GMT)\b(?:[+-]\d{1,2}(?::?\d\d)?)?| ?[+-]\d\d:?\d\d\b"
    r"| [A-Z]{2,4}T\b| \([A-Za-z][A-Za-z0-9 /_+:-]{1,40}\)){0,3}"
)
_CLOCK = rf"\d{{1,2}}:\d\d(?::\d\d(?:[.,]\d{{1,9}})?)?(?: ?[ap]\.?m\b\.?)?{_ZONE}(?![\d:])"
_MOMENT = (
    rf"(?:{_DATE}(?:T|,? (?:at |[-\u2014\u2013] )?){_CLOCK}"
    rf"|{_DAY},? {_MONTH} +\d{{1,2}},? \d\d:\d\d:\d\d(?: [A-Z]{{3,5}})? \d{{4}}"
    rf"|{_CLOCK},? (?:on )?{_DATE})"
)
_GAP = (
    r"(?:[\s:=*_`\"'\u2019>(\[\u2014\u2013,#|/-]|\([a-z/ _-]{1,30}\)"
    r"|\b(?:is|it|the|and|date|time|datetime|day|today|now|local|utc|iso|in|at|on)\b){1,14}"
)
_NOW = (
    r"(?:\b(?:today|now)(?:['\u2019]?s)?\b"
    r"|\b(?:current|present|local|system|session|user(?:['\u2019]s)?|conversation)[ _-]?(?:local |system )?"
    r"(?:date|day|time|datetime|timestamp|started|start)"
    r"|(?:^|[.!?;] |\| ?)[\s>*_#`\"{<-]{0,6}(?:\d{1,2}[.)] )?"
    r"(?:date|time|datetime|date ?[/_&] ?time|date and time|timestamp|now|as of|it is)\b)"
)
_NOW_HINTS = ("today", "now", "date", "day", "time", "start", "as of", "it is")
_PATH = r"(?:(?:~|/|[a-z]:[\\/]|\\\\)(?:[^\s`\"'<>|]{0,190}[^\s`\"'<>|.,;:!?)\]\\/])?)"
_LONG_PATH = r"(?:(?:~|/|[a-z]:[\\/]|\\\\)(?:[^\n`\"'<>|:]{0,190}[^\s`\"'<>|.,;:)\]\\/])?)"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ID = (
    rf"(?:[a-z]{{2,12}}[_-])?(?:{_UUID}|[0-9a-f]{{12,64}}|[0-9A-HJKMNP-TV-Z]{{26}}"
    r"|(?=[a-z_-]{0,63}\d)[a-z0-9_-]{16,64})"
)
_TO_PATH = r"(?:\*\*|`)?(?: (?:is|=)|:|=|\">|\s*>)[\s*`\"'(]{0,4}"

# Runs of lines as git and the agents print them: from a branch line to the last line that can be git's.
_GIT_LINE = (
    r"(?:[ \t]*(?:"
    r"[-*#> \t]{0,6}(?:\*\*)?(?:current |main |default |base |git |remote |local )?"
    r"(?:branch|status|upstream|ahead|behind|remote|user|head|stash|changes|staged|unstaged|untracked)"
    r"(?: files| changes)?(?:\*\*)?(?: \([^)\n]{1,80}\))?:[^\n]{0,200}"
    r"|[^\n:]{0,40}\bcommits?(?: \([^)\n]{1,40}\))?:"
    r"|[-*] [0-9a-f]{7,40}\b[^\n]{0,200}|[0-9a-f]{7,40} [^\n]{0,200}"
    r"|[ MADRCUT?!]{1,2} [^\n]{1,200}|## [\w./-]{1,100}(?:\.\.\.[^\n]{1,120})?"
    r"|\(clean\)|clean|nothing to commit[^\n]{0,80}|working tree clean|\.\.\. ?\(?truncated[^\n]{0,80}"
    r")[ \t]*)"
)
_GIT_RUN = rf"{_GIT_LINE}(?:\n[ \t]*\n?{_GIT_LINE})"

RULES: tuple[Rule, ...] = (
    # Claude Code: a block of its own before the system text, without a line break behind it.
    Rule(
        "billing",
        "system",
        r"(x-anthropic-billing-header:[^\n]{1,190}?(?:;(?! )|$))",
        "move",
        "x-anthropic-billing-header: cc_version=2.1.332.144; cc_entrypoint=cli;You are",
        ("x-anthropic-billing-header",),
    ),
    # Continue: <context name="gitStatus">; the first paragraph says what it is and stays.
    Rule(
        "git",
        "system",
        r"<(?:context name=\"git_?status\"|git_?(?:status|snapshot|context))>"
        r"(?:[^\n]*\n\n|\s*)(\S(?:[^<]|<(?!/)){0,3990}?)\s*</",
        "move",
        '<context name="gitStatus">This is the git status at the start.\n\nWorking tree clean\n</context>',
        ('<context name="git', "<git"),
        block=True,
    ),
    # Claude Code, Crush, Hermes, Qwen Code: branch, status and recent commits on lines of their own.
    Rule(
        "git",
        "system",
        rf"^({_GIT_RUN}{{1,60}})$",
        "move",
        "Current branch: main\n\nStatus:\n M a.py\n\nRecent commits:\naefde20 first commit\n",
        ("branch",),
        block=True,
    ),
    Rule(
        "branch",
        "system",
        r"^[-*#> \t]{0,6}(?:\*\*)?(?:current |git |current git )?branch(?:\*\*)?:(?:\*\*)? ?`?([\w./@+-]{1,150})`?$",
        "move",
        "Current branch: main",
        ("branch",),
    ),
    Rule(
        "git_repo",
        "system",
        r"\bis (?:the )?(?:working )?directory a git repo(?:sitory)?[:?] ?(yes|no|true|false)\b",
        "move",
        "Is directory a git repo: yes",
        ("a git repo",),
    ),
    Rule("now", "both", rf"{_NOW}{_GAP}({_MOMENT})", "clock", "Current time: 2026-11-29T10:00:00Z", _NOW_HINTS),
    Rule("date", "both", rf"{_NOW}{_GAP}({_DATE})", "move", "Today's date: Sun Nov 29 2026", _NOW_HINTS),
    Rule("time", "both", rf"{_NOW}{_GAP}({_CLOCK})", "clock", "Time: 10:00:00.", _NOW_HINTS),
    # A label with nothing but a weekday and a date behind it (Hermes: "Conversation started: ...").
    Rule(
        "now",
        "system",
        rf"^[-*> \t]{{0,6}}[a-z][a-z \t]{{1,40}}: ({_DAY},? {_DATE}(?:,? (?:at )?{_CLOCK}))$",
        "clock",
        "Session opened: Sunday, November 29, 2026 10:00 AM",
        ("day, ", ", 20"),
    ),
    Rule(
        "date",
        "system",
        rf"^[-*> \t]{{0,6}}[a-z][a-z \t]{{1,40}}: ({_DAY},? {_DATE})$",
        "move",
        "Session opened: Sunday, November 29, 2026",
        ("day, ",),
    ),
    Rule(
        "day",
        "both",
        rf"\b(?:today is|today:|day of (?:the )?week:?(?: is)?|weekday:|current day(?: is|:)) ?(?:a )?({_DAY})\b",
        "move",
        "Today is Sunday.",
        ("today", "week", "current day"),
    ),
    Rule(
        "month",
        "both",
        rf"\bcurrent (?:month|year|quarter|week)(?: and year)?(?: is|:|=) ?({_MONTH},? \d{{4}}|\d{{4}}"
        rf"(?:[-/]\d\d)?|{_MONTH}|Q[1-4] \d{{4}})\b",
        "move",
        "The current month is November 2026.",
        ("current month", "current year", "current quarter", "current week"),
    ),
    Rule(
        "unix_time",
        "both",
        r"\b(?:timestamp|unix[ _]?time|epoch|now|current[ _]time)\b[\s:=\"'(]{1,4}(?:is )?(1[5-9]\d{8}"
        r"(?:\d{3}|\.\d{1,9})?)\b",
        "clock",
        "timestamp: 1764410400",
        ("timestamp", "unix", "epoch", "now", "current"),
    ),
    Rule(
        "cwd",
        "both",
        rf"^[^\n:<]{{0,60}}\b(?:working directory|current directory|cwd|pwd)(?: \([^)\n]{{1,60}}\))?"
        rf"(?:\*\*)?[:=](?:\*\*)? ?({_LONG_PATH})[ .]?$",
        "path",
        "Working directory: /home/dev/my repo",
        ("director", "cwd", "pwd"),
    ),
    Rule(
        "cwd",
        "both",
        rf"\b(?:working[ _-]?dir(?:ectory)?|current[ _-]?(?:workspace |project )?dir"
        rf"(?:ectory)?|cwd|pwd){_TO_PATH}({_PATH})",
        "path",
        "<cwd>\n/home/dev/repo\n</cwd>",
        ("dir", "cwd", "pwd"),
    ),
    Rule(
        "root",
        "both",
        rf"\b(?:(?:workspace|project|git|repo|repository|worktree)(?: root)?(?: "
        rf"(?:folder|directory|dir|path))?|root(?: (?:folder|directory))?){_TO_PATH}({_PATH})",
        "path",
        "Workspace root folder: /home/dev/repo",
        ("workspace", "project", "git", "repo", "worktree", "root"),
    ),
    Rule(
        "home",
        "both",
        rf"\bhome(?: directory| dir)?{_TO_PATH}({_PATH})",
        "path",
        "Home Directory: /home/dev",
        ("home",),
    ),
    Rule(
        "dir",
        "both",
        rf"^[-*> \t]{{0,6}}(?:\d{{1,2}}\. )?[^\n:<]{{0,40}}\b(?:directory|folder|workspace|worktree): "
        rf"({_LONG_PATH})$",
        "path",
        "User data directory: /home/dev",
        ("director", "folder", "workspace", "worktree"),
    ),
    # The state an agent keeps per directory, named by the directory's path: ~/.claude/projects/-home-dev-repo.
    Rule(
        "project_dir",
        "both",
        r"((?:~|/|[a-z]:[\\/])[^\s`\"'<>|()\[\]]{0,150}[\\/](?:[a-z]-)?-[\w.]{1,60}-[\w.-]{1,120})",
        "path",
        "at `/home/dev/.claude/projects/-home-dev-repo/memory/`",
        ("/-", "\\-", "--"),
    ),
    Rule(
        "pid",
        "both",
        r"\b(?:pid|process[ _]id)s?\b[\s:=#]{1,3}(?:is )?(\d{1,8})\b",
        "move",
        "PID 20718 (gptme) up 3s",
        ("pid", "process"),
    ),
    Rule(
        "uptime",
        "both",
        r"\b(?:up|uptime|running for|elapsed)\b(?: time)?[\s:=]{1,3}"
        r"(\d{1,6}(?:\.\d{1,3})? ?(?:s|m|h|d|ms|secs?|mins?|hours?|days?|seconds?|minutes?)\b"
        r"(?:,? ?\d{1,4}(?:\.\d{1,3})? ?(?:s|m|h|secs?|mins?|hours?|seconds?|minutes?)\b){0,3}|\d{1,3}:\d\d"
        r"(?::\d\d)?)",
        "clock",
        "PID 20718 up 3s mem=2MB",
        ("up ", "uptime", "running for", "elapsed"),
    ),
    Rule(
        "memory",
        "both",
        r"\b(?:mem|memory|rss|ram)(?: usage)?[:=] ?(\d[\d.,]{0,12} ?[kmgt]i?b?\b"
        r"(?: ?/ ?\d[\d.,]{0,12} ?[kmgt]i?b?\b)?)",
        "move",
        "up 3s mem=2MB",
        ("mem", "rss", "ram"),
    ),
    # Hermes: "MEMORY (your personal notes) [72% — 1,584/2,200 chars]".
    Rule(
        "usage",
        "system",
        r"\[(\d{1,3}(?:\.\d+)?%(?: [-\u2014\u2013] [^\]\n]{1,60})?)\]",
        "move",
        "MEMORY (your personal notes) [72% — 1,584/2,200 chars]",
        ("%",),
    ),
    Rule(
        "usage",
        "system",
        r"\b(?:usage|used|remaining|left|tokens?|context(?: window)?|budget|capacity|battery|load)"
        r"[:=] ?(\d[\d.,]{0,15}[km]?%?(?: ?(?:/|of) ?\d[\d.,]{0,15}[km]?)?(?: "
        r"(?:tokens|chars|characters)\b)?(?: \(\d[\d.]{0,5}%[^)\n]{0,20}\))?)",
        "move",
        "Context usage: 12,345 / 65,536 tokens (19%)",
        ("us", "remaining", "left", "token", "context", "budget", "capacity", "battery", "load"),
    ),
    Rule(
        "usage",
        "system",
        r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})? ?%)(?= (?:used|full|remaining|left|of (?:the |your )?"
        r"(?:context|memory|window|budget|limit)))",
        "move",
        "Memory is 72% full",
        ("%",),
    ),
    Rule(
        "id",
        "both",
        rf"\b(?:session|conversation|request|thread|trace|run|chat|instance|agent|correlation|turn|message|task|window|container|machine|host)"
        rf"[ _-]?(?:uu)?id(?:entifier)?\b[\s:=*`\"'>]{{1,6}}(?:is )?[`\"']?({_ID})(?![\w-])",
        "move",
        "Session ID: 01a227d9-1b2c-7d3e-8f4a-5b6c7d8e9f0a",
        ("id",),
    ),
    Rule(
        "id",
        "system",
        rf"(?<=[/\\=])({_UUID})(?![\w-])|^(?!)",
        "move",
        "/tmp/agent/cea6bea3-b02a-4368-87dd-b976e1cb2461/scratchpad",
        ("-",),
    ),
)


def check_rules(rules: Iterable[Rule]) -> None:
    """Refuse rules that cannot work, cost too much or match everything.

    Raises ValueError naming the rule: a bad name or expression, not exactly one group, a value that may be empty, an
    expression that matches any text, an example that it does not match, a repetition within a repeated group, or
    more open repetitions than MAX_STEPS allows on a line of MIN_LINE characters (`line_limit`).
    """
    for rule in rules:
        if wrong := problem(rule, trusted=rule in RULES):
            raise ValueError(f"layout rule {rule.name!r}: {wrong}")
