"""What is volatile in a system prompt: rules for shapes, as data. Their reader is policies/layout_text,
what a rule is stands in policies/layout_check.

A rule fires on a cue (a label, a tag, a heading) and a shape behind it, never on a shape alone: a date in a sentence of
project instructions, an example in a tool's description or `"format": "uuid"` stay where they are. Spellings are those
of agents.md, section 4, and of the agents' own sources (named at each rule).
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.layout_check import Rule, problem
from policies.layout_shapes import (
    BRANCH_LINE,
    CLOCK,
    DATE,
    DATES,
    DAY,
    DIRECTORIES,
    GAP,
    GIT_LINE,
    ID,
    LABEL,
    LONG_PATH,
    MOMENT,
    MONTH,
    NOW,
    PATH,
    PATHS,
    TEMP_NAMED,
    TEMP_PATH,
    TEMPORARY,
    TIMES,
    TO_PATH,
    TODAY,
    UUID,
    WHEN,
)

__all__ = ["RULES", "Rule", "check_rules"]

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
        r"<(?:context name=\"git_?status\"|[a-z_-]{0,20}git[_-]?(?:status|snapshot|context|info))>"
        r"(?:[^\n]*\n\n|\s*)(\S(?:[^<]|<(?!/)){0,3990}?)\s*</",
        "move",
        '<context name="gitStatus">This is the git status at the start.\n\nWorking tree clean\n</context>',
        ('"git', "-git", "_git"),
        block=True,
    ),
    # Claude Code, Crush, Hermes, Qwen Code: branch, status and recent commits on lines of their own.
    Rule(
        "git",
        "system",
        rf"({BRANCH_LINE}(?:\n[ \t]*\n?{GIT_LINE}){{1,80}})",
        "move",
        "Current branch: main\n\nStatus:\n M a.py\n\nRecent commits:\naefde20 first commit\n",
        ("branch", "## "),
        block=True,
    ),
    # A heading with git's own output below it, down to an empty line, a tag or a heading.
    Rule(
        "git",
        "system",
        r"^[-*# \t]{0,6}(?:\*\*)?git (?:status|snapshot|state|log)\b[^\n]{0,100}\n(?:```\w{0,8}\n)?\n?"
        r"((?:## [\w./-]{1,100}\.\.\.[^\n]{1,100}|[^\s<#`][^\n]{0,200}|[ MADRCU?!][^\n<]{1,200})"
        r"(?:\n(?![<#`]|[ \t]*$)[^\n]{1,200}){0,80})",
        "move",
        "Git status (snapshot at session start):\n## main...origin/main\n M a.py\n",
        ("git status", "git snapshot", "git state", "git log"),
        block=True,
    ),
    Rule(
        "branch",
        "system",
        rf"{LABEL}(?:current |git |current git |active )?branch(?:\*\*)?:(?:\*\*)? ?`?([\w./@+-]{{1,150}})`?$",
        "move",
        "Current branch: main",
        ("branch:", 'branch"":'),
    ),
    Rule(
        "root",
        "system",
        rf"\b(?:git )?(?:repo|repository|worktree|git) root(?: (?:folder|directory|dir|path))?{TO_PATH}({PATH})",
        "path",
        "* Git repository root: /home/dev/repo",
        PATHS,
        ("root",),
    ),
    Rule(
        "git_repo",
        "system",
        rf"{LABEL}(?:is )?(?:the |this )?(?:working |current )?(?:directory )?(?:in |inside )?(?:a )?"
        r"git repo(?:sitory)?(?: root)?(?:\*\*)?[:?](?:\*\*)? ?(?!/|~|[a-z]:[\\/])(\S[^\n]{0,100})$",
        "move",
        "Is directory a git repo: yes",
        ("git repo",),
    ),
    # Copilot: "* Directory contents (snapshot at turn start; may be stale): ...", one name a line.
    Rule(
        "files",
        "system",
        rf"{LABEL}(?:directory|folder|workspace|project) (?:contents|listing|files|structure)"
        r"(?: \([^)\n]{1,60}\))?:[ \n]([^\s*<#][^\n]*(?:\n(?![*<#\n])[^\n]+){0,300})",
        "move",
        "* Directory contents (snapshot at turn start): LICENSE\ncmd/\n* Available tools: git",
        ("contents", "listing", "files", "structure"),
        block=True,
    ),
    # Gemini CLI and its forks: the tree of the working directory.
    Rule(
        "files",
        "system",
        r"\b(?:folder|directory) structure of the current working director[^\n]{0,80}:\n[^\u251c\u2514]{0,400}"
        r"((?:[ \t]*[\u251c\u2514\u2502][^\n]*\n?){1,300})",
        "move",
        "folder structure of the current working directories:\n\n/r/\n\u251c\u2500\u2500a.py\n\u2514\u2500\u2500b.py\n",
        ("structure of the current working",),
        block=True,
    ),
    Rule("now", "system", rf"{NOW}{GAP}({MOMENT})", "clock", "Current time: 2026-11-29T10:00:00Z", TIMES, WHEN),
    Rule("date", "system", rf"{NOW}{GAP}({DATE})", "move", "Today's date: Sun Nov 29 2026", DATES, WHEN),
    Rule("time", "system", rf"{NOW}{GAP}({CLOCK})", "clock", "Time: 10:00:00.", TIMES, WHEN),
    # Tools' descriptions are full of examples ("date: 2026-01-01"): only a cue that leaves no doubt counts there.
    Rule("now", "tools", rf"{TODAY}{GAP}({MOMENT})", "clock", "Current time: 2026-11-29 10:00", TIMES, WHEN),
    Rule("date", "tools", rf"{TODAY}{GAP}({DATE})", "move", "Today's date is 2026-11-29.", DATES, WHEN),
    # A label with nothing but a weekday and a date behind it (Hermes: "Conversation started: ...").
    Rule(
        "now",
        "system",
        rf"{LABEL}(?:[a-z][a-z \t]{{1,40}}: )?({DAY},? {DATE}(?:,? (?:at )?{CLOCK}))$",
        "clock",
        "Session opened: Sunday, November 29, 2026 10:00 AM",
        TIMES,
    ),
    Rule(
        "date",
        "system",
        rf"{LABEL}(?:[a-z][a-z \t]{{1,40}}: )?({DAY},? {DATE})$",
        "move",
        "Session opened: Sunday, November 29, 2026",
        DATES,
    ),
    # A date in the user's language behind a cue that leaves no doubt (Gemini CLI and its forks).
    Rule(
        "date",
        "both",
        r"\btoday['\u2019]s date(?: is|:) ?(?!\[)((?=[^\n(<]{0,60}\d{4})[^\n(<]{6,60}?)(?=\.?(?: \(|$)|\. "
        r"(?!\w+ \d{4}))",
        "move",
        "Today's date is samedi 29 novembre 2026 (formatted according to the user's locale).",
        ("s date",),
    ),
    Rule(
        "day",
        "both",
        rf"\b(?:today is|today:|day of (?:the )?week:?(?: is)?|weekday:|current day(?: is|:)) ?(?:a )?({DAY})\b",
        "move",
        "Today is Sunday.",
        ("today is", "today:", "week:", "week is", "day is", "weekday", "current day"),
    ),
    Rule(
        "month",
        "both",
        r"\bcurrent (?:month|year|quarter|week)(?: and year)?(?: is|:|=) ?"
        rf"({MONTH},? \d{{4}}|\d{{4}}(?:[-/]\d\d)?|{MONTH}|Q[1-4] \d{{4}})\b",
        "move",
        "The current month is November 2026.",
        ("current month", "current year", "current quarter", "current week"),
    ),
    Rule(
        "unix_time",
        "system",
        r"\b(?:timestamp|unix[ _]?time|epoch(?:[ _]"
        r"(?:ms|seconds|milliseconds|time))?|now|current[ _]time)\b[\s:=\"'(]{1,4}"
        r"(?:is )?(1[5-9]\d{8}(?:\d{3}|\.\d{1,9})?)\b",
        "clock",
        "timestamp: 1764410400",
        ("0000000000",),
    ),
    Rule(
        "cwd",
        "both",
        r"^[^\n:<]{0,60}\b(?:working directory|current (?:workspace )?directory|cwd|pwd)"
        rf"(?: \([^)\n]{{1,60}}\))?(?:\*\*)?[:=](?:\*\*)? ?({LONG_PATH})[ .]?$",
        "path",
        "Working directory: /home/dev/my repo",
        PATHS,
        DIRECTORIES,
    ),
    Rule(
        "cwd",
        "both",
        r"\b(?:(?:working|current)[ _-]?(?:workspace |project |working )?dir(?:ectory)?|cwd|pwd)"
        rf"(?:{TO_PATH}| [`\"'(]{{0,2}})({PATH})",
        "path",
        "<cwd>\n/home/dev/repo\n</cwd>",
        PATHS,
        DIRECTORIES,
    ),
    Rule(
        "cwd",
        "system",
        r"\b(?:agent|assistant|working|operating|running|located|currently)"
        rf" (?:at|in)(?: the (?:following )?director(?:y|ies))?:? `?({PATH})",
        "path",
        "You are a coding agent at /home/dev/repo.",
        PATHS,
        ("agent at", "assistant at", "ing at", "ing in", "located", "currently"),
    ),
    Rule(
        "root",
        "system",
        r"\b(?:(?:workspace|project|repo|repository|worktree)(?: root)?(?: (?:folder|directory|dir|path))?"
        rf"|root(?: (?:folder|directory))?){TO_PATH}({PATH})",
        "path",
        "Workspace root folder: /home/dev/repo",
        PATHS,
        ("workspace", "project", "git", "repo", "worktree", "root"),
    ),
    Rule(
        "root",
        "system",
        rf"\broot director(?:y|ies):\s{{1,3}}[-*] [`\"']?({PATH})",
        "path",
        "which contains the following root directories:\n\n- `/home/dev/repo`\n",
        PATHS,
        ("root director",),
    ),
    Rule(
        "home",
        "system",
        rf"\bhome(?: directory| dir)?{TO_PATH}({PATH})",
        "path",
        "Home Directory: /home/dev",
        PATHS,
        ("home",),
    ),
    Rule(
        "dir",
        "system",
        r"\b(?:temp(?:orary)?|scratch(?:pad)?|session|state|memory|cache|log)s? (?:directory|folder|dir|path)"
        rf"{TO_PATH}({PATH})",
        "path",
        "The project's temporary directory is: /home/dev/.agent/tmp/0a1b",
        PATHS,
        ("dir", "folder", "path"),
    ),
    Rule(
        "dir",
        "system",
        rf"{LABEL}[^\n:<]{{0,40}}\b(?:directory|folder|workspace|worktree): ({LONG_PATH})$",
        "path",
        "User data directory: /home/dev",
        PATHS,
        ("directory:", "folder:", "workspace:", "worktree:"),
    ),
    # opencode's bash tool: "Use `/tmp/opencode` for temporary work outside the workspace."
    Rule(
        "dir",
        "both",
        rf"(?<![\w/~.]){TEMP_PATH}[`\"')]{{0,2}} (?:for|as) (?:your |any |all )?(?:temp(?:orary)?|scratch)\b",
        "path",
        "Use `/home/dev/.opencode-tmp` for temporary work.",
        PATHS,
        TEMPORARY,
    ),
    Rule(
        "dir",
        "both",
        rf"\b(?:temp(?:orary)?|scratch) (?:files?|work|space|data|output)\b[^\n.,`\"'/~]{{0,40}} [`\"']?{TEMP_PATH}",
        "path",
        "Write temporary files to /tmp/agent-42/work.",
        PATHS,
        TEMPORARY,
    ),
    # Quoted, and with a telling name: cue enough where tools are described.
    Rule("dir", "tools", rf"[`\"']{TEMP_NAMED}{TEMP_PATH}[`\"']", "path", "In `/home/me/.x-tmp`", PATHS, TEMPORARY),
    # The state an agent keeps per directory, named by the directory's path: ~/.claude/projects/-home-dev-repo.
    Rule(
        "project_dir",
        "both",
        r"((?:~|/|[a-z]:[\\/])[^\s`\"'<>|()\[\]]{0,150}[\\/](?:[a-z]-)?-[\w.]{1,60}-[\w.-]{1,120})",
        "path",
        "at `/home/dev/.claude/projects/-home-dev-repo/memory/`",
        ("/-", "\\-", "projects/", "projects\\"),
    ),
    Rule(
        "pid",
        "system",
        r"\b(?:pid|process[ _]id)s?\b[\s:=#]{1,3}(?:is )?(\d{1,8})\b",
        "move",
        "PID 20718 (gptme) up 3s",
        ("pid", "process id", "process_id"),
    ),
    Rule(
        "uptime",
        "system",
        r"\b(?:up|uptime|running for|elapsed)\b(?: time)?[\s:=]{1,3}"
        r"(\d{1,6}(?:\.\d{1,3})? ?(?:ms|s|m|h|d|secs?|mins?|hours?|days?|seconds?|minutes?)(?![a-z])"
        r"(?:,? ?\d{1,4}(?:\.\d{1,3})? ?(?:s|m|h|secs?|mins?|hours?|seconds?|minutes?)(?![a-z])){0,3}"
        r"(?:,? \d{1,2}:\d\d)?"
        r"|\d{1,3}:\d\d(?::\d\d)?)",
        "clock",
        "PID 20718 up 3s mem=2MB",
        ("up 0", "up: 0", 'up"0', "uptime", "running for", "elapsed"),
    ),
    Rule(
        "memory",
        "system",
        r"\b(?:mem|memory|rss|v?ram|disk)(?: (?:usage|used|free|available|space))?[:=] ?"
        r"(\d[\d.,]{0,12} ?[kmgt]i?b?\b(?: ?/ ?\d[\d.,]{0,12} ?[kmgt]i?b?\b)?)",
        "move",
        "up 3s mem=2MB",
        (": 0", '"0'),
    ),
    # Hermes: "MEMORY (your personal notes) [72% — 1,584/2,200 chars]".
    Rule(
        "usage",
        "system",
        r"(\[\d{1,3}(?:\.\d+)?%(?: (?:[-\u2014\u2013]|--) [^\]\n]{1,60})?\])",
        "move",
        "MEMORY (your personal notes) [72% — 1,584/2,200 chars]",
        ('"0',),
    ),
    Rule(
        "usage",
        "system",
        r"\b(?:usage|used|remaining|left|context(?: window)?|budget|capacity|battery|load"
        r"|(?:(?:current|session|total) )?(?:cost|turn|iteration|tokens?))"
        r"(?:\*\*)?[:=](?:\*\*)? ?(\$?\d[\d.,]{0,15}[km]?%?(?: ?(?:/|of) ?\d[\d.,]{0,15}[km]?)?"
        r"(?: (?:tokens|chars|characters)\b)?(?: \(\d[\d.]{0,5}%[^)\n]{0,20}\))?)(?![\w%])",
        "move",
        "Context usage: 12,345 / 65,536 tokens (19%)",
        (": 0", '"0', '" 0', ":0", ": $0"),
        ("us", "remaining", "left", "context", "budget", "token", "capacity", "battery", "load", "cost", "turn", "ste"),
    ),
    Rule(
        "usage",
        "system",
        r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})? ?%"
        r"(?= (?:used|full|remaining|left|of (?:the |your )?(?:context|memory|window|budget|limit)))"
        r"|\d[\d,]{2,12}(?= (?:tokens |chars )?(?:remaining|left)\b))",
        "move",
        "Memory is 72% full",
        ("0%", "0 %", "0 remaining", "0 left", "0 tokens", "0 chars"),
    ),
    Rule(
        "id",
        "system",
        r"\b(?:session|conversation|request|thread|trace|run|chat|instance|agent|correlation|turn|message|task|window"
        r"|container|machine|host|prompt|cache|nonce|user)[ _-]?(?:uu|gu)?id(?:entifier)?\b"
        rf"[\s:=*`\"'>]{{1,6}}(?:is )?[`\"']?({ID})(?![\w-])",
        "move",
        "Session ID: 01a227d9-1b2c-7d3e-8f4a-5b6c7d8e9f0a",
        ("id:", "id is", 'id"', "id 0", "identifier"),
    ),
    Rule(
        "id",
        "system",
        rf"\b(?:nonce|salt|canary|cache[ _-]?bust(?:er)?|session|uuid)\b[:=][\s*`\"']{{0,3}}({ID})(?![\w-])",
        "move",
        "Nonce: 0123456789abcdef",
        ("nonce", "salt", "canary", "bust", "session:", 'session"', "uuid"),
    ),
    # A session's own directory; bare ids elsewhere may be examples.
    Rule(
        "id",
        "system",
        rf"(?<=[/\\=])({UUID})(?![\w-])",
        "move",
        "/tmp/agent/cea6bea3-b02a-4368-87dd-b976e1cb2461/scratchpad",
        ("-0",),
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
