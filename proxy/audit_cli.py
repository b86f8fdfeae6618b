"""`slotkeeper audit`: recorded requests, read offline; a table or JSON."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from llamacpp.gguf import read_header
from llamacpp.tokens import gguf_encoding, native_tokenizer
from proxy.errors import UsageError
from proxy.recorded import Recorded, Trace
from proxy.shown import clean, plain, print_json
from proxy.snapshots import AsJson

if TYPE_CHECKING:
    from proxy.audit import Encode

PATIENCE = 1.0
"""Seconds after which a progress bar is shown."""
SHOWN = 48
"""Characters of a text of the trace that are shown."""
UNCUT = 10_000
"""Columns of a pipe: more than any line has."""
PADDING = 2
"""Blanks that rich puts around a cell."""
LEAST_FIRST = 16
"""Columns that a table's first column keeps on a narrow terminal."""


def audit(
    trace: Annotated[Path, typer.Argument(help="recorded requests, one JSON object a line", metavar="TRACE.jsonl")],
    vocab: Annotated[Path | None, typer.Option(help="GGUF whose vocabulary counts the tokens", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what recorded requests cost. Bases, divergences and their causes, and the hit rate that repair gives."""
    from proxy.audit import CHARACTERS_PER_TOKEN, Audit  # half of the time that a command takes to start
    from proxy.audit_repair import Repair

    encode = _encoding(vocab)
    found = Trace(trace)
    with Repair() as repair:
        done = Audit(encode, repair.sent)
        for request in _with_progress(found):
            done.add(request)
    report = {
        "file": str(trace),
        "counted": str(vocab) if vocab else f"characters / {CHARACTERS_PER_TOKEN}",
        "skipped": found.skipped,
        **done.to_json(),
    }
    if not report["requests"]:
        raise UsageError(f"{trace} holds no answered model request: nothing to tell.")
    if as_json:
        return print_json(report)
    # In a pipe nothing is cut: whoever reads it has no margin.
    _print(Console(highlight=False, width=None if sys.stdout.isatty() else UNCUT), report)


def _encoding(vocab: Path | None) -> "Encode | None":
    """The tokeniser of a GGUF's vocabulary. Raises NotGGUF, UsageError."""
    if vocab is None:
        return None
    if not vocab.is_file():
        raise UsageError(f"{vocab} is not there, or no file: --vocab takes a GGUF model or vocabulary.")
    encode = gguf_encoding(read_header(vocab)) or native_tokenizer(vocab)
    if encode is None:
        raise UsageError(
            f"The vocabulary of {vocab} needs llama.cpp's own tokeniser: pip install 'slotkeeper[native]', or leave "
            "--vocab out for an estimate."
        )
    return encode


def _with_progress(trace: Trace) -> Iterator[Recorded]:
    """The requests; a bar on a terminal once they take longer than a second."""
    total, began = trace.n_bytes, time.monotonic()
    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=total, visible=False)
        for request in trace:
            yield request
            bar.update(task, completed=trace.n_read, visible=time.monotonic() - began > PATIENCE)


def _print(out: Console, report: dict[str, Any]) -> None:
    """The report for people."""
    skipped = f" ({_count(report['skipped'], 'other line')})" if report["skipped"] else ""
    out.print(
        plain(
            f"{_count(report['requests'], 'request')}{skipped} of {_count(report['conversations'], 'conversation')} on "
            f"{_count(report['n_bases'], 'base')}; tokens by {report['counted']}"
        )
    )
    _print_rates(out, report)
    _print_bases(out, report)
    _print_divergences(out, report)
    _print_parts(out, report)


def _print_rates(out: Console, report: dict[str, Any]) -> None:
    rows = []
    for name, rate in (("as it was", report["was"]), ("with repair", report["repaired"])):
        if rate is not None:
            numbers = (f"{rate[key]:,}" for key in ("prompt_tokens", "cached_tokens", "processed_tokens"))
            rows.append((name, *numbers, f"{100 * rate['hit_rate']:.1f} %" if rate["hit_rate"] is not None else "-"))
    _print_table(out, ("hit rate", "prompt tokens", "cached", "processed", "rate"), rows)


def _print_bases(out: Console, report: dict[str, Any]) -> None:
    rows = []
    for base in report["bases"]:
        numbers = (f"{base[key]:,}" for key in ("requests", "tokens", "characters", "tools"))
        rows.append((base["digest"][:12], *numbers, base["agent"] or "?"))
    _print_table(out, ("base", "requests", "tokens", "characters", "tools", "agent"), rows)


def _print_divergences(out: Console, report: dict[str, Any]) -> None:
    if not report["divergences"]:
        words = "No request departed from an earlier one: every history was only appended to."
        return out.print("", plain(words), sep="\n")
    out.print("", plain("divergences, the dearest first", "bold"), sep="\n")
    for place in report["divergences"]:
        is_message = place["message"] is not None and place["section"] != "tools"
        message = f"message {place['message']} ({place['role']}), " if is_message else ""
        where = f"{place['section']}, {message}{place['path']}, character {place['character']:,}"
        times = _count(place["times"], "time")
        out.print(
            plain(f"{place['lost_tokens']:,} tokens, {times}, first in line {place['lines'][0]}: {place['kind']}"),
            plain(f"  {where} (of the whole prompt {place['flat_character']:,})"),
            plain(f"  was ...{place['shared'][-SHOWN // 2 :]}") + plain(place["old"][:SHOWN], "red"),
            plain(f"  is  ...{place['shared'][-SHOWN // 2 :]}") + plain(place["new"][:SHOWN], "green"),
            plain(f"  avoid it: {place['advice']}"),
            sep="\n",
            soft_wrap=True,
        )


def _print_parts(out: Console, report: dict[str, Any]) -> None:
    rows = []
    for group in report["parts"]:
        sizes = (f"{group['characters'][key]:,}" for key in ("static", "semi-static", "volatile"))
        rows.append((group["group"], f"{group['requests']:,}", *sizes))
    _print_table(out, ("characters of bases", "requests", "static", "semi-static", "volatile"), rows)
    for group in report["parts"]:
        if group["changing"]:
            out.print("", plain(f"lines that change: {group['group'][:SHOWN]}", "bold"), sep="\n")
        for line in group["changing"]:
            texts = (clean(line[key].strip()[:SHOWN]) or "(nothing)" for key in ("old", "new"))
            times = _count(line["changes"], "time")
            out.print(plain(f"  {line['part']}, changed {times}: {' -> '.join(texts)}"), soft_wrap=True)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _print_table(out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column alone is cut, to what a narrow terminal leaves it: numbers are never."""
    taken = sum(max(map(len, column)) + PADDING for column in list(zip(heads, *rows, strict=True))[1:])
    first = Column(heads[0], overflow="ellipsis", no_wrap=True, max_width=max(LEAST_FIRST, out.width - taken - PADDING))
    table = Table(first, *(Column(name, justify="right", no_wrap=True) for name in heads[1:]), box=None)
    for row in rows:
        table.add_row(*map(plain, row))
    out.print("", table)
