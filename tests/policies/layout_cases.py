"""System prompts of agents, with what is volatile in them: shapes from their sources and recordings, prose made up."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

Message = dict[str, Any]

VOLATILE: list[tuple[str, dict[str, str]]] = [
    # (text, value by placeholder name)
    ("x-anthropic-billing-header: cc_version=2.1.3.144; cc_entrypoint=cli;You are Claude.",
     {"billing": "x-anthropic-billing-header: cc_version=2.1.3.144; cc_entrypoint=cli;"}),
    ("x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=a1b2c;\n\nYou are Claude.",
     {"billing": "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=a1b2c;"}),
    ("<env>\n  Working directory: /home/dev/my repo\n  Is directory a git repo: yes\n  Platform: linux\n"
     "  Today's date: Sun Nov 29 2026\n</env>",
     {"cwd": "/home/dev/my repo", "git_repo": "yes", "date": "Sun Nov 29 2026"}),
    ("1. Platform: linux\n2. Date: 11/29/2026\n4. Working Directory: C:\\Users\\dev\\repo\n",
     {"date": "11/29/2026", "cwd": "C:\\Users\\dev\\repo"}),
    ("You are Kai. Time: 10:00:00. Answer briefly.", {"time": "10:00:00"}),
    ("Current time is 14:05:31. Today's date is 2026-11-29.\nDevices:", {"time": "14:05:31", "date": "2026-11-29"}),
    ("Current Date/Time: 2026-11-29T10:00:00.123Z\n", {"now": "2026-11-29T10:00:00.123Z"}),
    ("## Current Time\n2026-11-29 14:05 (Sunday)\n", {"now": "2026-11-29 14:05 (Sunday)"}),
    ("The current date is Sunday, November 29, 2026.", {"date": "Sunday, November 29, 2026"}),
    ("<current_date>2026-11-29</current_date><cwd>/w/a</cwd>", {"date": "2026-11-29", "cwd": "/w/a"}),
    ("Conversation started: Sunday, November 29, 2026 10:00 AM\nModel: x",
     {"now": "Sunday, November 29, 2026 10:00 AM"}),
    ("Today is the 29th of November, 2026.", {"date": "29th of November, 2026"}),
    ("Today is Sunday.", {"day": "Sunday"}),
    ("The current month is November 2026. You MUST use it.", {"month": "November 2026"}),
    ("now: Sun Nov 29 10:00:00 UTC 2026", {"now": "Sun Nov 29 10:00:00 UTC 2026"}),
    ('{"timestamp": 1764410400, "x": 1}', {"unix_time": "1764410400"}),
    ("<cwd>\n/home/dev/repo\n</cwd>", {"cwd": "/home/dev/repo"}),
    ("The current working directory is `/workspace/app`.", {"cwd": "/workspace/app"}),
    ("1 other agent(s): PID 20718 (gptme) up 3s mem=2MB", {"pid": "20718", "uptime": "3s", "memory": "2MB"}),
    ("MEMORY (your notes) [72% \u2014 1,584/2,200 chars]", {"usage": "[72% \u2014 1,584/2,200 chars]"}),
    ("Context usage: 12,345 / 65,536 tokens (19%)", {"usage": "12,345 / 65,536 tokens (19%)"}),
    ("Session ID: 01a227d9-1b2c-7d3e-8f4a-5b6c7d8e9f0a\n", {"id": "01a227d9-1b2c-7d3e-8f4a-5b6c7d8e9f0a"}),
    ("conversation_id=conv_0123456789abcdef01", {"id": "conv_0123456789abcdef01"}),
    ("Notes are in /home/dev/.claude/projects/-home-dev-repo/memory/.",
     {"project_dir": "/home/dev/.claude/projects/-home-dev-repo"}),
    ("gitStatus: a snapshot.\n\nCurrent branch: main\n\nMain branch (for PRs): main\n\nStatus:\n M a.py\n?? b.py\n\n"
     "Recent commits:\naefde20 first commit\n0123abc second\n\nAnswer briefly.",
     {"git": "Current branch: main\n\nMain branch (for PRs): main\n\nStatus:\n M a.py\n?? b.py\n\n"
             "Recent commits:\naefde20 first commit\n0123abc second"}),
    ('<context name="gitStatus">A snapshot in time.\n\n?? notes.md\n</context>', {"git": "?? notes.md"}),
    ("- Root: here\n- Branch: main\n- Status: clean\n- Recent commits:\n    aefde20 first\n\nProfile: cleanup.",
     {"git": "- Branch: main\n- Status: clean\n- Recent commits:\n    aefde20 first"}),
    ("Home Directory: C:/Users/me\nCurrent Workspace Directory: d:/Code/x\n- path: (relative to the current workspace"
     " directory d:/Code/x)", {"home": "C:/Users/me", "cwd": "d:/Code/x"}),
    ("It is currently 2025-11-29 12:34:56.", {"now": "2025-11-29 12:34:56"}),
    ("# Current Time\nCurrent time in ISO 8601 UTC format: 2025-11-16T15:23:17.925Z",
     {"now": "2025-11-16T15:23:17.925Z"}),
    ("Current Time: Sat Nov 29 2025 14:05:31 GMT+0100 (Central European Standard Time)",
     {"now": "Sat Nov 29 2025 14:05:31 GMT+0100 (Central European Standard Time)"}),
    ("Today's date is Samstag, 29. November 2025 (formatted according to the user's locale).",
     {"date": "Samstag, 29. November 2025"}),
    ("Today's date is 2025\u5e7411\u670829\u65e5\u661f\u671f\u516d (formatted)",
     {"date": "2025\u5e7411\u670829\u65e5\u661f\u671f\u516d"}),
    ("* Current working directory: /u/b/a\n* Git repository root: /u/b/a\n* Git repository: b/a\n"
     "* Directory contents (snapshot at turn start; may be stale): LICENSE\ncmd/\n* Available tools: git",
     {"cwd": "/u/b/a", "root": "/u/b/a", "git_repo": "b/a", "files": "LICENSE\ncmd/"}),
    ("which contains the following root directories:\n\n- `/home/user/zed`\n\n- Do not ask.",
     {"root": "/home/user/zed"}),
    ("Git status (snapshot at conversation start - may be outdated):\nCurrent branch: main\n\nStatus:\n M a.go\n</env>",
     {"git": "Current branch: main\n\nStatus:\n M a.go"}),
    ("Git snapshot at conversation start. It may be outdated.\nCurrent branch: main\nStatus:\n## main...origin/main\n"
     " M a.ts\nRecent commits:\naefde20 feat: x\n\n# Memory\n- fact",
     {"git": "Current branch: main\nStatus:\n## main...origin/main\n M a.ts\nRecent commits:\naefde20 feat: x"}),
    ("scratchpad:\n`/tmp/agent-0/-root-repo/cea6bea3-b02a-4368-87dd-b976e1cb2461/scratchpad`",
     {"project_dir": "/tmp/agent-0/-root-repo", "id": "cea6bea3-b02a-4368-87dd-b976e1cb2461"}),
    ("I'm currently working in the directory: /home/me/x\nThe project's temporary directory is: /root/.g/tmp/3f2a9c0d",
     {"cwd": "/home/me/x", "dir": "/root/.g/tmp/3f2a9c0d"}),
    ("Use `/home/me/.agent-tmp` for temporary work outside.", {"dir": "/home/me/.agent-tmp"}),
    ("Write temporary files to /tmp/agent-42/work.", {"dir": "/tmp/agent-42/work"}),
    ("claude PID 207 up 2h3m mem=340MB", {"pid": "207", "uptime": "2h3m", "memory": "340MB"}),
    ("Turn: 5/50\nTokens used: 12,345\n53191 remaining", {"usage": "5/50", "usage_2": "12,345", "usage_3": "53191"}),
    ('{"currentDateTime":"2026-11-29T10:00:00Z","cwd":"/home/me/x"}',
     {"now": "2026-11-29T10:00:00Z", "cwd": "/home/me/x"}),
]  # fmt: skip

STATIC = [
    "Schedule: '30m', '0 9 * * *', '2026-06-01T09:00:00' (one time).",
    "The release of 2026-01-05 broke the build; do not repeat it.",
    "- 2025-03-01: moved to pnpm\n- 2025-04-02: moved back",
    "Copyright (c) 2026. Standup is at 10:00 every day.",
    "A session id is a UUID. Never guess a process id.",
    "Use absolute paths like /home/user/project/a.py, not a.py.",
    "Use /tmp for temporary files, `/tmp/` for scratch work, `/tmp/a.py` for temporary work, `/template/x` for none.",
    "Link tasks with `[[name]]` or `df[[date]]`, where `name` is the other one's slug.",
    "Work on a branch, never on main. Commits: small.",
    "Run the tests within 30 s and keep coverage at 90% or more.",
    "Use a 16-digit hex id such as 0123456789abcdef in examples.",
    "You can use up to 4096 tokens; answers over 80% similar are merged.",
    "Windows of 10:30 length; ratio 16:9; see RFC 2119.",
    "Knowledge cutoff: January 2025. Version 2.1.332, built for Linux 6.18.44.",
    "The default branch is called trunk. Default branch: trunk",
    "Pass the date as YYYY-MM-DD, e.g. 2024-01-01, and the time as HH:MM, e.g. 14:30.",
    "Logs are written to /var/log/app.log; binaries to /usr/local/bin.",
    "See [[the wiki]] and https://example.org/2026/11/29/post.html for the format.",
]


def base(day: int = 0, repo: str = "/home/dev/repo") -> tuple[list[Message], list[dict[str, Any]]]:
    """A made-up agent's base on day 0 or 1 in a directory."""
    date = ("Sun Nov 29 2026", "Mon Nov 30 2026")[day]
    system = (
        f"You are an agent.\n<env>\nWorking directory: {repo}\nToday's date: {date}\n</env>\n"
        f"Instructions from: {repo}/AGENTS.md\n# Rules\n- Current date: write 2026-01-01 in fixtures.\n"
    )
    tool = {"type": "function", "function": {"name": "bash", "description": f"Runs in {repo}.", "parameters": {
        "type": "object", "properties": {
            "workdir": {"type": "string", "description": f"Default {repo}", "default": repo},
            "id": {"type": "string", "format": "uuid", "title": "Id"},
        }}}}  # fmt: skip
    return [{"role": "system", "content": system}], [tool]


def given_back(node: Any, values: dict[str, str]) -> Any:
    """JSON with the placeholders of `values` replaced by their texts, once."""
    if isinstance(node, str):
        return re.sub(r"\[\[env:([^\[\]\n]+)\]\]", lambda found: values.get(found[1], found[0]), node)
    if isinstance(node, dict):
        return {key: given_back(value, values) for key, value in node.items()}
    return [given_back(item, values) for item in node] if isinstance(node, list | tuple) else node


def moved(text: str, old: str, new: str) -> str:
    """A recording as the same agent in another directory would have made it."""
    return text.replace(old, new).replace(re.sub(r"\W", "-", old), re.sub(r"\W", "-", new))


def same_json(one: Any, other: Any) -> bool:
    """Equal also in the order of keys."""
    return json.dumps(one) == json.dumps(other)


def copied(node: Any) -> Any:
    """A deep copy, to see that nothing was mutated."""
    return copy.deepcopy(node)
