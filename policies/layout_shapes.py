"""Pieces of the expressions in policies/layout_rules: how dates, clocks, paths, ids and git's lines are spelled.

All are written for re.IGNORECASE and re.MULTILINE and hold no capturing group, but TEMP_PATH is one. The tuples at the
end are hints (policies/layout_check.Rule): where such a value can stand at all, and which words stand near.
"""

DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6}\.?"
NTH = r"\d{1,2}(?:st|nd|rd|th)?"
DATE = (
    rf"(?:(?:{DAY},? )?(?:"
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)"
    r"|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d\d)(?!\d)"
    rf"|{MONTH} {NTH},? \d{{4}}"
    rf"|{NTH}\.?(?: of)? {MONTH},? \d{{4}}"
    r"|\d{4}\u5e74 ?\d{1,2}\u6708 ?\d{1,2}\u65e5(?:\u661f\u671f.)?"
    rf")(?: \({DAY}\)|,? {DAY}\b)?)"
)
ZONE = (
    r"(?: ?Z\b| ?(?:UTC|GMT)\b(?:[+-]\d{1,2}(?::?\d\d)?)?| ?[+-]\d\d:?\d\d\b"
    r"| [A-Z]{2,4}T\b| \([A-Za-z][A-Za-z0-9 /_+:-]{1,40}\)){0,3}"
)
CLOCK = rf"\d{{1,2}}:\d\d(?::\d\d(?:[.,]\d{{1,9}})?)?(?: ?[ap]\.?m\b\.?)?{ZONE}(?![\d:])"
MOMENT = (
    rf"(?:{DATE}(?:T|,? (?:at |[-\u2014\u2013] )?){CLOCK}"
    rf"|{DAY},? {MONTH} +\d{{1,2}},? \d\d:\d\d:\d\d(?: [A-Z]{{3,5}})? \d{{4}}"
    rf"|{CLOCK},? (?:on )?{DATE})"
)
GAP = (
    r"(?:[\s:=*_`\"'\u2019>(\[\u2014\u2013\uff1a,#|/&-]|\([a-z/ _-]{1,30}\)"
    r"|\b(?:is|it|the|and|date|time|datetime|day|today|now|currently|local|utc|iso"
    r"(?: 8601)?|format|in|at|on)\b|\u662f){1,14}"
)
NOW = (
    r"(?:\b(?:today|now)(?:['\u2019]?s)?\b|\b(?:it is|it['\u2019]s) (?:now|currently)\b"
    r"|\b(?:current|present|local|system|session|user(?:['\u2019]s)?|conversation)[ _-]?(?:local |system )?"
    r"(?:date|day|time|datetime|timestamp|started|start)"
    r"|(?:^|[.!?;,] |\| ?)[\s>*_#`\"{<-]{0,6}(?:\d{1,2}[.)] )?(?:the )?"
    r"(?:date|time|datetime|date ?[/_&] ?time|date and time|timestamp|now|as of|it is)\b"
    r"|\u4eca\u5929|\u4eca\u65e5|\u5f53\u524d|\u73b0\u5728)"
)
TODAY = r"\b(?:today(?:['\u2019]?s)?|current[ _](?:local )?(?:date|day|time|datetime))\b"
PATH = r"(?:(?:~|/|[a-z]:[\\/]|\\\\)(?:[^\s`\"'<>|]{0,190}[^\s`\"'<>|.,;:!?)\]\\/])?)"
LONG_PATH = r"(?:(?:~|/|[a-z]:[\\/]|\\\\)(?:[^\n`\"'<>|:]{0,190}[^\s`\"'<>|.,;:)\]\\/])?)"
TEMP_PATH = (
    r"((?!/(?:var/)?tmp/?(?![^\s`\"'<>|.,;:!?)\]]))(?:~|/|[a-z]:[\\/])[^\s`\"'<>|()]{1,190}[\w~]"
    r"(?<!\w\.\w)(?<!\w\.\w\w)(?<!\w\.\w{3})(?<!\w\.\w{4})(?![\w./\\-]*\w))"
)
"""Not /tmp itself, which is everybody's, and no file with an extension, which is an example."""
TEMP_NAMED = r"(?=[^\s`\"'<>|()]{0,150}(?:(?<![a-z])(?:te?mp|scratch(?:pad)?)(?![a-z])|/var/folders/))"
TO_PATH = r"(?:\*\*|[`\"'])?(?: is:?|:| ?=|\">|>)[\s*`\"'(]{0,4}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
ID = (
    rf"(?:[a-z]{{2,12}}[_-])?(?:{UUID}|[0-9a-f]{{12,64}}|[0-9A-HJKMNP-TV-Z]{{26}}"
    r"|(?=[a-z_-]{0,63}\d)[a-z0-9_-]{16,64})"
)
LABEL = r"^[-*#> \t]{0,6}(?:\d{1,2}[.)] )?(?:\*\*)?"

# Runs of lines as git and the agents print them: from a branch line to the last line that can be git's.
BRANCH_LINE = (
    rf"(?:{LABEL}(?:current |git |current git |active )?branch(?:\*\*)?:[^\n]{{1,200}}"
    r"|^## (?:[\w./-]{1,100}\.\.\.|HEAD )[^\n]{1,120})"
)
GIT_LINE = (
    r"(?:[ \t]*(?:"
    r"[-*#> \t]{0,6}(?:\*\*)?(?:current |main |default |base |git |remote |local |working tree )?"
    r"(?:branch|status|upstream|ahead|behind|remote|user|head|stash|changes|staged|unstaged|untracked|modified)"
    r"(?: files| changes)?(?:\*\*)?(?: \([^)\n]{1,80}\))?:[^\n]{0,200}"
    r"|[^\n:]{0,40}\bcommits?(?: \([^)\n]{1,40}\))?:(?: `?[0-9a-f]{7,40} [^\n]{1,200})?"
    r"|## (?:[\w./-]{1,100}\.\.\.|HEAD )[^\n]{1,120}"
    r"|(?:[-*] )?[0-9a-f]{7,40} [^\n]{0,200}"
    r"|(?:[-*] `)?[ MADRCUT?!]{1,2} [^\n]{1,200}"
    r"|\(clean\)|clean|```|nothing to commit[^\n]{0,80}|working tree clean|\.\.\. ?\(?truncated[^\n]{0,80}"
    r")[ \t]*$)"
)

DATES = ("00-0", "0/0", "0.0", " 0000", "0000?")
TIMES = ("0:00",)
WHEN = ("today", "now", "date", "day", "time", "start", "as of", "it is", "currently", "??")
PATHS = (" /", '"/', " ~", '"~', ":\\", ":/")
TEMPORARY = ("tmp", "temp", "scratch", "folders")
DIRECTORIES = ("director", "dir", "cwd", "pwd")
